"""The training log: mean loss, speed, padding and utilization of the updates between two log lines.

Computes the values from the metrics of updates; `tracking` records and shows them, and `training/loop.py`
calls both.
"""

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
    """Sums over the tokens of some updates: losses, and numbers of tokens, of correct and of aligned ones.

    The sums are float64 and add one update at a time, so that resuming changes no bit of them.
    """

    loss_sum: float = 0.0
    weight: float = 0.0
    correct_sum: float = 0.0
    alignment_sum: float = 0.0
    aligned: float = 0.0

    def add(self, *numbers: float) -> None:
        for field, number in zip(dataclasses.fields(self), numbers, strict=True):
            setattr(self, field.name, getattr(self, field.name) + number)

    def means(self, config: TrainConfig) -> dict[str, float]:
        """Mean loss per token, and with `log_accuracy` the share of correct tokens; nan without tokens.

        With guided alignment also the mean loss of alignments per aligned token, which is no part of `loss`.
        """
        weight = self.weight or math.nan
        accuracy = {"accuracy": self.correct_sum / weight} if config.log_accuracy else {}
        alignment = {"alignment_loss": self.alignment_sum / self.aligned} if self.aligned else {}
        return {"loss": self.loss_sum / weight, **accuracy, **alignment}


class DataWait:
    """Measures how long the devices were idle because the loop waited for its next batch.

    The loop runs ahead of the devices: waiting for a batch costs nothing while the devices are busy with
    earlier updates. So a thread records when each update ends, and only the part of a wait after that counts.
    """

    def __init__(self) -> None:
        """Starts the thread; it ends when this object is deleted."""
        self._watcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="watch-updates")
        self._busy_until: Future[float] | None = None
        self._waits: list[tuple[float, float, Future[float] | None]] = []

    def add_update(self, result: Any) -> None:
        """Records the dispatch of an update; `result` is ready when the devices have finished it."""
        self._busy_until = self._watcher.submit(_time_when_ready, result)

    def add_wait(self, start: float, end: float) -> None:
        """Records that the loop waited for a batch from `start` to `end`, after the newest update."""
        self._waits.append((start, end, self._busy_until))

    def take(self) -> Callable[[], float]:
        """Returns a function that computes the idle seconds since the last call of `take` or `read`.

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
        """Returns the idle seconds since the last call; waits for the updates before the last wait."""
        return self.take()()

    def end_of_newest(self) -> Callable[[], float]:
        """Returns a function that waits for the update that is the newest now, and tells when it ended."""
        assert self._busy_until is not None
        return self._busy_until.result


class _DueLine(NamedTuple):
    """A line of the log that is due, and whose metrics the devices may still be computing.

    unread: the metrics of updates that no earlier line has read. end: computes when the newest of them was
    finished. epoch: the number of epochs that have ended, in the line of an epoch; None in that of updates.
    The other fields are counts of the updates since the last line.
    """

    step: int
    epoch: int | None
    newest: StepMetrics
    unread: list[tuple[Any, Any, Any, Any]]
    end: Callable[[], float]
    idle: Callable[[], float]
    updates: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    work: Work = Work()
    shapes: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether the devices have finished the updates of the line."""
        is_ready = getattr(self.newest.weight, "is_ready", None)
        return is_ready is None or is_ready()  # numbers of the host are ready


def _time_when_ready(result: Any) -> float:
    jax.block_until_ready(result)
    return time.monotonic()


class TrainingLog:
    """Collects the metrics of updates, and logs them every `train.log_every` updates and after each epoch.

    The metrics stay on the devices until they are logged. A line is logged once its updates are finished,
    while the devices compute later ones: at the latest when the next line is due, or before a pause. So the
    host does not wait for the newest update, and the devices never wait for the host.
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
        """Starts the clock, and that of the tracker.

        Args:
          tracker: records and shows the values.
          schedule: the learning-rate schedule.
          config: the config of the run.
          parallel: the devices of the run.
          target_size: V, the size of the target vocabulary.
          gathered: the `to_dict` of the checkpoint from which training resumes; None: a new run.
          target_tokens: the number of target tokens trained on before that checkpoint.
        """
        # Target tokens, without padding, of all updates read so far, on all devices.
        self.target_tokens = target_tokens
        self._tracker = tracker
        self._schedule = schedule
        self._config = config
        self._parallel = parallel
        self._target_size = target_size
        self._unread: list[tuple[Any, Any, Any, Any]] = []
        self._line, self._epoch_totals = _Totals(), _Totals()
        self._shapes: set[tuple[int, ...]] = set()
        self._newest: StepMetrics | None = None
        self._due: list[_DueLine] = []
        self._work = Work()
        self._data_wait = DataWait()
        self._epoch = self._updates = 0
        self._seconds = self._waited = 0.0
        if gathered and "work" in gathered:  # older versions stored other sums: start from zero
            self._line, self._epoch_totals = (_Totals(**gathered[name]) for name in ("line", "epoch_totals"))
            self._shapes.update(tuple(shape) for shape in gathered["shapes"])
            self._work = Work(**gathered["work"]) if is_first() else Work()  # the sum over all processes
            self._epoch, self._updates = gathered["epoch"], gathered["updates"]
            self._seconds, self._waited = gathered["seconds"], gathered["waited"]
        self._timed_until = time.monotonic()
        tracker.start_clock()

    def to_dict(self) -> dict[str, Any]:
        """The sums since the last log lines, as JSON values for a checkpoint; waits for the newest update.

        Logs the lines that are due. With the sums, the first lines after resuming cover the same updates as
        in an uninterrupted run.
        """
        self._write_due()
        self._read(self._unread)
        self._unread = []
        self._waited += self._data_wait.read()
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
        """Adds update number `step`, and logs the lines that are due and finished.

        Args:
          epoch: the epoch of the next batch, from 0. An update with microbatches of two epochs belongs to the
            first one and ends it.

        Raises:
          UserError: train.max_nonfinite_steps updates were all skipped, up to one of the lines.
        """
        self._unread.append((metrics.loss_sum, metrics.weight, metrics.correct_sum, metrics.alignment))
        self._newest = metrics
        self._data_wait.add_update(metrics.weight)
        self._updates += 1
        for batch in batches:
            self._count(batch)
        if step % self._config.train.log_every == 0 or step == self._config.train.steps:
            self._close_line(step)
        elif self._tracker.is_silent():
            jax.block_until_ready(metrics.weight)  # the loop runs ahead of the devices
            self._tracker.show_step(step)
        if epoch > self._epoch:
            self._due.append(self._make_due(step, epoch))
            self._epoch = epoch
        self._write_finished(step)

    def _count(self, batch: Batch) -> None:
        """Adds a batch's tokens, padding and shape: the only place that counts tokens and padding."""
        self._work += real_work(
            batch.source_mask, batch.target_mask, batch.source_segments, batch.target_segments
        )
        rows, source_length = batch.source.shape
        self._shapes.add((rows * self._parallel.row_factor, source_length, batch.target_in.shape[1]))

    def _pool_work(self) -> None:
        """Sums the counts of all processes in the first one, since each process counts its own rows only."""
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
        """Stops the clock while something other than training runs, such as validation.

        Logs the lines that are due first.
        """
        self._write_due()
        self._add_time()
        yield
        self._timed_until = time.monotonic()

    def _add_time(self) -> None:
        """Adds the time since the clock was last read; waits for the newest update."""
        if self._newest is not None:
            jax.block_until_ready(self._newest.weight)
        now = time.monotonic()
        self._seconds += now - self._timed_until
        self._timed_until = now

    def flush(self, step: int) -> None:
        """Logs all updates since the last line, if there are any."""
        self._close_line(step)
        self._write_due()

    def _close_line(self, step: int) -> None:
        """Makes a line of the updates since the last one; later updates belong to the next."""
        if self._newest is None or not self._updates:
            return
        self._pool_work()
        due = self._make_due(step, None)
        self._due.append(
            due._replace(
                updates=self._updates,
                seconds=self._seconds,
                waited=self._waited,
                work=self._work,
                shapes=len(self._shapes),
                idle=self._data_wait.take(),
            )
        )
        self._work, self._updates = Work(), 0
        self._seconds = self._waited = 0.0

    def _make_due(self, step: int, epoch: int | None) -> _DueLine:
        assert self._newest is not None
        unread, self._unread = self._unread, []
        return _DueLine(step, epoch, self._newest, unread, self._data_wait.end_of_newest(), idle=lambda: 0.0)

    def _write_finished(self, step: int) -> None:
        """Logs the lines that are finished, and the lines of earlier updates once another line is due.

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
        """Logs all lines that are due; waits for their updates."""
        while self._due:
            self._write(self._due.pop(0))

    def _write(self, line: _DueLine) -> None:
        self._read(line.unread)
        if line.epoch is None:
            self._write_updates(line)
            return
        totals, self._epoch_totals = self._epoch_totals, _Totals()
        values = {
            "epoch": line.epoch,
            **totals.means(self._config.train),
            "target_tokens": int(totals.weight),
        }
        self._tracker.log(line.step, "epoch", values)

    def _write_updates(self, line: _DueLine) -> None:
        end = max(line.end(), self._timed_until)
        seconds = line.seconds + end - self._timed_until
        self._timed_until = end
        skipped = int(line.newest.skipped)
        rate = float(self._schedule(max(0, line.step - 1 - skipped)))  # skipped updates do not count
        self._tracker.log(
            line.step,
            "train",
            {
                **self._line.means(self._config.train),
                "learning_rate": rate,
                "gradient_norm": float(line.newest.gradient_norm),
                **self._usage(line, max(seconds, 1e-9)),
                "shapes": line.shapes,
                "skipped": skipped,
            },
        )
        self._line = _Totals()
        in_a_row, limit = int(line.newest.skipped_in_a_row), self._config.train.max_nonfinite_steps
        if in_a_row >= limit:
            raise UserError(
                f"the last {in_a_row} updates up to step {line.step} had non-finite gradients "
                f"(train.max_nonfinite_steps is {limit}) at learning rate {rate:.3g}; lower "
                "optim.learning_rate or raise optim.warmup_steps. The saved checkpoints are not affected"
            )

    def _usage(self, line: _DueLine, seconds: float) -> dict[str, float]:
        """Token counts, speeds and shares of a line; values unknown for the devices are absent."""
        work = line.work
        rate = training_flops(self._config.model, work, target_size=self._target_size) / seconds
        values = {
            "source_tokens": work.source_tokens,
            "target_tokens": work.target_tokens,
            "tokens_per_second": work.target_tokens / seconds,
            "steps_per_second": line.updates / seconds,
            "padding": work.padding,
            "data_wait": (line.waited + line.idle()) / seconds,
            "model_flops_per_second": rate,
        }
        peak, memory = peak_flops(self._config, self._parallel.device_kind), self._parallel.memory()
        if peak is not None:
            values["utilization"] = rate / (peak * self._parallel.device_count)
        if memory is not None:
            values["device_memory_gib"] = memory / 2**30
        return values

    def _read(self, unread: list[tuple[Any, Any, Any, Any]]) -> None:
        """Adds the metrics of updates to the sums; waits for these updates."""
        for loss_sum, weight, correct_sum, alignment in jax.device_get(unread):
            aligned = (0.0, 0.0) if alignment is None else tuple(map(float, alignment))
            numbers = (float(loss_sum), float(weight), float(correct_sum or 0), *aligned)
            self._line.add(*numbers)
            self.target_tokens += int(numbers[1])
            if math.isfinite(numbers[0]):  # so that one bad batch does not make the mean of its epoch nan
                self._epoch_totals.add(*numbers)
