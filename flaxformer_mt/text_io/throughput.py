"""Prints the progress of line-by-line work to standard error: lines and tokens per second, and time left.

On a terminal, a single line is overwritten; elsewhere, a line is printed every 30 seconds. Work that takes
less than 5 seconds prints at most a summary. Compile time is reported separately and excluded from the rates.
"""

import math
import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

from flaxformer_mt.parallel.compilation import CompileClock
from flaxformer_mt.tracking.progress_display import Display, format_duration, make_display

# Seconds before the first progress line; shorter work prints a summary only with `summary`.
_SILENT_SECONDS = 5.0
# Seconds between two updates on a terminal, and between two lines elsewhere.
_EVERY_LIVE, _EVERY_PLAIN = 0.5, 30.0
# Lines are finished in bursts, a batch or a window at a time. _PAUSE seconds without a line end a burst.
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
        """Start the clock; an earlier run finished `done` of the `total` lines (None: unknown).

        quiet: whether to print no progress, for instance because the results are printed to a terminal.
        summary: whether to print the rates at the end even if the work took little time.
        """
        self._total, self._done, self._clock = total, done, clock
        self._lines = self._tokens = 0
        self._compile_clock = CompileClock(clock)
        # Seconds of compilation before the last call of `add`.
        self._compiled_before = 0.0
        self._start = self._last_shown = self._last_added = clock()
        self._stream = stream or sys.stderr
        self._silent_seconds, self._summary = math.inf if quiet else _SILENT_SECONDS, summary
        self._display: Display | None = None

    def add(self, *, lines: int = 1, tokens: int) -> None:
        """Count finished lines and the target tokens that were generated for them.

        Rates are measured up to the end of the last burst of lines, since a burst is counted line by line.
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
        """Return counts and rates at time `now`; rates exclude `compiling` seconds (None: the measured time).

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
