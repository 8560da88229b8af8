"""Records training metrics in metrics.jsonl and other trackers, and shows progress lines to the user.

RUN/metrics.jsonl {"step": 1200, "time": 1763712000.0, "split": "train", "loss": 3.412, ...}
RUN/tensorboard/  the same numbers as train/loss, valid/bleu, ...; the config; sample translations
standard error    step  1200/5000 | loss 3.412 | lr 8.9e-04 | 5,600 tokens/s | padding 6.1% | 12:31 left
"""

import collections
import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TextIO

from flaxformer_mt.errors import describe_error, warn_user
from flaxformer_mt.tracking.metrics_file import METRICS_NAME, append_metrics, rewind_metrics
from flaxformer_mt.tracking.progress_display import (
    Display,
    Sample,
    format_train_line,
    format_values,
    make_display,
)
from flaxformer_mt.tracking.tracking_services import Service, open_service

# The time left is estimated from the speed over this many of the last lines.
_RATE_WINDOW = 10
# Steps before the time left is shown.
_RATE_STEPS = 10


class Tracker:
    """Context manager that records a run's metrics in its directory and shows them on `stream`.

    Without a directory, it records and shows nothing, as in all processes but the first. A terminal shows one
    line that is updated in place; other streams get a line for each `log`.
    """

    def __init__(
        self,
        run_dir: Path | None,
        *,
        total_steps: int,
        start_step: int = 0,
        tensorboard: bool = True,
        trackers: Sequence[str] = (),
        stream: TextIO | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Open the files and remove the records of steps after `start_step`, which training repeats."""
        self._clock = clock or time.monotonic
        self._total_steps, self._start_step = total_steps, start_step
        self._shown_at = time.monotonic()
        self._last_values: Mapping[str, Any] = {}
        self._times = collections.deque([(start_step, self._clock())], maxlen=_RATE_WINDOW)
        self._services: dict[str, Service] = {}
        self._file: TextIO | None = None
        self._display = Display()
        if run_dir is None:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        self._services = {name: open_service(name, run_dir) for name in trackers}
        unreadable = rewind_metrics(run_dir / METRICS_NAME, start_step)
        self._file = (run_dir / METRICS_NAME).open("a", encoding="utf-8", newline="\n")
        if tensorboard:
            from flaxformer_mt.tracking import tensorboard_run

            self._services["tensorboard"] = tensorboard_run.Run(run_dir, start_step)
        line = format_train_line(start_step, total_steps, {}, math.nan)
        self._display = make_display(stream, line, total=total_steps, done=start_step)
        if unreadable:
            lines = "1 unreadable line" if unreadable == 1 else f"{unreadable} unreadable lines"
            self.message(f"removed {lines} from {run_dir / METRICS_NAME}")

    def log(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """Record numbers and texts of a split, such as "train" or "epoch", and show the most important ones.

        Non-finite numbers are null in metrics.jsonl and omitted in TensorBoard.
        """
        if self._file is None:
            return
        plain = {n: value.item() if hasattr(value, "item") else value for n, value in values.items()}
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in plain.items()
        }
        record = {"step": int(step), "time": round(time.time(), 3), "split": split}
        if clash := record.keys() & finite.keys():
            raise ValueError(f"values of a log line cannot be named {', '.join(sorted(clash))}")
        append_metrics(self._file, record | finite)
        numbers = {f"{split}/{name}": v for name, v in finite.items() if isinstance(v, int | float)}
        self._record(lambda service: service.log(step, numbers))
        if split == "train":
            self._times.append((step, self._clock()))
            self._show(step, plain)
        else:
            name = f"{split} {plain[split]}" if split in plain else split
            self.message(" | ".join([f"{name} @{step}", *format_values(plain)]))

    def log_config(self, fields: Mapping[str, Any]) -> None:
        self._record(lambda service: service.log_config(fields))

    def log_report(self, page: Path) -> None:
        self._record(lambda service: service.log_report(page))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        if not samples:
            return
        self._record(lambda service: service.log_samples(step, samples))
        for sample in samples:
            line = f"  {sample.source} -> {sample.translation}".replace("\n", " ")
            self._display.say(line, cut=True)

    def message(self, text: str) -> None:
        self._shown_at = time.monotonic()
        self._display.say(text)

    def end_silence(self, step: int) -> None:
        """Show the step number if nothing has been shown for the display's `silent_seconds`."""
        if time.monotonic() - self._shown_at > self._display.silent_seconds:
            # The values of the last log line stay on a line that is updated in place.
            self._show(step, {} if self._display.width() is None else self._last_values)

    def start_clock(self) -> None:
        """Start measuring the speed of training now, so that it excludes earlier work such as compilation."""
        self._times[0] = self._start_step, self._clock()

    def busy(self, text: str) -> contextlib.AbstractContextManager[None]:
        """Show `text` during the body of the context if it takes long; on a terminal, with a spinner."""
        self._shown_at = time.monotonic()
        return self._display.busy(text)

    def _show(self, step: int, values: Mapping[str, Any]) -> None:
        self._shown_at, self._last_values = time.monotonic(), values
        left = self._seconds_left(step)
        line = format_train_line(step, self._total_steps, values, left, width=self._display.width())
        self._display.show(line, step)

    def close(self, *, failed: bool = False) -> None:
        """Close all files and services; a second call does nothing."""
        self._display.close()
        if self._file is not None:
            self._file.close()
        self._record(lambda service: service.close(failed=failed))
        self._services.clear()

    def _record(self, record: Callable[[Service], None]) -> None:
        """Call a function for each tracker; a service that fails is removed, and training continues."""
        for name, service in [*self._services.items()]:
            try:
                record(service)
            except Exception as error:  # of the network, or of the service
                if name == "tensorboard":  # a file of the run, such as on a full disk
                    raise
                del self._services[name]
                warn_user(
                    f"{name} gets nothing more of this run: {describe_error(error)}; a process that "
                    "resumes it tries again"
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(failed=kind is not None)

    def _seconds_left(self, step: int) -> float:
        # The first line may have waited for a compiler, so it is used only until there are later lines, and
        # the time of a few steps is not shown.
        first_step, first_time = self._times[1 if len(self._times) > 2 else 0]
        last_step, last_time = self._times[-1]
        if last_step - first_step < min(_RATE_STEPS, self._total_steps - first_step):
            return math.nan
        return (self._total_steps - step) * (last_time - first_time) / (last_step - first_step)
