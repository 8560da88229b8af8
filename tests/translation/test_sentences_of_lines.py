"""Lines of several sentences: each sentence is translated as if it were alone, and all belong to one line."""

import dataclasses
import itertools

import numpy as np
import pytest
from make_translator import make_translator

from flaxformer_mt.decoding.sentences import Sentence
from flaxformer_mt.errors import UserError
from flaxformer_mt.translation.constraints import require, share_prefix
from flaxformer_mt.translation.result import Annotations, Translation, check_phrases

SENTENCES = ["Der Hund.", "Anna!", "Wir lesen."]  # of at most 12 tokens
# Two and three sentences in a line, in other orders, with white space of their own.
LINES = [
    "Der Hund. Anna!",
    "Wir lesen.  Der Hund.\nAnna!",
    "Milch",
    "Anna!\t \r\n \u00a0Wir lesen. ",
]
PARTS = [[0, 1], [2, 0, 1], None, [1, 2]]
SPACES = [[" "], ["  ", "\n"], None, ["\t \r\n \u00a0"]]


class NothingVocab:
    """Has no piece but the end."""

    silent_ids = frozenset()

    def tokenize_all(self, texts):
        return [np.array([2])] * len(texts)


@pytest.fixture
def translator(shared_translator, monkeypatch):
    monkeypatch.setattr(shared_translator, "warn", pytest.fail)
    return shared_translator


@pytest.fixture(scope="module")
def alone(shared_translator):
    annotations = Annotations(token_log_probs=True, alignments="words")
    return shared_translator.translate(SENTENCES, n_best=3, annotations=annotations)


def test_each_sentence_is_translated_as_if_it_were_alone(translator, alone):
    found = translator.translate(
        LINES, n_best=3, annotations=Annotations(token_log_probs=True, alignments="words")
    )
    assert len({one.text for one in alone}) == 3 and all(one.text for one in alone)
    for line, one, numbers, spaces in zip(LINES, found, PARTS, SPACES, strict=True):
        if numbers is None:
            assert one.parts == 1
            continue
        parts = [alone[number] for number in numbers]
        texts = [part.text for part in parts]
        assert one.text == "".join(itertools.chain(*zip(texts, [*spaces, ""], strict=True)))
        assert one.parts == len(parts) and not one.truncated
        assert one.tokens == tuple(itertools.chain(*(part.tokens for part in parts)))
        expected = tuple(itertools.chain(*(part.token_log_probs for part in parts)))
        np.testing.assert_allclose(one.token_log_probs, expected, atol=1e-4)
        np.testing.assert_allclose(one.score, sum(part.score for part in parts), rtol=1e-4)
        # Words are counted in the whole line and its whole translation.
        source, target, pairs = 0, 0, []
        for number, part in zip(numbers, parts, strict=True):
            pairs += [(i + source, j + target) for i, j in part.alignment]
            source, target = source + len(SENTENCES[number].split()), target + len(part.text.split())
        assert one.alignment == tuple(pairs) and source == len(line.split())
        # The n best are the best sums of scores.
        sums = [sum(h.score for h in chosen) for chosen in itertools.product(*(p.n_best for p in parts))]
        np.testing.assert_allclose([h.score for h in one.n_best], sorted(sums)[:-4:-1], rtol=1e-4)


def test_whole_lines_if_asked_or_if_the_model_was_trained_on_them(config, params, vocabs, translator):
    line = "Anna! Milch!"  # short enough
    apart = translator.translate([line])[0]
    assert apart.parts == 2 and translator.describe()["sentences"] == "apart"
    for options in ({"split_sentences": "never"}, {"several_sentences": 0.5}):
        whole = make_translator(config, params, vocabs, warn=pytest.fail, **options)
        whole.search.programs = translator.search.programs
        assert whole.describe()["sentences"] == "together"
        (found,) = whole.translate([line])
        assert found.parts == 1 and found.tokens != apart.tokens


def test_the_sentences_of_a_prefix_begin_those_of_the_line(translator):
    (found,) = translator.translate(["Der Hund. Anna!"], prefixes=["the old. we "])
    first, second = translator.translate(SENTENCES[:2], prefixes=["the old.", "we "])
    assert found.tokens == first.tokens + second.tokens
    assert found.text == f"{first.text} {second.text}"
    (found,) = translator.translate(["Der Hund. Anna!"], prefixes=["the old "])
    assert found.text.startswith("the old")


def test_prefixes_are_shared_out():
    share = lambda text, count: share_prefix(text, count, language="en")  # noqa: E731
    assert share("One. Two. Thr ", 1) == ["One. Two. Thr "]
    assert share("One. Two. Thr ", 2) == ["One.", "Two. Thr "]
    assert share("One. Two. Thr ", 3) == ["One.", "Two.", "Thr "]
    assert share("One. Two. ", 4) == ["One.", "Two. ", "", ""]
    assert share("", 2) == ["", ""]


def test_a_required_phrase_goes_to_the_sentence_that_it_costs_least(translator, alone):
    line = " ".join(SENTENCES)
    texts = [one.text for one in alone]
    for phrase in ("red apples", "cat"):
        assert not any(phrase in text for text in texts)
        (found,) = translator.translate([line], required=[[phrase]])
        with_phrase = translator.translate(SENTENCES, required=[[phrase]] * 3)
        losses = [free.score - one.score for free, one in zip(alone, with_phrase, strict=True)]
        expected = list(texts)
        expected[int(np.argmin(losses))] = with_phrase[int(np.argmin(losses))].text
        assert found.text == " ".join(expected) and found.satisfied and found.parts == 3
    # One that a sentence has anyway changes nothing; two may be in two sentences or in one.
    word = texts[1].split()[0]
    assert translator.translate([line], required=[[word]])[0].text == " ".join(texts)
    lines, phrases = [line, "Milch", line], [["red apples", "cat", " "], ["dog"], []]
    both, single, free = translator.translate(lines, required=phrases)
    assert "red apples" in both.text and "cat" in both.text and both.satisfied
    assert "dog" in single.text and free.text == " ".join(texts)
    # What shows nothing is no phrase; in a vocabulary that drops all of a phrase, it has no tokens.
    assert translator.translate([line], required=[["\u200b"]])[0].text == " ".join(texts)
    with pytest.raises(UserError, match="line 1 requires 'a', which has no tokens"):
        require(Sentence(np.array([2])), ["a"], vocab=NothingVocab(), name="line 1")


def test_a_phrase_is_there_however_it_is_spelled():
    translation = Translation("The Bu\u0308ro\u00a0sleeps.", 0.0, 0.0, ())
    assert check_phrases(translation, ["Büro sleeps", " \ufeffThe "]).satisfied
    assert not check_phrases(translation, ["Büros"]).satisfied


def test_lines_are_counted_once_while_phrases_are_searched(translator, monkeypatch):
    counted = []
    monkeypatch.setattr(translator, "on_progress", lambda *, lines, tokens: counted.append((lines, tokens)))
    found = translator.translate([LINES[0], "", "Milch"], required=[["cat"], [], []])
    assert sum(lines for lines, _ in counted) == 3
    assert sum(tokens for _, tokens in counted) > sum(len(one.tokens) for one in found)


def test_tags_around_sentences_stay_around_them(translator, alone):
    first, second = (one.text for one in alone[:2])
    line = f"<p><b>{SENTENCES[0]}</b> {SENTENCES[1]}</p>"
    (found,) = translator.translate([line], markup=True)
    assert found.text == f"<p><b>{first}</b> {second}</p>"


def test_a_language_tag_begins_every_sentence(translator):
    annotations = Annotations(alignments="words")
    lines = ["<2de> Milch!", "<2de> Anna!", "<2de> Milch! Anna!"]
    first, second, found = translator.translate(lines, annotations=annotations)
    assert found.tokens == first.tokens + second.tokens != translator.translate(["Milch! Anna!"])[0].tokens
    # The second sentence's words are the third of the line, and its tag is that of the line.
    moved = [({0: 0, 1: 2}[i], j + len(first.text.split())) for i, j in second.alignment]
    assert found.alignment == (*first.alignment, *moved)


def test_a_sentence_of_a_line_may_be_too_long(translator, monkeypatch):
    warnings = []
    monkeypatch.setattr(translator, "warn", warnings.append)
    long = "Der Hund schläft , Anna kauft Milch , wir lesen ein Buch ."
    (found,) = translator.translate([f"Wir lesen. {long}"])
    (first, rest) = translator.translate(["Wir lesen.", long])
    assert found.text == f"{first.text} {rest.text}" and found.parts == 1 + rest.parts > 2
    assert len(warnings) == 2 and all(one.split(":")[0] in ("line 1", "line 2") for one in warnings)
    assert dataclasses.replace(found, parts=1).truncated is False
