"""The progress of long work of several parts, such as preparing data: how many items, and the time left.

On a terminal a bar that is updated in place and disappears at the end of its part, elsewhere a line every few
seconds.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from flaxformer_mt.tracking.progress_display import announce_if_slow, format_duration, is_live, make_bar

# Receives the number of items that are done.
Count = Callable[[int], object]

# Seconds between two lines, and between two changes of the line beside a bar.
_EVERY_PLAIN, _EVERY_LIVE = 5.0, 0.5


class WorkProgress:
    """Shows on `stream` which part of the work is being done, and how far it is; on None nothing."""

    def __init__(self, stream: TextIO | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock

    @contextlib.contextmanager
    def part(self, name: str, *, total: int | None = None, unit: str = "pairs") -> Iterator[Count]:
        """Show one part while the context lasts, and yield what counts its items.

        The first call of what it yields counts the items that an earlier process has done; 0: none.

        Args:
          name: what is being done, as in "tokenizing".
          total: the number of items; None: unknown, and nothing is counted.
        """
        stream = self._stream
        if stream is None:
            yield lambda items: None
            return
        bar = make_bar(stream, refreshes_itself=True, transient=True) if is_live(stream) else None
        task = bar.add_task(name, total=total) if bar else None
        rate = Rate(total or 0, unit, every=_EVERY_LIVE if bar else _EVERY_PLAIN, clock=self._clock)
        say = functools.partial(print, file=stream, flush=True)

        def count(items: int) -> None:
            line = "" if total is None else rate.add(items)
            if line and bar:
                bar.update(task, completed=rate.done, description=f"{name} | {line}")
            elif line:
                say(line)

        with bar or announce_if_slow(f"{name} ...", say):
            yield count


class Rate:
    """Counts items, and says how many are done, how many a second, and the time left."""

    def __init__(
        self, total: int, unit: str, *, every: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """every: the seconds between two lines, and between the first call of `add` and the first line."""
        self._total, self._unit, self._every, self._clock = total, unit, every, clock
        self.done = self._before = 0
        self._start: float | None = None
        self._said = 0.0

    def add(self, items: int) -> str:
        """Count items that are done; what the first call counts was done by an earlier process.

        Returns a line such as `4,000/10,000 pairs | 200 pairs/s | 0:30 left`; "" while it is too early.
        """
        now = self._clock()
        self.done += items
        if self._start is None:
            self._start = self._said = now
            self._before = items
            return ""
        if now - self._said < self._every or now == self._start:
            return ""
        self._said = now
        rate = (self.done - self._before) / (now - self._start)
        left = format_duration((self._total - self.done) / rate) if rate else "?"
        return f"{self.done:,}/{self._total:,} {self._unit} | {rate:,.0f} {self._unit}/s | {left} left"


# For calls from a library.
SILENT = WorkProgress(None)
