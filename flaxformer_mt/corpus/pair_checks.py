"""The cleaning rules, each a pure function of a block of pairs, and the task that applies them in a worker.

For each pair, a rule returns 0 if the source has the problem, 1 if the target has it, and -1 otherwise.
Duplicate pairs, which may be in different blocks, are found in cleaning.py by the hashes of the pairs.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flaxformer_mt.config import CleanConfig
from flaxformer_mt.corpus.language_identification import load_identifier
from flaxformer_mt.unicode_text import find_script, is_blank

# Pairs that are checked at a time, and number of example rows in the report for each problem.
BLOCK = 16384
EXAMPLES = 5
# The rules script and language: least share of letters in the script, probability of another language.
_LEAST_SHARE, _LEAST_PROBABILITY = 0.5, 0.5
_DIGIT = re.compile(r"\d")
# White space and punctuation: of ASCII, Latin 1, General Punctuation, CJK, and full-width forms.
_MARKS = re.compile("[\\s!-/:-@\\[-`{-~¡-¿‐-⁞\u3000-\u303f！-／：-＠［-｀｛-･]+")


class TextBlock(NamedTuple):
    """Texts of N pairs and lengths in characters [N, 2]; `first_side` is 1 without a source language."""

    texts: tuple[list[str], list[str]]
    lengths: np.ndarray
    first_side: int
    languages: tuple[str, str]


Rule = Callable[[TextBlock, CleanConfig], np.ndarray]


class Finding(NamedTuple):
    """A problem in a block: how many pairs have it, and the first examples as (row, side, pair)."""

    pairs: int
    examples: list[tuple[int, int, tuple[bytes, bytes]]]


@dataclass(frozen=True)
class Verdict:
    """The result of checking a block of N pairs.

    kept: mask of the rows to keep, bool [N]. hashes: of both sides, uint64 [N, 2]. problems: the finding of
    each rule. sentences: digests of both sides, uint64 [N, 2], or of the target twice if there is no source.
    """

    kept: np.ndarray
    hashes: np.ndarray
    problems: dict[str, Finding]
    sentences: np.ndarray | None


@dataclass(frozen=True)
class CheckBlocks:
    """Checks blocks of pairs by the rules; without a source language, checks only the targets.

    actions: name of a rule -> what to do with pairs that break it: "off", "keep", "drop" or "refuse".
    """

    rules: CleanConfig
    actions: Mapping[str, str]
    languages: tuple[str, str]
    digests: bool = False

    def __call__(self, block: Sequence[tuple[bytes, bytes]]) -> Verdict:
        """Check a block; each rule reports only pairs that the previous rules have kept."""
        sides = tuple(zip(*block, strict=True))
        hashes = np.stack([_hash_all(side) for side in sides], axis=1)
        (sources, bad_sources), (targets, bad_targets) = map(_decode_all, sides)
        lengths = np.array([[*map(len, side)] for side in (sources, targets)], np.int64).T
        first_side = 0 if self.languages[0] else 1
        texts = TextBlock((sources, targets), lengths, first_side, self.languages)
        keep, problems = np.ones(len(block), bool), dict[str, Finding]()
        undecoded = _first_side(np.stack([bad_sources, bad_targets], axis=1))
        wanted = [(name, rule) for name, rule in RULES.items() if self.actions[name] != "off"]
        for name, rule in (("invalid_utf8", None), *wanted):
            problem_sides = undecoded if rule is None else rule(texts, self.rules)
            rows = np.flatnonzero(keep & (problem_sides >= 0))
            if len(rows):
                examples = [(int(row), int(problem_sides[row]), block[row]) for row in rows[:EXAMPLES]]
                problems[name] = Finding(len(rows), examples)
                if self.actions[name] != "keep":
                    keep[rows] = False
        sentences = None
        if self.digests:
            digested = (sides[first_side], sides[1])
            sentences = np.array([[*map(digest_sentence, side)] for side in digested], np.uint64).T
        return Verdict(keep, hashes, problems, sentences)


def digest_sentence(text: bytes) -> int:
    """Return a 64-bit digest that ignores case, white space and punctuation."""
    plain = text.decode("utf-8", errors="replace").casefold()
    bare = _MARKS.sub("", plain) or plain
    return int.from_bytes(hashlib.blake2b(bare.encode(), digest_size=8).digest(), "big")


def _hash_all(texts: Sequence[bytes]) -> np.ndarray:
    digests = b"".join([hashlib.blake2b(text, digest_size=8).digest() for text in texts])
    return np.frombuffer(digests, "<u8")


def _decode_all(texts: Sequence[bytes]) -> tuple[list[str], np.ndarray]:
    """Decode N texts, with "" for invalid UTF-8; also return the mask of the invalid texts, bool [N]."""
    decoded, wrong = [], np.zeros(len(texts), bool)
    for row, text in enumerate(texts):
        try:
            decoded.append(text.decode())
        except UnicodeDecodeError:
            decoded.append("")
            wrong[row] = True
    return decoded, wrong


def _first_side(problems: np.ndarray) -> np.ndarray:
    """Return the index of the first side that has a problem, given bool [N, 2]; -1: neither."""
    return np.where(problems.any(axis=1), problems.argmax(axis=1), -1)


def _longest_side(block: TextBlock, problems: np.ndarray) -> np.ndarray:
    lengths = block.lengths.copy()
    lengths[:, : block.first_side] = -1
    return np.where(problems, lengths.argmax(axis=1), -1)


def _find_blank(block: TextBlock) -> np.ndarray:
    blank = np.array([[*map(is_blank, side)] for side in block.texts], bool).T
    blank[:, : block.first_side] = False
    return blank


def find_empty(block: TextBlock, rules: CleanConfig) -> np.ndarray:
    """Find sides without visible text: empty, or only white space, byte order marks and direction marks."""
    return _first_side(_find_blank(block))


def find_too_long(block: TextBlock, rules: CleanConfig) -> np.ndarray:
    return _longest_side(block, block.lengths.max(axis=1) > rules.max_characters)


def find_unequal_lengths(block: TextBlock, rules: CleanConfig) -> np.ndarray:
    if block.first_side:
        return np.full(len(block.lengths), -1)
    shorter, longer = block.lengths.min(axis=1), block.lengths.max(axis=1)
    return _longest_side(block, (longer > rules.max_length_ratio * shorter) & ~_find_blank(block).any(axis=1))


def find_other_numbers(block: TextBlock, rules: CleanConfig) -> np.ndarray:
    """Report the source if its digits 1 to 9, in any order and script, are not those of the target.

    Zeros and separators are ignored, as in OpusFilter's rule for numerals (Aulamo et al. 2020), because
    languages write numbers such as 1,000 and 0.5 in different ways.
    """
    if block.first_side:
        return np.full(len(block.lengths), -1)
    digits = zip(*([_list_digits(text) for text in side] for side in block.texts), strict=True)
    return np.array([0 if source != target else -1 for source, target in digits])


def _list_digits(text: str) -> list[int]:
    return sorted(digit for digit in map(int, _DIGIT.findall(text)) if digit)


def find_other_scripts(block: TextBlock, rules: CleanConfig) -> np.ndarray:
    wrong = np.zeros((len(block.lengths), 2), bool)
    for side, names in enumerate((rules.source_script, rules.target_script)):
        if names and side >= block.first_side:
            wanted = frozenset(names.upper().split("+"))
            shares = (_share_of_scripts(text, wanted) for text in block.texts[side])
            wrong[:, side] = [share < _LEAST_SHARE for share in shares]
    return _first_side(wrong)


def _share_of_scripts(text: str, wanted: frozenset[str]) -> float:
    matches = [find_script(letter) in wanted for letter in text if letter.isalpha()]
    return sum(matches) / len(matches) if matches else 1.0


def find_other_languages(block: TextBlock, rules: CleanConfig) -> np.ndarray:
    identifier = load_identifier(rules.language_model)
    wrong = np.zeros((len(block.lengths), 2), bool)
    for side in range(block.first_side, 2):
        language = block.languages[side]
        others = identifier.find_others(block.texts[side], language, least=_LEAST_PROBABILITY)
        wrong[:, side] = [*map(bool, others)]
    return _first_side(wrong)


# In the order in which they are applied.
RULES: dict[str, Rule] = {
    "empty": find_empty,
    "too_long": find_too_long,
    "length_ratio": find_unequal_lengths,
    "numbers": find_other_numbers,
    "script": find_other_scripts,
    "language": find_other_languages,
}
