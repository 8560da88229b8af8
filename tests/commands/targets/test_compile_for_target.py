"""Compiling for devices: on simulated CPU devices, and for a TPU where libtpu is installed."""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from jax.experimental import topologies

from flaxformer_mt.commands import compile_for_target
from flaxformer_mt.commands.compile_for_target import (
    ACCELERATORS,
    Accelerator,
    TargetCompiler,
    find_needed_memory,
    parse_target,
)
from flaxformer_mt.commands.main import main
from flaxformer_mt.commands.show_target import describe_target, summarize_target
from flaxformer_mt.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    SearchConfig,
    VocabConfig,
)
from flaxformer_mt.errors import UserError
from flaxformer_mt.model import init_params, make_model

ROOT = Path(__file__).resolve().parents[3]
TINY = Config(
    data=DataConfig(batch_tokens=96, max_source_length=8, max_target_length=8, row_multiple=1),
    vocab=VocabConfig(size=40),
    model=ModelConfig(num_encoder_layers=1, num_decoder_layers=1, model_dim=16, num_heads=2, ffn_dim=32),
    search=SearchConfig(beam_size=2, batch_tokens=64),
)


@pytest.fixture
def two_cpus(monkeypatch):
    """A target of two simulated devices of this machine, for which XLA's CPU compiler compiles."""
    monkeypatch.setitem(ACCELERATORS, "two", Accelerator("cpu", "cpu", 2**30, 1e9, 1e9))
    monkeypatch.setattr(compile_for_target, "find_devices", lambda target: jax.devices()[:2])
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    return dataclasses.replace(parse_target("h100:2"), kind="two")


def test_a_config_is_compiled_and_described(two_cpus):
    said = []
    result = describe_target(TINY, two_cpus, sizes=(40, 40), say=said.append)
    assert json.loads(json.dumps(result)) == result
    assert (result["name"], result["devices"], result["layout"]) == ("two:2", 2, "pmap over 2 devices")
    assert result["memory_gib"] == 0.5 and result["fits"] and result["settings_tried"] is None
    assert result["batch"] == {"rows": 12, "source_length": 8, "target_length": 8}
    assert result["attention"] == {
        "kernel": "plain",
        "reason": "model.attention=auto has no fused kernel on cpu",
        "calls": {},
    }
    assert [program["name"] for program in result["programs"]] == ["update"]
    # The gradients of all parameters and two scalars are summed once.
    params = jax.eval_shape(
        lambda: init_params(make_model(TINY.model, source_size=40, target_size=40), jax.random.key(0))
    )
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert set(result["collectives"]) == {"all-reduce"}
    assert result["collectives"]["all-reduce"]["bytes"] == 4 * (count + 2)
    assert result["estimate"] is None
    assert result["decoding_step"]["beams"] == 2 and result["decoding_step"]["fits"]
    assert len(said) == 2 and "12 rows" in said[0]
    text = summarize_target(result)
    assert "Compiled for, not run: two:2, 2 x cpu, pmap over 2 devices" in text
    assert "fits into the 0.5 GiB" in text and "all-reduce" in text and "the peak rate is unknown" in text


def test_accumulation_is_three_programs_and_what_the_update_keeps_meanwhile(two_cpus):
    config = dataclasses.replace(TINY, optim=OptimConfig(accumulation=3), parallel=ParallelConfig(fsdp=2))
    compiler = TargetCompiler(two_cpus, sizes=(40, 40))
    gradient, add, update = compiler.compile_update(config)
    assert [program.times for program in (gradient, add, update)] == [3, 2, 1]
    assert update.held == 0 and gradient.held == add.held + 2 * 4 > 0  # the sums of loss and weight
    assert all(program.needed == program.peak + program.held for program in (gradient, add, update))
    assert gradient.collectives and gradient.accessed > 0 and gradient.peak > 0


def test_the_programs_are_those_of_training(two_cpus):
    accumulated = dataclasses.replace(TINY, optim=OptimConfig(accumulation=3))
    compiler = TargetCompiler(two_cpus, sizes=(40, 40))
    gradient, add, update = compiler.compile_update(accumulated)
    assert not gradient.collectives and not add.collectives and update.collectives["all-reduce"].bytes > 4000


@pytest.mark.slow
def test_matrices_are_gathered_as_in_training(two_cpus):
    compiler = TargetCompiler(two_cpus, sizes=(40, 40))
    once, twice = (
        compiler.compile_update(config)[0].collectives["all-gather"].bytes
        for gathers in ("once", "twice")
        if (config := dataclasses.replace(TINY, parallel=ParallelConfig(fsdp=2, fsdp_gathers=gathers)))
    )
    assert once < twice


@pytest.mark.parametrize(
    "message, needed",
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.5G of 15.75G hbm.",
            20.5 * 2**30,
        ),
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
            "required for HLO temporaries (256.00M) exceeds available HBM (15.75G). HLO module: jit__lambda.",
            2**28,
        ),
        ("RESOURCE_EXHAUSTED: something else", None),
        ("INTERNAL: Used 20.5G of 15.75G hbm", None),
    ],
)
def test_a_refusal_says_how_much_memory_would_be_needed(message, needed):
    assert find_needed_memory(message) == needed


def test_a_single_chip_is_a_host_of_its_own(monkeypatch):
    """libtpu 0.0.42 refuses v5e:1x1 otherwise; what is larger keeps the host's usual shape."""
    described = []

    def describe(**options):
        described.append(options)
        return SimpleNamespace(devices=())

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "found")
    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    for name in ("v5e:1x1", "v5p:1x1x1:2", "v5e:2x2"):
        compile_for_target.find_devices(parse_target(name))
    hosts = [options.get("chips_per_host_bounds") for options in described]
    assert hosts == [(1, 1, 1), (1, 1, 1), None]


def test_products_are_compiled_without_triton_where_it_cannot_choose_tiles():
    tried = []

    def refuse(message):
        def compile_(compiler_options=None):
            tried.append(compiler_options)
            if compiler_options is None:
                raise jax.errors.JaxRuntimeError(message)
            return "compiled"

        return SimpleNamespace(compile=compile_)

    lowered = refuse("INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.337")
    assert compile_for_target._compile_lowered(lowered) == "compiled"
    assert tried == [None, {"xla_gpu_enable_triton_gemm": False}]
    with pytest.raises(jax.errors.JaxRuntimeError, match="hbm"):
        compile_for_target._compile_lowered(refuse("RESOURCE_EXHAUSTED: Used 20G of 15G hbm"))


def test_an_unknown_target_and_a_missing_compiler_end_with_one_line(capsys, monkeypatch, tmp_path):
    flags = ["show", "--config=toy_de_en", f"--run={tmp_path}"]
    assert main([*flags, "--target=v5:2x2"]) == 2
    assert "did you mean v5" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for target, extra in {"v5e:2x2": "jax[tpu]", "h100:8": "jax[cuda13]"}.items():
        assert main([*flags, f"--target={target}"]) == 2
        error = capsys.readouterr().err
        assert re.search(rf"error: --target={target} needs .* install it with: .*{re.escape(extra)}", error)


def test_a_missing_cudnn_is_named_where_jax_looks_for_it():
    """JAX asks for its version while it traces attention, long before a compiler needs it."""
    target = parse_target("h200:1")
    with pytest.raises(
        UserError, match=r"--target=h200:1: .*\(cuDNN not found.\); .*jax\[cuda13\].*attention="
    ):
        with compile_for_target.name_missing_library(target):
            raise RuntimeError("cuDNN not found.")
    with pytest.raises(RuntimeError, match="another"), compile_for_target.name_missing_library(target):
        raise RuntimeError("another error")


def show_for_tpus(folder: Path, *flags: str) -> dict:
    """In a process of its own: libtpu stays loaded, and the tests have simulated devices."""
    command = ["show", "--config=toy_de_en", f"--run={folder}", "--target=v5e:2x2", *flags, "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", "flaxformer_mt", *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


@needs_libtpu
def test_the_toys_update_compiles_for_a_tpu(tmp_path):
    shown = show_for_tpus(tmp_path)
    found = shown["target"]
    assert found["device_kind"] == "TPU v5 lite" and found["devices"] == 4 and found["fits"]
    assert shown["at_peak"]["device"] == "TPU v5 lite"
    parameters = shown["parameters"]["total"] * 4
    # At least the parameters and Adam's two averages.
    assert found["memory_gib"] == 15.75 and 3 * parameters / 2**30 < found["peak_gib"] < 1
    assert found["collectives"]["all-reduce"]["bytes"] == pytest.approx(parameters, rel=0.05)
    estimate = found["estimate"]
    assert estimate["memory_milliseconds"] > 0 and 0 < estimate["mfu"] < 1


@needs_libtpu
def test_a_mesh_of_tpus_gathers_matrices_once_and_scatters_their_gradients(tmp_path):
    """With the kernel of attention on the rows of each chip; the table is gathered in float32."""
    # Of this width, matrices are most of the parameters.
    flags = ("model_dim=512", "num_heads=8", "dtype=bfloat16", "attention_dropout_rate=0")
    shown = show_for_tpus(tmp_path, *(f"--config.model.{flag}" for flag in flags), "--config.parallel.fsdp=4")
    found, total = shown["target"], shown["parameters"]["total"]
    assert found["attention"]["kernel"] == "pallas" and sum(found["attention"]["calls"].values()) == 12
    collectives = found["collectives"]
    table = shown["vocabulary"]["target_size"] * 512
    matrices = total - table
    assert collectives["all-gather"]["bytes"] == pytest.approx(4 * table + 2 * matrices, rel=0.02)
    assert collectives["reduce-scatter"]["bytes"] == pytest.approx(4 * total, rel=0.02)
    assert collectives["all-reduce"]["bytes"] < 0.02 * 4 * total
    # Each chip has a fourth of everything already.
    sent = sum(kind["sent"] for kind in collectives.values())
    assert sent == pytest.approx(0.75 * (8 * table + 6 * matrices), rel=0.02)
