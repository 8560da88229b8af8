"""Sets by name, mixtures, fingerprints and held-out pairs."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pytest import raises
from tiny_experiment import text_data

from flaxformer_mt.config import CleanConfig, DataConfig
from flaxformer_mt.corpus import Pair, cache_dir, has_split, read_pairs, tfds_sets
from flaxformer_mt.corpus.hub_sets import HubRows
from flaxformer_mt.corpus.mixture_weights import choose_weights, describe_shares, format_shares
from flaxformer_mt.corpus.pair_checks import digest_sentence
from flaxformer_mt.corpus.pairs import Part
from flaxformer_mt.corpus.tfds_cache import tfds_dir
from flaxformer_mt.data.prepare import find_overlap
from flaxformer_mt.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"train": 7, "validation": 3, "test": 2}
# A set of the shape of TFDS's own, prepared under its name and version: python -c MAKE_SET FOLDER SIZES.
MAKE_SET = """
import json, sys
import tensorflow_datasets as tfds

class Wmt14Translate(tfds.core.GeneratorBasedBuilder):
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="de-en", version="1.0.0")]
    url_infos = None

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.Translation(languages=("de", "en")),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        return {name: self._generate_examples(name, size) for name, size in json.loads(sys.argv[2]).items()}

    def _generate_examples(self, name, size):
        for row in range(size):
            yield row, {"de": f"{name} {row} ü", "en": f"{name} {row} u"}

Wmt14Translate(config="de-en", data_dir=sys.argv[1], file_format="array_record").download_and_prepare()
"""


def run(code, *arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=environment, text=True, check=True, stdout=subprocess.PIPE).stdout


@pytest.fixture(scope="module")
def tfds_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    run(MAKE_SET, folder, json.dumps(SIZES))
    return folder


@pytest.fixture
def config(tfds_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tfds_folder))
    return DataConfig(dataset="wmt14_translate/de-en", cache_dir=str(tmp_path / "cache"))


def text_config(tmp_path, **more):
    folder = tmp_path / "text"
    folder.mkdir(exist_ok=True)
    for name in ("train.de", "train.en", "valid.de", "valid.en"):
        (folder / name).write_text(f"{name} 1\n{name} 2\n")
    return DataConfig(dataset=f"parallel_text@{folder}", cache_dir=str(tmp_path / "cache"), **more)


def test_a_prepared_set_is_read_from_disk_without_tensorflow_or_noise(tfds_folder, tmp_path):
    out = run(
        "import os, sys\n"
        "from flaxformer_mt.config import DataConfig\n"
        "from flaxformer_mt.corpus import read_pairs\n"
        "os.environ['TFDS_DATA_DIR'] = sys.argv[1]\n"
        "config = DataConfig('wmt14_translate/de-en', cache_dir=sys.argv[2])\n"
        "pairs = read_pairs(config, 'train')\n"
        "print(len(pairs), pairs[-1].source, pairs[-1].target, 'tensorflow' in sys.modules, sep='|')\n",
        tfds_folder,
        tmp_path,
    )
    assert out == "7|train 6 ü|train 6 u|False\n"


def test_languages_choose_the_direction(config):
    there = read_pairs(config, "test")
    back = read_pairs(replace(config, source_language="en", target_language="de"), "test")
    assert there[1] == Pair("test 1 ü", "test 1 u")
    assert [Pair(*reversed(pair)) for pair in there] == list(back)
    assert there.fingerprint != back.fingerprint


def test_splits_are_found_by_either_name_and_in_slices(config):
    assert len(read_pairs(config, "valid")) == SIZES["validation"]
    assert [has_split(config, split) for split in ("train", "valid", "test")] == [True] * 3
    assert not has_split(replace(config, test_split="test2014"), "test")
    part = replace(config, train_split="train[2:5]")
    assert [pair.target for pair in read_pairs(part, "train")] == ["train 2 u", "train 3 u", "train 4 u"]
    assert read_pairs(part, "train").fingerprint != read_pairs(config, "train").fingerprint
    for wrong in ("train[2", "train[a:b]", "train[5:3]", "train[100:]"):
        with raises(UserError, match=r"has no slice train\[.*; write a slice as"):
            read_pairs(replace(config, train_split=wrong), "train")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source_language": "fr"}, r"de-en has no language fr; it has de, en"),
        ({"source_language": "fr", "target_language": "cs"}, r"no language fr and no cs"),
        ({"target_language": "de"}, r"source_language and data\.target_language are both de"),
        ({"train_split": "training"}, r"has no split training; it has test, train, validation"),
        ({"dataset": "wmt14_translate/en-de"}, r"no data set .*did you mean wmt14_translate/de-en\?"),
        ({"dataset": "wmt14_translat/de-en"}, r"did you mean wmt14_translate/de-en"),
        ({"dataset": "toy_de_fr"}, r"did you mean toy_de_en"),
        ({"dataset": "qqq"}, r"there is no data set qqq; available are toy_de_en, parallel_text"),
        ({"dataset": "a b"}, r"'a b' is not a data set name"),
        ({"dataset": "toy_de_en,"}, r"'toy_de_en,' has an empty name"),
        ({"dataset": "wmt14_translate/de-en:9.9.9"}, r"de-en:9\.9\.9 is not prepared.*version 1\.0\.0 only"),
    ],
)
def test_mistakes_are_named_with_the_remedy(config, change, message):
    with raises(UserError, match=message):
        read_pairs(replace(config, **change), "train")


def test_toy_mistakes(tmp_path):
    toy = DataConfig(cache_dir=str(tmp_path))
    with raises(UserError, match="toy_de_en is German and English, not de -> fr"):
        read_pairs(replace(toy, target_language="fr"), "train")
    with raises(UserError, match="toy_de_en has no split dev; it has train, valid, test"):
        read_pairs(replace(toy, valid_split="dev"), "valid")
    assert not has_split(replace(toy, valid_split="dev"), "valid")
    assert has_split(replace(toy, valid_split="validation"), "valid")
    assert not any(tmp_path.iterdir())  # mistakes are found before anything is prepared


def test_a_set_that_is_not_prepared_says_how_to_prepare_it(config, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tensorflow" else find_spec(name)
    )
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "none"))
    with raises(UserError) as error:
        read_pairs(config, "train")
    for part in (
        "wmt14_translate/de-en is not prepared",
        str(tmp_path / "none" / "wmt14_translate" / "de-en" / "1.0.0"),
        f"{sys.executable} -m pip install 'tensorflow-cpu>=2.20' 'importlib_resources>=6', then ",
        f"{sys.executable} -m flaxformer_mt prepare --config=CONFIG; ",
        "or set TFDS_DATA_DIR to the folder",
    ):
        assert part in str(error.value)


def test_with_tensorflow_a_missing_set_is_built_and_failures_are_told(config, tmp_path, monkeypatch):
    import tensorflow_datasets as tfds

    class TinyTranslate(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("2.0.0")
        url_infos = None
        broken = True

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.Translation(languages=("de", "en"))
            )

        def _split_generators(self, dl_manager):
            if self.broken:
                raise ConnectionError("no route to host")
            return {"train": iter([("a", {"de": "eins", "en": "one"})])}

        def _generate_examples(self):
            raise AssertionError("the generators are made above")

    monkeypatch.setattr(tfds_sets.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    config = replace(config, dataset="tiny_translate")
    with raises(UserError, match="could not build tiny_translate .* ConnectionError: no route to host"):
        read_pairs(config, "train")
    TinyTranslate.broken = False
    assert list(read_pairs(config, "train")) == [Pair("eins", "one")]
    TinyTranslate.broken = True  # prepared once is enough
    assert list(read_pairs(replace(config, source_language=""), "train")) == [Pair("", "one")]


def copy_set(source, folder, **facts):
    """Copies the prepared set into `folder` with some facts changed; a version also names its place."""
    place = folder / "wmt14_translate" / "de-en" / facts.get("version", "1.0.0")
    shutil.copytree(source / "wmt14_translate" / "de-en" / "1.0.0", place)
    path = place / "dataset_info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def test_a_set_without_random_access_says_how_to_convert_it(config, tfds_folder, tmp_path, monkeypatch):
    copy_set(tfds_folder, tmp_path, fileFormat="tfrecord")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    with raises(UserError, match=r"is prepared as tfrecord.*convert_format --dataset_version_dir=.*1\.0\.0"):
        read_pairs(config, "train")


def test_the_newest_version_is_read_unless_one_is_named(config, tfds_folder, tmp_path, monkeypatch):
    for version in ("1.0.0", "1.10.0", "1.9.0"):
        copy_set(tfds_folder, tmp_path, version=version)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    newest = read_pairs(config, "test")
    assert newest.report["parts"][0]["folder"].endswith("1.10.0")
    named = read_pairs(replace(config, dataset="wmt14_translate/de-en:1.9.0"), "test")
    assert named.report["parts"][0]["folder"].endswith("1.9.0")
    assert list(named) == list(newest)
    assert named.fingerprint != newest.fingerprint


def test_named_sets_are_cleaned_too(config):
    rules = CleanConfig(max_characters=8)
    pairs = read_pairs(replace(config, clean=rules), "test")
    assert len(pairs) == 2, "held-out pairs stay"
    with raises(UserError, match=r"0 of 7 are left \(too_long 7\)"):
        read_pairs(replace(config, clean=rules), "train")


def test_a_mixture_is_its_sets_in_order_and_held_out_sets_are_the_first(config, tmp_path):
    text = text_config(tmp_path).dataset
    mixed = replace(config, dataset=f"{text}, wmt14_translate/de-en", weights=(3.0, 0.5))
    pairs = read_pairs(mixed, "train")
    assert pairs.parts == ((text, 2, 3.0), ("wmt14_translate/de-en", 7, 0.5))
    sources = [f"train.de {row}" for row in (1, 2)] + [f"train {row} ü" for row in range(7)]
    assert [pair.source for pair in pairs] == sources == [pairs[row].source for row in range(9)]
    assert [pairs[row].source for row in (-1, -9)] == [sources[-1], sources[0]]
    assert [part["pairs"] for part in pairs.report["parts"]] == [2, 7]
    assert json.loads(json.dumps(pairs.report)) == pairs.report
    valid = read_pairs(mixed, "valid")
    assert valid.parts == ((text, 2, 1.0),)
    assert valid[0].source == "valid.de 1"
    assert not has_split(mixed, "test")
    assert pairs.fingerprint != read_pairs(replace(mixed, dataset=text, weights=()), "train").fingerprint


def test_fingerprint_follows_text_rules_and_languages_but_not_places(tmp_path):
    config = text_config(tmp_path)
    reference = read_pairs(config, "train").fingerprint
    other = {
        read_pairs(replace(config, clean=CleanConfig(max_characters=99)), "train").fingerprint,
        read_pairs(replace(config, source_language="en", target_language="de"), "train").fingerprint,
        read_pairs(replace(config, train_split="valid"), "train").fingerprint,
        read_pairs(config, "valid").fingerprint,
    }
    assert len(other - {reference}) == 4
    (tmp_path / "elsewhere").mkdir()
    same = text_config(tmp_path / "elsewhere")
    assert read_pairs(same, "train").fingerprint == reference
    assert read_pairs(replace(config, batch_tokens=512), "train").fingerprint == reference
    # Rules concern training pairs alone.
    loose = replace(config, clean=CleanConfig(max_characters=99))
    assert read_pairs(loose, "valid").fingerprint == read_pairs(config, "valid").fingerprint


def test_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("FLAXFORMER_MT_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "b"))
    assert cache_dir(DataConfig(cache_dir=str(tmp_path / "c"))) == tmp_path / "c"
    assert (cache_dir(DataConfig()), tfds_dir()) == (tmp_path / "a", tmp_path / "b")
    monkeypatch.delenv("FLAXFORMER_MT_CACHE")
    monkeypatch.delenv("TFDS_DATA_DIR")
    assert cache_dir(DataConfig()) == Path.home() / ".cache" / "flaxformer_mt"
    assert tfds_dir() == Path.home() / "tensorflow_datasets"


def test_directions_of_one_corpus_and_their_tags(tmp_path):
    one = text_config(tmp_path)
    name = one.dataset
    many = replace(one, dataset=f"{name}:de-en,{name}:en-de", temperature=5.0)
    pairs = read_pairs(many, "train")
    there, back = Pair("train.de 1", "train.en 1"), Pair("train.en 1", "train.de 1")
    assert pairs[0] == there._replace(source=">>en<< train.de 1")
    assert pairs[2] == back._replace(source=">>de<< train.en 1")
    assert pairs.tags == (">>en<<", ">>de<<")
    assert pairs.languages == (("de", "en"), ("en", "de"))
    assert [part.name for part in pairs.parts] == [f"{name}:de-en", f"{name}:en-de"]
    plain = read_pairs(many, "train", tagged=False)
    assert (plain[0], plain[2], plain.tags) == (there, back, ())
    assert plain.fingerprint != pairs.fingerprint
    tagged = replace(one, source_tags=True, target_tags="always")
    assert read_pairs(tagged, "train")[1].source == ">>en<< <from:de> train.de 2"
    named = read_pairs(replace(one, dataset=f"{name}:de-en"), "train")
    assert named.fingerprint == read_pairs(one, "train").fingerprint  # caches of earlier versions are found


def test_scored_splits_are_those_of_the_first_set_of_each_direction(tmp_path):
    config = text_config(tmp_path)
    name, other = config.dataset, f"parallel_text@{tmp_path / 'other'}"
    (tmp_path / "other").mkdir()
    for file in ("train.de", "train.en", "train.fr", "test.en", "test.fr"):
        (tmp_path / "other" / file).write_text("a\n")
    mixed = replace(config, dataset=f"{name}:de-en,{other}:de-en,{other}:fr-en")
    assert [part.name for part in read_pairs(mixed, "valid").parts] == [f"{name}:de-en"]
    assert [part.name for part in read_pairs(mixed, "test").parts] == [f"{other}:fr-en"]
    assert len(read_pairs(mixed, "train").parts) == 3
    assert has_split(mixed, "valid") and has_split(mixed, "test")
    assert not has_split(replace(mixed, test_split="other"), "test")


def test_a_table_is_not_read_in_both_directions(tmp_path):
    (tmp_path / "train.tsv").write_text("der Hund\tthe dog\n")
    name = f"parallel_text@{tmp_path}"
    config = DataConfig(dataset=f"{name}:de-en,{name}:en-de", cache_dir=str(tmp_path / "cache"))
    with raises(UserError, match=r"read as en-de and as de-en, but train.tsv|read as de-en and as en-de"):
        read_pairs(config, "train")
    assert read_pairs(replace(config, dataset=f"{name}:de-en"), "train")[0].source == "der Hund"


# ---- held out ----
NUMBER = 400


def lines(language, number=NUMBER):
    return [f"{language} sentence {i % 300} of many" for i in range(number)]


@pytest.fixture
def held_out_config(tmp_path):
    write(tmp_path, de=lines("de"), en=[f"{line} {i // 350}" for i, line in enumerate(lines("en"))])
    return text_data(tmp_path, clean=CleanConfig(duplicates="drop"), valid_pairs=20, test_pairs=30)


def write(folder, split="train", **sides):
    for language, text in sides.items():
        (folder / f"{split}.{language}").write_text("".join(f"{line}\n" for line in text))


def sentences(pairs, side):
    return {digest_sentence(pair[side].encode()) for pair in pairs}


def test_numbers_are_exact_and_nothing_is_shared(held_out_config):
    train, valid, test = (list(read_pairs(held_out_config, split)) for split in ("train", "valid", "test"))
    assert (len(valid), len(test)) == (20, 30)
    for side in (0, 1):
        held = [sentences(pairs, side) for pairs in (valid, test)]
        assert not held[0] & held[1]
        assert not (held[0] | held[1]) & sentences(train, side)
    report = read_pairs(held_out_config, "train").report["parts"][0]
    kept = report["read"] - report["problems"]["duplicates"]["count"]
    assert report["held_out"]["valid"] == 20 and report["held_out"]["test"] == 30
    assert len(train) + 50 + report["held_out"]["aside"] == kept
    assert report["held_out"]["aside"] > 0  # of the sentences that occur twice, with two translations
    valid = read_pairs(held_out_config, "valid")
    overlap = find_overlap(read_pairs(held_out_config, "train"), {"valid": valid})
    assert overlap == {"valid": {"of": 20, "pairs": 0, "sources": 0}}
    assert has_split(held_out_config, "valid") and has_split(held_out_config, "test")


def test_the_choice_is_of_the_text_and_no_other_order(held_out_config, tmp_path):
    before = {split: set(read_pairs(held_out_config, split)) for split in ("train", "valid", "test")}
    order = np.random.default_rng(0).permutation(300)
    for language in ("de", "en"):
        text = (tmp_path / f"train.{language}").read_text().split("\n")
        (tmp_path / f"train.{language}").write_text("".join(f"{text[i]}\n" for i in order))
    # Each of the first 300 sentences occurs once.
    assert sentences(read_pairs(held_out_config, "valid"), 1) == sentences(before["valid"], 1)
    assert sentences(read_pairs(held_out_config, "test"), 1) == sentences(before["test"], 1)
    # Stored digests are not used for other text, and damaged ones not at all.
    for file in (tmp_path / "cache" / "cleaned").glob("*.sentences.npy"):
        file.write_bytes(file.read_bytes()[:-3] + b"xyz")
    assert sentences(read_pairs(held_out_config, "valid"), 1) == sentences(before["valid"], 1)
    other = replace(held_out_config, valid_pairs=21)
    assert read_pairs(other, "train").fingerprint != read_pairs(held_out_config, "train").fingerprint
    assert sentences(read_pairs(other, "valid"), 1) > sentences(before["valid"], 1)


def test_sentences_differ_by_more_than_case_spaces_and_punctuation():
    def same(one, other):
        return digest_sentence(one.encode()) == digest_sentence(other.encode())

    assert same("Help me.", " help ME! ") and same("「東京」です。", "東京です") and same("Straße", "STRASSE")
    assert not same("Help me.", "Help us.") and not same("กา", "กี") and not same("?", "!")


def test_both_directions_hold_out_the_same_pairs(held_out_config, tmp_path):
    both = replace(held_out_config, dataset="parallel_text:de-en,parallel_text:en-de")
    train, valid, test = (read_pairs(both, split, tagged=False) for split in ("train", "valid", "test"))
    assert [part.size for part in valid.parts] == [20, 20] and [part.size for part in test.parts] == [30, 30]
    pairs = list(valid)
    assert [(pair.target, pair.source) for pair in pairs[:20]] == [tuple(pair) for pair in pairs[20:]]
    texts = {text for pair in train for text in pair}
    assert not texts & {text for held in (valid, test) for pair in held for text in pair}


def test_other_sets_of_a_mixture_lack_the_held_out_sentences(held_out_config, tmp_path):
    more = tmp_path / "more"
    more.mkdir()
    valid = list(read_pairs(held_out_config, "valid"))
    write(more, de=[pair.source for pair in valid] + ["neu"], en=[f"other {i}" for i in range(21)])
    mixed = replace(held_out_config, dataset=f"parallel_text,parallel_text@{more}")
    train = read_pairs(mixed, "train")
    assert [part.size for part in train.parts] == [len(read_pairs(held_out_config, "train")), 1]
    assert list(read_pairs(mixed, "valid")) == valid
    assert train.report["parts"][1]["held_out"] == {"valid": 0, "test": 0, "aside": 20}


def test_a_language_model_holds_out_targets(held_out_config):
    alone = replace(held_out_config, source_language="")
    train, valid = read_pairs(alone, "train"), read_pairs(alone, "valid")
    assert len(valid) == 20 and not sentences(train, 1) & sentences(valid, 1)


def test_what_cannot_be_is_refused(held_out_config, tmp_path):
    with raises(UserError, match="data.valid_pairs 200 and data.test_pairs 30 are more than half"):
        read_pairs(replace(held_out_config, valid_pairs=200), "train")
    write(tmp_path, "valid", de=["a"], en=["b"])
    for read in (read_pairs, has_split):
        with raises(UserError, match="data.valid_pairs is 20, but parallel_text has a valid split"):
            read(held_out_config, "valid")
    own = replace(held_out_config, valid_pairs=0)
    assert len(read_pairs(own, "valid")) == 1 and len(read_pairs(own, "test")) == 30
    with raises(UserError, match="toy_de_en has a test split of its own"):
        read_pairs(replace(held_out_config, dataset="toy_de_en"), "test")


def test_weights_stay_with_the_training_pairs(held_out_config, tmp_path):
    write(tmp_path, weights=[str(1 + i % 3) for i in range(NUMBER)])
    train, valid = read_pairs(held_out_config, "train"), read_pairs(held_out_config, "valid")
    weights = train.columns["target_weights"].open(train, {}).values
    assert valid.columns == {} and len(weights) == len(train)
    numbers = [int(pair.source.split()[2]) for pair in train]
    assert weights.tolist() == [1 + number % 3 for number in numbers]


# ---- mixture weights ----
def test_shares_are_sizes_to_the_power_of_one_over_the_temperature():
    sizes = np.array([100, 10_000, 2500])
    for temperature in (1.0, 2.0, 5.0, 1000.0):
        weights = choose_weights(DataConfig(temperature=temperature), sizes.tolist())
        shares = weights * sizes / np.dot(weights, sizes)
        wanted = sizes ** (1 / temperature)
        np.testing.assert_allclose(shares, wanted / wanted.sum())
        assert weights[1] == 1  # the largest is seen once
    assert choose_weights(DataConfig(weights=(1.0, 2.0), temperature=5.0), [3, 4]) == (1.0, 2.0)


def test_the_log_tells_each_share():
    shares = describe_shares([Part("a", 3000, 1.0), Part("b", 1, 1000.0)])
    assert format_shares(shares) == "mixture: 75.0% a (3,000 pairs x 1), 25.0% b (1 pair x 1000)"


# ---- hub sets ----
PAIRS = [("Guten Tag.", "Good day."), ("Bis\u2028morgen!", "See you tomorrow!")]
needs_datasets = pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="extra datasets")


def hub_sets_write(path, pairs, *, nested):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"de": source, "en": target} for source, target in pairs]
    table = pyarrow.Table.from_pylist([{"translation": row} for row in rows] if nested else rows)
    parquet.write_table(table, path)


@needs_datasets
@pytest.mark.parametrize("nested", [True, False], ids=["translation", "columns"])
def test_a_folder_of_parquet_files(tmp_path, nested):
    (tmp_path / "set").mkdir()
    hub_sets_write(tmp_path / "set" / "train-00000-of-00002.parquet", PAIRS[:1], nested=nested)
    hub_sets_write(tmp_path / "set" / "train-00001-of-00002.parquet", PAIRS[1:], nested=nested)
    hub_sets_write(tmp_path / "set" / "validation.parquet", [("a", "b")], nested=nested)
    config = DataConfig(dataset=f"hf:{tmp_path / 'set'}", cache_dir=str(tmp_path / "cache"))
    pairs = read_pairs(config, "train")
    assert list(pairs) == [Pair(*pair) for pair in PAIRS] and pairs[-1] == PAIRS[1]
    assert list(read_pairs(config, "valid")) == [Pair("a", "b")]
    assert not has_split(config, "test")
    back = replace(config, source_language="en", target_language="de")
    assert read_pairs(back, "train")[0] == PAIRS[0][::-1]
    alone = replace(config, source_language="")
    assert [pair.target for pair in read_pairs(alone, "train")] == [target for _, target in PAIRS]
    with raises(UserError, match="has no language fr; it has de, en"):
        read_pairs(replace(config, source_language="fr"), "train")
    with raises(UserError, match="has no split dev; it has train, validation"):
        read_pairs(replace(config, train_split="dev"), "train")
    hub_sets_write(tmp_path / "set" / "train-00001-of-00002.parquet", [("x", "y")], nested=nested)
    changed = read_pairs(config, "train")
    assert changed[1] == Pair("x", "y") and changed.fingerprint != pairs.fingerprint


@needs_datasets
def test_a_name_that_is_neither_folder_nor_set(tmp_path):
    with raises(UserError, match="hf:absent is no folder, and no set of the Hub; write hf:OWNER/NAME"):
        read_pairs(DataConfig(dataset="hf:absent", cache_dir=str(tmp_path)), "train")


def test_without_the_package_the_remedy_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with raises(UserError, match=r"hf:a/b needs the package datasets.*install"):
        read_pairs(DataConfig(dataset="hf:a/b", cache_dir=str(tmp_path)), "train")


def test_the_hub_is_asked_once_for_the_splits_of_a_set(tmp_path, monkeypatch):
    asked = []

    def get_dataset_split_names(path, config):
        asked.append((path, config))
        return ["train", "validation"]

    hub = types.SimpleNamespace(
        get_dataset_split_names=get_dataset_split_names, disable_progress_bars=lambda: None
    )
    monkeypatch.setitem(sys.modules, "datasets", hub)
    config = DataConfig(dataset="hf:asked/once/de-en", cache_dir=str(tmp_path))
    assert [has_split(config, split) for split in ("train", "valid", "test")] == [True, True, False]
    assert asked == [("asked/once", "de-en")]


def test_a_set_without_a_name_is_not_the_working_folder(tmp_path):
    with raises(UserError, match="^hf: is no folder, and no set of the Hub; write hf:OWNER/NAME"):
        has_split(DataConfig(dataset="hf:", cache_dir=str(tmp_path)), "train")


def test_a_null_of_the_hub_is_an_empty_text():
    """As `datasets` gives rows: a text, and a whole translation, may be null."""
    rows = [{"de": "a", "en": "b"}, {"de": None, "en": "b"}, None]

    class Columns(list):
        def __getitem__(self, numbers):
            return {"translation": [rows[number] for number in numbers]}

    texts = HubRows(Columns(rows), ("de", "en"), nested=True).read(range(3))
    assert texts == [(b"a", b"b"), (b"", b"b"), (b"", b"")]
