"""The cache: what killed processes left goes, what is written now stays, damage is seen; texts of stores."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from failing_store import hurry, move_to_machine, new_bucket
from tiny_experiment import change

from flaxformer_mt.commands.main import main
from flaxformer_mt.config import CleanConfig, DataConfig
from flaxformer_mt.corpus import caches, read_pairs
from flaxformer_mt.corpus.caches import read_arrays, read_cached, use_cache, write_arrays, write_cached
from flaxformer_mt.corpus.reader import copy_text, has_split
from flaxformer_mt.corpus.text_files import find_files, read_lines
from flaxformer_mt.corpus.toy import toy_de_en
from flaxformer_mt.errors import FlaxformerWarning, UserError
from flaxformer_mt.object_store.filesystem import ObjectStore

OWNER = """
import sys
from pathlib import Path
from flaxformer_mt.corpus.caches import use_cache
use_cache(Path(sys.argv[1]))
print("in use", flush=True)
sys.stdin.read()
"""

# What a process leaves that is killed while it writes, and finished files beside it.
LEFTOVERS = [
    "vocabularies/0af/.joint.model.01acfe50",
    "cleaned/8fc.json7x_9abcd",
    "cleaned/8fc.npyq3kk2abc",
    "scans/8fc.json7x_9abcd",
    "alignments/8fc.points.npy7x_9abcd",
    "alignments/8fc.json7x_9abcd",
    "weights/.8fc.weights.npy.01acfe50",
    "weights/.8fc.json.01acfe50",
    "tfds/toy_de_en/..1.1.0.files.json.01acfe50",
    "scans/tmp12345678",
    "tfds/toy_de_en/incomplete.43Q4HT_1.1.0/toy.array_record",
    "tfds/parallel_text/92d/incomplete.0ED5KN_1.0.0/features.json",
    "tokens/.tokens-8fc.0001/source.tokens.npy",
    "tokens/process-1/.tokens-8fc.0002/source.tokens.npy",
]
FINISHED = [
    "vocabularies/0af/joint.model",
    "cleaned/8fc.json",
    "cleaned/8fc.npy",
    "scans/8fc.json",
    "alignments/8fc.points.npy",
    "alignments/8fc.json",
    "tfds/toy_de_en/1.1.0/toy.array_record",
    "tfds/toy_de_en/.1.1.0.files.json",
    "weights/8fc.weights.npy",
    "weights/8fc.json",
    "tokens/tokens-8fc/source.tokens.npy",
    "tokens/process-1/tokens-8fc/source.tokens.npy",
]


def fill(root: Path) -> None:
    for name in [*LEFTOVERS, *FINISHED]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")


def files_in(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.fixture(autouse=True)
def another_process(monkeypatch):
    """Each test starts as a process does that has not used a cache yet."""
    monkeypatch.setattr(caches, "_held", {})


def test_leftovers_go_unless_somebody_may_be_writing_them(tmp_path):
    fill(tmp_path)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout.readline() == "in use\n"
        fill(tmp_path)  # what the owner is writing
        use_cache(tmp_path)
        assert files_in(tmp_path) == sorted([".lock", *LEFTOVERS, *FINISHED])
        os.close(caches._held.pop(tmp_path))
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    use_cache(tmp_path)
    assert files_in(tmp_path) == sorted([".lock", *FINISHED])


def test_a_killed_preparation_is_swept_by_the_next(tmp_path):
    (tmp_path / "text").mkdir()
    for language in ("de", "en"):
        (tmp_path / "text" / f"train.{language}").write_text("a\nb\n\nc\n")
    fill(tmp_path / "cache")
    rules = CleanConfig(empty="drop")
    config = DataConfig(
        dataset="parallel_text",
        text_dir=str(tmp_path / "text"),
        cache_dir=str(tmp_path / "cache"),
        clean=rules,
    )
    assert len(read_pairs(config, "train")) == 3
    left = set(files_in(tmp_path / "cache"))
    assert not left & set(LEFTOVERS) and left > set(FINISHED)


def test_a_cache_that_cannot_be_written_can_still_be_read(tmp_path):
    (tmp_path / "file").write_text("")
    use_cache(tmp_path / "file" / "cache")


def test_many_caches_keep_few_files_open(tmp_path):
    for number in range(caches._MOST + 3):
        use_cache(tmp_path / str(number))
    assert len(caches._held) == caches._MOST


def test_damaged_json_counts_as_absent(tmp_path):
    path = tmp_path / "folder" / "x.json"
    values = {"a": [1, "ä\udcff"], "b": None}
    write_cached(path, values)
    assert read_cached(path) == values and [p.name for p in path.parent.iterdir()] == ["x.json"]
    content = path.read_bytes()
    for index in range(len(content)):
        path.write_bytes(content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :])
        assert read_cached(path) in (None, values)
    for damaged in (content[:-1], b"", b"[]", b"[" * 100_000, b'{"values": {}, "blake2b": 3}', b"\xff"):
        path.write_bytes(damaged)
        assert read_cached(path) is None
    path.unlink()
    os.mkfifo(path)
    assert read_cached(path) is None
    path.unlink()
    path.mkdir()
    assert read_cached(path) is None


def test_other_users_of_a_cache_may_read_it(tmp_path):
    """A temporary file of Python's own is for its owner alone; those of the cache follow the umask."""
    before = os.umask(0o027)
    try:
        write_arrays(tmp_path, "x", {"a": np.arange(3)}, number=1)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"x.json": 0o640, "x.a.npy": 0o640}


def test_arrays_that_are_absent_or_changed_count_as_absent(tmp_path):
    arrays = {"a": np.arange(5), "b": np.zeros((0, 2), np.int32)}
    write_arrays(tmp_path, "x", arrays, number=1)
    found, values = read_arrays(tmp_path, "x")
    assert values == {"number": 1} and found.keys() == arrays.keys()
    assert all(
        (found[name] == arrays[name]).all() and found[name].dtype == arrays[name].dtype for name in found
    )
    assert read_arrays(tmp_path, "y") is None
    write_cached(tmp_path / "y.json", {"weights": "0af"})  # of an earlier version
    assert read_arrays(tmp_path, "y") is None
    content = (tmp_path / "x.a.npy").read_bytes()
    for damaged in (b"", content[:-1], content[:-1] + b"x"):
        (tmp_path / "x.a.npy").write_bytes(damaged)
        assert read_arrays(tmp_path, "x") is None
    (tmp_path / "x.a.npy").unlink()
    assert read_arrays(tmp_path, "x") is None


def test_damaged_results_of_cleaning_are_computed_again(tmp_path):
    """Rows that are missing or changed would train on other pairs."""
    (tmp_path / "text").mkdir()
    for language in ("de", "en"):
        (tmp_path / "text" / f"train.{language}").write_text("a\nb\n\nc\n")
    config = DataConfig(
        dataset="parallel_text",
        text_dir=str(tmp_path / "text"),
        cache_dir=str(tmp_path / "cache"),
        clean=CleanConfig(empty="drop"),
    )
    expected = list(read_pairs(config, "train"))
    (rows,) = (tmp_path / "cache" / "cleaned").glob("*.rows.npy")
    (hashes,) = (tmp_path / "cache" / "cleaned").glob("*.hashes.npy")
    (report,) = (tmp_path / "cache" / "cleaned").glob("*.json")
    for damage in (
        rows.unlink,
        lambda: np.save(rows, np.array([0, 1])),
        lambda: rows.write_bytes(b""),
        lambda: hashes.write_bytes(b""),
        report.unlink,
        lambda: report.write_text("{"),
    ):
        damage()
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
    ]:
        (path,) = (tmp_path / "cache" / "tfds").rglob(name)
        path.unlink()
        replace(path)
        with pytest.warns(FlaxformerWarning, match=r"pipe, a device|is damaged"):
            assert list(read_pairs(config, "test")) == expected


# ---- store text ----


def test_texts_weights_and_alignments_are_fetched_and_nothing_else(
    tiny_config, tmp_path, monkeypatch, capsys
):
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
    config = DataConfig(
        dataset="parallel_text",
        text_dir=url,
        source_language="de",
        target_language="en",
        cache_dir=str(tmp_path / "cache"),
    )
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
    for wrong, found in ((f"{url}/old2", "it is empty, or does not exist"), (f"{url}/old", "")):
        languages = {"source_language": "xx", "target_language": "yy"} if found == "" else {}
        with pytest.raises(UserError, match=rf"^{wrong} has no text file .*{found or 'it has train.de'}"):
            copy_text(wrong, DataConfig(cache_dir=config.cache_dir, **languages))
