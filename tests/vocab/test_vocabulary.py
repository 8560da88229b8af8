"""Text to ids and back, whatever the text; training is deterministic and refuses what data cannot give."""

import dataclasses
import io
import os
import re
from typing import NamedTuple

import numpy as np
import pytest
import sentencepiece

from flaxformer_mt.config import VocabConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import Vocab, Vocabs, load_vocabs, make_vocabs
from flaxformer_mt.vocab import vocabulary as vocab_module

KINDS = ("bpe", "unigram", "char", "word")
ODD_TEXTS = {
    "empty": "",
    "spaces": "   ",
    "next line": "\u0085",
    "next line inside": "ein\u0085haus",
    "tab": "ein\thaus",
    "nul": "ein\0haus",
    "emoji": "👍🏽 haus 🇩🇪",
    "visible space": "a \u2581 b",
    "symbols": "<s> </s> <pad> <unk> <0x0A>",
    "2,000 words": "haus " * 2000,
    "no spaces": "x" * 20_000,
}


class Pair(NamedTuple):
    source: str
    target: str


def make_pairs(number: int = 300) -> list[Pair]:
    animals = ["hund", "katze", "pferd", "vogel", "fisch"]
    english = ["dog", "cat", "horse", "bird", "fish"]
    return [
        Pair(f"der {animals[i % 5]} sieht {i} häuser", f"the {english[i % 5]} sees {i} houses")
        for i in range(number)
    ]


# Sizes that the pairs below support; char takes exactly as many pieces as there are characters.
SIZES = {"bpe": 400, "unigram": 320, "char": 290, "word": 400}


def small_config(kind: str = "bpe", **changes) -> VocabConfig:
    return dataclasses.replace(VocabConfig(kind=kind, size=SIZES[kind]), **changes)


@pytest.fixture(scope="module")
def vocabs(tmp_path_factory) -> dict[str, Vocab]:
    """One joint vocabulary of each kind."""
    folder = tmp_path_factory.mktemp("vocabs")
    made = {}
    for kind in KINDS:
        size = SIZES[kind] if kind != "char" else char_maximum()
        made[kind] = make_vocabs(small_config(kind, size=size), make_pairs(), folder / kind).source
    return made


def char_maximum() -> int:
    text = "".join(pair.source + pair.target for pair in make_pairs())
    return 4 + 256 + len(set(text.replace(" ", "\u2581")))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ODD_TEXTS)
def test_any_text_becomes_ids_and_one_line_again(vocabs, kind, name):
    vocab = vocabs[kind]
    ids = vocab.tokenize(ODD_TEXTS[name])
    assert ids[-1] == vocab.eos_id and ids.count(vocab.eos_id) == 1
    assert vocab.bos_id not in ids and vocab.pad_id not in ids and vocab.unk_id not in ids
    assert all(type(token) is int and 0 <= token < vocab.size for token in ids)
    text = vocab.detokenize(ids)
    assert "\n" not in text and "\r" not in text
    # With byte fallback nothing is lost but what normalisation does to white space.
    expected = " ".join(re.split(r"[ \t\u2581]+", ODD_TEXTS[name])).strip(" ")
    assert text == expected


@pytest.mark.parametrize("kind", KINDS)
def test_known_text_survives_the_round_trip(vocabs, kind):
    for pair in make_pairs(20):
        for text in pair:
            assert vocabs[kind].detokenize(vocabs[kind].tokenize(text)) == text


def test_tokenizing_many_equals_tokenizing_each(vocabs):
    texts = [*ODD_TEXTS.values(), "der hund"]
    many = vocabs["bpe"].tokenize_all(texts)
    assert [ids.tolist() for ids in many] == [vocabs["bpe"].tokenize(text) for text in texts]
    assert all(ids.dtype == np.int32 for ids in many)
    assert vocabs["bpe"].tokenize_all([]) == []


def test_detokenize_stops_at_eos_and_ignores_pad_and_bos(vocabs):
    vocab = vocabs["bpe"]
    ids = vocab.tokenize("der hund")
    tail = vocab.tokenize("die katze")
    assert vocab.detokenize([vocab.bos_id, *ids, *tail, vocab.pad_id]) == "der hund"
    assert vocab.detokenize([vocab.pad_id, *ids[:-1], vocab.pad_id]) == "der hund"
    assert vocab.detokenize(np.array(ids, np.uint16)) == "der hund"
    assert vocab.detokenize([]) == vocab.detokenize([vocab.eos_id]) == ""


def test_bytes_of_line_breaks_become_spaces(vocabs):
    vocab = vocabs["bpe"]
    newline, carriage_return, letter = (
        vocab._processor.piece_to_id(f"<0x{byte:02X}>") for byte in (10, 13, ord("k"))
    )
    assert vocab.pieces([newline, carriage_return]) == ["<0x0A>", "<0x0D>"]
    assert vocab.detokenize([letter, newline, letter, carriage_return, letter]) == "k k k"


def test_pieces_spell_the_text(vocabs):
    pieces = vocabs["bpe"].pieces(vocabs["bpe"].tokenize("der hund"))
    assert "".join(pieces) == "\u2581der\u2581hund</s>"


def test_lone_surrogates_are_the_users_mistake(vocabs):
    with pytest.raises(UserError, match="not valid Unicode.*character 4"):
        vocabs["bpe"].tokenize("ein \ud800")


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sampling_is_a_function_of_the_seed(vocabs, kind):
    vocab, texts = vocabs[kind], [pair.source for pair in make_pairs(60)]

    def sampled(seed: int, texts: list[str] = texts) -> list[list[int]]:
        return [ids.tolist() for ids in vocab.tokenize_all(texts, sampling=0.3, seed=seed)]

    first = sampled(7)
    assert sampled(8) != first
    vocab.tokenize_all(texts[:9], sampling=0.5, seed=1)  # the generator has moved on; the seed must not care
    assert sampled(7) == first
    assert first != [vocab.tokenize(text) for text in texts]
    assert [vocab.detokenize(ids) for ids in first] == texts
    assert len({tuple(ids) for ids in sampled(7, texts[:1] * 50)}) > 1
    assert sampled(2**40) != sampled(2**40 + 2**32)


def test_sampling_follows_its_rate(vocabs):
    texts = [pair.source for pair in make_pairs(60)]
    lengths = [
        sum(map(len, vocabs["bpe"].tokenize_all(texts, sampling=rate, seed=1))) for rate in (1e-9, 0.2, 1.0)
    ]
    assert lengths[0] == sum(map(len, vocabs["bpe"].tokenize_all(texts)))
    assert lengths[0] < lengths[1] < lengths[2]
    # Every merge dropped leaves characters: one for each letter, one for the space before each word, and eos.
    assert lengths[2] == sum(len(text) + 2 for text in texts)


@pytest.mark.parametrize("kind", ["char", "word"])
def test_sampling_is_refused_where_there_is_none(vocabs, kind):
    with pytest.raises(UserError, match=r"vocab\.sampling is 0\.1"):
        vocabs[kind].tokenize_all(["hund"], sampling=0.1, seed=1)
    with pytest.raises(ValueError, match="seed"):
        vocabs["bpe"].tokenize_all(["hund"], sampling=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_larger_than_the_data_is_refused_with_the_maximum(kind, tmp_path):
    config = small_config(kind, size=9000)
    with pytest.raises(UserError, match=rf"vocab\.size 9000 .*{kind}") as refusal:
        make_vocabs(config, make_pairs(), tmp_path)
    maximum = int(re.search(r"vocab\.size=(\d+)", str(refusal.value))[1])
    assert "9000" in str(refusal.value)
    assert not list(tmp_path.iterdir())
    assert (
        make_vocabs(dataclasses.replace(config, size=maximum), make_pairs(), tmp_path).source.size == maximum
    )
    with pytest.raises(UserError, match=f"set vocab.size={maximum} or less"):
        make_vocabs(dataclasses.replace(config, size=maximum + 1), make_pairs(), tmp_path / "other")


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_too_small_for_its_symbols_is_refused(kind, tmp_path):
    with pytest.raises(UserError, match=r"vocab\.size 20 is less than the \d+ .*set vocab\.size"):
        make_vocabs(small_config(kind, size=20), make_pairs(), tmp_path)


def test_an_empty_text_is_refused(tmp_path):
    for pairs in ([], [Pair("", " ")]):
        with pytest.raises(UserError, match=r"source and target text .* is empty"):
            make_vocabs(small_config(), pairs, tmp_path)


def test_an_error_of_the_pairs_comes_through_as_it_was(tmp_path):
    class Broken(list):
        def __iter__(self):
            yield from make_pairs(5)
            raise UserError("train.de line 6 is not UTF-8")

    with pytest.raises(UserError, match="^train.de line 6 is not UTF-8$"):
        make_vocabs(small_config(), Broken(make_pairs()), tmp_path)


def test_training_is_deterministic_and_ids_are_the_configs(tmp_path):
    for kind in ("bpe", "unigram"):
        config = small_config(kind, pad_id=3, bos_id=7, eos_id=0, unk_id=SIZES[kind] - 1)
        one, two = (make_vocabs(config, make_pairs(), tmp_path / f"{kind}{i}").source for i in "12")
        assert one.fingerprint == two.fingerprint
        assert (one.pad_id, one.bos_id, one.eos_id, one.unk_id) == (3, 7, 0, SIZES[kind] - 1)
        assert one.tokenize("")[-1] == 0


def test_separate_vocabularies_know_their_own_language(tmp_path):
    made = make_vocabs(small_config(joint=False, byte_fallback=False, size=60), make_pairs(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source.model", "target.model"]
    assert made.source.unk_id in made.source.tokenize("gy") and made.target.unk_id in made.target.tokenize(
        "ä"
    )
    assert made.source.unk_id not in made.source.tokenize("ä")
    assert made.source.fingerprint != made.target.fingerprint


def test_each_language_may_have_its_size_and_0_keeps_every_word(tmp_path):
    pairs = [Pair(f"ein wort{n} und wort{n // 2}", f"a word{n // 3}") for n in range(120)]
    words = {
        side: {w for pair in pairs for w in getattr(pair, side).split()} for side in ("source", "target")
    }
    config = VocabConfig(kind="word", size=0, joint=False, byte_fallback=False)
    made = make_vocabs(config, pairs, tmp_path / "all")
    assert (made.source.size, made.target.size) == (4 + len(words["source"]), 4 + len(words["target"]))
    assert make_vocabs(config, [], tmp_path / "all").source.size == made.source.size
    config = dataclasses.replace(config, source_size=50)
    made = make_vocabs(config, pairs, tmp_path / "sized")
    assert (made.source.size, made.target.size) == (50, 4 + len(words["target"]))
    assert make_vocabs(config, [], tmp_path / "sized").source.size == 50
    with pytest.raises(UserError, match=r"vocab\.size is 51, .* holds 50 source"):
        make_vocabs(dataclasses.replace(config, source_size=51), [], tmp_path / "sized")
    language_model = make_vocabs(config, pairs, tmp_path / "one", target_only=True)
    assert language_model.target.size == 4 + len(words["target"])


@pytest.mark.parametrize("normalization", ["identity", "nmt_nfkc"])
def test_joint_vocabulary_is_saved_and_loaded(tmp_path, normalization):
    """One file, or two with the same pieces if the two languages are normalized differently."""
    config = small_config(normalization=normalization)
    is_one_model = normalization == "identity"
    made = make_vocabs(config, make_pairs(), tmp_path)
    files = ["joint.model"] if is_one_model else ["source.model", "target.model"]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert (made.source is made.target) == is_one_model
    for again in (
        load_vocabs(tmp_path),
        make_vocabs(config, [], tmp_path),  # nothing to train on: it must come from the folder
    ):
        assert again.joint and again.source.fingerprint == made.source.fingerprint
        assert again.target.fingerprint == made.target.fingerprint
        assert (again.source is again.target) == is_one_model
        assert again.source.pieces(range(again.source.size)) == again.target.pieces(range(again.target.size))


def test_a_vocabulary_that_contradicts_the_config_is_refused(tmp_path):
    make_vocabs(small_config(), make_pairs(), tmp_path)
    with pytest.raises(UserError, match=r"vocab\.size is 500, .* holds 400"):
        make_vocabs(small_config(size=500), make_pairs(), tmp_path)
    with pytest.raises(UserError, match=r"vocab\.joint is False"):
        config = small_config(normalization="identity")  # one model for both languages
        make_vocabs(config, make_pairs(), tmp_path / "one")
        make_vocabs(dataclasses.replace(config, joint=False), make_pairs(), tmp_path / "one")


def test_half_a_vocabulary_is_made_again(tmp_path):
    config = small_config(joint=False, byte_fallback=False, size=60)
    made = make_vocabs(config, make_pairs(), tmp_path)
    (tmp_path / "target.model").unlink()
    with pytest.raises(UserError, match="holds no vocabulary"):
        load_vocabs(tmp_path)
    assert make_vocabs(config, make_pairs(), tmp_path).target.fingerprint == made.target.fingerprint


class Selectable(list):
    def select(self, numbers):
        return [self[number] for number in numbers]


def test_max_sentences_are_spread_over_the_data(tmp_path):
    pairs = Selectable(make_pairs(100))
    lines = vocab_module._Lines(small_config(max_sentences=20), pairs, ("source", "target"))
    numbers = [int(re.search(r"\d+", line)[0]) for line in lines]
    assert numbers == [n for n in range(9, 100, 10) for _ in range(2)]
    assert len(list(vocab_module._Lines(small_config(max_sentences=33), pairs, ("source",)))) == 33
    assert len(list(vocab_module._Lines(small_config(), make_pairs(100), ("source",)))) == 100


def test_long_lines_are_cut_not_lost(tmp_path):
    words = " ".join(f"w{i}" for i in range(3000)) + " " + "z" * 2500
    segments = list(vocab_module._split_line(words))
    assert "".join(segments) == words
    assert max(map(len, segments)) <= 1000
    assert all(part.startswith(" w") for part in segments[1:10])
    # A line that SentencePiece would skip is the only one with these letters; a trained model knows them.
    pairs = [*make_pairs(), Pair("ж ч " * 3000, "x")]
    vocab = make_vocabs(small_config(byte_fallback=False, size=200), pairs, tmp_path).source
    assert vocab.unk_id not in vocab.tokenize("ж ч")


def spm_model(**options) -> bytes:
    model = io.BytesIO()
    lines = [side for pair in make_pairs() for side in pair]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=70, minloglevel=3, **options
    )
    return model.getvalue()


def test_a_given_model_is_used_as_it_is(tmp_path):
    given = tmp_path / "given.model"
    given.write_bytes(spm_model(pad_id=3))
    made = make_vocabs(small_config(source_model=str(given)), [], tmp_path / "vocab")
    assert (made.source.size, made.source.unk_id, made.source.pad_id) == (70, 0, 3)
    assert (tmp_path / "vocab" / "joint.model").read_bytes() == given.read_bytes()
    again = make_vocabs(small_config(source_model=str(given)), [], tmp_path / "vocab")
    assert again.target.fingerprint == made.target.fingerprint
    config = small_config(joint=False, source_model=str(given), target_model=str(given))
    assert not make_vocabs(config, [], tmp_path / "two").joint


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({}, "no pad symbol.*--pad_id=N"),
        ({"pad_id": 3, "eos_id": -1}, "no eos symbol"),
        ({"eos_id": -1}, "no pad and no eos symbol.*--pad_id=N --eos_id=N"),
    ],
)
def test_a_given_model_without_its_symbols_is_refused(tmp_path, options, missing):
    given = tmp_path / "given.model"
    given.write_bytes(spm_model(**options))
    with pytest.raises(UserError, match=f"vocab.source_model .*given.model has {missing}"):
        make_vocabs(small_config(source_model=str(given)), [], tmp_path / "vocab")


def test_a_model_without_bos_starts_targets_with_pad(tmp_path):
    given = tmp_path / "given.model"
    given.write_bytes(spm_model(pad_id=3, bos_id=-1))
    vocab = Vocab.load(given)
    assert (vocab.bos_id, vocab.pad_id) == (3, 3)
    ids = vocab.tokenize("der hund")
    assert vocab.detokenize([vocab.bos_id, *ids, vocab.pad_id]) == "der hund"


def test_two_models_that_number_the_same_pieces_are_joint(tmp_path):
    def edited(score: float) -> bytes:
        model = sentencepiece_model_pb2.ModelProto.FromString(spm_model(pad_id=3))
        model.pieces[-1].score = score
        return model.SerializeToString()

    sentencepiece_model_pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    made = Vocabs(Vocab(edited(-7.0)), Vocab(edited(-8.0)), joint=True)
    made.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source.model", "target.model"]
    again = load_vocabs(tmp_path)
    assert again.joint and again.target.fingerprint == made.target.fingerprint != again.source.fingerprint


def test_a_given_model_that_is_none_is_refused(tmp_path):
    config = small_config(source_model=str(tmp_path / "absent.model"))
    with pytest.raises(UserError, match="vocab.source_model .*absent.model cannot be read"):
        make_vocabs(config, [], tmp_path / "vocab")
    for content in (b"", b"not a model", spm_model(pad_id=3)[:500]):
        (tmp_path / "absent.model").write_bytes(content)
        with pytest.raises(UserError, match="SentencePiece model; give a .model file"):
            make_vocabs(config, [], tmp_path / "vocab")
    (tmp_path / "absent.model").unlink()
    os.mkfifo(tmp_path / "absent.model")
    with pytest.raises(UserError, match="cannot be read: it is not a file, but a pipe"):
        make_vocabs(config, [], tmp_path / "vocab")
    with pytest.raises(UserError, match=r"vocab\.target_model is x"):
        make_vocabs(small_config(target_model="x"), [], tmp_path / "vocab")


def test_models_with_different_padding_are_refused(tmp_path):
    for name, pad_id in [("source", 3), ("target", 4)]:
        (tmp_path / f"{name}.model").write_bytes(spm_model(pad_id=pad_id))
    with pytest.raises(UserError, match="pad id 3, the target vocabulary 4"):
        load_vocabs(tmp_path)
    (tmp_path / "joint.model").write_bytes(spm_model(pad_id=3))
    with pytest.raises(UserError, match="both joint.model and"):
        load_vocabs(tmp_path)
