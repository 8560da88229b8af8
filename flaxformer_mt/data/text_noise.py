"""Noise in the text of training pairs, as a function of the seed and the number of the line.

Before the vocabulary. The nine typos have OpusTrainer's names and rates; its own code
needs SentencePiece 0.1.99, and draws from the random numbers that all threads of a process share.
"""

import dataclasses
import itertools
import os
import random
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.config import NoiseConfig, TypoConfig
from flaxformer_mt.corpus.pairs import Pair, Part
from flaxformer_mt.unicode_text import WORD

# Part of the key of a token store: raise it when the same seed gives other text.
_FORMAT = 2
# The kinds, in the order in which they are applied. The draws of a line are in this order, too.
_KINDS = ("end_punctuation", "punctuation", "lower_case", "title_case", "upper_case", "typos", "whitespace")
# Marks at the end of a sentence by kind, as OpusTrainer pairs them, in many scripts.
_END_MARKS = (".．｡。﹒।॥۔။։።", "!！﹗‼՜", "?？﹖؟\u037e՞፧", ",，､、،၊՝", ":：﹕፥፦", ";；﹔؛፤", "…⋯")
_KIND_OF_MARK = {mark: kind for kind, marks in enumerate(_END_MARKS) for mark in marks}
# First of the private characters that stand for symbols while a text is changed.
_PRIVATE = 0x10F000
_NO_LINKS = np.zeros((0, 2), np.int32)
# Languages with i and ı: Turkish, Azerbaijani, Crimean Tatar, Kazakh and Tatar in Latin script.
_DOTTED = re.compile("(?:tr|tur|az|aze|crh|tt|tat|kk|kaz)(?:[_-].*)?", re.IGNORECASE)


class TextNoise(NamedTuple):
    """The noise of a training set: its rates, and the symbols and tags that it never changes."""

    rates: NoiseConfig
    symbols: tuple[str, ...] = ()

    @property
    def identity(self) -> list[Any]:
        """JSON values that change whenever the changed text may."""
        rates = dataclasses.asdict(self.rates)
        if not self.rates.moves:  # as before there was such noise
            rates = {name: rates[name] for name in (*_KINDS, "typo_kinds")}
        return [_FORMAT, rates, sorted(self.symbols)]

    def apply(
        self,
        pairs: Sequence[Pair],
        links: Sequence[np.ndarray] | None = None,
        *,
        seed: int,
        languages: Iterable[tuple[str, str]],
    ) -> tuple[list[Pair], list[np.ndarray] | None]:
        """Return the pairs with noise, and their word alignments [K, 2] if any; neither side becomes empty.

        The noise of each pair depends on its index and the seed, and not on the other pairs.
        """
        rates = np.array([getattr(self.rates, kind) for kind in _KINDS])
        draws = np.random.default_rng(seed).random((len(pairs), len(_KINDS))) < rates
        noisy, points = list(pairs), [_NO_LINKS] * len(pairs) if links is None else list(links)
        for index, spoken in enumerate(itertools.islice(languages, len(pairs))):
            if draws[index].any():
                kinds = itertools.compress(_KINDS, draws[index])
                chance = random.Random(seed << 32 | index)
                change = self._change(pairs[index], points[index], kinds, chance, spoken)
                noisy[index], points[index] = change
        return noisy, None if links is None else points

    def _change(
        self,
        pair: Pair,
        links: np.ndarray,
        kinds: Iterable[str],
        chance: random.Random,
        languages: tuple[str, str],
    ) -> tuple[Pair, np.ndarray]:
        source, held = hold(pair.source, self.symbols)
        target, held_target = hold(pair.target, self.symbols)
        for kind in self._draw_typos(kinds, chance):
            before = source
            if kind == "end_punctuation":
                source, target = drop_end_mark(source, target)
            elif kind in TYPOS:
                source = edit(source, kind, chance)
            elif kind in _CHOICES:
                source = _edit_one_of(source, _CHOICES[kind], chance)
            else:
                source = change_case(source, kind, languages[0])
                target = target if kind == "lower_case" else change_case(target, kind, languages[1])
            links = follow_words(links, before, source)
        return Pair(source.translate(held), target.translate(held_target)), links

    def _draw_typos(self, kinds: Iterable[str], chance: random.Random) -> Iterator[str]:
        """Yield the kinds, with the typos that are drawn in the place of `typos`."""
        for kind in kinds:
            if kind == "typos":
                rates = self.rates.typo_kinds
                yield from (typo for typo in TYPOS if chance.random() < getattr(rates, typo))
            else:
                yield kind


def follow_words(links: np.ndarray, before: str, after: str) -> np.ndarray:
    """Return the word alignment [K, 2] of a source after an edit at one place.

    Both parts of a word that is split have its links, two joined words those of both, a dropped word none:
    the links 0-0 1-1 of "der Hund" are 0-0 1-1 2-1 of "der Hu nd" and 0-0 0-1 of "derHund".
    """
    if not len(links):
        return links
    olds, words = (list(WORD.finditer(text)) for text in (before, after))
    if len(olds) == len(words):
        return links
    head = len(os.path.commonprefix((before, after)))
    tail = min(len(os.path.commonprefix((before[::-1], after[::-1]))), min(len(before), len(after)) - head)
    shift = len(after) - len(before)

    def places(old: re.Match[str]) -> list[int]:
        # The characters of the old word before and after the edit, where they are now.
        left = old.start(), min(old.end(), head)
        right = max(old.start(), len(before) - tail) + shift, old.end() + shift
        spans = [(start, end) for start, end in (left, right) if start < end]
        return [
            number
            for number, word in enumerate(words)
            if any(word.start() < end and start < word.end() for start, end in spans)
        ]

    moved = [(place, t) for s, t in links.tolist() if s < len(olds) for place in places(olds[s])]
    return np.array(list(dict.fromkeys(moved)), np.int32).reshape(-1, 2)


def change_case(text: str, kind: str, language: str) -> str:
    """Change to upper_case, lower_case or title_case, in which other letters stay, by Unicode."""
    dotted = _DOTTED.fullmatch(language) is not None
    if kind == "lower_case":
        text = text.replace("İ", "i").replace("I", "ı") if dotted else text
        return text.lower().replace("i̇", "i")  # without the dot that Unicode keeps as a mark after the i of İ
    if kind == "upper_case":
        return (text.replace("i", "İ") if dotted else text).upper()
    first = re.compile(r"(?<!\S)([^\w\s]*)(\w)")
    return first.sub(lambda word: word[1] + ("İ" if dotted and word[2] == "i" else word[2].title()), text)


def drop_end_mark(source: str, target: str) -> tuple[str, str]:
    """Remove the marks at the ends of both sides if they are of one kind: `Ja. | 是。` becomes `Ja | 是`.

    Without a source, that of the target. A side of nothing but marks stays, and with it the other one.
    """
    sides = [side.rstrip() for side in (source, target) if side]
    kinds = {_KIND_OF_MARK.get(side[-1:], -1) for side in sides}
    shorter = [side[:-1].rstrip() for side in sides]
    if len(kinds) != 1 or -1 in kinds or not all(map(_has_text, shorter)):
        return source, target
    return (shorter[0], shorter[1]) if source else ("", shorter[0])


def _has_text(text: str) -> bool:
    """Whether a text has more than spaces, punctuation and symbols that are held."""
    return any(map(str.isalnum, text))


def hold(text: str, symbols: Sequence[str]) -> tuple[str, dict[int, str]]:
    """Put a private character in the place of each symbol; return the text, and what puts them back.

    hold(text, symbols)[0].translate(hold(text, symbols)[1]) is the text.
    """
    free = (code for code in itertools.count(_PRIVATE) if chr(code) not in text)
    held: dict[int, str] = {}
    for symbol in sorted(symbols, key=len, reverse=True):
        if symbol in text:
            code = next(free)
            held[code], text = symbol, text.replace(symbol, chr(code))
    return text, held


def spread_languages(
    parts: Sequence[Part], languages: Sequence[tuple[str, str]]
) -> Iterator[tuple[str, str]]:
    for part, spoken in zip(parts, languages, strict=True):
        yield from itertools.repeat(spoken, part.size)


# Rows of keyboards, each row half a key to the right of the one above: QWERTY, the Russian and the Greek one.
_KEYBOARDS = (
    ("1234567890", "qwertyuiop", "asdfghjkl", "zxcvbnm"),
    ("1234567890", "йцукенгшщзхъ", "фывапролджэ", "ячсмитьбю"),
    ("1234567890", "ςερτυθιοπ", "ασδφγηξκλ", "ζχψωβνμ"),
)
# Letters that look alike, and styles of a punctuation mark.
_ALIKE = "o0 1li s5 z2 b6 g9q uv nm ce".split()
_LATIN = dict(zip("ßıłøæđςαοаеорсхуі", "Biloedsaoaeopcxyi", strict=True))  # the others are Greek and Cyrillic
_STYLES = "'’ \"“”„«» -–— .,;: !?. 。、，".split()


def _others(groups: Iterable[str]) -> dict[str, str]:
    """Map each character to the others of its groups."""
    pairs = [pair for group in groups for pair in itertools.permutations(group, 2)]
    return {letter: "".join(other for first, other in pairs if first == letter) for letter, _ in pairs}


def _find_neighbours() -> dict[str, str]:
    neighbours: dict[str, str] = {}
    for rows in _KEYBOARDS:
        for above, row, below in zip(("", *rows), rows, (*rows[1:], ""), strict=False):
            for at, key in enumerate(row):
                left = max(at - 1, 0)
                near = above[at : at + 2] + row[left : at + 2] + below[left : at + 1]
                neighbours.setdefault(key, near.replace(key, ""))
    return neighbours


_NEIGHBOURS, _SIMILAR, _STYLED = _find_neighbours(), _LATIN | _others(_ALIKE), _others(_STYLES)


def _like(letter: str, others: str) -> list[str]:
    return [other.upper() if letter.isupper() and len(other.upper()) == 1 else other for other in others]


def _near(letter: str) -> list[str]:
    return _like(letter, _NEIGHBOURS.get(letter.lower(), ""))


def _similar(letter: str) -> list[str]:
    """Return letters that look like one: without its accent, or by the table; Hangul is not taken apart."""
    plain = unicodedata.normalize("NFD", letter)
    accented = len(plain) > 1 and unicodedata.category(plain[1])[0] == "M"
    return _like(letter, plain[0] if accented else _SIMILAR.get(letter.lower(), ""))


def _class_of(category: str) -> str:
    """Make a regular expression of one character of a category of Unicode."""
    members = (chr(code) for code in range(0x21, 0xFF66) if unicodedata.category(chr(code))[0] == category)
    return f"[{''.join(map(re.escape, members))}]"


_P, _M = _class_of("P"), _class_of("M")
_L = rf"[^\W\d_](?!{_M})"  # a letter that no combining mark follows
_WORD = r"[^\s\U000F0000-\U0010FFFF]"
# What each edit replaces, and by which strings: one of them, at one random place. Only those of spaces and of
# marks that are words of their own change the number of words.
_EDITS: dict[str, tuple[str, Callable[[str], Sequence[str]]]] = {
    "char_swap": (rf"({_L})(?!\2){_L}", lambda two: [two[::-1]]),
    "missing_char": (rf"(?<=[^\W\d_]){_L}|{_L}(?=[^\W\d_])", lambda letter: [""]),
    "extra_char": (_L, lambda letter: [new for key in _near(letter) for new in (key + letter, letter + key)]),
    "nearby_char": (_L, _near),
    "similar_char": (_L, _similar),
    "skipped_space": (rf"(?<={_WORD}) (?={_WORD})", lambda space: [""]),
    "random_space": (rf"{_L}(?=[^\W\d_])", lambda letter: [f"{letter} "]),
    "repeated_char": (_L, lambda letter: [letter * 2]),
    "unichar": (rf"({_L})\2(?!{_M})", lambda two: [two[0]]),
    "space_before_mark": (r"(?<=\w)[.,;:!?]", lambda mark: [f" {mark}"]),
    "drop_mark": (rf"(?:^|(?<=\s)){_P}\s|\s{_P}$|(?<=\S){_P}|{_P}(?=\S)", lambda mark: [""]),
    "double_mark": ("[.,!?。！？…]", lambda mark: [mark * 2, mark * 3]),
    "restyle_mark": (f"[{re.escape(''.join(_STYLED))}]", lambda mark: _STYLED[mark]),
}
_PATTERNS = {name: re.compile(f"(?=({pattern}))") for name, (pattern, _) in _EDITS.items()}
TYPOS = tuple(TypoConfig.__dataclass_fields__)
_CHOICES = {"whitespace": ("skipped_space", "random_space", "space_before_mark")}
_CHOICES |= {"punctuation": ("drop_mark", "double_mark", "restyle_mark")}


def edit(text: str, name: str, chance: random.Random) -> str:
    """Make one edit at a random place, as in edit("Hund", "char_swap", ...) -> "Hnud", if there is one."""
    places = list(_PATTERNS[name].finditer(text))
    while places:
        match = places.pop(int(chance.random() * len(places)))
        if strings := _EDITS[name][1](match[1]):
            string = strings[int(chance.random() * len(strings))]
            return text[: match.start(1)] + string + text[match.end(1) :]
    return text


def _edit_one_of(text: str, names: Sequence[str], chance: random.Random) -> str:
    """Make the first possible edit of a random order; a text of nothing but spaces and mark stays."""
    first = int(chance.random() * len(names))
    for name in (*names[first:], *names[:first]):
        if (changed := edit(text, name, chance)) != text:
            return changed if _has_text(changed) else text
    return text
