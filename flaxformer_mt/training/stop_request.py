"""`StopRequest`: SIGTERM and SIGINT end training, with a checkpoint, after the step in progress."""

import contextlib
import os
import signal
from types import FrameType
from typing import Any, Self

from flaxformer_mt.parallel.processes import any_process, process_count


class StopRequest:
    """A context manager that records the first SIGTERM or SIGINT; a second one raises KeyboardInterrupt.

    If it is entered outside of the main thread, it records no signals.
    """

    def __init__(self, *, announce: bool = True) -> None:
        """With `announce`, the first signal is acknowledged on standard error."""
        self.received: signal.Signals | None = None
        self._announce = announce
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        with contextlib.suppress(ValueError):  # not the main thread
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
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

    def is_due(self, *, at_log_step: bool) -> bool:
        """Return whether to stop now; several processes decide this together, and only at log steps."""
        if process_count() > 1:
            if not at_log_step or not any_process(self.received is not None):
                return False
            self.received = self.received or signal.SIGTERM
        return self.received is not None

    @property
    def exit_status(self) -> int:
        """The exit status: 128 + the number of the received signal, as shells expect; 0 without a signal."""
        return 128 + self.received if self.received is not None else 0
