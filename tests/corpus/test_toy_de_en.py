"""The toy grammar against sentences written by hand, and the text it makes as a whole."""

import collections
import re
import subprocess
import sys

import pytest

from flaxformer_mt.corpus.toy import function_words as words
from flaxformer_mt.corpus.toy.english import third_person, to_english
from flaxformer_mt.corpus.toy.german import conjugate, decline, to_german
from flaxformer_mt.corpus.toy.grammar import LONGEST, SHORTEST, digest_pairs, generate_sentence, make_pairs
from flaxformer_mt.corpus.toy.lexicon import ADJECTIVES, NOUNS, VERBS, Adverb, Name
from flaxformer_mt.corpus.toy.phrases import RandomChoices
from flaxformer_mt.corpus.toy.syntax import (
    Clause,
    Compound,
    Gap,
    NounPhrase,
    PrepositionalPhrase,
    Question,
    Relative,
    Statement,
    WithInfinitive,
)

ICH, DU, ER, SIE, WIR, IHR, THEY = words.PRONOUNS
CAN, HAVE_TO, WANT, SHOULD, MAY, WOULD_LIKE = words.MODALS
TODAY, YESTERDAY = words.TIMES[0], words.TIMES[1]
OFTEN = words.FREQUENCIES[0]
ANNA = Name("Anna", "Anna")


def noun(german):
    return next(noun for noun in NOUNS if noun.german == german)


def adjective(german):
    return next(adjective for adjective in ADJECTIVES if adjective.german == german)


def verb(infinitive, frame=None):
    return next(v for v in VERBS if v.prefix + v.infinitive == infinitive and frame in (None, v.frame))


def phrase(german, determiner="the", plural=False, how=None, **more):
    return NounPhrase(noun(german), determiner, plural, adjective(how) if how else None, **more)


def clause(subject, infinitive, *args, **more):
    return Clause(subject, verb(infinitive), *args, **more)


HUND, FRAU, KIND = phrase("Hund"), phrase("Frau"), phrase("Kind")
BUCH, BRIEF = phrase("Buch"), phrase("Brief")
GARTEN = PrepositionalPhrase(words.IN, phrase("Garten"))
READS = clause(ER, "lesen", accusative=BUCH)
READ = clause(ER, "lesen", "past", accusative=BUCH)
GETS_UP = clause(SIE, "aufstehen")

SENTENCES = {
    "V2": (Statement(READS), "Er liest das Buch.", "He reads the book."),
    "inversion after a time": (
        Statement(clause(FRAU, "lesen", accusative=BUCH, time=TODAY), "time"),
        "Heute liest die Frau das Buch.",
        "Today the woman reads the book.",
    ),
    "inversion after a place": (
        Statement(clause(KIND, "schlafen", place=GARTEN), "place"),
        "Im Garten schläft das Kind.",
        "In the garden the child sleeps.",
    ),
    "an object in front": (
        Statement(clause(FRAU, "sehen", accusative=phrase("Hund", how="alt")), "accusative"),
        "Den alten Hund sieht die Frau.",
        "The woman sees the old dog.",
    ),
    "verb last: weil": (
        Compound(GETS_UP, Adverb("weil", "because"), READ),
        "Sie steht auf, weil er das Buch gelesen hat.",
        "She gets up because he read the book.",
    ),
    "subordinate clause first": (
        Compound(GETS_UP, Adverb("wenn", "if"), READS, second_first=True),
        "Wenn er das Buch liest, steht sie auf.",
        "If he reads the book, she gets up.",
    ),
    "verb last, separable, with a modal": (
        Compound(
            clause(ICH, "hoffen"),
            Adverb("dass", "that"),
            clause(SIE, "aufstehen", modal=CAN, negated=True),
        ),
        "Ich hoffe, dass sie nicht aufstehen kann.",
        "I hope that she cannot get up.",
    ),
    "verb last, separable, in one word": (
        Compound(clause(WIR, "wissen"), Adverb("dass", "that"), GETS_UP),
        "Wir wissen, dass sie aufsteht.",
        "We know that she gets up.",
    ),
    "two main clauses": (
        Compound(READS, Adverb("aber", "but"), clause(FRAU, "schlafen"), coordinate=True),
        "Er liest das Buch, aber die Frau schläft.",
        "He reads the book, but the woman sleeps.",
    ),
    "separable": (
        Statement(clause(DU, "aufräumen", accusative=phrase("Küche"))),
        "Du räumst die Küche auf.",
        "You clean up the kitchen.",
    ),
    "separable perfect with sein": (
        Statement(clause(THEY, "aufstehen", "past", time=YESTERDAY)),
        "Sie sind gestern aufgestanden.",
        "They got up yesterday.",
    ),
    "perfect with haben": (Statement(READ), "Er hat das Buch gelesen.", "He read the book."),
    "past of haben": (
        Statement(clause(ICH, "haben", "past", accusative=phrase("Apfel", "a"))),
        "Ich hatte einen Apfel.",
        "I had an apple.",
    ),
    "future": (
        Statement(clause(WIR, "lesen", "future", accusative=BUCH, negated=True)),
        "Wir werden das Buch nicht lesen.",
        "We will not read the book.",
    ),
    "nicht before the place": (
        Statement(clause(ER, "schlafen", place=GARTEN, negated=True)),
        "Er schläft nicht im Garten.",
        "He does not sleep in the garden.",
    ),
    "kein, singular": (
        Statement(clause(ER, "kaufen", accusative=phrase("Hut", "no", how="blau"), negated=True)),
        "Er kauft keinen blauen Hut.",
        "He does not buy a blue hat.",
    ),
    "kein, plural": (
        Statement(clause(SIE, "kaufen", "past", accusative=phrase("Apfel", "no", True), negated=True)),
        "Sie hat keine Äpfel gekauft.",
        "She did not buy any apples.",
    ),
    "kein subject": (
        Statement(clause(phrase("Kind", "no"), "schlafen")),
        "Kein Kind schläft.",
        "No child sleeps.",
    ),
    "must and does not have to": (
        Statement(clause(ER, "arbeiten", modal=HAVE_TO, negated=True)),
        "Er muss nicht arbeiten.",
        "He does not have to work.",
    ),
    "modal past": (
        Statement(clause(THEY, "schlafen", "past", WANT)),
        "Sie wollten schlafen.",
        "They wanted to sleep.",
    ),
    "would like to": (
        Question(clause(IHR, "schlafen", modal=WOULD_LIKE)),
        "Möchtet ihr schlafen?",
        "Would you like to sleep?",
    ),
    "yes or no": (Question(READS), "Liest er das Buch?", "Does he read the book?"),
    "yes or no, perfect": (Question(READ), "Hat er das Buch gelesen?", "Did he read the book?"),
    "who, subject": (
        Question(clause(Gap(), "sehen", accusative=HUND), Adverb("wer", "who")),
        "Wer sieht den Hund?",
        "Who sees the dog?",
    ),
    "who, object": (
        Question(clause(FRAU, "zuhören", dative=Gap()), Adverb("wem", "who")),
        "Wem hört die Frau zu?",
        "Who does the woman listen to?",
    ),
    "where": (
        Question(clause(DU, "wohnen", "past"), Adverb("wo", "where")),
        "Wo hast du gewohnt?",
        "Where did you live?",
    ),
    "indirect question": (
        Compound(clause(ICH, "wissen", negated=True), Adverb("ob", "whether"), GETS_UP),
        "Ich weiß nicht, ob sie aufsteht.",
        "I do not know whether she gets up.",
    ),
    "infinitive with zu inside a separable verb": (
        WithInfinitive(clause(ER, "versuchen", "past"), clause(Gap(), "aufstehen")),
        "Er hat versucht, aufzustehen.",
        "He tried to get up.",
    ),
    "infinitive with zu": (
        WithInfinitive(clause(ANNA, "vergessen"), clause(Gap(), "schreiben", accusative=BRIEF)),
        "Anna vergisst, den Brief zu schreiben.",
        "Anna forgets to write the letter.",
    ),
    "relative, subject": (
        Statement(
            clause(
                NounPhrase(
                    noun("Frau"),
                    relative=Relative("subject", clause(Gap(), "helfen", dative=phrase("Kind", plural=True))),
                ),
                "lachen",
            )
        ),
        "Die Frau, die den Kindern hilft, lacht.",
        "The woman who helps the children laughs.",
    ),
    "relative, accusative, before a separable prefix": (
        Statement(
            clause(
                ICH,
                "abholen",
                accusative=NounPhrase(
                    noun("Hund"), relative=Relative("accusative", clause(FRAU, "suchen", accusative=Gap()))
                ),
            )
        ),
        "Ich hole den Hund, den die Frau sucht, ab.",
        "I pick up the dog that the woman looks for.",
    ),
    "relative, dative plural": (
        Statement(
            clause(
                NounPhrase(
                    noun("Schüler"),
                    plural=True,
                    relative=Relative("dative", clause(WIR, "helfen", "past", dative=Gap())),
                ),
                "tanzen",
            )
        ),
        "Die Schüler, denen wir geholfen haben, tanzen.",
        "The pupils that we helped dance.",
    ),
    "genitive of a person": (
        Statement(clause(ER, "verkaufen", accusative=phrase("Haus", how="alt", owner=phrase("Student")))),
        "Er verkauft das alte Haus des Studenten.",
        "He sells the student's old house.",
    ),
    "genitive of persons": (
        Statement(
            clause(ER, "lesen", accusative=phrase("Buch", owner=phrase("Lehrer", plural=True))),
        ),
        "Er liest das Buch der Lehrer.",
        "He reads the teachers' book.",
    ),
    "genitive of a thing": (
        Statement(clause(ER, "aufmachen", accusative=phrase("Fenster", owner=phrase("Haus", "our")))),
        "Er macht das Fenster unseres Hauses auf.",
        "He opens the window of our house.",
    ),
    "genitive of a name": (
        Statement(clause(phrase("Hund", how="klein", owner=ANNA), "schlafen")),
        "Annas kleiner Hund schläft.",
        "Anna's small dog sleeps.",
    ),
    "two objects": (
        Statement(clause(FRAU, "geben", "past", accusative=phrase("Ei", "a"), dative=phrase("Mann"))),
        "Die Frau hat dem Mann ein Ei gegeben.",
        "The woman gave the man an egg.",
    ),
    "pronouns come early": (
        Statement(clause(FRAU, "zeigen", accusative=BUCH, dative=ICH, time=TODAY)),
        "Die Frau zeigt mir heute das Buch.",
        "The woman shows me the book today.",
    ),
    "particle around a pronoun": (
        Statement(clause(ER, "wegwerfen", accusative=words.IT)),
        "Er wirft es weg.",
        "He throws it away.",
    ),
    "a verb's preposition": (
        Statement(clause(ICH, "warten", oblique=phrase("Zug"), negated=True)),
        "Ich warte nicht auf den Zug.",
        "I do not wait for the train.",
    ),
    "direction": (
        Statement(
            clause(ER, "gehen", "past", place=PrepositionalPhrase(words.TO, phrase("Schule"))),
        ),
        "Er ist zur Schule gegangen.",
        "He went to the school.",
    ),
    "companion and home": (
        Statement(
            clause(
                ER,
                "kommen",
                place=words.HOME,
                companion=PrepositionalPhrase(words.COMPANIONS[1], ICH),
            )
        ),
        "Er kommt ohne mich nach Hause.",
        "He comes home without me.",
    ),
    "often": (
        Statement(clause(ER, "arbeiten", modal=HAVE_TO, frequency=OFTEN)),
        "Er muss oft arbeiten.",
        "He often has to work.",
    ),
    "gern": (
        Statement(clause(THEY, "lesen", accusative=phrase("Buch", "", True), gladly=True)),
        "Sie lesen gern Bücher.",
        "They like to read books.",
    ),
    "a profession": (
        Statement(Clause(ER, words.BE, predicate=noun("Arzt"), negated=True)),
        "Er ist kein Arzt.",
        "He is not a doctor.",
    ),
    "a property": (
        Question(Clause(phrase("Kuh", "this", True), words.BE, "past", predicate=adjective("müde"))),
        "Waren diese Kühe müde?",
        "Were these cows tired?",
    ),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_sentence_as_written_by_hand(name):
    sentence, german, english = SENTENCES[name]
    assert to_german(sentence) == german
    assert to_english(sentence) == english


# Written out from a school grammar. The cases: nominative, accusative, dative, genitive.
DECLENSIONS = {
    ("Hund", "the"): "der alte Hund, den alten Hund, dem alten Hund, des alten Hundes",
    ("Katze", "the"): "die alte Katze, die alte Katze, der alten Katze, der alten Katze",
    ("Pferd", "this"): "dieses alte Pferd, dieses alte Pferd, diesem alten Pferd, dieses alten Pferdes",
    ("Bär", "every"): "jeder alte Bär, jeden alten Bären, jedem alten Bären, jedes alten Bären",
    ("Hund", "a"): "ein alter Hund, einen alten Hund, einem alten Hund, eines alten Hundes",
    ("Katze", "no"): "keine alte Katze, keine alte Katze, keiner alten Katze, keiner alten Katze",
    ("Pferd", "our"): "unser altes Pferd, unser altes Pferd, unserem alten Pferd, unseres alten Pferdes",
    ("Vogel", ""): "alter Vogel, alten Vogel, altem Vogel, alten Vogels",
    ("Katze", ""): "alte Katze, alte Katze, alter Katze, alter Katze",
    ("Hunde", "the"): "die alten Hunde, die alten Hunde, den alten Hunden, der alten Hunde",
    ("Hunde", "my"): "meine alten Hunde, meine alten Hunde, meinen alten Hunden, meiner alten Hunde",
    ("Bären", "two"): "zwei alte Bären, zwei alte Bären, zwei alten Bären, zwei alter Bären",
    ("Hunde", ""): "alte Hunde, alte Hunde, alten Hunden, alter Hunde",
}


@pytest.mark.parametrize(("german", "determiner"), DECLENSIONS)
def test_articles_adjectives_and_nouns_agree_in_every_case(german, determiner):
    entry = next(noun for noun in NOUNS if german in (noun.german, noun.plural))
    tree = NounPhrase(entry, determiner, german != entry.german, adjective("alt"))
    forms = [" ".join(decline(tree, c)).strip() for c in ("nominative", "accusative", "dative", "genitive")]
    assert ", ".join(forms) == DECLENSIONS[german, determiner]


@pytest.mark.parametrize(
    ("infinitive", "forms"),
    {
        "suchen": "suche suchst sucht suchen sucht suchen",
        "arbeiten": "arbeite arbeitest arbeitet arbeiten arbeitet arbeiten",
        "lesen": "lese liest liest lesen lest lesen",
        "sehen": "sehe siehst sieht sehen seht sehen",
        "einladen": "lade lädst lädt laden ladet laden",
        "sitzen": "sitze sitzt sitzt sitzen sitzt sitzen",
        "laufen": "laufe läufst läuft laufen lauft laufen",
        "wissen": "weiß weißt weiß wissen wisst wissen",
    }.items(),
)
def test_conjugation(infinitive, forms):
    assert [conjugate(verb(infinitive), subject) for subject in words.PRONOUNS] == (
        [*forms.split()[:3], forms.split()[2], *forms.split()[3:]]
    )


def test_third_person():
    forms = {"go": "goes", "carry": "carries", "play": "plays", "wash": "washes", "pass": "passes"}
    assert {verb: third_person(verb) for verb in forms} == forms


def test_an_indefinite_article_has_no_plural():
    with pytest.raises(ValueError, match="plural"):
        decline(phrase("Hund", "a", True), "nominative")


def test_a_missing_phrase_cannot_stand_in_front():
    with pytest.raises(ValueError, match="no time"):
        to_german(Statement(READS, "time"))


@pytest.fixture(scope="module")
def splits():
    from flaxformer_mt.corpus.toy.toy_de_en import SIZES

    return make_pairs(tuple(SIZES.values()))


def test_version_belongs_to_the_text(splits):
    from flaxformer_mt.corpus.toy.toy_de_en import TEXT_DIGEST, VERSION

    assert digest_pairs(splits) == TEXT_DIGEST, (
        f"the text changed: raise VERSION above {VERSION}, renew TEXT_DIGEST"
    )


def test_no_sentence_occurs_twice_in_any_split(splits):
    assert [len(pairs) for pairs in splits] == [20_000, 500, 500]
    for side in (0, 1):
        sentences = [pair[side] for pairs in splits for pair in pairs]
        assert len(set(sentences)) == len(sentences)


def test_form_of_the_sentences(splits):
    for pair in (pair for pairs in splits for pair in pairs):
        for sentence in pair:
            assert re.fullmatch(r"[A-ZÄÖÜ][A-Za-zäöüßÄÖÜ' ,]*[a-zäöüßAI][.?]", sentence)
            assert not re.search(r" ,|,,|  |,\S", sentence)
            assert SHORTEST <= len(sentence.split()) <= LONGEST
        assert pair[0][-1] == pair[1][-1]


def test_vocabulary_is_rich_and_learnable(splits):
    for side in (0, 1):
        counts = [
            collections.Counter(word for pair in pairs for word in re.findall(r"\w+", pair[side].lower()))
            for pairs in splits
        ]
        assert len(counts[0]) >= 300
        for held_out in counts[1:]:
            unseen = sum(count for word, count in held_out.items() if word not in counts[0])
            assert unseen < 0.005 * held_out.total()


def test_a_word_after_an_is_one_that_takes_it(splits):
    for pairs in splits:
        for _, english in pairs:
            assert not re.search(r"\ban [^aeiou]|\ba [aeiou]", english.lower()), english


def test_verbs_stand_last_in_subordinate_clauses(splits):
    """Every clause after dass ends in a finite verb, by a list that the grammar does not use."""
    finite = {
        form for table in (words.PRESENT, words.PRETERITE) for forms in table.values() for form in forms
    }
    finite |= {form for modal in words.MODALS for form in (*modal.present, *modal.past)}
    finite |= {v.prefix + conjugate(v, subject) for v in VERBS for subject in words.PRONOUNS}
    checked = 0
    for german, _ in splits[0]:
        if (match := re.fullmatch(r"[^,]*, dass ([^,]*)\.", german)) is not None:
            assert match[1].split()[-1] in finite, german
            checked += 1
    assert checked > 500


def test_german_has_one_meaning():
    """A sentence that is grown twice has the same translation both times; short ones are grown often."""
    dice, meanings, again = RandomChoices(5), {}, 0
    for _ in range(8000):
        sentence = generate_sentence(dice)
        german = to_german(sentence)
        again += german in meanings
        assert meanings.setdefault(german, to_english(sentence)) == to_english(sentence), german
    assert again > 20


def test_text_depends_on_the_seed_alone():
    code = (
        "from flaxformer_mt.corpus.toy.grammar import digest_pairs, make_pairs; "
        "print(digest_pairs(make_pairs((200, 20), seed={seed})))"
    )
    digests = [
        subprocess.run(
            [sys.executable, "-c", code.format(seed=seed)],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": "."},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed, hash_seed in ((7, "1"), (7, "2"), (8, "1"))
    ]
    assert digests[0] == digests[1] != digests[2]
