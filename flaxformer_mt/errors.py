"""The exceptions and the warning that users of the package meet.

Library functions raise and warn; only the commands print and choose an exit status.
"""

import warnings


class UserError(Exception):
    """A user error, such as an invalid config: the command line prints `error: MESSAGE` and exits with status 2.

    The message names the thing, both values and the remedy in one line, or has one line per problem.
    """


class TrainingInterrupted(Exception):
    """Training was asked to stop by SIGTERM or SIGINT, and has saved a checkpoint from which it resumes."""

    def __init__(self, step: int, exit_status: int) -> None:
        super().__init__(f"training was interrupted at step {step}, which is saved; train again to resume")
        self.step = step
        # What a shell expects of a process that the signal ended: 128 + its number.
        self.exit_status = exit_status


class FlaxformerWarning(UserWarning):
    """Something that a user should know although the work continues; the command line prints `warning: ...`."""


def warn_user(message: str) -> None:
    """Issues a `FlaxformerWarning`, with the place of the library call that led to it."""
    warnings.warn(message, FlaxformerWarning, stacklevel=3)
