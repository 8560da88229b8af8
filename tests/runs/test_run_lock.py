"""The lock of a run: one owner at a time, free when its owner is dead, and no traces of it."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from flaxformer_mt.errors import FlaxformerWarning, UserError
from flaxformer_mt.runs.run_directory import lock_run

OWNER = """
import sys
from pathlib import Path
from flaxformer_mt.runs.run_directory import lock_run
with lock_run(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_second_owner_is_refused_with_the_first_and_a_killed_one_holds_nothing(tmp_path):
    run = tmp_path / "runs" / "a"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout.readline() == "locked\n"
        for _ in range(2):
            with (
                pytest.raises(UserError, match=f"{run} is being trained by process {owner.pid} on .*--run="),
                lock_run(run),
            ):
                pass
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert (run / ".lock").exists()
        with lock_run(run):
            (run / "config.json").write_text("")
            with pytest.raises(UserError, match=f"by process {os.getpid()} on host"), lock_run(run):
                pass
    assert [path.name for path in run.iterdir()] == ["config.json"]


def test_a_run_that_writes_nothing_leaves_nothing(tmp_path):
    (tmp_path / "there").mkdir()
    for run in (tmp_path / "new" / "deep" / "run", tmp_path / "there"):
        with pytest.raises(ZeroDivisionError), lock_run(run):
            assert (run / ".lock").exists()
            raise ZeroDivisionError
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match="cannot write to the run directory .*file/run"),
        lock_run(tmp_path / "file" / "run"),
    ):
        pass


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(FlaxformerWarning, match="has no locks"), lock_run(tmp_path):
        pass
