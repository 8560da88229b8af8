"""Noise in the text of training pairs before tokenization, determined by the seed and the line number.

The kinds of noise are the modifiers of OpusTrainer. Its code is not used, because it needs SentencePiece
0.1.99 and draws from a random generator that all threads of a process share.
"""

import collections
import dataclasses
import functools
import itertools
import os
import random
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.config import NoiseConfig
from flaxformer_mt.corpus.pairs import Pair
from flaxformer_mt.unicode_text import WORD, split_words

# Part of the key of a token store: raise it when the same seed gives other text.
_FORMAT = 3
# The kinds in the order in which they are applied.
_KINDS = ("end_punctuation", "lower_case", "title_case", "upper_case", "typos")
# The probability of each kind of typos in a line that has typos.
_TYPO_RATE = 0.1
# Marks at the end of a sentence by kind, as OpusTrainer pairs them, in many scripts.
_END_MARKS = (".．｡。﹒।॥۔။։።", "!！﹗‼՜", "?？﹖؟\u037e՞፧", ",，､、،၊՝", ":：﹕፥፦", ";；﹔؛፤", "…⋯")
_KIND_OF_MARK = {mark: kind for kind, marks in enumerate(_END_MARKS) for mark in marks}
# First of the private characters that stand for symbols while a text is changed.
_PRIVATE = 0x10F000
_NO_LINKS = np.zeros((0, 2), np.int32)
# Languages with i and ı: Turkish, Azerbaijani, Crimean Tatar, Kazakh and Tatar in Latin script.
_DOTTED = re.compile("(?:tr|tur|az|aze|crh|tt|tat|kk|kaz)(?:[_-].*)?", re.IGNORECASE)


class TextNoise(NamedTuple):
    """The noise for a training set: the rate of each kind, and the symbols and tags to leave unchanged."""

    rates: NoiseConfig
    symbols: tuple[str, ...] = ()

    @property
    def identity(self) -> list[Any]:
        """JSON values that differ if two settings may change a text in different ways."""
        return [_FORMAT, dataclasses.asdict(self.rates), sorted(self.symbols)]

    def apply(
        self,
        pairs: Sequence[Pair],
        links: Sequence[np.ndarray] | None = None,
        *,
        seed: int,
        languages: Iterable[tuple[str, str]],
    ) -> tuple[list[Pair], list[np.ndarray] | None]:
        """Add noise to pairs and adapt their word alignments [K, 2], if any; neither side becomes empty.

        The noise of a pair depends on its index and the seed, but not on the other pairs. `languages` has the
        source and target language of each pair.
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
        for kind in _draw_typos(kinds, chance):
            before = source
            if kind == "end_punctuation":
                source, target = drop_end_mark(source, target)
            elif kind in TYPOS:
                source = edit(source, kind, chance)
            else:
                source = change_case(source, kind, languages[0])
                target = target if kind == "lower_case" else change_case(target, kind, languages[1])
            links = follow_words(links, before, source)
        return Pair(source.translate(held), target.translate(held_target)), links


def _draw_typos(kinds: Iterable[str], chance: random.Random) -> Iterator[str]:
    """Yield the kinds of noise; `typos` is replaced by a random selection of kinds of typos."""
    for kind in kinds:
        if kind == "typos":
            yield from (typo for typo in TYPOS if chance.random() < _TYPO_RATE)
        else:
            yield kind


def follow_words(links: np.ndarray, before: str, after: str) -> np.ndarray:
    """Adapt a word alignment [K, 2] to a source that was edited at one place.

    If a word is split, both parts keep its links; two joined words have the links of both; a dropped word
    loses its links. The links 0-0 1-1 of "der Hund" become 0-0 1-1 2-1 for "der Hu nd" and 0-0 0-1 for
    "derHund".
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
        # The new positions of the old word's characters before and after the edit.
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
    """Change a text to `kind`: upper_case, lower_case, or title_case (the first letter of each word).

    A language that distinguishes i and ı, such as Turkish, keeps the two letters apart.
    """
    dotted = _DOTTED.fullmatch(language) is not None
    if kind == "lower_case":
        text = text.replace("İ", "i").replace("I", "ı") if dotted else text
        return text.lower().replace("i̇", "i")  # without the dot that Unicode keeps as a mark after the i of İ
    if kind == "upper_case":
        return (text.replace("i", "İ") if dotted else text).upper()
    first = re.compile(r"(?<!\S)([^\w\s]*)(\w)")
    return first.sub(lambda word: word[1] + ("İ" if dotted and word[2] == "i" else word[2].title()), text)


def drop_end_mark(source: str, target: str) -> tuple[str, str]:
    """Remove the final punctuation marks of both sides if they are of one kind: `Ja. | 是。` -> `Ja | 是`.

    Without a source, only the target is changed. If one side would have no text left, both stay unchanged.
    """
    sides = [side.rstrip() for side in (source, target) if side]
    kinds = {_KIND_OF_MARK.get(side[-1:], -1) for side in sides}
    shorter = [side[:-1].rstrip() for side in sides]
    if len(kinds) != 1 or -1 in kinds or not all(map(_has_text, shorter)):
        return source, target
    return (shorter[0], shorter[1]) if source else ("", shorter[0])


def _has_text(text: str) -> bool:
    """Return whether a text has a letter or digit, apart from symbols that `hold` has replaced."""
    return any(map(str.isalnum, text))


def hold(text: str, symbols: Sequence[str]) -> tuple[str, dict[int, str]]:
    """Replace symbols by private-use characters; return the text and the inverse `str.translate` table."""
    free = (code for code in itertools.count(_PRIVATE) if chr(code) not in text)
    held: dict[int, str] = {}
    for symbol in sorted(symbols, key=len, reverse=True):
        if symbol in text:
            code = next(free)
            held[code], text = symbol, text.replace(symbol, chr(code))
    return text, held


# Rows of keyboards, each row half a key to the right of the one above: QWERTY, the Russian and the Greek one.
_KEYBOARDS = (
    ("1234567890", "qwertyuiop", "asdfghjkl", "zxcvbnm"),
    ("1234567890", "йцукенгшщзхъ", "фывапролджэ", "ячсмитьбю"),
    ("1234567890", "ςερτυθιοπ", "ασδφγηξκλ", "ζχψωβνμ"),
)
# Letters that look alike.
_ALIKE = "o0 1li s5 z2 b6 g9q uv nm ce".split()
_LATIN = dict(zip("ßıłøæđςαοаеорсхуі", "Biloedsaoaeopcxyi", strict=True))  # the others are Greek and Cyrillic


def _others(groups: Iterable[str]) -> dict[str, str]:
    """Map each character to the other characters of the groups that it belongs to."""
    pairs = [pair for group in groups for pair in itertools.permutations(group, 2)]
    return {letter: "".join(other for first, other in pairs if first == letter) for letter, _ in pairs}


def _find_neighbors() -> dict[str, str]:
    neighbors: dict[str, str] = {}
    for rows in _KEYBOARDS:
        for above, row, below in zip(("", *rows), rows, (*rows[1:], ""), strict=False):
            for at, key in enumerate(row):
                left = max(at - 1, 0)
                near = above[at : at + 2] + row[left : at + 2] + below[left : at + 1]
                neighbors.setdefault(key, near.replace(key, ""))
    return neighbors


_NEIGHBORS, _SIMILAR = _find_neighbors(), _LATIN | _others(_ALIKE)


def _like(letter: str, others: str) -> list[str]:
    return [other.upper() if letter.isupper() and len(other.upper()) == 1 else other for other in others]


def _near(letter: str) -> list[str]:
    return _like(letter, _NEIGHBORS.get(letter.lower(), ""))


def _similar(letter: str) -> list[str]:
    """Return letters that look similar: without the accent, or from a table. Hangul is not decomposed."""
    plain = unicodedata.normalize("NFD", letter)
    accented = len(plain) > 1 and unicodedata.category(plain[1])[0] == "M"
    return _like(letter, plain[0] if accented else _SIMILAR.get(letter.lower(), ""))


_MARKS = (chr(code) for code in range(0x21, 0xFF66) if unicodedata.category(chr(code))[0] == "M")
_M = f"[{''.join(map(re.escape, _MARKS))}]"
_L = rf"[^\W\d_](?!{_M})"  # a letter that no combining mark follows
_WORD = r"[^\s\U000F0000-\U0010FFFF]"
# OpusTrainer's typos: the pattern of the text to replace, and a function from a match to its possible
# replacements. Only typos of spaces change the number of words.
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
}
_PATTERNS = {name: re.compile(f"(?=({pattern}))") for name, (pattern, _) in _EDITS.items()}
TYPOS = tuple(_EDITS)


def edit(text: str, name: str, chance: random.Random) -> str:
    """Make one typo at a random place, if any place allows it: edit("Hund", "char_swap", ...) -> "Hnud"."""
    places = list(_PATTERNS[name].finditer(text))
    while places:
        match = places.pop(int(chance.random() * len(places)))
        if strings := _EDITS[name][1](match[1]):
            string = strings[int(chance.random() * len(strings))]
            return text[: match.start(1)] + string + text[match.end(1) :]
    return text


# Unicode blocks of the characters of random words: alphabets, kana, Han, Hangul, emoji.
_BLOCKS = [
    tuple(int(end, 16) for end in block.split("-"))
    for block in "20-7e a0-ff 370-3ff 400-4ff 530-58f 590-5ff 600-6ff 900-97f 980-9ff a80-aff e00-e7f "
    "1000-109f 10a0-10ff 1780-17ff 3040-309f 30a0-30ff 4e00-9fff ac00-d7af 1f600-1f64f".split()
]
# Lengths of random words in characters, and their maximum number, as in OpusTrainer.
_SHORTEST, _LONGEST, _MOST = 2, 5, 6


def move_words(
    pairs: Sequence[Pair], links: Sequence[np.ndarray] | None, rates: NoiseConfig, *, seed: int
) -> tuple[list[Pair], list[np.ndarray] | None]:
    """Replace some pairs by random text, and add random words to others, at the given rates.

    The random numbers of a pair depend on the seed and the pair's index. No words are added without `links`,
    the word alignments [K, 2] of the pairs.
    """
    replaced = np.random.default_rng(seed).random(len(pairs)) < rates.random_text
    moved, points = list(pairs), None if links is None else list(links)
    for index, replaces in enumerate(replaced.tolist()):
        if replaces:
            words = make_words(random.Random(seed << 32 | index))
            source = words if split_words(moved[index].source) else []
            moved[index] = Pair(" ".join(source), " ".join(words))
            if points is not None:
                points[index] = np.array([(n, n) for n in range(len(source))], np.int32).reshape(-1, 2)
        elif rates.inline and points is not None:
            chance = random.Random(seed << 32 | index)
            moved[index], points[index] = add_words(moved[index], points[index], rates.inline, chance)
    return moved, points


@functools.cache
def _list_characters(first: int, last: int) -> list[str]:
    return [one for one in map(chr, range(first, last + 1)) if one.isprintable() and one != " "]


def make_words(chance: random.Random) -> list[str]:
    """Make random words, all of one length, from the characters of one Unicode block."""
    characters = _list_characters(*chance.choice(_BLOCKS))
    length = chance.randint(_SHORTEST, _LONGEST)
    count = chance.randint(1, _MOST)
    return ["".join(chance.choices(characters, k=length)) for _ in range(count)]


def add_words(pair: Pair, links: np.ndarray, share: float, chance: random.Random) -> tuple[Pair, np.ndarray]:
    """Insert random words after a share of the source words, and the same words after their translations.

    Only words that are aligned one to one, and whose translation is spelled differently, are chosen. If "xy
    zw" is added after "Hund" and "dog" in "der Hund" and "the dog", the links 0-0 1-1 become 0-0 1-1 2-2 3-3.
    """
    source, target = map(split_words, pair)
    # Other noise may have dropped a mark that was the last word.
    kept = [(s, t) for s, t in links.tolist() if s < len(source) and t < len(target)]
    # How many links each word of either side has.
    counts, target_counts = (collections.Counter(point[side] for point in kept) for side in (0, 1))
    chosen = [
        (s, t)
        for s, t in kept
        if counts[s] == target_counts[t] == 1 and source[s] != target[t] and chance.random() < share
    ]
    if not chosen:
        return pair, links
    # For each word, the list of words that replaces it.
    sources, targets = ([[word] for word in side] for side in (source, target))
    for s, t in chosen:
        chance.random()  # unused: a seed gives the same text as in earlier versions
        added = make_words(chance)
        sources[s] += added
        targets[t] += added
    starts, target_starts = (np.cumsum([0, *map(len, side)]).tolist() for side in (sources, targets))
    moved = [(starts[s] + n, target_starts[t] + n) for s, t in kept for n in range(len(sources[s]))]
    noisy = Pair(" ".join(itertools.chain(*sources)), " ".join(itertools.chain(*targets)))
    return noisy, np.array(moved, np.int32)
