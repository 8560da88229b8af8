"""Glossaries: finds source terms in a text and returns their translations; constraints.py requires them."""

import functools
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import regex

from flaxformer_mt.errors import UserError
from flaxformer_mt.text_io.lines import STANDARD, open_lines
from flaxformer_mt.unicode_text import MARKS, is_blank, lacks_spaces, normalize, spell, split_words

# Words and characters of a source term: at each word of a text, the lengths of all terms are tried.
_MOST_WORDS, _MOST_CHARACTERS = 30, 200
# What is a word in a text without spaces: a run of ASCII characters, or any other character and its accents.
_UNSPACED = r"[!-~]+|\S\p{M}*"


class Term(NamedTuple):
    """A glossary term in a source, from character `start` to `end`, and its translation."""

    start: int
    end: int
    target: str


@dataclass(frozen=True)
class Glossary:
    """Source terms and their translations; the output contains these translations exactly as written."""

    # Pairs of a source term and its translation.
    terms: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, lines: Iterable[str], name: str) -> "Glossary":
        """Read lines SOURCE TERM<TAB>TARGET TERM; lines that begin with # are comments.

        Further columns are ignored.

        Raises:
          UserError: a line does not have this form (the message gives its number), or there are no terms.
        """
        found: dict[str, tuple[str, int]] = {}
        for number, line in enumerate(lines, start=1):
            if is_blank(line) or line.startswith("#"):
                continue
            where = f"{name}, line {number}"
            columns = [" ".join(split_words(column)) for column in line.split("\t")]
            if len(columns) < 2:
                raise UserError(
                    f"{where}, has no tab: {line[:60]!r}; write source term, tab, target term (a line "
                    "that begins with # is a comment)"
                )
            for side, term in zip(("source", "target"), columns, strict=False):
                _check(term, f"{where}, has a {side} term")
            source, target = columns[:2]
            if (words := len(source.split())) > _MOST_WORDS or len(source) > _MOST_CHARACTERS:
                raise UserError(
                    f"{where}, has a source term of {words} words and {len(source)} characters; shorten it "
                    f"to {_MOST_WORDS} and {_MOST_CHARACTERS}"
                )
            known, first = found.setdefault(source, (target, number))
            if known != target:
                raise UserError(
                    f"{where}, translates {source!r} as {target!r}, but line {first} as {known!r}; remove one"
                )
        if not found:
            raise UserError(f"{name} has no terms; write lines of a source term, a tab and a target term")
        return cls(tuple((source, target) for source, (target, _) in found.items()))

    @classmethod
    def load(cls, path: str | Path) -> "Glossary":
        """Read a glossary from a file, or from standard input if `path` is `-`; see `read`."""
        with open_lines(str(path), "the glossary", invalid_utf8="refuse") as text:
            return cls.read(text.lines, "standard input" if path == STANDARD else str(path))

    @classmethod
    def make(cls, given: "Glossary | Mapping[str, str] | str | Path") -> "Glossary":
        """Make a glossary from a file or a mapping of source to target terms; return a `Glossary` as is."""
        if isinstance(given, Mapping):
            return cls.read((f"{source}\t{target}" for source, target in given.items()), "the glossary")
        return given if isinstance(given, Glossary) else cls.load(given)

    def find(self, text: str) -> list[Term]:
        """Return the terms that occur in a text, from left to right; of overlapping terms, the longest.

        A term must stand between spaces or punctuation and be spelled as in the glossary. A term without
        capitals also matches text with capitals.
        """
        plain, spans = normalize(text)
        starts, ends = list[int](), set[int]()
        for word in regex.finditer(_UNSPACED if lacks_spaces([text]) else r"\S+", plain):
            # A term may be with or without the marks around a word, as in C++.
            bare = word.start() + len(word[0]) - len(word[0].lstrip(MARKS))
            starts += range(word.start(), min(bare + 1, word.end()))
            ends.update(range(word.start() + max(1, len(word[0].rstrip(MARKS))), word.end() + 1))
        found, targets = list[tuple[int, int, int, str]](), self._targets
        for start in starts:
            for end in ends & {start + length for length in self._lengths}:
                written, form = text[spans[start][0] : spans[end - 1][1]], plain[start:end]
                if target := targets.get(written) or targets.get(form) or targets.get(form.lower()):
                    found.append((start - end, start, end, target))
        terms, taken = list[Term](), set[int]()
        for _, start, end, target in sorted(found):  # the longest first
            if taken.isdisjoint(range(start, end)):
                taken.update(range(start, end))
                terms.append(Term(spans[start][0], spans[end - 1][1], target))
        return sorted(terms)

    def share_targets(self, line: str, parts: Sequence[str]) -> tuple[list[list[str]], list[str]]:
        """Return the term translations required in each part of a line, and those of terms in no part.

        A term is in no part if it is split over two parts, because the line was too long.
        """
        shares = [list(dict.fromkeys(term.target for term in self.find(part))) for part in parts]
        required = set[str]().union(*shares)
        targets = dict.fromkeys(term.target for term in self.find(line))
        return shares, [target for target in targets if target not in required]

    @functools.cached_property
    def _targets(self) -> dict[str, str]:
        """Map each term, as written and as normalized by `spell`, to its first translation."""
        return {spell(source): target for source, target in reversed(self.terms)} | dict(self.terms)

    @functools.cached_property
    def _lengths(self) -> set[int]:
        return set(map(len, self._targets))


def _check(term: str, where: str) -> None:
    if is_blank(term):
        raise UserError(f"{where} that is empty; write a source term, a tab and a target term")
    if odd := [letter for letter in term if unicodedata.category(letter) in ("Cc", "Cs")]:
        raise UserError(f"{where} with the character {odd[0]!r}; remove it")
