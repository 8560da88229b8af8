"""The grammar of toy_de_en: generates each sentence in German and English at once, phrase by phrase.

A clause is a verb with a subject and slots. A slot has the words of both languages, and each language orders
the slots differently. All random choices come from one seed, so the text is the same on every machine.
"""

import random
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from flaxformer_mt.atomic_folder import artifact
from flaxformer_mt.corpus.toy import lexicon as words
from flaxformer_mt.corpus.toy.lexicon import PEOPLE, VERBS, Adjective, Modal, Noun, Verb

Both = tuple[str, str]  # German and English words

SEED = 20_110
SHORTEST, LONGEST = 4, 16  # words, on both sides
CASES = ("nominative", "accusative", "dative", "genitive")


def _table(rows: str) -> dict[str, list[str]]:
    """Read a table of endings: one row per case, with the columns masculine, feminine, neuter and plural."""
    return dict(zip(CASES, (row.replace("-", "").split(" ") for row in rows.split(" / ")), strict=False))


_DEFINITE = _table("der die das die / den die das die / dem der dem den / des der des der")
_DIES = _table("er e es e / en e es e / em er em en / es er es er")  # dieser, jeder
_EIN = _DIES | _table("- e - e / en e - e")  # ein, kein, mein
_WEAK = _table("e e e en / en e e en / en en en en / en en en en")  # adjectives after der, dieser, jeder
_MIXED = _WEAK | _table("er e es en / en e es en")  # after ein, kein, mein
_STRONG = _DIES | {"genitive": ["en", "er", "en", "er"]}  # after a number or nothing
_NONE = _table("- - - - / - - - - / - - - - / - - - -")
_ARTICLES = dict.fromkeys(words.STEMS, (_EIN, _MIXED)) | dict.fromkeys(("this", "every"), (_DIES, _WEAK))
_ARTICLES["the"] = _DEFINITE, _WEAK
_STEMS: dict[str, str] = words.STEMS | words.NUMBERS
_CONTRACTIONS = {"in dem": "im", "in das": "ins", "zu dem": "zum", "zu der": "zur", "an das": "ans"}
_PRESENT = {"haben": "habe hast hat haben habt haben", "wissen": "weiß weißt weiß wissen wisst wissen"}
_PRESENT |= {"sein": "bin bist ist sind seid sind", "werden": "werde wirst wird werden werdet werden"}
_PRETERITE = {"haben": ("hatte", "hatten"), "sein": ("war", "waren")}
# The order of slots after the German finite verb and after the English verb; it, me: pronouns as objects.
_GERMAN_ORDER = "it me time often dative accusative not object place predicate".split()
_ENGLISH_ORDER = "particle link me dative it accusative after predicate object place time".split()
# Stative verbs, which are used without a time and without a modal verb.
_STATES = ("kennen", "lieben", "gehören", "haben", "brauchen", "wohnen", "glauben")
_TENSES = {"present": 4, "past": 3.5, "future": 1}
_AT = {("in", "dative", "in"): 7, ("vor", "dative", "in front of"): 1, ("hinter", "dative", "behind"): 1}
_TO = {("in", "accusative", "into"): 1, ("zu", "dative", "to"): 1}
_FREE = [verb for verb in VERBS if verb.frame not in ("dass", "zu")]


class Dice(random.Random):
    """Makes random choices with `random()` only, whose values Python guarantees for a given seed."""

    def pick(self, items: Collection[Any]) -> Any:
        """Pick an item; from a mapping of items to weights, pick with probability proportional to weight."""
        return self.choices(list(items), [*items.values()] if isinstance(items, Mapping) else None)[0]


def _join(*parts: str) -> str:
    return " ".join(filter(None, parts))


def decline_noun(noun: Noun, case: str, plural: bool) -> str:
    """Decline a German noun: decline_noun(Kind, "dative", True) returns "Kindern"."""
    if plural:
        return noun.plural + ("n" if case == "dative" and noun.plural[-1] not in "ns" else "")
    if "/" in noun.gender and case != "nominative":  # weak, as Student
        return noun.german + noun.gender[2:]
    if case != "genitive" or noun.gender == "f":
        return noun.german
    # Words with one syllable or a final sibilant take -es.
    vowels = "".join("v" if letter in "aeiouäöü" else " " for letter in noun.german.lower()).split()
    short = len(vowels) == 1 and noun.german[-1] not in "aeiou"
    return noun.german + ("es" if short or noun.german[-1] in "sßzx" else "s")


def conjugate(verb: Verb, person: int, plural: bool) -> str:
    """Conjugate a German verb in the present, without its prefix: conjugate(lesen, 2, False) is "liest"."""
    if verb.german in _PRESENT:
        return _PRESENT[verb.german].split()[person - 1 + 3 * plural]
    stem = verb.german.removesuffix("en")
    if plural:
        return f"{stem}{'e' * (stem[-1] in 'td')}t" if person == 2 else verb.german
    third = f"{stem}e" if verb.third == f"{stem}et" else verb.third.removesuffix("t")
    return (f"{stem}e", verb.third if third[-1] in "sßzx" else f"{third}st", verb.third)[person - 1]


def _inflect(singular: str, plural_form: str, person: int, plural: bool) -> str:
    """Inflect a German modal verb or a preterite, such as kann, kannst, kann, können, könnt, können."""
    if plural:
        stem = plural_form.removesuffix("n" if singular[-1] == "e" else "en")
        return f"{stem}t" if person == 2 else plural_form
    return singular + ("" if person != 2 else "t" if singular[-1] == "s" else "st")


def third_person(verb: str) -> str:
    """Conjugate an English verb in the third person singular: third_person("carry") returns "carries"."""
    if verb[-1] == "y" and verb[-2] not in "aeiou":
        return f"{verb[:-1]}ies"
    return "has" if verb == "have" else verb + "e" * verb.endswith(("s", "sh", "ch", "x", "z", "o")) + "s"


class Phrase(NamedTuple):
    """A phrase in both languages.

    german: the phrase by case. english: the phrase as subject and as object. light: whether it is a pronoun.
    noun: None for a name or a pronoun. column: the column of the phrase in tables of endings.
    """

    german: Mapping[str, str]
    english: Both
    person: int = 3
    plural: bool = False
    light: bool = False
    noun: Any = None  # Noun or None
    determiner: str = ""
    adjective: Adjective | None = None
    column: int = 0


def make_noun(noun: Noun, determiner: str = "the", plural: bool = False, adjective: Any = None) -> Phrase:
    """Make a noun phrase with an English `determiner`: the, a, no, every, this, my, a number or ""."""
    subject = "these" if determiner == "this" and plural else determiner
    # English negates an object at the verb: not ... a, not ... any.
    other = subject if subject != "no" else "any" if plural or not noun.plural else "a"
    single, _, irregular = noun.english.partition("/")
    head = _join(adjective.english if adjective else "", (irregular or f"{single}s") if plural else single)
    english = [_join("an" if one == "a" and head[0] in "aeiou" else one, head) for one in (subject, other)]
    column = 3 if plural else "mfn".index(noun.gender[0])
    articles, endings = _ARTICLES.get(determiner, (_NONE, _STRONG))
    german = {}
    for case in CASES:
        article = _STEMS.get(determiner, "") + articles[case][column]
        described = adjective.german.split("/")[-1] + endings[case][column] if adjective else ""
        german[case] = _join(article, described, decline_noun(noun, case, plural))
    return Phrase(german, (english[0], english[1]), 3, plural, False, noun, determiner, adjective, column)


def make_name(name: str) -> Phrase:
    """Make a phrase from a name; "" makes an empty one, for a missing subject or object."""
    return Phrase(dict.fromkeys(CASES, name), (name, name))


PRONOUNS = [
    Phrase(dict(zip(CASES, german, strict=False)), (subject, object_), int(person), bool(plural), True)
    for *german, subject, object_, person, plural in words.PRONOUNS
]
IT = Phrase({"accusative": "es"}, ("it", "it"), light=True)


def own(owned: Phrase, owner: Phrase) -> Phrase:
    """Add an owner to a definite noun phrase: Annas Hund, der Hund des Mannes."""
    genitive, said = owner.german["genitive"], owner.english[1]
    bare = make_noun(owned.noun, "", owned.plural, owned.adjective)
    german = {case: f"{owned.german[case]} {genitive}" for case in CASES}
    if owner.noun is None:
        german = {case: f"{genitive}s {bare.german[case]}" for case in CASES}
    english = f"{said}'{'s' * (said[-1] != 's')} {bare.english[0]}"
    return owned._replace(german=german, english=(english, english))


def relate(head: Phrase, case: str, clause: "Clause") -> Phrase:
    """Add a relative clause to `head`; `case` is the case of the relative pronoun."""
    pronoun = "denen" if case == "dative" and head.plural else _DEFINITE[case][head.column]
    who = "who" if case == "nominative" and head.noun and head.noun.kind in PEOPLE else "that"
    german = {c: f"{form} , {pronoun} {clause.german('last')} ," for c, form in head.german.items()}
    english = f"{head.english[0]} {who} {clause.english()}"
    return head._replace(german=german, english=(english, english))


@dataclass
class Clause:
    """A verb with a subject and slots; a slot `not` negates it, and a modal verb carries the tense."""

    subject: Phrase
    verb: Verb
    tense: str = "present"
    modal: Modal | None = None
    slots: dict[str, Both] = field(default_factory=dict)

    def add(self, name: str, phrase: Phrase) -> "Clause":
        preposition, _, case = self.verb.frame.rpartition("+")
        german, english = phrase.german[case if name == "object" else name], phrase.english[1]
        if name == "object":
            german, english = contract(preposition, german), f"{self.verb.link} {english}"
        else:  # pronouns come early in German
            name = {"accusative": "it", "dative": "me"}[name] if phrase.light else name
            self.slots["link"] = "", self.verb.link
        self.slots[name] = german, english
        return self

    def german(self, order: str, front: str = "") -> str:
        """Return the German clause; `order` is the place of the verb: "second", "first", "last" or "zu".

        In second place, the verb follows the slot `front` or, without one, the subject.
        """
        subject, prefix = self.subject.german["nominative"], self.verb.prefix
        slots, (finite, closing) = self.slots, self._german_verb()
        middle = _join(*(slots[slot][0] for slot in _GERMAN_ORDER if slot in slots and slot != front))
        if order == "zu":
            return _join(middle, f"{prefix}zu{'' if prefix else ' '}{self.verb.german}")
        if order == "last":
            return _join(subject, middle, closing + finite if closing == prefix else f"{closing} {finite}")
        lead = slots[front][0] if front else ""
        first = (lead, finite, subject) if order == "first" or front else (subject, finite)
        return _join(*first, middle, closing)

    def _german_verb(self) -> Both:
        """Return the finite verb and the word that ends the clause, as in (hat, gelesen) or (steht, auf)."""
        verb, person, plural = self.verb, self.subject.person, self.subject.plural
        past, infinitive = self.tense == "past", verb.prefix + verb.german
        if self.modal is not None:
            first, we = (self.modal.past, f"{self.modal.past}n") if past else self.modal[:2]
            return _inflect(first, we, person, plural), infinitive
        if past and infinitive in _PRETERITE:
            return _inflect(*_PRETERITE[infinitive], person, plural), ""
        if self.tense == "present":
            return conjugate(verb, person, plural), verb.prefix
        being, _, participle = verb.perfect.rpartition("/")
        auxiliary = "werden" if not past else "sein" if being else "haben"
        return _PRESENT[auxiliary].split()[person - 1 + 3 * plural], participle if past else infinitive

    def english(self, *, inverted: bool = False, front: str = "") -> str:
        """Return the English clause, slot `front` first; `inverted`: the auxiliary precedes the subject."""
        negation = "not" if "not" in self.slots else ""
        auxiliary, verbs = self._english_verb(support=inverted or bool(negation))
        if auxiliary == "can" and negation and not inverted:
            auxiliary, negation = "cannot", ""
        lead, often = (self.slots[slot][1] if slot in self.slots else "" for slot in (front, "often"))
        first = [self.subject.english[0], auxiliary][:: -1 if inverted else 1]
        return _join(lead, *first, negation, often, verbs, self.english_rest(front))

    def english_rest(self, front: str = "") -> str:
        slots = self.slots | {"after" if "it" in self.slots else "particle": ("", self.verb.particle)}
        return _join(*(slots[name][1] for name in _ENGLISH_ORDER if name in slots and name != front))

    def _english_verb(self, *, support: bool) -> Both:
        """Return the auxiliary, if any, and the other verbs; with `support`, a missing auxiliary is do."""
        verb, modal, past, tail = self.verb, self.modal, self.tense == "past", ""
        base, former = (verb.english, verb.past) if modal is None else (modal.english, modal.english_past)
        single, first = self.subject.person == 3 and not self.subject.plural, self.subject.english[0] == "I"
        if modal is not None:
            tail = _join(modal.rest, verb.english)
            if base not in ("have", "want"):
                return former if past else base, tail
        elif self.tense == "future":
            return "will", base
        elif base == "be":
            forms = ("was", "was", "were") if past else ("am", "is", "are")
            return forms[0 if first else 1 if single else 2], ""
        if support:
            return "did" if past else "does" if single else "do", _join(base, tail)
        return "", _join(former if past else third_person(base) if single else base, tail)


def contract(preposition: str, phrase: str) -> str:
    """Join a German preposition and a phrase: contract("in", "dem Haus") returns "im Haus"."""
    article, _, rest = phrase.partition(" ")
    return _join(_CONTRACTIONS.get(f"{preposition} {article}", f"{preposition} {article}"), rest)


def _finish(german: str, english: str, mark: str = ".") -> Both:
    """Fix commas, capitalize the first letter and add the mark: "was , , er tut ," becomes "Was, er tut."."""
    texts = [re.sub(r"( ,)+", ",", text).removesuffix(",") + mark for text in (german, english)]
    return texts[0][0].upper() + texts[0][1:], texts[1][0].upper() + texts[1][1:]


def state(clause: Clause, front: str = "") -> Both:
    """Make a statement; `front` is the slot that precedes the verb in German, instead of the subject."""
    return _finish(clause.german("second", front), clause.english(front=front.removeprefix("accusative")))


def ask(clause: Clause, word: Both = ("", "")) -> Both:
    """Make a question that starts with the interrogative `word` or, without one, a yes-no question."""
    english = clause.english(inverted=clause.subject.english[0] != "")
    return _finish(_join(word[0], clause.german("first")), _join(word[1], english), "?")


def subordinate(main: Clause, word: Both, second: Clause, *, second_first: bool = False) -> Both:
    german, english = f"{word[0]} {second.german('last')}", f"{word[1]} {second.english()}"
    if second_first:
        return _finish(f"{german} , {main.german('first')}", f"{english} , {main.english()}")
    return _finish(f"{main.german('second')} , {german}", f"{main.english()} {english}")


def try_to(main: Clause, infinitive: Clause) -> Both:
    english = _join(main.english(), "to", infinitive.verb.english, infinitive.english_rest())
    return _finish(f"{main.german('second')} , {infinitive.german('zu')}", english)


def _verbs_of(*frames: str) -> list[Verb]:
    return [verb for verb in VERBS if verb.frame in frames]


def _pick_noun(dice: Dice, kinds: Collection[str], other: Noun | None = None) -> Noun:
    return dice.pick([noun for noun in words.NOUNS if noun.kind in kinds and noun is not other])


def _grow_noun(dice: Dice, kinds: Collection[str], *, subject: bool = False, rich: bool = False) -> Phrase:
    """Generate a noun phrase; if `rich`, it may have an owner or a relative clause."""
    noun = _pick_noun(dice, kinds)
    plural = bool(noun.plural) and dice.random() < 0.25
    weights = {"the": 9.0, "this": 1.2, "my": 0.8, "your": 0.4, "his": 0.4, "our": 0.6}
    if plural:
        weights |= {"": 2.5} | dict.fromkeys(words.NUMBERS, 0.35)
    else:
        weights |= {"a": 4.0, "every": 0.6} if noun.plural else {"": 4.0}
    determiner = dice.pick(weights | {"no": 0.3} if subject and noun.plural else weights)
    fitting: list[Any] = [one for one in words.ADJECTIVES if noun.kind in one.kinds]
    phrase = make_noun(noun, determiner, plural, dice.pick(fitting if dice.random() < 0.25 else [None]))
    if not rich or determiner != "the" or dice.random() < 0.75:
        return phrase
    if dice.random() < 0.6:
        return _relate(dice, phrase, noun)
    owner = make_name(dice.pick(words.NAMES))
    if dice.random() < 0.7:
        determiner, plural = dice.pick({"the": 4, "my": 2, "our": 1, "this": 1}), dice.random() < 0.2
        owner = make_noun(_pick_noun(dice, PEOPLE, noun), determiner, plural)
    return own(phrase, owner)


def _relate(dice: Dice, head: Phrase, noun: Noun) -> Phrase:
    """Add a relative clause.

    Its subject is a noun only if the head is masculine, since "die das Kind sieht" is ambiguous.
    """
    case = dice.pick(["nominative", "accusative", "dative"])
    verbs = [verb for verb in _verbs_of(case) if noun.kind in verb.objects and "person" in verb.subjects]
    clear = [one for one in PRONOUNS if one.german["nominative"] != "sie"]  # sie is she or they
    subject = _grow_noun(dice, PEOPLE) if head.column == 0 and dice.random() < 0.5 else dice.pick(clear)
    if case == "nominative" or not verbs:
        verbs = [verb for verb in _verbs_of("", "accusative", "dative") if noun.kind in verb.subjects]
        case, subject = "nominative", make_name("")._replace(plural=head.plural)
    return relate(head, case, _grow_clause(dice, dice.pick(verbs), subject, hole=case)) if verbs else head


def _grow_phrase(dice: Dice, kinds: Collection[str], case: str, other: Phrase, rich: bool) -> Phrase:
    """Generate a noun phrase, or a name or pronoun that does not refer to the same person as `other`."""
    if "person" in kinds and dice.random() < 0.3:  # not: I see me
        others = [one for one in PRONOUNS if one.person == 3 or one.person != other.person]
        return dice.pick([one for one in others if one.german[case]])
    if "person" in kinds and dice.random() < 0.1:
        return make_name(dice.pick([name for name in words.NAMES if name != other.english[0]]))
    if case == "accusative" and "thing" in kinds and "person" not in kinds and dice.random() < 0.06:
        return IT
    return _grow_noun(dice, kinds, subject=case == "nominative", rich=rich)


def _grow_place(dice: Dice, verb: Verb) -> Both:
    goal = verb.frame == "goal"
    if dice.random() < 0.12:
        return ("nach Hause", "home") if goal else ("zu Hause", "at home")
    if verb.german in ("reisen", "fahren") or dice.random() < 0.2:
        german, english = dice.pick(words.CITIES)
        return f"{'nach' if goal else 'in'} {german}", f"{'to' if goal else 'in'} {english}"
    preposition, case, english = dice.pick(_TO if goal else _AT)
    determiner = dice.pick({"the": 6, "a": 2, "this": 1, "our": 0.5})
    phrase = make_noun(_pick_noun(dice, ("room", "place")), determiner)
    return contract(preposition, phrase.german[case]), f"{english} {phrase.english[1]}"


def _grow_clause(
    dice: Dice, verb: Any = None, subject: Any = None, tenses: Any = _TENSES, *, how: str = "", hole: str = ""
) -> Clause:
    """Generate a clause with a random verb, subject and tense unless given.

    `how`: "rich" for longer phrases, "bare" for no time and no negation. `hole`: case of the object to omit.
    """
    verb = verb or (words.BE if dice.random() < 0.1 else dice.pick(_FREE))
    rich, (preposition, _, case) = how == "rich", verb.frame.rpartition("+")
    subject = subject or _grow_phrase(dice, verb.subjects, "nominative", IT, rich)
    clause = Clause(subject, verb, dice.pick(tenses))
    alive = subject.noun is None or subject.noun.kind in (*PEOPLE, "animal")
    if alive and verb.german not in _STATES and clause.tense != "future" and dice.random() < 0.2:
        clause.modal = dice.pick([modal for modal in words.MODALS if modal.past or clause.tense == "present"])
    objects: dict[str, Phrase] = {}
    for name in ("dative", "accusative") if case == "both" else (case,) if case in CASES else ():
        kinds = PEOPLE if case == "both" and name == "dative" else verb.objects
        phrase = make_name("") if name == hole else _grow_phrase(dice, kinds, name, subject, rich)
        if phrase is IT and case == "both":  # not: bring her it
            phrase = _grow_noun(dice, kinds)
        objects["object" if preposition else name] = phrase
    if how != "bare":
        _negate(dice, clause, objects)
    for name, phrase in objects.items():
        clause.add(name, phrase)
    if verb is words.BE:
        kind = subject.noun.kind if subject.noun else "person"
        fitting = [one for one in words.ADJECTIVES if kind in one.kinds and one is not subject.adjective]
        german, english, _ = dice.pick(fitting)
        clause.slots["predicate"] = german.split("/")[0], english
    if case in ("place", "goal") or (case == "accusative" and rich and dice.random() < 0.1):
        clause.slots["place"] = _grow_place(dice, verb)
    negated, point = "not" in clause.slots or subject.determiner == "no", dice.random() * (1 if rich else 2)
    if how != "bare" and verb.german not in _STATES and point < 0.5:
        tense = "modal" if clause.modal and clause.tense == "present" else clause.tense
        # "Not every day" would require the negation in another position.
        times = [time for time in words.TIMES if not time[2] or tense in time[2]]
        clause.slots["time"] = dice.pick([time for time in times if not (negated and "every" in time[1])])[:2]
    elif how != "bare" and not negated and 0.5 < point < 0.65:
        clause.slots["often"] = dice.pick(words.FREQUENCIES)
    return clause


def _negate(dice: Dice, clause: Clause, objects: dict[str, Phrase]) -> None:
    """Negate some clauses: with kein if the accusative is indefinite, and never with every or a number."""
    if clause.subject.determiner in ("no", "every") or dice.random() < 0.8:
        return
    phrase, unfit = objects.get("accusative", IT), ("a", "", "every", *words.NUMBERS)
    if phrase.noun and phrase.determiner in ("a", ""):
        objects["accusative"] = make_noun(phrase.noun, "no", phrase.plural, phrase.adjective)
        clause.slots["not"] = "", "not"
    elif not any(one.noun and one.determiner in unfit for one in objects.values()):
        clause.slots["not"] = "nicht", "not"


def _grow_statement(dice: Dice) -> Both:
    clause = _grow_clause(dice, how="rich")
    fronts = {"": 4.0, "time": 3.0, "place": 2.0 * (clause.verb.frame != "goal")}
    # Only masculine forms such as "den" and "einen" mark the object; "die" and "das" may be the subject.
    first = clause.slots.get("accusative", ("", ""))[0].split(" ")[0]
    fronts["accusative"] = float(first.islower() and first.endswith("en"))
    return state(clause, dice.pick({slot: fronts[slot] for slot in fronts if slot in ("", *clause.slots)}))


def _grow_question(dice: Dice) -> Both:
    kind = dice.pick({"": 4, "wer": 1.5, "wen": 2, "wo": 1.5, "warum": 2})
    if kind == "wer":
        verb = dice.pick([verb for verb in _FREE if "person" in verb.subjects])
        return ask(_grow_clause(dice, verb, make_name("")), ("wer", "who"))
    if kind == "wen":
        verb = dice.pick(_verbs_of("accusative", "dative"))
        person = ("wem", "who") if verb.frame == "dative" else ("wen", "who")
        clause = _grow_clause(dice, verb, hole=verb.frame)
        return ask(clause, person if "person" in verb.objects else ("was", "what"))
    clause = _grow_clause(dice, dice.pick(_verbs_of("place", "goal")) if kind == "wo" else None)
    if kind == "wo":
        clause.slots = {name: both for name, both in clause.slots.items() if name not in ("place", "not")}
        return ask(clause, ("wohin", "where") if clause.verb.frame == "goal" else ("wo", "where"))
    return ask(clause, ("warum", "why") if kind else ("", ""))


def _grow_subordinate(dice: Dice) -> Both:
    """Generate two clauses in compatible tenses, joined by because, although, if or before."""
    main, kinds = _grow_clause(dice), [("weil", "because"), ("obwohl", "although"), ("bevor", "before")]
    word = dice.pick(kinds if main.tense == "past" else [*kinds, ("wenn", "if")])
    second = _grow_clause(dice, tenses={"past": 1} if main.tense == "past" else {"present": 1})
    return subordinate(main, word, second, second_first=dice.random() < 0.35)


def _grow_that(dice: Dice) -> Both:
    verb, tense = dice.pick(_verbs_of("dass")), dice.pick({"present": 7, "past": 3})
    main = Clause(_grow_phrase(dice, PEOPLE, "nominative", IT, False), verb, tense)
    second = _grow_clause(dice, tenses={"past": 1} if tense == "past" else _TENSES)
    if verb.german == "wissen" and main.subject.determiner not in ("no", "every") and dice.random() < 0.5:
        main.slots["not"] = "nicht", "not"
        return subordinate(main, dice.pick([("ob", "whether"), ("warum", "why")]), second)
    return subordinate(main, ("dass", "that"), second)


def _grow_infinitive(dice: Dice) -> Both:
    subject = _grow_phrase(dice, PEOPLE, "nominative", IT, False)
    main = Clause(subject, dice.pick(_verbs_of("zu")), dice.pick(["past", "present"]))
    unfit, verbs = (*_STATES, "vergessen", "verlieren"), _verbs_of("", "accusative", "dative", "both")
    fitting = [verb for verb in verbs if "person" in verb.subjects and verb.german not in unfit]
    return try_to(main, _grow_clause(dice, dice.pick(fitting), subject, how="bare"))


_KINDS = {_grow_statement: 9, _grow_question: 3, _grow_subordinate: 4, _grow_that: 2.5, _grow_infinitive: 1.2}


def make_pairs(sizes: Sequence[int], *, seed: int = SEED) -> list[list[Both]]:
    """Make lists of (German, English) pairs with the given sizes, in which no sentence occurs twice."""
    dice, seen, pairs = Dice(seed), set[str](), list[Both]()
    while len(pairs) < sum(sizes):
        pair = dice.pick(_KINDS)(dice)
        if all(SHORTEST <= len(text.split()) <= LONGEST for text in pair) and seen.isdisjoint(pair):
            seen.update(pair)
            pairs.append(pair)
    pairs.sort(key=lambda _: dice.random())  # later pairs are longer, because short sentences run out
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [pairs[end - size : end] for end, size in zip(ends, sizes, strict=True)]


# Adjectives for both persons and things, so that they do not reveal which of the two a pronoun means.
_SAID_OF_BOTH = ("old", "new", "small", "big", "beautiful", "expensive")
_THINGS = ("thing", "box", "clothes", "machine", "vehicle")
# Raise with every change of the documents. Sizes are numbers of documents of two lines.
DOCUMENTS_VERSION = "1"
DOCUMENTS = {"train": 6000, "valid": 250, "test": 500}


def _grow_document(dice: Dice, gender: str, *, person: bool) -> tuple[Both, Both]:
    """Generate a line with a noun and a line with its pronoun, whose English form depends on the noun."""
    fitting = [noun for noun in words.NOUNS if noun.kind in (PEOPLE if person else _THINGS)]
    noun = dice.pick([noun for noun in fitting if noun.gender[0] == gender])
    verbs = [verb for verb in _verbs_of("accusative") if noun.kind in verb.objects]
    speaker = dice.pick([one for one in PRONOUNS if one.person == 1])
    phrase = make_noun(noun, dice.pick({"the": 4, "a": 3, "this": 1, "our": 1}))
    first = Clause(speaker, dice.pick(verbs), dice.pick(_TENSES)).add("accusative", phrase)
    named = {one.german["nominative"]: one for one in PRONOUNS if one.person == 3 and not one.plural}
    pronoun = named["er" if gender == "m" else "sie"]
    second = Clause(
        pronoun if person else pronoun._replace(english=("it", "it")),
        words.BE if dice.random() < 0.5 else dice.pick(_verbs_of("place")),
        dice.pick(["present", "past"]),
    )
    if second.verb is words.BE:
        adjective = dice.pick([one for one in words.ADJECTIVES if one.english in _SAID_OF_BOTH])
        second.slots["predicate"] = adjective.german.split("/")[0], adjective.english
    else:
        second.slots["place"] = _grow_place(dice, second.verb)
    for clause in (first, second):
        times = [time for time in words.TIMES if not time[2] or clause.tense in time[2]]
        if clause.verb.german not in _STATES and dice.random() < 0.5:
            clause.slots["time"] = dice.pick(times)[:2]
    return state(first), state(second)


def write_documents(folder: Path) -> Path:
    """Write `toy_documents`, parallel German and English documents of two lines; return their folder.

    The first lines of documents are unique.
    """

    def write(partial: Path) -> None:
        dice, seen = Dice(SEED), set[str]()
        for split, size in DOCUMENTS.items():
            lines: list[Both] = []
            while len(lines) < 2 * size:
                number = len(lines) // 2
                first, second = _grow_document(dice, "mf"[number % 2], person=number % 4 < 2)
                if seen.isdisjoint(first):
                    seen.update(first)
                    lines += [first, second]
            sides = dict(zip(("de", "en"), zip(*lines, strict=True), strict=True))
            sides["documents"] = tuple(str(number // 2 + 1) for number in range(len(lines)))
            for ending, texts in sides.items():
                text = "".join(f"{line}\n" for line in texts)
                (partial / f"{split}.{ending}").write_text(text, encoding="utf-8")

    return artifact(folder / f"toy_documents-{DOCUMENTS_VERSION}", write, lambda folder, _: folder)
