"""Tables of results, made from the JSON values of a command and written as text, or in reports as HTML."""

import string
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class Table(NamedTuple):
    """A table whose cells are texts (in reports also runs or lists); `numbers`: the right-aligned columns."""

    heading: Sequence[Any]
    rows: Sequence[Sequence[Any]]
    caption: str = ""
    numbers: Container[int] = ()


class _Cells(string.Formatter):
    """Formats None as an empty cell."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return "" if value is None else str(format(value, format_spec))


def make_table(columns: Mapping[str, str], records: Iterable[Mapping[str, Any]], caption: str = "") -> Table:
    """Make one row per record: {"share": "{share:.1%}"} with [{"share": 0.25}] gives the cell 25.0%."""
    rows = [[_Cells().vformat(cell, (), record) for cell in columns.values()] for record in records]
    return Table(list(columns), rows, caption)


def write_score(score: float, interval: float | None) -> str:
    """Format a score with its interval: 37.10 ± 1.05."""
    return f"{score:.2f}" + ("" if interval is None else f" ± {interval:.2f}")


def write_text(parts: Iterable["str | Table"], indent: str = "  ") -> str:
    """Format lines and tables as text; columns of numbers are right-aligned."""
    return "\n".join(part if isinstance(part, str) else _write_table(part, indent) for part in parts)


def _write_table(table: Table, indent: str) -> str:
    columns, first = [], bool(table.heading)
    for cells in zip(*([table.heading] if first else []), *table.rows, strict=True):
        width = max(map(len, cells))
        right = all(cell == "" or cell[0].isdigit() for cell in cells[first:])
        columns.append([cell.rjust(width) if right else cell.ljust(width) for cell in cells])
    lines = [f"{indent}{'  '.join(row)}".rstrip() for row in zip(*columns, strict=True)]
    return "\n".join([table.caption, *lines] if table.caption else lines)
