"""The training log: lines of mean loss, speed, padding and utilization, from sums of metrics and a clock."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from flaxformer_mt.config import Config
from flaxformer_mt.errors import UserError
from flaxformer_mt.flops import peak_flops, training_flops
from flaxformer_mt.parallel import Parallel
from flaxformer_mt.parallel.processes import process_count
from flaxformer_mt.shapes import Batch
from flaxformer_mt.tracking import Tracker
from flaxformer_mt.training.metric_sums import Counts, MetricSums, Totals
from flaxformer_mt.training.train_clock import Span, TrainClock
from flaxformer_mt.training.update import StepMetrics


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

    def add(self, step: int, metrics: StepMetrics, batches: list[Batch], epoch: int) -> None:
        """Add update number `step`, and log the lines that are due and finished.

        Args:
          epoch: the epoch of the next batch, from 0. An update with microbatches of two epochs belongs to the
            first one and ends it.

        Raises:
          UserError: train.max_nonfinite_steps updates were all skipped, up to one of the lines.
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
