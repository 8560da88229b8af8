"""Two processes of two simulated devices train as one of four does, and end when one of them dies."""

import contextlib
import json
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from made_up_text import write_text
from tiny_experiment import change, write_config_file

from flaxformer_mt.commands.main import main
from flaxformer_mt.scoring import metrics
from flaxformer_mt.tracking import read_metrics


@pytest.fixture(scope="module")
def config(tiny_config, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    shutil.copytree(tiny_config.data.text_dir, folder / "text")
    for number, (split, pairs) in enumerate({"valid": 8, "test": 7}.items(), start=1):
        write_text(folder / "text", split, pairs, seed=number)
    config = change(
        tiny_config,
        data={"text_dir": str(folder / "text"), "cache_dir": str(folder / "cache")},
        # Biases of keys have no gradient but rounding, which Adam would amplify with a smaller epsilon.
        optim={"epsilon": 1e-3},
        train={"log_every": 8, "evaluate_every": 48, "log_accuracy": False},
        search={"method": "greedy", "beam_size": 1},
        parallel={"data": 0, "backend": "mesh"},
    )
    return write_config_file(folder / "tiny.py", config)


@pytest.fixture(scope="module")
def one(config, tmp_path_factory) -> Path:
    """The run of one process, this one, on four devices."""
    run = tmp_path_factory.mktemp("one") / "run"
    with four_devices():
        assert main(["train", f"--config={config}", f"--run={run}"]) == 0
    return run


@contextlib.contextmanager
def four_devices() -> Iterator[None]:
    devices = jax.devices()[:4]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("devices", "local_devices"):
            patch.setattr(jax, name, lambda *arguments, **options: devices)
        for name in ("device_count", "local_device_count"):
            patch.setattr(jax, name, lambda *arguments: 4)
        yield


@pytest.fixture(scope="module")
def killed(config, jobs, tmp_path_factory) -> tuple[Path, str]:
    """A run of two processes, two devices each, of which the second is killed; what the first one prints."""
    run = tmp_path_factory.mktemp("two") / "run"
    train = {"flags": ["train", f"--config={config}", f"--run={run}"], "run": str(run)}
    printed, _ = jobs.run("train_until_killed", 75, -signal.SIGKILL, seconds=60, **train)
    assert not (run / "report.json").exists()
    return run, printed


@pytest.fixture(scope="module")
def two(config, killed, jobs) -> tuple[Path, list[str]]:
    """That run, resumed by two processes; what both print."""
    run, *_ = killed
    return run, jobs.run("command", flags=["train", f"--config={config}", f"--run={run}"], devices=2)


def numbers(run: Path, *splits: str) -> list[dict[str, float]]:
    clocks = ("time", "seconds", "per_second", "data_wait")
    return [
        {name: value for name, value in record.items() if not name.endswith(clocks)}
        for record in read_metrics(run)
        if record["split"] in splits
    ]


def assert_alike(left: Path, right: Path) -> None:
    """Every number that was logged, within rounding of the order of sums, and the translations."""
    ours, theirs = (numbers(run, "train", "valid", "epoch") for run in (left, right))
    assert len(ours) == len(theirs) > 6
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            assert other[name] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-5)), name
    hypotheses = [(run / "translations" / "test.hypothesis").read_text() for run in (left, right)]
    assert hypotheses[0] == hypotheses[1]
    reports = [json.loads((run / "report.json").read_text()) for run in (left, right)]
    for name in ("step", "target_tokens", "parameters"):
        assert reports[0][name] == reports[1][name]
    assert reports[0]["test"]["bleu"] == reports[1]["test"]["bleu"]


def test_a_killed_process_ends_the_other(killed):
    _, printed = killed
    (line,) = [line for line in printed.split("\n") if line.startswith("error: ")]
    assert "a process of this job or its machine has died" in line
    assert "resume from the last checkpoint" in line
    assert re.search(r"unhealthy \(stopped sending heartbeats\):\n1\n", printed), "JAX names the process"


def test_two_processes_train_resume_evaluate_and_translate_as_one_does(one, two):
    run, _ = two
    assert_alike(run, one)
    report = json.loads((one / "report.json").read_text(encoding="utf-8"))["test"]
    assert report["bleu"] > 0, "empty translations would be alike whatever was computed"


def test_the_first_process_speaks_for_all(two):
    _, (printed, other) = two
    assert json.loads(printed[printed.index("{\n") :])["step"] == 48
    assert "resuming at step" in printed
    assert "4 simulated devices of 2 processes" in printed and "step    48/48" in printed
    assert "step" not in other


def test_two_processes_translate_files_as_one_does(one, jobs, tmp_path, monkeypatch):
    """With a line that is too long, an empty one, and all fields of the JSON lines."""
    source = tmp_path / "source.txt"
    source.write_text("ba do\n\n" + "fi gu ka lo mi nu " * 6 + "\nka\nlo lo\nmi nu ba\n", encoding="utf-8")
    scorer = tmp_path / "size.py"
    scorer.write_text(
        "import json, sys\nfor line in sys.stdin: print(-len(json.loads(line)['hypothesis']), flush=True)"
    )
    monkeypatch.setattr(metrics, "_OTHERS", dict(metrics._OTHERS))
    command = ["translate", "--json", f"--run={one}", f"--input={source}"]
    # Each process asks a scorer of its own for the sentences that are its.
    command += ["--method=beam", "--beam_size=2", "--rerank=size", f"--scorer={sys.executable} {scorer}"]
    with four_devices():
        assert main([*command, f"--output={tmp_path / 'alone'}"]) == 0
    printed, other = jobs.run("command", flags=[*command, f"--output={tmp_path / 'both'}"], devices=2)
    assert "line 3: longer than" in printed and "warning" not in other
    alone, both = (
        [json.loads(line) for line in (tmp_path / name).read_text(encoding="utf-8").splitlines()]
        for name in ("alone", "both")
    )
    assert len(alone) == len(both) == 6
    for mine, other in zip(alone, both, strict=True):
        assert mine.keys() == other.keys()
        for name in ("text", "tokens", "alignment"):
            assert mine[name] == other[name]
        assert other["score"] == pytest.approx(mine["score"], abs=1e-5)


def test_standard_input_cannot_be_shared(one, jobs):
    for printed in jobs.run("command", 2, 2, flags=["translate", f"--run={one}"]):
        assert "error: 2 processes cannot all read standard input; give --input=FILE" in printed


def test_inconsistent_flags_are_user_errors(capsys):
    assert main(["train", "--processes=2", "--process=2", "--coordinator=127.0.0.1:1"]) == 2
    assert capsys.readouterr().err.endswith("error: --process=2 of --processes=2: it must be from 0 to 1\n")
    assert main(["train", "--processes=2"]) == 2
    assert "error: --coordinator and --process missing: several" in capsys.readouterr().err
