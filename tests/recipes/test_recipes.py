"""`recipes/`: launch files that parse and start what they say; the pipeline, whenever it is killed."""

import os
import pickle
import random
import runpy
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from made_up_text import write_text

from flaxformer_mt.commands import main
from flaxformer_mt.commands.flag_parser import parse_flags
from flaxformer_mt.commands.options import TrainOptions
from flaxformer_mt.config.files import save_config
from flaxformer_mt.tracking import read_metrics
from flaxformer_mt.training.loop import fit
from flaxformer_mt.vocab import load_vocabs

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "recipes" / "launch"
# Writes its name and words, one a line, and an empty line.
STAND_IN = '#!/bin/sh\n{ basename "$0"; printf "%s\\n" "$@"; echo; } >>"$CALLS"\n'


@pytest.fixture
def run(tmp_path):
    """Runs bash with stand-ins for other programs; returns the calls of these, as lists of words."""

    def run_bash(*arguments, programs, **variables):
        for name in programs:
            file = tmp_path / name
            file.write_text(STAND_IN)
            file.chmod(file.stat().st_mode | stat.S_IXUSR)
        calls = tmp_path / "calls"
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls)}
        environment.pop("PYTHON", None)  # with which .ci/run may have been started
        subprocess.run(["bash", *arguments], cwd=ROOT, env={**environment, **variables}, check=True)
        return [call.split("\n") for call in calls.read_text().split("\n\n")[:-1]]

    return run_bash


def parse_train(words):
    """The options of `train`, given the words after the program; raises UserError as the command does."""
    assert words[0] == "train"
    return parse_flags(TrainOptions, words[1:], prog="train")


CONFIG_OF_JSON = """from pathlib import Path
from flaxformer_mt.config.files import read_config
def get_config():
    return read_config(Path({path!r}))
"""


def test_a_loss_term_of_a_program_changes_updates(tiny_config, tmp_path, monkeypatch):
    """The logged loss is that of tokens, which is the same before the first update; the gradient is not."""
    config = tiny_config.replace({"train.steps": 4, "train.log_every": 1, "train.evaluate_every": 4})
    save_config(config, tmp_path / "config.json")
    (tmp_path / "config.py").write_text(CONFIG_OF_JSON.format(path=str(tmp_path / "config.json")))
    arguments = [str(tmp_path / "config.py"), str(tmp_path / "with"), "4"]
    monkeypatch.setattr("sys.argv", ["loss_term.py", *arguments])
    names = runpy.run_path(str(ROOT / "recipes" / "loss_term.py"), run_name="__main__")
    assert names["report"]["step"] == 4
    fit(config, tmp_path / "without")  # its programs are not those that the term is part of
    first, expected = (
        next(record for record in read_metrics(tmp_path / name) if record["split"] == "train")
        for name in ("with", "without")
    )
    assert first["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert first["gradient_norm"] > 1.1 * expected["gradient_norm"]


def test_every_launch_file_parses():
    files = sorted(LAUNCH.iterdir())
    assert [file.name for file in files] == ["jobset.yaml", "slurm.sh", "tpu_pod.sh"]
    for file in files[1:]:
        subprocess.run(["bash", "-n", str(file)], check=True)
        assert os.access(file, os.X_OK)


def test_slurm_starts_one_process_for_each_gpu(run):
    flags = ["--config.train.steps=7"]
    (call,) = run(str(LAUNCH / "slurm.sh"), *flags, programs=["srun"], RUN="/shared/runs/a b")
    assert call[:5] == ["srun", "--kill-on-bad-exit=1", ".venv/bin/python", "-m", "flaxformer_mt"]
    options = parse_train(call[5:])
    assert options.distributed and options.coordinator is None and options.config.train.steps == 7
    assert str(options.run) == "/shared/runs/a b" and options.config.data.dataset == "toy_de_en"
    lines = (LAUNCH / "slurm.sh").read_text().split("\n")
    # sbatch reads them up to the first command.
    head = lines[: lines.index("set -euo pipefail")]
    assert all(line.startswith("#") for line in head)
    settings = dict(
        line.removeprefix("#SBATCH --").split("=") for line in head if "SBATCH --" in line and "=" in line
    )
    assert settings["ntasks-per-node"] == settings["gpus-per-node"] and "gpus-per-task" not in settings
    assert settings["signal"] == "TERM@120" and "#SBATCH --requeue" in head


def test_a_tpu_pod_gets_the_tree_and_one_command_on_all_machines(run, tmp_path):
    arguments = ["pod", "us-central2-b", "gs://bucket/runs/a", "--config.vocab.symbols=<BT>"]
    archive, copy, start = run(str(LAUNCH / "tpu_pod.sh"), *arguments, programs=["git", "gcloud"])
    assert archive[:2] == ["git", "-C"] and (Path(archive[2]) / "pyproject.toml").exists()
    assert archive[3:5] == ["archive", "--format=tar.gz"] and archive[5:] == [f"--output={copy[5]}", "HEAD"]
    place = ["--zone=us-central2-b", "--worker=all"]
    assert copy[:5] == ["gcloud", "compute", "tpus", "tpu-vm", "scp"] and copy[6:] == ["pod:", *place]
    assert start[:8] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "pod", *place]
    (command,) = start[8:]
    subprocess.run(["bash", "-n", "-c", command.removeprefix("--command=")], check=True)
    words = shlex.split(command.removeprefix("--command=").split(" && ")[-1])
    assert words[:3] == [".venv/bin/python", "-m", "flaxformer_mt"]
    words[words.index("--run=gs://bucket/runs/a")] = "--run=here"  # parsing would look into the bucket
    options = parse_train(words[3:])
    assert options.distributed and options.config.vocab.symbols == ("<BT>",)
    # Without a bucket, there is nothing to start.
    bad = subprocess.run(["bash", str(LAUNCH / "tpu_pod.sh"), "pod"], capture_output=True, text=True)
    assert bad.returncode == 2 and bad.stderr.startswith("error: usage: recipes/launch/tpu_pod.sh NAME ZONE")


def test_a_jobset_names_its_coordinator_and_numbers_its_processes(run):
    (job_set,) = yaml.safe_load_all((LAUNCH / "jobset.yaml").read_text())
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = job_set["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert (job["replicas"], spec["completionMode"], pod["restartPolicy"]) == (1, "Indexed", "Never")
    assert spec["parallelism"] == spec["completions"] == 2
    bash, *arguments = container["command"]
    assert bash == "bash"
    (call,) = run(*arguments, programs=["flaxformer-mt"], JOB_COMPLETION_INDEX="1")
    options = parse_train(call[1:])
    assert (options.processes, options.process) == (spec["completions"], 1)
    # The name of the first pod of a JobSet, in the domain that has the JobSet's name.
    name = job_set["metadata"]["name"]
    (port,) = container["ports"]
    assert options.coordinator == f"{name}-{job['name']}-0-0.{name}:{port['containerPort']}"
    # Everything that the processes share is in the volume.
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert mount["name"] == volume["name"] and options.run.is_relative_to(mount["mountPath"])
    assert all(one["value"].startswith(mount["mountPath"]) for one in container["env"])


PIPELINE = ROOT / "recipes" / "pipeline.sh"
LAST = ["train", "distil", "train", "prepare", "export", *["evaluate"] * 3, "translate"]

# Counts its calls, and kills the pipeline and itself in the middle of the call that the file `kill` names.
STUB = """#!/bin/sh
shift 2
count=$(($(cat "$STUB/count") + 1)); echo $count > "$STUB/count"; echo "$1" >> "$STUB/log"
echo "$*" >> "$STUB/calls"
for flag; do case $flag in --run=*) run=${flag#*=} ;; --output=*) output=${flag#*=} ;; esac; done
stop() { [ $count != "$(cat "$STUB/kill")" ] || kill -9 $PPID $$; }
case $1 in
train) mkdir -p "$run"; stop; echo "$*" > "$run/report.json" ;;
backtranslate|distil) mkdir -p "$output"; echo "$*" > "$output/train.tsv"; stop
    echo "$*" > "$output/report.json" ;;
export) stop; mkdir -p "$output"; echo "$*" > "$output/README.md" ;;
translate) stop; echo "$*" > "$output" ;;
*) echo "half of"; stop; echo "$*" ;;
esac
"""


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for seed, split in enumerate(("train", "valid", "test"), start=1):
        write_text(folder, split, 64 if split == "train" else 6, seed=seed)
    mono = random.Random(7).sample((folder / "train.yy").read_text().split("\n")[:-1], 40)
    (tmp_path / "mono.yy").write_text("".join(f"{line} BA\n" for line in mono))
    return folder


def read_all(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_every_step_runs_once_and_a_kill_changes_nothing(data, tmp_path):
    stub = tmp_path / "stub"
    stub.mkdir()
    (stub / "python").write_text(STUB)
    (stub / "python").chmod(0o755)
    settings = {"PYTHON": str(stub / "python"), "STUB": str(stub), "SOURCE": "xx", "TARGET": "yy"}

    def run(kill=0, **changes):
        for name, text in (("count", "0"), ("kill", str(kill)), ("log", "")):
            (stub / name).write_text(text)
        command = [str(PIPELINE), str(data), "work"]
        environment = {**os.environ, **settings, **changes}
        found = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        return found, (stub / "log").read_text().split()

    # Without text of the target language, and for the other engine.
    found, log = run(FOR="cpu")
    assert found.returncode == 0 and log == ["new", *LAST]
    made = read_all(tmp_path / "work")
    assert "--format=ctranslate2 " in made["student_cpu/README.md"].decode()
    assert "--run=work/student_cpu --backend=ctranslate2 " in made["test.yy"].decode()
    (tmp_path / "work").rename(tmp_path / "cpu")
    mono, commands = {"MONO": "mono.yy"}, ["new", "train", "backtranslate", *LAST]
    commands.insert(-1, "evaluate")  # of the model of the reverse direction
    found, log = run(**mono)
    assert found.returncode == 0 and log == commands
    expected = read_all(tmp_path / "work")
    assert "settings.txt" in expected and "output.json" not in expected
    assert "--config.data.source_language=yy " in expected["reverse/report.json"].decode()
    teacher = expected["student_teacher/report.json"].decode()
    assert "--config.data.dataset=parallel_text,parallel_text@work/backtranslated" in teacher
    assert "--config.vocab.symbols=<BT>" in teacher
    assert "--targets=nbest --reference=" in expected["student_distilled/report.json"].decode()
    assert "--format=bergamot --quantization=int8" in expected["student_browser/README.md"].decode()
    assert run(**mono)[1] == []  # all is done
    found, log = run(FOR="cpu", **mono)
    assert (found.returncode, log) == (2, []) and "> for=cpu" in found.stderr
    for kill in (1, 2, 3, 5, 7, 8, 13):
        (tmp_path / "work").rename(tmp_path / f"work{kill}")
        found, log = run(kill, **mono)
        assert found.returncode == -signal.SIGKILL and log == commands[:kill]
        found, log = run(**mono)
        assert found.returncode == 0 and log == commands[kill - 1 :]
        assert read_all(tmp_path / "work") == expected
    (tmp_path / "work").rename(tmp_path / "browser")
    (tmp_path / "more.xx").write_text("ba do\n")
    found, log = run(MORE_SOURCES="more.xx", DISTIL_FLAGS="--n_best=3 --copies")
    assert found.returncode == 0 and log.count("distil") == 2
    made = read_all(tmp_path / "work")
    assert made["student_distilled/report.json"].decode().endswith(" --n_best=3 --copies\n")
    sets = "--config.data.dataset=parallel_text,parallel_text@work/student_distilled_more "
    assert sets in made["student/report.json"].decode()
    for changes, message in (
        ({"FOR": "phone"}, "error: FOR is phone; give browser or cpu\n"),
        ({"MONO": "no.yy"}, "error: no.yy does not exist\n"),
        ({"SOURCE": "zz"}, f"error: {data}/train.zz does not exist\n"),
    ):
        found, log = run(**changes)
        assert (found.returncode, log, found.stderr) == (2, [], message)
    for call in {*(stub / "calls").read_text().splitlines()}:
        command, *flags = call.split()
        flags = [flag for flag in flags if not flag.startswith("--config=")]  # which `new` would have written
        known = main.COMMANDS[command]
        parse_flags(known.options, flags, prog=command, words=known.words)


def test_the_pickle_for_document_003_has_the_ids_of_the_vocabulary(tiny_run, tmp_path, monkeypatch):
    vocab = load_vocabs(tiny_run / "vocab").source
    (tmp_path / "vocab").mkdir()
    vocab.save(tmp_path / "vocab" / "source.model")
    text = vocab.detokenize([5, 6, 7])
    (tmp_path / "test.de").write_text(f"{text}\n", encoding="utf-8")
    files = [str(tmp_path), str(tmp_path / "test.de"), str(tmp_path / "data.pkl")]
    monkeypatch.setattr(sys, "argv", ["aiayn_data.py", *files])
    runpy.run_path(str(ROOT / "recipes" / "aiayn_data.py"))
    data = pickle.loads((tmp_path / "data.pkl").read_bytes())  # noqa: S301
    numbers = [data["vocab"]["src"].vocab.stoi[piece] for piece in data["test"][0].src]
    assert numbers == vocab.tokenize(text)
