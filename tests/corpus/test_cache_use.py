"""The cache of corpora: damage is seen, and files of texts in stores are copied when they change."""

import os

import numpy as np
import pytest
from failing_store import hurry, move_to_machine, new_bucket
from tiny_experiment import change, text_data

from flaxformer_mt.commands.main import main
from flaxformer_mt.config import CleanConfig, DataConfig
from flaxformer_mt.corpus import read_pairs
from flaxformer_mt.corpus.reader import copy_text, has_split
from flaxformer_mt.corpus.text_files import find_files, read_lines
from flaxformer_mt.corpus.toy import toy_de_en
from flaxformer_mt.errors import FlaxformerWarning, UserError
from flaxformer_mt.object_store.filesystem import ObjectStore


def test_damaged_results_of_cleaning_are_computed_again(tmp_path):
    """Rows that are missing or changed would train on other pairs."""
    (tmp_path / "text").mkdir()
    for language in ("de", "en"):
        (tmp_path / "text" / f"train.{language}").write_text("a\nb\n\nc\n")
    config = text_data(tmp_path / "text", cache_dir=str(tmp_path / "cache"), clean=CleanConfig(empty="drop"))
    expected = list(read_pairs(config, "train"))
    (folder,) = (tmp_path / "cache" / "cleaned").iterdir()
    rows, hashes, manifest = (folder / name for name in ("rows.npy", "hashes.npy", "manifest.json"))
    for damage in (
        rows.unlink,
        lambda: np.save(rows, np.array([0, 1])),
        lambda: rows.write_bytes(b""),
        lambda: hashes.write_bytes(b""),
        manifest.unlink,
        lambda: manifest.write_text("{"),
    ):
        damage()
        with pytest.warns(FlaxformerWarning, match=f"{folder} is damaged: .*; it is built again"):
            assert list(read_pairs(config, "train")) == expected
        assert np.load(rows).tolist() == [0, 1, 3] and np.load(hashes).shape == (4, 2)


def test_a_prepared_set_with_pipes_or_devices_is_prepared_again(tmp_path, monkeypatch):
    """TFDS would wait for the pipe, and read the device until memory ends."""
    monkeypatch.setitem(toy_de_en.SIZES, "train", 100)
    config = DataConfig(dataset="toy_de_en", cache_dir=str(tmp_path / "cache"))
    expected = list(read_pairs(config, "test"))
    for name, replace in [
        ("dataset_info.json", os.mkfifo),
        ("features.json", lambda path: path.symlink_to("/dev/zero")),
        ("*test.array_record*", os.mkfifo),
        ("*train.array_record*", lambda path: path.write_bytes(b"")),
    ]:
        (path,) = (tmp_path / "cache" / "toy").rglob(name)
        path.unlink()
        replace(path)
        with pytest.warns(FlaxformerWarning, match=r"is damaged: .*; it is built again"):
            assert list(read_pairs(config, "test")) == expected


# ---- store text ----
def test_texts_weights_and_alignments_alone_are_fetched(tiny_config, tmp_path, monkeypatch, capsys):
    hurry(monkeypatch)
    url = f"{new_bucket()}/text"
    names = ["train.xx", "train.yy.gz", "valid.tsv", "train.weights", "links", "train.zz", "notes"]
    for name in names:
        ObjectStore(url).write(name, name.encode())
    config = change(
        tiny_config,
        data={"text_dir": url, "alignments": ("links",), "cache_dir": str(tmp_path)},
        model={"alignment": {"weight": 0.1}},
    ).data
    folder = copy_text(url, config)
    found = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert found == {"train.xx", "train.yy.gz", "valid.tsv", "train.weights", "links"}
    other = change(tiny_config, data={"source_language": "aa", "target_language": "bb"}).data
    ObjectStore(f"{url}2").write("train.weights", b"1\n")
    with pytest.raises(UserError, match=r"has no text file of the splits and languages .* train\.weights"):
        copy_text(f"{url}2", other)
    flags = [f"--config.data.text_dir={url}", "--config.data.dataset=parallel_text"]
    assert main(["align", *flags]) == 2
    assert f"data.text_dir is {url}, which is not written to; give --output=FILE" in capsys.readouterr().err


def test_the_files_of_the_config_are_copied_when_they_change(tmp_path, monkeypatch):
    move_to_machine(monkeypatch, tmp_path / "machine")
    url = f"{new_bucket()}/corpus"
    store = ObjectStore(url)
    for name in ("train.de", "train.en.gz", "train.fr", "validation.tsv", "old/train.de", "README"):
        store.write(name, b"one\n")
    config = text_data(tmp_path, text_dir=url)
    folder = copy_text(url, config)
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert names == {"train.de", "train.en.gz", "validation.tsv"}
    assert folder.is_relative_to(tmp_path / "cache")
    assert find_files(folder, "train", ("de", "en"))[0].read_bytes() == b"one\n"
    assert has_split(config, "valid") and not has_split(config, "test")
    before = {path.name: path.stat() for path in folder.iterdir()}
    store.write("train.de", b"two\n")
    store.remove(["validation.tsv"])
    store.write("valid.tsv", b"a\tb\n")
    assert copy_text(url, config) == folder
    assert list(read_lines(folder / "train.de")) == [b"two"]
    assert (folder / "train.en.gz").stat() == before["train.en.gz"], "what has not changed keeps its stamp"
    assert not (folder / "validation.tsv").exists() and (folder / "valid.tsv").exists()
    with pytest.raises(UserError, match=rf"^{url} has no test.de \(or test.de.gz .* it has train.de"):
        find_files(folder, "test", ("de", "en"))
    with pytest.raises(UserError, match=rf"^{url}/old2 has no text file .*it is empty, or does not exist"):
        copy_text(f"{url}/old2", config)
