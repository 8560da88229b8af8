"""The estimate of time and the text for people, from made-up programs; nothing is compiled."""

import dataclasses

import jax
import pytest

from flaxformer_mt.commands.show import longest_batch
from flaxformer_mt.commands.targets import target_report
from flaxformer_mt.commands.targets.compile_for_target import Compiled
from flaxformer_mt.commands.targets.hlo_text import Program
from flaxformer_mt.commands.targets.nearest_fit import MOST_PAIRS
from flaxformer_mt.commands.targets.target_names import parse_target
from flaxformer_mt.config import Config, DataConfig, ModelConfig, OptimConfig
from flaxformer_mt.flops import padded_work, training_flops
from flaxformer_mt.parallel import make_parallel

CONFIG = Config(
    data=DataConfig(batch_tokens=2048, max_source_length=16, max_target_length=32),
    model=ModelConfig(dtype="bfloat16", attention_dropout_rate=0.0),
    optim=OptimConfig(accumulation=2),
)


def program(cycles: int, path: str, elements: int = 0) -> Program:
    return Program(
        "ENTRY %main (p: f32[4]) -> f32[4] {\n"
        f'  %x = f32[4] add(%p, %p), metadata={{op_name="{path}"}}, '
        f'backend_config={{"estimated_cycles":"{cycles}"}}\n'
        f"  %y = f32[{elements}] all-reduce(%x)\n"
        "}\n"
    )


def test_the_time_is_that_of_cycles_and_of_bytes():
    target = parse_target("v5e:2x2")
    gradient = program(600_000_000, "jit(f)/jvp(E.hidden)/layers_0/self_attention/x", 1_000_000_000)
    update = program(300_000_000, "jit(f)/cond/add")
    programs = [
        Compiled("gradient", 0, gradient, 1.0, times=2),
        Compiled("update", 0, update, 1.0),
    ]
    batch = longest_batch(CONFIG)
    rows, length = batch.target_in.shape
    estimate = target_report.estimate_time(CONFIG, target, programs, batch, target_size=8000)
    # 1.5e9 cycles at 1.5 GHz; twice 4e9 bytes, sent twice, at 200e9 bytes a second.
    assert estimate["computing_milliseconds"] == 1000 and estimate["collectives_milliseconds"] == 80
    assert estimate["shares"] == {"attention": 0.8, "update and rest": 0.2}
    assert estimate["target_tokens_a_second"] == round(2 * rows * length / 1.08)
    flops = 2 * training_flops(CONFIG.model, padded_work(rows, 16, length), target_size=8000)
    assert estimate["mfu"] == round(flops / 4 / 197e12 / 1.08, 3)
    # A kernel: 197e9 operations at a third of 197e12 a second; another: 8.19e9 bytes at 819e9 a second.
    kernel = Program(
        "ENTRY %main (p: f32[4]) -> f32[4] {\n"
        + "".join(
            f'  %k{flops} = f32[4] custom-call(%p), custom_call_target="tpu_custom_call", '
            f'metadata={{op_name="layers_0/self_attention/x"}}, backend_config={{"cost_estimate":'
            f'{{"flops":"{flops}","transcendentals":"5","bytes_accessed":"{size}"}}}}\n'
            for flops, size in ((197 * 10**9, 8), (8, 819 * 10**7))
        )
        + "}\n"
    )
    with_kernel = [*programs, Compiled("kernel", 0, kernel, 1.0)]
    estimate = target_report.estimate_time(CONFIG, target, with_kernel, batch, target_size=8000)
    assert estimate["computing_milliseconds"] == pytest.approx(1000 + 3 + 10)
    refused = [*programs, Compiled("refused", 2**40, None, 1.0)]
    assert target_report.estimate_time(CONFIG, target, refused, batch, target_size=8000) is None
    gpu = parse_target("h100")
    silent = [Compiled("update", 0, program(0, "x"), 1.0)]
    assert target_report.estimate_time(CONFIG, gpu, silent, batch, target_size=8000) is None


@pytest.mark.parametrize(
    "path, part",
    [
        (
            "jit(s)/jvp(E.hidden)/E._encode/encoder.run/layers_1/self_attention_residual/self_attention/x",
            "attention",
        ),
        ("jit(s)/transpose(jvp(E.hidden))/layers_1/feedforward_residual/feedforward/input/x", "feed-forward"),
        ("jit(s)/jvp(E.hidden)/layers_1/self_attention_residual/norm/x", "norms and residuals"),
        ("jit(s)/transpose(jvp(E.logits))/...D,VD->...V/dot_general", "logits and loss"),
        ("jit(s)/jvp()/while/body/reduce_sum", "logits and loss"),
        ("jit(s)/jvp(E.hidden)/E._decode/decoder.start/embedding_dropout/select_n", "embeddings"),
        ("jit(s)/cond/branch_1_fun/add", "update and rest"),
        ("", "update and rest"),
    ],
)
def test_operations_belong_to_parts(path, part):
    assert target_report.find_part(path) == part


def test_memory_of_a_gpu_is_the_share_that_jax_reserves(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert target_report.usable_memory(parse_target("h100:8")) == int(84_942_979_072 * 0.75)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert target_report.usable_memory(parse_target("h100:8")) == int(84_942_979_072 * 0.9)
    assert target_report.usable_memory(parse_target("v5e")) == int(15.75 * 2**30)


class FakeCompiler:
    """Needs 20 GiB, or 10 with half of the batch, or 12 with dots; refuses the loss in chunks."""

    device_kind = "TPU v5 lite"

    def __init__(self, target, *, sizes):
        self.target, self.sizes = target, sizes

    def parallel(self, config):
        return make_parallel(config, devices=jax.devices()[:1])

    def compile_update(self, config, batch):
        gib = 20 // config.optim.accumulation
        gib = {"none": gib, "dots": 12, "full": 11}[config.model.remat]
        refused = config.train.loss_chunk_tokens > 0
        return [Compiled("update", (18 if refused else gib) * 2**30, None if refused else Program(""), 2.0)]

    def compile_decoding_step(self, config):
        size = {"rows": 8, "beams": 4, "source_length": 16, "capacity": 24}
        return Compiled("decoding step", 2**30, Program(""), 1.0), size


def test_an_update_that_does_not_fit_comes_with_settings_that_do(monkeypatch):
    monkeypatch.setattr(target_report, "TargetCompiler", FakeCompiler)
    config = dataclasses.replace(CONFIG, optim=OptimConfig())
    said = []
    result = target_report.describe_target(config, parse_target("v5e"), sizes=(8000, 8000), say=said.append)
    assert not result["fits"] and result["peak_gib"] == 20
    assert [tuple(tried.values()) for tried in result["settings_tried"]] == [
        ({"model.remat": "dots"}, 12, True, 2),
        ({"data.batch_tokens": 1024, "optim.accumulation": 2}, 10, True, 9),
        ({"train.loss_chunk_tokens": 256}, 18, False, 1),
    ]
    assert result["pairs_left_out"] == 0
    text = target_report.summarize_target(result)
    assert "does NOT fit into the 15.75 GiB of a device: 20.0 GiB" in text
    assert "Settings that fit, nearest first, and others that were tried" in text
    assert "were not tried" not in text
    assert "--config.data.batch_tokens=1024 --config.optim.accumulation=2" in text
    assert any("--config.model.remat=dots: 12.0 GiB, fits" in line for line in said)
    # 1 + 2 + 3 changes alone, the most pairs, and all kinds together with each batch.
    assert any(f"by {1 + 2 + 3 + MOST_PAIRS + 3} compilations at most" in line for line in said)
    text = target_report.summarize_target(result | {"pairs_left_out": 4})
    assert f"4 pairs of changes were not tried: at most {MOST_PAIRS} are compiled" in text
