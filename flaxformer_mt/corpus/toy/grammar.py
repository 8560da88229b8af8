"""Random generation of toy_de_en: sentence trees, and the German-English pairs made from them.

Contains the kinds of sentence and the combinations of tenses. All random choices come from one seed, so the
text is the same on every machine. Phrases and clauses are generated in phrases.py; german.py and english.py
turn trees into text.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from flaxformer_mt.corpus.toy.english import to_english
from flaxformer_mt.corpus.toy.german import to_german
from flaxformer_mt.corpus.toy.lexicon import VERBS, Adverb
from flaxformer_mt.corpus.toy.phrases import (
    PEOPLE,
    STATES,
    RandomChoices,
    TenseWeights,
    fill_clause,
    generate_clause,
    generate_subject,
)
from flaxformer_mt.corpus.toy.syntax import (
    Clause,
    Compound,
    Gap,
    NounPhrase,
    Question,
    Sentence,
    Statement,
    WithInfinitive,
)

SEED = 20_110
SHORTEST, LONGEST = 4, 16  # words, on both sides

_REASONS = (Adverb("weil", "because"), Adverb("obwohl", "although"))
_IF, _BEFORE, _THAT = Adverb("wenn", "if"), Adverb("bevor", "before"), Adverb("dass", "that")
_COORDINATIONS = (Adverb("aber", "but"), Adverb("und", "and"))
_INDIRECT = (Adverb("ob", "whether"), Adverb("warum", "why"), Adverb("wann", "when"))
_WHO, _WHOM, _WHAT = Adverb("wer", "who"), Adverb("wen", "who"), Adverb("was", "what")
_TO_WHOM = Adverb("wem", "who")
_WHERE, _WHERE_TO = Adverb("wo", "where"), Adverb("wohin", "where")
_WHEN, _WHY = Adverb("wann", "when"), Adverb("warum", "why")


def generate_sentence(dice: RandomChoices) -> Sentence:
    """Generates a sentence of a random kind."""
    kinds: dict[Callable[[RandomChoices], Sentence], float] = {
        _grow_statement: 9,
        _grow_question: 3,
        _grow_subordinate: 3,
        _grow_that: 2,
        _grow_indirect_question: 0.7,
        _grow_infinitive: 1.2,
        _grow_coordination: 1.2,
    }
    return dice.weigh(kinds)(dice)


def _grow_statement(dice: RandomChoices) -> Statement:
    clause = generate_clause(dice, rich=True)
    accusative = clause.accusative
    if clause.time and dice.chance(0.45):
        return Statement(clause, "time")
    if clause.place and clause.verb.frame != "goal" and dice.chance(0.3):
        return Statement(clause, "place")
    if isinstance(accusative, NounPhrase) and accusative.noun.gender == "m" and not accusative.plural:
        if dice.chance(0.15):  # only "den" tells the object from the subject, "die" and "das" do not
            return Statement(clause, "accusative")
    return Statement(clause)


def _grow_question(dice: RandomChoices) -> Question:
    kinds: dict[Callable[[RandomChoices], Question], float] = {
        _ask_whether: 4,
        _ask_who: 1.5,
        _ask_whom: 2,
        _ask_where: 1.5,
        _ask_when_or_why: 2,
    }
    return dice.weigh(kinds)(dice)


def _ask_whether(dice: RandomChoices) -> Question:
    return Question(generate_clause(dice))


def _ask_who(dice: RandomChoices) -> Question:
    verb = dice.pick(
        [verb for verb in VERBS if "person" in verb.subjects and verb.frame not in ("dass", "zu")]
    )
    return Question(fill_clause(dice, Gap(), verb), _WHO)


def _ask_whom(dice: RandomChoices) -> Question:
    verb = dice.pick([verb for verb in VERBS if verb.frame in ("acc", "dat")])
    role = "accusative" if verb.frame == "acc" else "dative"
    word = _TO_WHOM
    if role == "accusative":
        word = _WHOM if "person" in verb.objects else _WHAT
    return Question(fill_clause(dice, generate_subject(dice, verb.subjects), verb, hole=role), word)


def _ask_where(dice: RandomChoices) -> Question:
    clause = generate_clause(dice, frames=("place", "goal"))
    word = _WHERE_TO if clause.verb.frame == "goal" else _WHERE
    return Question(replace(clause, place=None, negated=False), word)


def _ask_when_or_why(dice: RandomChoices) -> Question:
    clause = generate_clause(dice)
    if clause.negated or dice.chance(0.4):  # a negated question asks why, never when
        return Question(clause, _WHY)
    return Question(replace(clause, time=None, frequency=None), _WHEN)


def _grow_subordinate(dice: RandomChoices) -> Compound:
    """Two clauses with because, although, if or before, in compatible tenses and in either order."""
    kind = dice.weigh({"reason": 5, "if": 2, "before": 1.5})
    conjunction = {"reason": dice.pick(_REASONS), "if": _IF, "before": _BEFORE}[kind]
    first: TenseWeights = {"present": 2, "past": 3, "future": 0.7, "modal": 1}
    if kind != "reason":
        first = {"present": 2, "future": 2, "modal": 1} if kind == "if" else {"present": 1, "past": 1}
    main = generate_clause(dice, moods=first)
    second: TenseWeights = {"present": 1}
    if main.tense == "past":
        second = {"past": 1}
    elif kind == "reason":
        second = {"present": 3, "past": 1, "modal": 1}
    return Compound(main, conjunction, generate_clause(dice, moods=second), second_first=dice.chance(0.35))


def _grow_that(dice: RandomChoices) -> Compound:
    main = _grow_bare(dice, "dass", past=dice.chance(0.3))
    second = generate_clause(
        dice, moods={"past": 1} if main.tense == "past" else {"present": 3, "past": 2, "future": 1}
    )
    return Compound(main, _THAT, second)


def _grow_indirect_question(dice: RandomChoices) -> Compound:
    verb = next(verb for verb in VERBS if verb.infinitive == "wissen")
    main = Clause(generate_subject(dice, PEOPLE), verb)
    if getattr(main.subject, "determiner", "") not in ("no", "every"):
        main = replace(main, negated=True)
    word = dice.pick(_INDIRECT)
    second = generate_clause(dice)
    if word.german == "wann":
        second = replace(second, time=None, frequency=None)
    return Compound(main, word, second)


def _grow_bare(dice: RandomChoices, frame: str, *, past: bool) -> Clause:
    """Generates a clause with only a subject and a verb."""
    verb = dice.pick([verb for verb in VERBS if verb.frame == frame])
    return Clause(generate_subject(dice, PEOPLE), verb, "past" if past else "present")


def _grow_infinitive(dice: RandomChoices) -> WithInfinitive:
    main = _grow_bare(dice, "zu", past=dice.chance(0.5))
    frames = ("-", "acc", "dat", "dat+acc")
    verbs = [verb for verb in VERBS if verb.frame in frames and "person" in verb.subjects]
    verb = dice.pick([verb for verb in verbs if verb.infinitive not in (*STATES, "vergessen", "verlieren")])
    # Generated with the subject of the main clause, so that no object refers to that subject.
    clause = fill_clause(dice, main.subject, verb, moods={"present": 1}, bare=True)
    return WithInfinitive(main, replace(clause, subject=Gap()))


def _grow_coordination(dice: RandomChoices) -> Compound:
    main = generate_clause(dice, moods={"present": 2, "past": 2})
    second = generate_clause(dice, moods={main.tense: 1})
    return Compound(main, dice.pick(_COORDINATIONS), second, coordinate=True)


def make_pairs(sizes: Sequence[int], *, seed: int = SEED) -> list[list[tuple[str, str]]]:
    """Makes lists of (German, English) pairs of these sizes; no sentence of either language occurs twice."""
    dice = RandomChoices(seed)
    pairs: list[tuple[str, str]] = []
    seen: set[str] = set()
    while len(pairs) < sum(sizes):
        sentence = generate_sentence(dice)
        pair = to_german(sentence), to_english(sentence)
        if not all(SHORTEST <= len(text.split()) <= LONGEST for text in pair) or not seen.isdisjoint(pair):
            continue
        seen.update(pair)
        pairs.append(pair)
    dice.shuffle(pairs)  # later pairs are longer, because short sentences run out
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [pairs[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def digest_pairs(splits: Sequence[Sequence[tuple[str, str]]]) -> str:
    """Hex digest of the whole text, which identifies a version of the grammar."""
    lines = (f"{german}\t{english}\n" for pairs in splits for german, english in pairs)
    return hashlib.blake2b("".join(lines).encode(), digest_size=8).hexdigest()
