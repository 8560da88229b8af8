"""Sums of the metrics of updates: since the last line of the log, and since the last epoch."""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from flaxformer_mt.config import TrainConfig
from flaxformer_mt.flops import Work, real_work
from flaxformer_mt.parallel import Parallel
from flaxformer_mt.parallel.processes import exchange, is_first, process_count
from flaxformer_mt.shapes import Batch
from flaxformer_mt.training.update import StepMetrics


@dataclass
class Totals:
    """Sums over the tokens of some updates: losses, and numbers of tokens, of correct and of aligned ones.

    The sums are float64 and add one update at a time, so that resuming changes no bit of them.
    """

    loss_sum: float = 0.0
    weight: float = 0.0
    correct_sum: float = 0.0
    alignment_sum: float = 0.0
    aligned: float = 0.0

    def add(self, *numbers: float) -> None:
        """Add the numbers of one update, in the order of the fields."""
        for field, number in zip(dataclasses.fields(self), numbers, strict=True):
            setattr(self, field.name, getattr(self, field.name) + number)

    def means(self, config: TrainConfig) -> dict[str, float]:
        """Return the mean loss per token, and with `log_accuracy` the share of correct tokens.

        They are nan without tokens. With guided alignment there is also the mean loss of alignments per
        aligned token, which is no part of `loss`.
        """
        weight = self.weight or math.nan
        accuracy = {"accuracy": self.correct_sum / weight} if config.log_accuracy else {}
        alignment = {"alignment_loss": self.alignment_sum / self.aligned} if self.aligned else {}
        return {"loss": self.loss_sum / weight, **accuracy, **alignment}


class Counts(NamedTuple):
    """Counts of the updates since the last line: known when they are dispatched."""

    updates: int = 0
    work: Work = Work()
    shapes: int = 0


class MetricSums:
    """Sums of metrics that stay on the devices until they are read, and counts of batches."""

    def __init__(
        self, parallel: Parallel, *, gathered: dict[str, Any] | None = None, target_tokens: int = 0
    ) -> None:
        """Begin at zero, or with the `to_dict` of a run that is resumed.

        Args:
          target_tokens: the number of target tokens trained on before.
        """
        # Target tokens, without padding, of all updates read so far, on all devices.
        self.target_tokens = target_tokens
        self.line, self.epoch = Totals(), Totals()
        self._parallel = parallel
        self._unread: list[tuple[Any, ...]] = []
        self._shapes: set[tuple[int, ...]] = set()
        self._work, self._updates = Work(), 0
        if gathered:
            self.line, self.epoch = (Totals(**gathered[name]) for name in ("line", "epoch_totals"))
            self._shapes.update(tuple(shape) for shape in gathered["shapes"])
            self._work = Work(**gathered["work"]) if is_first() else Work()  # the sum over all processes
            self._updates = gathered["updates"]

    def add(self, metrics: StepMetrics, batches: list[Batch]) -> None:
        """Add an update: the only place that counts tokens, padding and shapes."""
        self._unread.append((metrics.loss_sum, metrics.weight, metrics.correct_sum, metrics.alignment))
        self._updates += 1
        for batch in batches:
            self._work += real_work(
                batch.source_mask, batch.target_mask, batch.source_segments, batch.target_segments
            )
            rows, source_length = batch.source.shape
            self._shapes.add((rows * self._parallel.row_factor, source_length, batch.target_in.shape[1]))

    def take_unread(self) -> list[tuple[Any, ...]]:
        """Return the metrics that no line has read, for `read`; later updates belong to the next line."""
        unread, self._unread = self._unread, []
        return unread

    def read(self, unread: list[tuple[Any, ...]]) -> None:
        """Add the metrics of updates to the sums; waits for these updates."""
        for loss_sum, weight, correct_sum, alignment in jax.device_get(unread):
            aligned = (0.0, 0.0) if alignment is None else tuple(map(float, alignment))
            numbers = (float(loss_sum), float(weight), float(correct_sum or 0), *aligned)
            self.line.add(*numbers)
            self.target_tokens += int(numbers[1])
            if math.isfinite(numbers[0]):  # so that one bad batch does not make the mean of its epoch nan
                self.epoch.add(*numbers)

    def take_counts(self) -> Counts:
        """Return the counts since the last line, of all processes in the first one."""
        self._pool_work()
        counts = Counts(self._updates, self._work, len(self._shapes))
        self._work, self._updates = Work(), 0
        return counts

    @property
    def updates(self) -> int:
        """The number of updates since the last line."""
        return self._updates

    def _pool_work(self) -> None:
        """Sum the counts of all processes in the first one, since each process counts its own rows only."""
        if process_count() == 1:
            return
        own = self._work if self._parallel.counts_rows else Work()
        pooled = exchange(json.dumps(dataclasses.asdict(own)).encode())
        self._work = sum((Work(**json.loads(text)) for text in pooled), Work()) if is_first() else Work()

    def to_dict(self) -> dict[str, Any]:
        """Return all sums as JSON values for a checkpoint; waits for the newest update."""
        self.read(self.take_unread())
        self._pool_work()
        return {
            "line": dataclasses.asdict(self.line),
            "epoch_totals": dataclasses.asdict(self.epoch),
            "shapes": sorted(self._shapes),
            "work": dataclasses.asdict(self._work),
            "updates": self._updates,
        }
