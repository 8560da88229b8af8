"""The curriculum: the stages of training, the pairs of each epoch of a stage, and a report on the stages.

Each stage mixes several data sets and counts its epochs by one of them: an epoch of the stage is one pass
over this set. Each other set contributes pairs in proportion to its share, and in the next epoch of the stage
continues where it stopped.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.config import Config, DataConfig
from flaxformer_mt.config.stage_mixes import Stage, read_stages
from flaxformer_mt.corpus.pairs import Part
from flaxformer_mt.data.batching import plan_epoch, plan_summary
from flaxformer_mt.data.buckets import make_training_shapes
from flaxformer_mt.data.epoch_stores import EpochStores


class Position(NamedTuple):
    """The position of the next batch: batch `index` of `epoch`; epochs are numbered across all stages.

    stage_epoch, stage_batches: how many epochs and batches the stage had before this epoch; 0 without stages.
    """

    epoch: int
    index: int  # type: ignore[assignment]  # shadows tuple.index, which is unused
    stage: int = 0
    stage_epoch: int = 0
    stage_batches: int = 0


BEGINNING = Position(epoch=0, index=0)


class Curriculum:
    """The stages of training; all results are determined by the arguments, the set sizes and the seed.

    If the length of a stage is given in steps, a step has `accumulation` batches.
    """

    def __init__(
        self, stages: Sequence[Stage], parts: Sequence[Part], *, seed: int, accumulation: int = 1
    ) -> None:
        self.stages = tuple(stages)
        self._sizes = [part.size for part in parts]
        self._seed, self._accumulation = seed & 0xFFFF_FFFF_FFFF_FFFF, accumulation

    def is_over(self, place: Position) -> bool:
        return place.stage >= len(self.stages)

    def draw(self, place: Position) -> np.ndarray:
        """Return the numbers of an epoch's pairs, counted from 0 over all data sets, in arbitrary order."""
        stage, start = self.stages[place.stage], 0
        drawn = [np.zeros(0, np.int64)]
        for number, (size, share) in enumerate(zip(self._sizes, stage.shares, strict=True)):
            if share:
                rate = self._sizes[stage.counted] * (share / stage.shares[stage.counted])
                begin, end = (
                    math.floor(rate * epoch) for epoch in (place.stage_epoch, place.stage_epoch + 1)
                )
                drawn += [start + numbers for numbers in self._take(place.stage, number, begin, end)]
            start += size
        return np.concatenate(drawn)

    def _take(self, stage: int, number: int, begin: int, end: int) -> list[np.ndarray]:
        """Return pairs `begin` to `end` - 1 of the sequence of a stage's shuffled passes over one set."""
        size, passes = self._sizes[number], []
        while begin < end:
            turn, at = divmod(begin, size)
            stop = min(end - turn * size, size)
            passes.append(self._permute(stage, number, turn)[at:stop].astype(np.int64))
            begin = turn * size + stop
        return passes

    def _permute(self, stage: int, number: int, turn: int) -> np.ndarray:
        random, size = np.random.default_rng([self._seed, stage, number, turn]), self._sizes[number]
        return random.permutation(np.arange(size, dtype=np.int32 if size < 2**31 else np.int64))

    def batches_left(self, place: Position) -> int | None:
        """Return how many batches the stage has left when an epoch begins; None: no limit in steps."""
        steps = self.stages[place.stage].steps
        return None if steps is None else steps * self._accumulation - place.stage_batches

    def after(self, place: Position, batches: int) -> Position:
        """Return the position after an epoch that begins at `place` and has `batches` batches."""
        stage = self.stages[place.stage]
        place = Position(
            place.epoch + 1, 0, place.stage, place.stage_epoch + 1, place.stage_batches + batches
        )
        by_epochs = stage.epochs is not None and place.stage_epoch >= stage.epochs
        by_steps = stage.steps is not None and place.stage_batches >= stage.steps * self._accumulation
        return Position(place.epoch, 0, place.stage + 1) if by_epochs or by_steps else place


def make_curriculum(
    data: DataConfig, parts: Sequence[Part], *, seed: int, accumulation: int
) -> Curriculum | None:
    stages = read_stages(data)
    return Curriculum(stages, parts, seed=seed, accumulation=accumulation) if stages else None


def plan_stages(config: Config, stores: EpochStores) -> list[dict[str, Any]]:
    """Plan the first epoch of each stage, and describe each stage in a dict.

    The seed of the plan is the same for all runs, so that a sweep over seeds compiles its programs only once.
    `from_update` is the first step of a stage, and `updates` the number of its steps. The number is exact for
    a stage whose length is given in steps, an estimate from the first epoch for a stage whose length is given
    in epochs, and None for a stage that lasts until training ends.
    """
    base, accumulation = stores.base, config.optim.accumulation
    curriculum = make_curriculum(config.data, base.parts, seed=0, accumulation=accumulation)
    assert curriculum is not None, "the config has no stages"
    lengths = base.source_lengths, base.target_lengths
    shapes = make_training_shapes(*lengths, config=config.data, headroom=stores.varies)
    described, start = [], 1
    for number, stage in enumerate(curriculum.stages):
        drawn = curriculum.draw(Position(0, 0, number))
        plan = plan_epoch(*lengths, config=config.data, seed=0, epoch=0, shapes=shapes, drawn=drawn)
        updates = stage.steps
        if stage.epochs is not None:
            updates = -(-len(plan) * stage.epochs // accumulation)
        described.append(
            {
                "name": stage.name,
                "from_update": start,
                "updates": updates,
                "reached": start <= config.train.steps,
                "epochs": stage.epochs,
                "epoch_of": base.parts[stage.counted].name,
                "mix": [
                    {"name": part.name, "pairs": part.size, "share": round(share / sum(stage.shares), 4)}
                    for part, share in zip(base.parts, stage.shares, strict=True)
                    if share
                ],
                "noise": {kind: rate for kind, rate in dataclasses.asdict(stage.noise).items() if rate},
                "batches": plan_summary(plan, *lengths),
            }
        )
        start += updates or 0
    return described


def format_stages(stages: Sequence[dict[str, Any]]) -> list[str]:
    """Format the result of `plan_stages` as one line per stage."""
    lines = []
    for number, stage in enumerate(stages, start=1):
        mix = ", ".join(f"{part['share']:.1%} {part['name']}" for part in stage["mix"])
        noise = ", ".join(f"{kind} {rate:g}" for kind, rate in stage["noise"].items())
        length = "to the end" if stage["updates"] is None else f"for {stage['updates']:,} steps"
        when = f"from about step {stage['from_update']:,} {length}"
        if not stage["reached"]:
            when = "not reached within train.steps"
        line = f"stage {number} of {len(stages)}, {stage['name']}: {mix}, {when}"
        lines.append(f"{line}; noise: {noise}" if noise else line)
    return lines
