"""`train --profile`: a trace of some updates, for TensorBoard and Perfetto.

Decides when the trace starts and stops, and in which directory it is written:

    RUN/profile/plugins/profile/TIME/ HOST.xplane.pb · HOST.trace.json.gz · perfetto_trace.json.gz
"""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

# The number of updates before the trace, during which programs are compiled; fewer if the run is too short.
WARM_UP = 10


class Profile:
    """Record a trace of some updates; a context manager that also stops an unfinished trace on exit.

    Reports the directory of the trace, or that no trace was recorded.
    """

    def __init__(self, directory: Path, updates: int, *, remaining: int, say: Callable[[str], None]) -> None:
        """Store the arguments; recording starts with `begin`.

        Args:
          directory: the directory of the trace, created when recording starts.
          updates: the number of updates to record; 0: record nothing and report nothing.
          remaining: the largest number of updates that the run can still take.
          say: shows a line to the user.
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
        """Mark the start of update number `step`, before the loop waits for its batch."""
        if not self._left:
            return
        if self._skip:
            self._skip -= 1
            return
        if not self._recording:
            jax.block_until_ready(self._newest)  # keeps earlier updates out of the trace
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # tracing Python slows down the host and would distort the times
            jax.profiler.start_trace(self._directory, create_perfetto_trace=True, profiler_options=options)
            self._recording, self._first = True, step
        self._last = step
        self._annotation = jax.profiler.StepTraceAnnotation("update", step_num=step)
        self._annotation.__enter__()

    def end(self, step: int, result: Any) -> None:
        """Mark the dispatch of update number `step`; `result` is ready when the devices have finished it."""
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
            f"profile of updates {self._first} to {self._last}: {traces[-1]}; TensorBoard with the profile "
            f"plugin opens {self._directory}, and ui.perfetto.dev opens perfetto_trace.json.gz"
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
            self._say(f"no profile: training ended before the first of the {self._wanted} updates to record")
