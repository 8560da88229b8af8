"""The benchmark of training runs, and its systems are the same network on the same tokens."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_benchmark(folder: Path, *flags: str) -> dict:
    command = [sys.executable, "benchmarks/train.py", "--tiny", f"--cache_dir={folder}", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def check_system(system: dict) -> None:
    assert system["target_tokens_per_second"] > 0 and len(system["rounds"]) == 1
    assert system["compile_seconds"] > 0
    # uniform guesses of 400 words cost 5.99, and an update or two of 1e-4 change little
    assert 5 < system["last_loss"] < 8
    assert 0 < system["step_gflops"] < system["product_gflops"]


def test_ours_alone_on_packed_bfloat16_batches_says_its_share_of_the_peak(cache):
    result = run_benchmark(cache, "--setting=big", "--systems=ours", "--peak_tflops=1e-3")
    ours = result["systems"]["ours"]
    check_system(ours)
    assert "ratio" not in result
    # of a peak of 1 GFLOP/s: real tokens alone on one side, padding too on the other
    assert 0 < ours["utilization"] < ours["step_gflops"]


def test_three_systems_train_the_same_network_on_the_same_tokens(cache):
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    result = run_benchmark(cache)
    systems = result["systems"]
    assert set(systems) == {"ours", "marian", "torch"}
    for system in systems.values():
        check_system(system)
    assert len({system["parameters"] for system in systems.values()}) == 1
    assert result["batches_ours"] == result["batches_peers"]
    faster = max(systems[name]["target_tokens_per_second"] for name in ("marian", "torch"))
    assert systems[result["faster_peer"]]["target_tokens_per_second"] == faster
    assert result["ratio"] == round(systems["ours"]["target_tokens_per_second"] / faster, 2)
