"""What is measured of the updates themselves while training: the running log.

Owns the arithmetic of speeds, shares and means, and turns them into what `tracking` shows. Knows nothing of
the order of things in the loop.
"""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from flaxformer_mt.config import Config, TrainConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.flops import Work, peak_flops, real_work, training_flops
from flaxformer_mt.parallel import Parallel
from flaxformer_mt.parallel.processes import exchange, is_first, process_count
from flaxformer_mt.shapes import Batch
from flaxformer_mt.tracking import Tracker
from flaxformer_mt.training.optimizers import Schedule
from flaxformer_mt.training.update import StepMetrics


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


class DataWait:
    """How long the devices had nothing to do because the loop waited for its next batch.

    The loop runs ahead of the devices, and its own waiting costs nothing while they are busy with updates
    from before. So a thread notes when each update ends, and of a wait counts what lies after that.
    """

    def __init__(self) -> None:
        """Starts the thread, which ends with this object."""
        self._watcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="watch-updates")
        self._busy_until: Future[float] | None = None
        self._waits: list[tuple[float, float, Future[float] | None]] = []

    def add_update(self, result: Any) -> None:
        """An update has been handed to the devices; `result` is there when they are done with it."""
        self._busy_until = self._watcher.submit(_time_when_ready, result)

    def add_wait(self, start: float, end: float) -> None:
        """The loop waited from `start` to `end`, with nothing for the devices after the newest update."""
        self._waits.append((start, end, self._busy_until))

    def read(self) -> float:
        """Seconds since the last time; waits for the updates before the last wait."""
        seconds = 0.0
        for start, end, busy_until in self._waits:
            idle = start if busy_until is None else max(start, busy_until.result())
            seconds += max(0.0, end - idle)
        self._waits.clear()
        return seconds


def _time_when_ready(result: Any) -> float:
    jax.block_until_ready(result)
    return time.monotonic()


class TrainingLog:
    """Gathers the metrics of updates on their devices; reads them every `train.log_every` and each epoch.

    Between two reads the host never waits for a step.
    """

    def __init__(
        self,
        tracker: Tracker,
        schedule: Schedule,
        config: Config,
        *,
        parallel: Parallel,
        target_size: int,
        gathered: dict[str, Any] | None = None,
        target_tokens: int = 0,
    ) -> None:
        """Starts the clock.

        Args:
          tracker: takes the lines.
          schedule: of the learning rate.
          config: of the run.
          parallel: the devices that it runs on.
          target_size: V, entries of the target vocabulary.
          gathered: the `to_dict` of the sitting that this one goes on from.
          target_tokens: that the sittings before have trained on.
        """
        # Real target tokens of all updates that have been read, on all devices.
        self.target_tokens = target_tokens
        self._tracker = tracker
        self._schedule = schedule
        self._config = config
        self._parallel = parallel
        self._target_size = target_size
        self._unread: list[tuple[Any, Any, Any]] = []
        self._line, self._epoch_totals = _Totals(), _Totals()
        self._shapes: set[tuple[int, ...]] = set()
        self._newest: StepMetrics | None = None
        self._work = Work()
        self._data_wait = DataWait()
        self._epoch = self._updates = 0
        self._seconds = self._waited = 0.0
        if gathered and "work" in gathered:  # else it is from a version that counted otherwise: begin anew
            self._line, self._epoch_totals = (_Totals(**gathered[name]) for name in ("line", "epoch_totals"))
            self._shapes.update(tuple(shape) for shape in gathered["shapes"])
            self._work = Work(**gathered["work"]) if is_first() else Work()  # it is that of all processes
            self._epoch, self._updates = gathered["epoch"], gathered["updates"]
            self._seconds, self._waited = gathered["seconds"], gathered["waited"]
        self._then = time.monotonic()

    def to_dict(self) -> dict[str, Any]:
        """What has been gathered since the last lines, as JSON values, for a checkpoint.

        So the first lines after a resume are over the same updates as they would have been without the stop.
        Waits for the newest step.
        """
        self._read()
        self._pool_work()
        return {
            "line": dataclasses.asdict(self._line),
            "epoch_totals": dataclasses.asdict(self._epoch_totals),
            "epoch": self._epoch,
            "shapes": sorted(self._shapes),
            "work": dataclasses.asdict(self._work),
            "updates": self._updates,
            "seconds": self._seconds,
            "waited": self._waited,
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
        self._data_wait.add_update(metrics.weight)
        self._updates += 1
        for batch in batches:
            self._count(batch)
        if step % self._config.train.log_every == 0 or step == self._config.train.steps:
            self.flush(step)
        if epoch > self._epoch:
            self._end_epoch(step, epoch)

    def _count(self, batch: Batch) -> None:
        """Takes in what a batch holds: the one place where real tokens and padding are counted."""
        self._work += real_work(
            batch.source_mask, batch.target_mask, batch.source_segments, batch.target_segments
        )
        rows, source_length = batch.source.shape
        self._shapes.add((rows * self._parallel.row_factor, source_length, batch.target_in.shape[1]))

    def _pool_work(self) -> None:
        """Gives the first process what all have counted: each has seen its own rows of the batches."""
        if process_count() == 1:
            return
        own = self._work if self._parallel.counts_rows else Work()
        pooled = exchange(json.dumps(dataclasses.asdict(own)).encode())
        self._work = sum((Work(**json.loads(text)) for text in pooled), Work()) if is_first() else Work()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Measures how long the loop waits for its next batch."""
        start = time.monotonic()
        yield
        self._data_wait.add_wait(start, time.monotonic())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock while something other than training runs, such as validation."""
        self._add_time()
        yield
        self._then = time.monotonic()

    def _add_time(self) -> None:
        """Adds the time since the clock was last read; waits for the newest update."""
        if self._newest is not None:
            jax.block_until_ready(self._newest.weight)
        now = time.monotonic()
        self._seconds += now - self._then
        self._then = now

    def flush(self, step: int) -> None:
        """Logs what has been gathered since the last time, if anything."""
        if self._newest is None or not self._updates:
            return
        self._read()  # waits for the newest step
        self._pool_work()
        self._add_time()
        skipped = int(self._newest.skipped)
        rate = float(self._schedule(max(0, step - 1 - skipped)))  # updates left out do not move the schedule
        self._tracker.log(
            step,
            "train",
            {
                **self._line.means(self._config.train),
                "learning_rate": rate,
                "gradient_norm": float(self._newest.gradient_norm),
                **self._usage(),
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
        self._line, self._work = _Totals(), Work()
        self._updates = 0
        self._seconds = self._waited = 0.0

    def _usage(self) -> dict[str, float]:
        """Tokens, speeds and shares of a line; what is not known of the devices is absent."""
        seconds, work = max(self._seconds, 1e-9), self._work
        rate = training_flops(self._config.model, work, target_size=self._target_size) / seconds
        values = {
            "source_tokens": work.source_tokens,
            "target_tokens": work.target_tokens,
            "tokens_per_second": work.target_tokens / seconds,
            "steps_per_second": self._updates / seconds,
            "padding": work.padding,
            "data_wait": self._waited / seconds,
            "model_flops_per_second": rate,
        }
        peak, memory = peak_flops(self._config, self._parallel.device_kind), self._parallel.memory()
        if peak is not None:
            values["utilization"] = rate / (peak * self._parallel.device_count)
        if memory is not None:
            values["device_memory_gib"] = memory / 2**30
        return values

    def _read(self) -> None:
        """Adds up what updates have reported since the last time; waits for the newest."""
        self._waited += self._data_wait.read()
        for loss_sum, weight, correct_sum in jax.device_get(self._unread):
            numbers = float(loss_sum), float(weight), float(correct_sum or 0)
            self._line.add(*numbers)
            self.target_tokens += int(numbers[1])
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
