"""Word alignments of training pairs, in Pharaoh format: `0-0 1-2`, a line for each line of the text.

A point `i-j` joins source word i and target word j, counted from 0; white space separates words. This is what
eflomal, fast_align, awesome-align and `align` write. Files are checked against the text once, and kept as
arrays in the cache.
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from flaxformer_mt.corpus.cached_arrays import load_or_make
from flaxformer_mt.corpus.cached_json import digest
from flaxformer_mt.corpus.pairs import RawSplit, WordLinks
from flaxformer_mt.corpus.text_files import load_or_scan, read_lines
from flaxformer_mt.errors import UserError

_POINT = re.compile(rb"([0-9]{1,9})-([0-9]{1,9})")
_CHUNK = 4096
# Part of the cache key: raise it when the cached arrays change.
_FORMAT = 1


def load_links(path: Path, split: RawSplit, *, may_drop: bool, cache: Path) -> WordLinks:
    """Read the alignments of all rows of a split, or load the arrays of an earlier call from the cache.

    Args:
      may_drop: whether lines after the last pair are left out, as `unequal_lines=drop` leaves out surplus
        lines of the text.

    Raises:
      UserError: the file is missing, has another number of lines than the split has pairs, or has a damaged
        point or one outside of its pair; the message names file and line.
    """
    if not path.is_file():
        raise UserError(
            f"there are no alignments {path} (data.alignments); make them with `align`, or with eflomal or "
            "fast_align, one line for each training pair"
        )
    scan = load_or_scan(path, columns=1, folder=cache / "scans")
    if scan.lines != len(split) and not (may_drop and scan.lines > len(split)):
        raise UserError(
            f"{path} has {scan.lines} lines, but {split.name} has {len(split)} training pairs "
            f"({' and '.join(dict.fromkeys(split.sides))}); give one line for each pair, an empty one for a "
            "pair without alignment"
        )
    key = digest([_FORMAT, split.identity, split.languages, scan.digest, len(split)])
    arrays = load_or_make(cache / "alignments", key, lambda: _read(path, split))
    return WordLinks(**arrays, identity=key)


def _read(path: Path, split: RawSplit) -> dict[str, np.ndarray]:
    """Read all lines: the points int32 [N, 2], and the offsets int64 [rows + 1] of each row's points."""
    points: list[np.ndarray] = []
    counts = np.zeros(len(split) + 1, np.int64)
    for row, (line, sizes) in enumerate(zip(read_lines(path), _count_words(split), strict=False)):
        found = parse_points(line, sizes, where=f"{path} line {row + 1}")
        points.append(np.array(found, np.int32).reshape(-1, 2))
        counts[row + 1] = len(found)
    return {"points": np.concatenate([np.zeros((0, 2), np.int32), *points]), "offsets": np.cumsum(counts)}


def _count_words(split: RawSplit) -> Iterator[tuple[int, int]]:
    for pair in itertools.chain.from_iterable(split.read_blocks(_CHUNK)):
        source, target = (len(text.decode("utf-8", errors="replace").split()) for text in pair)
        yield source, target


def parse_points(line: bytes, sizes: tuple[int, int], *, where: str) -> list[tuple[int, int]]:
    """Read the points of one line, without repetitions, in the order of target and then source positions.

    Args:
      sizes: number of source and target words.
      where: file and line, for messages.

    Raises:
      UserError: something is no point, or a point is outside of the sentences.
    """
    found: set[tuple[int, int]] = set()
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
                "target words; count words from 0, separated by white space, in the text as it is"
            )
        found.add(point)
    return sorted(found, key=lambda point: point[::-1])


def format_points(points: Iterable[Iterable[int]]) -> str:
    """Format points as a line: [[0, 0], [2, 1]] gives "0-0 2-1"."""
    return " ".join(f"{source}-{target}" for source, target in points)
