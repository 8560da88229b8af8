"""Sets in the layout of the Hugging Face Hub: folders of parquet files, without a network."""

import dataclasses
import importlib.util
import sys
import types

import pytest

from flaxformer_mt.config import DataConfig
from flaxformer_mt.corpus import Pair, has_split, read_pairs
from flaxformer_mt.corpus.hub_sets import HubRows
from flaxformer_mt.errors import UserError

PAIRS = [("Guten Tag.", "Good day."), ("Bis\u2028morgen!", "See you tomorrow!")]
needs_datasets = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="needs the extra datasets"
)


def write(path, pairs, *, nested):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"de": source, "en": target} for source, target in pairs]
    table = pyarrow.Table.from_pylist([{"translation": row} for row in rows] if nested else rows)
    parquet.write_table(table, path)


@needs_datasets
@pytest.mark.parametrize("nested", [True, False], ids=["translation", "columns"])
def test_a_folder_of_parquet_files(tmp_path, nested):
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train-00000-of-00002.parquet", PAIRS[:1], nested=nested)
    write(tmp_path / "set" / "train-00001-of-00002.parquet", PAIRS[1:], nested=nested)
    write(tmp_path / "set" / "validation.parquet", [("a", "b")], nested=nested)
    config = DataConfig(dataset=f"hf:{tmp_path / 'set'}", cache_dir=str(tmp_path / "cache"))
    pairs = read_pairs(config, "train")
    assert list(pairs) == [Pair(*pair) for pair in PAIRS] and pairs[-1] == PAIRS[1]
    assert list(read_pairs(config, "valid")) == [Pair("a", "b")]
    assert not has_split(config, "test")
    back = dataclasses.replace(config, source_language="en", target_language="de")
    assert read_pairs(back, "train")[0] == PAIRS[0][::-1]
    alone = dataclasses.replace(config, source_language="")
    assert [pair.target for pair in read_pairs(alone, "train")] == [target for _, target in PAIRS]
    with pytest.raises(UserError, match="has no language fr; it has de, en"):
        read_pairs(dataclasses.replace(config, source_language="fr"), "train")
    with pytest.raises(UserError, match="has no split dev; it has train, validation"):
        read_pairs(dataclasses.replace(config, train_split="dev"), "train")
    write(tmp_path / "set" / "train-00001-of-00002.parquet", [("x", "y")], nested=nested)
    changed = read_pairs(config, "train")
    assert changed[1] == Pair("x", "y") and changed.fingerprint != pairs.fingerprint


def test_a_null_is_an_empty_text():
    """As `datasets` gives rows: a text, and a whole translation, may be null."""
    rows = [{"de": "a", "en": "b"}, {"de": None, "en": "b"}, None]

    class Columns(list):
        def __getitem__(self, numbers):
            return {"translation": [rows[number] for number in numbers]}

    found = HubRows(Columns(rows), ("de", "en"), nested=True).read(range(3))
    assert found == [(b"a", b"b"), (b"", b"b"), (b"", b"")]


@needs_datasets
def test_a_name_that_is_neither_folder_nor_set(tmp_path):
    with pytest.raises(UserError, match="hf:absent is no folder, and no set of the Hub; write hf:OWNER/NAME"):
        read_pairs(DataConfig(dataset="hf:absent", cache_dir=str(tmp_path)), "train")


def test_without_the_package_the_remedy_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"hf:a/b needs the package datasets.*install"):
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
    with pytest.raises(UserError, match="^hf: is no folder, and no set of the Hub; write hf:OWNER/NAME"):
        has_split(DataConfig(dataset="hf:", cache_dir=str(tmp_path)), "train")
