"""`TrainProgress`: the progress of a run, which checkpoints store so that training can resume."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.curriculum import Position
from flaxformer_mt.runs.checkpoint_index import rank_scores

# Keys of progress.json written by version 0.1 -> today's fields.
_RENAMED = {"without_gain": "evaluations_since_best"}


@dataclass
class TrainProgress:
    """The progress of a run: its position in the data, its training time, and its scores.

    `epoch`, `index` and the stage fields identify the next batch, see `Position`. `metrics` are the results
    of the evaluation at `step`, if there was one. `log` holds the sums for the next line of the training log.
    `interim` marks a checkpoint that was saved only because training was asked to stop. `texts` identify the
    text that was read, see `Pairs.name_texts`; earlier versions did not record it.
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
    best_loss: float | None = None
    evaluations_since_best: int = 0
    log: dict[str, Any] = field(default_factory=dict)
    interim: bool = False
    texts: dict[str, str] = field(default_factory=dict)

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.index, self.stage, self.stage_epoch, self.stage_batches)

    def advance(self, position: Position) -> None:
        self.step += 1
        self.epoch, self.index, self.stage, self.stage_epoch, self.stage_batches = position
        self.metrics = {}

    def record_evaluation(self, metrics: dict[str, float], *, best_metric: str) -> bool:
        """Record the metrics of an evaluation; return whether they are the best so far."""
        self.metrics = dict(metrics)
        rank = rank_scores(metrics, best_metric)
        best = rank_scores({"loss": self.best_loss, best_metric: self.best_value}, best_metric)
        # A non-finite value is never the best: no later value would compare as better.
        if rank is not None and (best is None or rank > best):
            self.best_value, self.best_loss = metrics[best_metric], metrics.get("loss")
            self.best_step, self.evaluations_since_best = self.step, 0
            return True
        self.evaluations_since_best += 1
        return False

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainProgress":
        """Invert `to_dict`; the dict may also come from a checkpoint of version 0.1."""
        return cls(**{_RENAMED.get(name, name): value for name, value in values.items()})


def has_ended(data: DataConfig, progress: TrainProgress) -> bool:
    """Return whether training has reached the end of its last stage; False without stages."""
    return 0 < len(data.stages) <= progress.stage
