"""What translations must contain: prefixes, phrases and terms become constraints of the parts of lines."""

import dataclasses

import numpy as np
import pytest
from fake_engine import read_lines

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.translation.constraints import Constraints, share_prefix
from flaxformer_mt.translation.glossary import Glossary
from flaxformer_mt.translation.result import Translation, check_phrases
from flaxformer_mt.translation.sentences import Sentences
from flaxformer_mt.translation.tokenization import Tokenization

SEARCH = SearchConfig(beam_size=4)


class NothingVocab:
    """Has no piece but the end."""

    silent_ids, num_forced = frozenset(), 0

    def tokenize_all(self, texts):
        return [np.array([2])] * len(texts)


@pytest.fixture
def constrain(characters):
    """Returns lines of at most ten characters a part, and what was checked."""

    def read(*lines, vocab=characters.target, search=SEARCH, limited=False, **fields):
        checked = []
        steps = (
            Sentences(apart=True),
            Tokenization(characters.source, longest=12, long_lines="split"),
            Constraints(vocab, search, lambda sentence, name: checked.append(name), limited=limited),
        )
        return read_lines(lines, *steps, **fields), checked

    return read


def test_a_prefix_belongs_to_its_sentences(constrain, characters):
    def spell(part):
        return characters.target.detokenize(part.sentence.prefix), part.sentence.prefix_ends_word

    (line, single), checked = constrain("Ab! Cd! Ef!", "Ab!", prefix="Gh. Ij ")
    assert [spell(part) for part in line.parts] == [("Gh.", False), ("Ij", True), ("", False)]
    assert [spell(part) for part in single.parts] == [("Gh. Ij", True)]
    assert checked == ["line 1"] * 3 + ["line 2"]
    assert [part.sentence.stream for part in line.parts] == [(1, 0), (1, 1), (1, 2)]
    free, checked = constrain("Ab!", "", prefix=" ")
    assert spell(free[0].parts[0]) == ("", False) and not free[1].parts
    for count, shares in (
        (1, ["One. Two. Thr "]),
        (2, ["One.", "Two. Thr "]),
        (3, ["One.", "Two.", "Thr "]),
        (4, ["One.", "Two.", "Thr ", ""]),
    ):
        assert share_prefix("One. Two. Thr ", count, language="en") == shares
    assert share_prefix("One. Two. ", 3, language="en") == ["One.", "Two. ", ""]
    assert share_prefix("", 2, language="en") == ["", ""]


def test_terms_are_required_of_the_parts_that_have_them(constrain, characters):
    def read(line, glossary, **fields):
        ((line,), _) = constrain(line, glossary=Glossary.make(glossary), **fields)
        texts = [[characters.target.detokenize(one) for one in part.sentence.required] for part in line.parts]
        return line, texts

    terms = {"Hund": "dog", "Katze": "cat", "Tier": "cat"}
    line, required = read("Hund Tier! Anna! Katze?", terms)
    assert required == [["dog", "cat"], [], ["cat"]] and not line.memory
    # In two parts, as the line was too long: of none, but the translation may have it.
    line, required = read("Der rote alte Hund.", terms | {"rote alte": "red", "alte Hund": "fox"})
    assert [part.text for part in line.parts] == ["Der rote ", "alte Hund."] and required == [[], ["fox"]]
    line, required = read("Der rote Hund.", {"rote Hund": "fox"})
    assert [part.text for part in line.parts] == ["Der rote ", "Hund."] and required == [[], []]
    for text in ("the fox", "the dog"):
        assert line.undo(Translation(text, 0.0, 0.0, ())).satisfied == ("fox" in text)
    # Required phrases besides; a blank one is none.
    _, required = read("Hund!", terms, required=("red", "\u200b", " "))
    assert required == [["dog", "red"]]


def test_constraints_that_cannot_be_met_are_named(constrain):
    with pytest.raises(UserError, match="line 1 requires 'a', which has no tokens"):
        constrain("Hund", vocab=NothingVocab(), required=("a",))
    for changes, named in (
        ({"method": "greedy"}, "search.method is greedy with search.diversity_groups 1"),
        ({"diversity_groups": 2}, "search.method is beam with search.diversity_groups 2"),
        ({"mbr": "chrf"}, "search.mbr is chrf"),
    ):
        for fields in ({"required": ("a",)}, {"glossary": Glossary.make({"a": "b"})}):
            with pytest.raises(UserError, match=f"required phrases need plain beam search, but {named}"):
                constrain("Hund", search=dataclasses.replace(SEARCH, **changes), **fields)
    many = Glossary.make({f"w{n}": f"v{n}" for n in range(17)})
    for line, fields in (("w1 x", {"required": ("a" * 32,)}), ("x", {"required": ("a",) * 17})):
        constrain(line, glossary=many, **fields)
        with pytest.raises(UserError, match="line 1 requires (2|17) phrases .* takes at most 16 of 32"):
            constrain(line, limited=True, glossary=many, **fields)


def test_a_phrase_is_there_however_it_is_spelled():
    translation = Translation("The Bu\u0308ro\u00a0sleeps.", 0.0, 0.0, ())
    assert check_phrases(translation, ["Büro sleeps", " \ufeffThe "]).satisfied
    assert not check_phrases(translation, ["Büros"]).satisfied
    both = dataclasses.replace(translation, alternatives=(Translation("a cat", -2.0, -2.0, ()),))
    assert [one.satisfied for one in check_phrases(both, ["cat "]).n_best] == [False, True]
