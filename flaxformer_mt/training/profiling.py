"""`train --profile`: a trace of some updates, for TensorBoard and Perfetto.

Owns when it begins and ends, and where it lies. Knows nothing of what an update does.

    RUN/profile/plugins/profile/TIME/ HOST.xplane.pb · HOST.trace.json.gz · perfetto_trace.json.gz
"""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

# Updates that are not recorded, for in them programs are compiled; fewer where the run ends too soon.
WARM_UP = 10


class Profile:
    """Records a trace of some updates; a context manager, at whose end a trace that is still open ends too.

    Says where the trace is, or that there is none.
    """

    def __init__(self, directory: Path, updates: int, *, remaining: int, say: Callable[[str], None]) -> None:
        """Records nothing yet.

        Args:
          directory: made when there is a trace.
          updates: how many to record; 0: none, and nothing is said.
          remaining: how many updates the run has still to go, at most.
          say: takes a line for the human.
        """
        self._directory = directory
        self._wanted = self._left = updates
        self._skip = min(WARM_UP, max(0, remaining - updates))
        self._say = say
        self._first = self._last = 0
        self._recording = False
        self._annotation: jax.profiler.StepTraceAnnotation | None = None
        self._newest: Any = None

    def begin(self, step: int) -> None:
        """Update number `step` begins, with the wait for its batch."""
        if not self._left:
            return
        if self._skip:
            self._skip -= 1
            return
        if not self._recording:
            jax.block_until_ready(self._newest)  # what was asked for before is none of this trace's
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # it would slow down the host, and so what is measured
            jax.profiler.start_trace(self._directory, create_perfetto_trace=True, profiler_options=options)
            self._recording, self._first = True, step
        self._last = step
        self._annotation = jax.profiler.StepTraceAnnotation("update", step_num=step)
        self._annotation.__enter__()

    def end(self, step: int, result: Any) -> None:
        """Update number `step` has been handed to the devices; `result` is there when they are done."""
        if not self._left:
            return
        self._newest = result
        if self._annotation is None:
            return
        self._annotation.__exit__(None, None, None)
        self._annotation = None
        self._left -= 1
        if not self._left:
            self._stop()

    def _stop(self) -> None:
        try:
            jax.block_until_ready(self._newest)
        finally:
            jax.profiler.stop_trace()
            self._recording, self._left, self._newest = False, 0, None
        traces = sorted((self._directory / "plugins" / "profile").iterdir(), key=lambda p: p.stat().st_mtime)
        self._say(
            f"profile of updates {self._first} to {self._last}: {traces[-1]}; TensorBoard with its profile "
            f"plugin opens {self._directory}, ui.perfetto.dev the perfetto_trace.json.gz"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(kind, error, traceback)
            self._annotation = None
        if self._recording:
            self._stop()
        elif self._left:
            self._say(f"training ended before any of the {self._wanted} updates to profile had begun")
