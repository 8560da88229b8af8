"""Terms in sources: what is written beside them, which words they are, and what training draws."""

import random
import sys
import types

import numpy as np
import pytest

from flaxformer_mt.config import NoiseConfig, VocabConfig
from flaxformer_mt.corpus import terms
from flaxformer_mt.corpus.columns import PieceLinker
from flaxformer_mt.corpus.pairs import Pair
from flaxformer_mt.corpus.terms import Term, annotate_pair, find_cores, find_lemmatizer, write_terms
from flaxformer_mt.data.text_noise import TextNoise
from flaxformer_mt.vocab import Vocabs, make_vocabs
from flaxformer_mt.vocab.symbols import TERM_MARKS
from flaxformer_mt.vocab.words import number_pieces

SOURCE, TARGET = "Der alte Hund (in New York) bellt, „heute“.", "The old dog (in NYC) barks today."
LINKS = [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 4), (6, 5), (7, 6)]


@pytest.fixture(autouse=True)
def no_lemmas(monkeypatch):
    """As where simplemma is not installed."""
    monkeypatch.setitem(sys.modules, "simplemma", None)
    find_lemmatizer.cache_clear()
    yield
    find_lemmatizer.cache_clear()


@pytest.fixture
def lemmas(monkeypatch):
    """A package that knows the lemmas of some forms."""
    forms = {"en": {"barks": "bark", "The": "the"}, "de": {"Hunden": "Hund"}}

    def lemmatize(word, lang):
        if lang not in forms:
            raise ValueError(f"Unsupported language: {lang}")
        return forms[lang].get(word, word)

    monkeypatch.setitem(sys.modules, "simplemma", types.SimpleNamespace(lemmatize=lemmatize))
    find_lemmatizer.cache_clear()


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    config = VocabConfig(size=320, symbols=(TERM_MARKS[0], *(f"\u2581{mark}" for mark in TERM_MARKS[1:])))
    return make_vocabs(config, [Pair(SOURCE, TARGET)] * 20, tmp_path_factory.mktemp("vocab")).source


def test_translations_are_written_beside_terms_and_inside_of_marks():
    assert [SOURCE[slice(*core)] for core in find_cores(SOURCE)] == [
        *("Der", "alte", "Hund", "in", "New", "York", "bellt", "heute")
    ]
    assert find_cores(" — C++ ") == [(1, 2), (3, 4)]
    start = SOURCE.index("New")
    written = write_terms(SOURCE, [Term(start, start + 8, "NYC"), Term(9, 13, "dog")])
    assert written == SOURCE.replace("Hund", "<term> Hund <means> dog </term>").replace(
        "New York", "<term> New York <means> NYC </term>"
    )
    assert write_terms(SOURCE, []) == SOURCE


def test_a_term_counts_as_its_words_whatever_is_beside_it(vocab):
    """The words of the pieces are those of the text without marks and translations."""
    for text, found, words in [
        (SOURCE, [(9, 13, "my own dog"), (18, 26, "NYC")], None),
        ("(Hund).", [(1, 5, "dog")], None),
        ("Hund York", [(0, 4, "dog"), (5, 9, "Y")], None),
        ("我猫和狗。", [(1, 2, "a cat"), (3, 4, "dog")], {0}),  # one word, with two terms in it
    ]:
        written = write_terms(text, [Term(*term) for term in found])
        ids = vocab.tokenize(written)[:-1]
        numbers = number_pieces(vocab, ids, written)
        assert {*numbers} == (words or {*range(len(text.split()))}) and numbers == sorted(numbers)
        by_word = {}
        for number, piece in zip(numbers, vocab.pieces(ids), strict=True):
            by_word[number] = by_word.get(number, "") + piece
        for word, pieces in zip(text.split(), by_word.values(), strict=True):
            assert all(letter in pieces for letter in word if letter.isascii())


def test_links_of_an_annotated_source_reach_all_pieces_of_its_terms(vocab):
    written = write_terms(SOURCE, [Term(9, 13, "dog")])
    ids = [[np.array(vocab.tokenize(text))] for text in (written, TARGET)]
    points, counts = PieceLinker(Vocabs(vocab, vocab, joint=True))(
        ([written], [TARGET]), ids, [np.array([(2, 2)])], np.zeros((1, 2), np.int64)
    )
    linked = sorted({int(point) >> 16 for point in points})
    pieces = vocab.pieces(ids[0][0][linked])
    assert "".join(pieces).replace("\u2581", " ").split() == "<term> Hund <means> dog </term>".split()
    assert counts.tolist() == [len(points)]


def draw(seed, **changes):
    given = {"source": SOURCE, "target": TARGET, "links": LINKS, "language": "en"} | changes
    return annotate_pair(chance=random.Random(seed), **given)


def read_terms(text):
    parts = [part.split(" </term>")[0].split(" <means> ") for part in text.split("<term> ")[1:]]
    return [(source, target) for source, target in parts]


def test_training_draws_aligned_phrases_and_nothing_else():
    right = {"Der": "The", "alte": "old", "Hund": "dog", "in": "in", "New York": "NYC", "bellt": "barks"}
    right |= {"heute": "today", "Der alte": "The old", "alte Hund": "old dog", "Der alte Hund": "The old dog"}
    drawn = [found for seed in range(300) for found in read_terms(draw(seed))]
    assert right.items() <= {*drawn} and {source for source, _ in drawn}.isdisjoint({"New", "York", "in New"})
    assert len(dict(drawn)) == len({*drawn}), "a phrase has one translation"
    counts = [len(read_terms(draw(seed))) for seed in range(100)]
    assert {*counts} <= {0, 1, 2, 3} and {1, 2, 3} <= {*counts}
    assert draw(5) == draw(5) and len({draw(seed) for seed in range(20)}) > 10
    assert draw(1, links=[]) == SOURCE
    assert draw(1, source=f"{SOURCE} <term>") == f"{SOURCE} <term>"  # text that has marks of its own
    # Noise has dropped the last words: links to them are left out.
    assert "<term>" in draw(1, links=[*LINKS, (8, 7), (40, 40)])
    assert draw(1, source="— .", target="— .", links=[(0, 0), (1, 1)]) == "— ."


def test_lemmas_are_written_where_there_are_any(lemmas):
    seen = dict(found for seed in range(200) for found in read_terms(draw(seed)))
    assert seen["bellt"] == "bark" and seen["Der alte"] == "the old"
    assert find_lemmatizer("de-AT")("Hunden") == "Hund" and find_lemmatizer("xx") is None


def test_a_share_of_pairs_is_annotated_by_seed_and_index_alone():
    noise = TextNoise(NoiseConfig(), terms=0.3, target_languages=("en",))
    pairs, links = [Pair(SOURCE, TARGET)] * 400, [np.array(LINKS)] * 400
    found = noise.annotate(pairs, links, seed=7, languages=["en"] * 400)
    share = sum("<term>" in text for text in found) / 400
    assert 0.2 < share < 0.4 and len({*found}) > 30
    assert found == noise.annotate(pairs, links, seed=7, languages=["en"] * 400)
    assert found[:9] == noise.annotate(pairs[:9], links[:9], seed=7, languages=["en"] * 9)
    assert found != noise.annotate(pairs, links, seed=8, languages=["en"] * 400)


def test_the_identity_of_noise_without_terms_is_that_of_earlier_versions(lemmas):
    plain, some = TextNoise(NoiseConfig()), TextNoise(NoiseConfig(), terms=0.1, target_languages=("en", "xx"))
    assert len(plain.identity) == 3 and not plain.active and some.active
    assert some.identity[3:] == [1, 0.1, ["en"]] and terms.find_lemmatizer("en") is not None
