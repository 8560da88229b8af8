"""`fit(profile=N)`: records a trace of N steps for TensorBoard and Perfetto."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jax

from flaxformer_mt.training.update import StepMetrics

# The number of updates before the trace, during which programs are compiled; fewer if the run is too short.
WARM_UP = 10


class Profile:
    """A context manager that records a trace of some steps; the training loop calls it after each step.

    At the end, a message names the files of the trace, or says that none was recorded.
    """

    def __init__(
        self, directory: Path, updates: int, steps: tuple[int, int], *, say: Callable[[str], None]
    ) -> None:
        """Record `updates` steps (0: none) of a loop from step `steps[0]` to step `steps[1]`.

        Up to 10 steps come before the recorded ones, because programs are compiled in the first steps.
        """
        self._directory, self._updates, self._say = directory, updates, say
        self._step, last = steps
        # The number of the update before the recorded ones.
        self._before = self._step + min(WARM_UP, max(0, last - self._step - updates))
        self._recording = False
        self._newest: Any = None

    def __enter__(self) -> Self:
        if self._updates and self._step == self._before:
            self._start()
        return self

    def __call__(self, step: int, metrics: StepMetrics, *_: object) -> None:
        """Start the trace before the first step to record, and end it after the last one."""
        self._step, self._newest = step, metrics
        if self._updates and step == self._before:
            self._start()
        elif self._recording and step == self._before + self._updates:
            self._stop()

    def __exit__(self, *error: object) -> None:
        if self._recording:
            self._stop()
        if self._updates:
            self._say(f"no profile: training ended before the first of the {self._updates} steps to record")

    def _start(self) -> None:
        jax.block_until_ready(self._newest)  # keeps earlier updates out of the trace
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # tracing Python slows down the host and would distort the times
        jax.profiler.start_trace(self._directory, create_perfetto_trace=True, profiler_options=options)
        self._recording = True

    def _stop(self) -> None:
        try:
            jax.block_until_ready(self._newest)
        finally:
            jax.profiler.stop_trace()
            self._recording = False
        if self._step == self._before:  # no update has ended since
            return
        self._updates = 0
        traces = sorted((self._directory / "plugins" / "profile").iterdir(), key=lambda p: p.stat().st_mtime)
        self._say(
            f"profile of steps {self._before + 1} to {self._step}: {traces[-1]}; TensorBoard with the "
            f"profile plugin opens {self._directory}, and ui.perfetto.dev opens perfetto_trace.json.gz"
        )
