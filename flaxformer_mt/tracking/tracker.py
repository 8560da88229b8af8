"""Training metrics: metrics.jsonl for programs, TensorBoard, and progress lines for the user.

Row 10 of the data path. Owns the import of tensorboardX, and rich's progress bar of training; takes plain
numbers by name.

    RUN/metrics.jsonl {"step": 1200, "time": 1763712000.0, "split": "train", "loss": 3.412, ...}
    RUN/tensorboard/  the same numbers as train/loss, valid/bleu, ...
    standard error    step  1200/5000 | loss 3.412 | lr 8.9e-04 | 5,600 tokens/s | padding 6.1% | 12:31 left
"""

import collections
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from flaxformer_mt.errors import UserError, name_full_disk

_METRICS_NAME = "metrics.jsonl"
# The time left is estimated from the speed over this many of the last lines.
_RATE_WINDOW = 10
# Values that a progress line shows, in this order; other values are only recorded.
_SHOWN = {
    "loss": "loss {:.3f}",
    "perplexity": "perplexity {:.2f}",
    "accuracy": "accuracy {:.1%}",
    "learning_rate": "lr {:.1e}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "padding": "padding {:.1%}",
    "utilization": "MFU {:.1%}",
    "data_wait": "data wait {:.1%}",
    "bleu": "BLEU {:.2f}",
    "chrf": "chrF {:.2f}",
}

# Values that are shown only above a threshold; values below it are normal.
_SHOWN_ABOVE = {"data_wait": 0.01}


class Tracker:
    """Records a run's metrics in its directory and shows them; a context manager.

    A terminal shows one progress line that is updated in place; other streams get a line for each `log`.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        total_steps: int,
        start_step: int = 0,
        tensorboard: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        """Open the files and remove the records of steps after `start_step`, which training repeats.

        Args:
          run_dir: created if absent.
          total_steps: the step at which training ends.
          start_step: the step from which training resumes; 0 starts new files.
          tensorboard: whether to write RUN/tensorboard/.
          stream: where progress lines go; None: nowhere.
        """
        self._total_steps = total_steps
        self._times = collections.deque([(start_step, time.monotonic())], maxlen=_RATE_WINDOW)
        run_dir.mkdir(parents=True, exist_ok=True)
        unreadable = _rewind_metrics(run_dir / _METRICS_NAME, start_step)
        self._file = (run_dir / _METRICS_NAME).open("a", encoding="utf-8", newline="\n")
        self._board = _open_board(run_dir / "tensorboard", start_step) if tensorboard else None
        self._display = _make_display(stream, start_step, total_steps)
        if unreadable:
            self.message(f"removed {unreadable} unreadable lines from {run_dir / _METRICS_NAME}")

    def log(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """Record the values of a split at a step, and show the most important values.

        Args:
          step: the number of updates so far.
          split: "train", "valid", or another name such as "epoch"; a value of the same name is shown with it.
          values: numbers (Python's, or scalars of numpy or jax) and texts by name. Shown are loss,
            perplexity, accuracy, padding, utilization and data_wait (fractions of 1; data_wait only above
            1%), learning_rate, tokens_per_second, bleu and chrf.
            A non-finite number is null in metrics.jsonl and absent from TensorBoard.
        """
        plain = {name: _to_plain(value) for name, value in values.items()}
        finite = {name: value if _is_recordable(value) else None for name, value in plain.items()}
        record = {"step": int(step), "time": round(time.time(), 3), "split": split}
        if clash := record.keys() & finite.keys():
            raise ValueError(f"values of a log line cannot be named {', '.join(sorted(clash))}")
        with name_full_disk(self._file.name):
            self._file.write(json.dumps(record | finite, ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()
        if self._board is not None:
            for name, value in finite.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{split}/{name}", value, step)
        if split == "train":
            self._times.append((step, time.monotonic()))
            self._display.show(format_train_line(step, self._total_steps, plain, self._seconds_left()), step)
        else:
            name = f"{split} {plain[split]}" if split in plain else split
            self._display.say(" | ".join([f"{name} @{step}", *_format_values(plain)]))

    def message(self, text: str) -> None:
        """Show a message to the user, above the progress line."""
        self._display.say(text)

    def close(self) -> None:
        """Close the files and the display; a second call does nothing."""
        self._display.close()
        self._file.close()
        if self._board is not None:
            self._board.close()
            self._board = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _seconds_left(self) -> float:
        # the time to the first line includes compilation, so it is used only until there are later lines
        first_step, first_time = self._times[1 if len(self._times) > 2 else 0]
        last_step, last_time = self._times[-1]
        if last_step <= first_step:
            return math.nan
        return (self._total_steps - last_step) * (last_time - first_time) / (last_step - first_step)


class _NullTracker(Tracker):
    """Discards everything: of several processes only one reports."""

    def __init__(self) -> None:
        pass

    def log(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


def make_tracker(
    run_dir: Path | None,
    *,
    total_steps: int,
    start_step: int = 0,
    tensorboard: bool = True,
    stream: TextIO | None = None,
) -> Tracker:
    """Make the tracker of a run; without a directory it records and shows nothing."""
    if run_dir is None:
        return _NullTracker()
    return Tracker(
        run_dir, total_steps=total_steps, start_step=start_step, tensorboard=tensorboard, stream=stream
    )


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read the records of RUN/metrics.jsonl in order; an incomplete last line is left out.

    Raises:
      UserError: the file does not exist, or a line in it is damaged.
    """
    path = Path(run_dir) / _METRICS_NAME
    if not path.is_file():
        raise UserError(f"{path} does not exist; train in {run_dir} first, or name another run directory")
    *lines, tail = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        record = _parse_line(line)
        if record is None:
            raise UserError(f"{path}, line {number} is damaged: {line[:80]!r}; remove the line")
        records.append(record)
    last = _parse_line(tail)
    return records if last is None else [*records, last]


def format_train_line(step: int, total_steps: int, values: Mapping[str, Any], seconds_left: float) -> str:
    """Format a progress line: `step  1200/5000 | loss 3.412 | lr 8.9e-04 | ... | 12:31 left`."""
    parts = [f"step {step:>5}/{total_steps}", *_format_values(values)]
    if math.isfinite(seconds_left):
        parts.append(f"{format_duration(seconds_left)} left")
    return " | ".join(parts)


def format_duration(seconds: float) -> str:
    """Format a duration as `0:07`, `12:31` (minutes and seconds), `3 h 05 min` or `2 d 03 h`."""
    seconds = round(seconds)
    if seconds < 3600:
        return f"{seconds // 60}:{seconds % 60:02}"
    if seconds < 48 * 3600:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600:02} h"


def _format_values(values: Mapping[str, Any]) -> list[str]:
    return [
        template.format(values[name])
        for name, template in _SHOWN.items()
        if isinstance(values.get(name), int | float) and not values[name] <= _SHOWN_ABOVE.get(name, -math.inf)
    ]


def _to_plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _is_recordable(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # not JSON, or not UTF-8
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _rewind_metrics(path: Path, start_step: int) -> int:
    """Keep only complete lines of steps up to `start_step` (none for 0); return the number of damaged lines.

    The last line is not counted: a process that is killed while writing leaves it incomplete.
    """
    if not path.exists():
        return 0
    kept, unreadable = [], 0
    lines = path.read_bytes().split(b"\n") if start_step else []
    for number, line in enumerate(lines, start=1):
        record = _parse_line(line)
        if record is None:
            unreadable += number < len(lines)
        elif record["step"] <= start_step:
            kept.append(line + b"\n")
    rewound = path.with_name(f".{path.name}.new")
    with name_full_disk(rewound):
        rewound.write_bytes(b"".join(kept))
    os.replace(rewound, path)
    return unreadable


def _open_board(directory: Path, start_step: int) -> Any:
    from tensorboardX import SummaryWriter

    # the suffix prevents a run that is resumed within a second from overwriting its earlier file
    return SummaryWriter(
        str(directory),
        purge_step=start_step + 1 if start_step else 0,
        filename_suffix=f".from-{start_step}",
    )


class _Display(Protocol):
    def show(self, line: str, step: int) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


class _SilentDisplay:
    """Shows nothing, for calls from a library."""

    def show(self, line: str, step: int) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class _PlainDisplay:
    """Prints every line, for files and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, line: str, step: int) -> None:
        print(line, file=self._stream, flush=True)

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        self._stream.flush()


class _LiveDisplay:
    """A bar and a line that are updated in place, and messages above them, for terminals."""

    def __init__(self, stream: TextIO, start_step: int, total_steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        one_line = Column(no_wrap=True, overflow="ellipsis")
        self._progress = Progress(
            BarColumn(bar_width=16),
            TextColumn("{task.description}", markup=False, table_column=one_line),
            console=Console(file=stream),
            auto_refresh=False,  # a refresh thread would slow training down
            redirect_stdout=False,  # programs may read standard output
            redirect_stderr=stream is sys.stderr,
        )
        self._task = self._progress.add_task(
            format_train_line(start_step, total_steps, {}, math.nan), total=total_steps, completed=start_step
        )
        self._progress.start()
        self._progress.refresh()

    def show(self, line: str, step: int) -> None:
        self._progress.update(self._task, completed=step, description=line, refresh=True)

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


def _make_display(stream: TextIO | None, start_step: int, total_steps: int) -> _Display:
    if stream is None:
        return _SilentDisplay()
    if stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
        return _LiveDisplay(stream, start_step, total_steps)
    return _PlainDisplay(stream)
