"""Completion in shells: scripts for the commands, their flags and the choices of these, written by tyro."""

import contextlib
import functools
import io
import operator
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import tyro

from flaxformer_mt.errors import UserError

_SHELLS = ("bash", "zsh", "fish")


def format_completion(shells: Sequence[str], kinds: Mapping[str, type], *, prog: str) -> str:
    """Return the script that completes commands, flags and choices in a shell.

    Args:
      shells: one of bash, zsh and fish.
      kinds: the dataclass of the options of each command.

    Raises:
      UserError: there is not one shell, or another one.
    """
    if len(shells) != 1 or shells[0] not in _SHELLS:
        raise UserError(
            f"--print-completion needs a shell, but got {' '.join(shells)!r} ({', '.join(_SHELLS)})"
        )
    script = io.StringIO()
    commands: Any = functools.reduce(
        operator.or_,
        (Annotated[kind, tyro.conf.subcommand(name, prefix_name=False)] for name, kind in kinds.items()),
    )
    with contextlib.redirect_stdout(script), contextlib.suppress(SystemExit):
        tyro.cli(
            commands,
            prog=prog,
            args=["--tyro-print-completion", shells[0]],
            use_underscores=True,
            config=(tyro.conf.FlagConversionOff,),
        )
    return script.getvalue()
