"""English for toy_de_en: a and an, plurals and tenses, do-support, and word order.

Contains the rules that turn the trees of syntax.py into English.
"""

from flaxformer_mt.corpus.toy.lexicon import Adjective, Adverb, Name, Noun, Pronoun
from flaxformer_mt.corpus.toy.syntax import (
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

_THIRD = {"have": "has", "be": "is", "do": "does", "go": "goes"}
_PEOPLE = ("person", "family")


def third_person(verb: str) -> str:
    """Third person singular of the present: third_person("carry") is carries."""
    if verb in _THIRD:
        return _THIRD[verb]
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return f"{verb[:-1]}ies"
    return verb + ("es" if verb.endswith(("s", "sh", "ch", "x", "z")) else "s")


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def say(phrase: Phrase, *, subject: bool) -> list[str]:
    """The words of a phrase as subject or object."""
    if isinstance(phrase, Gap):
        return []
    if isinstance(phrase, Pronoun):
        return [phrase.subject if subject else phrase.object]
    if isinstance(phrase, Name):
        return [phrase.english]
    noun = phrase.noun.english_plural if phrase.plural else phrase.noun.english
    words = [noun] if phrase.adjective is None else [phrase.adjective.english, noun]
    words = [*_determine(phrase, words[0], subject=subject), *words]
    if phrase.owner is not None and not _is_person(phrase.owner):
        words += ["of", *say(phrase.owner, subject=False)]
    if phrase.relative is not None:
        words += _relative(phrase, phrase.relative)
    return words


def _is_person(owner: NounPhrase | Name) -> bool:
    return isinstance(owner, Name) or owner.noun.kind in _PEOPLE


def _determine(phrase: NounPhrase, next_word: str, *, subject: bool) -> list[str]:
    if phrase.owner is not None and _is_person(phrase.owner):
        owner = say(phrase.owner, subject=False)
        return [*owner[:-1], owner[-1] + ("'" if owner[-1].endswith("s") else "'s")]
    word = phrase.determiner
    if word == "this":
        return ["these" if phrase.plural else "this"]
    if word == "no" and not subject:  # the negation is at the verb: not ... a, not ... any
        word = "any" if phrase.plural or phrase.noun.plural == "-" else "a"
    return [_article(next_word) if word == "a" else word]


def _relative(head: NounPhrase, relative: Relative) -> list[str]:
    who = "who" if relative.role == "subject" and head.noun.kind in _PEOPLE else "that"
    return [who, *order_clause(relative.clause)]


def _place(phrase: PrepositionalPhrase | Adverb | None) -> list[str]:
    if phrase is None:
        return []
    if isinstance(phrase, Adverb):
        return [phrase.english]
    if isinstance(phrase.phrase, Adverb):
        return [phrase.preposition.english, phrase.phrase.english]
    return [phrase.preposition.english, *say(phrase.phrase, subject=False)]


def _finite(verb: str, past: str, subject: Phrase) -> str:
    person, plural = agreement(subject)
    single = person == 3 and not plural
    if verb == "be":
        if past:
            return "was" if person != 2 and not plural else "were"
        return "is" if single else "am" if (person, plural) == (1, False) else "are"
    if past:
        return past
    return third_person(verb) if single else verb


def _verb_words(clause: Clause, *, support: bool) -> tuple[str, list[str]]:
    """The auxiliary ("": none) and the other verbs; `support` adds do where there is no other auxiliary."""
    verb, past = clause.verb.english, clause.verb.past if clause.tense == "past" else ""
    modal, tail = clause.modal, list[str]()
    if modal is not None:
        tail = [*modal.rest.split(), verb]
        verb, past = modal.english, modal.english_past if clause.tense == "past" else ""
        if modal.auxiliary:
            return past or verb, tail
    elif clause.tense == "future":
        return "will", [verb]
    elif clause.gladly:
        tail, verb = ["to", verb], "like"
    if verb == "be":
        return _finite("be", past, clause.subject), tail
    if not support:
        return "", [_finite(verb, past, clause.subject), *tail]
    return ("did" if past else _finite("do", "", clause.subject)), [verb, *tail]


def _objects(clause: Clause) -> list[str]:
    """Particle, objects and adverbs of manner: turn off the lamp, turn it off, look for the key."""
    verb, manner = clause.verb, [clause.manner.english] if clause.manner else []
    if clause.oblique is not None:
        return [verb.particle, *manner, verb.link, *say(clause.oblique, subject=False)]
    phrases = [phrase for phrase in (clause.dative, clause.accusative) if phrase is not None]
    words = [word for phrase in phrases for word in say(phrase, subject=False)]
    if clause.accusative is not None and isinstance(clause.accusative, Pronoun):
        return [verb.link, *words, verb.particle, *manner]
    link = verb.link if phrases else ""
    return [verb.particle, link, *words, *manner]


def _predicate(clause: Clause) -> list[str]:
    if isinstance(clause.predicate, Adjective):
        return [clause.predicate.english]
    if isinstance(clause.predicate, Noun):
        plural = agreement(clause.subject)[1]
        return say(NounPhrase(clause.predicate, "" if plural else "a", plural), subject=False)
    return []


def order_clause(clause: Clause, *, front: str = "", inverted: bool = False) -> list[str]:
    """The words of a clause.

    `front` (time or place) is the phrase that goes first; `inverted` puts the auxiliary before the subject.
    """
    auxiliary, verbs = _verb_words(clause, support=inverted or clause.negated)
    time = [clause.time.english] if clause.time else []
    place = _place(clause.place)
    first = time if front == "time" else place if front == "place" else []
    subject = say(clause.subject, subject=True)
    often = [clause.frequency.english] if clause.frequency else []
    negation = ["not"] if clause.negated else []
    if inverted:
        words = [auxiliary, *subject, *negation, *often, *verbs]
    elif auxiliary == "can" and negation:
        words = [*subject, "cannot", *often, *verbs]
    else:
        words = [*subject, auxiliary, *negation, *often, *verbs]
    words += [*_objects(clause), *_predicate(clause), *(place if front != "place" else [])]
    return [*first, *words, *_place(clause.companion), *(time if front != "time" else [])]


def to_english(sentence: Sentence) -> str:
    """The English sentence, with initial capital and final punctuation."""
    if isinstance(sentence, Statement):
        return tidy(order_clause(sentence.clause, front=sentence.front), ".")
    if isinstance(sentence, Question):
        word = [sentence.word.english] if sentence.word else []
        inverted = not isinstance(sentence.clause.subject, Gap)
        return tidy([*word, *order_clause(sentence.clause, inverted=inverted)], "?")
    if isinstance(sentence, WithInfinitive):
        infinitive = sentence.infinitive
        bare = [
            infinitive.verb.english,
            *_objects(infinitive),
        ]
        return tidy([*order_clause(sentence.main), "to", *bare], ".")
    return tidy(_compound(sentence), ".")


def _compound(sentence: Compound) -> list[str]:
    main, second = order_clause(sentence.main), order_clause(sentence.second)
    conjunction = sentence.conjunction.english
    if sentence.second_first:
        return [conjunction, *second, ",", *main]
    return [*main, "," if sentence.coordinate else "", conjunction, *second]
