"""Inputs are fetched from a store, and outputs appear there when they are complete."""

from pathlib import Path

import pytest
from failing_store import move_to_machine, new_bucket, objects

from flaxformer_mt.commands.flags import run_locally
from flaxformer_mt.commands.options import ExportOptions, PlotOptions, ScoreOptions
from flaxformer_mt.errors import UserError
from flaxformer_mt.object_store.filesystem import ObjectStore
from flaxformer_mt.object_store.working_copies import fetch_input, open_output, publish_output


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
    plot = PlotOptions(source="http://x is a sentence")
    assert run_locally(lambda options: options, plot) is plot
    export = ExportOptions(run=Path("run"), format="torch", output=Path(f"{bucket}/x"))
    assert run_locally(lambda options: options, export) is export, "export_run uploads its own"
