"""Characters that nobody sees change no token of sources; joiners stay, others are as in SentencePiece."""

import dataclasses
import io
from typing import NamedTuple

import numpy as np
import pytest
import sentencepiece

from flaxformer_mt.config import VocabConfig
from flaxformer_mt.vocab import Vocab, Vocabs, make_vocabs
from flaxformer_mt.vocab.model_file import read_settings
from flaxformer_mt.vocab.words import number_pieces

# Soft hyphen, Arabic letter mark, zero-width space, marks of direction; word joiner, isolates, byte order.
NOBODY_SEES = (
    "\u00ad\u061c\u200b\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2068\u2069\ufeff"
)
RULES = ("nfkc", "nmt_nfkc", "nmt_nfkc_cf")


class Pair(NamedTuple):
    source: str
    target: str


PAIRS = [Pair(f"der Hund sieht {i} Häuser", f"the dog sees {i} houses") for i in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vocabs")


@pytest.fixture(scope="module")
def vocabs(folder) -> dict[str, Vocab]:
    """One joint vocabulary for each normalization."""
    return {
        name: make_vocabs(VocabConfig(size=330, normalization=name), PAIRS, folder / name).source
        for name in (*RULES, "identity")
    }


@pytest.mark.parametrize("name", RULES)
def test_tokens_are_those_of_the_text_without_them(vocabs, name):
    vocab, plain = vocabs[name], "der Hund sieht Häuser"
    for mark in NOBODY_SEES:
        for text in (
            f"{mark}der Hund sieht Häuser",
            f"der Hu{mark}nd sieht Häuser",
            f"der{mark} Hund {mark} sieht {mark}Häuser",
            f"der Hund sieht Häuser{mark}",
            f"{mark} {mark}der Hund sieht Häuser {mark}",
        ):
            assert vocab.tokenize(text) == vocab.tokenize(plain), ascii(text)
        assert vocab.tokenize(mark) == vocab.tokenize(f" {mark}{mark}") == [vocab.eos_id]
    # In training too, and where a text is segmented at random.
    marked = [plain.replace("u", f"u{mark}") for mark in NOBODY_SEES]
    sampled = vocab.tokenize_all(marked, sampling=0.3, seed=4)
    expected = vocab.tokenize_all([plain] * len(marked), sampling=0.3, seed=4)
    assert all(map(np.array_equal, sampled, expected))
    assert any(not np.array_equal(one, sampled[0]) for one in sampled)


def test_identity_keeps_them(vocabs):
    for mark in NOBODY_SEES:
        assert vocabs["identity"].detokenize(vocabs["identity"].tokenize(f"Hu{mark}nd")) == f"Hu{mark}nd"


@pytest.mark.parametrize("name", RULES)
def test_joiners_are_letters(vocabs, name):
    """SentencePiece makes the first of them a space, which is a spelling mistake in Persian."""
    for text in ("می\u200cخواهم", "क्\u200dष", "👩\u200d👧"):
        assert vocabs[name].detokenize(vocabs[name].tokenize(text)) == text


@pytest.mark.parametrize("name", RULES)
def test_all_other_characters_and_sequences_are_those_of_sentencepiece(folder, vocabs, name):
    assert vocabs[name]  # written
    model = (folder / name / "source.model").read_bytes()
    ours = sentencepiece.SentencePieceProcessor(model_proto=model)
    theirs = sentencepiece.SentencePieceNormalizer(rule_name=name)
    singles = [chr(c) for c in (*range(1, 0xD800), *range(0xE000, 0x30000)) if c != 0x2581]
    sequences = [text for text, _ in theirs.Decompile()]
    assert len(sequences) > 100_000
    differing = {
        text
        for text in (*singles, *sequences)
        if ours.normalize(f"a{text}b") != theirs.Normalize(f"a{text}b")
    }
    joiners = set("\u200c") if name != "nfkc" else set()
    operators = {chr(c) for c in (*range(0x2061, 0x2065), *range(0x206A, 0x2070))}
    assert differing == {*NOBODY_SEES, *operators, *joiners}


def test_a_vocabulary_has_the_name_of_its_rules_and_no_path(folder, vocabs):
    for name in vocabs:
        file = "joint.model" if name == "identity" else "source.model"
        model = (folder / name / file).read_bytes()
        assert read_settings(model).normalization == name
        assert b".tsv" not in model


def test_a_vocabulary_of_an_earlier_version_keeps_its_rules(tmp_path):
    """What a run has trained with stays: its vocabulary has the rules in it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(pair.source for pair in PAIRS),
        model_writer=model,
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        normalization_rule_name="nmt_nfkc",
        minloglevel=3,
    )
    vocab = Vocab(model.getvalue())
    Vocabs(vocab, vocab, joint=True).save(tmp_path)
    found = make_vocabs(dataclasses.replace(VocabConfig(), size=320), [], tmp_path).source
    assert found.tokenize("Hu\u200bnd") == found.tokenize("Hu nd") != found.tokenize("Hund")
    assert found.detokenize(found.tokenize("Hu\u00adnd")) == "Hu\u00adnd"


@pytest.mark.parametrize("name", RULES)
def test_words_keep_their_numbers(vocabs, name):
    """Alignments and markup count the words of the text as it was given, white space between them."""
    vocab = vocabs[name]
    text = "der\u2060 Hu\u00adnd \u200b sieht\ufeff \u202aHäuser\u202c"
    ids = np.array(vocab.tokenize(text)[:-1])
    numbers = number_pieces(vocab, ids, text)
    spelled = {number: "" for number in numbers}
    for piece, number in zip(vocab.pieces(ids), numbers, strict=True):
        spelled[number] += piece.replace("\u2581", "")
    case = str.casefold if name.endswith("_cf") else str
    assert spelled == {0: case("der"), 1: case("Hund"), 3: case("sieht"), 4: case("Häuser")}
