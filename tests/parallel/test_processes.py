"""Two processes of two simulated devices train as one of four does, and end when one of them dies."""

import json
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import pytest
from made_up_text import write_text
from tiny_experiment import change, quick_environment

from flaxformer_mt.commands.main import main
from flaxformer_mt.config.files import to_dict
from flaxformer_mt.tracking import read_metrics

ROOT = Path(__file__).resolve().parents[2]

CONFIG = """
from flaxformer_mt.config import Config
from flaxformer_mt.config.files import from_dict


def get_config() -> Config:
    return from_dict({values!r})
"""

TRANSLATE = ("translate", "--json", "--method=beam", "--beam_size=2")

# JAX writes compiled programs to its cache in the first process only; here the second one writes them too.
START = """
import json, os, signal, sys, time, types
from pathlib import Path
from jax._src import compiler
from flaxformer_mt.commands.main import main
from flaxformer_mt.parallel import processes
from flaxformer_mt.training.train_log import TrainingLog

compiler.distributed = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))
"""

COMMAND = f"{START}\nsys.exit(main())"

# Several commands of one job: the processes connect before the first and leave the job after the last.
COMMANDS_OF_ONE_JOB = f"""{START}
def connect_once(**flags):
    processes.connect = lambda **flags: None
    connect(**flags)

connect, processes.connect = processes.connect, connect_once
leave, processes._leave = processes._leave, lambda **_: processes.wait_for_all("end")
*commands, last = json.loads(sys.argv[1])
for status, *command in commands:
    assert main([*command, *sys.argv[2:]]) == status
processes._leave = leave
sys.exit(main([*last, *sys.argv[2:]]))
"""

# Training in which this process kills itself after update 20, once the checkpoint of step 16 is written.
KILLED = f"""{START}
manifest, add = Path(sys.argv.pop(1)), TrainingLog.add

def kill(self, step, *arguments):
    if step == 20:
        while not manifest.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    add(self, step, *arguments)

TrainingLog.add = kill
sys.exit(main())
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_two(*commands: list[str]) -> list[subprocess.Popen]:
    """Two processes of one job, with two simulated devices each: a program and its arguments for either."""
    port = free_port()
    job = [f"--coordinator=127.0.0.1:{port}", "--processes=2"]
    return [
        subprocess.Popen(
            [sys.executable, "-c", *command, *job, f"--process={process}"],
            cwd=ROOT,
            env=quick_environment(devices=2, FLAXFORMER_MT_PROCESS_TIMEOUT="10"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process, command in enumerate(commands)
    ]


@pytest.fixture(scope="module")
def config(tiny_config, tmp_path_factory) -> Path:
    """The tiny config on all devices, with 7 pairs to validate and 7 to test: no even number."""
    folder = tmp_path_factory.mktemp("config")
    shutil.copytree(tiny_config.data.text_dir, folder / "text")
    for number, (split, pairs) in enumerate({"valid": 7, "test": 7}.items(), start=1):
        write_text(folder / "text", split, pairs, seed=number)
    config = change(
        tiny_config,
        data={"text_dir": str(folder / "text"), "cache_dir": str(folder / "cache")},
        # Biases of keys have no gradient but rounding, which Adam would amplify with a smaller epsilon.
        optim={"epsilon": 1e-3},
        # As many updates as it takes until translations are not empty.
        train={
            "steps": 48,
            "log_every": 8,
            "evaluate_every": 24,
            "checkpoint_every": 16,
            "log_accuracy": False,
        },
        parallel={"devices": 0, "backend": "mesh"},
        # Dropout whose masks the processes must share, at few sites: each takes its time to compile.
        model={"dropout_rate": 0.0, "embedding_dropout_rate": 0.1},
        # As in validations, so that the programs are the same; `translate` searches with two beams.
        search={"method": "greedy", "beam_size": 1},
    )
    path = folder / "tiny.py"
    path.write_text(CONFIG.format(values=to_dict(config)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def one(config, tmp_path_factory) -> Path:
    """The run of one process, this one, on four devices."""
    run = tmp_path_factory.mktemp("one") / "run"
    train_alone(config, run)
    return run


def train_alone(config: Path, run: Path) -> None:
    """Train on four of the simulated devices; translations are searched on one of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "local_device_count", lambda: 1)
        patch.setattr(jax, "local_devices", lambda: jax.devices()[:1])
        assert main(["train", f"--config={config}", f"--run={run}", "--config.parallel.devices=4"]) == 0


class Both(NamedTuple):
    """What two processes, with two devices each, have written; each pair is of the first and the second."""

    run: Path
    translations: Path
    # JSON values that the commands have printed, one after another.
    results: tuple[list, list]
    stderr: tuple[str, str]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Lines to translate: one that is too long, and an empty one."""
    path = tmp_path_factory.mktemp("source") / "source.txt"
    path.write_text("ba do\n\n" + "fi gu ka lo mi nu " * 6 + "\nka\nlo lo\nmi nu ba\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def two(config, one, source, tmp_path_factory) -> Both:
    """Two processes that translate and evaluate with the run of one, refuse standard input, and train."""
    folder = tmp_path_factory.mktemp("two")
    commands = [
        [2, "translate", f"--run={one}"],
        [0, *TRANSLATE, f"--run={one}", f"--input={source}", f"--output={folder / 'translations'}"],
        [0, "evaluate", f"--run={one}", "--bootstrap=0"],
        ["train", f"--config={config}", f"--run={folder / 'run'}"],
    ]
    pair = start_two([COMMANDS_OF_ONE_JOB, json.dumps(commands)], [COMMANDS_OF_ONE_JOB, json.dumps(commands)])
    ended = [process.communicate(timeout=300) for process in pair]
    for process, (_, stderr) in zip(pair, ended, strict=True):
        assert process.returncode == 0, stderr
    (stdout, stderr), (other_stdout, other_stderr) = ended
    results = read_json_values(stdout), read_json_values(other_stdout)
    return Both(folder / "run", folder / "translations", results, (stderr, other_stderr))


def read_json_values(text: str) -> list:
    values, text = [], text.strip()
    while text:
        value, end = json.JSONDecoder().raw_decode(text)
        values.append(value)
        text = text[end:].lstrip()
    return values


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
    assert_alike(two.run, one)


def test_the_first_process_speaks_for_all(two):
    (result, other_result), (stderr, other_stderr) = two.results, two.stderr
    assert result[-1]["step"] == 48
    assert "4 simulated devices of 2 processes" in stderr and "step    48/48" in stderr
    assert other_result == []
    assert "step" not in other_stderr


def test_two_processes_translate_and_score_files_as_one_does(one, two, source, tmp_path, one_device):
    """With all fields of the JSON lines."""
    assert main([*TRANSLATE, f"--run={one}", f"--input={source}", f"--output={tmp_path / 'alone'}"]) == 0
    assert "line 3: longer than" in two.stderr[0] and "warning" not in two.stderr[1]
    alone, both = (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in (tmp_path / "alone", two.translations)
    )
    assert len(alone) == len(both) == 6
    for mine, other in zip(alone, both, strict=True):
        assert mine.keys() == other.keys()
        for name in ("text", "tokens", "alignment"):
            assert mine[name] == other[name]
        assert other["score"] == pytest.approx(mine["score"], abs=1e-5)
    report = json.loads((one / "report.json").read_text(encoding="utf-8"))["test"]
    evaluation, _ = two.results[0]
    assert evaluation["bleu"] == report["bleu"] > 0


def test_standard_input_cannot_be_shared(two):
    for stderr in two.stderr:
        assert "error: 2 processes cannot all read standard input; give --input=FILE" in stderr


def test_a_killed_process_ends_the_other_and_one_process_resumes_the_run(config, one, tmp_path, capsys):
    """After a checkpoint; then one process of four devices ends where an undisturbed run does."""
    run = tmp_path / "run"
    manifest = run / "checkpoints" / "16" / "manifest.json"
    train = ["train", f"--config={config}", f"--run={run}"]
    first, second = start_two([COMMAND, *train], [KILLED, str(manifest), *train])
    assert second.communicate(timeout=240) and second.returncode == -signal.SIGKILL
    _, stderr = first.communicate(timeout=60)
    assert first.returncode == 75 and not (run / "report.json").exists()
    (line,) = [line for line in stderr.split("\n") if line.startswith("error: ")]
    assert "process 1 of 2 has sent no heartbeat" in line and "resume from the last checkpoint" in line
    capsys.readouterr()
    train_alone(config, run)
    assert "resuming at step" in capsys.readouterr().err
    assert_alike(run, one)


def test_inconsistent_flags_are_user_errors(capsys):
    assert main(["train", "--processes=2", "--process=2", "--coordinator=127.0.0.1:1"]) == 2
    assert capsys.readouterr().err.endswith("error: --process=2 of --processes=2: it must be from 0 to 1\n")
    assert main(["train", "--processes=2"]) == 2
    assert "error: --coordinator and --process missing: several" in capsys.readouterr().err
