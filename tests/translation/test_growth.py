"""What reads the text of a request takes time in proportion to it, whatever the text is made of."""

import functools

import pytest
from flaxformer_mt.translation.segmentation import SourcePart, find_language_tags, read_sources
from growth import growth

from flaxformer_mt.translation.constraints import make_sentences
from flaxformer_mt.translation.glossary import Glossary
from flaxformer_mt.translation.language_tags import LineTags
from flaxformer_mt.translation.letter_case import LetterCase, put_back
from flaxformer_mt.translation.requests import Request
from flaxformer_mt.unicode_text import find_case, is_blank, lacks_spaces, spell

TEXTS = {
    "parentheses": "(",
    "marks": "... !? ",
    "words": "der alte Hund ",
    "a word": "a",
    "capitals": "DIE KATZE. ",
    "accents": "\u0315\u0300",
    "invisible": "\u00ad\u200b",
    "blank": " \u00a0",
    "direction": "\u200e (",
    "Chinese": "猫。",
    "tags": ">>de<< ",
    "half a tag": ">>de",
    "commas": "a,",
}
# Terms that each of these texts has, and the beginnings of longer ones.
TERMS = {"x": "y", "der alte": "x", "der alte Hund " * 10: "y"} | {
    unit * length: "y" for unit in ("(", "a", "猫。") for length in range(1, 100, 10)
}


@pytest.mark.parametrize("text", TEXTS)
def test_terms_are_found_in_linear_time(text):
    assert growth(Glossary.make(TERMS).find, lambda size: TEXTS[text] * size) < 1.6


READERS = {
    function.__name__: function
    for function in (spell, is_blank, lambda text: lacks_spaces([text]), find_case, find_language_tags)
} | {"tags": lambda text: LineTags(">>fr<< ", (">>fr<<",)).find([text])}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("reader", READERS)
def test_texts_are_looked_at_in_linear_time(reader, text):
    assert growth(READERS[reader], lambda size: TEXTS[text] * size) < 1.6


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("case", ["", "capitals"])
def test_sentences_are_cut_in_linear_time(text, case, vocabs):
    """Halves of halves, each of which is tokenized: the logarithm of the length is a factor."""
    letter_case = LetterCase(frozenset({case} - {""}), vocabs.source, "de")
    how = {"vocab": vocabs.source, "longest": 12, "long_lines": "split", "sentences": True, "language": "de"}
    read = functools.partial(read_sources, **how, letter_case=letter_case)
    assert growth(lambda one: read([one]), lambda size: TEXTS[text] * size) < 1.6
    if case:
        assert growth(lambda one: put_back(one, case, "de", one), lambda size: TEXTS[text] * size) < 1.6


@pytest.mark.parametrize("target", ["{}", "the same"])
def test_terms_of_many_sentences_are_required_in_linear_time(target, vocabs):
    def make(size):
        words = [f"w{number}" for number in range(size)]
        parts = [SourcePart(0, 0, f"{word} x. ") for word in words]
        return parts, Glossary(tuple((word, target.format(word)) for word in words))

    def read(made):
        request = Request("", glossary=made[1])
        make_sentences(request, made[0], vocab=vocabs.target, tags=LineTags(""))

    class Sized(tuple):
        def __len__(self):
            return 10 * len(self[0])

    assert growth(read, lambda size: Sized(make(size))) < 1.6
