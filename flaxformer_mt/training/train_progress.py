"""How far a run is: what a checkpoint remembers beside the arrays, so that resuming is exact.

Owns the best score so far and the patience left. Plain values that go to JSON and back.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from flaxformer_mt.data.loader import Position


@dataclass
class Progress:
    """The place in the data, the clock, and the scores.

    epoch and index are the next batch; metrics are those of the evaluation at `step` if there was one, and
    without_gain counts the evaluations since the best; log is what the next line of the training log has
    gathered so far; interim says that only a request to stop called for the checkpoint.
    """

    step: int = 0
    epoch: int = 0
    index: int = 0
    train_seconds: float = 0.0
    target_tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    best_value: float | None = None
    best_step: int | None = None
    without_gain: int = 0
    log: dict[str, Any] = field(default_factory=dict)
    interim: bool = False

    @property
    def position(self) -> Position:
        """The next batch."""
        return Position(self.epoch, self.index)

    def move(self, position: Position) -> None:
        """One update further; `position` is the batch that comes next."""
        self.step += 1
        self.epoch, self.index = position
        self.metrics = {}

    def note(self, metrics: dict[str, float], *, best_metric: str) -> bool:
        """Takes in an evaluation; True if it is the best so far."""
        self.metrics = dict(metrics)
        value, best = metrics[best_metric], self.best_value
        sign = -1 if best_metric == "loss" else 1
        # What is not finite is no score: were it ever the best, nothing could be seen to beat it.
        if math.isfinite(value) and (best is None or sign * value > sign * best):
            self.best_value, self.best_step, self.without_gain = value, self.step, 0
            return True
        self.without_gain += 1
        return False

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Progress":
        """The inverse of `to_dict`."""
        return cls(**values)
