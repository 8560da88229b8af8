"""Attention as pairs of pieces and of words."""

import dataclasses
import re

import numpy as np
import pytest

from flaxformer_mt.config import GuidedAlignmentConfig, ModelConfig, VocabConfig
from flaxformer_mt.decoding.forced_decoding import Watched
from flaxformer_mt.translation.alignment import align_pieces, align_words, choose_watched, weigh_down_marks
from flaxformer_mt.translation.result import Annotations
from flaxformer_mt.vocab import make_vocabs
from flaxformer_mt.vocab.words_of_pieces import find_words

WEIGHTS = np.array([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2], [0.4, 0.3, 0.3]])


def spelled(text):
    return text.replace("_", "\u2581").split()


def never(words):
    raise AssertionError("cut by itself without need")


def test_every_target_piece_is_aligned_with_what_it_looked_at_most():
    assert align_pieces(WEIGHTS) == ((2, 0), (0, 1), (0, 2))
    assert align_pieces(np.zeros((0, 3))) == () == align_pieces(np.zeros((3, 0)))


def test_words_gather_the_weights_of_their_pieces():
    # Source words: piece 0, and pieces 1 and 2 together, which then have 0.6 of the last row.
    assert align_words(WEIGHTS, [0, 1, 1], [0, 1, 2]) == ((1, 0), (0, 1), (1, 2))
    assert align_words(WEIGHTS, [0, 1, 2], [0, 1, 1]) == ((2, 0), (0, 1))
    # Target word 0 has no piece: it is aligned with nothing.
    assert align_words(WEIGHTS[:1], [0, 1, 2], [1]) == ((2, 1),)
    assert align_words(np.zeros((0, 3)), [0, 1, 2], []) == ()


def test_every_source_word_is_aligned_and_marks_count_little_where_markup_is_placed():
    # Source word 1 has its largest weight, as a word that no target word is aligned with, at target word 0.
    assert align_words(WEIGHTS, [0, 1, 2], [0, 1, 2], cover=True) == ((2, 0), (0, 1), (1, 1), (0, 2))
    pieces, words = ["\u2581who", "\u2581sleeps", "?"], [0, 1, 1]
    weights = np.array([[0.8, 0.1, 0.1], [0.5, 0.4, 0.1], [0.0, 0.1, 0.9]])
    assert align_words(weights, words, words) == ((0, 0), (1, 1))
    softened = weigh_down_marks(weights, (pieces, words), (pieces, words))
    assert align_words(softened, words, words) == ((0, 0), (0, 1))
    # A mark that stands alone is a word like others.
    alone = weigh_down_marks(weights, (pieces, [0, 1, 2]), (pieces, [0, 1, 2]))
    np.testing.assert_array_equal(alone, weights)


def test_alignments_come_from_the_head_that_has_learned_them():
    guided = ModelConfig(num_decoder_layers=3, alignment=GuidedAlignmentConfig(weight=0.1, layer=-3))
    other = dataclasses.replace(guided, alignment=GuidedAlignmentConfig(weight=0.1, layer=-2))
    words = Annotations(alignments="words")
    assert choose_watched(words, [guided]) == choose_watched(words, [guided, guided]) == (Watched(-3, 0),)
    # Not without training, nor of models that differ, nor against what is asked for.
    assert (
        choose_watched(words, [ModelConfig()])
        == choose_watched(words, [guided, other])
        == (Watched(-2, None),)
    )
    assert choose_watched(words._replace(layer=1), [guided]) == (Watched(1, None),)
    assert choose_watched(words._replace(head=0), [guided]) == (Watched(-2, 0),)
    assert choose_watched(Annotations(), [guided]) == ()
    # The head that is asked for by its numbers is the one that has learned.
    reading = dataclasses.replace(guided, alignment=dataclasses.replace(guided.alignment, step="read"))
    learned = (Watched(-3, 0, reading=True),)
    assert (
        choose_watched(words, [reading])
        == choose_watched(words._replace(layer=0, head=0), [reading])
        == learned
    )
    assert choose_watched(words._replace(layer=0, head=1), [reading]) == (Watched(0, 1),)


@pytest.mark.parametrize(
    ("pieces", "text", "words"),
    [
        ("_the _dog s _bark", "the dogs bark", [0, 1, 1, 2]),
        ("the _dog", "the dog", [0, 1]),  # a vocabulary without a space at the start
        ("_ the _ d og", "the dog", [0, 0, 1, 1, 1]),
        ("the_ dog_ s", "the dog s", [0, 1, 2]),  # spaces at the ends of pieces
        ("_a_b _c", "a b c", [0, 2]),  # a piece of two words is of the first
        ("_ <0xE4> <0xBD> x", "你x", [0, 0, 0, 0]),
        ("_a <0xE2> <0x96> <0x81> x _b", "a x b", [0, 1, 1, 1, 1, 2]),  # the space in bytes
        ("_a _", "a", [0, 0]),
        ("", "", []),
    ],
)
def test_pieces_belong_to_words(pieces, text, words):
    assert find_words(spelled(pieces), text, never) == words


def test_words_that_normalisation_splits_or_drops_are_counted_as_in_the_text():
    def cut(words):
        becoming = {"½": "_1 _2", "\u200b": "", "a\u00a0b": "_a _b"}
        return [spelled(becoming[word]) if word in becoming else ["\u2581" + word] for word in words]

    assert find_words(spelled("_x _1 _2 _y"), "x ½ y", cut) == [0, 1, 1, 2]
    assert find_words(spelled("_x _y"), "x \u200b y", cut) == [0, 2]
    # This vocabulary takes U+00A0 for a letter: only U+0020 separates.
    assert find_words(["\u2581x\u00a0y", "\u2581z"], "x\u00a0y z", cut) == [0, 1]
    # U+00A0 is part of a word, whatever the vocabulary makes of it, and although another word is dropped.
    assert find_words(spelled("_a _b _c"), "a\u00a0b c", cut) == [0, 0, 1]
    assert find_words(spelled("_a _b _c"), "a\u00a0b \u200b c", cut) == [0, 0, 2]

    def cut_to_nothing(words):
        return [[] for _ in words]

    assert find_words(spelled("_a _b _c _d"), "a b", cut_to_nothing) == [0, 1, 1, 1]


def test_a_real_vocabulary_agrees_with_the_text(tmp_path):
    class Text:
        source = target = "der kleine Hund schläft im Garten ."

    vocab = make_vocabs(VocabConfig(size=300), [Text()] * 9, tmp_path).source

    def cut(words):
        return [vocab.pieces(ids[:-1]) for ids in vocab.tokenize_all(words)]

    for text in ("der  Hund \t schläft", " \u200b Hund ½ 犬 🐕 x", "Hund\u3000schläft\u00a0im", "´ Hund"):
        pieces = vocab.pieces(vocab.tokenize(text)[:-1])
        numbers = find_words(pieces, text, cut)
        assert len(numbers) == len(pieces) and numbers == sorted(numbers)
        for number, word in enumerate(re.split("[ \t]+", text.strip())):
            own = "".join(p for p, n in zip(pieces, numbers, strict=True) if n == number)
            assert own == "".join(cut([word])[0]).replace("\u2581\u2581", "\u2581"), (text, word)
