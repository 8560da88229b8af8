"""The training log: lines of mean loss, speed, padding and utilization, from sums of metrics and a clock."""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxformer_mt.config import Config, TrainConfig
from flaxformer_mt.data.batch_array import BatchArray
from flaxformer_mt.errors import UserError
from flaxformer_mt.flops import Work, peak_flops, real_work, training_flops
from flaxformer_mt.parallel import Parallel
from flaxformer_mt.parallel.processes import exchange, is_first, process_count
from flaxformer_mt.tracking import Tracker
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

    def add(self, metrics: StepMetrics, batches: list[BatchArray]) -> None:
        """Add an update: the only place that counts tokens, padding and shapes."""
        self._unread.append((metrics.loss_sum, metrics.weight, metrics.correct_sum, metrics.alignment))
        self._updates += 1
        for batch in batches:
            sides = batch.sides
            segments = [side.segments(np) for side in sides] if batch.packed else []
            self._work += real_work(*(side.mask for side in sides), *segments)
            rows, *lengths = batch.shape
            self._shapes.add((rows * self._parallel.row_factor, *lengths))

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


class DataWait:
    """Measures how long the devices were idle because the loop waited for its next batch.

    Dispatch is asynchronous: waiting for a batch costs nothing while the devices are busy with earlier
    updates. So a thread records when each update ends, and only the part of a wait after that counts.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start the thread; it ends when this object is deleted. `clock` tells the time in seconds."""
        self._clock = clock
        self._watcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="watch-updates")
        self._busy_until: Future[float] | None = None
        self._waits: list[tuple[float, float, Future[float] | None]] = []

    def add_update(self, result: Any) -> None:
        """Record the dispatch of an update; `result` is ready when the devices have finished it."""
        self._busy_until = self._watcher.submit(self._time_when_ready, result)

    def add_wait(self, start: float, end: float) -> None:
        """Record that the loop waited for a batch from `start` to `end`, after the newest update."""
        self._waits.append((start, end, self._busy_until))

    def take(self) -> Callable[[], float]:
        """Return a function that computes the idle seconds since the last call of `take` or `read`.

        The function waits for the updates before the last wait.
        """
        waits, self._waits = self._waits, []

        def idle_seconds() -> float:
            seconds = 0.0
            for start, end, busy_until in waits:
                idle_from = start if busy_until is None else max(start, busy_until.result())
                seconds += max(0.0, end - idle_from)
            return seconds

        return idle_seconds

    def read(self) -> float:
        """Return the idle seconds since the last call; wait for the updates before the last wait."""
        return self.take()()

    def end_of_newest(self) -> Callable[[], float]:
        """Return a function that waits for the update that is the newest now, and tells when it ended."""
        assert self._busy_until is not None
        return self._busy_until.result

    def _time_when_ready(self, result: Any) -> float:
        jax.block_until_ready(result)
        return self._clock()


class Span(NamedTuple):
    """The time of some updates, which the devices may still be computing.

    end: computes when the newest of them was finished. seconds, waited: what had been measured before. idle:
    computes the other seconds in which the devices waited for data.
    """

    end: Callable[[], float]
    seconds: float
    waited: float
    idle: Callable[[], float]


class TrainClock:
    """Times updates from the end of the one before to their own, without waiting for the newest."""

    def __init__(
        self, *, seconds: float = 0.0, waited: float = 0.0, clock: Callable[[], float] | None = None
    ) -> None:
        """Start the clock, with what had been measured since the last line of a run that is resumed.

        Args:
          clock: tells the time in seconds. None: the real one.
        """
        self._seconds, self._waited = seconds, waited
        self._clock = clock or time.monotonic
        self._data_wait = DataWait(self._clock)
        self._newest: Any = None
        self._timed_until = self._clock()

    def dispatch(self, result: Any) -> None:
        """Record the dispatch of an update, by one of its results."""
        self._newest = result
        self._data_wait.add_update(result)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure how long the loop waits for its next batch."""
        start = self._clock()
        yield
        self._data_wait.add_wait(start, self._clock())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock while something other than training runs; waits for the newest update first."""
        jax.block_until_ready(self._newest)
        now = self._clock()
        self._seconds += now - self._timed_until
        self._timed_until = now
        yield
        self._timed_until = self._clock()

    def to_dict(self) -> dict[str, float]:
        """Return what has been measured since the last line; wait for the newest update."""
        self._waited += self._data_wait.read()
        return {"seconds": self._seconds, "waited": self._waited}

    def close(self) -> Span:
        """End the span of a line; later updates belong to the next."""
        span = Span(self._data_wait.end_of_newest(), self._seconds, self._waited, self._data_wait.take())
        self._seconds = self._waited = 0.0
        return span

    def measure(self, span: Span) -> tuple[float, float]:
        """Return the seconds of a span, and those in which the devices waited; wait for its updates.

        Spans are measured in the order in which they were closed.
        """
        end = max(span.end(), self._timed_until)
        seconds = span.seconds + end - self._timed_until
        self._timed_until = end
        return max(seconds, 1e-9), span.waited + span.idle()


class _DueLine(NamedTuple):
    """A line that is due, and whose metrics the devices may still be computing.

    newest: the metrics of its last update. unread: those of updates that no earlier line has read. epoch: the
    number of epochs that have ended, in the line of an epoch; the line of updates has counts and a span
    instead.
    """

    step: int
    newest: StepMetrics
    unread: list[tuple[Any, ...]]
    epoch: int | None = None
    counts: Counts | None = None
    span: Span | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the devices have finished the updates of the line."""
        is_ready = getattr(self.newest.weight, "is_ready", None)
        return is_ready is None or is_ready()  # numbers of the host are ready


class TrainingLog:
    """Collects the metrics of updates, and logs them every `train.log_every` updates and after each epoch.

    A line is logged once its updates are finished, while the devices compute later ones: at the latest when
    the next line is due, or before a pause. So the host does not wait for the newest update, and the devices
    never wait for the host.
    """

    def __init__(
        self,
        tracker: Tracker,
        config: Config,
        *,
        parallel: Parallel,
        target_size: int,
        gathered: dict[str, Any] | None = None,
        target_tokens: int = 0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Start the clock, and that of the tracker.

        Args:
          tracker: records and shows the values.
          target_size: V, the size of the target vocabulary.
          gathered: the `to_dict` of the checkpoint from which training resumes; None: a new run.
          target_tokens: the number of target tokens trained on before that checkpoint.
          clock: the time, in seconds, that rates are measured by. None: the real one.
        """
        if not gathered or "work" not in gathered:  # older versions stored other sums: start from zero
            gathered = None
        times = {} if gathered is None else {name: gathered[name] for name in ("seconds", "waited")}
        self._sums = MetricSums(parallel, gathered=gathered, target_tokens=target_tokens)
        self._clock = TrainClock(**times, clock=clock)
        self._tracker, self._config = tracker, config
        self._parallel, self._target_size = parallel, target_size
        self._epoch = 0 if gathered is None else gathered["epoch"]
        self._newest: StepMetrics | None = None
        self._due: list[_DueLine] = []
        tracker.start_clock()

    @property
    def target_tokens(self) -> int:
        """Target tokens, without padding, of all updates read so far, on all devices."""
        return self._sums.target_tokens

    def to_dict(self) -> dict[str, Any]:
        """Return the sums since the last lines, as JSON values for a checkpoint; logs the lines that are due.

        With the sums, the first lines after resuming cover the same updates as in an uninterrupted run.
        """
        self._write_due()
        return {**self._sums.to_dict(), **self._clock.to_dict(), "epoch": self._epoch}

    def add(self, step: int, metrics: StepMetrics, batches: list[BatchArray], epoch: int) -> None:
        """Add update number `step`, and log the lines that are due and finished.

        Args:
          epoch: the epoch of the next batch, from 0. An update with microbatches of two epochs belongs to the
            first one and ends it.
        """
        self._newest = metrics
        self._clock.dispatch(metrics.weight)
        self._sums.add(metrics, batches)
        if step % self._config.train.log_every == 0 or step == self._config.train.steps:
            self._close_line(step)
        elif self._tracker.is_silent():
            jax.block_until_ready(metrics.weight)  # dispatch is asynchronous
            if process_count() == 1:
                self._write_due()  # lines of earlier updates come first
            self._tracker.show_step(step)
        if epoch > self._epoch:
            self._due.append(_DueLine(step, metrics, self._sums.take_unread(), epoch))
            self._epoch = epoch
        self._write_finished(step)

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Measure how long the loop waits for its next batch."""
        return self._clock.waiting()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Log the lines that are due, and stop the clock while something other than training runs."""
        self._write_due()
        with self._clock.paused():
            yield

    def flush(self, step: int) -> None:
        """Log all updates since the last line, if there are any."""
        self._close_line(step)
        self._write_due()

    def _close_line(self, step: int) -> None:
        """Make a line of the updates since the last one."""
        if self._newest is None or not self._sums.updates:
            return
        counts, span = self._sums.take_counts(), self._clock.close()
        self._due.append(_DueLine(step, self._newest, self._sums.take_unread(), counts=counts, span=span))

    def _write_finished(self, step: int) -> None:
        """Log the lines that are finished, and the lines of earlier updates once another line is due.

        Several processes log at the same updates, so that an error ends all of them together.
        """
        if self._due and self._due[-1].step == step:
            earlier = sum(line.step < step for line in self._due)
        else:
            earlier = 0
        alone = process_count() == 1
        while self._due and (earlier > 0 or alone and self._due[0].is_ready):
            self._write(self._due.pop(0))
            earlier -= 1

    def _write_due(self) -> None:
        """Log all lines that are due; waits for their updates."""
        while self._due:
            self._write(self._due.pop(0))

    def _write(self, line: _DueLine) -> None:
        self._sums.read(line.unread)
        if line.span is not None:
            self._write_updates(line)
            return
        totals, self._sums.epoch = self._sums.epoch, Totals()
        values = {
            "epoch": line.epoch,
            **totals.means(self._config.train),
            "target_tokens": int(totals.weight),
        }
        self._tracker.log(line.step, "epoch", values)

    def _write_updates(self, line: _DueLine) -> None:
        totals, self._sums.line = self._sums.line, Totals()
        rate = float(line.newest.learning_rate)
        values = {
            **totals.means(self._config.train),
            "learning_rate": rate,
            "gradient_norm": float(line.newest.gradient_norm),
            **self._describe_usage(line),
            "skipped": int(line.newest.skipped),
        }
        self._tracker.log(line.step, "train", values)
        in_a_row, limit = int(line.newest.skipped_in_a_row), self._config.train.max_nonfinite_steps
        if in_a_row >= limit:
            raise UserError(
                f"the last {in_a_row} updates up to step {line.step} had non-finite gradients "
                f"(train.max_nonfinite_steps is {limit}) at learning rate {rate:.3g}; lower "
                "optim.learning_rate or raise optim.warmup_steps. The saved checkpoints are not affected"
            )

    def _describe_usage(self, line: _DueLine) -> dict[str, float]:
        """Return token counts, speeds and shares of a line; values unknown for the devices are absent."""
        assert line.counts is not None and line.span is not None
        seconds, waited = self._clock.measure(line.span)
        work = line.counts.work
        rate = training_flops(self._config.model, work, target_size=self._target_size) / seconds
        values = {
            "source_tokens": work.source_tokens,
            "target_tokens": work.target_tokens,
            "tokens_per_second": work.target_tokens / seconds,
            "steps_per_second": line.counts.updates / seconds,
            "padding": work.padding,
            "data_wait": waited / seconds,
            "model_flops_per_second": rate,
        }
        peak, memory = peak_flops(self._config, self._parallel.device_kind), self._parallel.memory()
        if peak is not None:
            values["utilization"] = rate / (peak * self._parallel.device_count)
        if memory is not None:
            values["device_memory_gib"] = memory / 2**30
        return values | {"shapes": line.counts.shapes}
