"""Noise in the text of training pairs, as a function of the seed and the number of the line.

Row 2 of the data path, before the vocabulary. Contains which lines are changed and on which side; `typos` and
`letter_case` contain the changes.
"""

import dataclasses
import itertools
import random
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.config import NoiseConfig
from flaxformer_mt.corpus.pairs import Pair, Part
from flaxformer_mt.data.letter_case import to_lower, to_title, to_upper
from flaxformer_mt.data.typos import TYPOS, change_mark, change_space

# Part of the key of a token store: raise it when the same seed gives other text.
_FORMAT = 1
# The kinds, in the order in which they are applied. The draws of a line are in this order, too.
_KINDS = ("end_punctuation", "punctuation", "lower_case", "title_case", "upper_case", "typos", "whitespace")
# Marks at the end of a sentence by kind, as OpusTrainer pairs them, in many scripts.
_END_MARKS = (".．｡。﹒।॥۔။።։", "!！﹗‼՜", "?？﹖؟\u037e՞፧", ",，､、،၊՝", ":：﹕፥፦", ";；﹔؛፤", "…⋯")
_KIND_OF_MARK = {mark: kind for kind, marks in reversed([*enumerate(_END_MARKS)]) for mark in marks}
# First of the private characters that stand for symbols while a text is changed.
_PRIVATE = 0x10F000


class TextNoise(NamedTuple):
    """The noise of a training set: its rates, and the symbols and tags that it never changes."""

    rates: NoiseConfig
    symbols: tuple[str, ...] = ()

    @property
    def identity(self) -> list[Any]:
        """JSON values that change whenever the changed text may."""
        return [_FORMAT, dataclasses.asdict(self.rates), sorted(self.symbols)]

    def apply(self, pairs: Sequence[Pair], *, seed: int, languages: Iterable[tuple[str, str]]) -> list[Pair]:
        """Returns the pairs with noise; neither side becomes empty.

        Args:
          pairs: consecutive lines; the noise of each depends on its index among them, and not on the others.
          seed: the seed of these lines.
          languages: source and target language of each pair.
        """
        rates = np.array([getattr(self.rates, kind) for kind in _KINDS])
        draws = np.random.default_rng(seed).random((len(pairs), len(_KINDS))) < rates
        found = list(pairs)
        changed = np.any(draws, axis=1)
        for index, (any_drawn, spoken) in enumerate(zip(changed, languages, strict=False)):
            if any_drawn:
                kinds = [kind for kind, drawn in zip(_KINDS, draws[index], strict=True) if drawn]
                found[index] = self._change(pairs[index], kinds, random.Random(seed << 32 | index), spoken)
        return found

    def _change(
        self, pair: Pair, kinds: Sequence[str], chance: random.Random, languages: tuple[str, str]
    ) -> Pair:
        source, held = hold(pair.source, self.symbols)
        target, held_target = hold(pair.target, self.symbols)
        for kind in kinds:
            source, target = self._apply_kind(kind, source, target, chance, languages)
        return Pair(release(source, held), release(target, held_target))

    def _apply_kind(
        self, kind: str, source: str, target: str, chance: random.Random, languages: tuple[str, str]
    ) -> tuple[str, str]:
        if kind == "end_punctuation":
            return drop_end_mark(source, target)
        if kind == "upper_case":
            return to_upper(source, languages[0]), to_upper(target, languages[1])
        if kind == "title_case":
            return to_title(source, languages[0]), to_title(target, languages[1])
        if kind == "lower_case":
            return to_lower(source, languages[0]), target
        if kind == "typos":
            return self._misspell(source, chance), target
        changed = (change_mark if kind == "punctuation" else change_space)(source, chance)
        return (changed if has_text(changed) else source), target

    def _misspell(self, text: str, chance: random.Random) -> str:
        for name, slip in TYPOS.items():
            if chance.random() < getattr(self.rates.typo_kinds, name):
                text = slip(text, chance)
        return text


def drop_end_mark(source: str, target: str) -> tuple[str, str]:
    """Removes the marks at the ends of both sides if they are of one kind: `Ja. | 是。` becomes `Ja | 是`.

    Without a source, that of the target. A side of nothing but marks stays, and with it the other one.
    """
    sides = [side.rstrip() for side in (source, target) if side]
    kinds = {_KIND_OF_MARK.get(side[-1:], -1) for side in sides}
    shorter = [side[:-1].rstrip() for side in sides]
    if len(kinds) != 1 or -1 in kinds or not all(map(has_text, shorter)):
        return source, target
    return (shorter[0], shorter[1]) if source else ("", shorter[0])


def has_text(text: str) -> bool:
    """Whether a text has more than spaces, punctuation and symbols that are held."""
    return any(unicodedata.category(character)[0] in "LNS" for character in text)


def hold(text: str, symbols: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Puts a private character in the place of each symbol, so that noise leaves it alone.

    Returns:
      The text, and the symbol of each of these characters.
    """
    held: dict[str, str] = {}
    code = _PRIVATE
    for symbol in sorted(symbols, key=len, reverse=True):
        if symbol in text:
            while chr(code) in text:
                code += 1
            text = text.replace(symbol, chr(code))
            held[chr(code)] = symbol
    return text, held


def release(text: str, held: dict[str, str]) -> str:
    """Puts the symbols back that `hold` has replaced."""
    for mark, symbol in held.items():
        text = text.replace(mark, symbol)
    return text


def spread_languages(
    parts: Sequence[Part], languages: Sequence[tuple[str, str]]
) -> Iterator[tuple[str, str]]:
    """Yields source and target language of each pair, in order."""
    for part, spoken in zip(parts, languages, strict=True):
        yield from itertools.repeat(spoken, part.size)
