"""`show --target`: names of devices, and what is told of an update, compiled for simulated devices."""

import dataclasses
import importlib.util
import json
import re

import jax
import pytest

from flaxformer_mt.commands import show_target, target_devices
from flaxformer_mt.commands.main import main
from flaxformer_mt.commands.show import longest_batch
from flaxformer_mt.commands.show_target import Compiled, compile_update, describe_update, summarize_target
from flaxformer_mt.commands.target_devices import ACCELERATORS, Accelerator, parse_target
from flaxformer_mt.config import Config, DataConfig, ModelConfig, OptimConfig, ParallelConfig, VocabConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.flops import padded_work, peak_flops, training_flops
from flaxformer_mt.model import init_params, make_model
from flaxformer_mt.parallel import make_parallel

TINY = Config(
    data=DataConfig(batch_tokens=96, max_source_length=8, max_target_length=8, row_multiple=1),
    vocab=VocabConfig(size=40),
    model=ModelConfig(num_encoder_layers=1, num_decoder_layers=1, model_dim=16, num_heads=2, ffn_dim=32),
)


@pytest.fixture
def two_cpus(monkeypatch):
    """A target of two simulated devices of this machine, for which XLA's CPU compiler compiles."""
    monkeypatch.setitem(ACCELERATORS, "two", Accelerator("cpu", "cpu", 2**30, 1e9))
    monkeypatch.setattr(show_target, "find_devices", lambda target: jax.devices()[:2])
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    return dataclasses.replace(parse_target("h100:2"), kind="two")


def test_a_config_is_compiled_and_described(two_cpus):
    result = describe_update(TINY, two_cpus, sizes=(40, 40))
    assert json.loads(json.dumps(result)) == result
    assert (result["name"], result["layout"]) == ("two:2", "pmap over 2 devices")
    assert result["memory_gib"] == 0.5 and result["fits"]
    assert result["batch"] == {"rows": 12, "source_length": 8, "target_length": 8}
    # The gradients of all parameters, loss and weight, and a zero for what is not counted, are summed once.
    model = make_model(TINY.model, source_size=40, target_size=40)
    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert {kind: one["bytes"] for kind, one in result["collectives"].items()} == {
        "all-reduce": 4 * (count + 3)
    }
    text = summarize_target(result)
    assert "Compiled for, not run: two:2, pmap over 2 devices" in text
    assert "fits into the 0.5 GiB" in text and "all-reduce" in text
    refused = result | {"fits": False, "collectives": {}, "estimate": None}
    assert "does NOT fit into the 0.5 GiB" in summarize_target(refused)
    assert "the compiler has refused the step" in summarize_target(refused)


def test_accumulation_is_three_programs_and_what_the_update_keeps_meanwhile(two_cpus):
    config = dataclasses.replace(TINY, optim=OptimConfig(accumulation=3), parallel=ParallelConfig(fsdp=2))
    parallel = make_parallel(config, devices=jax.devices()[:2])
    gradient, add, update = compile_update(config, parallel, (40, 40))
    assert [program.times for program in (gradient, add, update)] == [3, 2, 1]
    # While a gradient is computed, Adam's two averages and a sum are kept beside what it reads.
    assert gradient.needed > update.needed > 0 and "all-gather" in gradient.text


@pytest.mark.parametrize(
    "message, needed",
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory. Used 20.5G of 15.75G hbm.", 20.5 * 2**30),
        ("RESOURCE_EXHAUSTED: required for HLO temporaries (256.00M) exceeds available HBM (15.75G).", 2**28),
        ("RESOURCE_EXHAUSTED: something else", None),
        ("INTERNAL: Used 20.5G of 15.75G hbm", None),
    ],
)
def test_a_refusal_says_how_much_memory_would_be_needed(message, needed):
    assert show_target.find_needed_memory(message) == needed


def test_the_cost_of_an_update_is_that_of_all_runs_of_its_programs():
    def estimate(name: str, text: str) -> dict:
        target, programs = parse_target(name), [Compiled(0, text, times=2)]
        return show_target.estimate_update(TINY, target, programs, devices=target.chips, target_size=40)

    found = estimate("h100:2", "ENTRY %main (p: f32[8]) -> f32[8] {\n  ROOT %copy = f32[8] copy(%p)\n}\n")
    flops = training_flops(TINY.model, padded_work(*longest_batch(TINY).shape), target_size=40)
    peak = peak_flops(TINY, ACCELERATORS["h100"].device_kind)
    assert found["computing_milliseconds"] == pytest.approx(1e3 * flops / 2 / peak, abs=1e-3)
    assert (found["kernels"], found["million_cycles"]) == (2, 0)
    tpu = estimate("v5e", '{"estimated_cycles":"4000000"}')
    assert (tpu["kernels"], tpu["million_cycles"]) == (None, 8)


def test_memory_of_a_gpu_is_the_share_that_jax_reserves(monkeypatch):
    memory, target = 84_942_979_072, parse_target("h100:8")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert target_devices.usable_memory(target) == int(memory * 0.75)
    assert target_devices.usable_memory(parse_target("v5e")) == int(15.75 * 2**30)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "ninety")
    with pytest.raises(UserError, match="MEM_FRACTION is 'ninety', .* such as 0.75"):
        target_devices.usable_memory(target)


def test_names_give_the_kind_the_shape_and_the_number_of_chips():
    names = ("v5e:2x2", "v5e:16x16:2", "v6e", "h200", "H100:8:3")
    targets = {name: parse_target(name) for name in names}
    assert [target.name for target in targets.values()] == [
        *("v5e:2x2", "v5e:16x16:2", "v6e:1x1", "h200:1", "h100:8:3")
    ]
    assert [target.chips for target in targets.values()] == [4, 512, 1, 1, 24]


@pytest.mark.parametrize(
    "name, answer",
    [
        ("v5:2x2", "did you mean v5[ep]:2x2"),
        ("tpu", "known: v5e, v5p"),
        ("v5e:3x3", "its slices are 1x1, 2x2"),
        ("v5e:2x2:0", "KIND:SHAPE:NUMBER"),
        ("v5e:2x2:1:1", "KIND:SHAPE:NUMBER"),
        ("h100:2x2", "h100:8"),
        ("h100:0", "h100:8"),
        ("", "unknown accelerator ''"),
    ],
)
def test_an_unknown_target_is_refused(name, answer):
    with pytest.raises(UserError, match=answer) as error:
        parse_target(name)
    assert f"--target={name}" in str(error.value)


def test_a_missing_compiler_and_a_missing_cudnn_are_one_line(capsys, monkeypatch, tmp_path, two_cpus):
    def miss(*arguments):
        raise RuntimeError("cuDNN not found.")

    with monkeypatch.context() as patched:
        patched.setattr(show_target, "compile_update", miss)
        with pytest.raises(UserError, match=r"--target=two:2: .*\(cuDNN not found.\); .*cuda13.*attention="):
            describe_update(TINY, two_cpus, sizes=(40, 40))
    monkeypatch.setattr(show_target, "find_devices", target_devices.find_devices)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for target, extra in {"v5e:2x2": "jax[tpu]", "h100:8": "jax[cuda13]"}.items():
        assert main(["show", "--config=toy_de_en", f"--run={tmp_path}", f"--target={target}"]) == 2
        error = capsys.readouterr().err
        assert re.search(rf"error: --target={target} needs .* install it with: .*{re.escape(extra)}", error)
