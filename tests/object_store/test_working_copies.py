"""Runs, inputs and outputs in a store: whoever dies, readers see the old state or the new one, all of it."""

import contextlib
import itertools
import os
from pathlib import Path

import pytest
from failing_store import Killed, killed_at, move_to_machine, new_bucket, objects

from flaxformer_mt import atomic_folder
from flaxformer_mt.commands.flag_parser import run_locally
from flaxformer_mt.commands.options import ExportOptions, PlotOptions, ScoreOptions
from flaxformer_mt.errors import UserError
from flaxformer_mt.object_store.filesystem import ObjectStore
from flaxformer_mt.object_store.remote_runs import _Copy, fetch_input, open_output, publish_output


@pytest.fixture
def open_elsewhere(tmp_path, monkeypatch):
    """Makes a copy of a run on a machine that has never seen it."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # takes most of the time
    numbers = itertools.count()

    def make(url: str) -> _Copy:
        monkeypatch.setenv("FLAXFORMER_MT_CACHE", str(tmp_path / f"machine{next(numbers)}"))
        copy = _Copy(url)
        copy.refresh(copy.root)
        return copy

    return make


def write_checkpoint(copy: _Copy, step: int, text: str) -> Path:
    """A sealed folder whose files all hold this text."""
    folder = copy.root / "checkpoints" / str(step)
    if folder.exists():
        atomic_folder.remove_folder(folder)
    (folder / "params" / "d").mkdir(parents=True)
    for name in ("params/d/a", f"params/d/{text}", "params/manifest.ocdbt", "progress.json"):
        (folder / name).write_text(text)
    atomic_folder.seal_folder(folder, {"text": text})
    return folder


def read_run(copy: _Copy) -> dict[str, str]:
    """The text of each checkpoint, all of whose files must be whole, and of each other file."""
    found = {}
    for folder in sorted((copy.root / "checkpoints").glob("[0-9]*")):
        copy.fetch_folder(folder, lambda name: True)
        assert not atomic_folder.find_damage(folder), (folder, atomic_folder.find_damage(folder))
        facts = atomic_folder.read_metadata(folder)
        assert {path.read_text() for path in folder.rglob("params/d/*")} == {facts["text"]}
        found[folder.name] = facts["text"] + facts.get("scores", "")
    others = (path for path in copy.root.rglob("*") if path.is_file() and "checkpoints" not in path.parts)
    return found | {path.relative_to(copy.root).as_posix(): path.read_text() for path in others}


def make_run(copy: _Copy, log: str = "a") -> None:
    (copy.root / "config.json").write_text("config")
    (copy.root / "metrics.jsonl").write_text(log)
    copy.publish(copy.root)


def test_a_run_is_the_same_on_another_machine(open_elsewhere, monkeypatch):
    url, fetched = f"{new_bucket()}/runs/x", []
    writer = open_elsewhere(url)
    make_run(writer)
    for name in ("tensorboard/events", "vocab/manifest.json", "vocab/joint.model", ".config.json.1a2b3c4d"):
        (writer.root / name).parent.mkdir(exist_ok=True)
        (writer.root / name).write_text(name)
    writer.publish(write_checkpoint(writer, 5, "five"))
    with monkeypatch.context() as patch:  # what was uploaded is not fetched again
        patch.setattr(ObjectStore, "download", lambda self, pairs: fetched.extend(pairs))
        writer.refresh(writer.root)
        assert read_run(writer)["5"] == "five" and not fetched
    reader = open_elsewhere(url)
    assert not (reader.root / "checkpoints" / "5" / "params").exists(), "arrays are fetched when read"
    expected = {"config.json": "config", "metrics.jsonl": "a", "vocab/joint.model": "vocab/joint.model"}
    expected["vocab/manifest.json"] = "vocab/manifest.json"
    assert read_run(reader) == expected | {"5": "five"}
    assert "tensorboard/events" in objects(url) and ".config.json.1a2b3c4d" not in objects(url)
    # What the store lacks is deleted; what has changed there is fetched again, and nothing else is.
    (reader.root / "left over").write_text("x")
    (reader.root / "metrics.jsonl").write_text("changed here")
    writer.publish(write_checkpoint(writer, 6, "six"))
    writer.remove("checkpoints/5")
    before = (reader.root / "config.json").stat()
    reader.refresh(reader.root)
    assert (reader.root / "config.json").stat() == before
    assert read_run(reader) == expected | {"6": "six"}
    assert not (reader.root / "checkpoints" / "5").exists()


def change_facts(copy: _Copy) -> None:
    folder = copy.root / "checkpoints" / "5"
    atomic_folder.replace_metadata(folder, {"text": "old", "scores": ", scored"})
    copy.publish(folder)


@pytest.mark.parametrize(
    ("change", "between", "after"),
    [
        (lambda copy: copy.publish(write_checkpoint(copy, 6, "new")), {"5": "old"}, {"5": "old", "6": "new"}),
        (lambda copy: copy.publish(write_checkpoint(copy, 5, "new")), {}, {"5": "new"}),
        (change_facts, {"5": "old"}, {"5": "old, scored"}),
        (lambda copy: copy.remove("checkpoints/5"), {"5": "old"}, {}),
    ],
    ids=["new", "again", "facts", "withdrawn"],
)
def test_killed_at_any_object_a_checkpoint_is_whole(change, between, after, open_elsewhere, monkeypatch):
    """It is the old one or the new one; one that is written again may be absent between."""
    seen = set()
    for number in itertools.count():
        url = f"{new_bucket()}/x"
        writer = open_elsewhere(url)
        make_run(writer)
        writer.publish(write_checkpoint(writer, 5, "old"))
        (writer.root / "metrics.jsonl").write_text("b")
        ended = False
        with killed_at(monkeypatch, number), contextlib.suppress(Killed):
            change(writer)
            ended = True
        found = read_run(open_elsewhere(url))
        steps = {name: text for name, text in found.items() if name.isdigit()}
        assert steps in ({"5": "old"}, between, after), (number, found)
        assert steps == after or not ended
        seen.add(tuple(steps.items()))
        # The next owner repairs the store: nothing is left that is no file of the run, and training goes on.
        owner = open_elsewhere(url)
        owner.sweep("checkpoints/")
        owner.publish(write_checkpoint(owner, 7, "seven"))
        names = set(objects(url))
        steps |= {"7": "seven"}
        assert {name.split("/")[1] for name in names if name.startswith("checkpoints/")} == set(steps)
        for step, text in steps.items():
            word = text.removesuffix(", scored")
            assert f"checkpoints/{step}/params/d/{word}" in names
            other = {"old", "new"} - {word}
            assert not names & {f"checkpoints/{step}/params/d/{word}" for word in other}
        assert read_run(open_elsewhere(url)) == found | {"7": "seven"}
        if ended:
            break
    assert len(seen) == len({str(state) for state in ({"5": "old"}, between, after)}) and number >= 2


def test_killed_at_any_object_a_new_run_exists_as_a_whole_or_not_at_all(open_elsewhere, monkeypatch):
    whole, ended = {"0": "zero", "config.json": "config", "metrics.jsonl": "a"}, False
    for number in itertools.count():
        url = f"{new_bucket()}/x"
        with killed_at(monkeypatch, number), contextlib.suppress(Killed):
            writer = open_elsewhere(url)
            (writer.root / "config.json").write_text("config")
            (writer.root / "metrics.jsonl").write_text("a")
            writer.publish(write_checkpoint(writer, 0, "zero"))  # not before the config
            assert not objects(url)
            writer.publish(writer.root)
            ended = True
        assert read_run(open_elsewhere(url)) == (whole if ended else {}), number
        if ended:
            break
        # Another run takes its place, whether it is new or trained from random parameters.
        other, expected = open_elsewhere(url), {"config.json": "config"}
        if number % 2:
            expected["0"] = "other"
            write_checkpoint(other, 0, "other")
            (other.root / "config.json").write_text("config")
            other.publish(other.root)
        else:
            make_run(other)
        found = read_run(open_elsewhere(url))
        found.pop("metrics.jsonl", None)  # which the first one may have written before it was killed
        assert found == expected
    assert number >= 7


def test_damaged_and_missing_objects_are_found(open_elsewhere):
    url, name = f"{new_bucket()}/x", "checkpoints/5/params/d/a"
    writer, store = open_elsewhere(url), ObjectStore(url)
    make_run(writer)
    writer.publish(write_checkpoint(writer, 5, "five"))
    for content in (b"fivE", b"fiv", None):
        store.remove([name])
        if content is not None:
            store.write(name, content)
        reader = open_elsewhere(url)
        folder = reader.root / "checkpoints" / "5"
        reader.fetch_folder(folder, lambda name: True)
        assert "file params/d/a " in atomic_folder.find_damage(folder), content
        # Restored in the store, it is fetched again.
        store.write(name, b"five")
        reader.refresh(reader.root)
        assert read_run(reader)["5"] == "five"


def test_parts_of_other_processes_become_one_checkpoint(open_elsewhere):
    url = f"{new_bucket()}/x"
    first, second = open_elsewhere(url), open_elsewhere(url)
    make_run(first)
    hidden = "checkpoints/.writing-5-abc"
    for copy, name in ((first, "0"), (second, "1")):
        (copy.root / hidden / "params" / name).mkdir(parents=True)
        (copy.root / hidden / "params" / name / "d").write_text(name)
    second.send_parts(second.root / hidden)
    first.collect_parts(first.root / hidden)
    (first.root / hidden / "progress.json").write_text("{}")
    atomic_folder.seal_folder(first.root / hidden, {"text": "x"})
    (first.root / hidden).rename(first.root / "checkpoints" / "5")
    ObjectStore(url).write("checkpoints/.writing-6-def/params/1/d", b"of the next checkpoint")
    first.publish(first.root / "checkpoints" / "5")
    left = [name for name in objects(url) if "/.writing-" in name]
    assert left == ["checkpoints/.writing-6-def/params/1/d"], "of a job that goes on"
    ObjectStore(url).remove(left)
    assert {name for name in objects(url) if "checkpoints/" in name} == {
        f"checkpoints/5/{name}" for name in ("params/0/d", "params/1/d", "progress.json", "manifest.json")
    }
    reader = open_elsewhere(url)
    reader.fetch_folder(reader.root / "checkpoints" / "5", lambda name: True)
    assert not atomic_folder.find_damage(reader.root / "checkpoints" / "5")


@pytest.fixture
def bucket(tmp_path, monkeypatch) -> str:
    move_to_machine(monkeypatch, tmp_path / "machine")
    return new_bucket()


def test_inputs_are_files_or_folders(bucket):
    store = ObjectStore(bucket)
    for name in ("in/a.de", "in/a.de.more", "in/model/x", "in/model/d/y"):
        store.write(name, name.encode())
    other = fetch_input(f"{bucket}/in/a.de.more")
    assert fetch_input(f"{bucket}/in/a.de").read_bytes() == b"in/a.de"
    assert other.read_bytes() == b"in/a.de.more", "whose name begins alike"
    store.write("in/a.de", b"newer")
    assert fetch_input(f"{bucket}/in/a.de").read_bytes() == b"newer"
    model = fetch_input(Path(f"{bucket}/in/model"))
    assert sorted(path.name for path in model.rglob("*") if path.is_file()) == ["x", "y"]
    store.write("in/model/x", b"new")
    store.remove(["in/model/d/y"])
    assert (fetch_input(f"{bucket}/in/model") / "x").read_bytes() == b"new"
    assert not (model / "d" / "y").exists()
    assert fetch_input("~/x") == Path.home() / "x"
    with pytest.raises(UserError, match=rf"^{bucket}/in/b does not exist; correct the URL"):
        fetch_input(f"{bucket}/in/b")


def test_outputs_appear_when_they_are_complete(bucket):
    file, folder = open_output(f"{bucket}/out/a.en"), open_output(f"{bucket}/out/model", empty=True)
    file.write_bytes(b"text")
    (folder / "d").mkdir(parents=True)
    (folder / "d" / "x").write_bytes(b"x")
    assert not objects(bucket)
    publish_output(file)
    publish_output(folder)
    publish_output(file)  # only once
    assert objects(bucket) == {"out/a.en": b"text", "out/model/d/x": b"x"}
    assert not file.exists() and not folder.exists()
    with pytest.raises(UserError, match=rf"^{bucket}/out/model is not empty: it has model/d/x; give another"):
        open_output(f"{bucket}/out/model", empty=True)
    publish_output(Path("nowhere"))  # of a path that is no URL


def test_commands_see_local_paths(bucket):
    ObjectStore(bucket).write("a.en", b"text\n")

    def score(options: ScoreOptions) -> str:
        Path(options.output).write_bytes(Path(options.target).read_bytes())
        return options.output

    run_locally(score, ScoreOptions(run=Path("run"), target=f"{bucket}/a.en", output=f"{bucket}/b"))
    assert objects(bucket)["b"] == b"text\n"
    with pytest.raises(ZeroDivisionError):  # nothing is uploaded
        run_locally(lambda options: 1 / 0, ScoreOptions(run=Path("r"), target="a", output=f"{bucket}/c"))
    assert set(objects(bucket)) == {"a.en", "b"}
    plot = PlotOptions(run=Path("run"), source="http://x is a sentence")
    assert run_locally(lambda options: options, plot) is plot
    export = ExportOptions(run=Path("run"), format="torch", output=Path(f"{bucket}/x"))
    assert run_locally(lambda options: options, export) is export, "export_run uploads its own"
