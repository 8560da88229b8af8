"""What reads the text of a request takes time in proportion to it, whatever the text is made of."""

import pytest
from fake_engine import read_lines
from growth import growth

from flaxformer_mt.translation.glossary import Glossary
from flaxformer_mt.translation.letter_case import put_back
from flaxformer_mt.translation.result import Annotations
from flaxformer_mt.translation.steps import make_steps

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
    "quotes": '."',
    "joiners": "\u200d",
}
# Terms that each of these texts has, and the beginnings of longer ones.
TERMS = {"x": "y", "der alte": "x", "der alte Hund " * 10: "y"} | {
    unit * length: "y" for unit in ("(", "a", "猫。") for length in range(1, 100, 10)
}


@pytest.mark.parametrize("text", TEXTS)
def test_terms_are_found_in_linear_time(text):
    assert growth(Glossary.make(TERMS).find, lambda size: TEXTS[text] * size) < 1.6


@pytest.fixture(scope="module")
def read(config, vocabs):
    """All steps, whose constraints can be met."""

    def read(line, *changed_cases, **fields):
        how = {"apart": True, "changed_cases": frozenset(changed_cases)}
        return read_lines([line], *make_steps(config, vocabs, lambda *checked: None, **how), **fields)

    return read


@pytest.mark.parametrize("text", TEXTS)
def test_lines_are_read_in_linear_time(text, read):
    """Halves of halves, each of which is tokenized: the logarithm of the length is a factor."""
    asked = {"annotations": Annotations(markup=True)}
    assert growth(lambda line: read(line, "capitals", **asked), lambda size: TEXTS[text] * size) < 1.6
    assert growth(lambda line: put_back(line, "capitals", "de", line), lambda size: TEXTS[text] * size) < 1.6


@pytest.mark.parametrize("target", ["{}", "the same"])
def test_terms_of_many_sentences_are_required_in_linear_time(target, read):
    def read_terms(text):
        terms = tuple((word, target.format(word)) for word in text.split(" X. "))
        read(text, glossary=Glossary(terms))

    make = lambda size: " X. ".join(f"w{number}" for number in range(size))  # noqa: E731
    assert growth(read_terms, make) < 1.6
