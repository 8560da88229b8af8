"""Text to ids and back, whatever the text; training, sampling, symbols, tags and shortlists."""

import collections
import gzip
import io
import itertools
import json
import math
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece
from tiny_experiment import text_data

from flaxformer_mt.config import Config, VocabConfig
from flaxformer_mt.config.checks import validate
from flaxformer_mt.corpus import word_alignment
from flaxformer_mt.corpus.pairs import Pair
from flaxformer_mt.data import learned_shortlist
from flaxformer_mt.data.learned_shortlist import ShortlistRequest, learn_lexicon, write_shortlist
from flaxformer_mt.data.prepare import prepare
from flaxformer_mt.data.token_store import TokenStore
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import Vocab, load_vocabs, make_vocabs
from flaxformer_mt.vocab import sentencepiece_vocab as vocab_module
from flaxformer_mt.vocab.pretrained_tokenizers import JsonSegmenter
from flaxformer_mt.vocab.shortlist import Shortlist
from flaxformer_mt.vocab.symbols import check_language_tags, is_one_piece

KINDS = ("bpe", "unigram", "char", "word")
ODD_TEXTS = (
    {"empty": "", "spaces": "   ", "next line": "\u0085", "next line inside": "ein\u0085haus"}
    | {"tab": "ein\thaus", "nul": "ein\0haus", "emoji": "👍🏽 haus 🇩🇪", "visible space": "a \u2581 b"}
    | {"symbols": "<s> </s> <pad> <unk> <0x0A>", "2,000 words": "haus " * 2000}
    | {"no spaces": "x" * 20_000}
)


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
    return replace(VocabConfig(kind=kind, size=SIZES[kind]), **changes)


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
    # With byte fallback nothing is lost but what normalization does to white space.
    expected = " ".join(re.split(r"[ \t\u2581]+", ODD_TEXTS[name])).strip(" ")
    assert text == expected


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


@pytest.mark.parametrize(
    ("spelled", "text"),
    [
        (b"\xf0\x9f", ""),
        (b"k\nk\rk", "k k k"),
        (b"k\xc3k", "kk"),
        ("kä".encode(), "kä"),
    ],
)
def test_bytes_of_no_character_are_left_out_and_of_line_breaks_are_spaces(vocabs, spelled, text):
    vocab = vocabs["bpe"]
    ids = [vocab._processor.piece_to_id(f"<0x{byte:02X}>") for byte in spelled]
    assert vocab.detokenize(ids) == text


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


@pytest.mark.parametrize("kind", ["char", "word"])
def test_sampling_is_refused_where_there_is_none(vocabs, kind):
    with pytest.raises(UserError, match=r"vocab\.sampling is 0\.1"):
        vocabs[kind].tokenize_all(["hund"], sampling=0.1, seed=1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_larger_than_the_data_is_refused_with_the_maximum(kind, tmp_path):
    config = small_config(kind, size=9000)
    with pytest.raises(UserError, match=rf"vocab\.size 9000 .*{kind}") as refusal:
        make_vocabs(config, make_pairs(), tmp_path)
    maximum = int(re.search(r"vocab\.size=(\d+)", str(refusal.value))[1])
    assert "9000" in str(refusal.value)
    assert not list(tmp_path.iterdir())
    assert make_vocabs(replace(config, size=maximum), make_pairs(), tmp_path).source.size == maximum
    with pytest.raises(UserError, match=f"set vocab.size={maximum} or less"):
        make_vocabs(replace(config, size=maximum + 1), make_pairs(), tmp_path / "other")


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
    assert made.source.unk_id in made.source.tokenize("gy")
    assert made.target.unk_id in made.target.tokenize("ä")
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
    config = replace(config, source_size=50)
    made = make_vocabs(config, pairs, tmp_path / "sized")
    assert (made.source.size, made.target.size) == (50, 4 + len(words["target"]))
    assert make_vocabs(config, [], tmp_path / "sized").source.size == 50
    with pytest.raises(UserError, match=r"vocab\.size is 51, .* holds 50 source"):
        make_vocabs(replace(config, source_size=51), [], tmp_path / "sized")
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
        make_vocabs(replace(config, joint=False), make_pairs(), tmp_path / "one")


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


def test_the_sentences_are_spread_over_the_data(monkeypatch):
    assert len(list(vocab_module._read_lines(small_config(), make_pairs(100), ("source",)))) == 100
    monkeypatch.setattr(vocab_module, "_MOST_SENTENCES", 20)
    pairs = Selectable(make_pairs(100))
    lines = vocab_module._read_lines(small_config(), pairs, ("source", "target"))
    numbers = [int(re.search(r"\d+", line)[0]) for line in lines]
    assert numbers == [n for n in range(9, 100, 10) for _ in range(2)]
    assert len(list(vocab_module._read_lines(small_config(), pairs, ("source",)))) == 20


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


# ---- symbols ----
PAIRS = [Pair(f"der hund sieht {i} bäume", f"the dog sees {i} trees") for i in range(60)]
SYMBOLS_SIZES = {"bpe": 330, "unigram": 290, "char": 0, "word": 0}


def test_symbols_are_one_piece_in_both_directions_and_with_sampling(tmp_path):
    for kind, size in SYMBOLS_SIZES.items():
        config = VocabConfig(kind=kind, size=size, symbols=("<BT>", ">>fr<<"))
        vocab = make_vocabs(config, PAIRS, tmp_path / kind).source
        for symbol in config.symbols:
            assert is_one_piece(vocab, symbol), (kind, symbol)
            assert vocab.detokenize(vocab.tokenize(f"{symbol} der hund")) == f"{symbol} der hund"
        assert not is_one_piece(vocab, "<XY>")
        if kind in ("bpe", "unigram"):
            sampled = vocab.tokenize_all(["<BT> der hund"] * 4, sampling=0.5, seed=1)
            assert all("<BT>" in vocab.pieces(ids) for ids in sampled)


def test_a_given_model_must_have_the_symbols(tmp_path):
    make_vocabs(VocabConfig(size=330), PAIRS, tmp_path / "without")
    given = str(tmp_path / "without" / "source.model")
    with pytest.raises(UserError, match=r"vocab.symbols has <BT>, but .*source.model splits it"):
        make_vocabs(VocabConfig(source_model=given, symbols=("<BT>",)), PAIRS, tmp_path / "given")
    make_vocabs(VocabConfig(size=331, symbols=("<BT>",)), PAIRS, tmp_path / "with")
    given = str(tmp_path / "with" / "source.model")
    assert make_vocabs(VocabConfig(source_model=given, symbols=("<BT>",)), PAIRS, tmp_path / "ok").joint


@pytest.mark.parametrize("form", ["tsv.gz", "jsonl", "de"])
def test_a_tag_that_the_vocabulary_splits_is_refused_before_training(tmp_path, form):
    """Whatever became of the table that `backtranslate` has written."""
    rows = [{"de": f"<BT> {a}", "en": b} for a, b in PAIRS]
    write_row = {"jsonl": json.dumps, "de": lambda row: row["de"]}.get(
        form, lambda row: "\t".join(row.values())
    )
    text = "".join(f"{write_row(row)}\n" for row in rows).encode()
    (tmp_path / f"train.{form}").write_bytes(gzip.compress(text) if form.endswith("gz") else text)
    if form == "de":
        (tmp_path / "train.en").write_text("".join(f"{b}\n" for _, b in PAIRS), encoding="utf-8")
    (tmp_path / "report.json").write_text('{"tag": "<BT>", "dropped": {}}')
    config = Config(data=text_data(tmp_path, max_source_length=16), vocab=VocabConfig(size=330))
    with pytest.raises(UserError, match="begin with the tag <BT>, .* --config.vocab.symbols=<BT>"):
        prepare(config)
    prepared = prepare(replace(config, vocab=VocabConfig(size=330, symbols=("<BT>",))))
    assert "<BT>" in prepared.vocabs.source.pieces(prepared.train.base[0][0])


def test_senseless_symbols_are_refused_by_name():
    for symbols in (("",), ("<a b>",), ("<BT>", "<BT>"), ("<s>",), ("<0x0A>",)):
        with pytest.raises(UserError, match=f"vocab.symbols has .*{re.escape(symbols[0])}"):
            validate(Config(vocab=VocabConfig(symbols=symbols)))


# ---- tag pieces ----
TAGS = (">>fr<<", ">>zh_Hant<<", "<from:de>")


class Tagged(list):
    tags = TAGS


def make_vocab(folder, tags=TAGS, **options):
    lines = [f"{'ab' * (i % 4)}c d{'ef' * (i % 3)} ga" for i in range(60)]
    pairs = Tagged(Pair(f">>fr<< <from:de> {line}", line) for line in lines)
    pairs.tags = tags
    settings = {"size": 40, "byte_fallback": False} | options
    return make_vocabs(VocabConfig(**settings), pairs, folder)


def test_a_tag_is_one_piece_and_counts_in_the_size(tmp_path):
    for kind, size in (("bpe", 40), ("unigram", 22), ("word", 0), ("char", 0)):
        vocab = make_vocab(tmp_path / kind, kind=kind, size=size).source
        check_language_tags(vocab, TAGS)
        assert size in (0, vocab.size)
        alone = vocab.pieces(vocab.tokenize("abc da"))
        for rate in [0.0, 0.9] if kind in ("bpe", "unigram") else [0.0]:
            for seed in range(5):
                (ids,) = vocab.tokenize_all([">>fr<< <from:de> abc da"], sampling=rate, seed=seed)
                pieces = vocab.pieces(ids)
                assert pieces[:2] == ["\u2581>>fr<<", "\u2581<from:de>"], (kind, pieces)
                assert rate or pieces[2:] == alone
    apart = make_vocab(tmp_path / "apart", joint=False, size=30)
    check_language_tags(apart.source, TAGS)
    with pytest.raises(UserError):
        check_language_tags(apart.target, TAGS)


def test_a_vocabulary_without_the_tag_is_refused(tmp_path):
    make_vocab(tmp_path / "given", tags=())
    given = make_vocab(tmp_path / "run", source_model=str(tmp_path / "given" / "source.model")).source
    with pytest.raises(UserError, match="no piece for the language tag >>fr<<, but spells it .*--new_vocab"):
        check_language_tags(given, TAGS)
    folded = make_vocab(tmp_path / "folded", normalization="nmt_nfkc_cf").source
    with pytest.raises(UserError, match="tag >>zh_Hant<<.*other than nmt_nfkc_cf"):
        check_language_tags(folded, TAGS)


# ---- subword sampling ----
SYLLABLES = ("ka", "lo", "min", "te", "ru", "abe", "of", "cig", "hid", "jo")
WORDS = ["".join(pair) for pair in itertools.product(SYLLABLES, repeat=2)][::2]
TEXT = [" ".join(np.random.default_rng(seed).choice(WORDS, 6)) for seed in range(200)]
SAMPLED_TEXTS = ["", "  two  spaces ", "日本語 unknown ✓✓", "a\u2581b", "x" * 300, "<s> tag end"]
SAMPLED_TEXTS += ["ﬁne \u0085 text", "a bc", "tag a b", "tagtag"]
# Trainer settings that change how text is divided or what is unknown.
SETTINGS = (
    {"plain": {}, "bytes": {"byte_fallback": True, "vocab_size": 330}}
    | {"symbols": {"user_defined_symbols": ["tag", "a b"]}}
    | {"crossing": {"split_by_whitespace": False}, "suffix": {"treat_whitespace_as_suffix": True}}
    | {"spaces": {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"}}
)


def train(kind: str, **settings) -> Vocab:
    model = io.BytesIO()
    special = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "minloglevel": 3}
    options = {"model_type": kind, "vocab_size": 70} | special | settings
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXT), model_writer=model, **options)
    return Vocab(model.getvalue())


@pytest.fixture(scope="module")
def subword_sampling_vocabs() -> dict[str, Vocab]:
    return {kind: train(kind) for kind in ("bpe", "unigram")}


def pieces_of(vocab: Vocab, texts: list[str], **options) -> list[tuple[str, ...]]:
    return [tuple(vocab.pieces(ids)) for ids in vocab.tokenize_all(texts, **options)]


def test_without_chance_the_segmentation_is_that_of_sentencepiece():
    """A dropout rate near 0, and an exponent that leaves the most probable segmentation alone."""
    texts = [*TEXT[:60], *SAMPLED_TEXTS]
    for kind, rate in (("bpe", 1e-15), ("unigram", 300.0)):
        for name, settings in SETTINGS.items():
            vocab = train(kind, **settings)
            expected = [ids.tolist() for ids in vocab.tokenize_all(texts)]
            sampled = [ids.tolist() for ids in vocab.tokenize_all(texts, sampling=rate, seed=1)]
            assert sampled == expected, (kind, name)
            for ids in vocab.tokenize_all(TEXT[:20], sampling=0.3, seed=1):  # others spell the text as well
                assert vocab.detokenize(ids).strip() in TEXT


def segmentations(vocab: Vocab, word: str) -> dict[tuple[str, ...], float]:
    processor, spelled, scores = vocab._processor, "\u2581" + word, {}
    for cuts in itertools.product((False, True), repeat=len(spelled) - 1):
        ends = [position + 1 for position, cut in enumerate(cuts) if cut] + [len(spelled)]
        pieces = [spelled[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        if all(processor.id_to_piece(processor.piece_to_id(piece)) == piece for piece in pieces):
            scores[tuple(pieces)] = sum(processor.get_score(processor.piece_to_id(p)) for p in pieces)
    return scores


def test_unigram_samples_have_the_probabilities_of_their_pieces(subword_sampling_vocabs):
    """Over all segmentations of a word: the product of the pieces' probabilities to the power alpha."""
    vocab, alpha, count = subword_sampling_vocabs["unigram"], 0.3, 20_000
    word = max(WORDS, key=lambda word: len(segmentations(vocab, word)))
    scores = segmentations(vocab, word)
    weights = {pieces: math.exp(alpha * score) for pieces, score in scores.items()}
    total = sum(weights.values())
    samples = pieces_of(vocab, [word] * count, sampling=alpha, seed=1)
    drawn = collections.Counter(tuple(pieces[:-1]) for pieces in samples)
    assert len(weights) > 3 and drawn.keys() <= weights.keys()
    for pieces, weight in weights.items():
        share = weight / total
        assert abs(drawn[pieces] / count - share) < 5 * math.sqrt(share * (1 - share) / count)


def test_bpe_dropout_has_the_odds_of_sentencepiece(subword_sampling_vocabs):
    """The share of each segmentation of a word, against SentencePiece's own samples."""
    vocab, rate, count = subword_sampling_vocabs["bpe"], 0.3, 20_000
    word = "minlo"
    ours = collections.Counter(pieces_of(vocab, [word] * count, sampling=rate, seed=1))
    sampling = {"enable_sampling": True, "nbest_size": -1, "alpha": rate, "add_eos": True}
    ids = vocab._processor.encode([word] * count, **sampling, return_type=int)
    theirs = collections.Counter(tuple(vocab.pieces(row)) for row in ids)
    assert len(ours) > 3
    for pieces in ours.keys() | theirs.keys():
        share = (ours[pieces] + theirs[pieces]) / (2 * count)
        difference = abs(ours[pieces] - theirs[pieces]) / count
        assert difference < 6 * math.sqrt(2 * share * (1 - share) / count)


def test_unused_pieces_are_taken_apart_again(subword_sampling_vocabs):
    """A merge may pass through a piece that is marked as unused, which is not part of the result."""
    from flaxformer_mt.vocab.model_file import NORMAL, UNKNOWN, UNUSED, Piece
    from flaxformer_mt.vocab.subword_sampling import BpeDropout

    pieces = [Piece("?", 0, UNKNOWN), *(Piece(letter, 0, NORMAL) for letter in "abc")]
    pieces += [Piece("ab", -1, UNUSED), Piece("abc", -2, NORMAL)]
    ids = BpeDropout(pieces, 1e-15).sample(["abc", "abx", "xy"], seed=np.random.SeedSequence(1), end=9)
    assert [row.tolist() for row in ids] == [[5, 9], [1, 2, 0, 9], [0, 9]]


# ---- shortlist ----
class Pieces:
    eos_id, unk_id = 1, 2

    def __init__(self, *pieces):
        self._pieces = ["<pad>", "</s>", "<unk>", *pieces]
        self.size = len(self._pieces)

    def pieces(self, ids):
        return [self._pieces[number] for number in ids]


VOCABS = SimpleNamespace(
    source=Pieces("▁der", "▁Hund", "▁bellt"), target=Pieces("▁the", "▁dog", "▁a hound", "▁barks", "s")
)
SHORTLIST_TEXT = "\t▁the </s> <unk>\n▁Hund\t▁dog s\n▁Hund ▁bellt\t▁barks ▁the\n"


def test_a_file_of_a_vocabulary_map_is_read_and_written(tmp_path):
    path = tmp_path / "vmap.txt"
    path.write_text(SHORTLIST_TEXT, encoding="utf-8")
    shortlist = Shortlist.read(path, VOCABS)
    assert shortlist.common.tolist() == [1, 2, 3]
    # the first of each n-gram, then the second; those of "▁Hund ▁bellt" only side by side
    assert shortlist.find([4, 5, 1]).tolist() == [4, 6, 7, 3]
    assert shortlist.find(np.array([5, 4, 4, 1])).tolist() == [4, 7]
    assert shortlist.find([3, 1]).tolist() == []
    # eos and the unknown symbol are always candidates; a piece with a space is in no file
    rules = {(4,): np.array([4, 7]), (4, 5): np.array([6, 5, 3])}
    made = Shortlist(rules, [3], VOCABS)
    made.write(tmp_path / "made.txt")
    assert (tmp_path / "made.txt").read_text(encoding="utf-8") == SHORTLIST_TEXT.replace(
        "▁the </s> <unk>", "</s> <unk> ▁the"
    )
    again = Shortlist.read(tmp_path / "made.txt", VOCABS)
    assert again.fingerprint == made.fingerprint == shortlist.fingerprint
    assert Shortlist({}, [3], VOCABS).fingerprint != made.fingerprint
    assert sorted(file.name for file in tmp_path.iterdir()) == ["made.txt", "vmap.txt"]


def test_files_that_are_no_shortlists_of_the_run_are_named(tmp_path):
    path = tmp_path / "vmap.txt"
    for content, words in [
        (b"\t\xff\n", "vmap.txt cannot be read: .*utf-8"),
        (b"der the\n", "line 1, has 0 tabs; it must have"),
        ("▁der\t▁the\n\n▁der\t▁the\ts\n".encode(), "line 3, has 2 tabs"),
        ("▁der\t▁le\n".encode(), "line 1, has the subword '▁le', which the target vocabulary of 8 subwords"),
        ("▁le\t▁the\n".encode(), "'▁le', which the source vocabulary of 6 subwords lacks; give a shortlist"),
    ]:
        path.write_bytes(content)
        with pytest.raises(UserError, match=words):
            Shortlist.read(path, VOCABS)
    with pytest.raises(UserError, match="absent.txt cannot be read: No such file.*prepare --shortlist=FILE"):
        Shortlist.read(tmp_path / "absent.txt", VOCABS)


# ---- lexical table ----
SIZE = 40


def make_store(number: int) -> TokenStore:
    """Source piece n in 3 to 12 translates to 2 n + 3; 13 to 30 and 31; eos is 2."""
    random = np.random.default_rng(7)
    sources = [random.permutation(np.arange(3, 14))[: random.integers(1, 6)] for _ in range(number)]
    targets = [
        np.concatenate([[30, 31] if piece == 13 else [2 * piece + 3] for piece in random.permutation(source)])
        for source in sources
    ]
    return TokenStore.of_ids(*([np.append(ids, 2) for ids in side] for side in (sources, targets)))


# Pieces are their ids, of a source with a letter before; eos is 2.
LEXICAL_VOCABS = SimpleNamespace(
    **{side: Pieces(*(f"{side}{n}" for n in range(3, 39)), "same") for side in ("source", "target")}
)
for side in vars(LEXICAL_VOCABS).values():
    side.eos_id, side.unk_id = 2, 1


def learn(store) -> np.ndarray:
    lexicon = learn_lexicon(store)
    sources, targets = lexicon.pairs
    found = np.zeros((14, SIZE))
    found[sources, targets] = lexicon.probabilities[: len(sources)]
    return found


def test_probabilities_are_those_of_the_translations(monkeypatch):
    store = make_store(300)
    found = learn(store)
    np.testing.assert_allclose(found[2:].sum(axis=1), 1)
    for piece in range(3, 13):
        assert found[piece].argmax() == 2 * piece + 3 and found[piece].max() > 0.8
    assert set(np.argsort(found[13])[-2:]) == {30, 31} and found[2].argmax() == 2
    # in small blocks, which are read anew for each pass
    monkeypatch.setattr(word_alignment, "_BLOCK", 50)
    monkeypatch.setattr(word_alignment, "_KEPT", 0)
    np.testing.assert_allclose(learn(store), found)
    # without rare combinations if they are too many
    monkeypatch.setattr(word_alignment, "_MOST_KEYS", 60)
    monkeypatch.setattr(learned_shortlist, "_MAX_PAIRS", 100)
    few = learn(store)
    assert 0 < np.count_nonzero(few) <= 60 and np.isfinite(few).all()
    assert [few[piece].argmax() for piece in range(3, 13)] == [2 * piece + 3 for piece in range(3, 13)]


def test_a_shortlist_has_the_best_pieces_the_same_piece_and_the_frequent_ones(tmp_path):
    path, store = tmp_path / "shortlist.txt", make_store(300)
    facts = write_shortlist(ShortlistRequest(path, 2, 1), store, LEXICAL_VOCABS)
    assert facts == {"file": str(path), "candidates": 2, "common": 1}
    shortlist = Shortlist.read(path, LEXICAL_VOCABS)
    assert shortlist.common.tolist() == [1, 2]  # eos is the most frequent piece
    assert shortlist.find([5])[0] == 13 and len(shortlist.find([5])) == 2
    assert set(shortlist.find([13])) == {30, 31}
    assert shortlist.find([39]).tolist() == [39] and not len(shortlist.find([38]))
    empty = TokenStore.of_ids([()], [[5, 2]])
    for given, common, words in [
        (empty, 1, "a language model has no source"),
        (store, -1, "--shortlist_common=-1 is negative"),
    ]:
        with pytest.raises(UserError, match=words):
            write_shortlist(ShortlistRequest(path, 2, common), given, LEXICAL_VOCABS)


@pytest.mark.parametrize("charsmap", ["AAAA", "BAAAAGFiY2RlZmdo", ""])
def test_a_panic_of_the_library_of_tokenizers_is_one_message(charsmap):
    pytest.importorskip("tokenizers")
    content = {
        **{"version": "1.0", "added_tokens": [], "truncation": None, "padding": None, "decoder": None},
        **{"pre_tokenizer": None, "post_processor": None},
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap},
        "model": {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"},
    }
    with pytest.raises(UserError, match=r"^x is damaged: .*; copy or download it again$"):
        JsonSegmenter(json.dumps(content).encode(), name="x").encode(["b\u00f6se"])
