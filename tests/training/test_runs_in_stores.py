"""`fit` and the commands on runs and text in an object store: the same bits as on a local disk."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from failing_store import close_copies, hurry, move_to_machine, new_bucket, objects, s3_bucket
from pytest import raises, warns
from test_loop import assert_same_run
from tiny_experiment import change

from flaxformer_mt.commands.main import main
from flaxformer_mt.config.files import save_config
from flaxformer_mt.errors import FlaxformerWarning, UserError
from flaxformer_mt.object_store import remote_runs
from flaxformer_mt.object_store.filesystem import ObjectStore
from flaxformer_mt.object_store.remote_runs import open_copy
from flaxformer_mt.parameter_trees import flatten_tree
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.runs.load_run import load_trained
from flaxformer_mt.training.initial_model import start_run
from flaxformer_mt.training.loop import fit


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    """A new bucket, seen by a machine that has never used it."""
    hurry(monkeypatch)
    move_to_machine(monkeypatch, tmp_path / "machine 0")
    yield new_bucket()
    close_copies()


def upload(folder, url: str) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    # The manifests last, as they are published.
    files.sort(key=lambda path: path.name == "manifest.json")
    ObjectStore(url).upload([(path, path.relative_to(folder).as_posix()) for path in files])


def same_bits(left, right) -> bool:
    left, right = flatten_tree(left), flatten_tree(right)
    return left.keys() == right.keys() and all(
        np.asarray(left[path]).tobytes() == np.asarray(right[path]).tobytes() for path in left
    )


def test_training_goes_on_elsewhere_after_a_kill(
    bucket, tiny_config, tiny_run, tiny_text, monkeypatch, tmp_path
):
    """The last checkpoint is in the store in part; another machine trains to the same bits."""
    upload(tiny_text, f"{bucket}/text")
    run = f"{bucket}/runs/x"
    config = change(tiny_config, data={"text_dir": f"{bucket}/text"})
    copy = shutil.copytree(tiny_run, tmp_path / "run")
    for name in ("report.json", "checkpoints/48/manifest.json", "checkpoints/48/params/manifest.ocdbt"):
        (copy / name).unlink()
    (copy / "checkpoints/48/params/d").mkdir(exist_ok=True)
    (copy / "checkpoints/48/params/d/left over").write_text("x")
    save_config(config, copy / "config.json")
    upload(copy, run)
    move_to_machine(monkeypatch, tmp_path / "machine 1")
    # While it trains, nobody else may.
    lock, refused = remote_runs.OwnerLock, []

    def take(store):
        owner = lock(store)
        with warns(FlaxformerWarning), raises(UserError, match="is being trained by") as caught:
            lock(store)
        refused.append(str(caught.value))
        return owner

    monkeypatch.setattr(remote_runs, "OwnerLock", take)
    report = fit(config, run)
    assert len(refused) == 1 and refused[0].startswith(run)
    stored = objects(run)
    assert json.loads(stored["report.json"]) == report
    steps = {name.split("/")[1] for name in stored if name.startswith("checkpoints/")}
    assert steps == {"16", "32", "48"} and not [name for name in stored if "/." in name or name[0] == "."]
    files = json.loads(stored["checkpoints/48/manifest.json"])["files"]
    assert len(files) == sum(name.startswith("checkpoints/48/") for name in stored) - 1
    move_to_machine(monkeypatch, tmp_path / "machine 2")
    copy = open_copy(run)
    for step in (16, 32, 48):  # as a reader would
        remote_runs.fetch(copy / "checkpoints" / str(step), lambda name: True)
    assert_same_run(copy, tiny_run)
    assert fit(config, run) == report, "a finished run"


def test_a_failed_upload_ends_training_and_keeps_the_checkpoints_before(bucket, tiny_run, monkeypatch):
    run = f"{bucket}/x"
    upload(tiny_run, run)
    checkpoints = Checkpoints(open_copy(run))
    original = ObjectStore.upload

    def refuse(self, pairs):
        pairs = list(pairs)
        if "checkpoints/50/params/_METADATA" in [name for _, name in pairs]:
            raise UserError(f"{self.url} cannot be written (test)")
        original(self, pairs)

    monkeypatch.setattr(ObjectStore, "upload", refuse)
    checkpoints.save(50, {"params": {"a": np.arange(5.0)}}, {"step": 50})
    with raises(UserError, match=rf"^{run} cannot be written"):
        checkpoints.wait()
    assert Checkpoints(open_copy(run)).steps() == [16, 32, 48]
    checkpoints.save(51, {"params": {"a": np.arange(5.0)}}, {"step": 51})
    checkpoints.wait()
    assert Checkpoints(open_copy(run)).newest_undamaged() == 51


def test_readers_get_the_same_bits_or_a_line(bucket, tiny_run, monkeypatch, tmp_path, capsys):
    run = f"{bucket}/x"
    upload(tiny_run, run)
    assert same_bits(load_trained(run).params, load_trained(tiny_run).params)
    copy = open_copy(run)
    assert sorted(path.name for path in copy.glob("checkpoints/*/params")) == [], "ema_params are read"
    assert len(list(copy.glob("checkpoints/*/ema_params"))) == 1, "of one checkpoint"
    # A damaged object is refused; restored, it is read again.
    store = ObjectStore(run)
    (name,) = [n for n in store.list("checkpoints/48/ema_params") if n.endswith("params/manifest.ocdbt")]
    content = store.read(name)
    store.write(name, content[:-1] + bytes([content[-1] ^ 1]))
    with raises(UserError, match=rf"checkpoint 48 of {run}/checkpoints is damaged: file ema_params/manif"):
        load_trained(run, checkpoint="48")
    store.write(name, content)
    assert same_bits(
        load_trained(run, checkpoint="48").params, load_trained(tiny_run, checkpoint="48").params
    )
    # A command, on a machine of its own, and its result there and here.
    move_to_machine(monkeypatch, tmp_path / "machine 1")
    assert main(["average", f"--run={run}", "--last=2"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"] == f"{run}/checkpoints/average"
    move_to_machine(monkeypatch, tmp_path / "machine 2")
    assert load_trained(run, checkpoint="average").progress["averaged_steps"] == [32, 48]
    # Absent runs and stores.
    assert main(["average", f"--run={bucket}/absent", "--last=2"]) == 2
    assert main(["translate", f"--run={run}", f"--input={bucket}/absent.de"]) == 2
    assert main(["average", "--run=ftp://host/x", "--last=2"]) == 2
    errors = capsys.readouterr().err.split("\n")
    assert errors[0] == f"error: {bucket}/absent is not a run directory: it has no config.json"
    assert errors[1] == f"error: {bucket}/absent.de does not exist; correct the URL"
    assert errors[2].startswith("error: ftp://host/x: the scheme ftp is unknown") and len(errors) == 4


def test_a_run_starts_from_another_one_in_a_store(bucket, tiny_run, tiny_config, monkeypatch, tmp_path):
    base, new = f"{bucket}/base", f"{bucket}/new"
    upload(tiny_run, base)
    config = start_run(tiny_config, open_copy(new), f"{base}@48")
    stored = objects(new)
    assert {"config.json", "checkpoints/0/manifest.json", "vocab/manifest.json"} <= set(stored)
    assert not any(name.startswith(".") for name in stored)
    move_to_machine(monkeypatch, tmp_path / "machine 1")
    assert same_bits(load_trained(new).params, load_trained(base, checkpoint="48").params)
    assert start_run(tiny_config, open_copy(new), f"{base}@48") == config, "the same run, resumed"
    with raises(UserError, match=rf"^{new} started from {base}@48, not from {base}@16"):
        start_run(tiny_config, open_copy(new), f"{base}@16")


@pytest.mark.filterwarnings("ignore")  # of these packages
def test_a_training_in_s3_that_is_killed_goes_on_elsewhere(tiny_config, tiny_run, tmp_path, monkeypatch):
    with s3_bucket(monkeypatch) as bucket:
        run = f"{bucket}/runs/x"
        code = "from flaxformer_mt import fit; from flaxformer_mt.config.files import read_config\n"
        code += f"fit(read_config({str(tiny_run / 'config.json')!r}), {run!r})"
        paths = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": paths, "FLAXFORMER_MT_CACHE": str(tmp_path / "machine 0")}
        child = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        store = ObjectStore(run)
        while "checkpoints/16/manifest.json" not in store.list():
            assert child.poll() is None, child.stderr.read().decode()
            time.sleep(0.02)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL and ".lock" in store.list()
        move_to_machine(monkeypatch, tmp_path / "machine 1")
        report = fit(tiny_config, run)
        assert report["step"] == 48 and ".lock" not in store.list()
        copy = remote_runs.open_copy(run)
        for step in (16, 32, 48):
            remote_runs.fetch(copy / "checkpoints" / str(step), lambda name: True)
        assert_same_run(copy, tiny_run)
        close_copies()
