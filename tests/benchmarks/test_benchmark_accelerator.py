"""The benchmark of one accelerator: what it prints beside a stored record; and all of it on a tiny model."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_experiment import quick_environment

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "accelerator.py"


@pytest.fixture(scope="module")
def accelerator():
    spec = importlib.util.spec_from_file_location("benchmark_accelerator", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figures_stand_beside_those_of_the_last_record_of_such_a_device(accelerator, tmp_path):
    records = tmp_path / "records.jsonl"
    assert accelerator.find_record("H", records) is None
    lines = [
        {"device": device, "versions": {"jax": jax}, "figures": {"rate": rate, "older": 1.5}}
        for device, jax, rate in (("H", "0.1", 1), ("H", "0.2", 1234), ("A", "0.3", 3))
    ]
    records.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    stored = accelerator.find_record("H", records)
    rows = [line.split() for line in accelerator.format_figures({"rate": 5678, "new": 2}, stored).split("\n")]
    assert rows[1:] == [["rate", "5,678", "1,234"], ["new", "2"], ["older", "1.5"]]
    assert rows[0][-1] == "0.2"


def test_the_first_stored_record_is_that_of_an_h100(accelerator):
    figures = accelerator.find_record("NVIDIA H100 80GB HBM3")["figures"]
    assert figures["big: target tokens a second"] == 223_259 and figures["multi30k: cased BLEU"] == 42.65


@pytest.mark.parametrize("flags", [["--parts=huge"], [], ["--tiny", "--parts=sentence"]])
def test_what_cannot_be_measured_is_refused_at_once(accelerator, flags, capsys):
    with pytest.raises(SystemExit):
        accelerator.main(flags)
    assert "error: " in capsys.readouterr().err


@pytest.mark.slow
def test_all_parts_run_on_a_cpu():
    done = subprocess.run(
        [sys.executable, str(FILE), "--tiny", "--device=cpu"],
        cwd=FILE.parents[1],
        env=quick_environment() | {"PYTHONPATH": str(FILE.parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["device"] == "cpu" and result["tiny"] and result["stored"] is None
    names = {name.partition(":")[0] for name in result["figures"]}
    assert len(names) == 5 and all(value >= 0 for value in result["figures"].values())
