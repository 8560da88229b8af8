"""Dropout, norms, initializers, residuals and the feed-forward network, against their definitions."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from tiny_experiment import random_layer_params

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.kernels import Kernels
from flaxformer_mt.kernels.dropout import make_dropout_key
from flaxformer_mt.model.feedforward import FeedForward
from flaxformer_mt.model.initializers import make_initializers
from flaxformer_mt.model.layers import Dropout, Residual, make_norm

pytestmark = pytest.mark.usefixtures("strict_dtypes")

CONFIG = ModelConfig(model_dim=6, num_heads=2, ffn_dim=10, dropout_rate=0.0)


@functools.cache
def applied(layer: Any, **options: Any) -> Any:
    """layer.apply with these options, compiled; arrays and the seed of dropout are arguments."""

    def apply(params: Any, *arrays: jax.Array, seed: int | None = None) -> jax.Array:
        rngs = {} if seed is None else {"dropout": make_dropout_key(seed, 0)}
        return layer.apply({"params": params}, *arrays, rngs=rngs, **options)

    return jax.jit(apply)


def drop(rate: float, x: np.ndarray, seed: int = 0) -> np.ndarray:
    return np.asarray(applied(Dropout(rate), deterministic=False)({}, x, seed=seed))


def test_dropout_draws_each_entry_for_itself():
    """Neighbors, rows, and entries at distances that are powers of two are not dropped together."""
    kept = drop(0.5, np.ones((512, 256), np.float32)).reshape(-1) > 0
    for distance in (1, 2, 3, 4, 16, 255, 256, 257, 1024, 65536):
        agreement = (kept[:-distance] == kept[distance:]).mean()
        assert abs(agreement - 0.5) < 0.01, distance


def test_dropout_of_different_keys_is_unrelated_at_any_shift():
    """Every entry's number is a hash of its place: another key must not give the same sequence moved."""
    kept = [drop(0.5, np.ones(2**15, np.float32), seed) > 0 for seed in range(8)]
    deviation = 0.5 / math.sqrt(2**14)
    for left, right in itertools.combinations(kept, 2):
        spectrum = np.fft.rfft(left - 0.5) * np.conj(np.fft.rfft(right - 0.5))
        correlations = np.fft.irfft(spectrum) / 2**15 * 2  # in units of half the share that agrees
        assert np.abs(correlations).max() < 8 * deviation
        by_exclusive_or = [
            (left[np.arange(2**15) ^ mask] == right).mean() for mask in (1, 2, 64, 4096, 16384)
        ]
        assert np.abs(np.array(by_exclusive_or) - 0.5).max() < 8 * deviation


def test_dropout_is_a_function_of_its_key_and_the_identity_when_deterministic():
    x = np.random.default_rng(3).normal(size=(5, 7)).astype(np.float32)
    assert_array_equal(drop(0.4, x), drop(0.4, x))
    assert Dropout(0.4).apply({}, x, deterministic=True) is x
    assert Dropout(0.0).apply({}, x, deterministic=False) is x  # and no key is needed
    half = jax.eval_shape(applied(Dropout(0.4), deterministic=False), {}, x.astype(jnp.bfloat16), seed=0)
    assert half.dtype == jnp.bfloat16


def test_dropout_of_almost_everything_is_finite():
    """Rates that round to 1 are below it, so the config allows them."""
    assert np.isfinite(drop(1 - 1e-12, np.ones((64, 64), np.float32))).all()


def test_dropout_passes_gradients_where_it_passes_values():
    def total(x: jax.Array) -> jax.Array:
        return Dropout(0.25).apply({}, x, deterministic=False, rngs={"dropout": make_dropout_key(0, 0)}).sum()

    x = np.ones((30, 30), np.float32)
    assert_allclose(jax.jit(jax.grad(total))(x), drop(0.25, x), rtol=1e-6)


@pytest.mark.parametrize("affine", [True, False])
def test_a_layer_norm_and_its_gradient_are_those_of_the_formula(affine):
    x = np.random.default_rng(0).normal(3, 2, size=(2, 3, 6)).astype(np.float32)
    norm = make_norm(dataclasses.replace(CONFIG, norm_affine=affine, norm_epsilon=0.1))
    params = {"scale": np.arange(1, 7, dtype=np.float32), "bias": np.full(6, 0.5, np.float32)}
    params = params if affine else {}

    def by_formula(params: dict, x: jax.Array) -> jax.Array:
        centered = x - x.mean(-1, keepdims=True)
        normal = centered / jnp.sqrt((centered**2).mean(-1, keepdims=True) + 0.1)
        return jnp.sin(normal * params.get("scale", 1) + params.get("bias", 0)).sum()

    def by_layer(params: dict, x: jax.Array) -> jax.Array:
        return jnp.sin(norm.apply({"params": params}, x)).sum()

    @jax.jit
    def run(params: dict, x: jax.Array) -> tuple[Any, Any]:
        values = jax.value_and_grad(by_layer, (0, 1)), jax.value_and_grad(by_formula, (0, 1))
        return values[0](params, x), values[1](params, x)

    found, expected = run(params, x)
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=1e-5), found, expected)
    half = x.astype(jnp.bfloat16)
    # the config's type, whatever comes in
    assert jax.eval_shape(norm.apply, {"params": params}, half).dtype == jnp.float32
    assert jax.eval_shape(jax.grad(by_layer, 1), params, half).dtype == jnp.bfloat16


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_keep_float32_parameters_and_statistics_in_bfloat16_runs(kind):
    norm = make_norm(dataclasses.replace(CONFIG, norm=kind, dtype="bfloat16"))
    x = np.array([[1000, 1001, 999, 1000, 1000, 1000]], np.float32)
    with jax.numpy_dtype_promotion("standard"):  # Flax promotes in RMSNorm
        params = jax.jit(norm.init)(jax.random.key(0), x)["params"]
        result = applied(norm)(params, x)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert result.dtype == jnp.bfloat16
    # in bfloat16 these numbers would all be 1000 and their variance 0
    expected = applied(make_norm(dataclasses.replace(CONFIG, norm=kind)))(params, x)
    assert_allclose(np.asarray(result, np.float32), expected, rtol=1e-2, atol=1e-2)


def draw(**cases: tuple[Any, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The arrays that initializers give for shapes, each from a key of its own, by one program."""

    @jax.jit
    def run(key: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(key, len(cases))
        return {name: init(keys[number], shape) for number, (name, (init, shape)) in enumerate(cases.items())}

    return jax.device_get(run(jax.random.key(1)))


def test_initialisers_by_their_formulas():
    formulas = {
        "xavier_uniform": (math.sqrt(2 / 500), math.sqrt(6 / 500)),
        "xavier_normal": (math.sqrt(2 / 500), math.inf),
        "lecun_normal": (math.sqrt(1 / 200), math.inf),
        "normal": (0.02, math.inf),
    }
    schemes = {name: make_initializers(dataclasses.replace(CONFIG, initializer=name)) for name in formulas}
    kernels = draw(**{name: (scheme.feedforward, (200, 300)) for name, scheme in schemes.items()})
    biases = draw(**{name: (scheme.bias(200), (300,)) for name, scheme in schemes.items()})
    for name, (deviation, bound) in formulas.items():
        kernel = kernels[name]
        assert kernel.dtype == np.float32, name
        assert abs(float(kernel.std()) / deviation - 1) < 0.02, name
        assert abs(float(kernel.mean())) < 5 * deviation / math.sqrt(kernel.size), name
        assert float(np.abs(kernel).max()) <= bound, name
        assert not biases[name].any(), name


def assert_uniform(values: np.ndarray, bound: float) -> None:
    assert 0.97 * bound < float(np.abs(values).max()) <= bound
    assert abs(float(values.std()) / (bound / math.sqrt(3)) - 1) < 0.05


def test_torch_starts_as_its_layers_do():
    scheme = make_initializers(dataclasses.replace(CONFIG, initializer="torch"))
    one_hot = make_initializers(dataclasses.replace(CONFIG, initializer="torch", embedding_bias=True))
    drawn = draw(
        attention_output=(scheme.attention_output, (50, 300)),
        convolution=(scheme.feedforward, (1, 40, 100)),  # of width one
        bias=(scheme.bias(50), (2000,)),
        embedding=(scheme.embedding, (500, 40)),
        one_hot=(one_hot.embedding, (500, 40)),
    )
    assert_uniform(drawn["attention_output"], 50**-0.5)
    assert_uniform(drawn["convolution"], 40**-0.5)
    assert_uniform(drawn["bias"], 50**-0.5)
    assert abs(float(drawn["embedding"].std()) - 1) < 0.02
    assert_uniform(drawn["one_hot"], 500**-0.5)


def test_kokoyi_starts_with_the_documents_gains():
    """Width 16 and 2 heads of 64: PyTorch takes 16 x 64 and 2 x 64 for the fans of a [2, 16, 64] matrix."""
    config = dataclasses.replace(CONFIG, initializer="kokoyi", model_dim=16, num_heads=2, key_dim=64)
    scheme = make_initializers(config)
    drawn = draw(
        attention_input=(scheme.attention_input, (16, 128)),
        attention_output=(scheme.attention_output, (128, 16)),
        output=(scheme.output, (16, 300)),
        embedding=(scheme.embedding, (300, 16)),
        feedforward=(scheme.feedforward, (16, 64)),
    )
    gain = math.sqrt(16 + 64) / math.sqrt(16 + 2 * 64)
    assert_uniform(drawn["attention_input"], gain * math.sqrt(6 / (16 * 64 + 2 * 64)))
    assert_uniform(drawn["attention_output"], gain * math.sqrt(6 / (16 + 128)))
    assert_uniform(drawn["output"], math.sqrt(2) * math.sqrt(6 / 316))
    assert_uniform(drawn["embedding"], math.sqrt(2) * math.sqrt(6 / 316))
    assert_uniform(drawn["feedforward"], 0.25)


def test_aiayn_takes_xavier_for_embeddings_too():
    scheme = make_initializers(dataclasses.replace(CONFIG, initializer="aiayn"))
    drawn = draw(embedding=(scheme.embedding, (300, 40)), bias=(scheme.bias(16), (2000,)))
    assert_uniform(drawn["embedding"], math.sqrt(6 / 340))
    assert_uniform(drawn["bias"], 0.25)


def test_residual_drops_what_the_sublayer_adds_and_never_the_stream():
    layer = Residual(dataclasses.replace(CONFIG, dropout_rate=0.5))
    x = np.full((50, 6), 10, np.float32)

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        rngs = {"dropout": make_dropout_key(1, 0)}
        options = {"deterministic": False, "rngs": rngs, "method": "after"}
        return layer.apply({"params": {}}, x, jnp.ones_like(x), **options)

    result = run(x)
    assert set(np.unique(result)) == {10.0, 12.0}


def test_feedforward_dropout_has_a_rate_of_its_own():
    x = np.ones((4, 6), np.float32)
    for rate, alike in [(None, False), (0.0, True)]:
        layer = FeedForward(dataclasses.replace(CONFIG, dropout_rate=0.5, ffn_dropout_rate=rate), Kernels())
        params = random_layer_params(layer, x, deterministic=True)
        first, second = (applied(layer, deterministic=False)(params, x, seed=seed) for seed in (1, 2))
        assert np.array_equal(first, second) is alike
