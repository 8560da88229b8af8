"""`translate` by worker processes and by Ray: the bytes of one process, whoever is killed."""

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_experiment import quick_environment

from flaxformer_mt.commands.main import main
from flaxformer_mt.commands.translate import check_equal
from flaxformer_mt.errors import UserError
from flaxformer_mt.text_io.resumable_output import ResumableOutput

ROOT = Path(__file__).resolve().parents[2]
# A sample depends on the number of its line, and so does --json.
FLAGS = ["--window=8", "--json", "--method=sample", "--seed=3"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Workers have one device as well, as a process of the same kind of machine would."""
    monkeypatch.chdir(tmp_path)
    for name, value in quick_environment(PYTHONPATH=str(ROOT)).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def command(tiny_run, tiny_text, tmp_path):
    """Translates 60 lines in 8 blocks; the lines are alike in pairs."""
    lines = (tiny_text / "train.xx").read_text(encoding="utf-8").split("\n")[:30] * 2
    Path("in").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return ["translate", f"--run={tiny_run}", "--input=in", *FLAGS]


def read_json(file):
    return [json.loads(line) for line in Path(file).read_bytes().split(b"\n")[:-1]]


def stop_after(monkeypatch, count, stop):
    """Calls `stop` when the output of this many lines has been written."""
    write, written = ResumableOutput.write, []

    def write_and_stop(self, lines):
        write(self, lines)
        written.append(1)
        if len(written) == count:
            stop()

    monkeypatch.setattr(ResumableOutput, "write", write_and_stop)


def test_workers_write_the_bytes_of_one_process_though_one_is_killed(command, monkeypatch, capfd):
    assert main([*command, "--output=alone"]) == 0
    found = read_json("alone")
    assert [one["line"] for one in found] == list(range(60))
    texts = [one["text"] for one in found]
    assert texts[:30] != texts[30:]  # two samples of each line
    assert main([*command, "--output=one_block", "--window=60"]) == 0
    assert [one["text"] for one in read_json("one_block")] == texts
    killed = []

    def kill_one():
        killed.append(multiprocessing.active_children()[0])
        killed[0].kill()

    with monkeypatch.context() as patch:
        stop_after(patch, 9, kill_one)
        assert main([*command, "--output=both", "--workers=2"]) == 0
    assert killed and Path("both").read_bytes() == Path("alone").read_bytes()
    error = capfd.readouterr().err
    assert error.count("a worker was ended by SIGKILL; lines ") == 1 and "done by another one" in error
    assert not multiprocessing.active_children()


def test_workers_with_other_devices_are_refused():
    check_equal({"precision": "float32"}, {"precision": "float32"})
    with pytest.raises(UserError, match="workers differ in devices: 1 in one and None in another"):
        check_equal({"devices": 1, "version": 2}, {"version": 2})


def test_a_command_resumes_with_and_without_workers(command, monkeypatch, capfd):
    assert main([*command, "--output=alone"]) == 0

    def interrupt():
        raise KeyboardInterrupt

    for first, second in ((["--workers=1"], []), ([], ["--workers=1"])):
        with monkeypatch.context() as patch:
            stop_after(patch, 20, interrupt)
            assert main([*command, "--output=out", *first]) == 130
        assert not multiprocessing.active_children()
        assert json.loads(Path("out.partial.json").read_text())["lines"] == 16
        assert main([*command, "--output=out", "--resume", *second]) == 0
        assert Path("out").read_bytes() == Path("alone").read_bytes()
        Path("out").unlink()


def test_ray_writes_the_bytes_of_one_process(command, capfd):
    pytest.importorskip("ray")
    assert main([*command, "--output=alone"]) == 0
    done = subprocess.run(
        [sys.executable, "-m", "flaxformer_mt", *command, "--output=ray", "--ray=local", "--workers=2"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert Path("ray").read_bytes() == Path("alone").read_bytes() and done.stdout == ""


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workers=0"], "--workers is 0; it must be at least 1"),
        (["--workers=2", "--output=-"], "--workers and --ray translate files; give --output=FILE"),
        (["--workers=2", "--input=-"], "--workers and --ray translate files; give --input=FILE"),
        (["--workers=2", "--checkpoint=77"], "checkpoint 77"),
        (["--ray=local"], "pip install"),
        (
            ["--workers=2", "--coordinator=a:1", "--processes=1", "--process=0"],
            "--workers starts workers by itself and excludes --coordinator",
        ),
    ],
)
def test_wrong_flags_are_refused_in_one_line(command, capfd, monkeypatch, flags, words):
    monkeypatch.setattr("flaxformer_mt.parallel.processes.connect", lambda **flags: None)
    # As if Ray were not installed.
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "flaxformer_mt.workers.ray_actors", raising=False)
    assert main([*command, "--output=out", *flags]) == 2
    error = capfd.readouterr().err
    assert words in error and error.count("\n") == 1 and not Path("out").exists()
