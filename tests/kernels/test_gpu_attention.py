"""The GPU kernel of attention: what is handed to compilers for GPUs. test_variants.py has its numbers.

Nothing runs here; the compilers of NVIDIA, where they are installed, need no GPU either.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from tiny_experiment import small_model

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.kernels.dropout import make_dropout_key
from flaxformer_mt.model import init_params, make_model
from flaxformer_mt.shapes import Batch

ROOT = Path(__file__).resolve().parents[2]
B, Q, M, H = 2, 24, 40, 2
SCORES = f"{B}x{H}x{Q}x{M}xf32"


def lower_for_gpu(config: ModelConfig, batch: Batch) -> str:
    """The forward and backward pass with dropout, as it is handed to a compiler for GPUs."""
    model = make_model(config, source_size=40, target_size=40, platform="cuda")
    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))

    def loss(params):
        rngs = {"dropout": make_dropout_key(1, 2)}
        return model.apply({"params": params}, batch, deterministic=False, rngs=rngs).sum()

    device = contextlib.nullcontext()
    if jax.__version_info__ >= (0, 12):  # asks the mesh for which GPU it lowers
        kind = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
        device = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=kind))
    with device:
        return jax.jit(jax.grad(loss)).trace(params).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.skipif(
    jax.__version_info__[:2] == (0, 11), reason="JAX 0.11 compiles kernels while it lowers them"
)
@pytest.mark.parametrize("positions", ["sinusoidal", "relative"])
def test_a_model_for_gpus_with_attention_dropout_keeps_no_scores(positions):
    """Every attention is a kernel, forward and backward; without it there are scores [B, H, Q, M]."""
    fields = {"dtype": "bfloat16", "dropout_rate": 0.1, "attention": "pallas", "max_positions": 64}
    config = small_model(1, 32, H, 48, positions=positions, **fields)
    source, target = jnp.ones((B, M), jnp.int32), jnp.ones((B, Q), jnp.int32)
    batch = Batch(source, target, target, source > 0, target > 0)
    text = lower_for_gpu(config, batch)
    assert text.count("@__gpu$xla.gpu.triton") == 6 and SCORES not in text
    plain = lower_for_gpu(ModelConfig(**{**vars(config), "attention": "plain"}), batch)
    assert "triton" not in plain and SCORES in plain


COMPILE = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from flaxformer_mt.commands.target_devices import find_devices, parse_target
from flaxformer_mt.kernels.triton_attention import Inputs, Rule, attend_rows

for target in ("h100:1", "a100:1"):
    mesh = Mesh(np.asarray(find_devices(parse_target(target))), ("data",))
    place = NamedSharding(mesh, PartitionSpec())
    kind = mesh.abstract_mesh.abstract_device
    for B, Q, M, H, K, rate, biased in ((32, 100, 100, 16, 64, 0.1, False), (32, 48, 200, 4, 64, 0.1, True)):
        def shape(*axes, dtype=jnp.int32):
            return jax.ShapeDtypeStruct(axes, dtype, sharding=place)

        heads = tuple(shape(B, length, H, K, dtype=jnp.bfloat16) for length in (Q, M, M))
        inputs = Inputs(
            shape(B, Q),
            shape(B, M),
            shape(2, dtype=jnp.uint32),
            shape(B, H, dtype=jnp.uint32),
            shape(H, Q, M, dtype=jnp.float32) if biased else None,
        )

        def total(heads, inputs):
            return attend_rows(Rule(not biased, 0.125, rate), heads, inputs).astype(jnp.float32).sum()

        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
            lowered = jax.jit(jax.grad(total)).lower(heads, inputs)
        text = lowered.compile().as_text()
        print(target, text.count("xla.gpu.triton"), f"[{B},{H},{Q},{M}]" in text)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)),
    reason="needs the compilers of the extra gpu",
)
def test_the_kernel_compiles_for_an_a100_and_an_h100():
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        cwd=ROOT,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.strip().split("\n")]
    assert found == [[target, "2", "False"] for target in ("h100:1", "a100:1") for _ in range(2)]
