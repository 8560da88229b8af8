"""Two processes of two simulated devices train as one of four does, and end when one of them dies."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from made_up_text import write_text

from flaxformer_mt.tracking import read_metrics

ROOT = Path(__file__).resolve().parents[2]

CONFIG = """
from flaxformer_mt.config import *


def get_config() -> Config:
    return Config(
        seed=5,
        data=DataConfig(
            dataset="parallel_text", text_dir={text!r}, cache_dir={cache!r}, source_language="xx",
            target_language="yy", max_source_length=16, max_target_length=16, batch_tokens=128, num_shapes=1,
        ),
        vocab=VocabConfig(kind="bpe", size=40, byte_fallback=False, normalization="identity"),
        model=ModelConfig(
            num_encoder_layers=1, num_decoder_layers=1, model_dim=16, num_heads=2, ffn_dim=16,
            dropout_rate=0.1,
        ),
        optim=OptimConfig(learning_rate=0.02, warmup_steps=4, ema_decay=0.9, epsilon=1e-3),
        train=TrainConfig(
            steps=12, log_every=2, evaluate_every=6, checkpoint_every=4, tensorboard=False, prng="threefry",
        ),
        parallel=ParallelConfig(backend="mesh"),
        search=SearchConfig(beam_size=2, max_length_offset=4),
    )
"""


def start(
    *arguments: str | Path, devices: int, together: tuple[int, int, int] | None = None
) -> subprocess.Popen:
    """The command line on so many simulated devices; together: number of processes, this one's, port."""
    command = [sys.executable, "-m", "flaxformer_mt", *map(str, arguments)]
    if together is not None:
        processes, process, port = together
        command += [f"--coordinator=127.0.0.1:{port}", f"--processes={processes}", f"--process={process}"]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={
            **os.environ,
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "FLAXFORMER_MT_PROCESS_TIMEOUT": "10",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_two(*arguments: str | Path) -> list[subprocess.Popen]:
    port = free_port()
    return [start(*arguments, devices=2, together=(2, process, port)) for process in (0, 1)]


def finish(*processes: subprocess.Popen) -> list[tuple[str, str]]:
    """Standard output and error of each, once all have ended well."""
    ended = [process.communicate(timeout=300) for process in processes]
    for process, (_, said) in zip(processes, ended, strict=True):
        assert process.returncode == 0, said
    return ended


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    text, cache = tmp_path_factory.mktemp("text"), tmp_path_factory.mktemp("cache")
    for number, (split, pairs) in enumerate({"train": 64, "valid": 8, "test": 7}.items()):
        write_text(text, split, pairs, seed=number)
    path = tmp_path_factory.mktemp("config") / "tiny.py"
    path.write_text(CONFIG.format(text=str(text), cache=str(cache)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def one(config, tmp_path_factory) -> Path:
    """The run of one process with four devices."""
    run = tmp_path_factory.mktemp("one") / "run"
    finish(start("train", f"--config={config}", f"--run={run}", devices=4))
    return run


@pytest.fixture(scope="module")
def two(config, one, tmp_path_factory) -> tuple[Path, list[tuple[str, str]]]:
    """The run of two processes with two devices each, and what they said."""
    run = tmp_path_factory.mktemp("two") / "run"
    return run, finish(*start_two("train", f"--config={config}", f"--run={run}"))


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


def test_two_processes_train_evaluate_and_translate_as_one_does(one, two):
    run, _ = two
    assert_alike(run, one)


def test_the_first_process_speaks_for_all(two):
    _, ((result, said), (silence, whisper)) = two
    assert json.loads(result)["step"] == 12
    assert "4 simulated devices of 2 processes" in said and "step    12/12" in said
    assert silence == ""
    assert "step" not in whisper


def test_two_processes_translate_and_score_files_as_one_does(one, config, tmp_path):
    """With a line that is too long, an empty one, and everything that JSON lines say."""
    source = tmp_path / "source.txt"
    source.write_text("ba do\n\n" + "fi gu ka lo mi nu " * 6 + "\nka\nlo lo\nmi nu ba\n", encoding="utf-8")
    flags = [f"--run={one}", f"--input={source}", "--json"]
    finish(start("translate", *flags, f"--output={tmp_path / 'alone'}", devices=4))
    ((_, said), (silence, whisper)) = finish(*start_two("translate", *flags, f"--output={tmp_path / 'both'}"))
    assert "line 3: longer than" in said and silence == "" and "warning" not in whisper
    alone, both = ([json.loads(line) for line in (tmp_path / name).open()] for name in ("alone", "both"))
    assert len(alone) == len(both) == 6
    for mine, other in zip(alone, both, strict=True):
        assert mine.keys() == other.keys()
        for name in ("text", "tokens", "alignment"):
            assert mine[name] == other[name]
        assert other["score"] == pytest.approx(mine["score"], abs=1e-5)
    ((result, _), (silence, _)) = finish(*start_two("evaluate", f"--run={one}", "--bootstrap=0"))
    report = json.loads((one / "report.json").read_text())["test"]
    assert json.loads(result)["bleu"] == report["bleu"] and silence == ""


def test_standard_input_cannot_be_shared(one):
    for process in start_two("translate", f"--run={one}"):
        said = process.communicate(timeout=120)[1]
        assert process.returncode == 2
        assert "error: 2 processes cannot all read standard input; give --input=FILE" in said


def test_a_killed_process_ends_the_other_and_the_run_goes_on_alone(config, tmp_path):
    """After ten updates or more; then one process of four devices ends where an undisturbed run does."""
    longer = ["--config.train.steps=60", "--config.train.checkpoint_every=10"]
    longer += ["--config.train.evaluate_every=30", f"--config={config}"]
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    finish(start("train", *longer, f"--run={undisturbed}", devices=4))
    first, second = start_two("train", *longer, f"--run={run}")
    deadline = time.monotonic() + 240
    while not (run / "checkpoints" / "10" / "manifest.json").exists():
        assert time.monotonic() < deadline and first.poll() is None and second.poll() is None
        time.sleep(0.02)
    second.kill()
    killed = time.monotonic()
    _, said = first.communicate(timeout=120)
    assert time.monotonic() - killed < 60
    assert first.returncode == 75 and not (run / "report.json").exists()
    (line,) = [line for line in said.split("\n") if line.startswith("error: ")]
    assert "process 1 of 2 has sent no heartbeat" in line and "resume from the last checkpoint" in line
    second.communicate()
    ((_, said),) = finish(start("train", *longer, f"--run={run}", devices=4))
    assert "resuming at step" in said
    assert_alike(run, undisturbed)


def test_flags_that_do_not_go_together_are_the_users_mistake():
    process = start("train", "--processes=2", "--process=2", "--coordinator=127.0.0.1:1", devices=1)
    said = process.communicate()[1]
    assert process.returncode == 2
    assert said.endswith("error: --process=2 of --processes=2: it must be from 0 to 1\n")
    process = start("train", "--processes=2", devices=1)
    assert "error: --coordinator and --process missing: several" in process.communicate()[1]
