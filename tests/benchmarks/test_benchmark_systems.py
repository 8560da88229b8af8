"""Names of compared systems, and packages that are missing: one line each, not a traceback."""

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def systems():
    spec = importlib.util.spec_from_file_location("benchmark_systems", FOLDER / "systems.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_unknown_and_repeated_systems_are_refused(systems, capsys):
    parser = argparse.ArgumentParser()
    assert systems.choose_systems(parser, "torch,ours", ("marian", "torch")) == ["torch", "ours"]
    for text, message in (
        ("ours,fairseq", "unknown systems fairseq; known: ours, marian, torch"),
        ("", "unknown systems ; known: ours, marian, torch"),
        ("ours,torch,ours", "--systems=ours,torch,ours has ours more than once"),
    ):
        with pytest.raises(SystemExit) as ended:
            systems.choose_systems(parser, text, ("marian", "torch"))
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


def test_missing_packages_are_named_with_the_command_that_installs_them(systems, monkeypatch, capsys):
    monkeypatch.setattr(systems.importlib.util, "find_spec", lambda name: None)
    systems.require_packages(["ours"])
    with pytest.raises(SystemExit) as ended:
        systems.require_packages(["ours", "marian", "torch", "ctranslate2"])
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("error: not installed: torch, transformers, ctranslate2; install with: ")
    assert line.count("pip install") == 2 and line.count("transformers==") == 1


@pytest.mark.parametrize("command", ["train.py", "exports.py --source=A --target=B C"])
def test_a_benchmark_without_the_packages_of_others_ends_with_one_line(command, tmp_path):
    """As where only the package itself is installed: modules of others cannot be found."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: (\n"
        "    None if name in ('torch', 'transformers', 'ctranslate2') else find(name, package))\n",
        encoding="utf-8",
    )
    script, *flags = command.split(" ")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{FOLDER.parent}"}
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *flags], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: not installed: ") and done.stderr.count("\n") == 1
