"""Noise that moves words: each kind by hand, with alignments, and as a function of the seed and the pair."""

import dataclasses
import random

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from flaxformer_mt.config import Config, NoiseConfig
from flaxformer_mt.config.checks import validate
from flaxformer_mt.config.schema import MergeConfig, PrefixConfig, RandomTextConfig, TagsConfig
from flaxformer_mt.corpus.pairs import Pair
from flaxformer_mt.data.moving_noise import Words, add_hints, add_prefix, fill, make_words, move_words
from flaxformer_mt.data.text_noise import TextNoise
from flaxformer_mt.errors import UserError
from flaxformer_mt.unicode_text import split_words

WORDS = Words(["ich", "mag", "42", "Kuchen"], ["42", "I", "like", "cake"], [(0, 1), (1, 2), (2, 0), (3, 3)])
PAIRS = [Pair(f"eins zwei {n}", f"one two {n} !") for n in range(40)]
LINKS = [np.array([(0, 0), (1, 1), (2, 2)], np.int32)] * 40
ALL = NoiseConfig(merge=0.4, random_text=0.2, tags=0.3, tag_kinds=TagsConfig(0.3, 0.3), prefix=0.3)


def move(rates: NoiseConfig, pairs=PAIRS, links=LINKS, seed: int = 1, parts=None):
    parts = np.zeros(len(pairs), int) if parts is None else parts
    return move_words(pairs, links, parts, rates, seed=seed)


def linked(pair: Pair, points: np.ndarray) -> list[tuple[str, str]]:
    source, target = split_words(pair.source), split_words(pair.target)
    return [(source[s], target[t]) for s, t in points]


def test_a_template_has_its_values():
    found = fill("<a> {src} <b> {trg}", src="Hund", trg="big dog")
    assert found == (["<a>", "Hund", "<b>", "big", "dog"], {"src": 1, "trg": 3})
    assert fill("{trg}/{src} x", src="{trg}", trg="a b") == (["a", "b/{trg}", "x"], {"src": 0, "trg": 0})


def test_translations_are_written_beside_words():
    """The two words that differ and have one translation each; 42 is copied anyway."""
    links = [*WORDS.links, (3, 1)]  # Kuchen has two words, and so has I
    rates = NoiseConfig(tags=1.0)
    source, target, found = add_hints(WORDS._replace(links=links), rates, random.Random(1))
    assert (
        source == "ich __source__ mag __target__ like __done__ 42 Kuchen".split() and target == WORDS.target
    )
    assert found == [(0, 1), (2, 2), (4, 2), (6, 0), (7, 3), (7, 1)]
    assert add_hints(WORDS, NoiseConfig(tags=0.0), random.Random(1)) is WORDS
    outside = [np.array([(9, 1), (0, 9)])]  # other noise has dropped words
    assert move(rates, [Pair("ich mag", "I like")], outside)[0] == [("ich mag", "I like")]


def test_random_words_follow_or_replace_a_translation():
    one = WORDS._replace(links=[(2, 0), (1, 2)])
    for seed in range(8):
        rates = NoiseConfig(tags=1.0, tag_kinds=TagsConfig(augment=1.0, tag=0.0))
        source, target, links = add_hints(one, rates, random.Random(seed))
        added = source[2:-2]
        assert added and source == ["ich", "mag", *added, "42", "Kuchen"]
        assert target == ["42", "I", "like", *added, "cake"]
        pairs = [(source[s], target[t]) for s, t in links]
        assert pairs == [("42", "42"), ("mag", "like"), *zip(added, added, strict=True)]
        rates = NoiseConfig(tags=1.0, tag_kinds=TagsConfig(replace=1.0, template="< {src} = {trg} >"))
        source, target, links = add_hints(one, rates, random.Random(seed))
        added = target[2:-1]
        assert target == ["42", "I", *added, "cake"]
        assert source == ["ich", "<", "mag", "=", *added, ">", "42", "Kuchen"]
        pairs = [(source[s], target[t]) for s, t in links]
        assert pairs[1:] == [("mag", word) for word in added] + [(word, word) for word in added]


def test_a_prefix_is_words_of_the_target():
    seen = set()
    for seed in range(40):
        rates = NoiseConfig(prefix_words=PrefixConfig(1, 5, "<p> {trg} </p>"))
        source, target, links = add_prefix(WORDS, rates, random.Random(seed))
        count = len(source) - len(WORDS.source)
        assert source[count:] == WORDS.source and target == WORDS.target
        assert links == [(s + count, t) for s, t in WORDS.links]
        if count:
            assert source[0] == "<p>" and source[count - 1] == "</p>"
            phrase = " ".join(source[1 : count - 1])
            assert f" {phrase} " in f" {' '.join(target)} "
        seen.add(count)
    assert seen == {0, 3, 4, 5, 6}  # five words are more than there are


def test_random_text_is_the_same_on_both_sides():
    rates = NoiseConfig(random_text=1.0, random_words=RandomTextConfig(3, 4, 5))
    pairs, links = move(rates)
    for (source, target), points in zip(pairs, links, strict=True):
        words = source.split()
        assert source == target and 1 <= len(words) <= 5 and {len(word) for word in words} <= {3, 4}
        assert_array_equal(points, [(n, n) for n in range(len(words))])
    assert len(set(pairs)) == len(pairs)
    assert all(len(make_words(rates, random.Random(seed))) <= 5 for seed in range(200))
    (alone,), _ = move(rates, [Pair("", "one two")], None)  # a language model
    assert not alone.source and alone.target


def test_neighbors_of_one_data_set_are_joined():
    rates = NoiseConfig(merge=1.0, merge_lines=MergeConfig(2, 3))
    parts = np.repeat([0, 1], [39, 1])
    pairs, links = move(rates, parts=parts)
    for index, (pair, points) in enumerate(zip(pairs, links, strict=True)):
        count = len(pair.source.split()) // 3
        assert count in ((2, 3) if index < 37 else (2,) if index == 37 else (1,))
        own = range(index, index + count)
        assert pair == (" ".join(PAIRS[n].source for n in own), " ".join(PAIRS[n].target for n in own))
        wanted = [one for n in own for one in (("eins", "one"), ("zwei", "two"), (str(n), str(n)))]
        assert linked(pair, points) == wanted


def test_the_noise_is_a_function_of_the_seed_and_the_pairs():
    pairs, links = move(ALL)
    again, same = move(ALL)
    assert pairs == again and all(map(np.array_equal, links, same))
    assert move(ALL, seed=2)[0] != pairs
    kept = [pair for pair, before in zip(pairs, PAIRS, strict=True) if pair == before]
    assert 3 < len(kept) < 30
    # What comes after a pair and its neighbors does not matter, nor are alignments needed.
    assert move(ALL, PAIRS[:10], LINKS[:10])[0][:7] == pairs[:7]
    assert move(dataclasses.replace(ALL, tags=0.0), links=None)[1] is None
    for pair, points in zip(pairs, links, strict=True):
        linked(pair, points)  # no point is outside
    assert move(NoiseConfig())[0] == PAIRS


def test_the_key_of_other_noise_stays():
    """Stores of runs from before there were these kinds are used again."""
    plain, moving = (TextNoise(NoiseConfig(upper_case=0.5, prefix=prefix)) for prefix in (0.0, 0.1))
    assert "prefix" not in plain.identity[1] and "typo_kinds" in plain.identity[1]
    assert moving.identity[1]["prefix_words"]["min_words"] == 2


@pytest.mark.parametrize(
    ("noise", "problem"),
    [
        (NoiseConfig(tags=0.1), "data.noise.tags is 0.1, but data.alignments names no file"),
        (NoiseConfig(merge_lines=MergeConfig(5, 4)), "merge_lines.min_lines is 5, above the maximum of 4"),
        (
            NoiseConfig(tag_kinds=TagsConfig(0.6, 0.6)),
            "tag_kinds has shares that are all 0, or above 1 together",
        ),
        (NoiseConfig(tag_kinds=TagsConfig(tag=0.0)), "tag_kinds has shares that are all 0"),
        (
            NoiseConfig(prefix_words=PrefixConfig(template="{src}")),
            "prefix_words.template is '{src}', without",
        ),
    ],
)
def test_what_cannot_be_is_refused(noise, problem):
    config = Config()
    with pytest.raises(UserError) as error:
        validate(dataclasses.replace(config, data=dataclasses.replace(config.data, noise=noise)))
    assert problem in str(error.value) and "\n" not in str(error.value)
