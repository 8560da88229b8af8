"""The training log: each line has mean loss, speed, padding and utilization since the previous line."""

import contextlib
import dataclasses
import json
import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxformer_mt.config import TrainConfig
from flaxformer_mt.data.batch_array import BatchArray
from flaxformer_mt.errors import UserError
from flaxformer_mt.flops import Work, peak_flops, real_work, training_flops
from flaxformer_mt.parallel.processes import exchange, is_first, process_count
from flaxformer_mt.tracking import Tracker
from flaxformer_mt.training.setup import TrainingSetup
from flaxformer_mt.training.update import StepMetrics


class Totals(NamedTuple):
    """Sums over tokens, accumulated step by step in float64, so that a resumed run logs identical values."""

    loss_sum: float = 0.0
    weight: float = 0.0
    correct_sum: float = 0.0
    alignment_sum: float = 0.0
    aligned: float = 0.0

    def means(self, config: TrainConfig) -> dict[str, float]:
        """Return the means per token, nan without tokens; `alignment_loss` is a mean per aligned token."""
        weight = self.weight or math.nan
        accuracy = {"accuracy": self.correct_sum / weight} if config.log_accuracy else {}
        alignment = {"alignment_loss": self.alignment_sum / self.aligned} if self.aligned else {}
        return {"loss": self.loss_sum / weight, **accuracy, **alignment}


# Training ends after this many skipped updates in a row, whose gradients are not finite.
_MOST_SKIPPED = 20


class TrainingLog:
    """Sums the metrics of steps, and logs them every `train.log_every` steps and after each epoch.

    A step's metrics are read after the next step has been dispatched, so that the devices always have work.
    """

    def __init__(
        self,
        tracker: Tracker,
        setup: TrainingSetup,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the clocks of the log and the tracker; continue with the sums that the checkpoint stored."""
        self._tracker, self._config, self._clock = tracker, setup.config, clock
        self._parallel, self._target_size = setup.parallel, setup.prepared.vocabs.target.size
        progress = setup.progress
        # Target tokens, without padding, of all updates read so far, on all devices.
        self.target_tokens = progress.target_tokens
        stored = progress.log if "work" in progress.log else {}  # older versions stored other sums
        # Sums since the last line. Of several processes, each counts the work of its own rows.
        self._line, self._updates = Totals(**stored.get("line", {})), stored.get("updates", 0)
        self._work = Work(**stored.get("work", {})) if is_first() else Work()
        # Seconds of these updates, and those in which the devices waited for data.
        self._seconds, self._waited = stored.get("seconds", 0.0), stored.get("waited", 0.0)
        # Sums since the last epoch, and the shapes of all batches.
        self._epoch, self._epoch_totals = stored.get("epoch", 0), Totals(**stored.get("epoch_totals", {}))
        self._shapes = {tuple(shape) for shape in stored.get("shapes", ())}
        # The newest update, until it has been read, and the metrics of the last one that has.
        self._unread: tuple[int, StepMetrics, int, Future[float]] | None = None
        self._metrics: StepMetrics | None = None
        # Records when an update ends, also while the loop waits for a batch.
        self._watcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="watch-updates")
        # The end of the newest update that has been read, and the time up to which seconds are counted.
        self._ended = self._counted_until = clock()
        self._wait = self._ended, self._ended
        tracker.start_clock()

    def to_dict(self) -> dict[str, Any]:
        """Wait for the newest step; return the sums that are not logged yet, for a checkpoint."""
        self._read_newest()
        self._pool_work()
        return {
            "line": self._line._asdict(),
            "epoch_totals": self._epoch_totals._asdict(),
            "shapes": sorted(self._shapes),
            "work": dataclasses.asdict(self._work),
            "updates": self._updates,
            "seconds": self._seconds,
            "waited": self._waited,
            "epoch": self._epoch,
        }

    def add(self, step: int, metrics: StepMetrics, batches: Sequence[BatchArray], epoch: int) -> None:
        """Add a dispatched step; wait for the previous step, and log the lines that the latter completes.

        `epoch` is the epoch of the next batch. If a step has batches of two epochs, it belongs to the first
        of them and ends it.
        """
        ended = self._watcher.submit(self._time_when_ready, metrics.weight)
        self._read_newest()
        self._unread = step, metrics, epoch, ended
        start, end = self._wait
        self._waited += max(0.0, end - max(start, self._ended))
        self._updates += 1
        for batch in batches:
            segments = [side.segments(np) for side in batch.sides] if batch.packed else []
            self._work += real_work(*(side.mask for side in batch.sides), *segments)
            rows, *lengths = batch.shape
            self._shapes.add((rows * self._parallel.row_factor, *lengths))

    def _time_when_ready(self, result: Any) -> float:
        jax.block_until_ready(result)
        return self._clock()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure how long the body waits for batches, not counting time before the previous step's end."""
        start = self._clock()
        yield
        self._wait = start, self._clock()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Read the newest step's metrics, and stop the clock during the body, such as an evaluation."""
        self._read_newest()
        self._count_seconds()
        yield
        self._ended = self._counted_until = self._clock()

    def _count_seconds(self) -> None:
        end = max(self._ended, self._counted_until)  # the clock goes back by the time of a program compiled
        self._seconds += end - self._counted_until
        self._counted_until = end

    def flush(self, step: int) -> None:
        self._read_newest()
        if self._metrics is not None and self._updates:
            self._log_updates(step, self._metrics)

    def _read_newest(self) -> None:
        """Wait for the newest step, add it to the sums, and log the lines that it completes."""
        if self._unread is None:
            return
        (step, metrics, epoch, ended), self._unread = self._unread, None
        self._ended, self._metrics = ended.result(), metrics
        sums = jax.device_get([getattr(metrics, name) for name in Totals._fields])
        numbers = Totals(*map(float, sums))
        self.target_tokens += int(numbers.weight)
        self._line = Totals(*map(operator.add, self._line, numbers))
        if math.isfinite(numbers.loss_sum):  # so that one bad batch does not make the mean of its epoch nan
            self._epoch_totals = Totals(*map(operator.add, self._epoch_totals, numbers))
        if step % self._config.train.log_every == 0 or step == self._config.train.steps:
            self._log_updates(step, metrics)
        else:
            self._tracker.end_silence(step)
        if epoch > self._epoch:
            means = self._epoch_totals.means(self._config.train)
            values = {"epoch": epoch, **means, "target_tokens": int(self._epoch_totals.weight)}
            self._epoch, self._epoch_totals = epoch, Totals()
            self._tracker.log(step, "epoch", values)

    def _log_updates(self, step: int, metrics: StepMetrics) -> None:
        """Log the steps since the last line; raise UserError if too many steps in a row were skipped."""
        self._pool_work()
        self._count_seconds()
        rate = float(metrics.learning_rate)
        values = {
            **self._line.means(self._config.train),
            "learning_rate": rate,
            "gradient_norm": float(metrics.gradient_norm),
            **self._describe_usage(),
            "skipped": int(metrics.skipped),
        }
        self._line, self._work, self._updates = Totals(), Work(), 0
        self._seconds = self._waited = 0.0
        self._tracker.log(step, "train", values)
        if (in_a_row := int(metrics.skipped_in_a_row)) >= _MOST_SKIPPED:
            raise UserError(
                f"the last {in_a_row} steps up to step {step} had non-finite gradients at learning rate "
                f"{rate:.3g}; lower optim.learning_rate or raise optim.warmup_steps. The saved checkpoints "
                "are not affected"
            )

    def _pool_work(self) -> None:
        """Add up the work of all processes in process 0, since each process counts only its own rows."""
        if process_count() == 1:
            return
        local = self._work if self._parallel.counts_rows else Work()
        pooled = exchange(json.dumps(dataclasses.asdict(local)).encode())
        self._work = sum((Work(**json.loads(text)) for text in pooled), Work()) if is_first() else Work()

    def _describe_usage(self) -> dict[str, float]:
        """Return counts, speeds and shares for a log line, without values that devices do not report."""
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
        return values | {"shapes": len(self._shapes)}
