"""Cleaning of sentence pairs: the rows of a split to keep, and a report on the others.

Implements `CleanConfig` and caches the results. Works on row numbers, the same for every data set; without a
source it checks the target alone. Blocks of pairs are checked by workers (pair_checks.py).
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.config import CleanConfig
from flaxformer_mt.corpus.cached_arrays import read_arrays, write_arrays
from flaxformer_mt.corpus.cached_json import digest
from flaxformer_mt.corpus.pair_checks import BLOCK, EXAMPLES, CheckBlocks, Finding
from flaxformer_mt.corpus.pairs import RawSplit
from flaxformer_mt.errors import UserError
from flaxformer_mt.workers.open_crew import HERE, Hands, carry, open_crew

# Blocks up to which the start of workers takes longer than the checks.
_FEW_BLOCKS = 16
# Problem of a pair -> words for a reader.
_PROBLEMS = {
    "invalid_utf8": "not UTF-8",
    "empty": "empty or blank side",
    "too_long": "one side has too many characters",
    "length_ratio": "the lengths of the sides differ too much",
    "numbers": "the digits of the sides differ",
    "script": "too few letters of one side are of its script",
    "duplicates": "exact duplicates",
    "repeated_targets": "an earlier pair has the same target",
}
# The same for target sentences without a source.
_PROBLEMS_OF_TARGETS = _PROBLEMS | {"empty": "no text", "too_long": "too many characters"}
PROBLEM_WORDS = _PROBLEMS | {"weight_0": "weight 0"}
# What becomes of the pairs with it.
ACTION_WORDS = {"drop": "left out", "keep": "kept", "refuse": "refused"}
# Part of the cache key: raise it when the rules or the cached files change, so that older files are ignored.
_FORMAT = 4


class Cleaned(NamedTuple):
    """The rows to keep, int64 (None: all); the hashes of all rows, uint64 [N, 2]; a report of JSON values."""

    rows: np.ndarray | None
    hashes: np.ndarray
    report: dict[str, Any]


def clean(split: RawSplit, rules: CleanConfig, *, may_drop: bool, hands: Hands = HERE) -> Cleaned:
    """Reads a split once, and finds the rows to keep.

    Args:
      may_drop: True for the train split. Other splits are always scored as a whole: their problems are only
        reported, except invalid UTF-8, which is refused.
      hands: who checks the pairs.

    Raises:
      UserError: a rule refuses a pair; the message has each such rule, with its count and first locations.
    """
    actions = {name: getattr(rules, name) for name in _PROBLEMS}
    if not may_drop:
        unasked = {name: "off" for name, action in actions.items() if action == "off"}
        actions = dict.fromkeys(_PROBLEMS, "keep") | unasked | {"invalid_utf8": "refuse"}
    problems: dict[str, dict[str, Any]] = {}
    kept = np.ones(len(split), dtype=bool)
    hashes = np.zeros((len(split), 2), np.uint64)

    def add(name: str, finding: Finding, start: int) -> None:
        found = problems.setdefault(name, {"count": 0, "action": actions[name], "examples": []})
        found["count"] += finding.pairs
        wanted = EXAMPLES - len(found["examples"])
        found["examples"] += [
            split.make_example(start + row, side, pair) for row, side, pair in finding.examples[:wanted]
        ]

    work = carry(CheckBlocks(rules, actions, split.has_source))
    chosen = hands.for_work(len(split) / BLOCK, least=_FEW_BLOCKS)
    with open_crew(work, workers=chosen.workers, ray=chosen.ray) as crew:
        verdicts = crew.map(split.read_blocks(BLOCK), name=lambda block: f"a block of {split.name}")
        for start, verdict in zip(range(0, len(split), BLOCK), verdicts, strict=True):
            kept[start : start + BLOCK] = verdict.kept
            hashes[start : start + BLOCK] = verdict.hashes
            for name, finding in verdict.problems.items():
                add(name, finding, start)
    for name, compared in (("duplicates", hashes), ("repeated_targets", hashes[:, 1:])):
        repeated = np.zeros(0, np.int64) if actions[name] == "off" else _find_repetitions(compared, kept)
        if len(repeated):
            first = repeated[:EXAMPLES].tolist()
            examples = [(row, 0, pair) for row, pair in zip(first, split.read(first), strict=True)]
            add(name, Finding(len(repeated), examples), 0)
            if actions[name] != "keep":
                kept[repeated] = False
    _refuse(split, problems, may_drop=may_drop)
    count = int(kept.sum())
    report = {"name": split.name, "read": len(split), "pairs": count, "problems": problems, **split.facts}
    return Cleaned(None if count == len(split) else np.flatnonzero(kept), hashes, report)


def load_or_clean(
    split: RawSplit, rules: CleanConfig, *, may_drop: bool, folder: Path, hands: Hands = HERE
) -> Cleaned:
    """Runs `clean`, or loads its result from `folder` while the text and the rules are unchanged."""
    reported = [split.name, split.sides, split.unit, split.languages, split.facts]
    key = digest([_FORMAT, split.identity, reported, rules.describe() if may_drop else None])
    if (found := read_arrays(folder, key)) is not None:
        arrays, values = found
        return Cleaned(arrays.get("rows"), arrays["hashes"], values["report"])
    cleaned = clean(split, rules, may_drop=may_drop, hands=hands)
    rows = {} if cleaned.rows is None else {"rows": cleaned.rows}
    write_arrays(folder, key, {**rows, "hashes": cleaned.hashes}, report=cleaned.report)
    return cleaned


def _find_repetitions(hashes: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Returns the kept rows, in order, whose hashes, uint64 [N, 1 or 2], an earlier kept row has.

    Rows are sorted by 64 bits of their hashes, which takes a few numbers a pair, and those whose 64 bits are
    alike are compared by all 128: two pairs out of 10 ** 12 are confused with a probability of 10 ** -15.
    """
    rows = np.flatnonzero(kept)
    mixed = mix_hashes(hashes[rows] if len(rows) < len(kept) else hashes)
    order = np.argsort(mixed, kind="stable")  # equal ones stay in the order of their rows
    mixed = mixed[order]
    again = np.flatnonzero(mixed[1:] == mixed[:-1]) + 1
    first = np.flatnonzero(np.concatenate([[True], mixed[1:] != mixed[:-1]]))
    del mixed
    if not len(again):
        return rows[:0]
    starts = first[np.searchsorted(first, again, side="right") - 1]
    alike = (hashes[rows[order[again]]] == hashes[rows[order[starts]]]).all(axis=1)
    return np.sort(rows[order[again[alike]]])


def mix_hashes(hashes: np.ndarray) -> np.ndarray:
    """One number for the hashes of each pair: uint64 [N, 1 or 2] to uint64 [N]."""
    return hashes[:, 0] * np.uint64(0x9E3779B97F4A7C15) + (hashes[:, 1] if hashes.shape[1] == 2 else 0)


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
