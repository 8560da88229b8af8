"""Parsing of flags: from `--flag=value` to the options dataclass of a command, or to an error message.

Owns the import of tyro. Contains the syntax of flags and the messages about wrong flags; the flags of each
command are defined in commands/options.py and commands/experiment_options.py.
"""

import contextlib
import dataclasses
import difflib
import functools
import io
import itertools
import math
import operator
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import tyro

from flaxformer_mt.commands.experiment_options import ExperimentOptions
from flaxformer_mt.commands.flag_values import describe_type, read_value
from flaxformer_mt.commands.help_text import format_help
from flaxformer_mt.commands.options import BARE_FLAGS
from flaxformer_mt.commands.store_paths import expand_path
from flaxformer_mt.config import Config
from flaxformer_mt.config.files import flatten, read_config
from flaxformer_mt.config.find_config import DEFAULT_CONFIG, choose_config, list_recipes
from flaxformer_mt.config.foreign_names import find_own_option
from flaxformer_mt.errors import UserError, find_url
from flaxformer_mt.object_store.working_copies import open_copy

# How similar a flag is to the one that a message asks for: --rum is to --run, --epochs is not to --process.
_SIMILAR = 0.7

# What a command says: everything, warnings and errors (as with --quiet), or errors alone.
LOG_LEVELS = ("info", "warning", "error")

_CONFIG_HELP = f"""

--config=FILE sets the defaults of the --config.* flags. FILE is a Python file with get_config() -> Config, or
the name of a recipe ({{recipes}}). Without --config, the defaults are the config stored in --run=DIR if that
run exists, and otherwise the recipe {DEFAULT_CONFIG}."""


def takes_config(kind: type) -> bool:
    """Return whether a command with this dataclass of options accepts --config and --config.* flags."""
    return issubclass(kind, ExperimentOptions)


def parse_flags(
    kind: type,
    flags: list[str],
    *,
    prog: str,
    words: Sequence[str] = (),
    examples: Mapping[str, str] = types.MappingProxyType({}),
) -> Any:
    """Parse the flags of a command into its options; --config.* flags override the values of its config.

    With --help, or --help=TOPIC (a section of the config, or all), prints the help and raises SystemExit(0).

    Args:
      kind: the dataclass of the command's options.
      flags: the command line after the command's name.
      prog: the name of the command in its help.
      words: the options that may be given as words without a flag, in this order.
      examples: for the help: flags -> what the command does with them.

    Raises:
      UserError: an unknown flag (the message suggests a similar one), or a value of the wrong type.
    """
    flags, topic = _take_help(flags)
    flags = _name_words(kind, flags, words)
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
    if topic is not None:
        known = None if default is tyro.MISSING_NONPROP else default
        usage = " ".join([prog, *(f"[{word.upper()}]" for word in words), "[FLAGS]"])
        shown: dict[str, Any] = {"default": known, "run_config": _find_run_config(flags)}
        shown |= {"topic": topic, "examples": {f"{prog} {line}": text for line, text in examples.items()}}
        print(format_help(kind, usage=usage, description=description, **shown))
        raise SystemExit(0)
    switches = _find_switches(kind)
    flags = [f"{flag}=True" if "=" not in flag and _spell(flag) in switches else flag for flag in flags]
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


def format_completion(shells: Sequence[str], kinds: Mapping[str, type], *, prog: str) -> str:
    """Return the script that completes commands, flags and choices in a shell.

    Args:
      shells: one of bash, zsh, tcsh and fish.
      kinds: the dataclass of the options of each command.

    Raises:
      UserError: there is not one shell, or another one.
    """
    known = ("bash", "zsh", "tcsh", "fish")
    if len(shells) != 1 or shells[0] not in known:
        raise UserError(
            f"--print-completion needs a shell, but got {' '.join(shells)!r} ({', '.join(known)})"
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


def take_log_level(flags: list[str]) -> tuple[list[str], str]:
    """Return the flags without those that every command has, and how much they let it say: info, warning or
    error.

    Raises:
      UserError: there is no such level.
    """
    if any(flag.startswith("--quiet=") for flag in flags):
        raise UserError("--quiet takes no value; --log_level=info says everything")
    flags = [flag.replace("--log-level", "--log_level", 1) for flag in flags]
    rest, level = _take_flag([flag for flag in flags if flag != "--quiet"], "--log_level")
    if level is None:
        level = "warning" if "--quiet" in flags else "info"
    if level not in LOG_LEVELS:
        raise UserError(f"--log_level is {level!r} (allowed: {', '.join(LOG_LEVELS)})")
    return rest, level


def _take_help(flags: list[str]) -> tuple[list[str], str | None]:
    """Return the flags without those that ask for help, and its topic: "" for -h and --help, None without
    them.
    """
    topic = None
    for flag in flags:
        if flag in ("-h", "--help") or flag.startswith("--help="):
            topic = flag.partition("=")[2]
    return [flag for flag in flags if flag not in ("-h", "--help") and not flag.startswith("--help=")], topic


def _name_words(kind: type, flags: Sequence[str], words: Sequence[str]) -> list[str]:
    """Write words as flags: with words=("run", "input"), ["runs/a", "--json", "x.de"] has --run and --input.

    A word after a flag that takes a value is its value.
    """
    several = {f"--{f.name}" for f in dataclasses.fields(kind) if typing.get_origin(f.type) is tuple}
    if takes_config(kind):
        values = flatten(Config()).items()
        several |= {f"--config.{name}" for name, value in values if isinstance(value, tuple | list)}
    switches, names = _find_switches(kind), list(words)
    found, takes = [], 0.0  # the number of words that belong to the flag before
    for token in flags:
        if token.startswith("--"):
            flag = _spell(token)
            takes = 0 if "=" in token or flag in switches else math.inf if flag in several else 1
            found.append(token)
        elif takes:
            takes -= 1
            found.append(token)
        elif names:
            found.append(f"--{names[0]}={token}")
            names = names if f"--{names[0]}" in several else names[1:]
        else:
            what = f"after {' and '.join(map(str.upper, words))}" if words else "without a flag"
            raise UserError(f"unexpected argument {token!r} {what}; write values as --flag=value")
    return found


def _find_switches(kind: type) -> set[str]:
    return {f"--{f.name}" for f in dataclasses.fields(kind) if f.type in (bool, bool | None)}


def _spell(flag: str) -> str:
    """Return the name of a flag with underscores: --beam-size=4 gives --beam_size."""
    return "--" + flag.partition("=")[0].removeprefix("--").replace("-", "_")


def _join_repeated(kind: type, flags: list[str]) -> list[str]:
    """Join repeated flags that have several values: --run=A --run=B becomes --run=A,B."""
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
    """Return the config of the run that --run names, for the help; None without such a run."""
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
    """Remove a flag in either form and return its value: ["--a", "1", "--b=2"] gives ["--b=2"], "1"."""
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
    return [f"--{name}" for name in (*names, "quiet", "log_level", "help")] + (
        [f"--config.{name}" for name in flatten(Config())] if takes_config(kind) else []
    )


def _find_mistake(kind: type, flags: list[str], box: str) -> UserError:
    """Return the error for flags that tyro refuses with the framed text `box`."""
    # A misspelt flag can make a required flag missing: the misspelt one is the error to report.
    known = _flag_names(kind)
    for flag in flags:
        if flag.startswith("--") and _spell(flag) not in known:
            _refuse_unknown(flag, known)
    return UserError(_extract_message(box))


def _refuse_unknown(token: str, known: Sequence[str]) -> NoReturn:
    if not token.startswith("--"):
        raise UserError(f"unexpected argument {token!r}; write values as --flag=value")
    flag = token.partition("=")[0]
    field = flag.removeprefix("--").rpartition(".")[2].replace("-", "_")
    same_field = [name for name in known if name.removeprefix("--").rpartition(".")[2] == field]
    own = None if same_field else find_own_option(flag, set(known))
    similar = same_field or difflib.get_close_matches(flag, known, n=1, cutoff=_SIMILAR)
    hint = own or (f"did you mean {' or '.join(similar)}?" if similar else "--help=all lists all flags")
    raise UserError(f"unknown flag {flag}; {hint}")


def _extract_message(box: str) -> str:
    """Extract the message from a framed error text of tyro, as one line without frame and footer."""
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
    """Make tyro parse values with `read_value`, whose messages are written for users."""
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
