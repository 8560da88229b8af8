"""Reads YAML files of other programs; their depth and number of values are checked before loading."""

from typing import Any

import yaml

from flaxformer_mt.errors import UserError, first_line

# Options have hundreds of values, and a file that is read `as_text` may be a vocabulary.
_MOST_VALUES, _MOST_TEXTS = 1 << 16, 1 << 20
# PyYAML calls itself for each level, and a deeper file could end the process.
_DEEPEST = 100


def load_yaml(content: str | bytes, name: str, *, as_text: bool = False) -> Any:
    """Load a YAML text; raise UserError, which calls it `name`, if it is invalid, too deep or too large.

    With `as_text`, all scalars stay strings: in a vocabulary, the subword `no` is not False.
    """
    try:
        _check_size(content, name, _MOST_TEXTS if as_text else _MOST_VALUES)
        return yaml.load(content, yaml.CBaseLoader if as_text else yaml.CSafeLoader)  # noqa: S506
    except (yaml.YAMLError, ValueError) as error:  # also a date that no calendar has
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where, reason = f" line {mark.line + 1}" if mark else "", problem or first_line(error)
        raise UserError(f"{name}{where} is not YAML: {reason}") from error


def _check_size(content: str | bytes, name: str, most: int) -> None:
    """Raise UserError if values are nested too deeply, contain themselves, or are more than `most`.

    A value that is referenced several times counts each time.
    """
    count, sizes = 0, dict[str | None, int]()
    opened: list[tuple[str | None, int]] = []
    for event in yaml.parse(content, yaml.CSafeLoader):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, start = opened.pop()
            sizes[anchor] = count - start
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise UserError(f"{name} has *{event.anchor} inside or before &{event.anchor}; write it out")
            count += sizes[event.anchor]
        elif isinstance(event, yaml.NodeEvent):
            if isinstance(event, yaml.CollectionStartEvent):
                opened.append((event.anchor, count))
            else:
                sizes[event.anchor] = 1
            count += 1
        if len(opened) > _DEEPEST:
            raise UserError(f"{name} has more than {_DEEPEST} values inside each other; make it flatter")
        if count > most:
            raise UserError(f"{name} has more than {most} values with its references (*name); write them out")
