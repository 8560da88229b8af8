"""What is measured of the updates themselves while training: the running log.

Owns the arithmetic of speeds, shares and means, and turns them into what `tracking` shows. Knows nothing of
the order of things in the loop.
"""

import dataclasses
import math
import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from flaxformer_mt.config import Config, TrainConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.optim import Schedule
from flaxformer_mt.shapes import Batch
from flaxformer_mt.steps import StepMetrics
from flaxformer_mt.tracking import Tracker


@dataclass
class _Totals:
    """Loss and right predictions of updates, in float64, one after the other: a stop changes no bit."""

    loss_sum: float = 0.0
    weight: float = 0.0
    correct_sum: float = 0.0

    def add(self, loss_sum: float, weight: float, correct_sum: float) -> None:
        self.loss_sum += loss_sum
        self.weight += weight
        self.correct_sum += correct_sum

    def means(self, config: TrainConfig) -> dict[str, float]:
        """What a token of them cost, and with `log_accuracy` the share that was right; nan of nothing."""
        weight = self.weight or math.nan
        accuracy = {"accuracy": self.correct_sum / weight} if config.log_accuracy else {}
        return {"loss": self.loss_sum / weight, **accuracy}


class TrainingLog:
    """Gathers the metrics of updates on their devices; reads them every `train.log_every` and each epoch.

    Between two reads the host never waits for a step.
    """

    def __init__(
        self, tracker: Tracker, schedule: Schedule, config: Config, gathered: dict[str, Any] | None = None
    ) -> None:
        """Starts the clock; `gathered` is the `to_dict` of the sitting that this one goes on from."""
        self._tracker = tracker
        self._schedule = schedule
        self._config = config
        self._unread: list[tuple[Any, Any, Any]] = []
        self._line, self._epoch_totals = _Totals(), _Totals()
        self._shapes: set[tuple[int, ...]] = set()
        self._newest: StepMetrics | None = None
        self._epoch = self._real = self._slots = self._updates = 0
        self._seconds = 0.0
        if gathered:
            self._line, self._epoch_totals = (_Totals(**gathered[name]) for name in ("line", "epoch_totals"))
            self._shapes.update(tuple(shape) for shape in gathered["shapes"])
            self._epoch, self._real, self._slots = (gathered[name] for name in ("epoch", "real", "slots"))
            self._updates, self._seconds = gathered["updates"], gathered["seconds"]
        self._then = time.monotonic()

    def to_dict(self) -> dict[str, Any]:
        """What has been gathered since the last lines, as JSON values, for a checkpoint.

        So the first lines after a resume are over the same updates as they would have been without the stop.
        Waits for the newest step.
        """
        self._read()
        return {
            "line": dataclasses.asdict(self._line),
            "epoch_totals": dataclasses.asdict(self._epoch_totals),
            "epoch": self._epoch,
            "shapes": sorted(self._shapes),
            "real": self._real,
            "slots": self._slots,
            "updates": self._updates,
            "seconds": self._seconds,
        }

    def add(self, step: int, metrics: StepMetrics, batches: list[Batch], epoch: int) -> None:
        """Takes in update number `step`; logs when a line is due, or the epoch's.

        Args:
          epoch: of the batch that comes next, from 0. An update whose microbatches are of two epochs counts
            as the end of the first.

        Raises:
          UserError: the last train.max_nonfinite_steps updates all had to be skipped.
        """
        self._unread.append((metrics.loss_sum, metrics.weight, metrics.correct_sum))
        self._newest = metrics
        self._updates += 1
        for batch in batches:
            self._real += int(np.count_nonzero(batch.target_mask))
            self._slots += batch.target_mask.size
            self._shapes.add((*batch.source.shape, batch.target_in.shape[1]))
        if step % self._config.train.log_every == 0 or step == self._config.train.steps:
            self.flush(step)
        if epoch > self._epoch:
            self._end_epoch(step, epoch)

    def pause(self) -> None:
        """Stops the clock: what follows is no training."""
        if self._newest is not None:
            jax.block_until_ready(self._newest.weight)
        self._seconds += time.monotonic() - self._then

    def go_on(self) -> None:
        """Starts the clock again."""
        self._then = time.monotonic()

    def flush(self, step: int) -> None:
        """Logs what has been gathered since the last time, if anything."""
        if self._newest is None or not self._updates:
            return
        self._read()  # waits for the newest step
        self.pause()
        self.go_on()
        skipped = int(self._newest.skipped)
        rate = float(self._schedule(max(0, step - 1 - skipped)))  # updates left out do not move the schedule
        self._tracker.log(
            step,
            "train",
            {
                **self._line.means(self._config.train),
                "learning_rate": rate,
                "gradient_norm": float(self._newest.gradient_norm),
                "tokens_per_second": self._real / max(self._seconds, 1e-9),
                "steps_per_second": self._updates / max(self._seconds, 1e-9),
                "padding": 1 - self._real / self._slots,
                "shapes": len(self._shapes),
                "skipped": skipped,
            },
        )
        in_a_row, limit = int(self._newest.skipped_in_a_row), self._config.train.max_nonfinite_steps
        if in_a_row >= limit:
            raise UserError(
                f"the last {in_a_row} updates up to step {step} had gradients that are not finite "
                f"(train.max_nonfinite_steps is {limit}); the learning rate is {rate:.3g}: lower "
                "optim.learning_rate or lengthen optim.warmup_steps. The checkpoints before are good"
            )
        self._line = _Totals()
        self._real = self._slots = self._updates = 0
        self._seconds = 0.0

    def _read(self) -> None:
        """Adds up what updates have reported since the last time; waits for the newest."""
        for loss_sum, weight, correct_sum in jax.device_get(self._unread):
            numbers = float(loss_sum), float(weight), float(correct_sum or 0)
            self._line.add(*numbers)
            if math.isfinite(numbers[0]):  # one bad batch does not void the mean of an epoch
                self._epoch_totals.add(*numbers)
        self._unread.clear()

    def _end_epoch(self, step: int, epoch: int) -> None:
        """Logs the means over the epoch that has just ended: the last of them if several ended at once."""
        self._read()
        totals = self._epoch_totals
        values = {"epoch": epoch, **totals.means(self._config.train), "target_tokens": int(totals.weight)}
        self._tracker.log(step, "epoch", values)
        self._epoch, self._epoch_totals = epoch, _Totals()
