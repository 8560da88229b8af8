"""Remedies: the commands that messages print work where they are printed."""

import ast
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from flaxformer_mt import errors
from flaxformer_mt.commands import launch
from flaxformer_mt.commands.doctor import EXTRAS
from flaxformer_mt.commands.main import main
from flaxformer_mt.config import Config, DataConfig
from flaxformer_mt.config.checks import validate
from flaxformer_mt.corpus.tfds_cache import cache_dir
from flaxformer_mt.errors import (
    FlaxformerWarning,
    UserError,
    command_line,
    find_url,
    install_command,
    local_path,
    show_as,
    suggest_sibling,
    warn_user,
)
from flaxformer_mt.runs.load_run import load_trained
from flaxformer_mt.training.loop import fit

ROOT = Path(__file__).resolve().parents[1]


def run(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """Runs a printed command as a shell does, in an environment without the tests' path."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, shell=True, cwd=folder, env=kept | environment, capture_output=True, text=True, timeout=120
    )


def test_near_names_beside_a_path_are_suggested(tmp_path):
    (tmp_path / "train.en").touch()
    (tmp_path / "runs" / "multi").mkdir(parents=True)
    assert suggest_sibling(tmp_path / "trian.en") == f"; did you mean {tmp_path / 'train.en'}?"
    assert suggest_sibling(tmp_path / "runs" / "mutli", holds="config.json") == ""
    (tmp_path / "runs" / "multi" / "config.json").touch()
    near = suggest_sibling(tmp_path / "runs" / "mutli", holds="config.json")
    assert near == f"; did you mean {tmp_path / 'runs' / 'multi'}?"
    assert suggest_sibling(tmp_path / "absent" / "a") == suggest_sibling(tmp_path / "other") == ""


def test_a_printed_command_runs_from_the_folder_where_it_is_printed(tmp_path, monkeypatch):
    folder = tmp_path / "a folder"
    folder.mkdir()
    for where in (folder, ROOT):
        monkeypatch.chdir(where)
        monkeypatch.setattr(sys, "path", ["", *(p for p in sys.path if Path(p).resolve() != ROOT)])
        command = command_line("show", f"--run={folder}", "--config=nothing")
        assert str(sys.executable) in command and f"'--run={folder}'" in command
        assert command.startswith("PYTHONPATH=") == (where == folder)
    monkeypatch.chdir(folder)
    done = run(command_line("show", f"--run={folder}", "--config=nothing"), folder)
    assert done.returncode == 2 and "error: config nothing is neither" in done.stderr, done


def test_the_installed_program_is_named_as_it_was_called(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "flaxformer-mt"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(program), "train"])
    assert command_line("show") == f"{program} show"
    monkeypatch.setenv("PATH", str(program.parent))
    assert command_line("show") == "flaxformer-mt show"


def test_remedies_for_missing_extras_name_requirements_that_pip_can_read():
    for extra in EXTRAS:
        words = shlex.split(install_command(extra=extra))
        assert words[:4] == [sys.executable, "-m", "pip", "install"]
        names = [Requirement(text).name for text in words[4:]]
        assert "flaxformer-mt" not in names, "no index has this package"
    assert "torch==2.13.0" in install_command(extra="torch")  # the checkout's pin


def test_an_installed_package_reads_the_requirements_of_its_metadata(tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "_ROOT", tmp_path)
    required = ["jax>=0.10", 'torch>=2.6; extra == "torch"', "safetensors>=0.5; extra == 'torch'"]
    monkeypatch.setattr(errors.importlib.metadata, "requires", lambda name: required)
    assert install_command(extra="torch").endswith(" -m pip install 'torch>=2.6' 'safetensors>=0.5'")


def test_a_wrong_python_gets_one_line(tmp_path, monkeypatch, capfd):
    files = ["train.py", "flaxformer_mt/__main__.py", "flaxformer_mt/__init__.py"]
    for name in [*files, "flaxformer_mt/commands/__init__.py", "flaxformer_mt/commands/launch.py"]:
        ast.parse((ROOT / name).read_text(encoding="utf-8"), feature_version=(3, 8))
    monkeypatch.setattr(sys, "version_info", (3, 8, 10))
    with pytest.raises(SystemExit) as stop:
        launch.launch(["doctor"])
    _, told = capfd.readouterr()
    assert stop.value.code == 2 and told.count("\n") == 1
    assert told.startswith("error: flaxformer_mt needs Python 3.11 or newer, but this is Python 3.8 (")
    assert sys.executable in told


def test_a_python_without_the_packages_gets_one_line(tmp_path):
    for name in (str(ROOT / "train.py"), "-m flaxformer_mt train"):
        # -S -E: without site-packages, as the system's Python
        done = run(f"{sys.executable} -S -E {name}", ROOT)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith(f"error: this Python lacks the package numpy ({sys.executable}); ")
        assert f"{sys.executable} -m pip install -r {ROOT}/requirements.txt" in done.stderr
        done = run(f"{sys.executable} -S -E {name} --help", ROOT)
        assert done.returncode == 0 and "--config.train.steps=INT" in done.stdout, "help needs no package"


def test_caches_are_refused_in_object_stores_and_urls_are_no_local_folders(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    refused = "is in an object store, which has neither the renames nor the locks that keep a cache intact"
    config = Config(data=DataConfig(text_dir="s3://bucket/text", cache_dir="gs:/b/t"))
    with pytest.raises(UserError, match=rf"^data.cache_dir: gs://b/t {refused}") as caught:
        validate(config)
    assert "text_dir" not in str(caught.value)
    with pytest.raises(UserError, match=rf"^gs://bucket/run {refused}"):
        local_path("gs://bucket/run")
    for use in (lambda: fit(Config(), "nfs://host/run"), lambda: load_trained(Path("nfs://host/run"))):
        with pytest.raises(
            UserError, match="^nfs://host/run: the scheme nfs is unknown; give a folder, gs://"
        ):
            use()
    for command in ("train", "prepare", "evaluate", "translate", "average"):
        options = {"average": ["--last=1"], "translate": ["--input=x"]}.get(command, [])
        assert main([command, "--run=nfs://host/run", *options]) == 2
        assert "error: nfs://host/run: the scheme nfs is unknown" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    (tmp_path / "gs:" / "old").mkdir(parents=True)
    assert local_path("gs://old") == Path("gs:/old"), "a run that an earlier version has put there"
    assert local_path("C:/x") == Path("C:/x") and local_path("~") == Path.home()
    assert [
        find_url(path) for path in (Path("gs://b/r"), "s3://b/r/", "file:///mnt/b", "runs/x", "C:/x")
    ] == ["gs://b/r", "s3://b/r", "file:///mnt/b", "", ""]


def test_messages_name_the_url_of_a_local_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "_shown", {})
    show_as(tmp_path / "copy", "gs://bucket/x")
    assert str(UserError(f"{tmp_path / 'copy'}/vocab is damaged")) == "gs://bucket/x/vocab is damaged"
    assert command_line("translate", f"--run={tmp_path / 'copy'}").endswith(" translate --run=gs://bucket/x")
    with pytest.warns(FlaxformerWarning, match="^gs://bucket/x: no$"):
        warn_user(f"{tmp_path / 'copy'}: no")


def test_folders_of_runs_and_caches_are_named_in_utf8(tmp_path, capsys):
    """The libraries below orbax and TFDS take no other names."""
    run = os.fsdecode(os.fsencode(tmp_path) + b"/r\xff")
    os.mkdir(run)
    for command in (["translate", "--input=x"], ["average", "--last=1"], ["evaluate"], ["train"]):
        assert main([command[0], f"--run={run}", *command[1:]]) == 2
        told = f"error: the name of {tmp_path}/r\\xff is not UTF-8; rename it, or give another folder\n"
        assert capsys.readouterr().err == told
    with pytest.raises(UserError, match=r"r\\xff/cache is not UTF-8"):
        cache_dir(DataConfig(cache_dir=f"{run}/cache"))
    assert local_path(run) == Path(run), "inputs and outputs may be named in any way"
