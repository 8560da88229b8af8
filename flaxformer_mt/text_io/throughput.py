"""Progress of line-by-line work on standard error: lines and tokens per second, and the time left.

Contains the counters and the rules for printing: on a terminal one line that is overwritten, elsewhere a line
every 30 seconds, and nothing or a summary alone for work that takes less than 5 seconds. Compile time is
reported separately and excluded from the rates.
"""

import math
import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

from flaxformer_mt.parallel.compilation import CompileClock
from flaxformer_mt.tracking.progress_display import Display, format_duration, make_display

# Seconds before the first line; work that takes less prints no summary either.
_SILENT_SECONDS = 5.0
# Seconds between two updates on a terminal, and between two lines elsewhere.
_EVERY_LIVE, _EVERY_PLAIN = 0.5, 30.0
# Lines arrive in bursts, a batch or a window at a time: seconds without a line that end a burst.
_PAUSE = 0.1


class Throughput:
    """A context manager that counts lines and tokens, and prints their rates."""

    def __init__(
        self,
        *,
        total: int | None = None,
        done: int = 0,
        quiet: bool = False,
        summary: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the clock; `total` lines (None: unknown), of which an earlier run has `done` some.

        Nothing is printed if it is `quiet`, as where the results are printed on the screen. `summary`: the
        rates at the end are printed, however short the work was.
        """
        self._total, self._done, self._clock = total, done, clock
        self._lines = self._tokens = 0
        self._compile_clock = CompileClock(clock)
        # Seconds of compilation until lines were last added.
        self._compiled_before = 0.0
        self._start = self._last_shown = self._last_added = clock()
        self._stream = stream or sys.stderr
        self._silent_seconds, self._summary = math.inf if quiet else _SILENT_SECONDS, summary
        self._display: Display | None = None

    def add(self, *, lines: int = 1, tokens: int) -> None:
        """Count finished lines, and the target tokens that were generated for them.

        Rates are shown as they were when the last burst of lines was complete: in the middle of a burst, all
        of its time has passed, but few of its lines are counted.
        """
        now = self._clock()
        if now - self._last_added > _PAUSE and self._lines and self._is_due(now):
            self._last_shown = now
            self._show(self.format(self._last_added, compiling=self._compiled_before))
        self._lines += lines
        self._tokens += tokens
        self._last_added, self._compiled_before = now, self._compile_clock.compiling()

    def _is_due(self, now: float) -> bool:
        if now - self._start < self._silent_seconds:
            return False
        return now - self._last_shown >= (_EVERY_LIVE if self._stream.isatty() else _EVERY_PLAIN)

    def format(self, now: float, *, compiling: float | None = None) -> str:
        """Return the counts and rates at a time, until which so many seconds were compilation (None: all).

        12,288/1,000,000 lines | 410.2 lines/s | 6,210 target tokens/s | compile/load 0:12 | 40:12 left
        """
        compiling = self._compile_clock.compiling() if compiling is None else compiling
        working = max(1e-9, now - self._start - compiling)
        done = self._done + self._lines
        noun = "line" if (self._total or done) == 1 else "lines"
        parts = [
            f"{done:,}" + (f"/{self._total:,}" if self._total else "") + f" {noun}",
            f"{self._lines / working:,.1f} lines/s",
            f"{self._tokens / working:,.0f} target tokens/s",
        ]
        if compiling >= 1:
            parts.append(f"compile/load {format_duration(compiling)}")
        if self._total and done < self._total and self._lines:
            parts.append(f"{format_duration((self._total - done) * working / self._lines)} left")
        return " | ".join(parts)

    def __enter__(self) -> Self:
        self._compile_clock.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._compile_clock.__exit__(*error)
        if self._display is not None:
            self._display.close()
        now = self._clock()
        if now - self._start >= self._silent_seconds or (self._summary and not any(error)):
            print(f"{self.format(now)} | {format_duration(now - self._start)} in total", file=self._stream)

    def _show(self, line: str) -> None:
        if self._display is None:
            self._display = make_display(self._stream, transient=True, bar=False)
        self._display.show(line, self._lines)
