"""Noise: each kind by hand, in many scripts, with alignments, as a function of seed and line alone."""

import random
import unicodedata

import numpy as np
import pytest

from flaxformer_mt.config import NoiseConfig
from flaxformer_mt.corpus.pairs import Pair
from flaxformer_mt.data import text_noise
from flaxformer_mt.data.text_noise import (
    TYPOS,
    TextNoise,
    add_words,
    change_case,
    drop_end_mark,
    edit,
    follow_words,
    hold,
    make_words,
    move_words,
)
from flaxformer_mt.unicode_text import split_words

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
    for kind in ALL:
        noise = noise_of(**{kind: 1.0})
        assert noise.rates.active and not noise.rates.moves
        found = apply(noise, [pair] * 20)
        assert any(source != pair.source for source, _ in found)
        assert all((target == pair.target) is (kind in ("lower_case", "typos")) for _, target in found), kind
    assert apply(noise_of(upper_case=1.0), [pair]) == [Pair("DER HUND, DIE KATZE.", "THE DOG, THE CAT.")]
    assert apply(noise_of(lower_case=1.0), [pair])[0].source == "der hund, die katze."
    assert not NoiseConfig().active


ALL = dict.fromkeys(("upper_case", "title_case", "lower_case", "end_punctuation", "typos"), 0.5)


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
    assert noise.identity[0] == 3
    assert [whole[index].source for index in (1, 2, 7)] == [
        "Der Hund Siebt 1 Häuser",
        "Dder Hund Sieht 2 Häuser .",
        "DER HUND SIEHT 7 HÄ USER .",
    ]


def test_alignments_follow_words_that_are_split_joined_and_dropped():
    words = "abc def , ghi jklm . nop: qrst ; uvw !".split()  # each character occurs once
    text = " ".join(words)
    straight = np.array([(number, number) for number in range(len(words))], np.int32)
    changes = [(edit(text, kind, random.Random(seed)), text) for kind in SPACE_KINDS for seed in range(60)]
    changes.append(drop_end_mark(text, text))
    counts = set()
    for found, _ in changes:
        now = found.split()
        counts.add(len(now) - len(words))
        links = follow_words(straight, text, found)
        shared = [(s, t) for t, old in enumerate(words) for s, new in enumerate(now) if {*new} & {*old}]
        assert sorted(map(tuple, links.tolist())) == sorted(shared), found
    assert counts == {-1, 1}


def test_no_side_becomes_empty_and_symbols_stay_whole(monkeypatch):
    monkeypatch.setattr(text_noise, "_TYPO_RATE", 1.0)
    symbols = (">>fr<<", "<from:de>", "<BT>", "<b>")
    noise = noise_of(symbols, **dict.fromkeys(ALL, 1.0))
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


def test_each_pair_has_its_languages():
    languages = [("tr", "en"), ("tr", "en"), ("en", "tr")]
    found, _ = noise_of(upper_case=1.0).apply([Pair("i", "i")] * 3, seed=0, languages=languages)
    assert found == [Pair("İ", "I"), Pair("İ", "I"), Pair("I", "İ")]


WORDS = Pair("ich mag 42 Kuchen", "42 I like cake")
PAIRS = [Pair(f"eins zwei {n}", f"one two {n} !") for n in range(40)]
LINKS = [np.array([(0, 0), (1, 1), (2, 2)], np.int32)] * 40


def move(pairs=PAIRS, links=LINKS, seed: int = 1, **rates: float):
    return move_words(pairs, links, NoiseConfig(**rates), seed=seed)


def test_random_words_follow_words_with_one_translation():
    links = np.array([(0, 1), (1, 2), (2, 0), (3, 3), (3, 1)])  # Kuchen has two words, and so has I
    for seed in range(8):
        pair, moved = add_words(WORDS, links, 1.0, random.Random(seed))
        source, target = map(split_words, pair)
        added = source[2:-2]
        assert added and source == ["ich", "mag", *added, "42", "Kuchen"]  # 42 is the same on both sides
        assert target == ["42", "I", "like", *added, "cake"]
        linked = [(source[s], target[t]) for s, t in moved]
        beside = [("ich", "I"), ("mag", "like"), *zip(added, added, strict=True)]
        assert linked == [*beside, ("42", "42"), ("Kuchen", "cake"), ("Kuchen", "I")]
    assert add_words(WORDS, links, 0.0, random.Random(1)) == (WORDS, links)
    outside = [np.array([(9, 1), (0, 9)])]  # other noise has dropped words
    assert move([Pair("ich  mag", "I like")], outside, inline=1.0)[0] == [("ich  mag", "I like")]


def test_random_text_is_the_same_on_both_sides():
    pairs, links = move(random_text=1.0)
    for (source, target), points in zip(pairs, links, strict=True):
        words = source.split()
        assert source == target and 1 <= len(words) <= 6 and {len(word) for word in words} <= {2, 3, 4, 5}
        assert points.tolist() == [[n, n] for n in range(len(words))]
    assert len(set(pairs)) == len(pairs)
    assert {len(make_words(random.Random(seed))) for seed in range(200)} == {1, 2, 3, 4, 5, 6}
    (alone,), _ = move([Pair("", "one two")], None, random_text=1.0)  # a language model
    assert not alone.source and alone.target


def test_words_move_by_the_seed_and_the_pair_alone():
    rates = {"random_text": 0.2, "inline": 0.3}
    pairs, links = move(**rates)
    again, same = move(**rates)
    assert pairs == again and all(map(np.array_equal, links, same))
    assert move(seed=2, **rates)[0] != pairs
    kept = [pair for pair, before in zip(pairs, PAIRS, strict=True) if pair == before]
    assert 3 < len(kept) < 30
    assert move(PAIRS[:10], LINKS[:10], **rates)[0] == pairs[:10]
    # As above: other words need another number of the format.
    assert pairs[3] == ("eins zwei uh[/N Yw`U+ j4Ai; 3", "one two uh[/N Yw`U+ j4Ai; 3 !")
    assert pairs[2] == ("Ã±", "Ã±")
    assert move(links=None, random_text=0.2)[1] is None and move()[0] == PAIRS
    for pair, points in zip(pairs, links, strict=True):
        source, target = map(split_words, pair)
        assert points[:, 0].max() < len(source) and points[:, 1].max() < len(target)
