"""`recipes/launch/`: bash and YAML that parse, and what each process is started with, by stand-ins."""

import os
import shlex
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from flaxformer_mt.commands.flags import parse_flags
from flaxformer_mt.commands.options import TrainOptions

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
        subprocess.run(["bash", *arguments], cwd=ROOT, env={**environment, **variables}, check=True)
        return [call.split("\n") for call in calls.read_text().split("\n\n")[:-1]]

    return run_bash


def parse_train(words):
    """The options of `train`, given the words after the program; raises UserError as the command does."""
    assert words[0] == "train"
    return parse_flags(TrainOptions, words[1:], prog="train")


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
