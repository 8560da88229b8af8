"""The data of a language model: target sentences alone, all the way from text to batches."""

import dataclasses
import gzip
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from tiny_experiment import text_data

from flaxformer_mt.config import CleanConfig, Config, DataConfig, ModelConfig, VocabConfig
from flaxformer_mt.corpus import Pair, has_split, read_pairs
from flaxformer_mt.corpus.toy import toy_de_en
from flaxformer_mt.data.batching import plan_epoch
from flaxformer_mt.data.buckets import make_training_shapes
from flaxformer_mt.data.epoch_stores import EpochStores
from flaxformer_mt.data.loader import Position, train_batches, valid_batches
from flaxformer_mt.data.prepare import prepare
from flaxformer_mt.data.tokenization import Drawing
from flaxformer_mt.errors import UserError
from flaxformer_mt.training.setup_messages import describe_batches
from flaxformer_mt.vocab import Vocabs, make_vocabs

LINES = ["Good day.", "How are you?", "See you tomorrow!"]
WORDS = ["hund", "katze", "haus", "baum", "see"]
VOCAB = VocabConfig(size=60, byte_fallback=False)
PAD, BOS = 0, 1


@pytest.fixture
def config(tmp_path) -> DataConfig:
    sizes = {"max_target_length": 24, "batch_tokens": 96, "num_shapes": 3, "row_multiple": 4}
    return text_data(tmp_path, "-en", **sizes)


def write(config: DataConfig, name: str, lines: list[str] | bytes) -> None:
    data = lines if isinstance(lines, bytes) else "".join(f"{line}\n" for line in lines).encode()
    path = Path(config.text_dir) / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)


def make_lines(number: int) -> list[str]:
    return [" ".join(WORDS[i % 3 : 1 + i % 5] or ["see"]) + f" {i}" for i in range(number)]


def alone(lines: list[str]) -> list[Pair]:
    return [Pair("", line) for line in lines]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.en", LINES),
        ("train.en.gz", LINES),
        ("train.en", b"\xef\xbb\xbf" + "\r\n".join(LINES).encode()),
    ],
    ids=["plain", "gz", "crlf and bom"],
)
def test_only_the_targets_file_is_read(config, name, content):
    """Whatever else is there: an unequal source, or the table that the file was cut from."""
    write(config, name, content)
    write(config, "train.de", [*LINES, "one more"])
    write(config, "train.tsv", b"a\tb\tc\n")
    pairs = read_pairs(config, "train")
    assert list(pairs) == alone(LINES)
    assert pairs[-1] == Pair("", LINES[-1])
    assert not pairs.has_source
    assert [file["file"] for file in pairs.report["parts"][0]["files"]] == [name]


def test_files_that_are_not_there_are_named_with_the_remedy(config):
    write(config, "train.de", LINES)
    with pytest.raises(UserError, match=r"no train\.en \(or .*\.zst\); it has train\.de\. .*no source"):
        read_pairs(config, "train")
    write(config, "train.tsv.gz", b"a\tb\n")
    with pytest.raises(UserError, match=r"two columns.*zcat .*train\.tsv\.gz \| cut -f2 > .*/train\.en`"):
        read_pairs(config, "train")
    write(config, "valid.de", LINES)
    assert not has_split(config, "valid")
    write(config, "validation.en", LINES)
    assert has_split(config, "valid")
    assert len(read_pairs(config, "valid")) == 3
    with pytest.raises(UserError, match="target_language is empty"):
        read_pairs(dataclasses.replace(config, target_language=""), "train")


def test_an_absent_source_is_neither_empty_nor_too_short(config):
    long = "x" * 50
    write(config, "train.en", ["fine", " ", long, "fine", "also fine"])
    rules = CleanConfig(max_characters=49, max_length_ratio=1.0, duplicates="drop")
    pairs = read_pairs(dataclasses.replace(config, clean=rules), "train")
    assert list(pairs) == alone(["fine", "also fine"])
    problems = pairs.report["parts"][0]["problems"]
    counts = {name: found["count"] for name, found in problems.items()}
    assert counts == {"empty": 1, "too_long": 1, "duplicates": 1}
    assert problems["too_long"]["examples"] == [{"where": "train.en line 3", "target": long}]
    for rule, message in [
        ("empty", r"1 sentence is refused: no text \(train\.en line 2\)"),
        ("too_long", r"1 sentence is refused: too many characters \(train\.en line 3\)"),
    ]:
        strict = dataclasses.replace(rules, **{rule: "refuse"})
        with pytest.raises(UserError, match=message):
            read_pairs(dataclasses.replace(config, clean=strict), "train")
    write(config, "train.en", b"a\n\xff\n")
    with pytest.raises(UserError, match=r"not UTF-8 \(train\.en line 2\)"):
        read_pairs(config, "train")


def test_the_toy_set_gives_its_target_side(config, monkeypatch):
    monkeypatch.setattr(toy_de_en, "SIZES", {"train": 30, "valid": 4, "test": 4})
    toy = dataclasses.replace(config, dataset="toy_de_en")
    both = read_pairs(dataclasses.replace(toy, source_language="de"), "train")
    pairs = read_pairs(toy, "train")
    assert list(pairs) == alone([pair.target for pair in both])
    assert pairs.fingerprint != both.fingerprint
    german = read_pairs(dataclasses.replace(toy, target_language="de"), "train")
    assert [pair.target for pair in german] == [pair.source for pair in both]
    with pytest.raises(UserError, match="German and English, not fr; set .*target_language to de and en"):
        read_pairs(dataclasses.replace(toy, target_language="fr"), "train")


def test_any_set_with_a_feature_of_text_will_do(config, tmp_path, monkeypatch):
    import tensorflow_datasets as tfds

    class TinyStories(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        url_infos = None

        def _info(self):
            features = {"text": tfds.features.Text(), "label": tfds.features.Scalar(np.int64)}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
            )

        def _split_generators(self, dl_manager):
            return {"train": ((row, {"text": line, "label": row}) for row, line in enumerate(LINES))}

        def _generate_examples(self):
            raise AssertionError("the generators are made above")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())  # as if TensorFlow were there
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    named = dataclasses.replace(config, dataset="tiny_stories", target_language="text")
    assert list(read_pairs(named, "train")) == alone(LINES)
    with pytest.raises(UserError, match=r"no language label; it has text: set --config\.data\.target_lang"):
        read_pairs(dataclasses.replace(named, target_language="label"), "train")


def test_there_is_one_vocabulary_of_the_targets(tmp_path):
    lines = make_lines(50)
    config = dataclasses.replace(VOCAB, joint=False)  # of two languages that would be two models
    vocabs = make_vocabs(config, alone(lines), tmp_path / "a", target_only=True)
    assert vocabs.joint and vocabs.source is vocabs.target
    assert vocabs.target.detokenize(vocabs.target.tokenize(lines[7])) == lines[7]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["joint.model"]
    again = make_vocabs(config, alone(["unread"]), tmp_path / "a", target_only=True)
    assert again.target.fingerprint == vocabs.target.fingerprint
    # Sources are not looked at, even where there are some.
    mixed = [Pair("ÄÖÜ", line) for line in lines]
    other = make_vocabs(config, mixed, tmp_path / "b", target_only=True)
    assert other.target.fingerprint == vocabs.target.fingerprint
    given = dataclasses.replace(config, source_model=str(tmp_path / "a" / "joint.model"), size=999)
    same = make_vocabs(given, mixed, tmp_path / "c", target_only=True)
    assert same.target.fingerprint == vocabs.target.fingerprint
    with pytest.raises(UserError, match=r"target_model is x, but .*; set vocab\.source_model to the model"):
        wrong = dataclasses.replace(config, target_model="x")
        make_vocabs(wrong, mixed, tmp_path / "d", target_only=True)


@pytest.fixture
def vocabs(tmp_path_factory) -> Vocabs:
    return make_vocabs(VOCAB, alone(make_lines(80)), tmp_path_factory.mktemp("vocab"), target_only=True)


@pytest.mark.parametrize("batching", ["bucket", "pack"])
def test_batches_have_sources_of_no_length(config, vocabs, tmp_path, batching):
    """[B, 0] ids and masks; all tokens of targets stand in the batches of an epoch and of an evaluation."""
    write(config, "train.en", make_lines(80))
    config = dataclasses.replace(config, batching=batching)
    stores = EpochStores(read_pairs(config, "train"), vocabs, tmp_path / "tokens", Drawing(0.0, 1))
    tokens = stores.base.target_lengths.sum()
    epoch = []
    for position, array in train_batches(stores, config, seed=1, pad_id=PAD, bos_id=BOS):
        epoch.append(array.to_batch(np))
        if position == Position(1, 0):
            break
    valid = [batch.to_batch(np) for batch in valid_batches(stores.base, config, pad_id=PAD, bos_id=BOS)]
    for batches in (epoch, valid):
        for batch in batches:
            sources = [leaf for name, leaf in batch._asdict().items() if name.startswith("source")]
            shapes = {leaf.shape for leaf in sources if leaf is not None}
            assert shapes == {(len(batch.target_in), 0)}
        assert sum(int(batch.target_mask.sum()) for batch in batches) == tokens
    shared = any((batch.target_segments > 1).any() for batch in epoch if batch.target_segments is not None)
    assert shared == (batching == "pack")


def test_plans_count_targets_alone(config):
    lengths = np.zeros(200, np.int32), np.random.default_rng(0).integers(2, 25, 200).astype(np.int32)
    plan = plan_epoch(*lengths, config=config, seed=1, epoch=0)
    assert 1 < len(plan.shapes) <= 3
    assert {shape.source for shape in plan.shapes} == {0}
    assert all(shape.rows == 96 // shape.target // 4 * 4 for shape in plan.shapes)
    counts = zip(plan.shapes, plan.shape_counts, strict=True)
    places = sum(count * shape.rows * shape.target for shape, count in counts)
    assert plan.padding_share == pytest.approx(1 - lengths[1].sum() / places)
    assert make_training_shapes(*lengths, config=config, headroom=True)[-1] == (4, 0, 24)
    with pytest.raises(UserError, match=r"all 200 training pairs .* 24 tokens .* have 0 and 32\)"):
        plan_epoch(lengths[0], lengths[1] + 30, config=config, seed=1, epoch=0)


def test_prepare_reports_on_one_side(config, tmp_path):
    write(config, "train.en", [*make_lines(80), "baum " * 30])
    write(config, "valid.en", make_lines(5))
    whole = Config(data=config, vocab=VOCAB, model=ModelConfig(architecture="decoder_only"))
    prepared = prepare(whole, tmp_path / "run")
    report = json.loads(json.dumps(prepared.report))
    assert report["train"]["pairs"] == 81
    assert report["vocabulary"] == {"kind": "bpe", "joint": True, "source_size": 0, "target_size": 60}
    batches = report["batches"]
    assert (batches["pairs"], batches["skipped"], batches["source_tokens"]) == (80, 1, 0)
    assert {shape["source"] for shape in batches["shapes"]} == {0}
    told = describe_batches(batches)
    assert f"{len(batches['shapes'])} shapes (rows x tokens): {batches['shapes'][0]['rows']}x" in told
    assert "x0x" not in told and told.endswith("; 1 sentences are too long and left out")
    assert prepared.valid is not None and not prepared.valid.source_lengths.any()
    assert prepared.vocabs.source is prepared.vocabs.target
    again = prepare(whole, tmp_path / "run")
    assert again.report == prepared.report
    assert again.vocabs.target.fingerprint == prepared.vocabs.target.fingerprint
