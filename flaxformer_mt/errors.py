"""The exceptions and the warning that the package raises for users.

Library functions raise and warn; only the commands print and choose an exit status.
"""

import warnings


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


def warn_user(message: str) -> None:
    """Issue a `FlaxformerWarning` that points to the library call that caused it."""
    warnings.warn(message, FlaxformerWarning, stacklevel=3)
