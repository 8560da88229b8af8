"""Word alignments in Pharaoh's format, such as "0-0 2-1": source and target word positions from 0."""

import re
from collections.abc import Iterable

from flaxformer_mt.errors import UserError

_POINT = re.compile(rb"([0-9]{1,9})-([0-9]{1,9})")


def parse_points(line: bytes, sizes: tuple[int, int], *, where: str) -> list[tuple[int, int]]:
    """Return a line's unique points, sorted by target, then source position; `sizes`: words of each side.

    Raises UserError, with the location `where`, for a malformed point or a position outside the pair.
    """
    points: set[tuple[int, int]] = set()
    for text in line.split():
        match = _POINT.fullmatch(text)
        shown = text[:40].decode("utf-8", errors="replace")
        if match is None:
            raise UserError(
                f"{where}: {shown!r} is no alignment point; write the positions of a source and a target "
                "word from 0, as in 0-0 1-2"
            )
        point = int(match[1]), int(match[2])
        if point[0] >= sizes[0] or point[1] >= sizes[1]:
            raise UserError(
                f"{where}: point {shown} is outside of the pair, which has {sizes[0]} source and {sizes[1]} "
                "target words; count words from 0, separated by spaces, in the text as it is (eflomal "
                "splits at no-break spaces too: let it align a copy in which they are letters, such as _)"
            )
        points.add(point)
    return sorted(points, key=lambda point: point[::-1])


def format_points(points: Iterable[tuple[int, int]]) -> str:
    """Sort points by target, then source position, and format them: [(0, 1), (1, 0)] gives "1-0 0-1"."""
    return " ".join(f"{source}-{target}" for source, target in sorted(points, key=lambda point: point[::-1]))
