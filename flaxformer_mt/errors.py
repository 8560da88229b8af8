"""The exceptions and the warning that the package raises for users.

Library functions raise and warn; only the commands print and choose an exit status.
"""

import contextlib
import errno
import warnings
from collections.abc import Iterator
from pathlib import Path

# What a write meets when a disk, a quota, the inodes, or the largest file of the process is exceeded.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(Exception):
    """A user error, such as an invalid config: commands print `error: MESSAGE` and exit with status 2.

    The message names the thing, both values and the remedy in one line, or has one line per problem.
    """


class TrainingInterrupted(Exception):
    """SIGTERM or SIGINT stopped training after a checkpoint was saved; training resumes from there."""

    def __init__(self, step: int, exit_status: int) -> None:
        super().__init__(f"training was interrupted at step {step}, which is saved; train again to resume")
        self.step = step
        # The exit status that shells expect after a signal: 128 + the number of the signal.
        self.exit_status = exit_status


class FlaxformerWarning(UserWarning):
    """A problem that a user should know about while work continues; commands print `warning: MESSAGE`."""


@contextlib.contextmanager
def name_full_disk(path: str | Path) -> Iterator[None]:
    """Adds the path to the error of a full disk, which lacks it if an open file was written."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in DISK_FULL:
            error.filename = str(path)
        raise


def warn_user(message: str) -> None:
    """Issue a `FlaxformerWarning` that points to the library call that caused it."""
    warnings.warn(message, FlaxformerWarning, stacklevel=3)
