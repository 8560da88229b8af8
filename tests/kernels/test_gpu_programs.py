"""What programs for GPUs write to memory, seen from a machine without one."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.kernels import MaskRule, choose_kernels
from flaxformer_mt.kernels.cross_entropy import Output
from flaxformer_mt.kernels.dropout import make_dropout_key
from flaxformer_mt.model.blocks import EncoderBlock
from flaxformer_mt.parallel.compilation import default_compiler_options

ROWS, LENGTH, D, F, V = 320, 100, 1024, 4096, 1000
BFLOAT16 = ModelConfig(
    model_dim=D,
    num_heads=16,
    ffn_dim=F,
    dtype="bfloat16",
    norm_position="post",
    attention_dropout_rate=0.0,
    ffn_dropout_rate=0.0,
)


def arrays(*shapes: tuple[tuple[int, ...], Any], sharding: Any = None) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]


def test_logits_are_written_in_bfloat16():
    """What makes the logits is rounded at once, and the gradients of hidden states and table are not."""
    kernels = choose_kernels(BFLOAT16, "gpu")

    def loss(hidden: Any, table: Any, target: Any, weights: Any) -> Any:
        options = {"smoothing": 0.1, "chunk_tokens": target.size, "count": True}
        return kernels.cross_entropy(hidden, Output(table, None), target, weights, **options).loss_sum

    rows = (ROWS, LENGTH)
    inputs = arrays(((*rows, D), jnp.bfloat16), ((V, D), jnp.float32), (rows, jnp.int32), (rows, jnp.float32))
    text = jax.jit(jax.grad(loss, (0, 1))).trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
    results = re.findall(r"stablehlo\.dot_general .*-> tensor<([^>]*)>", text)
    sizes = f"{ROWS}x{LENGTH}x"
    # Narrow sums are rounded once: the compiler sums in float32 whatever the result is.
    assert sorted(results) == sorted([f"{sizes}{V}xf32", f"{sizes}{D}xf32", f"{D}x{V}xf32"])
    assert f"(tensor<{sizes}{V}xf32>) -> tensor<{sizes}{V}xbf16>" in text


@pytest.mark.slow
def test_no_activation_is_written_in_float32():
    """A block of Transformer-big forward and backward, compiled for an H100: rows of D or F numbers."""
    pytest.importorskip("jax_cuda12_plugin")
    from flaxformer_mt.commands.target_devices import find_devices, parse_target

    block = EncoderBlock(BFLOAT16, choose_kernels(BFLOAT16, "gpu"))

    def run(params: Any, x: Any, segments: Any, gradient: Any) -> Any:
        rngs = {"dropout": make_dropout_key(3, 1)}

        def apply(params: Any, x: Any) -> Any:
            return block.apply(params, x, MaskRule(segments, segments), None, False, rngs=rngs)

        result, pull = jax.vjp(apply, params, x)
        return result, pull(gradient)

    devices = np.array(find_devices(parse_target("h100:1")))
    sharding = NamedSharding(Mesh(devices, ("x",)), PartitionSpec())
    shape = (ROWS, LENGTH, D)
    x, segments = arrays((shape, jnp.bfloat16), (shape[:2], jnp.int32), sharding=sharding)
    params = jax.eval_shape(
        lambda: nn.unbox(
            block.init(
                jax.random.key(0),
                jnp.zeros(shape, jnp.bfloat16),
                MaskRule(*[jnp.ones(shape[:2], jnp.int32)] * 2),
                None,
                True,
            )
        )
    )
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=sharding), params)
    options = default_compiler_options("gpu")
    text = jax.jit(run).lower(params, x, segments, x).compile(compiler_options=options).as_text()
    entry = text[text.index("\nENTRY") :]
    written = re.findall(r"^\s+(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) (?!parameter)\w", entry, re.M)
    wide = [
        result
        for result in written
        if re.search(rf"f32\[(?:{ROWS},{LENGTH}|{ROWS * LENGTH}),(?:{D}|{F})\]", result)
    ]
    assert written and not wide
