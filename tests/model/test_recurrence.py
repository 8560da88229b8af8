"""The recurrence of a decoder (SSRU) against the paper's equations, written out token by token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_experiment import random_layer_params

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.kernels import Kernels
from flaxformer_mt.model.recurrence import SimplerRecurrence, find_starts

CONFIG = ModelConfig(model_dim=5, decoder_self_attention="ssru")
SEGMENTS = np.array([[1, 1, 1, 2, 2, 3, 0], [1, 2, 2, 2, 2, 2, 2]])


def ssru(params, x: np.ndarray) -> np.ndarray:
    """Kim et al. 2019, equations of section 3.1, for one sentence x [T, D], in float64."""
    leaves = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    state, outputs = np.zeros(x.shape[1]), []
    for token in x.astype(np.float64):
        forget = 1 / (1 + np.exp(-(token @ leaves["forget"]["kernel"] + leaves["forget"]["bias"])))
        state = forget * state + (1 - forget) * (token @ leaves["input"]["kernel"])
        outputs.append(np.maximum(state, 0))
    return np.array(outputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_positions_in_parallel_are_the_equations_token_by_token(dtype):
    layer = SimplerRecurrence(dataclasses.replace(CONFIG, dtype=dtype), Kernels())
    x = np.random.default_rng(1).normal(size=(2, 7, 5)).astype(np.float32)
    params = random_layer_params(layer, x, None, scale=1.0)
    found, packed = jax.jit(
        lambda params: (
            layer.apply({"params": params}, x, None),
            layer.apply({"params": params}, x, find_starts(jnp.asarray(SEGMENTS))),
        )
    )(params)
    assert found.dtype == jnp.dtype(dtype)
    tolerance = 1e-6 if dtype == "float32" else 0.05
    for row in range(2):
        np.testing.assert_allclose(np.float64(found[row]), ssru(params, x[row]), atol=tolerance)
        for segment in range(4):
            chosen = SEGMENTS[row] == segment
            if chosen.any():
                expected = ssru(params, x[row, chosen])
                np.testing.assert_allclose(np.float64(packed[row, chosen]), expected, atol=tolerance)
    assert np.abs(np.float64(found) - np.float64(packed)).max() > 0.1  # segments are at work
