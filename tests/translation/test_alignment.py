"""Attention as pairs of pieces and of words; and the translations of a line's parts as those of the line."""

import dataclasses
import re
import time

import numpy as np
import pytest

from flaxformer_mt.config import GuidedAlignmentConfig, ModelConfig, VocabConfig
from flaxformer_mt.decoding.forced_decoding import Watched
from flaxformer_mt.translation.annotation import choose_watched
from flaxformer_mt.translation.result import (
    Annotations,
    Translation,
    align_pieces,
    align_words,
    check_phrases,
    format_pharaoh,
    join_parts,
    rank,
    weigh_down_marks,
)
from flaxformer_mt.translation.segmentation import SourcePart
from flaxformer_mt.vocab import make_vocabs
from flaxformer_mt.vocab.words import find_words

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


def test_pairs_are_written_source_first_in_the_order_of_the_target():
    assert format_pharaoh(((2, 0), (0, 1), (0, 2))) == "2-0 0-1 0-2"
    assert format_pharaoh([(3, 1), (0, 1), (5, 0)]) == "5-0 0-1 3-1"
    assert format_pharaoh(()) == ""


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


# ---- the parts of a line ----

EOS = 2


def hypothesis(text, score, alignment=None):
    tokens = (*range(10, 10 + len(text.split())), EOS)
    return Translation(
        text,
        score,
        2 * score,
        tokens,
        token_log_probs=(2 * score,) + (0.0,) * (len(tokens) - 1),
        alignment=alignment,
    )


def translated(start, text, *hypotheses):
    return SourcePart(0, start, text, ids=np.arange(len(text.split()) + 1)), rank(hypotheses)


def combine(line, translated, *, words=True, **options):
    options["annotations"] = Annotations(alignments="words" if words else "pieces")
    return join_parts(line, *zip(*translated, strict=True), **options, eos_id=EOS)


def test_parts_are_added_up():
    line = "Ein Hund. Eine Katze."
    parts = [
        translated(0, "Ein Hund. ", hypothesis("A dog.", -1.0, ((0, 0), (1, 1)))),
        translated(10, "Eine Katze.", hypothesis("Cats.", -2.0, ((1, 0),))),
    ]
    for words in (True, False):
        found = combine(line, parts, n_best=1, words=words)
        assert (found.text, found.score, found.log_prob, found.parts) == ("A dog. Cats.", -3.0, -6.0, 2)
        assert found.tokens == (10, 11, EOS, 10, EOS) and sum(found.token_log_probs) == found.log_prob
        assert len(found.token_log_probs) == 5 and found.alternatives == () and not found.truncated
        assert found.alignment == ((0, 0), (1, 1), (3, 2))


def test_words_cut_in_two_and_texts_without_spaces_keep_their_numbers():
    # "abcdef" was cut within: the second part is of the same word, and Chinese is joined to one "word".
    parts = [
        translated(0, "x abc", hypothesis("你 好", -1.0, ((0, 0), (1, 1)))),
        translated(5, "def y", hypothesis("吗 啊", -1.0, ((0, 0), (1, 1)))),
    ]
    found = combine("x abcdef y", parts, n_best=1, words=True)
    assert found.text == "你 好吗 啊" and found.alignment == ((0, 0), (1, 1), (1, 1), (2, 2))


def test_a_repeated_language_tag_is_the_one_of_the_line():
    parts = [
        translated(0, ">>fr<< a b. ", hypothesis("A B.", -1.0, ((0, 0), (2, 1)))),
        translated(12, "c d.", hypothesis("C D.", -1.0, ((0, 0), (2, 1)))),
    ]
    # The second part was read as ">>fr<< c d.", of three words and three pieces.
    second = parts[1][0]._replace(ids=np.arange(4), tag=">>fr<< ", tag_pieces=1)
    parts[1] = (second, parts[1][1])
    for words in (True, False):
        found = combine(">>fr<< a b. c d.", parts, n_best=1, words=words)
        assert found.alignment == ((0, 0), (2, 1), (0, 2), (4, 3))


def test_thousands_of_parts_take_linear_time():
    parts = [
        translated(2 * n, "a ", *[hypothesis("A", -rank, ((0, 0),)) for rank in range(1, 4)])
        for n in range(5000)
    ]
    start = time.process_time()
    found = combine("a " * 5000, parts, n_best=3, words=True)
    assert time.process_time() - start < 2
    assert [one.score for one in found.n_best] == [-5000, -5001, -5001]
    assert found.alignment == tuple((n, n) for n in range(5000))


def test_every_hypothesis_says_whether_it_has_the_phrases():
    line = hypothesis("a dog", -1.0)
    both = dataclasses.replace(line, alternatives=(hypothesis("a cat", -2.0), hypothesis("the dog", -3.0)))
    for phrase, expected in (("dog", [True, False, True]), ("cat ", [False, True, False])):
        assert [one.satisfied for one in check_phrases(both, [phrase]).n_best] == expected


def test_the_n_best_are_the_best_sums():
    first = translated(0, "a ", hypothesis("A", -1.0), hypothesis("AA", -3.0))
    second = translated(2, "b", hypothesis("B", -2.0), hypothesis("BB", -2.5))
    found = combine("a b", [first, second], n_best=3, words=True)
    assert [(one.text, one.score) for one in found.n_best] == [("A B", -3.0), ("A BB", -3.5), ("AA B", -5.0)]
    assert found.alignment is None


def test_what_was_not_asked_for_is_absent():
    parts = [translated(0, "a", Translation("A", -1.0, -1.0, (5,), truncated=True, satisfied=False))]
    found = combine("a", parts, n_best=1, words=True)
    assert found.token_log_probs is None and found.truncated and not found.satisfied
