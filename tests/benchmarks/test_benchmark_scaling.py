"""The benchmark of scaling: which rows there are, what a row measures, and the table."""

import dataclasses
import importlib.util
import itertools
import json
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest

from flaxformer_mt.config.checks import validate

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "scaling.py"


@pytest.fixture(scope="module")
def scaling():
    spec = importlib.util.spec_from_file_location("benchmark_scaling", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for a class's annotations
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("tiny", [False, True])
def test_rows_have_unique_names_and_valid_configs(scaling, tiny):
    cases = list(scaling.plan_cases(tiny=tiny))
    names = [(case.axis, case.value) for case in cases]
    assert len(set(names)) == len(names)
    assert list(dict.fromkeys(case.axis for case in cases)) == list(scaling.AXES)
    for case in cases:
        config = scaling.make_config(case)
        validate(config)
        assert config.model.scan_layers == case.value.endswith("scanned")
        assert config.parallel.devices == case.devices
    layouts = {case.value.partition(" ")[2] for case in cases if case.devices > 1}
    assert layouts == {"pmap", "mesh data", "mesh fsdp", "mesh tensor"}


def test_a_row_measures_the_update_of_the_model_that_it_names(scaling, monkeypatch):
    """One layer of each stack, over two devices that share the parameters; a second passes at each look."""
    ticks = itertools.count()
    monkeypatch.setattr(scaling, "time", types.SimpleNamespace(perf_counter=lambda: next(ticks)))
    case = dataclasses.replace(scaling.TINY, axis="devices", value="x", devices=2, layout={"fsdp": 2})
    row = scaling.measure(case, seconds=0.0)
    model = scaling.make_model(scaling.make_config(case).model, source_size=40, target_size=40)
    params = jax.eval_shape(lambda: scaling.init_params(model, jax.random.key(0)))
    assert row["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert row["compile_s"] == row["init_s"] == 1 and row["peak_mib"] > 50
    assert (row["step_ms"], row["tokens_per_second"]) == (1000, 8 * 8)
    assert row["state_mib"] is not None


def test_the_table_is_aligned_and_parts_the_axes(scaling):
    rows = [
        {"axis": "width", "value": "16", "step_ms": 1234, "state_mib": 7},
        {"axis": "devices", "value": "2 pmap", "step_ms": 9.5, "state_mib": None},
    ]
    assert scaling.format_table(rows).split("\n") == [
        "axis     value   step_ms  state_mib",
        "",
        "width    16        1,234          7",
        "",
        "devices  2 pmap      9.5",
    ]


def test_simulated_devices_are_those_of_a_process_of_its_own(scaling, monkeypatch):
    ran = {}

    def run(command, *, env, **options):
        ran.update(command=command, env=env)
        return subprocess.CompletedProcess(command, 0, stdout='{"axis": "devices"}', stderr="")

    monkeypatch.setattr(scaling.subprocess, "run", run)
    case = next(case for case in scaling.plan_cases(tiny=True) if case.axis == "devices")
    assert scaling.measure_apart(case, seconds=0.0) == {"axis": "devices"}
    assert ran["env"]["XLA_FLAGS"].endswith("--xla_force_host_platform_device_count=2")
    assert ran["env"]["JAX_PLATFORMS"] == "cpu"
    (given,) = [part.removeprefix("--case=") for part in ran["command"] if part.startswith("--case=")]
    assert scaling.Case(**json.loads(given)) == case
