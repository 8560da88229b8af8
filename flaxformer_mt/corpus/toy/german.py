"""German for toy_de_en: declension, conjugation, and the position of the verb.

Contains the rules that turn the trees of syntax.py into German.
"""

from typing import Literal

from flaxformer_mt.corpus.toy.function_words import NUMBERS, PRESENT, PRETERITE
from flaxformer_mt.corpus.toy.lexicon import Adjective, Adverb, Name, Noun, Pronoun, Verb
from flaxformer_mt.corpus.toy.syntax import (
    Case,
    Clause,
    Compound,
    Gap,
    NounPhrase,
    Phrase,
    PrepositionalPhrase,
    Question,
    Relative,
    Sentence,
    Statement,
    WithInfinitive,
    agreement,
    tidy,
)

Order = Literal["second", "first", "last", "infinitive"]

# Columns: masculine, feminine, neuter, plural.
_DEFINITE = {
    "nominative": ("der", "die", "das", "die"),
    "accusative": ("den", "die", "das", "die"),
    "dative": ("dem", "der", "dem", "den"),
    "genitive": ("des", "der", "des", "der"),
}
_DIES = {  # endings of dieser and jeder
    "nominative": ("er", "e", "es", "e"),
    "accusative": ("en", "e", "es", "e"),
    "dative": ("em", "er", "em", "en"),
    "genitive": ("es", "er", "es", "er"),
}
_EIN = _DIES | {"nominative": ("", "e", "", "e"), "accusative": ("en", "e", "", "e")}
_WEAK = {  # adjectives after der, dieser, jeder
    "nominative": ("e", "e", "e", "en"),
    "accusative": ("en", "e", "e", "en"),
    "dative": ("en",) * 4,
    "genitive": ("en",) * 4,
}
_MIXED = _WEAK | {
    "nominative": ("er", "e", "es", "en"),
    "accusative": ("en", "e", "es", "en"),
}  # after ein, kein, mein
_STRONG = _DIES | {"genitive": ("en", "er", "en", "er")}  # after a number or nothing
_RELATIVE_DATIVE = ("dem", "der", "dem", "denen")
_DETERMINERS = {
    "this": ("dies", _DIES, _WEAK),
    "every": ("jed", _DIES, _WEAK),
    "a": ("ein", _EIN, _MIXED),
    "no": ("kein", _EIN, _MIXED),
    "my": ("mein", _EIN, _MIXED),
    "your": ("dein", _EIN, _MIXED),
    "his": ("sein", _EIN, _MIXED),
    "our": ("unser", _EIN, _MIXED),
}
_CONTRACTIONS = {
    "in dem": "im",
    "in das": "ins",
    "zu dem": "zum",
    "zu der": "zur",
    "von dem": "vom",
    "an das": "ans",
}
_CASES: dict[str, Case] = {"acc": "accusative", "dat": "dative"}


def _column(phrase: NounPhrase) -> int:
    return 3 if phrase.plural else "mfn".index(phrase.noun.gender)


def decline_noun(noun: Noun, case: Case, *, plural: bool) -> str:
    """The form of a noun: decline_noun(Kind, "dative", plural=True) is Kindern."""
    if plural:
        return noun.plural + ("n" if case == "dative" and noun.plural[-1] not in "ns" else "")
    if noun.weak and case != "nominative":
        return noun.german + noun.weak
    if case == "genitive" and noun.gender != "f":
        return noun.german + ("es" if _is_short(noun.german) else "s")
    return noun.german


def _is_short(word: str) -> bool:
    """Whether a word has one syllable or ends in a sibilant, and so has a genitive in -es."""
    vowels = [letter in "aeiouäöüy" for letter in word.lower()]
    syllables = sum(now and not before for before, now in zip([False, *vowels], vowels, strict=False))
    return syllables == 1 and word[-1] not in "aeiou" or word[-1] in "sßzx"


def decline(phrase: Phrase, case: Case) -> list[str]:
    """The words of a phrase in a case, its relative clause between commas."""
    if isinstance(phrase, Gap):
        return []
    if isinstance(phrase, Pronoun):
        return [
            {"nominative": phrase.nominative, "accusative": phrase.accusative, "dative": phrase.dative}[case]
        ]
    if isinstance(phrase, Name):
        return [phrase.german]
    words = [*_decline_head(phrase, case), decline_noun(phrase.noun, case, plural=phrase.plural)]
    if isinstance(phrase.owner, Name):
        words = [f"{phrase.owner.german}s", *words]
    elif phrase.owner is not None:
        words += decline(phrase.owner, "genitive")
    if phrase.relative is not None:
        words += [",", *_relative(phrase, phrase.relative), ","]
    return words


def _decline_head(phrase: NounPhrase, case: Case) -> list[str]:
    """The determiner and the adjective: [dem, alten]."""
    column = _column(phrase)
    if isinstance(phrase.owner, Name) or phrase.determiner == "" or phrase.determiner in NUMBERS:
        words, endings = [NUMBERS.get(phrase.determiner, "")], _STRONG
    elif phrase.determiner == "the":
        words, endings = [_DEFINITE[case][column]], _WEAK
    else:
        stem, own, endings = _DETERMINERS[phrase.determiner]
        if phrase.determiner == "a" and phrase.plural:
            raise ValueError('a plural phrase has no indefinite article; set its determiner to ""')
        words = [stem + own[case][column]]
    if phrase.adjective is not None:
        words.append(phrase.adjective.stem + endings[case][column])
    return words


def _relative(head: NounPhrase, relative: Relative) -> list[str]:
    case: Case = "nominative" if relative.role == "subject" else relative.role
    column = _column(head)
    pronoun = _RELATIVE_DATIVE[column] if case == "dative" else _DEFINITE[case][column]
    return [pronoun, *order_clause(relative.clause, "last")]


def _attach(phrase: PrepositionalPhrase | Adverb) -> list[str]:
    """The words of a place or companion, with preposition and article contracted: [im, Garten]."""
    if isinstance(phrase, Adverb):
        return phrase.german.split()
    if isinstance(phrase.phrase, Adverb):
        return [phrase.preposition.german, phrase.phrase.german]
    return _contract(phrase.preposition.german, decline(phrase.phrase, phrase.preposition.case))


def _contract(preposition: str, words: list[str]) -> list[str]:
    merged = _CONTRACTIONS.get(f"{preposition} {words[0]}")
    return [merged, *words[1:]] if merged else [preposition, *words]


def _six(forms: tuple[str, ...], subject: Phrase) -> str:
    person, plural = agreement(subject)
    return forms[person - 1 + 3 * plural]


def conjugate(verb: Verb, subject: Phrase) -> str:
    """The present tense of a verb without its prefix: conjugate(lesen, du) is liest."""
    if verb.infinitive in PRESENT:
        return _six(PRESENT[verb.infinitive], subject)
    stem = verb.infinitive.removesuffix("en")
    link = "e" if stem[-1] in "td" else ""
    third_stem = verb.third.removesuffix("t") if verb.third != f"{stem}et" else f"{stem}e"
    second = verb.third if third_stem[-1] in "sßzx" else f"{third_stem}st"
    return _six((f"{stem}e", second, verb.third, verb.infinitive, f"{stem}{link}t", verb.infinitive), subject)


def _verb_words(clause: Clause) -> tuple[str, list[str]]:
    """The finite verb and the words at the end of the clause: (hat, [gelesen]), (steht, [auf])."""
    verb, modal, subject = clause.verb, clause.modal, clause.subject
    infinitive = verb.prefix + verb.infinitive
    if modal is not None:
        return _six(modal.past if clause.tense == "past" else modal.present, subject), [infinitive]
    if clause.tense == "future":
        return _six(PRESENT["werden"], subject), [infinitive]
    if clause.tense == "past" and verb.infinitive in PRETERITE:
        return _six(PRETERITE[verb.infinitive], subject), []
    if clause.tense == "past":
        return _six(PRESENT[verb.auxiliary], subject), [verb.participle]
    return conjugate(verb, subject), [verb.prefix]


def _middle(clause: Clause, front: str) -> list[str]:
    """The words between the finite verb (or conjunction) and the end of the clause, without the subject."""
    spoken: dict[Case, list[str]] = {
        "accusative": decline(clause.accusative or Gap(), "accusative"),
        "dative": decline(clause.dative or Gap(), "dative"),
    }
    light = [name for name in spoken if isinstance(getattr(clause, name), Pronoun)]
    words = [word for name in light for word in spoken[name]]
    if clause.time and front != "time":
        words += clause.time.german.split()
    if clause.frequency:
        words.append(clause.frequency.german)
    if clause.gladly:
        words.append("gern")
    for name in ("dative", "accusative"):
        if name not in light and front != name:
            words += spoken[name]
    if clause.negated and not _says_no(clause):
        words.append("nicht")
    if clause.manner:
        words += clause.manner.german.split()
    if clause.oblique is not None:
        preposition, case = clause.verb.frame.split("+")
        words += _contract(preposition, decline(clause.oblique, _CASES[case]))
    for phrase in (clause.companion, clause.place if front != "place" else None):
        words += _attach(phrase) if phrase else []
    return words + _predicate(clause)


def _says_no(clause: Clause) -> bool:
    """Whether kein already negates the clause."""
    return isinstance(clause.predicate, Noun) or getattr(clause.accusative, "determiner", "") == "no"


def _predicate(clause: Clause) -> list[str]:
    if isinstance(clause.predicate, Adjective):
        return [clause.predicate.german]
    if isinstance(clause.predicate, Noun):
        phrase = NounPhrase(clause.predicate, "no" if clause.negated else "", agreement(clause.subject)[1])
        return decline(phrase, "nominative")
    return []


def order_clause(clause: Clause, order: Order, front: str = "") -> list[str]:
    """The words of a clause, its verb second, first (questions), last (subordinate) or an infinitive with zu.

    `front` names the phrase before a verb in second position: time, place, accusative, or "" for the subject.
    """
    subject = decline(clause.subject, "nominative")
    middle = _middle(clause, front)
    if order == "infinitive":
        return [*middle, *_to_infinitive(clause.verb)]
    finite, closing = _verb_words(clause)
    if order == "last":
        if closing == [clause.verb.prefix]:
            return [*subject, *middle, closing[0] + finite]
        return [*subject, *middle, *closing, finite]
    if order == "first":
        return [finite, *subject, *middle, *closing]
    if not front:
        return [*subject, finite, *middle, *closing]
    if front == "time" and clause.time:
        subject = [*clause.time.german.split(), finite, *subject]
    elif front == "place" and clause.place:
        subject = [*_attach(clause.place), finite, *subject]
    elif front == "accusative" and clause.accusative:
        subject = [*decline(clause.accusative, "accusative"), finite, *subject]
    else:
        raise ValueError(f"the clause has no {front} phrase to put first")
    return [*subject, *middle, *closing]


def _to_infinitive(verb: Verb) -> list[str]:
    return [f"{verb.prefix}zu{verb.infinitive}"] if verb.prefix else ["zu", verb.infinitive]


def to_german(sentence: Sentence) -> str:
    """The German sentence, with initial capital and final punctuation."""
    if isinstance(sentence, Statement):
        return tidy(order_clause(sentence.clause, "second", sentence.front), ".")
    if isinstance(sentence, Question):
        word = [sentence.word.german] if sentence.word else []
        return tidy([*word, *order_clause(sentence.clause, "first")], "?")
    if isinstance(sentence, WithInfinitive):
        infinitive = order_clause(sentence.infinitive, "infinitive")
        return tidy([*order_clause(sentence.main, "second"), ",", *infinitive], ".")
    return tidy(_compound(sentence), ".")


def _compound(sentence: Compound) -> list[str]:
    conjunction = sentence.conjunction.german
    if sentence.coordinate:
        main = order_clause(sentence.main, "second")
        return [*main, ",", conjunction, *order_clause(sentence.second, "second")]
    second = [conjunction, *order_clause(sentence.second, "last")]
    if sentence.second_first:
        return [*second, ",", *order_clause(sentence.main, "first")]
    return [*order_clause(sentence.main, "second"), ",", *second]
