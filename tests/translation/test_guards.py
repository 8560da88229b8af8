"""Guards: text in capitals and repetitions, which change nothing where they are not needed."""

import dataclasses
import itertools
import random

import pytest

from flaxformer_mt.translation import engine as engine_module
from flaxformer_mt.translation.guards import (
    Guards,
    LetterCase,
    choose_guards,
    count_repeated,
    put_back,
    repeats_itself,
)
from flaxformer_mt.translation.requests import Request
from flaxformer_mt.translation.result import FAILED, Annotations, Translation
from flaxformer_mt.translation.translator import Translator
from flaxformer_mt.unicode_text import CASES, find_case

ALL = Guards(frozenset(CASES), repetitions=True)


@pytest.mark.parametrize(
    ("text", "case"),
    [
        ("DER HUND SCHLÄFT.", "capitals"),
        ("NATO!", "capitals"),
        ("ПРИВЕТ, МИР", "capitals"),
        ("Der Herr der Neun Ringe", "title_case"),
        ("«Drei Haselnüsse» für Aschenbrödel", "title_case"),
        ("der Herr der Neun Ringe", ""),
        ("Hund", "single_words"),
        ("schläft?", "single_words"),
        ("Der Hund schläft.", ""),
        ("Anna und Peter", ""),
        ("Das ist gut", ""),
        ("A. 12", "single_words"),
        ("12 %", ""),
        ("你好", "single_words"),
        ("你好 世界 再见", ""),
        ("", ""),
    ],
)
def test_the_case_of_a_text(text, case):
    assert find_case(text) == case


@pytest.mark.parametrize(
    ("option", "shares", "expected"),
    [
        ("auto", None, set()),
        ("auto", {"capitals": 0.004, "title_case": 0.07, "single_words": 0.0}, {"capitals", "single_words"}),
        ("always", {"capitals": 0.5}, set(CASES)),
        ("always", None, set(CASES)),
        ("never", {"capitals": 0.0}, set()),
    ],
)
def test_which_cases_are_guarded(option, shares, expected):
    assert choose_guards(option, "keep", shares) == Guards(frozenset(expected), repetitions=False)
    assert choose_guards(option, "search_again", shares).repetitions


@pytest.fixture(scope="module")
def letter_case(make_vocabularies):
    text = (
        "Der Mann geht auf die Straße. Ein Mann mit einem T-Shirt isst. Das ist die NATO. Der Fuß ist groß."
    )
    vocabs = make_vocabularies(390, [(part, "a") for part in text.split(". ")])
    return LetterCase(frozenset(CASES), vocabs.source, "de")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("DER MANN GEHT AUF DIE STRASSE.", "Der Mann geht auf die Straße."),
        ("EIN  MANN\tMIT EINEM T-SHIRT", "Ein  Mann\tmit einem T-Shirt"),
        ("DAS IST DIE NATO.", "Das ist die NATO."),
        ("Der Mann Geht Auf", "Der Mann geht auf"),
    ],
)
def test_words_get_the_case_that_they_have_in_the_vocabulary(letter_case, text, expected):
    case = letter_case.find(text)
    assert case and letter_case.lower(text, case) == expected
    assert letter_case.find(expected) == ""


def test_letters_of_some_languages(letter_case):
    for language, word, usual in (("en", "I'M", "I'm"), ("tr", "ILIK", "ılık"), ("de", "ICH", "ich")):
        assert letter_case._replace(language=language)._spell(word, first=False)[0] == usual
    text = "the little dog's house of a man"
    for text, case, language, source, expected in (
        ("iyi ılık", "capitals", "tr", "A", "İYİ ILIK"),
        ("iyi", "capitals", "en", "A", "IYI"),
        ("straße", "capitals", "de", "A", "STRASSE"),
        (
            "the little dog's house of a man",
            "title_case",
            "en",
            "Das Haus des Hundes",
            "The Little dog's House of a man",
        ),
        (
            "the little dog's house of a man",
            "title_case",
            "en",
            "Das «Haus» Des",
            "The Little Dog's House Of A Man",
        ),
        ("a B", "single_words", "de", "A", "a B"),
        ("a B", "", "de", "A", "a B"),
    ):
        assert put_back(text, case, language, source) == expected
    assert LetterCase().find("DER MANN") == "" and LetterCase().lower("DER", "") == "DER"


def count_slowly(tokens):
    """The longest run that repeats what is right before it, by comparing all pairs of places."""
    best = 0
    for start, end in itertools.combinations(range(len(tokens) + 1), 2):
        for distance in range(1, min(start, end - start) + 1):
            if all(tokens[n] == tokens[n - distance] for n in range(start, end)):
                best = max(best, end - start)
    return best


def test_repeated_tokens_are_counted():
    dice = random.Random(1)
    assert count_repeated([7, 5, 6, 5, 6, 5, 6, 5, 8]) == 5 and count_repeated([]) == count_repeated([3]) == 0
    assert count_repeated([1, 2, 3, 4, 1, 2, 3, 4]) == 4
    seen = set()
    for _ in range(500):
        tokens = dice.choices(range(dice.randint(1, 4)), k=dice.randint(0, 14))
        found, expected = count_repeated(tokens), count_slowly(tokens)
        assert found == expected or (found, expected < 4) == (0, True), tokens
        seen.add(found)
    assert len(seen) > 6
    assert not repeats_itself([4, 4, 4, 4], [1]) and repeats_itself([4, 4, 4, 4, 4], [1])
    assert not repeats_itself([4, 4, 4, 4, 4], [1, 2, 1, 2, 1, 2, 1, 2])


@pytest.fixture
def guarded(config, params, vocabs, shared_translator):
    def make(guards=ALL, **options):
        made = Translator(config, params, vocabs, guards=guards, warn=warnings.append, **options)
        made.search.programs = shared_translator.search.programs
        return made, warnings

    warnings = []
    return make


def test_capitals_are_translated_in_sentence_case_and_put_back(guarded, shared_translator):
    translator, warnings = guarded(Guards(ALL.cases))
    plain = ["Anna!", "Milch! Katze!", "<b>Milch!</b>"]
    lines = ["ANNA!", "Milch! KATZE!", "<b>MILCH!</b>"]
    aligned, marked = Annotations(alignments="words", token_log_probs=True), Annotations(markup=True)
    for line, usual, asked in zip(lines, plain, (aligned, aligned, marked), strict=True):
        (found,) = translator.translate([line], n_best=3, annotations=asked)
        (expected,) = shared_translator.translate([usual], n_best=3, annotations=asked)
        assert [one.tokens for one in found.n_best] == [one.tokens for one in expected.n_best]
        assert found.alignment == expected.alignment and found.score == pytest.approx(expected.score)
        texts = [one.text.replace("b>", "B>") for one in found.n_best]
        if line is not lines[1]:
            assert texts == [one.text.upper() for one in expected.n_best]
        else:  # one sentence of two
            first = shared_translator.translate(["Milch!"])[0].text
            assert found.text == first + expected.text.removeprefix(first).upper() != expected.text
    assert translator.translate(plain[:2]) == shared_translator.translate(plain[:2])
    assert not warnings
    # Prefixes and phrases are asked for as they are written.
    for constraint in ({"prefixes": ["the "]}, {"required": [["cat"]]}):
        expected = shared_translator.translate([lines[0]], **constraint)
        assert translator.translate([lines[0]], **constraint) == expected
    unguarded, _ = guarded(Guards(frozenset({"title_case"})))
    assert unguarded.translate(lines[:1]) == shared_translator.translate(lines[:1])
    assert (
        unguarded.describe()["guards"] == [["title_case"], False]
        and "guards" not in shared_translator.describe()
    )


def test_a_long_sentence_in_capitals_is_divided_as_in_sentence_case(guarded):
    line = "Die Katze trinkt heute Milch, wir lesen ein gutes Buch, Anna kauft zwei rote Äpfel"
    (expected,), (found,) = (guarded()[0].translate([text]) for text in (line, line.upper()))
    assert found.parts == expected.parts > 1 and found.text.isupper()


@pytest.fixture
def looping(monkeypatch):
    """The translations of some sources are taken for repetitions, unless they have been searched again."""
    sources = set()

    def repeats(tokens, source):
        return tuple(source) in sources

    monkeypatch.setattr(engine_module, "repeats_itself", repeats)
    monkeypatch.setattr(engine_module, "count_repeated", lambda tokens: len(tokens) - len(set(tokens)))
    return sources


@pytest.mark.parametrize("arriving", [False, True])
def test_repetitions_are_searched_again_and_the_better_is_kept(guarded, translator_with, looping, arriving):
    translator, _ = guarded()
    lines = ["der Hund", "Milch! Katze!", "ein Buch", "", "im Garten"]
    looping.update(tuple(translator.vocabs.source.tokenize(text)) for text in ("ein Buch", "Katze!"))
    usual, strict = (
        translator_with("beam", **options).translate(
            ["der Hund", "Milch!", "Katze!", "ein Buch", "im Garten"]
        )
        for options in ({}, {"no_repeat_ngram": 3})
    )
    engine = translator.engine(arriving=arriving)
    for number, line in enumerate(lines):
        engine.submit(Request(line, id=number, seed=number + 1))
    answers = {}
    while len(engine):
        answers |= dict(engine.step())
    assert +engine.guarded == {"repetitions": 2}
    kept = [
        min(pair, key=lambda one: (len(one.tokens) - len(set(one.tokens)), -one.score))
        for pair in zip(usual, strict, strict=True)
    ]
    assert answers[0].tokens == usual[0].tokens and answers[4].tokens == usual[4].tokens
    assert answers[2].tokens == kept[3].tokens and answers[3].text == ""
    assert answers[1].tokens == usual[1].tokens + kept[2].tokens


def test_the_better_of_two_translations():
    first, second = Translation("a", -1.0, -1.0, (5,) * 8), Translation("b", -9.0, -9.0, (5, 6, 7))
    better = engine_module._choose_better
    assert better(first, second) is second and better(second, first) is second
    assert (
        better(first, FAILED) is first and better(second, dataclasses.replace(second, score=-2.0)).score == -2
    )
