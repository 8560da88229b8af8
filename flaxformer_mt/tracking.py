"""What a run says while it trains: metrics.jsonl for programs, TensorBoard, and lines for the human.

Row 10 of the data path, and the only door to tensorboardX and to rich's progress display. Knows nothing of
models or devices; it takes plain numbers by name.

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

from flaxformer_mt.errors import UserError

_METRICS_NAME = "metrics.jsonl"
# The time left follows from the speed over this many of the last lines.
_RATE_WINDOW = 10
# What a line shows, in this order; other values are only recorded.
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


# Values that are shown only above a bound: below it they are as they should be.
_SHOWN_ABOVE = {"data_wait": 0.01}


class Tracker:
    """Records a run's measurements in its directory and shows them; a context manager.

    On a terminal training is one line that is written over; elsewhere it is a line for each `log`.
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
        """Opens the files, and removes from them what came after `start_step`: it will come again.

        Args:
          run_dir: made if need be.
          total_steps: the step at which training ends.
          start_step: the step from which training goes on; 0 begins the files anew.
          tensorboard: whether to write RUN/tensorboard/.
          stream: shows the lines for humans; None: nothing is shown.
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
        """Records the values of a split at a step, and shows the best known of them.

        Args:
          step: how many updates there have been.
          split: "train", "valid", or another name, as "epoch", which is shown with the value of that name.
          values: numbers (Python's, or scalars of numpy or jax) and texts by name. Shown are loss,
            perplexity, accuracy, padding, utilization and data_wait (shares of 1; the last where it is
            above 1%), learning_rate, tokens_per_second, bleu and chrf.
            A number that is not finite is null in metrics.jsonl and absent from TensorBoard.
        """
        plain = {name: _to_plain(value) for name, value in values.items()}
        finite = {name: value if _is_recordable(value) else None for name, value in plain.items()}
        record = {"step": int(step), "time": round(time.time(), 3), "split": split}
        if clash := record.keys() & finite.keys():
            raise ValueError(f"values of a log line cannot be named {', '.join(sorted(clash))}")
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
        """Shows a line to the human, above the one of the progress."""
        self._display.say(text)

    def close(self) -> None:
        """Closes the files and ends the display; a second call does nothing."""
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
        # the way to the first line includes compilation, so it counts only while nothing else is known
        first_step, first_time = self._times[1 if len(self._times) > 2 else 0]
        last_step, last_time = self._times[-1]
        if last_step <= first_step:
            return math.nan
        return (self._total_steps - last_step) * (last_time - first_time) / (last_step - first_step)


class _NoTracker(Tracker):
    """Takes everything in and shows nothing: of several processes one speaks."""

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
    """The tracker of a run; without a directory one that records and shows nothing."""
    if run_dir is None:
        return _NoTracker()
    return Tracker(
        run_dir, total_steps=total_steps, start_step=start_step, tensorboard=tensorboard, stream=stream
    )


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of RUN/metrics.jsonl in order; a last line that is still being written is left out.

    Raises:
      UserError: there is no such file, or a line in it is damaged.
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
    """The line of progress: `step  1200/5000 | loss 3.412 | lr 8.9e-04 | ... | 12:31 left`."""
    parts = [f"step {step:>5}/{total_steps}", *_format_values(values)]
    if math.isfinite(seconds_left):
        parts.append(f"{format_duration(seconds_left)} left")
    return " | ".join(parts)


def format_duration(seconds: float) -> str:
    """A duration as `0:07`, `12:31` (minutes and seconds), `3 h 05 min` or `2 d 03 h`."""
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
    """Leaves only whole lines of steps up to `start_step` (none for 0); returns how many were unreadable.

    The last line does not count: a process killed while writing leaves half of it.
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
    rewound.write_bytes(b"".join(kept))
    os.replace(rewound, path)
    return unreadable


def _open_board(directory: Path, start_step: int) -> Any:
    from tensorboardX import SummaryWriter

    # the suffix keeps a run that is resumed within a second from writing over the file that it continues
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
    """Shows nothing, for library calls."""

    def show(self, line: str, step: int) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class _PlainDisplay:
    """One line after the other, for files and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, line: str, step: int) -> None:
        print(line, file=self._stream, flush=True)

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        self._stream.flush()


class _LiveDisplay:
    """A bar and a line that are written over, and messages above them, for terminals."""

    def __init__(self, stream: TextIO, start_step: int, total_steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        one_line = Column(no_wrap=True, overflow="ellipsis")
        self._progress = Progress(
            BarColumn(bar_width=16),
            TextColumn("{task.description}", markup=False, table_column=one_line),
            console=Console(file=stream),
            auto_refresh=False,  # a thread that redraws would take time from training
            redirect_stdout=False,  # what programs read is not ours to decorate
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
