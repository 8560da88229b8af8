"""Random generation of phrases and clauses of toy_de_en: compatible words, and no ambiguous phrases.

Contains the probabilities of all choices below the sentence; grammar.py generates the sentences.
"""

import functools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

from flaxformer_mt.corpus.toy import function_words as words
from flaxformer_mt.corpus.toy.lexicon import (
    ADJECTIVES,
    NOUNS,
    VERBS,
    Adjective,
    Adverb,
    Name,
    Noun,
    Pronoun,
    Verb,
)
from flaxformer_mt.corpus.toy.syntax import (
    Clause,
    Gap,
    NounPhrase,
    Phrase,
    PrepositionalPhrase,
    Relative,
    Role,
    Tense,
    agreement,
)

T = TypeVar("T")

PEOPLE = ("person", "family")
# Probability weights of a clause's tense; `modal` is a modal verb in the present or the past.
TenseWeights = Mapping[Literal["present", "past", "future", "modal"], float]
TENSE_WEIGHTS: TenseWeights = {"present": 4, "past": 3.5, "future": 1, "modal": 2}
_SITES = ("room", "place")
_OWNED = ("text", "thing", "box", "clothes", "vehicle", "machine", "family", "animal", "room")
_PROFESSIONS = (
    "Lehrer",
    "Schüler",
    "Student",
    "Arzt",
    "Bauer",
    "Maler",
    "Kellner",
    "Richter",
    "Soldat",
    "Ingenieur",
)
# Verbs of states, which take no time and no modal; then verbs that "gern" and "like to" may go with.
STATES = ("kennen", "lieben", "gehören", "haben", "brauchen", "wohnen", "glauben")
_PLEASURES = (
    "arbeiten",
    "tanzen",
    "singen",
    "schwimmen",
    "lesen",
    "kaufen",
    "essen",
    "trinken",
    "malen",
    "schreiben",
)
_UNRESTRICTED = ("the", "this", "my", "your", "his", "our", "a")  # determiners that "nicht" may follow


class RandomChoices:
    """Random choices based on `random()` alone, whose values Python keeps stable for a given seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def pick(self, items: Sequence[T]) -> T:
        """Returns one of the items, all equally likely."""
        return items[int(self._random.random() * len(items))]

    def chance(self, probability: float) -> bool:
        """Returns True with the given probability."""
        return self._random.random() < probability

    def weigh(self, weights: Mapping[T, float]) -> T:
        """Returns one of the keys, with a probability proportional to its weight."""
        point = self._random.random() * sum(weights.values())
        for item, weight in weights.items():
            point -= weight
            if point < 0:
                return item
        return item

    def shuffle(self, items: list[T]) -> None:
        """Shuffles a list in place."""
        for last in range(len(items) - 1, 0, -1):
            other = int(self._random.random() * (last + 1))
            items[last], items[other] = items[other], items[last]


@functools.cache
def _nouns_of(kinds: tuple[str, ...]) -> tuple[Noun, ...]:
    return tuple(noun for noun in NOUNS if noun.kind in kinds)


@functools.cache
def _adjectives_of(kind: str) -> tuple[Adjective, ...]:
    return tuple(adjective for adjective in ADJECTIVES if kind in adjective.kinds)


def generate_noun_phrase(
    dice: RandomChoices, kinds: Sequence[str], *, subject: bool = False, rich: bool = False
) -> NounPhrase:
    """Generates a noun of `kinds` with a determiner; if `rich`, perhaps with an owner or relative clause."""
    noun = dice.pick(_nouns_of(tuple(kinds)))
    counted = noun.plural != "-"
    plural = counted and dice.chance(0.25)
    weights = {"the": 9.0, "this": 1.2, "my": 0.8, "your": 0.4, "his": 0.4, "our": 0.6}
    if plural:
        weights |= {"": 2.5, "two": 0.4, "three": 0.4, "four": 0.3, "five": 0.3, "ten": 0.3}
    else:
        weights |= {"a": 4.0, "every": 0.6} if counted else {"": 4.0}
    if subject and counted:
        weights["no"] = 0.3
    phrase = NounPhrase(noun, dice.weigh(weights), plural)
    if _adjectives_of(noun.kind) and dice.chance(0.25):
        phrase = replace(phrase, adjective=dice.pick(_adjectives_of(noun.kind)))
    if rich and phrase.determiner == "the":
        if noun.kind in (*_OWNED, "opening") and dice.chance(0.12):
            return replace(phrase, owner=_grow_owner(dice, noun))
        if dice.chance(0.15):
            return replace(phrase, relative=_grow_relative(dice, phrase))
    return phrase


def _grow_owner(dice: RandomChoices, noun: Noun) -> NounPhrase | Name:
    if noun.kind != "opening" and dice.chance(0.3):
        return dice.pick(words.NAMES)
    kinds = ("room",) if noun.kind == "opening" else PEOPLE
    owner = dice.pick([each for each in _nouns_of(kinds) if each is not noun])
    return NounPhrase(owner, dice.weigh({"the": 4, "my": 2, "our": 1, "this": 1}), dice.chance(0.2))


def generate_subject(dice: RandomChoices, kinds: Sequence[str], *, rich: bool = False) -> Phrase:
    """Generates a subject of one of `kinds`; if people are among them, perhaps a pronoun or a name."""
    if "person" in kinds and dice.chance(0.35):
        return dice.pick(words.PRONOUNS)
    if "person" in kinds and dice.chance(0.12):
        return dice.pick(words.NAMES)
    return generate_noun_phrase(dice, kinds, subject=True, rich=rich)


def _grow_object(
    dice: RandomChoices, kinds: Sequence[str], case: str, subject: Phrase, *, rich: bool
) -> NounPhrase | Name | Pronoun:
    if "person" in kinds and dice.chance(0.25):
        return dice.pick(
            [each for each in words.PRONOUNS if getattr(each, case) and not _reflects(each, subject)]
        )
    if "person" in kinds and dice.chance(0.1):
        return dice.pick([name for name in words.NAMES if name != subject])
    if case == "accusative" and "thing" in kinds and "person" not in kinds and dice.chance(0.06):
        return words.IT
    return generate_noun_phrase(dice, kinds, rich=rich)


def _reflects(pronoun: Pronoun, subject: Phrase) -> bool:
    """Whether an object would refer to the subject: I see me, we see me, you see you."""
    return pronoun.person < 3 and pronoun.person == agreement(subject)[0]


def _grow_relative(dice: RandomChoices, head: NounPhrase) -> Relative:
    """Generates a relative clause in a role that is unambiguous in German.

    In "die Frau, die das Kind sieht" the woman is always the subject. Where the woman is the object, the
    subject is a pronoun ("die ich sehe"); only masculine heads, with the accusative "den", allow any subject.
    """
    kind = head.noun.kind
    roles: dict[Role, list[Verb]] = {
        "subject": [verb for verb in VERBS if kind in verb.subjects and verb.frame in ("-", "acc", "dat")],
        "accusative": [verb for verb in VERBS if kind in verb.objects and verb.frame == "acc"],
        "dative": [verb for verb in VERBS if kind in verb.objects and verb.frame == "dat"],
    }
    role = dice.pick([role for role, verbs in roles.items() if verbs])
    verb = dice.pick(roles[role])
    if role == "subject":
        return Relative(role, fill_clause(dice, Gap(head.plural), verb))
    subject: Phrase = dice.pick([each for each in words.PRONOUNS if each.nominative != "sie"])
    clear = role == "dative" or (head.noun.gender == "m" and not head.plural)
    if "person" not in verb.subjects or (clear and dice.chance(0.5)):
        subject = generate_subject(dice, verb.subjects)
    return Relative(role, fill_clause(dice, subject, verb, hole=role))


def generate_place(
    dice: RandomChoices, *, goal: bool = False, far: bool = False
) -> PrepositionalPhrase | Adverb:
    """Generates the place of a clause or, with `goal`, its destination; `far`: home or a city."""
    if dice.chance(0.12):
        return words.HOME if goal else words.AT_HOME
    if far or dice.chance(0.2):
        return PrepositionalPhrase(words.TO_CITY if goal else words.IN, dice.pick(words.CITIES))
    site = dice.pick(_nouns_of(_SITES))
    phrase = NounPhrase(site, dice.weigh({"the": 6, "a": 2, "this": 1, "our": 0.5}))
    if dice.chance(0.15):
        phrase = replace(phrase, adjective=dice.pick(_adjectives_of(site.kind)))
    if goal:
        return PrepositionalPhrase(dice.pick((words.INTO, words.TO)), phrase)
    return PrepositionalPhrase(words.IN if dice.chance(0.7) else dice.pick(words.BEFORE_PLACES), phrase)


def generate_clause(
    dice: RandomChoices,
    *,
    frames: Sequence[str] = (),
    moods: TenseWeights = TENSE_WEIGHTS,
    subject: Phrase | None = None,
    rich: bool = False,
) -> Clause:
    """Generates a clause with a verb of one of `frames` (empty: any verb, or be); `rich`: a longer one."""
    if not frames and dice.chance(0.1):
        return _grow_copula(dice, moods, subject, rich=rich)
    if frames:
        verbs = [verb for verb in VERBS if verb.frame in frames]
    else:
        verbs = [verb for verb in VERBS if verb.frame not in ("dass", "zu")]
    if subject is not None:
        verbs = [verb for verb in verbs if "person" in verb.subjects]
    verb = dice.pick(verbs)
    return fill_clause(
        dice, subject or generate_subject(dice, verb.subjects, rich=rich), verb, moods=moods, rich=rich
    )


def _grow_copula(dice: RandomChoices, moods: TenseWeights, subject: Phrase | None, *, rich: bool) -> Clause:
    tenses: dict[Tense, float] = {mood: weight for mood, weight in moods.items() if mood != "modal"}
    tense: Tense = dice.weigh(tenses) if tenses else "present"
    if subject is None and dice.chance(0.3):  # I am a teacher; sie and Anna would need Lehrerin
        subject = dice.pick([each for each in words.PRONOUNS if each.nominative != "sie"])
        noun = dice.pick([noun for noun in NOUNS if noun.german in _PROFESSIONS])
        return Clause(subject, words.BE, tense, predicate=noun, negated=dice.chance(0.2))
    subject = subject or generate_subject(dice, (*PEOPLE, *_OWNED), rich=rich)
    kind = subject.noun.kind if isinstance(subject, NounPhrase) else "person"
    known = subject.adjective if isinstance(subject, NounPhrase) else None
    fitting = [adjective for adjective in _adjectives_of(kind) if adjective is not known]
    clause = Clause(subject, words.BE, tense, predicate=dice.pick(fitting))
    if getattr(subject, "determiner", "") in ("no", "every"):
        return clause
    return replace(clause, negated=dice.chance(0.2))


def fill_clause(
    dice: RandomChoices,
    subject: Phrase,
    verb: Verb,
    *,
    moods: TenseWeights = TENSE_WEIGHTS,
    rich: bool = False,
    hole: str = "",
    bare: bool = False,
) -> Clause:
    """Generates a clause of this subject and verb, with the objects that the verb takes.

    The phrase named by `hole` is a Gap. A `bare` clause has neither negation nor adverbs.
    """
    clause = _choose_tense(dice, Clause(subject, verb), moods)
    phrases: dict[str, Any] = {}
    if verb.frame == "acc":
        phrases["accusative"] = _grow_object(dice, verb.objects, "accusative", subject, rich=rich)
    elif verb.frame == "dat":
        phrases["dative"] = _grow_object(dice, verb.objects, "dative", subject, rich=rich)
    elif verb.frame == "dat+acc":
        phrases["accusative"] = generate_noun_phrase(dice, verb.objects)
        phrases["dative"] = _grow_object(dice, PEOPLE, "dative", subject, rich=False)
    elif "+" in verb.frame:
        case = "accusative" if verb.frame.endswith("acc") else "dative"
        phrases["oblique"] = _grow_object(dice, verb.objects, case, subject, rich=rich)
    if hole:
        phrases[hole] = Gap()
    clause = replace(clause, **phrases)
    if verb.frame in ("place", "goal"):
        far = verb.infinitive in ("reisen", "fahren")
        clause = replace(clause, place=generate_place(dice, goal=verb.frame == "goal", far=far))
    return clause if bare else _decorate(dice, _negate(dice, clause), rich=rich)


def _choose_tense(dice: RandomChoices, clause: Clause, moods: TenseWeights) -> Clause:
    mood = dice.weigh(moods)
    alive = not isinstance(clause.subject, NounPhrase) or clause.subject.noun.kind in (*PEOPLE, "animal")
    if mood != "modal":
        return replace(clause, tense=mood)
    if clause.verb.infinitive in STATES or not alive:
        return clause
    modal = dice.pick(words.MODALS)
    past = bool(modal.past) and "past" in moods and dice.chance(0.3)
    return replace(clause, tense="past" if past else "present", modal=modal)


def _determiners(clause: Clause) -> Iterable[str]:
    for phrase in (clause.accusative, clause.dative):
        if isinstance(phrase, NounPhrase):
            yield phrase.determiner


def _negate(dice: RandomChoices, clause: Clause) -> Clause:
    """Negates some clauses: with kein if the accusative is indefinite, never with every or a number."""
    if getattr(clause.subject, "determiner", "") in ("no", "every") or not dice.chance(0.2):
        return clause
    accusative = clause.accusative
    if isinstance(accusative, NounPhrase) and accusative.determiner in ("a", ""):
        return replace(clause, negated=True, accusative=replace(accusative, determiner="no"))
    if not set(_determiners(clause)) <= set(_UNRESTRICTED):
        return clause
    return replace(clause, negated=getattr(clause.dative, "determiner", "") != "a")


def _decorate(dice: RandomChoices, clause: Clause, *, rich: bool) -> Clause:
    """Adds adverbs and a companion at random, fewer to clauses that are not rich."""
    verb, often = clause.verb, 1.0 if rich else 0.4
    if _may_like(clause) and dice.chance(0.25):
        return _like(clause)
    if verb.infinitive not in STATES and dice.chance(0.5 * often):
        clause = replace(clause, time=_pick_time(dice, clause))
    elif (
        not clause.negated and getattr(clause.subject, "determiner", "") != "no" and dice.chance(0.25 * often)
    ):
        clause = replace(clause, frequency=dice.pick(words.FREQUENCIES))
    if verb.manners and dice.chance(0.4 * often):
        clause = replace(clause, manner=words.MANNERS[dice.pick(verb.manners)])
    if verb.frame in ("-", "acc") and verb.auxiliary == "haben" and rich and dice.chance(0.15):
        clause = replace(clause, place=generate_place(dice))
    if (
        verb.frame in ("-", "goal")
        and clause.manner is None
        and "person" in verb.subjects
        and dice.chance(0.1)
    ):
        clause = replace(clause, companion=_grow_companion(dice, clause.subject))
    return clause


def _pick_time(dice: RandomChoices, clause: Clause) -> Adverb:
    mood = "modal" if clause.modal and clause.tense == "present" else clause.tense
    times = [time for time in words.TIMES if mood in time.tenses]
    # "Not every day" would need the negation in another position.
    return dice.pick([time for time in times if not (clause.negated and time.german == "jeden Tag")])


def _may_like(clause: Clause) -> bool:
    thing = clause.accusative is None or isinstance(clause.accusative, NounPhrase)
    human = not isinstance(clause.subject, NounPhrase) or clause.subject.noun.kind in PEOPLE
    simple = clause.tense == "present" and clause.modal is None and not clause.negated
    free = simple and getattr(clause.subject, "determiner", "") != "no"
    return clause.verb.infinitive in _PLEASURES and thing and human and free


def _like(clause: Clause) -> Clause:
    """Adds gern, as in "liest gern Bücher": the object has no determiner, and is plural if countable."""
    liked = clause.accusative
    if not isinstance(liked, NounPhrase):
        return replace(clause, gladly=True)
    bare = NounPhrase(liked.noun, "", liked.noun.plural != "-", liked.adjective)
    return replace(clause, gladly=True, accusative=bare)


def _grow_companion(dice: RandomChoices, subject: Phrase) -> PrepositionalPhrase:
    preposition = dice.pick(words.COMPANIONS)
    kinds = ("person", "family", "animal")
    return PrepositionalPhrase(preposition, _grow_object(dice, kinds, preposition.case, subject, rich=False))
