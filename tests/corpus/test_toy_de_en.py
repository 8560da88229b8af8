"""The text of the toy grammar: sentences that were read, its words, and the pronouns of documents."""

import collections
import hashlib
import re

import pytest

from flaxformer_mt.corpus.toy import grammar as toy

# Generated pairs that a speaker of both languages has read, each for a rule of the grammar.
SENTENCES = """
Er steht nie auf. | He never gets up.
Er macht selten Peters Koffer auf. | He rarely opens Peter's suitcases.
Heute spielt die kranke Kuh mit den Hunden. | Today the sick cow plays with the dogs.
Den Koffer wird der Mann mir nicht schicken. | The man will not send me the suitcase.
Ihr wolltet tanzen, weil Karin heute getanzt hat. | You wanted to dance because Karin danced today.
Wenn die jungen Mädchen singen, stehe ich auf. | If the young girls sing, I get up.
Er glaubt, dass Richter ihn nicht lieben. | He believes that judges do not love him.
Ich esse keinen Apfel. | I do not eat an apple.
Sie liebt keine Könige. | She does not love any kings.
Kein Gast vergisst, die Vögel zu verkaufen. | No guest forgets to sell the birds.
Peter muss nicht nach Berlin fahren. | Peter does not have to drive to Berlin.
Wem hört der Bauer am Montag zu? | Who does the farmer listen to on Monday?
Die reichen Bauern, die wir kennen, wollten uns einladen. | The rich farmers that we know wanted to invite us.
Die kranken Söhne haben die Regenschirme des Mädchens. | The sick sons have the girl's umbrellas.
Wer hat dem alten Kind die Zeitung gegeben? | Who gave the old child the newspaper?
Sie zeigt uns heute unseren Regenschirm. | She shows us our umbrella today.
Er wartet nicht auf mich. | He does not wait for me.
Wir laufen oft ins Haus. | We often run into the house.
Der König wird nächstes Jahr den Mantel ausziehen. | The king will take off the coat next year.
Ein Vater hatte ein schwarzes Pferd. | A father had a black horse.
"""


@pytest.fixture(scope="module")
def splits():
    from flaxformer_mt.corpus.toy.toy_de_en import SIZES

    return toy.make_pairs(tuple(SIZES.values()))


def test_version_belongs_to_the_text(splits):
    from flaxformer_mt.corpus.toy.toy_de_en import TEXT_DIGEST, VERSION

    lines = (f"{german}\t{english}\n" for pairs in splits for german, english in pairs)
    digest = hashlib.blake2b("".join(lines).encode(), digest_size=8).hexdigest()
    assert digest == TEXT_DIGEST, f"text changed: raise VERSION above {VERSION}, TEXT_DIGEST to {digest}"


def test_sentences_that_were_read_are_among_the_text(splits):
    text = {" | ".join(pair) for pair in splits[0]}
    assert not set(SENTENCES.strip().split("\n")) - text


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
