"""Cleans sentence pairs by the rules of `CleanConfig`: selects rows to keep, and reports problems.

Workers check blocks of pairs (pair_checks.py).
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.atomic_folder import artifact, digest, map_arrays, save_arrays
from flaxformer_mt.config import CleanConfig
from flaxformer_mt.config.directions import Direction
from flaxformer_mt.corpus.language_identification import load_identifier
from flaxformer_mt.corpus.pair_checks import BLOCK, EXAMPLES, CheckBlocks, Finding
from flaxformer_mt.corpus.pairs import RawSplit
from flaxformer_mt.errors import UserError
from flaxformer_mt.scoring.metrics import find_metric
from flaxformer_mt.scoring.score_filters import read_filters
from flaxformer_mt.tracking.progress_display import SILENT, WorkProgress
from flaxformer_mt.workers.worker_pool import NO_POOL, PoolOptions, open_workers

# Up to this number of blocks, starting workers takes longer than the checks.
_FEW_BLOCKS = 16
# Problem of a pair -> its description in messages.
_PROBLEMS = {
    "invalid_utf8": "not UTF-8",
    "empty": "empty or blank side",
    "too_long": "one side has too many characters",
    "length_ratio": "the lengths of the sides differ too much",
    "numbers": "the digits of the sides differ",
    "script": "too few letters of one side are of its script",
    "language": "one side is in another language",
    "duplicates": "exact duplicates",
}
_WITHOUT_SOURCE = _PROBLEMS | {"empty": "no text", "too_long": "too many characters"}
PROBLEM_WORDS = _PROBLEMS | {"weight_0": "weight 0", "scores": "the score of the pair is too low"}
# Action for a problem -> what happens to pairs with the problem, in messages.
ACTION_WORDS = {"drop": "left out", "keep": "kept", "refuse": "refused"}
# Part of the cache key: raise it when the rules or the cached files change, so that older files are ignored.
_FORMAT = 4


class Cleaned(NamedTuple):
    """The result of cleaning a split of N pairs.

    rows: numbers of the rows to keep, int64; None: all. hashes: of both sides of each row, uint64 [N, 2].
    report: counts and problems. sentences: like hashes, but equal for texts that only differ in case, white
    space and punctuation.
    """

    rows: np.ndarray | None
    hashes: np.ndarray
    report: dict[str, Any]
    sentences: np.ndarray | None = None


def clean(
    split: RawSplit,
    rules: CleanConfig,
    *,
    may_drop: bool,
    digests: bool = False,
    pool: PoolOptions = NO_POOL,
    progress: WorkProgress = SILENT,
) -> Cleaned:
    """Read a split and select the rows to keep; with `digests`, also compute digests of the sentences.

    Rows are dropped only from the train split (`may_drop`). Other splits are scored as a whole, so their
    problems are only reported; invalid UTF-8 raises a UserError.
    """
    actions = {name: getattr(rules, name) for name in _PROBLEMS}
    if not may_drop:
        unasked = {name: "off" for name, action in actions.items() if action == "off"}
        actions = dict.fromkeys(_PROBLEMS, "keep") | unasked | {"invalid_utf8": "refuse"}
    findings = _Findings(split, {**actions, "scores": "drop"})
    keep = findings.keep
    hashes = np.zeros((len(split), 2), np.uint64)
    sentences = np.zeros((len(split), 2), np.uint64) if digests else None
    make = functools.partial(CheckBlocks, rules, actions, split.languages, digests)
    pool = NO_POOL if len(split) / BLOCK < _FEW_BLOCKS else pool
    with (
        progress.part(f"checking {split.name}", total=len(split)) as count,
        open_workers(make, pool) as map_blocks,
    ):
        count(0)
        verdicts = map_blocks(split.read_blocks(BLOCK), name=lambda block: f"a block of {split.name}")
        for start, verdict in zip(range(0, len(split), BLOCK), verdicts, strict=True):
            keep[start : start + BLOCK] = verdict.kept
            hashes[start : start + BLOCK] = verdict.hashes
            if sentences is not None:
                sentences[start : start + BLOCK] = verdict.sentences
            count(len(verdict.kept))
            for name, finding in verdict.problems.items():
                findings.add(name, finding, start)
    findings.add_rows("duplicates", _find_repetitions(hashes, keep))
    for scores in read_filters(rules.scores, "data.clean.scores") if may_drop else ():
        rows = np.flatnonzero(keep)
        with progress.part(f"scoring {split.name} by {scores.name}", total=len(rows)) as count:
            kept = np.array(scores.keep(_read_pairs(split, rows, count), Direction(*split.languages)), bool)
            findings.add_rows("scores", rows[~kept])
    _refuse(split, findings.problems, may_drop=may_drop)
    report = {"name": split.name, "read": len(split), "pairs": int(keep.sum())}
    report |= {"problems": findings.problems, **split.metadata}
    return Cleaned(None if keep.all() else np.flatnonzero(keep), hashes, report, sentences)


class _Findings:
    """Collects the problems found in a split, by name, and the mask of the rows to keep, bool [N]."""

    def __init__(self, split: RawSplit, actions: Mapping[str, str]) -> None:
        self._split, self._actions = split, actions
        self.problems: dict[str, dict[str, Any]] = {}
        self.keep = np.ones(len(split), dtype=bool)

    def add(self, name: str, finding: Finding, start: int) -> None:
        """Add a problem found in the block of rows that starts at row `start`."""
        empty = {"count": 0, "action": self._actions[name], "examples": []}
        problem = self.problems.setdefault(name, empty)
        problem["count"] += finding.pairs
        wanted = EXAMPLES - len(problem["examples"])
        problem["examples"] += [
            self._split.make_example(start + row, side, pair) for row, side, pair in finding.examples[:wanted]
        ]

    def add_rows(self, name: str, rows: np.ndarray) -> None:
        """Add a problem of these rows, and drop them unless the action for the problem is "keep"."""
        if len(rows):
            first = rows[:EXAMPLES].tolist()
            pairs = zip(first, self._split.read(first), strict=True)
            self.add(name, Finding(len(rows), [(row, 0, pair) for row, pair in pairs]), 0)
            if self._actions[name] != "keep":
                self.keep[rows] = False


def _read_pairs(
    split: RawSplit, rows: np.ndarray, count: Callable[[int], object]
) -> Iterator[tuple[str, str]]:
    for start in range(0, len(rows), BLOCK):
        count(min(BLOCK, len(rows) - start))
        for source, target in split.read(rows[start : start + BLOCK].tolist()):
            yield source.decode(errors="replace"), target.decode(errors="replace")


def load_or_clean(
    split: RawSplit,
    rules: CleanConfig,
    *,
    folder: Path,
    may_drop: bool,
    digests: bool = False,
    **options: Any,
) -> Cleaned:
    """Run `clean`, or load its cached result if neither the text nor the rules have changed."""
    reported = [split.name, split.sides, split.unit, split.languages, split.metadata]
    described = describe_rules(rules) if may_drop else None
    key = digest([_FORMAT, split.identity, reported, described, *(["sentences"] if digests else [])])

    def build(partial: Path) -> dict[str, Any]:
        cleaned = clean(split, rules, may_drop=may_drop, digests=digests, **options)
        arrays = {name: value for name, value in cleaned._asdict().items() if isinstance(value, np.ndarray)}
        save_arrays(partial, arrays)
        return cleaned.report

    def load(stored: Path, report: dict[str, Any]) -> Cleaned:
        arrays = map_arrays(stored)
        return Cleaned(arrays.get("rows"), arrays["hashes"], report, arrays.get("sentences"))

    return artifact(folder / key, build, load)


def describe_rules(rules: CleanConfig) -> dict[str, Any]:
    described = rules.describe()
    if "language" in described:
        described["language_model"] = load_identifier(rules.language_model).digest
    for scores in read_filters(rules.scores, "data.clean.scores"):
        scorer = find_metric(scores.name, "data.clean.scores").scorer
        described[f"scorer {scores.name}"] = scorer.definition if scorer is not None else ""
    return described


def _find_repetitions(hashes: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """Return the kept rows, ascending, that repeat an earlier kept row; hashes: uint64 [N, 1 or 2]."""
    values, rows = mix_hashes(hashes)[keep], np.flatnonzero(keep)
    order = np.argsort(values, kind="stable")  # equal values stay in the order of their rows
    values, rows = values[order], rows[order]
    again = np.flatnonzero(values[1:] == values[:-1]) + 1
    first = rows[np.searchsorted(values, values[again])]
    alike = (hashes[rows[again]] == hashes[first]).all(axis=1)  # equal in all 128 bits
    return np.sort(rows[again[alike]])


def mix_hashes(hashes: np.ndarray) -> np.ndarray:
    """Combine the hashes of each pair, uint64 [N, 1 or 2], into one number, uint64 [N]."""
    return hashes[:, 0] * np.uint64(0x9E3779B97F4A7C15) + (hashes[:, 1] if hashes.shape[1] == 2 else 0)


def _refuse(split: RawSplit, problems: dict[str, dict[str, Any]], *, may_drop: bool) -> None:
    lines = []
    refusals = {name: problem for name, problem in problems.items() if problem["action"] == "refuse"}
    for name, problem in refusals.items():
        locations = ", ".join(example["where"] for example in problem["examples"][:3])
        more = ", ..." if problem["count"] > 3 else ""
        remedy = f"correct them or set --config.data.clean.{name}=drop"
        if not may_drop:
            remedy = "correct them; validation and test data is never dropped"
        noun, texts = ("pair", _PROBLEMS) if split.has_source else ("sentence", _WITHOUT_SOURCE)
        refused = f"{noun} is" if problem["count"] == 1 else f"{noun}s are"
        lines.append(
            f"{split.name}: {problem['count']} {refused} refused: {texts[name]} ({locations}{more}); {remedy}"
        )
    if lines:
        raise UserError("\n".join(lines))
