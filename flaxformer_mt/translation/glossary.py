"""Glossaries: the terms of a user with their translations, and where they are in a text."""

import functools
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from flaxformer_mt.corpus.word_alignment import MARKS
from flaxformer_mt.errors import UserError
from flaxformer_mt.text_io.lines import STANDARD, open_lines
from flaxformer_mt.unicode_text import WORD, is_blank, lacks_spaces, split_words

# What is a word in a text without spaces: a run of ASCII characters, or any other character.
_UNSPACED = re.compile(r"[!-~]+|[^ \t]")


class Term(NamedTuple):
    """The characters `start` to `end` of a source, and their translation."""

    start: int
    end: int
    target: str


@dataclass(frozen=True)
class Glossary:
    """Source terms and their translations, which the output contains exactly as they are written."""

    # Pairs of a source term and its translation.
    terms: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, lines: Iterable[str], name: str) -> "Glossary":
        """Read lines of a source term, a tab and a target term; lines that begin with # are comments.

        Further columns are ignored.

        Raises:
          UserError: a line, which the message names, is not of this form, or there is no term.
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
        """Read a file, or standard input for `-`; see `read`."""
        with open_lines(str(path), "the glossary", invalid_utf8="refuse") as text:
            return cls.read(text.lines, "standard input" if path == STANDARD else str(path))

    @classmethod
    def make(cls, given: "Glossary | Mapping[str, str] | str | Path") -> "Glossary":
        """Read a file, or a mapping of source to target terms; return a `Glossary` as it is."""
        if isinstance(given, Mapping):
            return cls.read((f"{source}\t{target}" for source, target in given.items()), "the glossary")
        return given if isinstance(given, Glossary) else cls.load(given)

    def find(self, text: str) -> list[Term]:
        """Return the terms in a text from left to right; of overlapping terms, the longest.

        A term is found between spaces and marks, as it is spelled; a term without capitals is also found with
        capitals.
        """
        pattern = _UNSPACED if lacks_spaces([text]) else WORD
        words, found, first = [match.span() for match in pattern.finditer(text)], list[Term](), 0
        while first < len(words):
            for last in range(min(first + self._longest, len(words)) - 1, first - 1, -1):
                if term := self._find_at(text, words[first][0], words[last][1]):
                    found.append(term)
                    first = last
                    break
            first += 1
        return found

    def _find_at(self, text: str, start: int, end: int) -> Term | None:
        """Look up adjacent words, with as many as possible of the marks around them, as in C++."""
        written = text[start:end]
        before, after = (len(written) - len(strip(MARKS)) for strip in (written.lstrip, written.rstrip))
        for first in range(start, min(start + before, end - 1) + 1):
            for stop in range(end, max(end - after, first + 1) - 1, -1):
                form = " ".join(split_words(text[first:stop]))
                target = self._targets.get(form) or self._targets.get(form.lower())
                if target is not None:
                    return Term(first, stop, target)
        return None

    @functools.cached_property
    def _targets(self) -> dict[str, str]:
        return dict(self.terms)

    @functools.cached_property
    def _longest(self) -> int:
        """The most words of a term."""
        return max(len(pattern.findall(source)) for source, _ in self.terms for pattern in (WORD, _UNSPACED))


def _check(term: str, where: str) -> None:
    if not term:
        raise UserError(f"{where} that is empty; write a source term, a tab and a target term")
    if odd := [letter for letter in term if unicodedata.category(letter) in ("Cc", "Cs")]:
        raise UserError(f"{where} with the character {odd[0]!r}; remove it")
