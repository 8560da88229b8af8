"""The time in which JAX compiles programs, in any thread, so that rates of work can leave it out."""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import jax

# The monitoring events of JAX whose time is compile time.
_COMPILING = ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration")


class CompileClock:
    """A context manager that measures compile time; what several threads compile at a time counts once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start at the present time of `clock`, in seconds."""
        self._clock, self._start = clock, clock()
        # Start and end of each time in which programs were compiled; they do not overlap.
        self._compiled: list[tuple[float, float]] = []
        self._lock = threading.Lock()

    def compiling(self) -> float:
        """Return the seconds of compilation so far."""
        with self._lock:
            return sum(end - start for start, end in self._compiled)

    def working(self) -> float:
        """Return the time of a clock that stands still while programs are compiled."""
        return self._clock() - self.compiling()

    def listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        """Add the time of an event that ends now, less what others, in other threads, have of it."""
        if event not in _COMPILING:
            return
        with self._lock:
            end = self._clock()
            start = max(self._start, end - duration_secs)
            while self._compiled and self._compiled[-1][1] >= start:
                start = min(start, self._compiled.pop()[0])
            self._compiled.append((start, end))

    def __enter__(self) -> Self:
        jax.monitoring.register_event_duration_secs_listener(self.listen)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        jax.monitoring.unregister_event_duration_listener(self.listen)
