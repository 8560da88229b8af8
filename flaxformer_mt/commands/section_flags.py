"""Flags of a command that are fields of a section of the run's config, where they are declared."""

import dataclasses
import typing
from typing import Any


def make_flags(section: type, *names: str) -> Any:
    """Return a dataclass of options, each None unless its flag is given: then the run's config decides.

    With `SearchConfig` and "beam_size", it has the one field `beam_size: int | None = None`, with the comment
    that the field has in `SearchConfig`.

    Args:
      section: a dataclass of the config.
      names: of its fields. None given: all fields.
    """
    own = section.__dict__["__annotations__"]  # before those of its base classes
    fields = [
        (field.name, _drop_bounds(field.type) | None, dataclasses.field(default=None, kw_only=True))
        for field in sorted(dataclasses.fields(section), key=lambda field: field.name not in own)
        if not names or field.name in names
    ]
    namespace = {"DECLARED_IN": section}
    return dataclasses.make_dataclass(f"{section.__name__}Flags", fields, frozen=True, namespace=namespace)


def _drop_bounds(kind: Any) -> Any:
    """Annotated[int, at_least(1)] is int: bounds are checked for the whole section."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind
