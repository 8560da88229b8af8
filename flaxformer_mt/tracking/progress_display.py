"""Displays progress with rich: a line that is updated in place on a terminal, and messages above it."""

import contextlib
import itertools
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TextIO

# Seconds without a line after which the number of the step is shown: on a terminal, and elsewhere.
_SILENT_LIVE, _SILENT_PLAIN = 5.0, 20.0
# Seconds after which work of unknown length is announced.
_SLOW = 2.0
# Shows a message where a command runs, and nothing in calls from a library.
_log = logging.getLogger("flaxformer_mt").info
# Seconds between two moves of the sign that stands for work on a terminal.
_SIGN = 0.3
# Values that a progress line shows, in this order; other values are only recorded.
_SHOWN = {
    "loss": "loss {:.3f}",
    "alignment_loss": "alignment {:.3f}",
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

# Values that a narrow terminal does without, the least important first.
_OMITTED = (
    "padding",
    "perplexity",
    "learning_rate",
    "accuracy",
    "data_wait",
    "utilization",
    "tokens_per_second",
)
# Columns that the bar takes.
_BAR = 16

# Values that are shown only above a threshold; values below it are normal.
_SHOWN_ABOVE = {"data_wait": 0.01}


class Sample(NamedTuple):
    source: str
    reference: str
    translation: str


@contextlib.contextmanager
def announce_if_slow(text: str, say: Callable[[str], object] = _log) -> Iterator[None]:
    """Call `say` with `text` if the body of the context takes longer than two seconds."""
    timer = threading.Timer(_SLOW, say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def format_train_line(
    step: int, total_steps: int, values: Mapping[str, Any], seconds_left: float, *, width: int | None = None
) -> str:
    """Return `step 1200/5000 | loss 3.412 | ... | 12:31 left`, with fewer values if `width` is small."""
    left = [f"{format_duration(seconds_left)} left"] if math.isfinite(seconds_left) else []
    for omitted in range(len(_OMITTED) + 1):
        shown = {name: value for name, value in values.items() if name not in _OMITTED[:omitted]}
        line = " | ".join([f"step {step:>5}/{total_steps}", *format_values(shown), *left])
        if width is None or len(line) <= width:
            break
    return line


def format_duration(seconds: float) -> str:
    """Format seconds as `0:07`, `12:31` (minutes and seconds), `3 h 05 min` or `2 d 03 h`."""
    seconds = round(seconds)
    if seconds < 3600:
        return f"{seconds // 60}:{seconds % 60:02}"
    if seconds < 48 * 3600:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600:02} h"


def format_values(values: Mapping[str, Any]) -> list[str]:
    """Format the values of a progress line: the usual values, then other scores, then BLEU by direction."""
    directions = [name for name in values if name.startswith("bleu_")]
    of_directions = ("seconds", *(name.removeprefix("bleu") for name in directions))
    further = [name for name in values if name not in _SHOWN and not name.endswith(of_directions)]
    shown = [
        template.format(values[name])
        for name, template in _SHOWN.items()
        if isinstance(values.get(name), int | float) and not values[name] <= _SHOWN_ABOVE.get(name, -math.inf)
    ]
    return [
        *shown,
        *(f"{name} {values[name]:.4g}" for name in further if "bleu" in values),
        *(f"{name.removeprefix('bleu_')} {values[name]:.2f}" for name in directions),
    ]


class Display:
    """Base class of displays; shows nothing, and serves library calls and all processes but the first."""

    silent_seconds = math.inf

    def width(self) -> int | None:
        """Width of the line that is updated in place, in columns; None if no line is updated in place."""
        return None

    def show(self, line: str, done: int) -> None: ...

    def say(self, text: str, *, cut: bool = False) -> None:
        """Show a message above the progress line; `cut` truncates it to one terminal line."""

    def busy(self, text: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def close(self) -> None: ...


class _PlainDisplay(Display):
    """Prints every line; used for files and pipes."""

    silent_seconds = _SILENT_PLAIN

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, line: str, done: int) -> None:
        self.say(line)

    def say(self, text: str, *, cut: bool = False) -> None:
        self._stream.write(f"{text}\n")  # at once: timers announce from threads of their own
        self._stream.flush()

    def busy(self, text: str) -> contextlib.AbstractContextManager[None]:
        return announce_if_slow(text, self.say)


class _LiveDisplay(Display):
    """Shows a bar and a line that are updated in place, and messages above them; used for terminals."""

    silent_seconds = _SILENT_LIVE

    def __init__(
        self, stream: TextIO, line: str, *, total: int | None, done: int, transient: bool, bar: bool
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        text = TextColumn(
            "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")
        )
        self._progress = Progress(
            *([BarColumn(bar_width=_BAR)] if bar else []),
            text,
            console=Console(file=stream),
            auto_refresh=transient and bar,  # the thread would slow training down
            transient=transient,
            redirect_stdout=False,  # programs may read standard output
            redirect_stderr=stream is sys.stderr,
        )
        self._task = self._progress.add_task(line, total=total, completed=done)
        self._progress.start()
        self._progress.refresh()

    def width(self) -> int | None:
        """Width of the line in columns: the terminal's width without the bar and the space after it."""
        return self._progress.console.width - _BAR - 1

    def show(self, line: str, done: int) -> None:
        self._progress.update(self._task, completed=done, description=line, refresh=True)

    def say(self, text: str, *, cut: bool = False) -> None:
        plain: Any = {"markup": False, "emoji": False, "highlight": False}
        overflow: Any = "ellipsis" if cut else "ignore"
        self._progress.console.print(text, no_wrap=True, overflow=overflow, crop=cut, **plain)

    @contextlib.contextmanager
    def busy(self, text: str) -> Iterator[None]:
        line, done = self._progress.tasks[0].description, threading.Event()

        def move() -> None:
            for sign in itertools.cycle("|/-\\"):
                if done.wait(_SIGN):
                    return
                self._progress.update(self._task, description=f"{text} {sign}", refresh=True)

        thread = threading.Thread(target=move, name="busy", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self._progress.update(self._task, description=line, refresh=True)

    def close(self) -> None:
        self._progress.stop()


def make_display(
    stream: TextIO | None,
    line: str = "",
    *,
    total: int | None = None,
    done: int = 0,
    transient: bool = False,
    bar: bool = True,
) -> Display:
    """Return a display: silent without `stream`, live on terminals that can move the cursor, else plain.

    A `transient` live display refreshes its bar by itself, and disappears at the end.
    """
    if stream is None:
        return Display()
    if not stream.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        return _PlainDisplay(stream)
    return _LiveDisplay(stream, line, total=total, done=done, transient=transient, bar=bar)


# Receives the number of items that are done.
Count = Callable[[int], object]

# Seconds between two lines, and between two changes of the line beside a bar.
_EVERY_PLAIN, _EVERY_LIVE = 5.0, 0.5


class WorkProgress:
    """Shows on `stream` the current part of the work and its progress; shows nothing if `stream` is None."""

    def __init__(self, stream: TextIO | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock

    @contextlib.contextmanager
    def part(self, name: str, *, total: int | None = None, unit: str = "pairs") -> Iterator[Count]:
        """Show a part of the work, such as "tokenizing", during the body; yield a function to count items.

        The first call of this function gives the number of items that an earlier process has finished, or 0.
        Every few seconds, a line such as `4,000/10,000 pairs | 200 pairs/s | 0:30 left` is shown; without
        `total`, items are not counted.
        """
        display = make_display(self._stream, name, total=total, transient=True)
        is_live = display.width() is not None
        every = _EVERY_LIVE if is_live else _EVERY_PLAIN
        before = done = 0
        start: float | None = None
        shown = 0.0

        def count(items: int) -> None:
            nonlocal before, done, start, shown
            if total is None:
                return
            now = self._clock()
            done += items
            if start is None:
                before, start, shown = items, now, now
            if now - shown < every or now == start:
                return
            shown, rate = now, (done - before) / (now - start)
            left = format_duration((total - done) / rate) if rate else "?"
            line = f"{done:,}/{total:,} {unit} | {rate:,.0f} {unit}/s | {left} left"
            display.show(f"{name} | {line}" if is_live else line, done)

        with (
            contextlib.closing(display),
            contextlib.nullcontext() if is_live else display.busy(f"{name} ..."),
        ):
            yield count


# For calls from a library.
SILENT = WorkProgress(None)
