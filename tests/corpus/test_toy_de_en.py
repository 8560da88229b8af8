"""The toy grammar against sentences written by hand, and the text it makes as a whole."""

import collections
import hashlib
import re

import pytest

from flaxformer_mt.corpus.toy import grammar as toy
from flaxformer_mt.corpus.toy import lexicon as words
from flaxformer_mt.corpus.toy.grammar import Clause, ask, make_name, make_noun, own, state, subordinate

ICH, DU, ER, SIE, WIR, _, THEY = toy.PRONOUNS
CAN, HAVE_TO, WANT, *_ = words.MODALS
TODAY = words.TIMES[0][:2]
NOT = ("nicht", "not")
BECAUSE, THAT = ("weil", "because"), ("dass", "that")


def phrase(german, determiner="the", plural=False, how=None):
    noun = next(noun for noun in words.NOUNS if noun.german == german)
    adjective = next((one for one in words.ADJECTIVES if one.german.split("/")[0] == how), None)
    return make_noun(noun, determiner, plural, adjective)


def verb(infinitive):
    return next(verb for verb in [*words.VERBS, words.BE] if verb.prefix + verb.german == infinitive)


def clause(subject, infinitive, tense="present", modal=None, *, objects=(), **slots):
    """A clause with its objects, a dict from accusative, dative and object (after a preposition)."""
    found = Clause(subject, verb(infinitive), tense, modal, slots)
    for name, one in dict(objects).items():
        found.add(name, one)
    return found


def acc(subject, infinitive, one, *args, **slots):
    return clause(subject, infinitive, *args, objects={"accusative": one}, **slots)


HUND, FRAU, BUCH = phrase("Hund"), phrase("Frau"), phrase("Buch")
GARTEN = (toy.contract("in", phrase("Garten").german["dative"]), "in the garden")
READS, READ = acc(ER, "lesen", BUCH), acc(ER, "lesen", BUCH, "past")
GETS_UP, GAP = clause(SIE, "aufstehen"), make_name("")

SENTENCES = {
    "Er liest das Buch. | He reads the book.": state(READS),
    "Heute liest die Frau das Buch. | Today the woman reads the book.": state(
        acc(FRAU, "lesen", BUCH, time=TODAY),
        "time",
    ),
    "Den alten Hund sieht die Frau. | The woman sees the old dog.": state(
        acc(FRAU, "sehen", phrase("Hund", how="alt")),
        "accusative",
    ),
    "Sie steht auf, weil er das Buch gelesen hat. | She gets up because he read the book.": subordinate(
        GETS_UP,
        BECAUSE,
        READ,
    ),
    "Wenn er das Buch liest, steht sie auf. | If he reads the book, she gets up.": subordinate(
        GETS_UP,
        ("wenn", "if"),
        READS,
        second_first=True,
    ),
    "Ich hoffe, dass sie nicht aufstehen kann. | I hope that she cannot get up.": subordinate(
        clause(ICH, "hoffen"),
        THAT,
        clause(SIE, "aufstehen", modal=CAN, **{"not": NOT}),
    ),
    "Du räumst die Küche auf. | You clean up the kitchen.": state(acc(DU, "aufräumen", phrase("Küche"))),
    "Ich hatte einen Apfel. | I had an apple.": state(acc(ICH, "haben", phrase("Apfel", "a"), "past")),
    "Wir werden das Buch nicht lesen. | We will not read the book.": state(
        acc(WIR, "lesen", BUCH, "future", **{"not": NOT}),
    ),
    "Er schläft nicht im Garten. | He does not sleep in the garden.": state(
        clause(ER, "schlafen", place=GARTEN, **{"not": NOT}),
    ),
    "Er kauft keinen blauen Hut. | He does not buy a blue hat.": state(
        acc(ER, "kaufen", phrase("Hut", "no", how="blau"), **{"not": ("", "not")}),
    ),
    "Kein Kind schläft. | No child sleeps.": state(clause(phrase("Kind", "no"), "schlafen")),
    "Er muss nicht arbeiten. | He does not have to work.": state(
        clause(ER, "arbeiten", modal=HAVE_TO, **{"not": NOT}),
    ),
    "Sie wollten schlafen. | They wanted to sleep.": state(clause(THEY, "schlafen", "past", WANT)),
    "Hat er das Buch gelesen? | Did he read the book?": ask(READ),
    "Wer sieht den Hund? | Who sees the dog?": ask(acc(GAP, "sehen", HUND), ("wer", "who")),
    "Wem hört die Frau zu? | Who does the woman listen to?": ask(
        clause(FRAU, "zuhören", objects={"dative": GAP}),
        ("wem", "who"),
    ),
    "Er hat versucht, aufzustehen. | He tried to get up.": toy.try_to(
        clause(ER, "versuchen", "past"),
        clause(GAP, "aufstehen"),
    ),
    "Die Frau, die den Kindern hilft, lacht. | The woman who helps the children laughs.": state(
        clause(
            toy.relate(
                FRAU,
                "nominative",
                clause(GAP, "helfen", objects={"dative": phrase("Kind", plural=True)}),
            ),
            "lachen",
        ),
    ),
    "Er verkauft das alte Haus des Studenten. | He sells the student's old house.": state(
        acc(ER, "verkaufen", own(phrase("Haus", how="alt"), phrase("Student"))),
    ),
    "Er liest das Buch der Lehrer. | He reads the teachers' book.": state(
        acc(ER, "lesen", own(BUCH, phrase("Lehrer", plural=True))),
    ),
    "Annas kleiner Hund schläft. | Anna's small dog sleeps.": state(
        clause(own(phrase("Hund", how="klein"), make_name("Anna")), "schlafen"),
    ),
    "Die Frau hat dem Mann ein Ei gegeben. | The woman gave the man an egg.": state(
        clause(FRAU, "geben", "past", objects={"accusative": phrase("Ei", "a"), "dative": phrase("Mann")}),
    ),
    "Die Frau zeigt mir heute das Buch. | The woman shows me the book today.": state(
        clause(FRAU, "zeigen", objects={"accusative": BUCH, "dative": ICH}, time=TODAY),
    ),
    "Ich warte nicht auf den Zug. | I do not wait for the train.": state(
        clause(ICH, "warten", objects={"object": phrase("Zug")}, **{"not": NOT}),
    ),
    "Waren diese Pferde müde? | Were these horses tired?": ask(
        clause(phrase("Pferd", "this", True), "sein", "past", predicate=("müde", "tired")),
    ),
}


@pytest.mark.parametrize("written", SENTENCES)
def test_sentence_as_written_by_hand(written):
    assert " | ".join(SENTENCES[written]) == written


@pytest.fixture(scope="module")
def splits():
    from flaxformer_mt.corpus.toy.toy_de_en import SIZES

    return toy.make_pairs(tuple(SIZES.values()))


def test_version_belongs_to_the_text(splits):
    from flaxformer_mt.corpus.toy.toy_de_en import TEXT_DIGEST, VERSION

    lines = (f"{german}\t{english}\n" for pairs in splits for german, english in pairs)
    digest = hashlib.blake2b("".join(lines).encode(), digest_size=8).hexdigest()
    assert digest == TEXT_DIGEST, f"text changed: raise VERSION above {VERSION}, TEXT_DIGEST to {digest}"


def test_no_sentence_occurs_twice_in_any_split(splits):
    assert [len(pairs) for pairs in splits] == [20_000, 500, 500]
    for side in (0, 1):
        sentences = [pair[side] for pairs in splits for pair in pairs]
        assert len(set(sentences)) == len(sentences)


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


def test_german_has_one_meaning():
    """A sentence that is grown twice has the same translation both times; short ones are grown often."""
    dice, meanings, again = toy.Dice(5), {}, 0
    for _ in range(12_000):
        german, english = dice.pick(toy._KINDS)(dice)
        again += german in meanings
        assert meanings.setdefault(german, english) == english, german
    assert again > 20


def test_pronouns_of_documents_are_decided_by_the_line_before(tmp_path):
    folder = toy.write_documents(tmp_path)
    content = b"".join(file.read_bytes() for file in sorted(folder.glob("*.[de]*")))
    assert hashlib.blake2b(content, digest_size=8).hexdigest() == "266ac457d7ac9906", "raise the version"
    for split, size in toy.DOCUMENTS.items():
        german, english, ids = (
            (folder / f"{split}.{name}").read_text("utf-8").split("\n")[:-1]
            for name in ("de", "en", "documents")
        )
        assert len(german) == len(english) == len(ids) == 2 * size and ids[::2] == ids[1::2]
        pronouns = collections.Counter()
        for line, translation in zip(german[1::2], english[1::2], strict=True):
            (named,) = {"Er", "Sie"} & set(re.findall("\\w+", line.title()))
            (pronoun,) = {"He", "She", "It"} & set(re.findall("\\w+", translation.title()))
            pronouns[named, pronoun] += 1
        kinds = [("Er", "He"), ("Er", "It"), ("Sie", "She"), ("Sie", "It")]
        assert all(abs(pronouns[kind] - size / 4) < 2 for kind in kinds) and len(pronouns) == 4
