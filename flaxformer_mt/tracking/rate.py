"""The rate of long work on many items, and the time that it will take: a line every few seconds."""

import time
from collections.abc import Callable

from flaxformer_mt.tracking.progress_display import format_duration

# Seconds between two lines.
_EVERY = 5.0


class Rate:
    """Counts items, and says how many are done, how many a second, and the time left."""

    def __init__(
        self,
        total: int,
        unit: str,
        say: Callable[[str], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is said before some seconds have passed since the first call of `add`."""
        self._total, self._unit, self._say, self._clock = total, unit, say, clock
        self._done = self._before = 0
        self._start: float | None = None
        self._said = 0.0

    def add(self, items: int) -> None:
        """Counts items that are done; what the first call counts was done by an earlier process."""
        now = self._clock()
        self._done += items
        if self._start is None:
            self._start = self._said = now
            self._before = items
            return
        if now - self._said < _EVERY or now == self._start:
            return
        self._said = now
        rate = (self._done - self._before) / (now - self._start)
        left = format_duration((self._total - self._done) / rate) if rate else "?"
        self._say(f"{self._done:,}/{self._total:,} {self._unit} | {rate:,.0f} {self._unit}/s | {left} left")
