"""Numbers in bfloat16 outside of products: looked up, and cast once."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from tiny_experiment import random_params

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.kernels.bfloat16 import cast_kernels, take_rows
from flaxformer_mt.model import make_model

TINY = ModelConfig(model_dim=16, ffn_dim=24, num_heads=2, num_encoder_layers=1, num_decoder_layers=1)


def test_rows_of_a_bfloat16_table_are_those_of_numpy_and_have_a_gradient():
    table, ids = jnp.arange(12, dtype=jnp.bfloat16).reshape(4, 3), jnp.array([[2, 0], [2, 3]])
    np.testing.assert_array_equal(take_rows(table, ids), np.asarray(table)[ids])
    gradient = jax.grad(lambda table: take_rows(table, ids).sum().astype(jnp.float32))(table)
    np.testing.assert_array_equal(gradient.astype(jnp.float32), np.outer([1, 0, 2, 1], np.ones(3)))


def test_cast_kernels_casts_what_is_multiplied():
    params = random_params(
        make_model(
            replace(TINY, tying="none", attention_bias=True, output_bias=True), source_size=24, target_size=24
        )
    )
    kept = {"scale", "bias", "output_bias"}
    for path, leaf in jax.tree_util.tree_leaves_with_path(cast_kernels(params, "bfloat16")):
        assert (leaf.dtype == jnp.float32) == (path[-1].key in kept), path
    same = cast_kernels(params, "float32")
    assert all(one is other for one, other in zip(*map(jax.tree.leaves, (params, same)), strict=True))
