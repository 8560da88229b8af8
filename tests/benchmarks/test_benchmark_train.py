"""The benchmark of training runs; its systems are one network on the same tokens; its sums are right."""

import argparse
import functools
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_experiment import quick_environment

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.corpus.toy import toy_de_en
from flaxformer_mt.shapes import Batch


@pytest.fixture(scope="module")
def benchmark(load_benchmark):
    return load_benchmark("train")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run_benchmark(benchmark, cache, monkeypatch, capsys):
    """Runs the benchmark with flags; returns what it prints, and what its conclusions were drawn from."""

    def run(*flags: str) -> tuple[dict[str, Any], dict[str, Any]]:
        measured, conclude = {}, benchmark._conclude

        def conclude_and_keep(setting, options, systems, batches, tokens):
            measured.update(setting=setting, options=options, batches=batches, tokens=tokens)
            return conclude(setting, options, systems, batches, tokens)

        monkeypatch.setattr(benchmark, "_conclude", conclude_and_keep)
        monkeypatch.setattr(benchmark, "_REPEATS", 1)
        monkeypatch.setattr(toy_de_en, "SIZES", {"train": 1000, "valid": 10, "test": 10})
        monkeypatch.setenv("XLA_FLAGS", quick_environment()["XLA_FLAGS"])
        monkeypatch.setattr(sys, "argv", ["train.py", "--tiny", f"--cache_dir={cache}", *flags])
        benchmark.main()
        monkeypatch.setattr(benchmark, "_conclude", conclude)
        return json.loads(capsys.readouterr().out), measured

    return run


def check_system(system: dict[str, Any]) -> None:
    assert system["rounds"] == [system["target_tokens_per_second"]]
    # uniform guesses of 400 words cost 5.99, and an update or two of 1e-4 change little
    assert 5 < system["last_loss"] < 8
    rates = {"compile_seconds", "product_gflops", "step_gflops", "share_of_product"}
    assert all(isinstance(system[name], float) for name in rates)


def conclude(benchmark: Any, measured: dict[str, Any], rates: dict[str, float]) -> dict[str, Any]:
    """What the benchmark concludes from these rates, with products at 8 GFLOP/s."""
    systems = {
        name: {"target_tokens_per_second": rate, "product_gflops": 8.0} for name, rate in rates.items()
    }
    return benchmark._conclude(
        measured["setting"], measured["options"], systems, measured["batches"], measured["tokens"]
    )


@pytest.mark.slow
def test_ours_alone_on_packed_bfloat16_batches_says_its_share_of_the_peak(benchmark, run_benchmark):
    result, measured = run_benchmark("--setting=big", "--systems=ours", "--peak_tflops=1e-3")
    ours = result["systems"]["ours"]
    check_system(ours)
    assert isinstance(ours["utilization"], float)
    assert "ratio" not in result
    setting, options, batches = measured["setting"], measured["options"], measured["batches"]["ours"]
    assert isinstance(options, argparse.Namespace) and setting.model.dtype == "bfloat16"
    assert all(batch.source_segments is not None for batch in batches), "not packed"
    # at ten million tokens a second, of a peak of 1 GFLOP/s: real tokens alone, and padding, too
    rate = 1e7
    found = conclude(benchmark, measured, {"ours": rate})["systems"]["ours"]
    rounds = rate / measured["tokens"]["ours"]
    real, padded = (
        benchmark.count_flops(batches, setting, padded=padded) * rounds / 1e9 for padded in (False, True)
    )
    assert 0 < real < padded
    assert found["utilization"] == round(real, 3)
    assert found["step_gflops"] == round(padded, 1)
    assert found["share_of_product"] == round(padded / 8, 3)


@pytest.mark.slow  # three systems are trained; what is concluded from their rates is tested below
def test_three_systems_train_the_same_network_on_the_same_tokens(benchmark, run_benchmark):
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    result, measured = run_benchmark("--dtypes=float32")
    systems = result["systems"]
    assert set(systems) == {"ours", "marian", "torch"}
    for system in systems.values():
        check_system(system)
    assert len({system["parameters"] for system in systems.values()}) == 1
    assert result["batches_ours"] == result["batches_peers"]
    assert len(set(measured["tokens"].values())) == 1
    faster = max(systems[name]["target_tokens_per_second"] for name in ("marian", "torch"))
    assert systems[result["faster_peer"]]["target_tokens_per_second"] == faster
    assert result["ratio"] == round(systems["ours"]["target_tokens_per_second"] / faster, 2)
    found = conclude(benchmark, measured, {"ours": 300.0, "marian": 200.0, "torch": 100.0})
    assert (found["faster_peer"], found["ratio"]) == ("marian", 1.5)


# A Python whose Marian prints the same update again and again.
STUB = """#!/bin/sh
case "$2" in *version*) echo 1.12; exit;; esac
echo "$3" > "$(dirname "$0")/flags"
while :; do echo "Ep. 1 : Up. 9 : Sen. 1,025 : Cost 7.25 * 1,300 @ 1,100 after 9,300 : Time 1.5s" >&2; done
"""


def test_marian_trains_the_same_sentences_and_waits_for_its_turns(
    load_benchmark, tmp_path, monkeypatch, request
):
    peer, worker = load_benchmark("marian_peer"), load_benchmark("training_worker")
    # The stopped process ends with the test: tests that are killed later would leave it behind.
    at_end = SimpleNamespace(register=lambda *call: request.addfinalizer(functools.partial(*call)))
    monkeypatch.setattr(peer, "atexit", at_end)
    python = tmp_path / "python"
    python.write_text(STUB)
    python.chmod(0o755)
    ids = np.array([[5, 6, 7, 2], [8, 2, 0, 0], [0, 0, 0, 0]])
    batch = Batch(ids, ids, ids[:, :3], ids > 0, ids[:, :3] > 0)
    (tmp_path / "work").mkdir()
    task = {"batches": {"bucket": str(tmp_path / "work" / "bucket.npz")}, "vocabulary": 9}
    task |= {"threads": 2, "marian_python": str(python)}
    config = worker.Config(model=ModelConfig(model_dim=16, num_encoder_layers=3))
    train = peer.make_trainer(config, [batch, batch], task)
    assert train([0]) == (7.25, 1100)  # a whole update, of as many tokens as Marian says
    assert train([0, 1]) == (7.25, 1100)
    assert peer.find_version(str(python)) == {"pymarian": "1.12"}
    folder = tmp_path / "work" / "marian-cpp"
    assert (folder / "train.source").read_text() == "w5 w6 w7\nw8\n" * 2
    assert (folder / "train.target").read_text() == "w5 w6\nw8\n" * 2
    assert (folder / "vocab.yml").read_text().startswith('"</s>": 0\n"<unk>": 1\n"w2": 2\n')
    flags = (tmp_path / "flags").read_text()
    assert "--enc-depth 3 " in flags and "--dim-emb 16 " in flags and "--dim-vocabs 9 9 " in flags


def test_the_fastest_of_ours_is_compared_with_the_fastest_peer_and_each_dtype_with_itself(benchmark):
    options = benchmark.parse_options(["--setting=base"])
    names = benchmark.name_systems(options)
    assert names["ours bfloat16"] == ("ours", "bfloat16") and len(names) == 6
    assert list(benchmark.name_systems(benchmark.parse_options(["--setting=big"]))) == [
        "ours",
        "marian",
        "torch",
    ]
    both = benchmark.parse_options(["--systems=ours,marian-cpp"])
    assert list(benchmark.name_systems(both)) == ["ours float32", "marian-cpp float32", "ours bfloat16"]
    rates = [3.0, 2.0, 1.0, 8.0, 1.5, 4.0]
    systems = {
        name: {"target_tokens_per_second": rate, "product_gflops": 8.0}
        for name, rate in zip(names, rates, strict=True)
    }
    result = benchmark._conclude(
        benchmark.SETTINGS["base"], options, systems, {"ours": [], "peers": []}, dict.fromkeys(names, 1)
    )
    assert (result["faster_of_ours"], result["faster_peer"]) == ("ours bfloat16", "torch bfloat16")
    assert result["ratio"] == 2.0 and result["ratios"] == {"float32": 1.5, "bfloat16": 2.0}
