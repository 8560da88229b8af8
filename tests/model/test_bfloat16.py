"""Numbers in bfloat16 outside of products: rounded as a cast rounds them, looked up, and cast once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from tiny_experiment import random_params

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.kernels.bfloat16 import cast_kernels, narrow, take_rows
from flaxformer_mt.model import make_model

TINY = ModelConfig(model_dim=16, ffn_dim=24, num_heads=2, num_encoder_layers=1, num_decoder_layers=1)


def test_narrowed_numbers_are_those_of_a_cast():
    """Around every tie: exact, just below half of the last bit, half, and just above it; of both signs."""
    upper = np.arange(2**16, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    numbers = (upper | lower).view(np.float32)
    numbers = numbers[~np.isnan(numbers)]
    found = np.asarray(jax.jit(lambda x: narrow(x, jnp.bfloat16))(numbers))
    assert found.dtype == jnp.bfloat16
    # as bits: zeros have signs
    np.testing.assert_array_equal(found.view(np.uint16), numbers.astype(jnp.bfloat16).view(np.uint16))
    quiet = np.array([0x7FC00000, 0xFFC00000], np.uint32).view(np.float32)
    assert np.isnan(narrow(quiet, jnp.bfloat16).astype(jnp.float32)).all()
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jnp.ones(3, dtype)
        assert narrow(x, jnp.float32).dtype == jnp.float32


def test_rows_of_a_bfloat16_table_are_those_of_numpy_and_have_a_gradient():
    table, ids = jnp.arange(12, dtype=jnp.bfloat16).reshape(4, 3), jnp.array([[2, 0], [2, 3]])
    np.testing.assert_array_equal(take_rows(table, ids), np.asarray(table)[ids])
    gradient = jax.grad(lambda table: take_rows(table, ids).sum().astype(jnp.float32))(table)
    np.testing.assert_array_equal(gradient.astype(jnp.float32), np.outer([1, 0, 2, 1], np.ones(3)))


def test_cast_kernels_casts_what_is_multiplied():
    params = random_params(
        make_model(
            dataclasses.replace(TINY, tying="none", attention_bias=True, output_bias=True),
            source_size=24,
            target_size=24,
        )
    )
    kept = {"scale", "bias", "output_bias"}
    for path, leaf in jax.tree_util.tree_leaves_with_path(cast_kernels(params, "bfloat16")):
        assert (leaf.dtype == jnp.float32) == (path[-1].key in kept), path
    same = cast_kernels(params, "float32")
    assert all(one is other for one, other in zip(*map(jax.tree.leaves, (params, same)), strict=True))
