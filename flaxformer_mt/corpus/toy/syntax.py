"""Syntax trees of toy_de_en: the content of a sentence, from which German and English are generated.

Contains the tree types of phrases, clauses and sentences. The words are in lexicon.py, the rules of the
languages in german.py and english.py.
"""

from dataclasses import dataclass
from typing import Literal, Union

from flaxformer_mt.corpus.toy.lexicon import Adjective, Adverb, Modal, Name, Noun, Preposition, Pronoun, Verb

Case = Literal["nominative", "accusative", "dative", "genitive"]
Role = Literal["subject", "accusative", "dative"]
Tense = Literal["present", "past", "future"]


@dataclass(frozen=True)
class Gap:
    """An empty phrase, expressed by a relative pronoun, by `who` or by the subject of the main clause."""

    plural: bool = False


@dataclass(frozen=True)
class NounPhrase:
    """A noun and its modifiers; `determiner` is English: the, a, no, this, my, a number, or ""."""

    noun: Noun
    determiner: str = "the"
    plural: bool = False
    adjective: Adjective | None = None
    owner: Union["NounPhrase", Name, None] = None
    relative: Union["Relative", None] = None


Phrase = NounPhrase | Name | Pronoun | Gap


@dataclass(frozen=True)
class PrepositionalPhrase:
    """A preposition and its noun phrase; a city is an Adverb."""

    preposition: Preposition
    phrase: NounPhrase | Name | Pronoun | Adverb


@dataclass(frozen=True)
class Clause:
    """A subject with a verb and its complements, or with a form of be and a `predicate`.

    `tense` is the tense of the modal if there is one. `gladly` is German gern, English like to. `negated`
    adds a negation unless the accusative's determiner is "no" (kein, not any).
    """

    subject: Phrase
    verb: Verb
    tense: Tense = "present"
    modal: Modal | None = None
    accusative: Phrase | None = None
    dative: Phrase | None = None
    oblique: NounPhrase | Name | Pronoun | None = None
    predicate: Adjective | Noun | None = None
    place: PrepositionalPhrase | Adverb | None = None
    companion: PrepositionalPhrase | None = None
    time: Adverb | None = None
    frequency: Adverb | None = None
    manner: Adverb | None = None
    gladly: bool = False
    negated: bool = False


@dataclass(frozen=True)
class Relative:
    """A relative clause; `role` names the phrase of `clause` that is the gap."""

    role: Role
    clause: Clause


@dataclass(frozen=True)
class Statement:
    """A main clause; `front` is the phrase that German puts first instead of the subject."""

    clause: Clause
    front: Literal["", "time", "place", "accusative"] = ""


@dataclass(frozen=True)
class Question:
    """A question; `word` asks for a gap or for a phrase missing in the clause; None: a yes-no question."""

    clause: Clause
    word: Adverb | None = None


@dataclass(frozen=True)
class Compound:
    """A main clause and a second clause: a subordinate one, or with `coordinate` another main clause."""

    main: Clause
    conjunction: Adverb
    second: Clause
    coordinate: bool = False
    second_first: bool = False


@dataclass(frozen=True)
class WithInfinitive:
    """A main clause whose verb takes an infinitive with zu; the infinitive's subject is a Gap."""

    main: Clause
    infinitive: Clause


Sentence = Statement | Question | Compound | WithInfinitive


def agreement(phrase: Phrase) -> tuple[int, bool]:
    """The person (1, 2, 3) of a subject and whether it is plural, for the agreement of the verb."""
    if isinstance(phrase, Pronoun):
        return phrase.person, phrase.plural
    if isinstance(phrase, NounPhrase | Gap):
        return 3, phrase.plural
    return 3, False


def tidy(words: list[str], mark: str) -> str:
    """Joins words and commas into a sentence, with an initial capital and without double commas.

    tidy(["was", "", "bellt", ",", ",", "beißt", ","], ".") is "Was bellt, beißt."
    """
    text = " ".join(word for word in words if word)
    while ", ," in text:
        text = text.replace(", ,", ",")
    text = text.replace(" ,", ",").removesuffix(",")
    return text[0].upper() + text[1:] + mark
