"""Formats `COMMAND --help`: the flags of a command in groups, with their comments and defaults.

The text of a flag is the comment above its field. A comment `# ---- NAME ----` begins a group of flags.
"""

import dataclasses
import inspect
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from flaxformer_mt.commands.options import BARE_FLAGS, GeneralOptions
from flaxformer_mt.config import Config, StageConfig
from flaxformer_mt.config.field_values import Usual, find_marks
from flaxformer_mt.errors import UserError

# Columns: the most that a line takes, and the indentation of explanations and of further lines.
_MAX_WIDTH = 100
_INDENT = 26
_DEEPER = " " * 6
_GENERAL = "general"

# The last sentence of a comment that says what None, or an empty value, stands for.
_UNSET = re.compile(r"(?:^|(?<=[.;]) )(?:None|Empty): (?P<meaning>(?:(?!\. ).)+)\.$")


class FlagHelp(NamedTuple):
    flag: str
    text: str
    group: str


class FieldComment(NamedTuple):
    """The comment above a field as one line, and the field's group in the help."""

    text: str
    group: str


def format_help(
    kind: type,
    *,
    usage: str,
    description: str,
    examples: Mapping[str, str] = types.MappingProxyType({}),
    topic: str = "all",
    default: Any = None,
) -> str:
    config = getattr(default, "config", None)
    parts: list[str | FlagHelp] = []
    if topic in ("", "all"):
        parts.append(f"usage: {usage}")
        for paragraph in description.split("\n\n"):
            parts += ["", " ".join(paragraph.split())]
        if examples:
            parts += ["", "examples:"]
        for example, text in examples.items():
            parts += [f"  {example}", f"{_DEEPER}{text}"]
        flags = [*list_flags(kind, default=default), *list_flags(GeneralOptions)]
        for group in dict.fromkeys([_GENERAL, *(flag.group for flag in flags)]):
            parts += ["", f"{group}:", *(flag for flag in flags if flag.group == group)]
        if config is not None:
            parts += _list_topic(config, topic) if topic else _list_usual(config)
    else:
        parts += _list_topic(config, topic)
    width = min(_MAX_WIDTH, shutil.get_terminal_size((_MAX_WIDTH, 24)).columns)
    return "\n".join(line for part in parts for line in _lay_out(part, width)).lstrip("\n")


def list_flags(kind: type, *, default: Any = None) -> Iterator[FlagHelp]:
    """Yield a command's flags without the config fields; required flags come first, inherited flags last."""
    comments, declared = read_comments(kind), list(kind.__dict__.get("__annotations__", {}))

    def place(field: dataclasses.Field[Any]) -> tuple[bool, int]:
        own = field.name in declared
        return not is_required(field), declared.index(field.name) if own else len(declared)

    for field in sorted(dataclasses.fields(kind), key=place):
        if field.type is not Config:
            comment = comments[field.name]
            value = getattr(default, field.name) if default is not None else _default_of(field)
            text = _explain(comment.text, value, switch=field.type is bool)
            yield FlagHelp(_spell_option(field), text, comment.group)


def list_settings(section: Any, path: str) -> Iterator[FlagHelp]:
    comments = read_comments(type(section))
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if not dataclasses.is_dataclass(value):
            flag = f"--{path}.{field.name}={_spell_type(field.type)}"
            yield FlagHelp(flag, _explain(comments[field.name].text, value), path)


def list_sections(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(values):
        section = getattr(values, field.name)
        if dataclasses.is_dataclass(section):
            yield f"{path}{field.name}", section
            yield from list_sections(section, f"{path}{field.name}.")


def read_comments(kind: type) -> dict[str, FieldComment]:
    """Return the comment of each field from the class that declares the field."""
    comments: dict[str, FieldComment] = {}
    for base in reversed(kind.__mro__):
        if section := base.__dict__.get("DECLARED_IN"):
            declared = read_comments(section)
            unset = base.__dict__.get("UNSET", "")
            comments |= {
                name: FieldComment(comment.text + unset, comment.group)
                for name, comment in declared.items()
                if name in base.__annotations__
            }
        elif dataclasses.is_dataclass(base):
            comments |= _read_own_comments(base)
    return comments


def _read_own_comments(kind: type) -> Mapping[str, FieldComment]:
    comments, lines, group = {}, list[str](), _GENERAL
    for row in inspect.getsource(kind).split("\n"):
        if heading := re.match(r"    # ---- (.+) ----$", row):
            group, lines = heading[1], []
        elif comment := re.match(r"    # (.*)$", row):
            lines.append(comment[1])
        else:
            if name := re.match(r"    (\w+): ", row):
                comments[name[1]] = FieldComment(" ".join(lines), group)
            lines = []
    return comments


def is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _spell_option(field: dataclasses.Field[Any]) -> str:
    """Return the syntax of a flag: --run=PATH, --json, --lowercase[={True,False}]."""
    flag, kind = f"--{field.name.removesuffix('_')}", field.type
    if flag == "--help":
        return "-h, --help"
    value = _spell_type(kind).replace("|none", "").replace("PATH|STR", "PATH")
    if kind is bool and field.default is False:
        return flag
    optional = kind in (bool, bool | None) or flag in BARE_FLAGS
    return f"{flag}[={value}]" if optional else f"{flag}={value}"


def _spell_type(kind: Any) -> str:
    """Format a type for `--help`, without its bounds: INT, {bucket,pack}, FLOAT|none."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _spell_type(arguments[0])
    if origin in (types.UnionType, typing.Union):
        return "|".join(
            "none" if argument is types.NoneType else _spell_type(argument) for argument in arguments
        )
    if origin is Literal:
        return "{" + ",".join(map(str, arguments)) + "}"
    if kind == tuple[StageConfig, ...]:
        return "FILE.yaml"
    if origin is tuple:
        return f"{_spell_type(arguments[0])},..."
    return "{True,False}" if kind is bool else str(kind.__name__).upper()


def _explain(text: str, value: Any, *, switch: bool = False) -> str:
    """Return the comment of a field with its default; the meaning of None or empty becomes the default."""
    if value is dataclasses.MISSING:
        return f"{text} (required)"
    if value is False and switch:
        return text
    if value not in (None, "", ()):
        return f"{text} (default: {_format_value(value)})"
    unset = _UNSET.search(text)
    if unset is None:
        return text if value is None else f"{text} (default: {_format_value(value) or 'empty'})"
    return f"{text[: unset.start()]} (default: {unset['meaning']})".lstrip()


def _format_value(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "none" if value is None else str(value)


def _list_usual(config: Config) -> list[str | FlagHelp]:
    sections = dict(list_sections(config))
    flags = [flag for name, section in sections.items() for flag in list_settings(section, f"config.{name}")]
    by_name = {flag.flag.partition("=")[0]: flag for flag in flags}
    usual = [by_name[name] for name in find_marks(Config, Usual, "--config.")]
    names = ", ".join(f"--help={name}" for name in sections if "." not in name)
    title = "settings of the experiment that are usually changed:"
    return ["", title, *usual, "", f"All settings: --help=all, or one section: {names}."]


def _list_topic(config: Config | None, topic: str) -> list[str | FlagHelp]:
    sections = {} if config is None else dict(list_sections(config))
    if topic not in ("all", *sections):
        known = ", ".join(["all", *sections])
        raise UserError(f"--help={topic}: there is no such part of the help (there are: {known})")
    listed = {name: part for name, part in sections.items() if f"{name}.".startswith(f"{topic}.")}
    if topic == "all":
        listed = {"": config, **sections}
    parts: list[str | FlagHelp] = []
    for name, section in listed.items():
        path = f"config.{name}".rstrip(".")
        title = " ".join((type(section).__doc__ or "").split())
        parts += ["", f"--{path}.*: {title}", *list_settings(section, path)]
    return parts


def _lay_out(part: str | FlagHelp, width: int) -> list[str]:
    if isinstance(part, str):
        further = _DEEPER if part.startswith(" ") else ""
        return textwrap.wrap(part, width, subsequent_indent=further, break_on_hyphens=False) or [""]
    rows = textwrap.wrap(part.text, width - _INDENT, break_on_hyphens=False, break_long_words=False)
    head = f"  {part.flag}"
    if len(head) > _INDENT - 2:
        return [*_split_at_commas(head, width), *(" " * _INDENT + row for row in rows)]
    return [head.ljust(_INDENT) + rows[0], *(" " * _INDENT + row for row in rows[1:])]


def _split_at_commas(head: str, width: int) -> list[str]:
    rows = [""]
    for part in re.findall(r"[^,]*,?", head):
        if len(rows[-1]) + len(part) > width:
            rows.append(_DEEPER)
        rows[-1] += part
    return rows
