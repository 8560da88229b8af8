"""Judging pairs: which rows of a split count, and a report on the rest.

Owns the meaning of `CleanConfig` and the cache of its verdicts. Works on any set alike, by row numbers; where
there is no source, on the target alone. Knows nothing of where rows come from.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_mt.config import CleanConfig
from flaxformer_mt.corpus.pairs import RawSplit
from flaxformer_mt.errors import UserError

_CHUNK = 4096
# Rows that the report shows for each problem.
_EXAMPLES = 5
_WORDS = {
    "invalid_utf8": "not UTF-8",
    "empty": "an empty side",
    "too_long": "a side of too many characters",
    "length_ratio": "sides of too different lengths",
    "duplicates": "seen before word for word",
}
# Of sentences without a source, which are no pairs.
_WORDS_ALONE = _WORDS | {"empty": "without text", "too_long": "of too many characters"}
# Raised when the verdicts' meaning or layout changes: older cached ones are then not found.
_FORMAT = 1


def clean(split: RawSplit, rules: CleanConfig, *, may_drop: bool) -> tuple[np.ndarray | None, dict[str, Any]]:
    """Reads a split once and returns the rows that count (int64, None: all) and a report of JSON values.

    `may_drop` is True for the train split. Elsewhere a score is over the whole set: problems are only
    reported, except bytes that are not UTF-8, which refuse.

    Raises:
      UserError: a rule says refuse; every rule that does is named, with counts and the first places.
    """
    actions = {name: getattr(rules, name) for name in _WORDS}
    if not may_drop:
        actions = dict.fromkeys(_WORDS, "keep") | {"invalid_utf8": "refuse"}
    problems: dict[str, dict[str, Any]] = {}
    first_side = 0 if split.has_source else 1
    kept = np.ones(len(split), dtype=bool)
    seen: set[bytes] = set()
    for start in range(0, len(split), _CHUNK):
        rows = range(start, min(start + _CHUNK, len(split)))
        for row, (source, target) in zip(rows, split.read(rows), strict=True):
            for name, side in _find_problems((source, target), first_side, rules, seen):
                found = problems.setdefault(name, {"count": 0, "action": actions[name], "examples": []})
                found["count"] += 1
                if len(found["examples"]) < _EXAMPLES:
                    found["examples"].append(_example(split, row, side, (source, target)))
                if actions[name] != "keep":
                    kept[row] = False
                    break
    _refuse(split, problems, may_drop=may_drop)
    count = int(kept.sum())
    report = {"name": split.name, "read": len(split), "pairs": count, "problems": problems, **split.facts}
    return (None if count == len(split) else np.flatnonzero(kept)), report


def load_or_clean(
    split: RawSplit, rules: CleanConfig, *, may_drop: bool, folder: Path
) -> tuple[np.ndarray | None, dict[str, Any]]:
    """`clean`, remembered in `folder` for as long as the text and the rules stay the same."""
    places = [split.name, split.sides, split.unit, split.languages, split.facts]
    key = digest([_FORMAT, split.identity, places, dataclasses.asdict(rules) if may_drop else None])
    rows_path, report_path = folder / f"{key}.npy", folder / f"{key}.json"
    if report_path.exists():  # written last, so the rows are there if there are any
        report = json.loads(report_path.read_text(encoding="utf-8"))
        return (np.load(rows_path, mmap_mode="r") if rows_path.exists() else None), report
    kept, report = clean(split, rules, may_drop=may_drop)
    folder.mkdir(parents=True, exist_ok=True)
    if kept is not None:
        with _replacing(rows_path) as path, path.open("wb") as file:
            np.save(file, kept)
    with _replacing(report_path) as path:
        path.write_text(json.dumps(report, ensure_ascii=False), encoding="utf-8")
    return kept, report


def digest(values: Any) -> str:
    """Hex digest of JSON values, the same in every process: 32 digits."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


def _find_problems(
    pair: tuple[bytes, bytes], first_side: int, rules: CleanConfig, seen: set[bytes]
) -> Iterator[tuple[str, int]]:
    """Yields (rule, side) for all that is wrong with a pair, as far as the caller asks; `seen` grows.

    first_side: 0, or 1 where the source is absent and only the target is judged.
    """
    texts = []
    for side, text in enumerate(pair[first_side:], start=first_side):
        try:
            texts.append(text.decode("utf-8"))
        except UnicodeDecodeError:
            yield "invalid_utf8", side
            return  # nothing else can be said of it
    lengths = [len(text) for text in texts]
    longest = first_side + lengths.index(max(lengths))
    blank = [not text.strip() for text in texts]
    if any(blank):
        yield "empty", first_side + blank.index(True)
    if max(lengths) > rules.max_characters:
        yield "too_long", longest
    if len(texts) == 2 and not any(blank) and max(lengths) > rules.max_length_ratio * min(lengths):
        yield "length_ratio", longest
    source, target = pair
    # Eight bytes a pair instead of the text; the length keeps ("a", "bc") apart from ("ab", "c").
    mark = hashlib.blake2b(b"%d " % len(source) + source + target, digest_size=8).digest()
    if mark in seen:
        yield "duplicates", 0
    seen.add(mark)


def _example(split: RawSplit, row: int, side: int, pair: tuple[bytes, bytes]) -> dict[str, str]:
    texts = [text.decode("utf-8", errors="replace") for text in pair]
    short = [text if len(text) <= 80 else text[:79] + "…" for text in texts]
    source = {"source": short[0]} if split.has_source else {}
    return {"where": split.where(row, side), **source, "target": short[1]}


def _refuse(split: RawSplit, problems: dict[str, dict[str, Any]], *, may_drop: bool) -> None:
    lines = []
    for name, found in problems.items():
        if found["action"] != "refuse":
            continue
        places = ", ".join(example["where"] for example in found["examples"][:3])
        more = ", ..." if found["count"] > 3 else ""
        remedy = f"correct them or set --config.data.clean.{name}=drop"
        if not may_drop:
            remedy = "correct them; what scores are computed on is never dropped"
        noun, words = ("pair", _WORDS) if split.has_source else ("sentence", _WORDS_ALONE)
        are = f"{noun} is" if found["count"] == 1 else f"{noun}s are"
        lines.append(
            f"{split.name}: {found['count']} {are} refused: {words[name]} ({places}{more}); {remedy}"
        )
    if lines:
        raise UserError("\n".join(lines))


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that becomes `path` at the end, so that nobody reads half of it."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    os.close(descriptor)
    try:
        yield Path(name)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
