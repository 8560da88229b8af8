"""Names of targets, what is told of them, and the search for settings that fit, from made-up programs."""

import dataclasses
import re

import jax
import pytest

from flaxformer_mt.commands import show_target
from flaxformer_mt.commands.compile_for_target import ACCELERATORS, Compiled, describe_gpu, parse_target
from flaxformer_mt.commands.compiled_text import Kernel, Traffic
from flaxformer_mt.commands.show import longest_batch
from flaxformer_mt.commands.show_target import Step, count_most_attempts, find_settings, list_ladders
from flaxformer_mt.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
from flaxformer_mt.config.checks import validate
from flaxformer_mt.errors import UserError
from flaxformer_mt.flops import padded_work, peak_flops, training_flops
from flaxformer_mt.parallel import make_parallel

CONFIG = Config(
    data=DataConfig(batch_tokens=2048, max_source_length=16, max_target_length=32),
    model=ModelConfig(dtype="bfloat16", attention_dropout_rate=0.0),
    optim=OptimConfig(accumulation=2),
)


def test_operations_bytes_and_collectives_take_their_time_by_the_data_sheet():
    """And no time of an update is told that no measured run backs."""
    target = parse_target("v5e:2x2")
    # Twice 4e9 bytes that are added up, sent twice, at 200e9 bytes a second.
    traffic = {"all-reduce": Traffic(1, 4 * 10**9, 8 * 10**9)}
    gradient = Compiled("gradient", 0, 1.0, accessed=10**9, collectives=traffic, cycles=4_000_000, times=2)
    update = Compiled("update", 0, 1.0, accessed=10**9, cycles=1_000_000)
    batch = longest_batch(CONFIG)
    rows, _, length = batch.shape
    found = show_target.model_update(CONFIG, target, [gradient, update], batch, devices=4, target_size=8000)
    flops = 2 * training_flops(CONFIG.model, padded_work(rows, 16, length), target_size=8000)
    assert found["collectives_milliseconds"] == 80
    assert found["memory_milliseconds"] == pytest.approx(3e3 * 1e9 / 819e9, abs=1e-3)
    assert found["computing_milliseconds"] == pytest.approx(1e3 * flops / 4 / 197e12, abs=1e-3)
    assert not any(found[name] for name in ("milliseconds", "target_tokens_a_second", "mfu", "hours"))
    assert found["million_cycles"] == 9 and found["basis"].startswith("no time: the cycles are")
    refused = [gradient, update, Compiled("refused", 2**40, 1.0)]
    assert show_target.model_update(CONFIG, target, refused, batch, devices=4, target_size=8000) is None


def test_the_time_on_an_h100_is_that_of_its_kernels():
    """At 700 TFLOP/s, 2.8 TB/s and 2 us a kernel; attention takes 2.6 times as long as its bytes."""
    kernels = [
        Kernel("products", "dot", 10**6, 7 * 10**12, times=2),
        Kernel("attention", "__cudnn$fmha", 28 * 10**9, times=3),
    ]
    config, batch = dataclasses.replace(CONFIG, optim=OptimConfig()), longest_batch(CONFIG)
    rows, _, length = batch.shape

    def model(kind: str, changed: Config = config, devices: int = 1, **more: object) -> dict:
        update = Compiled("update", 0, 1.0, accessed=0, kernels=[one._replace(**more) for one in kernels])
        return show_target.model_update(
            changed, parse_target(kind), [update], batch, devices=devices, target_size=8000
        )

    found, seconds = model("h100"), 2 * (0.01 + 2e-6) + 3 * (0.026 + 2e-6)
    assert found["milliseconds"] == pytest.approx(1e3 * seconds)
    assert found["target_tokens_a_second"] == round(rows * length / seconds)
    assert found["memory_milliseconds"] == pytest.approx(1e3 * (3 * 28e9 + 2e6) / 3.35232e12, abs=1e-3)
    assert found["hours"] == pytest.approx(config.train.steps * seconds / 3600, rel=0.01)
    assert found["mfu"] == pytest.approx(found["computing_milliseconds"] / found["milliseconds"], abs=1e-3)
    attention, products = found["kernels"]
    assert (attention["kind"], attention["kernels"], attention["gigabytes"]) == ("attention", 3, 84)
    assert (products["teraflops"], products["milliseconds"]) == (14, pytest.approx(20.004))
    assert "98.0 ms of it" in model("h100", name="attention_forward")["basis"]
    exact = dataclasses.replace(config, model=ModelConfig(dtype="float32"))
    for other in (
        model("a100"),
        model("h200"),
        model("b200"),
        model("h100:8", devices=8),
        model("h100", exact),
    ):
        assert other["milliseconds"] is None and other["basis"].startswith("no time")
        assert [kind["milliseconds"] for kind in other["kernels"]] == [None, None]


def test_memory_of_a_gpu_is_the_share_that_jax_reserves(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert show_target.usable_memory(parse_target("h100:8")) == int(84_942_979_072 * 0.75)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert show_target.usable_memory(parse_target("h100:8")) == int(84_942_979_072 * 0.9)
    assert show_target.usable_memory(parse_target("v5e")) == int(15.75 * 2**30)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "ninety")
    with pytest.raises(UserError, match="MEM_FRACTION is 'ninety', .* such as 0.75"):
        show_target.usable_memory(parse_target("h100:8"))


class FakeCompiler:
    """Needs 20 GiB, 2 less with the loss in chunks, 4 less with dots; refuses what does not fit."""

    device_kind = "TPU v5 lite"

    def __init__(self, target, *, sizes):
        self.target, self.sizes = target, sizes

    def parallel(self, config):
        return make_parallel(config, devices=jax.devices()[:1])

    def compile_update(self, config):
        gib = 20 - {"none": 0, "dots": 4, "full": 6}[config.model.remat]
        gib -= 2 if config.train.loss_chunk_tokens else 0
        return [Compiled("update", gib * 2**30, 2.0, None if gib > 15 else 1)]

    def compile_search(self, config):
        size = {"rows": 8, "beams": 4, "source_length": 16, "capacity": 24}
        return {name: Compiled(name, 2**30, 1.0, 1) for name in ("prefill", "generate")}, size


def test_an_update_that_does_not_fit_comes_with_settings_that_do(monkeypatch):
    monkeypatch.setattr(show_target, "TargetCompiler", FakeCompiler)
    # Of four chips, the config uses one: no layout splits parameters.
    config = dataclasses.replace(CONFIG, optim=OptimConfig())
    said = []
    result = show_target.describe_target(config, parse_target("v5e:2x2"), sizes=(8000, 8000), say=said.append)
    assert not result["fits"] and result["peak_gib"] == 20
    assert [tuple(tried.values()) for tried in result["settings_tried"]] == [
        ({"train.loss_chunk_tokens": 256, "model.remat": "dots"}, 14, True, 3),
        ({"train.loss_chunk_tokens": 256}, 18, False, 1),
        ({"model.remat": "dots"}, 16, False, 2),
    ]
    text = show_target.summarize_target(result)
    assert "does NOT fit into the 15.75 GiB of a device: 20.0 GiB" in text
    assert "Settings that fit, nearest first, and others that were tried" in text
    assert "--config.train.loss_chunk_tokens=256 --config.model.remat=dots  14.00  fits" in text
    assert any("--config.model.remat=dots: 16.0 GiB, does not fit" in line for line in said)
    # 1 + 2 + 3 steps up, and 1 + 2 down again.
    assert any("by 9 compilations at most" in line for line in said)
    step = "a search has 8 rows of 4 beams, 16 source and up to 24 target tokens"
    assert f"{step}\n" in text
    refused = {"decoding_step": result["decoding_step"] | {"fits": False}}
    assert f"{step}; it does NOT fit\n" in show_target.summarize_target(result | refused)


def test_names_give_the_kind_the_shape_and_the_number_of_chips():
    found = {
        name: (target.kind, target.shape, target.groups, target.chips, target.name)
        for name in ("v5e:2x2", "v5e:16x16:2", "v6e", "v5p", "v5p:2x2x4", "h100:8", "h200", "H100:8:3")
        if (target := parse_target(name))
    }
    assert found == {
        "v5e:2x2": ("v5e", "2x2", 1, 4, "v5e:2x2"),
        "v5e:16x16:2": ("v5e", "16x16", 2, 512, "v5e:16x16:2"),
        "v6e": ("v6e", "1x1", 1, 1, "v6e:1x1"),
        "v5p": ("v5p", "1x1x1", 1, 1, "v5p:1x1x1"),
        "v5p:2x2x4": ("v5p", "2x2x4", 1, 16, "v5p:2x2x4"),
        "h100:8": ("h100", "8", 1, 8, "h100:8"),
        "h200": ("h200", "1", 1, 1, "h200:1"),
        "H100:8:3": ("h100", "8", 3, 24, "h100:8:3"),
    }


@pytest.mark.parametrize(
    "name, near",
    [
        ("v5:2x2", "did you mean v5[ep]:2x2"),
        ("h10:8", "did you mean h[12]00:8"),
        ("tpu", "known: v4, v5e"),
        ("v5e:3x3", "nearest is --target=v5e:2x4"),
        ("v5e:4", "nearest is --target=v5e:2x2"),
        ("v5e:2x2x1", "nearest is --target=v5e:2x2"),
        ("v5e:big", "slices: 1x1, 2x2"),
        ("v5e:0x0", "nearest is --target=v5e:1x1"),
        ("v5e:2x2:0", "KIND:SHAPE:NUMBER"),
        ("v5e:2x2:1:1", "KIND:SHAPE:NUMBER"),
        ("h100:2x2", "h100:8"),
        ("h100:0", "h100:8"),
        ("", "unknown accelerator ''"),
    ],
)
def test_an_unknown_target_is_refused_with_the_nearest_one(name, near):
    with pytest.raises(UserError, match=near) as error:
        parse_target(name)
    assert f"--target={name}" in str(error.value)


def test_every_accelerator_has_a_peak_rate_and_gpus_a_description():
    config = Config(model=ModelConfig(dtype="bfloat16"))
    for kind, accelerator in ACCELERATORS.items():
        assert peak_flops(config, accelerator.device_kind) is not None, kind
        if accelerator.platform == "cuda":
            text = describe_gpu(kind)
            assert text.count("{") == text.count("}")
            assert re.search(rf"device_memory_size: {accelerator.memory}\b", text)
            assert f"memory_bandwidth: {accelerator.bandwidth:.0f} " in text


NEAREST_FIT_CONFIG = Config(
    data=DataConfig(batch_tokens=8192, max_source_length=64, max_target_length=64),
    model=ModelConfig(model_dim=512, remat="none"),
    train=TrainConfig(loss_chunk_tokens=0),
)
LADDERS = list_ladders(NEAREST_FIT_CONFIG, device_count=4, loss_tokens=8192)
CHUNKS, DOTS, FULL = LADDERS[0][0].changes, LADDERS[1][0].changes, LADDERS[1][1].changes
LAYOUT, HALF, EIGHTH = LADDERS[2][0].changes, LADDERS[3][0].changes, LADDERS[3][2].changes


def test_the_ladders_have_what_a_config_has_not_used_up():
    assert LADDERS == [
        [({"train.loss_chunk_tokens": 1024}, 1)],
        [({"model.remat": "dots"}, 2), ({"model.remat": "full"}, 4)],
        [({"parallel.fsdp": 4, "parallel.data": 1}, 6)],
        [
            ({"data.batch_tokens": 4096, "optim.accumulation": 2}, 9),
            ({"data.batch_tokens": 2048, "optim.accumulation": 4}, 12),
            ({"data.batch_tokens": 1024, "optim.accumulation": 8}, 15),
        ],
    ]
    for step in (step for ladder in LADDERS for step in ladder):
        changed = NEAREST_FIT_CONFIG.replace(step.changes)
        validate(changed)
        tokens = changed.data.batch_tokens * changed.optim.accumulation
        assert (
            tokens == NEAREST_FIT_CONFIG.data.batch_tokens * NEAREST_FIT_CONFIG.optim.accumulation
        )  # of an update
    used = NEAREST_FIT_CONFIG.replace(
        {
            "train.loss_chunk_tokens": 256,
            "model.remat": "full",
            "parallel.fsdp": 4,
            "data.batch_tokens": 512,
            "optim.accumulation": 3,
        },
    )
    assert list_ladders(used, device_count=4, loss_tokens=512) == []
    pmap = used.replace({"parallel.fsdp": 1, "parallel.backend": "pmap"})
    assert list_ladders(pmap, device_count=4, loss_tokens=512) == []
    split = used.replace({"parallel.fsdp": 1, "parallel.tensor": 2})
    assert list_ladders(split, device_count=8, loss_tokens=512) == [
        [Step({"parallel.fsdp": 4, "parallel.data": 1}, 6)]
    ]
    dots = used.replace({"model.remat": "dots", "data.batch_tokens": 1024})
    assert list_ladders(dots, device_count=4, loss_tokens=512) == [
        [({"model.remat": "full"}, 2)],
        [({"data.batch_tokens": 512, "optim.accumulation": 6}, 9)],
    ]


def memory_of(config: Config) -> int:
    """100 units: 20 of logits, 40 of activations, 40 of the state; only logits and activations shrink."""
    share = 8192 // config.data.batch_tokens
    logits = 2 if config.train.loss_chunk_tokens else 20 // share
    activations = {"none": 40, "dots": 30, "full": 10}[config.model.remat] // share
    return logits + activations + 40 // config.parallel.fsdp


def tried(memory: int, measure=memory_of) -> list[tuple[dict, int, bool, int]]:
    reported = []
    found = find_settings(NEAREST_FIT_CONFIG, LADDERS, measure=measure, memory=memory, report=reported.append)
    assert reported == found and len(found) <= count_most_attempts(LADDERS)
    changes = [str(sorted(attempt.changes.items())) for attempt in found]
    assert "[]" not in changes and len(set(changes)) == len(changes)  # nothing is compiled twice
    for attempt in found:
        assert attempt.needed == measure(NEAREST_FIT_CONFIG.replace(attempt.changes))
        assert attempt.fits == (attempt.needed <= memory)
    return found


def test_steps_are_added_until_the_update_fits():
    assert tried(82) == [(CHUNKS, 82, True, 1)]
    # And what was added before is taken back where it is not needed.
    assert tried(75) == [(CHUNKS, 82, False, 1), (CHUNKS | DOTS, 72, True, 3), (DOTS, 90, False, 2)]
    assert tried(40) == [
        (CHUNKS, 82, False, 1),
        (CHUNKS | DOTS, 72, False, 3),
        (CHUNKS | FULL, 52, False, 5),
        (CHUNKS | FULL | LAYOUT, 22, True, 11),
        (CHUNKS | LAYOUT, 52, False, 7),
        (CHUNKS | DOTS | LAYOUT, 42, False, 9),
        (FULL | LAYOUT, 40, True, 10),
    ]


def test_where_nothing_fits_all_steps_were_tried():
    found = tried(3)
    assert not any(attempt.fits for attempt in found) and len(found) == 7
    assert found[-1].changes == CHUNKS | FULL | LAYOUT | EIGHTH and found[-1].distance == 26
    assert find_settings(NEAREST_FIT_CONFIG, [], measure=memory_of, memory=3) == []


def test_the_number_of_attempts_is_limited():
    assert len(tried(13)) == count_most_attempts(LADDERS) == 7 + 4
    assert count_most_attempts([]) == 0
