"""Stopping on request: on SIGTERM or Ctrl-C, training finishes the current step and saves a checkpoint."""

import contextlib
import os
import signal
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """Context manager that records the first SIGTERM or SIGINT; a second one raises KeyboardInterrupt.

    with StopRequest() as stop:
        while stop.received is None: ...

    Outside of the main thread no signal handlers can be installed, and nothing is ever received.
    """

    def __init__(self, *, announce: bool = True) -> None:
        """Install nothing yet.

        Args:
          announce: acknowledge the signal on standard error.
        """
        self.received: signal.Signals | None = None
        self._announce = announce
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self._previous[number] = signal.signal(number, self._receive)
            except ValueError:  # not the main thread
                return self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        if not self._announce:
            return
        # os.write, since print is not reentrant and the signal may have interrupted one.
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(2, f"\n{self.received.name}: saving after this step; repeat to end at once\n".encode())

    @property
    def exit_status(self) -> int:
        """The exit status that a shell expects of a process ended by this signal: 128 + its number."""
        return 128 + self.received if self.received is not None else 0

    def receive_from_another_process(self) -> None:
        """Record that another process of the same job received a signal."""
        if self.received is None:
            self.received = signal.SIGTERM
