"""Parses the words and flags of a command line into the options of a command, or raises UserError.

A flag is a field of the command's options (options.py) or of its config. Its value must have the field's
type. This module also replaces URLs of object stores by local copies.
"""

import dataclasses
import difflib
import keyword
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from flaxformer_mt.commands.help_layout import format_help, is_required
from flaxformer_mt.commands.options import (
    BARE_FLAGS,
    ExperimentOptions,
    ExportOptions,
    GeneralOptions,
    PlotOptions,
)
from flaxformer_mt.config import StageConfig
from flaxformer_mt.config.field_values import (
    find_marks,
    find_wrong_values,
    read_value,
    replace_fields,
)
from flaxformer_mt.config.files import (
    DEFAULT_CONFIG,
    choose_config,
    list_recipes,
    split_checkpoint,
)
from flaxformer_mt.config.foreign_names import explain_foreign_flag
from flaxformer_mt.config.removed import refuse_removed_flag
from flaxformer_mt.errors import UserError, find_url, local_path
from flaxformer_mt.object_store.remote_runs import fetch_input, open_copy, open_output, publish_output

# Flags that name a file or a folder to read.
_INPUTS = ("input", "candidates", "prefix", "required", "glossary", "source", "reference", "target", "vocab")
# How similar a flag is to the one that a message asks for: --rum is to --run, --epochs is not to --process.
_SIMILAR = 0.7
_CONFIG_HELP = f"""

--config=FILE sets the defaults of the --config.* flags. FILE is a Python file with get_config() -> Config, or
the name of a recipe ({{recipes}}). Without --config, the defaults are the config stored in --run=DIR if that
run exists, and otherwise the recipe {DEFAULT_CONFIG}."""


def _read_stages(path: str) -> tuple[StageConfig, ...]:
    if not path:
        return ()
    from flaxformer_mt.corpus.opustrainer_file import read_curriculum

    return read_curriculum(path)


def expand_path(name: str, path: Path) -> Path:
    """Expand ~ in a flag's path, since shells do not in --run=~/x; replace a --run URL by a local copy."""
    if name == "run":
        return open_copy(path)
    # Inputs, outputs and the URL of a parent are known when the command runs.
    return path if find_url(path) and name in (*_INPUTS, "output", "from_") else local_path(path)


def run_locally(run: Callable[[Any], object], options: Any) -> object:
    """Run a command; download inputs that are URLs first, and upload an output that is a URL at the end."""
    fields = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    # A sentence, not a file; and a folder that must be empty, of which `export_run` takes care.
    others = {PlotOptions: "source", ExportOptions: "output"}.get(type(options))
    names = [
        name
        for name in (*_INPUTS, "output")
        if name != others and isinstance(fields.get(name), str | Path) and find_url(fields[name])
    ]
    if not names:
        return run(options)
    paths = {name: (open_output if name == "output" else fetch_input)(fields[name]) for name in names}
    changes = {name: str(path) if isinstance(fields[name], str) else path for name, path in paths.items()}
    result = run(dataclasses.replace(options, **changes))
    if "output" in paths:
        from flaxformer_mt.parallel.processes import is_first

        if is_first():
            publish_output(paths["output"])
    return result


def takes_config(kind: type) -> bool:
    return issubclass(kind, ExperimentOptions)


def parse_flags(
    kind: type,
    flags: list[str],
    *,
    prog: str,
    words: Sequence[str] = (),
    examples: Mapping[str, str] = types.MappingProxyType({}),
) -> Any:
    """Parse flags into a command's options; --help and --help=TOPIC print help and raise SystemExit(0)."""
    known = list_flag_types(kind)
    by_flag = _split_line(["--help" if token == "-h" else token for token in flags], known, words)
    topic = by_flag.pop("--help", None)
    if topic is not None:  # help is shown whatever flags are unknown or have no value
        by_flag = {flag: items for flag, items in by_flag.items() if flag in known and items}
    for flag in [flag for flag in by_flag if flag not in known]:
        if not refuse_removed_flag(flag, ",".join(by_flag[flag])):
            _refuse_unknown(flag, list(known))
        del by_flag[flag]
    with_commas = {flag: by_flag.pop(flag) for flag in find_marks(kind, str, "--") if flag in by_flag}
    texts = _take_checkpoint(
        {flag: _join_values(flag, items, known) for flag, items in by_flag.items()}, known
    )
    required = [f"--{field.name}" for field in dataclasses.fields(kind) if is_required(field)]
    empty = [
        flag for flag in ("--config", "--run", "--init", *required) if not texts.get(flag, "x").strip(" ,")
    ]
    empty += [flag for flag, items in with_commas.items() if not "".join(items).strip(" ,")]
    if empty:
        raise UserError(f"{empty[0]} has no value; give {empty[0]}=VALUE")
    values: dict[str, Any] = {flag[2:]: tuple(items) for flag, items in with_commas.items()}
    if takes_config(kind):
        values |= _choose_config(texts)
    if topic is not None:
        text = format_help(
            kind,
            usage=" ".join([prog, *(f"[{word.upper()}]" for word in words), "[FLAGS]"]),
            description=_describe(kind),
            examples={f"{prog} {line}": text for line, text in examples.items()},
            topic="".join(topic),
            default=kind(**values) if values else None,
        )
        print(text)
        raise SystemExit(0)
    if missing := [flag for flag in required if flag not in texts and flag[2:] not in values]:
        raise UserError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} required; see --help"
        )
    return _make_options(kind, texts, values, known)


def _describe(kind: type) -> str:
    recipes = _CONFIG_HELP.format(recipes=", ".join(list_recipes())) if takes_config(kind) else ""
    return (kind.__doc__ or "") + recipes


def _choose_config(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the config without the changes by --config.* flags, and the run directory."""
    name, run, init = (texts.get(flag) for flag in ("--config", "--run", "--init"))
    if init and not run:
        raise UserError(f"--init={init} starts another run; give its directory as --run=DIR")
    base = open_copy(split_checkpoint(init)[0]) if init else None
    config, run_dir = choose_config(name, run and str(open_copy(run)), base)
    return {"config": config, "run": run_dir}


def _make_options(
    kind: type, texts: Mapping[str, str], values: Mapping[str, Any], known: Mapping[str, Any]
) -> Any:
    """Make options from `values` and flags; --config.* flags change the config in `values`."""
    fields, changes = dict(values), {}
    for flag, text in texts.items():
        name, _, field = flag.removeprefix("--").partition(".")
        name += "_" * keyword.iskeyword(name)
        refuse_removed_flag(flag, text)
        of_stages = known[flag] == tuple[StageConfig, ...]
        value = _read_stages(text) if of_stages else read_value(text, known[flag], flag, from_text=True)
        if field:
            changes[field] = value
        elif name not in fields:
            fields[name] = expand_path(name, value) if isinstance(value, Path) else value
    if changes:
        fields["config"] = replace_fields(fields["config"], changes, "--config")
    options = kind(**fields)
    # The config has more than bounds to be checked, by `validate`.
    wrong = [line for name, line in find_wrong_values(options, "--") if not name.startswith("--config.")]
    if wrong:
        raise UserError("\n".join(wrong))
    return options


def list_flag_types(kind: type) -> dict[str, Any]:
    """Return the value type of each flag of a command, such as Path for --run and int for --config.seed."""
    config = {"--config": str} if takes_config(kind) else {}
    return _list_field_types(kind, "--") | config | _list_field_types(GeneralOptions, "--")


def _list_field_types(kind: type, prefix: str) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        section = dataclasses.is_dataclass(hint)
        flag = prefix + name.removesuffix("_")  # Python has no field `for`
        hints |= _list_field_types(hint, f"{flag}.") if section else {flag: hint}
    return hints


def take_log_level(flags: list[str]) -> tuple[list[str], str]:
    """Remove --quiet and --log_level; return the other flags and the level: info, warning or error."""
    rest, level, tokens = [], "info", iter(flags)
    for token in tokens:
        flag, equals, value = token.partition("=")
        if token == "--quiet":
            level = "warning"
        elif flag == "--quiet":
            raise UserError("--quiet takes no value; --log_level=info says everything")
        elif flag in ("--log_level", "--log-level"):
            level = value if equals else next(tokens, "")
            read_value(level, typing.get_type_hints(GeneralOptions)["log_level"], "--log_level")
        else:
            rest.append(token)
    return rest, level


def _split_line(
    tokens: Sequence[str], known: Mapping[str, Any], words: Sequence[str]
) -> dict[str, list[str]]:
    """Return the values of each flag on the command line, as texts.

    With words=("run", "input"), ["runs/a", "--json", "--seed", "3"] gives "runs/a" for --run, nothing for
    --json and "3" for --seed. Flags with several values take all texts that follow, also when repeated; if
    another flag is repeated, the last value counts.
    """
    by_flag: dict[str, list[str]] = {}
    names, takes = list(words), 0.0
    for token in tokens:
        if token.startswith("--"):
            flag, equals, value = token.partition("=")
            flag = _spell(flag) if _spell(flag) in known else flag
            texts = [value] if equals else []
            takes = 0 if equals or is_switch(flag, known) else math.inf if _has_several(flag, known) else 1
        elif takes:
            by_flag[flag].append(token)
            takes -= 1
            continue
        elif names:
            flag, texts = f"--{names[0]}", [token]
            names = names if _has_several(flag, known) else names[1:]
        else:
            what = f"after {' and '.join(map(str.upper, words))}" if words else "without a flag"
            raise UserError(f"unexpected argument {token!r} {what}; write values as --flag=value")
        joined = "." not in flag and _has_several(flag, known)
        by_flag[flag] = [*by_flag.get(flag, []), *texts] if joined else texts
    return by_flag


def _spell(flag: str) -> str:
    return "--" + flag.removeprefix("--").replace("-", "_")


def is_switch(flag: str, known: Mapping[str, Any]) -> bool:
    return "." not in flag and known.get(flag) in (bool, bool | None)


def _has_several(flag: str, known: Mapping[str, Any]) -> bool:
    return typing.get_origin(known.get(flag)) is tuple


def _join_values(flag: str, texts: Sequence[str], known: Mapping[str, Any]) -> str:
    if not texts and is_switch(flag, known):
        return "True"
    if not texts and flag in BARE_FLAGS:
        return BARE_FLAGS[flag]
    if not texts and not _has_several(flag, known):
        raise UserError(f"{flag} has no value; give {flag}=VALUE")
    return ",".join(texts)


def _take_checkpoint(texts: dict[str, str], known: Mapping[str, Any]) -> dict[str, str]:
    """Split --run=RUN@CHECKPOINT into --run and --checkpoint, if the command has both flags."""
    run, checkpoint = split_checkpoint(texts.get("--run", ""))
    if checkpoint is None or "--checkpoint" not in known or _has_several("--run", known):
        return texts
    if texts.get("--checkpoint", checkpoint) != checkpoint:
        both = f"--run={texts['--run']} and --checkpoint={texts['--checkpoint']}"
        raise UserError(f"{both} name two checkpoints; leave one out")
    return texts | {"--run": run, "--checkpoint": checkpoint}


def _refuse_unknown(flag: str, known: Sequence[str]) -> NoReturn:
    if fields := [name for name in known if name.startswith(f"{flag}.")]:
        raise UserError(f"{flag} has several values; give one of them, as {fields[0]}=VALUE")
    field = flag.removeprefix("--").rpartition(".")[2].replace("-", "_")
    same_field = [name for name in known if name.removeprefix("--").rpartition(".")[2] == field]
    section = flag.rpartition(".")[0] + "."
    near = difflib.get_close_matches(flag, known, n=1, cutoff=_SIMILAR)
    for name in known:  # those of the same section with such a word: model_dim for dimm
        if name.startswith(section) and difflib.get_close_matches(field, name[len(section) :].split("_")):
            near.append(name)
    typos = difflib.get_close_matches(flag, known, n=1, cutoff=0.95)
    similar = list(dict.fromkeys([*typos, *(same_field or near)]))
    hint = "" if same_field else explain_foreign_flag(field, known)
    hint = hint or (f"did you mean {' or '.join(similar)}?" if similar else "--help=all lists all flags")
    raise UserError(f"unknown flag {flag}; {hint}")
