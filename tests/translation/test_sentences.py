"""Lines of several sentences: each sentence is translated as if it were alone, and all belong to one line."""

import itertools

import numpy as np
import pytest
from fake_engine import read_lines
from growth import growth
from make_translator import make_translator

from flaxformer_mt.translation.glossary import Glossary
from flaxformer_mt.translation.join_sentences import is_unspaced, join_parts, join_translations
from flaxformer_mt.translation.requests import Request
from flaxformer_mt.translation.result import Annotations, Translation, rank
from flaxformer_mt.translation.segments import Segment
from flaxformer_mt.translation.sentences import Sentences, splits_sentences

EOS = 2


def test_sentences_are_apart_unless_a_tenth_of_the_training_lines_had_several():
    decided = [splits_sentences("auto", several=share) for share in (None, 0.0, 0.0999, 0.1, 1.0)]
    assert decided == [True, True, True, False, False]
    assert splits_sentences("always", several=1.0) and not splits_sentences("never", several=0.0)


def test_sentences_are_parts_and_terms_stay_whole():
    lines = ["Ab cd.  Ef gh!\nIj", "  Ab cd. ", "", "Ab.\u00a0 ... "]
    texts = [["Ab cd.  ", "Ef gh!\n", "Ij"], ["  Ab cd. "], [""], ["Ab.\u00a0 ... "]]
    for apart, expected in ((True, texts), (False, [["".join(parts)] for parts in texts])):
        found = read_lines(lines, Sentences(apart=apart))
        assert [[part.text for part in line.parts] for line in found] == expected
        for line in found:
            for part in line.parts:
                assert part.whole is line and line.text[part.start :].startswith(part.text)
                assert not part.continues
    glossary = Glossary.make({"cd. Ef": "x", "gh": "y"})
    for fields, expected in (
        ({"required": ("x",)}, lines[:1]),
        ({"glossary": glossary}, ["Ab cd.  Ef gh!\n", "Ij"]),
        ({"sentence_starts": (0, 3, 8)}, ["Ab ", "cd.  ", "Ef gh!\nIj"]),
        ({"sentence_starts": (0, 3, 8), "glossary": glossary}, ["Ab ", "cd.  Ef gh!\nIj"]),
    ):
        (line,) = read_lines(lines[:1], Sentences(apart=True), **fields)
        assert [part.text for part in line.parts] == expected


# ---- the translations of a line's parts as those of the line ----


def test_translations_are_joined_as_their_script_is_written():
    def join(*texts):
        return join_translations(texts, ["", *[" "] * (len(texts) - 1)])[0]

    assert join("A b.", "", "  C d. ") == "A b. C d."
    assert join("你好。", "再见。") == "你好。再见。"
    assert join("はい。", "OK. So", "안녕.", "네.") == "はい。OK. So 안녕. 네."
    assert join_translations([], []) == ("", []) and join("", " ") == ""
    assert all(map(is_unspaced, "你々はカ。、Ａ𠀀")) and not any(map(is_unspaced, "aéЖ한ก।؟. "))


def test_white_space_between_parts_is_that_of_the_line():
    spaces = ["  ", "\n", "\t\u00a0", " ", "", "  "]
    joined, starts = join_translations(["a.", "b.", "", "cd.", "e.", "。f"], spaces)
    assert joined == "a.\nb. cd. e.  。f"
    assert [joined[start] for start in starts] == ["a", "b", " ", "c", "e", "。"]


def hypothesis(text, score, alignment=None):
    tokens = (*range(10, 10 + len(text.split())), EOS)
    log_probs = (2 * score,) + (0.0,) * (len(tokens) - 1)
    return Translation(text, score, 2 * score, tokens, token_log_probs=log_probs, alignment=alignment)


def combine(text, parts, *, n_best=1, alignments="words", **fields):
    """Joins parts: the text of each, with its hypotheses."""
    annotations = Annotations(alignments=alignments)
    line = Segment(Request(text, n_best=n_best), text, text, annotations=annotations)
    line.parts = line.divide([part for part, *_ in parts])
    for part, (own, *hypotheses) in zip(line.parts, parts, strict=True):
        part.ids, part.translation = np.arange(len(own.split()) + 1), rank(hypotheses)
    return join_parts(line, eos_id=EOS)


@pytest.mark.parametrize("alignments", ["words", "pieces"])
def test_parts_are_added_up(alignments):
    parts = [
        ("Ein Hund. ", hypothesis("A dog.", -1.0, ((0, 0), (1, 1)))),
        ("Eine Katze.", hypothesis("Cats.", -2.0, ((1, 0),))),
    ]
    found = combine("Ein Hund. Eine Katze.", parts, alignments=alignments)
    assert (found.text, found.score, found.log_prob, found.parts) == ("A dog. Cats.", -3.0, -6.0, 2)
    assert found.tokens == (10, 11, EOS, 10, EOS) and sum(found.token_log_probs) == found.log_prob
    assert len(found.token_log_probs) == 5 and found.alternatives == () and not found.truncated
    assert found.alignment == ((0, 0), (1, 1), (3, 2))


def test_words_cut_in_two_and_texts_without_spaces_keep_their_numbers():
    # "abcdef" was cut within: the second part is of the same word, and Chinese is joined to one "word".
    parts = [
        ("x abc", hypothesis("你 好", -1.0, ((0, 0), (1, 1)))),
        ("def y", hypothesis("吗 啊", -1.0, ((0, 0), (1, 1)))),
    ]
    found = combine("x abcdef y", parts)
    assert found.text == "你 好吗 啊" and found.alignment == ((0, 0), (1, 1), (1, 1), (2, 2))


@pytest.mark.parametrize("alignments", ["words", "pieces"])
def test_a_repeated_language_tag_is_the_one_of_the_line(alignments):
    text, annotations = ">>fr<< a b. c d.", Annotations(alignments=alignments)
    line = Segment(Request(text), text, text[7:], start=7, tag=">>fr<< ", tag_pieces=1)
    line.annotations, line.parts = annotations, line.divide(["a b. ", "c d."])
    for part, words in zip(line.parts, ("A B.", "C D."), strict=True):  # read as ">>fr<< a b.": three pieces
        part.ids, part.translation = np.arange(4), hypothesis(words, -1.0, ((0, 0), (2, 1)))
    assert join_parts(line, eos_id=EOS).alignment == ((0, 0), (2, 1), (0, 2), (4, 3))


def test_thousands_of_parts_take_linear_time():
    part = ("a ", *[hypothesis("A", -rank, ((0, 0),)) for rank in range(1, 4)])
    found = combine("a " * 5000, [part] * 5000, n_best=3)
    assert [one.score for one in found.n_best] == [-5000, -5001, -5001]
    assert found.alignment == tuple((n, n) for n in range(5000))
    assert growth(lambda text: combine(text, [part] * (len(text) // 2), n_best=3), lambda n: "a " * n) < 1.6


def test_the_n_best_are_the_best_sums():
    first = "a ", hypothesis("A", -1.0), hypothesis("AA", -3.0)
    second = "b", hypothesis("B", -2.0), hypothesis("BB", -2.5)
    found = combine("a b", [first, second], n_best=3)
    assert [(one.text, one.score) for one in found.n_best] == [("A B", -3.0), ("A BB", -3.5), ("AA B", -5.0)]
    assert found.alignment is None


def test_what_was_not_asked_for_is_absent_and_what_one_part_lacks_the_line_lacks():
    lacking = Translation("A", -1.0, -1.0, (5,), truncated=True, satisfied=False)
    found = combine("a b", [("a ", lacking), ("b", hypothesis("B", -1.0))])
    assert found.token_log_probs is None and found.truncated and not found.satisfied


# ---- with a network ----

SENTENCES = ["Der Hund.", "Anna!", "Wir lesen."]  # of at most 12 tokens
# Two and three of them in a line, in other orders, with white space of their own.
LINES = {
    "Der Hund. Anna!": "{0} {1}",
    "Wir lesen.  Der Hund.\nAnna!": "{2}  {0}\n{1}",
    "Anna!\t \r\n \u00a0Wir lesen. ": "{1}\t \r\n \u00a0{2}",
}


def test_each_sentence_is_translated_as_if_it_were_alone(shared_translator):
    alone = shared_translator.translate(SENTENCES)
    texts = [one.text for one in alone]
    assert len({*texts}) == 3 and all(texts)
    for form, found in zip(LINES.values(), shared_translator.translate(list(LINES)), strict=True):
        assert found.text == form.format(*texts)
        parts = [alone[int(number)] for number in form if number.isdigit()]
        assert found.tokens == tuple(itertools.chain(*(part.tokens for part in parts)))
        np.testing.assert_allclose(found.score, sum(part.score for part in parts), rtol=1e-4)


def test_whole_lines_if_asked_or_if_the_model_was_trained_on_them(config, params, vocabs, shared_translator):
    line = "Anna! Milch!"  # short enough
    apart = shared_translator.translate(line)
    assert apart.parts == 2 and shared_translator.describe()["sentences"] == "apart"
    for options in ({"split_sentences": "never"}, {"several_sentences": 0.5}):
        whole = make_translator(config, params, vocabs, warn=pytest.fail, **options)
        assert whole.describe()["sentences"] == "together"
        found = whole.translate(line)
        assert found.parts == 1 and found.tokens != apart.tokens
