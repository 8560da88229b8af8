"""Cleaning of sentence pairs: the rows of a split to keep, and a report on the others.

Implements `CleanConfig` and caches the results. Works on row numbers, the same for every data set; without a
source it checks the target alone.
"""

import dataclasses
import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_mt.config import CleanConfig
from flaxformer_mt.corpus.cached_json import digest, digest_file, read_cached, write_atomically, write_cached
from flaxformer_mt.corpus.pairs import RawSplit
from flaxformer_mt.errors import UserError
from flaxformer_mt.writing_systems import is_blank

_CHUNK = 4096
# Number of example rows in the report for each problem.
_EXAMPLES = 5
_PROBLEMS = {
    "invalid_utf8": "not UTF-8",
    "empty": "one side is empty",
    "too_long": "one side has too many characters",
    "length_ratio": "the lengths of the sides differ too much",
    "duplicates": "exact duplicates",
}
# The same for target sentences without a source.
_PROBLEMS_OF_TARGETS = _PROBLEMS | {"empty": "no text", "too_long": "too many characters"}
# Part of the cache key: raise it when the rules or the cached files change, so that older files are ignored.
_FORMAT = 3


def clean(split: RawSplit, rules: CleanConfig, *, may_drop: bool) -> tuple[np.ndarray | None, dict[str, Any]]:
    """Reads a split once; returns the rows to keep (int64, None: all) and a report of JSON values.

    `may_drop` is True for the train split. Other splits are always scored as a whole: their problems are only
    reported, except invalid UTF-8, which is refused.

    Raises:
      UserError: a rule refuses a pair; the message has each such rule, with its count and first locations.
    """
    actions = {name: getattr(rules, name) for name in _PROBLEMS}
    if not may_drop:
        actions = dict.fromkeys(_PROBLEMS, "keep") | {"invalid_utf8": "refuse"}
    problems: dict[str, dict[str, Any]] = {}
    first_side = 0 if split.has_source else 1
    kept = np.ones(len(split), dtype=bool)
    fingerprints = np.zeros(len(split), np.uint64)
    for start in range(0, len(split), _CHUNK):
        rows = range(start, min(start + _CHUNK, len(split)))
        for row, pair in zip(rows, split.read(rows), strict=True):
            fingerprints[row] = _fingerprint(pair)
            for name, side in _find_problems(pair, first_side, rules):
                found = problems.setdefault(name, {"count": 0, "action": actions[name], "examples": []})
                found["count"] += 1
                if len(found["examples"]) < _EXAMPLES:
                    found["examples"].append(_example(split, row, side, pair))
                if actions[name] != "keep":
                    kept[row] = False
                    break
    repeated = _find_repetitions(fingerprints, kept)
    if len(repeated):
        first = repeated[:_EXAMPLES].tolist()
        examples = [_example(split, row, 0, pair) for row, pair in zip(first, split.read(first), strict=True)]
        problems["duplicates"] = {
            "count": len(repeated),
            "action": actions["duplicates"],
            "examples": examples,
        }
        if actions["duplicates"] != "keep":
            kept[repeated] = False
    _refuse(split, problems, may_drop=may_drop)
    count = int(kept.sum())
    report = {"name": split.name, "read": len(split), "pairs": count, "problems": problems, **split.facts}
    return (None if count == len(split) else np.flatnonzero(kept)), report


def load_or_clean(
    split: RawSplit, rules: CleanConfig, *, may_drop: bool, folder: Path
) -> tuple[np.ndarray | None, dict[str, Any]]:
    """Runs `clean`, or loads its result from `folder` while the text and the rules are unchanged."""
    reported = [split.name, split.sides, split.unit, split.languages, split.facts]
    key = digest([_FORMAT, split.identity, reported, dataclasses.asdict(rules) if may_drop else None])
    rows_path, report_path = folder / f"{key}.npy", folder / f"{key}.json"
    record = read_cached(report_path)
    if record is not None and record["rows"] is None:
        return None, record["report"]
    if record is not None and rows_path.is_file() and digest_file(rows_path) == record["rows"]:
        return np.load(rows_path, mmap_mode="r", allow_pickle=False), record["report"]
    kept, report = clean(split, rules, may_drop=may_drop)
    if kept is not None:
        rows_file = io.BytesIO()
        np.save(rows_file, kept)
        write_atomically(rows_path, rows_file.getvalue())
    # The report is written last, with the digest of the rows: without rows all of them are kept.
    rows_digest = None if kept is None else digest_file(rows_path)
    write_cached(report_path, {"report": report, "rows": rows_digest})
    return kept, report


def _fingerprint(pair: tuple[bytes, bytes]) -> int:
    """Hashes a pair to 64 bits; the length of the source tells ("a", "bc") from ("ab", "c")."""
    source, target = pair
    digest = hashlib.blake2b(b"%d " % len(source) + source + target, digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _find_repetitions(fingerprints: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Returns the kept rows, in order, whose fingerprint an earlier kept row has.

    Sorting takes a few numbers a pair; a set of the fingerprints would take about 100 bytes a pair.
    """
    fingerprints = fingerprints[kept]
    order = np.argsort(fingerprints, kind="stable")  # equal fingerprints stay in the order of their rows
    fingerprints = fingerprints[order]
    repeated = np.sort(order[1:][fingerprints[1:] == fingerprints[:-1]])
    return np.flatnonzero(kept)[repeated] if len(repeated) else repeated


def _find_problems(
    pair: tuple[bytes, bytes], first_side: int, rules: CleanConfig
) -> Iterator[tuple[str, int]]:
    """Yields (rule, side) for each problem of a pair by itself; callers may stop early.

    first_side: 0, or 1 where the source is absent and only the target is checked.
    """
    texts = []
    for side, text in enumerate(pair[first_side:], start=first_side):
        try:
            texts.append(text.decode("utf-8"))
        except UnicodeDecodeError:
            yield "invalid_utf8", side
            return  # the other rules need decoded text
    lengths = [len(text) for text in texts]
    longest = first_side + lengths.index(max(lengths))
    blank = list(map(is_blank, texts))
    if any(blank):
        yield "empty", first_side + blank.index(True)
    if max(lengths) > rules.max_characters:
        yield "too_long", longest
    if len(texts) == 2 and not any(blank) and max(lengths) > rules.max_length_ratio * min(lengths):
        yield "length_ratio", longest


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
        locations = ", ".join(example["where"] for example in found["examples"][:3])
        more = ", ..." if found["count"] > 3 else ""
        remedy = f"correct them or set --config.data.clean.{name}=drop"
        if not may_drop:
            remedy = "correct them; validation and test data is never dropped"
        noun, texts = ("pair", _PROBLEMS) if split.has_source else ("sentence", _PROBLEMS_OF_TARGETS)
        refused = f"{noun} is" if found["count"] == 1 else f"{noun}s are"
        lines.append(
            f"{split.name}: {found['count']} {refused} refused: {texts[name]} ({locations}{more}); {remedy}"
        )
    if lines:
        raise UserError("\n".join(lines))
