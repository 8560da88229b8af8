"""The progress of a run: the plain values that a checkpoint stores beside the arrays for an exact resume.

Contains the position in the data, the best score so far, and the evaluations since.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.position import Position

# Keys of progress.json written by version 0.1 -> today's fields.
_RENAMED = {"without_gain": "evaluations_since_best"}


@dataclass
class TrainProgress:
    """The position in the data, the clock, and the scores of a run.

    `epoch`, `index` and the fields of the stage name the next batch, see `Position`. `metrics` are those of
    the evaluation at `step`, if there was one. `log` is what the next line of the training log has
    accumulated so far. `interim` marks a checkpoint that was saved only because training was asked to stop.
    """

    step: int = 0
    epoch: int = 0
    index: int = 0
    stage: int = 0
    stage_epoch: int = 0
    stage_batches: int = 0
    train_seconds: float = 0.0
    target_tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    best_value: float | None = None
    best_step: int | None = None
    evaluations_since_best: int = 0
    log: dict[str, Any] = field(default_factory=dict)
    interim: bool = False

    @property
    def position(self) -> Position:
        """The next batch."""
        return Position(self.epoch, self.index, self.stage, self.stage_epoch, self.stage_batches)

    def advance(self, position: Position) -> None:
        """Record one update; `position` is the next batch."""
        self.step += 1
        self.epoch, self.index, self.stage, self.stage_epoch, self.stage_batches = position
        self.metrics = {}

    def record_evaluation(self, metrics: dict[str, float], *, best_metric: str) -> bool:
        """Record an evaluation; return True if it is the best so far."""
        self.metrics = dict(metrics)
        value, best = metrics[best_metric], self.best_value
        sign = -1 if best_metric == "loss" else 1
        # A non-finite value is never the best: no later value would compare as better.
        if math.isfinite(value) and (best is None or sign * value > sign * best):
            self.best_value, self.best_step, self.evaluations_since_best = value, self.step, 0
            return True
        self.evaluations_since_best += 1
        return False

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainProgress":
        """Return the inverse of `to_dict`; read checkpoints of version 0.1 too."""
        return cls(**{_RENAMED.get(name, name): value for name, value in values.items()})


def has_ended(data: DataConfig, progress: TrainProgress) -> bool:
    """Return whether the last of the stages has ended, which ends training; False without stages."""
    return 0 < len(data.stages) <= progress.stage
