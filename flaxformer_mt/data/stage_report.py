"""What the stages of training hold, for the reports of `prepare` and `show` and for the training log."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from flaxformer_mt.config import Config
from flaxformer_mt.data.batching import plan_epoch, plan_summary
from flaxformer_mt.data.buckets import make_training_shapes
from flaxformer_mt.data.curriculum import Position, make_curriculum
from flaxformer_mt.data.epoch_stores import EpochStores


def plan_stages(config: Config, stores: EpochStores) -> list[dict[str, Any]]:
    """Plan the first epoch of each stage, with one seed for all runs: a sweep over seeds compiles once.

    `updates` is exact for a stage that ends after steps. For one that ends after epochs it is computed from
    the first of them, and for one that lasts until training ends it is None. `from_update` is its first.
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
        rates = dataclasses.asdict(stage.noise)
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
                "noise": {kind: rate for kind, rate in rates.items() if rate and isinstance(rate, float)},
                "batches": plan_summary(plan, *lengths),
            }
        )
        start += updates or 0
    return described


def format_stages(stages: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for number, stage in enumerate(stages, start=1):
        mix = ", ".join(f"{part['share']:.1%} {part['name']}" for part in stage["mix"])
        noise = ", ".join(f"{kind} {rate:g}" for kind, rate in stage["noise"].items())
        lines.append(
            f"stage {number} of {len(stages)}, {stage['name']}: {mix}; {_format_length(stage)}"
            f"{f'; noise: {noise}' if noise else ''}"
        )
    return lines


def _format_length(stage: dict[str, Any]) -> str:
    if not stage["reached"]:
        return "not reached within train.steps"
    begin, updates, epochs = (stage[name] for name in ("from_update", "updates", "epochs"))
    if updates is None:
        return f"from about update {begin:,} to the end"
    if epochs is None:
        return f"{updates:,} updates from about update {begin:,}"
    passes = f"{epochs:,} epoch{'s' * (epochs != 1)} of {stage['epoch_of']}"
    return f"{passes}, about {updates:,} updates from about update {begin:,}"
