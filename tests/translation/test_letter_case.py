"""Text in capitals and other letter cases, which is changed only where a model does not know it."""

import dataclasses

import pytest
from fake_engine import read_lines
from make_translator import make_translator

from flaxformer_mt.translation.glossary import Glossary
from flaxformer_mt.translation.letter_case import LetterCase, _spell, choose_cases, put_back
from flaxformer_mt.translation.result import Annotations, Translation
from flaxformer_mt.translation.sentences import Sentences
from flaxformer_mt.unicode_text import CASES, find_case

ALL = frozenset(CASES)


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
def test_which_cases_are_changed(option, shares, expected):
    assert choose_cases(option, shares) == expected


@pytest.fixture(scope="module")
def letter_case(make_vocabularies):
    text = (
        "Der Mann geht auf die Straße. Ein Mann mit einem T-Shirt isst. Das ist die NATO. Der Fuß ist groß."
    )
    vocabs = make_vocabularies(390, [(part, "a") for part in text.split(". ")])
    return LetterCase(ALL, vocabs.source)


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
    assert letter_case.lower(text, "de") == expected
    assert find_case(text) and not find_case(expected)


def test_letters_of_some_languages(letter_case):
    for language, word, usual in (("en", "I'M", "I'm"), ("tr", "ILIK", "ılık"), ("de", "ICH", "ich")):
        assert _spell(word, language, first=False)[0] == usual
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


def test_sentences_of_some_cases_are_read_in_sentence_case_and_translations_put_back(letter_case):
    lines = ["DER MANN. Der Fuß.", "ISST!", "Der Fuß.", "12"]
    steps = Sentences(apart=True), LetterCase(frozenset({"capitals"}), letter_case._vocab)
    found = read_lines(lines, *steps)
    read = [[part.read(part.text) for part in line.parts] for line in found]
    assert read == [["Der Mann. ", "Der Fuß."], ["isst!"], ["Der Fuß."], ["12"]]
    first, second = found[0].parts
    other = Translation("a man.", -2.0, -2.0, ())
    best = dataclasses.replace(other, text="the man.", alternatives=(other,))
    assert [one.text for one in first.undo(best).n_best] == ["THE MAN.", "A MAN."]
    assert second.undo(best) == best
    # Their translations have text as it is given.
    glossary = Glossary.make({"MANN": "man"})
    for fields in ({"prefix": "the"}, {"required": ("man",)}, {"glossary": glossary}):
        (line,) = read_lines(lines[:1], *steps, **fields)
        assert not any(part.memory for part in line.parts)
    (line,) = read_lines(lines[:1], *steps, prefix=" ", required=(" ",), glossary=Glossary.make({"a": "b"}))
    assert line.parts[0].memory


def test_capitals_are_translated_in_sentence_case_and_put_back(config, params, vocabs, shared_translator):
    guarded = make_translator(config, params, vocabs, changed_cases=ALL, warn=lambda message: None)
    long = "Die Katze trinkt heute Milch, wir lesen ein gutes Buch, Anna kauft zwei rote Äpfel"
    asked = {"n_best": 3, "annotations": Annotations(alignments="words", token_log_probs=True)}
    for text in ("Anna!", "Milch! Katze!"):
        (found,), (expected,) = (
            translator.translate([line], **asked)
            for translator, line in ((guarded, text.upper()), (shared_translator, text))
        )
        for one, other in zip(found.n_best, expected.n_best, strict=True):
            assert dataclasses.replace(one, alternatives=()) == dataclasses.replace(
                other, text=other.text.upper(), alternatives=()
            )
        assert guarded.translate([text]) == shared_translator.translate([text])
    (expected,), (found,) = (guarded.translate([text]) for text in (long, long.upper()))
    assert found.parts == expected.parts > 1 and found.text.isupper()
    assert guarded.describe()["capitals"] == sorted(ALL) and "capitals" not in shared_translator.describe()
