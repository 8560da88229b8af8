"""Parsing of flags: from `--flag=value` to the options dataclass of a command, or to an error message.

Owns the import of tyro. Contains the syntax of flags and the messages about wrong flags; the flags of each
command are defined in commands/options.py and commands/experiment_options.py.
"""

import contextlib
import dataclasses
import difflib
import io
import itertools
import re
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import tyro

from flaxformer_mt.commands.experiment_options import ExperimentOptions
from flaxformer_mt.commands.flag_values import describe_type, read_value
from flaxformer_mt.commands.help_text import format_help
from flaxformer_mt.commands.options import BARE_FLAGS
from flaxformer_mt.commands.store_paths import expand_path
from flaxformer_mt.config import Config
from flaxformer_mt.config.files import flatten, read_config
from flaxformer_mt.config.find_config import DEFAULT_CONFIG, choose_config, list_recipes
from flaxformer_mt.errors import UserError, find_url
from flaxformer_mt.object_store.working_copies import open_copy

# Field whose values may be written without a flag.
_POSITIONAL = "files"

_CONFIG_HELP = f"""

--config=FILE sets the defaults of the --config.* flags. FILE is a Python file with get_config() -> Config, or
the name of a recipe ({{recipes}}). Without --config, the defaults are the config stored in --run=DIR if that
run exists, and otherwise the recipe {DEFAULT_CONFIG}."""


def takes_config(kind: type) -> bool:
    """Whether a command with this dataclass of options accepts --config and --config.* flags."""
    return issubclass(kind, ExperimentOptions)


def parse_flags(kind: type, flags: list[str], *, prog: str) -> Any:
    """Parses the flags of a command into its options; --config.* flags override the values of its config.

    With --help, prints the help and raises SystemExit(0).

    Args:
      kind: the dataclass of the command's options.
      flags: the command line after the command's name.
      prog: the name of the command in its help.

    Raises:
      UserError: an unknown flag (the message suggests a similar one), or a value of the wrong type.
    """
    default: Any = tyro.MISSING_NONPROP
    description = kind.__doc__ or ""
    if takes_config(kind):
        names = {f.name for f in dataclasses.fields(kind)}
        flags, config_name = _take_flag(flags, "--config")
        _, run = _take_flag(flags, "--run")
        init = _take_flag(flags, "--init")[1] if "init" in names else None
        config, run_dir = choose_config(config_name, run and str(open_copy(run)), init and _open_init(init))
        default = kind(run=run_dir, config=config)
        description += _CONFIG_HELP.format(recipes=", ".join(list_recipes()))
    if not {"-h", "--help"}.isdisjoint(flags):
        known = None if default is tyro.MISSING_NONPROP else default
        print(
            format_help(
                kind, prog=prog, description=description, default=known, run_config=_find_run_config(flags)
            )
        )
        raise SystemExit(0)
    switches = {f"--{f.name}" for f in dataclasses.fields(kind) if f.type in (bool, bool | None)}
    flags = [f"{flag}=True" if flag in switches else flag for flag in flags]
    if any(field.name == _POSITIONAL for field in dataclasses.fields(kind)):
        flags = _name_positional(flags)
    flags = [
        f"{flag}={BARE_FLAGS[flag]}" if flag in BARE_FLAGS and following.startswith("--") else flag
        for flag, following in zip(flags, [*flags[1:], "--"], strict=False)
    ]
    flags = _join_repeated(kind, flags)
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            options, unknown = tyro.cli(
                kind,
                prog=prog,
                args=flags,
                default=default,
                return_unknown_args=True,
                use_underscores=True,
                config=(tyro.conf.FlagConversionOff,),
                registry=_registry(),
            )
    except SystemExit:
        raise _find_mistake(kind, flags, captured.getvalue()) from None
    print(captured.getvalue(), end="", file=sys.stderr)  # warnings about values, such as a file of stages
    if unknown:
        _refuse_unknown(unknown[0], _flag_names(kind))
    values = ((f.name, getattr(options, f.name)) for f in dataclasses.fields(options))
    return dataclasses.replace(options, **{k: expand_path(k, v) for k, v in values if isinstance(v, Path)})


def _name_positional(flags: list[str]) -> list[str]:
    """Gives values without a flag to --files: ["a", "--run", "R", "b"] becomes --run R --files=a,b."""
    rest, values, waiting = list[str](), list[str](), False
    for token in flags:
        if waiting or token.startswith("-"):
            rest.append(token)
            waiting = not waiting and token.startswith("--") and "=" not in token
        else:
            values.append(token)
    return [*rest, f"--{_POSITIONAL}={','.join(values)}"] if values else rest


def _join_repeated(kind: type, flags: list[str]) -> list[str]:
    """Joins repeated flags that have several values: --run=A --run=B becomes --run=A,B."""
    for field in dataclasses.fields(kind):
        name, values = f"--{field.name}", []
        if typing.get_origin(field.type) is tuple and sum(f.partition("=")[0] == name for f in flags) > 1:
            while any(flag.partition("=")[0] == name for flag in flags):
                first = next(at for at, flag in enumerate(flags) if flag.partition("=")[0] == name)
                end = first + (1 if "=" in flags[first] else 2)
                _, value = _take_flag(flags[first:end], name)
                values.append(value or "")
                flags = flags[:first] + flags[end:]
            flags = [*flags, f"{name}={','.join(values)}"]
    return flags


def _find_run_config(flags: list[str]) -> Config | None:
    """The config of the run that --run names, for the help; None without such a run."""
    _, run = _take_flag(flags, "--run")
    path = open_copy(run or "") / "config.json"
    return read_config(path) if run and path.is_file() else None


def _open_init(init: str) -> str:
    """RUN or RUN@CHECKPOINT, with the local folder of a run in an object store."""
    if not find_url(init):
        return init
    run, at, checkpoint = init.rpartition("@")
    if not at or "/" in checkpoint:
        run, at, checkpoint = init, "", ""
    return f"{open_copy(run)}{at}{checkpoint}"


def _take_flag(flags: list[str], flag: str) -> tuple[list[str], str | None]:
    """Removes a flag in either form and returns its value: ["--a", "1", "--b=2"] gives ["--b=2"], "1"."""
    rest, value, waiting = [], None, False
    for token in flags:
        if waiting:
            value, waiting = token, False
        elif token == flag:
            waiting = True
        elif token.startswith(flag + "="):
            value = token[len(flag) + 1 :]
        else:
            rest.append(token)
    if waiting or value == "":
        raise UserError(f"{flag} has no value; give {flag}=VALUE")
    return rest, value


def _flag_names(kind: type) -> list[str]:
    names = [f.name for f in dataclasses.fields(kind)]
    return [f"--{name}" for name in names] + (
        [f"--config.{name}" for name in flatten(Config())] if takes_config(kind) else []
    )


def _find_mistake(kind: type, flags: list[str], box: str) -> UserError:
    """The error for flags that tyro refuses with the framed text `box`."""
    # A misspelt flag can make a required flag missing: the misspelt one is the error to report.
    known = _flag_names(kind)
    for flag in flags:
        name = flag.partition("=")[0].replace("-", "_").replace("__", "--", 1)
        if flag.startswith("--") and name not in known:
            _refuse_unknown(flag, known)
    return UserError(_extract_message(box))


def _refuse_unknown(token: str, known: Sequence[str]) -> NoReturn:
    if not token.startswith("--"):
        raise UserError(f"unexpected argument {token!r}; write values as --flag=value")
    flag = token.partition("=")[0]
    field = flag.removeprefix("--").rpartition(".")[2].replace("-", "_")
    same_field = [name for name in known if name.removeprefix("--").rpartition(".")[2] == field]
    similar = same_field or difflib.get_close_matches(flag, known, n=1)
    hint = f"did you mean {' or '.join(similar)}?" if similar else "--help lists all flags"
    raise UserError(f"unknown flag {flag}; {hint}")


def _extract_message(box: str) -> str:
    """Extracts the message from a framed error text of tyro, as one line without frame and footer."""
    title, *rows = [line.strip("│╭╮╰╯ ") for line in box.strip().split("\n")]
    body = " ".join(itertools.takewhile(lambda row: not row.startswith("──"), rows)).strip()
    bad_value = re.match(r"Error parsing (\S+): (.*)", body)
    if bad_value:
        return f"{bad_value[1]} {bad_value[2]}"
    if title.startswith("─ Required options"):
        found = dict.fromkeys(re.findall(r"--[a-z_0-9]+", box))
        missing = [flag for flag in found if flag != "--help"]
        return f"{' and '.join(missing)} must be given; see --help"
    no_value = re.match(r"Missing value for argument '(\S+)'", body)
    return f"{no_value[1]} has no value; give {no_value[1]}=VALUE" if no_value else body or box


def _registry() -> tyro.constructors.ConstructorRegistry:
    """Makes tyro parse values with `read_value`, whose messages are written for users."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
        kind: Any = info.type
        if kind not in (bool, int, float, str, Path) and typing.get_origin(kind) is None:
            return None  # a section of the config: its fields are flags
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs="*" if typing.get_origin(kind) is tuple else 1,
            metavar=describe_type(kind),
            instance_from_str=lambda words: read_value(",".join(words), kind),
            is_instance=lambda value: True,
            str_from_instance=lambda value: [
                ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            ],
        )

    return registry
