"""Noise: each kind by hand, in many scripts, and as a function of the seed and the line alone."""

import random
import unicodedata
from collections import Counter

import numpy as np
import pytest

from flaxformer_mt.config import NoiseConfig, TypoConfig
from flaxformer_mt.config.schema import MOVING_NOISE, SOURCE_NOISE, TARGET_NOISE
from flaxformer_mt.corpus.pairs import Pair, Part
from flaxformer_mt.data.text_noise import (
    TYPOS,
    TextNoise,
    change_case,
    drop_end_mark,
    edit,
    hold,
    spread_languages,
)

TEXTS = [
    *("Der Hund läuft, die Katze schläft; wer ist größer?", "Wasser und Schnee kommen alle"),
    *("Собака бежит ёж", "Ο σκύλος τρέχει.", "हिन्दी में लिखा हुआ पाठ ।", "狗跑得很快。", "개가 달린다"),
    *("ไทย", "a b c", "x", "...", "! ?", "42", "", " two  spaces "),
]
SPACE_KINDS = {"skipped_space", "random_space"}
LANGUAGES = ("de", "en")


def noise_of(symbols: tuple[str, ...] = (), **rates) -> TextNoise:
    return TextNoise(NoiseConfig(**rates), symbols)


def apply(noise: TextNoise, pairs: list[Pair], seed: int = 1, languages=LANGUAGES) -> list[Pair]:
    return noise.apply(pairs, seed=seed, languages=[languages] * len(pairs))[0]


@pytest.mark.parametrize("kind", TYPOS)
def test_a_typo_changes_one_place_and_loses_no_word(kind):
    changed = set()
    for text in TEXTS:
        for seed in range(8):
            found = edit(text, kind, random.Random(seed))
            assert abs(len(found) - len(text)) <= 1
            assert sum(map(str.isalpha, found)) >= sum(map(str.isalpha, text)) - 1
            if kind in SPACE_KINDS:
                assert found.replace(" ", "") == text.replace(" ", "")
            else:
                assert len(found.split()) == len(text.split())
            if found:  # a combining mark stays with its letter
                assert unicodedata.category(found[0])[0] != "M"
            if found != text:
                changed.add(text)
    assert (TEXTS[1] if kind == "unichar" else TEXTS[0]) in changed
    assert not changed & {"...", "42", ""}


def edits(text: str, kind: str) -> set[str]:
    return {edit(text, kind, random.Random(seed)) for seed in range(60)}


def test_typos_by_hand():
    assert edits("ab", "char_swap") == {"ba"} and edits("aa", "char_swap") == {"aa"}
    assert edits("a bc", "missing_char") == {"a b", "a c"}
    assert edits("é", "repeated_char") == {"éé"} and edits("Schnee", "unichar") == {"Schne"}
    assert edits("Ü", "similar_char") == {"U"} and edits("ё", "similar_char") == {"е"}
    assert edits("р", "similar_char") == {"p"} and edits("p", "similar_char") == {"p"}  # Cyrillic er, Latin p
    assert edits("A", "nearby_char") == set("QWSZ") and edits("q", "extra_char") == {"qw", "wq", *EXTRA_Q}
    assert edits("a b", "skipped_space") == {"ab"} and edits("ab", "random_space") == {"a b"}
    assert edits("ja!", "space_before_mark") == {"ja !"} and edits("ja , so", "drop_mark") == {"ja so"}
    assert edits("ja , so", "double_mark") == {"ja ,, so", "ja ,,, so"}
    assert edits("ja , so", "restyle_mark") == {"ja . so", "ja ; so", "ja : so"}


EXTRA_Q = {"1q", "q1", "2q", "q2", "aq", "qa"}


def test_case_is_that_of_unicode_and_of_the_language():
    def change(text: str, *languages: str) -> list[str]:
        return [change_case(text, kind, one) for one in languages for kind in CASES]

    assert change("straße ŉ ﬁ", "de")[0] == "STRASSE ʼN FI"
    assert change("iı", "tr", "de")[::3] == ["İI", "II"]
    assert change("Iİ", "tr_TR", "en")[1::3] == ["ıi", "ii"]
    assert change("ΟΔΟΣ", "el")[1] == "οδος"
    assert change("der  NATO-ball «und» ǆ 3d ist", "de")[2] == "Der  NATO-ball «Und» ǅ 3d Ist"
    assert change("istanbul", "az")[2] == "İstanbul"
    for text in ("狗跑得很快。", "हिन्दी में", "كلب", "ไทย"):
        assert set(change(text, "")) == {text}


CASES = ("upper_case", "lower_case", "title_case")


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("Ja.", "Yes.", ("Ja", "Yes")),
        ("好。", "Good. ", ("好", "Good")),
        ("Ja !", "Yes!", ("Ja", "Yes")),
        ("क्या?", "What؟", ("क्या", "What")),
        ("Ja.", "Yes!", ("Ja.", "Yes!")),
        ("Ja", "Yes.", ("Ja", "Yes.")),
        (".", "Yes.", (".", "Yes.")),
        ("", "Yes.", ("", "Yes")),
        ("", ".", ("", ".")),
    ],
)
def test_the_marks_at_the_end_go_together(source, target, expected):
    assert drop_end_mark(source, target) == expected


def test_kinds_change_the_sides_that_they_should():
    pair = Pair("der Hund, die Katze.", "the dog, the cat.")
    for kind in {*SOURCE_NOISE, *TARGET_NOISE} - {*MOVING_NOISE}:
        kinds = TypoConfig(char_swap=1.0)
        noise = noise_of(**{kind: 1.0}, typo_kinds=kinds)
        assert noise.rates.active
        (found,) = apply(noise, [pair])
        assert found.source != pair.source and (found.target == pair.target) is (kind in SOURCE_NOISE), kind
    assert apply(noise_of(upper_case=1.0), [pair]) == [Pair("DER HUND, DIE KATZE.", "THE DOG, THE CAT.")]
    assert apply(noise_of(lower_case=1.0), [pair])[0].source == "der hund, die katze."
    assert not NoiseConfig(typo_kinds=TypoConfig(char_swap=1.0)).active


ALL = dict.fromkeys(("upper_case", "title_case", "lower_case", "end_punctuation"), 0.5)
ALL |= dict.fromkeys(("punctuation", "whitespace", "typos"), 0.5)


def test_noise_of_a_line_depends_on_the_seed_and_its_number_alone():
    pairs = [Pair(f"der Hund sieht {n} Häuser .", f"the dog sees {n} houses .") for n in range(200)]
    noise = noise_of(**ALL)
    whole = apply(noise, pairs)
    assert apply(noise, pairs[:7]) == whole[:7]
    others = [Pair("a", "b")] * 100 + pairs[100:]
    assert apply(noise, others)[100:] == whole[100:]
    assert apply(noise, pairs, seed=2) != whole
    changed = sum(a != b for a, b in zip(apply(noise_of(title_case=0.3), pairs), pairs, strict=True))
    assert 35 <= changed <= 85
    assert apply(noise_of(), pairs) == pairs
    # If these differ, the noise needs another number of its format: token stores would be mixed up.
    assert noise.identity[0] == 2
    assert [pair.source for pair in whole[3:6]] == [
        "der Hund sieht3 Häuser",
        "Der Hund Sieht 4 Häuser",
        "DER HUND SIEHT 5 HÄUSER",
    ]


def test_alignments_follow_words_that_are_split_joined_and_dropped():
    words = "abc def , ghi jklm . nop: qrst ; uvw !".split()  # each character occurs once
    pair = Pair(" ".join(words), " ".join(words))
    straight = np.array([(number, number) for number in range(len(words))], np.int32)
    noises = [noise_of(whitespace=1.0), noise_of(punctuation=1.0)]
    for kind in SPACE_KINDS:
        typos = TypoConfig(**dict.fromkeys(TYPOS, 0.0) | {kind: 1.0})
        noises.append(noise_of(typos=1.0, typo_kinds=typos))
    counts = set()
    for seed in range(60):
        for noise in noises:
            (found,), (links,) = noise.apply([pair], [straight], seed=seed, languages=[LANGUAGES])
            now = found.source.split()
            counts.add(len(now) - len(words))
            if not Counter("".join(now)) - Counter("".join(words)):  # no mark doubled or in another style
                shared = [
                    (s, t) for t, old in enumerate(words) for s, new in enumerate(now) if {*new} & {*old}
                ]
                assert sorted(map(tuple, links.tolist())) == sorted(shared), found.source
    assert counts == {-1, 0, 1}


def test_no_side_becomes_empty_and_symbols_stay_whole():
    symbols = (">>fr<<", "<from:de>", "<BT>", "<b>")
    noise = noise_of(symbols, **dict.fromkeys(ALL, 1.0), typo_kinds=TypoConfig(*[1.0] * 9))
    for text in TEXTS:
        pair = Pair(f">>fr<< <from:de> <BT> {text}", text)
        for seed in range(20):
            (found,) = apply(noise, [pair], seed=seed)
            assert found.source.startswith(">>fr<< <from:de> <BT> ") or not text.strip()
            assert bool(found.target.strip()) is bool(text.strip())
            assert bool(found.source.removeprefix(">>fr<< <from:de> <BT>").strip()) is bool(text.strip())
    (found,) = apply(noise_of(symbols, upper_case=1.0), [Pair("ein <b> wort", "one <b> word")])
    assert found == Pair("EIN <b> WORT", "ONE <b> WORD")
    taken = "\U0010f000 <BT>"  # the character that would stand for a symbol occurs in the text
    held, symbol_of = hold(taken, symbols)
    assert held.translate(symbol_of) == taken and "<BT>" not in held


def test_each_part_has_its_languages():
    parts = [Part("a", 2, 1.0), Part("b", 1, 1.0)]
    spread = list(spread_languages(parts, [("tr", "en"), ("en", "tr")]))
    assert spread == [("tr", "en"), ("tr", "en"), ("en", "tr")]
    found, _ = noise_of(upper_case=1.0).apply([Pair("i", "i")] * 3, seed=0, languages=spread)
    assert found == [Pair("İ", "I"), Pair("İ", "I"), Pair("I", "İ")]
