"""Attention against ten lines of numpy, all axes of different prime sizes, and the layer around it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.random import default_rng
from tiny_experiment import random_layer_params

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.kernels import Kernels, MaskRule, choose_kernels
from flaxformer_mt.kernels.attention_kernels import (
    attend,
    attention_weights,
    explain_attention,
    fits,
    resolve_attention,
)
from flaxformer_mt.kernels.matmul import Product
from flaxformer_mt.model.attention import MultiHeadAttention

pytestmark = pytest.mark.usefixtures("strict_dtypes")

# Batch, queries, memory, heads, key size, value size: no two alike, so that a swapped axis shows.
B, Q, M, H, K, E = 2, 5, 7, 3, 11, 13

CONFIG = ModelConfig(model_dim=17, num_heads=H, key_dim=K, value_dim=E, dropout_rate=0.0)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["mask", "query_segments", "memory_segments", "bias"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Given:
    """A rule that gives any mask, [B, H, Q, M]."""

    mask: Any
    query_segments: None = None
    memory_segments: None = None
    bias: None = None

    def dense(self, length: int) -> Any:
        del length
        return self.mask

    def memory_lengths(self) -> None:
        return None


EVERYTHING = MaskRule()


def numpy_attention(query, keys, values, mask):
    """Equation 1, one query at a time, in float64: weights [B, H, Q, M] and mixed values [B, Q, H, E]."""
    weights = np.zeros((B, H, Q, M))
    mixed = np.zeros((B, Q, H, E))
    for b, q, h in np.ndindex(B, Q, H):
        seen = np.flatnonzero(mask[b, h, q])
        scores = keys[b, seen, h].astype(np.float64) @ query[b, q, h] / K**0.5
        exponentials = np.exp(scores - scores.max())
        weights[b, h, q, seen] = exponentials / exponentials.sum()
        mixed[b, q, h] = weights[b, h, q] @ values[b, :, h]
    return weights, mixed


compute_weights = jax.jit(functools.partial(attention_weights, Product()))
compute_attention = jax.jit(functools.partial(attend, Product()))


def random_inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    generator = default_rng(0)
    query = generator.normal(size=(B, Q, H, K)).astype(np.float32)
    keys = generator.normal(size=(B, M, H, K)).astype(np.float32)
    values = generator.normal(size=(B, M, H, E)).astype(np.float32)
    mask = generator.random((B, H, Q, M)) < 0.6
    mask[..., 0] = True
    return query, keys, values, mask


def test_attention_is_equation_1():
    query, keys, values, mask = random_inputs()
    expected_weights, expected = numpy_attention(query, keys, values, mask)
    weights = compute_weights(query, keys, mask)
    np.testing.assert_allclose(weights, expected_weights, atol=1e-6)
    np.testing.assert_allclose(compute_attention(query, keys, values, Given(mask)), expected, atol=1e-5)
    assert np.all(np.asarray(weights)[~mask] == 0)  # not small: nothing


def test_a_query_that_sees_nothing_gets_equal_weights_and_finite_gradients():
    query, keys, _, mask = random_inputs()
    mask[1, :, 2] = False

    @jax.jit
    def differentiate(query: jax.Array, keys: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        def total(query: jax.Array) -> tuple[jax.Array, jax.Array]:
            weights = attention_weights(Product(), query, keys, mask)
            return (weights**2).sum(), weights

        return jax.grad(total, has_aux=True)(query)

    gradient, weights = jax.device_get(differentiate(query, keys, mask))
    np.testing.assert_allclose(weights[1, :, 2], np.full((H, M), 1 / M), rtol=1e-6)
    assert np.isfinite(gradient).all()


def make_layer(config: ModelConfig = CONFIG) -> tuple[MultiHeadAttention, dict, np.ndarray, np.ndarray]:
    layer = MultiHeadAttention(config, choose_kernels(config, "gpu"))
    x, memory = (default_rng(1).normal(size=(B, n, config.model_dim)).astype(np.float32) for n in (Q, M))
    params = random_layer_params(layer, x, memory, mask=EVERYTHING, deterministic=True)
    return layer, params, x, memory


@functools.cache
def applied(layer: MultiHeadAttention, **options: Any) -> Any:
    """layer.apply with these options, compiled; arrays and dropout keys are arguments."""
    return jax.jit(
        lambda params, *args, rngs=None, **arrays: layer.apply(
            {"params": params}, *args, rngs=rngs, **arrays, **options
        )
    )


def test_attention_dropout_has_a_rate_of_its_own():
    """With only weights dropped, the result differs between keys; with the rate set to 0 it does not."""
    config = dataclasses.replace(CONFIG, dropout_rate=0.5)
    layer, params, x, memory = make_layer(config)

    def run(layer: MultiHeadAttention, seed: int) -> np.ndarray:
        rngs = {"dropout": jax.random.key(seed)}
        return np.asarray(applied(layer, deterministic=False)(params, x, memory, mask=EVERYTHING, rngs=rngs))

    assert np.abs(run(layer, 0) - run(layer, 1)).max() > 1e-3
    undropped = MultiHeadAttention(dataclasses.replace(config, attention_dropout_rate=0.0), Kernels())
    np.testing.assert_array_equal(run(undropped, 0), run(undropped, 1))


@pytest.mark.parametrize(
    ("preferred", "shape", "dtype", "platform", "kind"),
    [
        ("auto", (2, 6, 2, 64), "bfloat16", "gpu", "cudnn"),
        ("auto", (2, 16, 2, 64), "bfloat16", "tpu", "pallas"),
        ("auto", (2, 24, 2, 64), "bfloat16", "tpu", "plain"),
        ("auto", (2, 512, 2, 64), "bfloat16", "tpu", "plain"),
        ("auto", (2, 16, 3, 64), "bfloat16", "tpu", "plain"),
        ("auto", (2, 16, 2, 96), "bfloat16", "tpu", "plain"),
        ("auto", (2, 6, 2, 64), "float32", "gpu", "plain"),
        ("auto", (2, 5, 2, 64), "bfloat16", "gpu", "triton"),
        ("auto", (2, 513, 2, 64), "bfloat16", "gpu", "plain"),
        ("pallas", (2, 6, 2, 64), "bfloat16", "cuda", "triton"),
        ("auto", (2, 6, 2, 20), "bfloat16", "gpu", "plain"),
        ("auto", (2, 6, 2, 136), "bfloat16", "gpu", "plain"),
        ("cudnn", (2, 6, 2, 64), "bfloat16", "gpu", "cudnn"),
    ],
)
def test_attention_is_chosen_by_what_the_kernel_can_do(preferred, shape, dtype, platform, kind):
    array = np.zeros(shape, jnp.dtype(dtype))
    kinds = resolve_attention(preferred, platform)
    assert next((one for one in kinds if fits(one, array, array)), "plain") == kind


def test_the_choice_of_a_kernel_is_explained():
    """By the platform that is compiled for; the machine at hand is a CPU."""
    fast = ModelConfig(model_dim=64, num_heads=2, dtype="bfloat16", attention_dropout_rate=0.0)

    def explain(platform: str, lengths: tuple[int, int] = (8, 6), **changes: object) -> tuple[str, str]:
        return explain_attention(dataclasses.replace(fast, **changes), platform, lengths=lengths)

    assert explain("cuda") == ("cudnn", "model.attention=auto on cuda")
    assert explain("cuda", (0, 6)) == ("cudnn", "model.attention=auto on cuda")  # a language model
    assert explain("cuda", attention_dropout_rate=0.1) == ("triton", "model.attention=auto on cuda")
    assert explain("cuda", (8, 7)) == ("triton", "model.attention=auto on cuda")  # of any length
    assert explain("cpu") == ("plain", "model.attention=auto has no fused kernel on cpu")
    wide = {"model_dim": 256, "num_heads": 4}
    assert explain("tpu", (32, 16), **wide) == ("pallas", "model.attention=auto on tpu")
    kind, why = explain("tpu", (32, 24), **wide)
    assert kind == "plain" and "multiples of 16" in why and "lengths 32 and 24" in why
    assert explain("cuda", attention="plain") == ("plain", "model.attention=plain")
    for changes, reason in [
        ({"dtype": "float32"}, "not float32"),
        ({"num_heads": 16}, "head sizes 4 and 4"),
        ({"value_dim": 8}, "head sizes 32 and 8"),
        ({"lengths": (8, 7), "attention": "cudnn"}, "even lengths"),
        (
            {"attention_dropout_rate": 0.1, "attention": "cudnn"},
            "its rate is 0.1; model.attention_dropout_rate=0 allows it",
        ),
        ({"attention_dropout_rate": None, "dropout_rate": 0.3, "attention": "cudnn"}, "its rate is 0.3"),
    ]:
        kind, why = explain("cuda", **changes)
        assert kind == "plain" and reason in why, (changes, why)
