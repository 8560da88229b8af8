"""The commands as users run them: processes that compile with all optimizations and an empty cache.

All other tests compile with few optimizations; here the results of both are compared.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_experiment import write_config_file

from flaxformer_mt.commands.main import main
from flaxformer_mt.tracking import read_metrics

ROOT = Path(__file__).resolve().parents[1]


# Variables by which the tests compile otherwise than users do.
OF_TESTS = (
    "XLA_FLAGS",
    "JAX_DISABLE_MOST_OPTIMIZATIONS",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
    "TF_CPP_MIN_LOG_LEVEL",
)

# Translations that are not only spaces, although the model has hardly been trained.
SEARCH = ("--min_length_offset=4", "--suppress=▁")


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    variables = {name: value for name, value in os.environ.items() if name not in OF_TESTS}
    variables["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path_factory.mktemp("compiled"))
    variables["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

    def run(*arguments: str, text: str = "") -> str:
        done = subprocess.run(
            [sys.executable, "-m", "flaxformer_mt", *arguments],
            input=text,
            cwd=ROOT,
            env=variables,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr and "Warning" not in done.stderr, done.stderr
        return done.stdout

    def list_searches() -> set[str]:
        """The kept programs of searches of few sentences, and the cached ones of others."""
        folder = Path(variables["JAX_COMPILATION_CACHE_DIR"])
        return {path.name for name in ("kept/*", "jit_*rows-*-cache") for path in folder.glob(name)}

    run.list_searches = list_searches
    return run


@pytest.fixture(scope="module")
def run_dir(tiny_run, tmp_path_factory) -> Path:
    return Path(shutil.copytree(tiny_run, tmp_path_factory.mktemp("copy") / "run"))


def assert_close(left: object, right: object, name: str) -> None:
    """The same structure, strings and counts, and numbers within 1e-4."""
    assert type(left) is type(right), name
    if isinstance(left, dict):
        assert left.keys() == right.keys(), name
        for key in left:
            assert_close(left[key], right[key], f"{name}.{key}")
    elif isinstance(left, list):
        assert len(left) == len(right), name
        for number, values in enumerate(zip(left, right, strict=True)):
            assert_close(*values, f"{name}[{number}]")
    elif isinstance(left, float):
        assert left == pytest.approx(right, rel=1e-4, abs=1e-4), name
    else:
        assert left == right, name


def test_train(command, tiny_config, tiny_run, tmp_path):
    text, run = tmp_path / "text", tmp_path / "run"
    shutil.copytree(tiny_config.data.text_dir, text, ignore=shutil.ignore_patterns("valid.*", "test.*"))
    config = write_config_file(tmp_path / "tiny.py", tiny_config)
    flags = {"data.text_dir": text, "train.steps": 20, "train.final_checkpoint": "last"}
    flags = [f"--config.{name}={value}" for name, value in flags.items()]
    report = json.loads(command("train", f"--config={config}", f"--run={run}", *flags))
    assert report == json.loads((run / "report.json").read_text(encoding="utf-8"))
    assert report["step"] == 20 and (run / "checkpoints" / "20" / "manifest.json").is_file()
    (ours,), (theirs, *_) = (
        [record for record in read_metrics(folder) if record["split"] == "train"]
        for folder in (run, tiny_run)
    )
    assert ours["step"] == theirs["step"] == 20
    for name in ("loss", "accuracy", "learning_rate", "gradient_norm", "target_tokens", "padding", "skipped"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name


def test_translate_and_evaluate(command, run_dir, tiny_config, tmp_path, capsysbinary):
    """Standard input, and the scores of the same translations, by the same programs on the same devices."""
    sources = (Path(tiny_config.data.text_dir) / "test.xx").read_text(encoding="utf-8")
    translate, evaluate = ([name, f"--run={run_dir}", *SEARCH] for name in ("translate", "evaluate"))
    before = command.list_searches()
    translations = command(*translate, text=sources)
    searches = command.list_searches()
    assert searches - before
    assert len(translations.splitlines()) == 6 and all(line.strip() for line in translations.splitlines())
    ours = json.loads(command(*evaluate, "--bootstrap=0"))
    assert command.list_searches() == searches  # none was compiled again
    assert (run_dir / "translations" / "test.hypothesis").read_text(encoding="utf-8") == translations
    (run_dir / "translations" / "test.hypothesis").unlink()
    assert main([*evaluate, "--bootstrap=0"]) == 0
    quick = json.loads(capsysbinary.readouterr().out)
    assert (run_dir / "translations" / "test.hypothesis").read_text(encoding="utf-8") == translations
    del ours["seconds"], quick["seconds"]
    assert ours["chrf"] > 0
    assert_close(ours, quick, "evaluation")
