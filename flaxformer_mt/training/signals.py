"""Being asked to stop: SIGTERM and Ctrl-C end a run after the step in progress, with its checkpoint saved.

Owns signal handlers while a run is on; knows nothing of training.
"""

import contextlib
import os
import signal
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """A context in which the first SIGTERM or SIGINT is noted and a second one acts at once.

    with StopRequest() as stop:
        while not stop.received: ...
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self._previous[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread: whoever runs the thread is asked instead
                return self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        # Not print: the signal may have come in the middle of one, and streams cannot be entered twice.
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(2, f"\n{self.received.name}: saving after this step; once more ends at once\n".encode())

    @property
    def exit_status(self) -> int:
        """What the shell expects of a process that a signal ended."""
        return 128 + self.received if self.received is not None else 0

    def note_elsewhere(self) -> None:
        """Another process of the same job was asked to stop: this one counts as asked too."""
        if self.received is None:
            self.received = signal.SIGTERM
