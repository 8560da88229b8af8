"""The clock of training: how long updates took, and how long the devices waited for data meanwhile."""

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax


class DataWait:
    """Measures how long the devices were idle because the loop waited for its next batch.

    Dispatch is asynchronous: waiting for a batch costs nothing while the devices are busy with earlier
    updates. So a thread records when each update ends, and only the part of a wait after that counts.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start the thread; it ends when this object is deleted. `clock` tells the time in seconds."""
        self._clock = clock
        self._watcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="watch-updates")
        self._busy_until: Future[float] | None = None
        self._waits: list[tuple[float, float, Future[float] | None]] = []

    def add_update(self, result: Any) -> None:
        """Record the dispatch of an update; `result` is ready when the devices have finished it."""
        self._busy_until = self._watcher.submit(self._time_when_ready, result)

    def add_wait(self, start: float, end: float) -> None:
        """Record that the loop waited for a batch from `start` to `end`, after the newest update."""
        self._waits.append((start, end, self._busy_until))

    def take(self) -> Callable[[], float]:
        """Return a function that computes the idle seconds since the last call of `take` or `read`.

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
        """Return the idle seconds since the last call; wait for the updates before the last wait."""
        return self.take()()

    def end_of_newest(self) -> Callable[[], float]:
        """Return a function that waits for the update that is the newest now, and tells when it ended."""
        assert self._busy_until is not None
        return self._busy_until.result

    def _time_when_ready(self, result: Any) -> float:
        jax.block_until_ready(result)
        return self._clock()


class Span(NamedTuple):
    """The time of some updates, which the devices may still be computing.

    end: computes when the newest of them was finished. seconds, waited: what had been measured before. idle:
    computes the other seconds in which the devices waited for data.
    """

    end: Callable[[], float]
    seconds: float
    waited: float
    idle: Callable[[], float]


class TrainClock:
    """Times updates from the end of the one before to their own, without waiting for the newest."""

    def __init__(
        self, *, seconds: float = 0.0, waited: float = 0.0, clock: Callable[[], float] | None = None
    ) -> None:
        """Start the clock, with what had been measured since the last line of a run that is resumed.

        Args:
          clock: tells the time in seconds. None: the real one.
        """
        self._seconds, self._waited = seconds, waited
        self._clock = clock or time.monotonic
        self._data_wait = DataWait(self._clock)
        self._newest: Any = None
        self._timed_until = self._clock()

    def dispatch(self, result: Any) -> None:
        """Record the dispatch of an update, by one of its results."""
        self._newest = result
        self._data_wait.add_update(result)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure how long the loop waits for its next batch."""
        start = self._clock()
        yield
        self._data_wait.add_wait(start, self._clock())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock while something other than training runs; waits for the newest update first."""
        jax.block_until_ready(self._newest)
        now = self._clock()
        self._seconds += now - self._timed_until
        self._timed_until = now
        yield
        self._timed_until = self._clock()

    def to_dict(self) -> dict[str, float]:
        """Return what has been measured since the last line; wait for the newest update."""
        self._waited += self._data_wait.read()
        return {"seconds": self._seconds, "waited": self._waited}

    def close(self) -> Span:
        """End the span of a line; later updates belong to the next."""
        span = Span(self._data_wait.end_of_newest(), self._seconds, self._waited, self._data_wait.take())
        self._seconds = self._waited = 0.0
        return span

    def measure(self, span: Span) -> tuple[float, float]:
        """Return the seconds of a span, and those in which the devices waited; wait for its updates.

        Spans are measured in the order in which they were closed.
        """
        end = max(span.end(), self._timed_until)
        seconds = span.seconds + end - self._timed_until
        self._timed_until = end
        return max(seconds, 1e-9), span.waited + span.idle()
