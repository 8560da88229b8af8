"""Noise that moves words, and their alignments: joined pairs, random text, hints, and prefixes.

OpusTrainer's Merge, Noise, Tags and Prefix, each as a function of a pair and of random numbers, which are
those of the seed and the index of the pair.
"""

import collections
import functools
import random
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flaxformer_mt.config import NoiseConfig
from flaxformer_mt.corpus.pairs import Pair
from flaxformer_mt.unicode_text import split_words

# Blocks of Unicode that random words are of: alphabets, kana, Han, Hangul, emoji.
_BLOCKS = [
    tuple(int(end, 16) for end in block.split("-"))
    for block in "20-7e a0-ff 370-3ff 400-4ff 530-58f 590-5ff 600-6ff 900-97f 980-9ff a80-aff e00-e7f "
    "1000-109f 10a0-10ff 1780-17ff 3040-309f 30a0-30ff 4e00-9fff ac00-d7af 1f600-1f64f".split()
]


class Words(NamedTuple):
    """A pair as words, and the points of its word alignment."""

    source: list[str]
    target: list[str]
    links: list[tuple[int, int]]


def move_words(
    pairs: Sequence[Pair],
    links: Sequence[np.ndarray] | None,
    parts: np.ndarray,
    rates: NoiseConfig,
    *,
    seed: int,
) -> tuple[list[Pair], list[np.ndarray] | None]:
    """Return pairs, and word alignments [K, 2] if any; pairs of different `parts` are not joined."""
    shares = [rates.merge, rates.random_text, rates.prefix]
    draws = np.random.default_rng(seed).random((len(pairs), 3)) < shares
    moved, points = list(pairs), None if links is None else list(links)

    def read(index: int) -> Words:
        source, target = pairs[index]
        words = Words(split_words(source), split_words(target), [])
        # Other noise may have dropped a mark that was the last word.
        own = [] if links is None else links[index].tolist()
        words.links.extend((s, t) for s, t in own if s < len(words.source) and t < len(words.target))
        return words

    for index, (joins, replaces, begins) in enumerate(draws.tolist()):
        if not (joins or replaces or begins or rates.tags):
            continue
        words = before = read(index)
        chance = random.Random(seed << 32 | index)
        if joins:
            count = chance.randint(rates.merge_lines.min_lines, rates.merge_lines.max_lines)
            same = parts[index : index + count] == parts[index]
            words = join([read(index + n) for n in range(len(same)) if same[: n + 1].all()])
        if replaces:
            text = make_words(rates, chance)
            source = text if words.source else []
            words = Words(source, text, [(number, number) for number in range(len(source))])
        elif rates.tags:
            words = add_hints(words, rates, chance)
        if begins:
            words = add_prefix(words, rates, chance)
        if words is not before:
            moved[index] = Pair(" ".join(words.source), " ".join(words.target))
            if points is not None:
                points[index] = np.array(words.links, np.int32).reshape(-1, 2)
    return moved, points


def join(texts: Sequence[Words]) -> Words:
    words = Words([], [], [])
    for source, target, links in texts:
        words.links.extend((s + len(words.source), t + len(words.target)) for s, t in links)
        words = Words(words.source + source, words.target + target, words.links)
    return words


@functools.cache
def _list_characters(first: int, last: int) -> list[str]:
    return [one for one in map(chr, range(first, last + 1)) if one.isprintable() and one != " "]


def make_words(rates: NoiseConfig, chance: random.Random) -> list[str]:
    """Make words of one length, of the characters of one block of Unicode."""
    options, characters = rates.random_words, _list_characters(*chance.choice(_BLOCKS))
    length = chance.randint(options.min_word_length, options.max_word_length)
    count = chance.randint(1, options.max_words)
    return ["".join(chance.choices(characters, k=length)) for _ in range(count)]


def add_hints(words: Words, rates: NoiseConfig, chance: random.Random) -> Words:
    """Write translations or random words beside source words with one translation, which differs."""
    source, target, links = words
    counts = [collections.Counter(point[side] for point in links) for side in (0, 1)]
    chosen = [
        (s, t)
        for s, t in links
        if counts[0][s] == counts[1][t] == 1 and source[s] != target[t] and chance.random() < rates.tags
    ]
    if not chosen:
        return words
    kinds = rates.tag_kinds
    shares = kinds.augment, kinds.replace, kinds.tag and 1 - kinds.augment - kinds.replace
    # The words in the place of each word, and the points between those of two that were aligned.
    sources, targets = ([[word] for word in side] for side in (source, target))
    inside = dict.fromkeys((s for s, _ in links), [(0, 0)])
    for s, t in chosen:
        (kind,) = chance.choices(("augment", "replace", "tag"), shares)
        added = [target[t]] if kind == "tag" else make_words(rates, chance)
        if kind == "augment":
            sources[s], targets[t] = [source[s], *added], [target[t], *added]
            inside[s] = [(number, number) for number in range(len(added) + 1)]
        else:
            sources[s], places = fill(kinds.template, src=source[s], trg=" ".join(added))
            targets[t] = added
            inside[s] = [(places["src"], number) for number in range(len(added))]
            inside[s] += [(places["trg"] + number, number) for number in range(len(added))]
    starts = [np.cumsum([0, *map(len, side)]).tolist() for side in (sources, targets)]
    moved = [(starts[0][s] + own, starts[1][t] + other) for s, t in links for own, other in inside[s]]
    return Words(sum(sources, []), sum(targets, []), moved)


def add_prefix(words: Words, rates: NoiseConfig, chance: random.Random) -> Words:
    """Write some adjacent target words before the source; a shorter target has none."""
    count = chance.randint(rates.prefix_words.min_words, rates.prefix_words.max_words)
    if count > len(words.target):
        return words
    start = chance.randint(0, len(words.target) - count)
    prefix, _ = fill(rates.prefix_words.template, trg=" ".join(words.target[start : start + count]))
    links = [(s + len(prefix), t) for s, t in words.links]
    return Words([*prefix, *words.source], words.target, links)


def fill(template: str, **values: str) -> tuple[list[str], dict[str, int]]:
    """Return the words of a template, and the number of the first word of each value.

    fill("<a> {src} <b> {trg}", src="Hund", trg="big dog") has Hund at 1 and big at 3.
    """
    words, places = list[str](), dict[str, int]()
    for token in split_words(template):
        names = [name for name in values if f"{{{name}}}" in token]
        places |= dict.fromkeys(names, len(words))
        words += split_words(re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), token))
    return words, places
