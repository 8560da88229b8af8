"""Devices: axes that cannot be are refused, every parameter has one rule, and cores are split as told."""

import dataclasses
import functools
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec
from tiny_experiment import quick_environment

from flaxformer_mt.config import Config, ModelConfig, ParallelConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.model import init_params, make_model
from flaxformer_mt.parallel import choose_layout, rows_per_device
from flaxformer_mt.parallel.sharding import (
    RULES,
    _make_spec,
    choose_placements,
    constrain,
    describe_placements,
    fsdp_axis,
    spec_of,
)
from flaxformer_mt.parameter_trees import flatten_tree
from flaxformer_mt.processor import core_count


def make_config(parallel: ParallelConfig | None = None, **model: int) -> Config:
    return Config(model=ModelConfig(**model), parallel=parallel or ParallelConfig())


def test_axes_are_filled_and_auto_chooses():
    """Also whether matrices are gathered twice: where devices share a memory."""
    for parallel, devices, platform, expected in (
        (ParallelConfig(), 8, "", ("pmap", 8, 1, 1, False)),
        (ParallelConfig(), 1, "", ("mesh", 1, 1, 1, False)),
        (ParallelConfig(backend="pmap"), 1, "", ("pmap", 1, 1, 1, False)),
        (ParallelConfig(backend="mesh"), 4, "", ("mesh", 4, 1, 1, False)),
        (ParallelConfig(data=2, fsdp=2, tensor=2), 8, "gpu", ("mesh", 2, 2, 2, False)),
        (ParallelConfig(data=2), 8, "", ("pmap", 2, 1, 1, False)),
        (ParallelConfig(fsdp=2), 8, "cpu", ("mesh", 4, 2, 1, True)),
        (ParallelConfig(fsdp=2), 8, "tpu", ("mesh", 4, 2, 1, False)),
        (ParallelConfig(tensor=2), 8, "cpu", ("mesh", 4, 1, 2, False)),
    ):
        assert choose_layout(make_config(parallel), device_count=devices, platform=platform) == expected


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (ParallelConfig(fsdp=4, tensor=4), r"does not divide the 8 available .* is one of 1, 2, 4, 8$"),
        (ParallelConfig(data=4, fsdp=4), r"= 16, but there are 8 devices; set parallel\.data=2"),
        (ParallelConfig(data=9), r"data 9 .* = 9, but there are 8 devices; set parallel\.data=8 "),
        (ParallelConfig(backend="pmap", fsdp=2), r"pmap replicates parameters .* parallel\.fsdp is 2"),
    ],
)
def test_axes_that_do_not_multiply_to_the_devices_are_refused(parallel, message):
    with pytest.raises(UserError, match=message):
        choose_layout(make_config(parallel), device_count=8, platform="cpu")


def test_sizes_that_axes_do_not_divide_are_refused_together():
    config = make_config(ParallelConfig(data=1, fsdp=2, tensor=4), num_heads=6, ffn_dim=30, model_dim=33)
    with pytest.raises(UserError) as error:
        choose_layout(config, device_count=8)
    heads, ffn, width = str(error.value).split("\n")
    assert heads.startswith("model.num_heads 6 is not divisible by parallel.tensor 4; set model.num_heads to")
    assert heads.endswith("a multiple of 4, or parallel.tensor to one of 1, 2, 3, 6")
    assert "model.ffn_dim 30" in ffn and "model.model_dim 33 is not divisible by parallel.fsdp 2" in width


def test_several_processes_use_all_devices():
    with pytest.raises(UserError, match="= 2, but there are 8 devices, which 2 processes share; set"):
        choose_layout(make_config(ParallelConfig(data=2)), device_count=8, process_count=2)


SIZES = {"data": 2, "fsdp": 2, "tensor": 4}

MODELS = {
    "plain": ModelConfig(),
    "tied embeddings": ModelConfig(tying="embeddings", output_bias=True),
    "untied": ModelConfig(tying="none", attention_bias=False, ffn_bias=False),
    "gated": ModelConfig(activation="swiglu", norm="rms", embedding_norm=True),
    "convolutions": ModelConfig(ffn_layer="convolution", positions="learned", embedding_bias=True),
    "one causal stack": ModelConfig(architecture="decoder_only", num_encoder_layers=0, positions="learned"),
    "scanned": ModelConfig(scan_layers=True),
    "recurrent": ModelConfig(decoder_self_attention="ssru"),
    "relative": ModelConfig(positions="relative", attention_scale=False),
}


@functools.cache
def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    config = MODELS[name]
    small = dataclasses.replace(config, num_decoder_layers=2, model_dim=16, num_heads=4, ffn_dim=24)
    if config.num_encoder_layers:
        small = dataclasses.replace(small, num_encoder_layers=2)
    model = make_model(small, source_size=20, target_size=20)
    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    return {path: leaf.shape for path, leaf in flatten_tree(params).items()}


def test_every_parameter_matches_one_rule_and_every_matrix_is_split():
    used = set()
    for name in MODELS:
        placements = choose_placements(shapes_of(name), SIZES)
        used |= {placement.pattern for placement in placements.values()}
        for path, placement in placements.items():
            # The table of relative positions is small, and split by heads alone.
            matrix = path.endswith(("kernel", "embedding")) and "relative_positions" not in path
            assert ("fsdp" in placement.spec) == matrix, (name, path)
            if matrix and "positions" not in path:
                assert "tensor" in placement.spec, (name, path)
    factors = {pattern for pattern, _ in RULES if pattern.endswith(("/down", "/up", "/scale"))}
    assert used | factors == {pattern for pattern, _ in RULES}, "test_lora.py has models with factors"


def test_the_table_names_rule_count_shape_and_axes_and_a_name_without_a_rule_is_noticed():
    lines = describe_placements(choose_placements(shapes_of("plain"), SIZES), SIZES)
    kernel = next(line for line in lines if "feedforward/(input|gate)/kernel" in line)
    assert kernel.split("  ", 2)[2].strip().startswith("4 x [16, 24]: fsdp 2, tensor 4 (as ")
    assert any("whole on every device" in line for line in lines if "norm" in line)
    with pytest.raises(ValueError, match="decoder/gadget/kernel matches 0 sharding rules"):
        choose_placements({"decoder/gadget/kernel": (4, 4)}, SIZES)


def test_states_lie_where_their_parameters_do():
    path, shape = "encoder/layers_0/self_attention/query/kernel", (16, 4, 8)
    spec = PartitionSpec("fsdp", "tensor")
    for prefix in ("", "params/", "opt_state/1/0/mu/", "ema_params/", "gradients/"):
        assert spec_of(prefix + path, shape, SIZES) == spec
    assert spec_of("params/encoder/layers/self_attention/query/kernel", (6, *shape), SIZES) == PartitionSpec(
        None, "fsdp", "tensor"
    )


def test_what_is_not_divisible_or_not_a_parameter_stays_whole():
    assert spec_of("shared_embedding/embedding", (19, 16), SIZES) == PartitionSpec(None, "fsdp")
    path = "opt_state/0/v_row/decoder/layers_0/feedforward/input/kernel"
    assert spec_of(path, (16,), SIZES) == PartitionSpec()
    assert spec_of("step", (), SIZES) == PartitionSpec()


def test_parameters_are_gathered_along_the_axis_that_fsdp_splits():
    """That of the model width, from the end of the shape; vectors are whole."""
    for path, shape in shapes_of("plain").items():
        axis = fsdp_axis(path, len(shape))
        spec = spec_of(path, shape, {"fsdp": 2, "tensor": 1})
        assert spec == (PartitionSpec() if axis is None else PartitionSpec(*(None,) * axis, "fsdp")), path
    assert fsdp_axis("encoder/layers/self_attention/query/kernel", 4) == 1
    assert fsdp_axis("norm/scale", 1) is None


def test_activations_are_split_by_the_letters_of_their_axes():
    """Heads, widths and vocabulary over tensor; nothing that is not divisible, and nothing without a mesh."""
    assert constrain(x := jnp.ones((6, 5, 16)), "BTD") is x
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def specs(*cases: tuple[str, tuple[int, ...]]) -> list[PartitionSpec]:
        found: list[PartitionSpec] = []

        def trace() -> None:
            found.extend(_make_spec(shape, letters) for letters, shape in cases)

        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            trace()
        return found

    assert specs(("BTHK", (6, 5, 8, 3)), ("BTV", (5, 4, 19)), ("BTF", (8, 4, 4)), ("BTD", (8, 4, 4))) == [
        PartitionSpec(None, None, "tensor", None),
        PartitionSpec(None, None, None),
        PartitionSpec(None, None, "tensor"),
        PartitionSpec(None, None, None),
    ]
    with pytest.raises(ValueError, match="BT names 2"):
        specs(("BT", (6, 5, 16)))


# ---- independent rows ----
SPLIT = """
import jax
from flaxformer_mt.parallel import make_parallel, use_cpu_cores_as_devices
from flaxformer_mt.config import Config
use_cpu_cores_as_devices()
print(jax.local_device_count(), make_parallel(Config()).device_count)
"""


@pytest.mark.skipif(core_count() == 1, reason="one core")
@pytest.mark.parametrize(
    ("flags", "variables", "expected"),
    [
        ("", {}, (min(core_count(), 4), 1)),
        ("", {"JAX_NUM_CPU_DEVICES": "5"}, (5, 5)),
        ("--xla_force_host_platform_device_count=3", {}, (3, 3)),
    ],
    ids=["none", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS"],
)
def test_the_users_number_of_devices_stays(flags, variables, expected):
    """All of them train, with or without a model that was loaded before; our own ones do not."""
    environment = quick_environment(**variables) | {"XLA_FLAGS": flags}
    command = [sys.executable, "-c", SPLIT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert tuple(map(int, done.stdout.split())) == expected


def test_training_takes_one_core_of_each_process(monkeypatch):
    cores = [SimpleNamespace(platform="cpu", process_index=n // 2, id=n) for n in range(6)]
    monkeypatch.setattr(jax, "devices", lambda: cores)
    assert rows_per_device.training_devices() == cores
    monkeypatch.setattr(rows_per_device, "_split_cores", True)
    assert [core.id for core in rows_per_device.training_devices()] == [0, 2, 4]
    chips = [SimpleNamespace(platform="gpu", process_index=0, id=n) for n in range(2)]
    monkeypatch.setattr(jax, "devices", lambda: chips)
    assert rows_per_device.training_devices() == chips
