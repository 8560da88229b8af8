"""Bounds on what compiled updates cost on accelerators that are not at hand: they grow unseen otherwise.

Minutes for each program, and compilers of a gigabyte: a release runs them. A bound is a measured number and a
tenth more; whoever lowers the number lowers the bound.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
BIG = (
    "vocab.size=32000",
    "model.dtype=bfloat16",
    "model.dropout_rate=0.1",
    "model.scan_layers=False",
    "data.batching=pack",
    "data.batch_tokens=32768",
    "data.max_source_length=100",
    "data.max_target_length=100",
)
SMALL = ("model.dtype=bfloat16", "data.batching=pack")

DESCRIBE = """
import json, sys
sys.path.insert(0, "benchmarks")
from targets import Cell, compile_cell

recipe, target, *flags = sys.argv[1:]
print(json.dumps(compile_cell(Cell(recipe, target, tuple(f"--config.{flag}" for flag in flags)))))
"""


def describe(recipe: str, target: str, *flags: str) -> dict[str, Any]:
    """What `show --target` says of an update, from a process that compiles with all optimizations."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    }
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBE, recipe, target, *flags],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["found"]


needs_cuda = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)),
    reason="needs the compilers of the extra gpu",
)


@pytest.mark.slow
@needs_cuda
@pytest.mark.parametrize(
    ("recipe", "flags", "attention", "kernels"),
    [
        ("wmt14_en_de_big", (*BIG, "model.attention_dropout_rate=0"), "cudnn", 1800),
        ("wmt14_en_de_big", (*BIG, "model.attention_dropout_rate=0.1"), "triton", 1820),
        ("multi30k_de_en", SMALL, "triton", 1450),
    ],
)
def test_an_update_on_an_h100_has_few_kernels(recipe, flags, attention, kernels):
    found = describe(recipe, "h100:1", *flags)
    assert found["attention"]["kernel"] == attention
    assert 0 < found["estimate"]["kernels"] <= kernels


@pytest.mark.slow
@needs_cuda
def test_eight_gpus_send_the_gradients_of_all_parameters_once():
    layers = ("model.num_encoder_layers=1", "model.num_decoder_layers=1", "vocab.size=8000")
    found = describe("multi30k_de_en", "h100:8", *SMALL, *layers)
    assert list(found["collectives"]) == ["all-reduce"]
    sums = found["collectives"]["all-reduce"]
    assert sums["bytes"] == pytest.approx(15_568_904, rel=0.01)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the compiler of the extra tpu")
def test_an_update_on_a_v5e_has_few_cycles():
    flags = ("data.batch_tokens=16384", "data.max_source_length=128", "data.max_target_length=128")
    found = describe("wmt14_en_de_base", "v5e:1x1", *SMALL, *flags)
    assert found["attention"]["kernel"] == "pallas"
    assert 0 < found["estimate"]["million_cycles"] <= 75
