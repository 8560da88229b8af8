"""Dropout, norms, initialisers, residuals and the feed-forward network, against their definitions."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.model.feedforward import FeedForward
from flaxformer_mt.model.initializers import make_initializers
from flaxformer_mt.model.layers import Dropout, Residual, make_norm

CONFIG = ModelConfig(model_dim=6, num_heads=2, ffn_dim=10, dropout_rate=0.0)


def drop(rate: float, x: jax.Array, seed: int = 0) -> np.ndarray:
    return np.asarray(Dropout(rate).apply({}, x, deterministic=False, rngs={"dropout": jax.random.key(seed)}))


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.99])
def test_dropout_drops_at_its_rate_and_keeps_the_mean(rate):
    x = jnp.ones((501, 199))
    dropped = drop(rate, x)
    deviation = math.sqrt(rate * (1 - rate) / x.size)
    assert abs((dropped == 0).mean() - rate) < 5 * deviation
    np.testing.assert_allclose(dropped[dropped != 0], 1 / (1 - rate), rtol=1e-6)
    assert abs(dropped.mean() - 1) < 5 * deviation / (1 - rate)


def test_dropout_draws_each_entry_for_itself():
    """Neighbours, rows, and entries at distances that are powers of two are not dropped together."""
    kept = drop(0.5, jnp.ones((512, 256))).reshape(-1) > 0
    for distance in (1, 2, 3, 4, 16, 255, 256, 257, 1024, 65536):
        agreement = (kept[:-distance] == kept[distance:]).mean()
        assert abs(agreement - 0.5) < 0.01, distance


def test_dropout_of_different_keys_is_unrelated_at_any_shift():
    """Every entry's number is a hash of its place: another key must not give the same sequence moved."""
    kept = [drop(0.5, jnp.ones(2**15), seed) > 0 for seed in range(8)]
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
    x = jax.random.normal(jax.random.key(3), (5, 7))
    np.testing.assert_array_equal(drop(0.4, x), drop(0.4, x))
    assert Dropout(0.4).apply({}, x, deterministic=True) is x
    assert Dropout(0.0).apply({}, x, deterministic=False) is x  # and no key is needed
    assert (
        Dropout(0.4)
        .apply({}, x.astype(jnp.bfloat16), deterministic=False, rngs={"dropout": jax.random.key(0)})
        .dtype
        == jnp.bfloat16
    )


def test_dropout_of_almost_everything_is_finite():
    """Rates that round to 1 are below it, so the config allows them."""
    assert np.isfinite(drop(1 - 1e-12, jnp.ones((64, 64)))).all()


def test_dropout_passes_gradients_where_it_passes_values():
    key = jax.random.key(0)

    def total(x: jax.Array) -> jax.Array:
        return Dropout(0.25).apply({}, x, deterministic=False, rngs={"dropout": key}).sum()

    np.testing.assert_allclose(jax.grad(total)(jnp.ones((30, 30))), drop(0.25, jnp.ones((30, 30))), rtol=1e-6)


def test_layer_norm_by_definition():
    x = np.random.default_rng(0).normal(3, 2, size=(4, 6)).astype(np.float32)
    params = {"scale": np.arange(1.0, 7.0, dtype=np.float32), "bias": np.full(6, 0.5, np.float32)}
    result = make_norm(CONFIG).apply({"params": params}, x)
    centred = x - x.mean(-1, keepdims=True)
    expected = centred / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * params["scale"] + 0.5
    np.testing.assert_allclose(result, expected, atol=1e-4)


@pytest.mark.parametrize("affine", [True, False])
def test_the_gradient_of_a_layer_norm_is_that_of_its_formula(affine):
    x = np.random.default_rng(0).normal(3, 2, size=(2, 3, 6)).astype(np.float32)
    norm = make_norm(dataclasses.replace(CONFIG, norm_affine=affine, norm_epsilon=0.1))
    params = {"scale": jnp.arange(1.0, 7.0), "bias": jnp.full(6, 0.5)} if affine else {}

    def by_formula(params: dict, x: jax.Array) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        normal = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 0.1)
        return jnp.sin(normal * params.get("scale", 1) + params.get("bias", 0)).sum()

    found = jax.grad(lambda params, x: jnp.sin(norm.apply({"params": params}, x)).sum(), (0, 1))(params, x)
    expected = jax.grad(by_formula, (0, 1))(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)
    half = norm.apply({"params": params}, x.astype(jnp.bfloat16))
    assert half.dtype == jnp.float32  # the config's type, whatever comes in
    gradient = jax.grad(lambda x: norm.apply({"params": params}, x).sum())(x.astype(jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16


def test_rms_norm_by_definition_has_no_mean_and_no_bias():
    norm = make_norm(dataclasses.replace(CONFIG, norm="rms", norm_epsilon=1e-3))
    x = np.random.default_rng(1).normal(3, 2, size=(4, 6)).astype(np.float32)
    assert set(norm.init(jax.random.key(0), x)["params"]) == {"scale"}
    scale = np.arange(1.0, 7.0, dtype=np.float32)
    result = norm.apply({"params": {"scale": scale}}, x)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * scale
    np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_keep_float32_parameters_and_statistics_in_bfloat16_runs(kind):
    norm = make_norm(dataclasses.replace(CONFIG, norm=kind, dtype="bfloat16"))
    x = jnp.asarray([[1000.0, 1001.0, 999.0, 1000.0, 1000.0, 1000.0]])
    params = norm.init(jax.random.key(0), x)["params"]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    result = norm.apply({"params": params}, x)
    assert result.dtype == jnp.bfloat16
    # in bfloat16 these numbers would all be 1000 and their variance 0
    expected = make_norm(dataclasses.replace(CONFIG, norm=kind)).apply({"params": params}, x)
    np.testing.assert_allclose(result.astype(jnp.float32), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("name", "deviation", "bound"),
    [
        ("xavier_uniform", math.sqrt(2 / 500), math.sqrt(6 / 500)),
        ("xavier_normal", math.sqrt(2 / 500), math.inf),
        ("lecun_normal", math.sqrt(1 / 200), math.inf),
        ("normal", 0.02, math.inf),
    ],
)
def test_initialisers_by_their_formulas(name, deviation, bound):
    scheme = make_initializers(dataclasses.replace(CONFIG, initializer=name))
    kernel = scheme.feedforward(jax.random.key(0), (200, 300), jnp.float32)
    assert abs(float(kernel.std()) / deviation - 1) < 0.02
    assert abs(float(kernel.mean())) < 5 * deviation / math.sqrt(kernel.size)
    assert float(jnp.abs(kernel).max()) <= bound
    assert not scheme.bias(200)(jax.random.key(0), (300,)).any()


def assert_uniform(values: jax.Array, bound: float) -> None:
    """Numbers spread evenly from -bound to bound."""
    assert 0.97 * bound < float(jnp.abs(values).max()) <= bound
    assert abs(float(values.std()) / (bound / math.sqrt(3)) - 1) < 0.05


def test_torch_starts_as_its_layers_do():
    scheme = make_initializers(dataclasses.replace(CONFIG, initializer="torch"))
    key = jax.random.key(1)
    assert_uniform(scheme.attention_output(key, (50, 300)), 50**-0.5)
    assert_uniform(scheme.feedforward(key, (1, 40, 100)), 40**-0.5)  # a convolution of width one
    assert_uniform(scheme.bias(50)(key, (2000,)), 50**-0.5)
    assert abs(float(scheme.embedding(key, (500, 40)).std()) - 1) < 0.02
    one_hot = make_initializers(dataclasses.replace(CONFIG, initializer="torch", embedding_bias=True))
    assert_uniform(one_hot.embedding(key, (500, 40)), 500**-0.5)


def test_kokoyi_starts_with_the_documents_gains():
    """Width 16 and 2 heads of 64: PyTorch takes 16 x 64 and 2 x 64 for the fans of a [2, 16, 64] matrix."""
    config = dataclasses.replace(CONFIG, initializer="kokoyi", model_dim=16, num_heads=2, key_dim=64)
    scheme = make_initializers(config)
    key, gain = jax.random.key(2), math.sqrt(16 + 64) / math.sqrt(16 + 2 * 64)
    assert_uniform(scheme.attention_input(key, (16, 128)), gain * math.sqrt(6 / (16 * 64 + 2 * 64)))
    assert_uniform(scheme.attention_output(key, (128, 16)), gain * math.sqrt(6 / (16 + 128)))
    assert_uniform(scheme.output(key, (16, 300)), math.sqrt(2) * math.sqrt(6 / 316))
    assert_uniform(scheme.embedding(key, (300, 16)), math.sqrt(2) * math.sqrt(6 / 316))
    assert_uniform(scheme.feedforward(key, (16, 64)), 0.25)


def test_aiayn_takes_xavier_for_embeddings_too():
    scheme = make_initializers(dataclasses.replace(CONFIG, initializer="aiayn"))
    assert_uniform(scheme.embedding(jax.random.key(3), (300, 40)), math.sqrt(6 / 340))
    assert_uniform(scheme.bias(16)(jax.random.key(3), (2000,)), 0.25)


def test_norms_without_parameters_and_without_epsilon():
    """Document 002's normalisation: by the population's standard deviation; a constant row has none."""
    norm = make_norm(dataclasses.replace(CONFIG, norm_affine=False, norm_epsilon=0.0))
    x = np.random.default_rng(5).normal(100, 2, size=(4, 6)).astype(np.float32)
    assert norm.init(jax.random.key(0), x) == {}
    expected = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
    np.testing.assert_allclose(norm.apply({}, x), expected, atol=3e-5)
    assert np.isnan(norm.apply({}, np.full((1, 6), 7.0, np.float32))).all()


def test_a_convolution_of_width_one_is_the_dense_layer():
    x = np.random.default_rng(6).normal(size=(2, 3, 6)).astype(np.float32)
    dense = FeedForward(CONFIG)
    convolution = FeedForward(dataclasses.replace(CONFIG, ffn_layer="convolution"))
    params = dense.init(jax.random.key(0), x, deterministic=True)["params"]
    shapes = jax.tree.map(jnp.shape, convolution.init(jax.random.key(0), x, deterministic=True)["params"])
    assert shapes["input"] == {"kernel": (1, 6, 10), "bias": (10,)}
    same = jax.tree.map(lambda leaf: leaf[None] if leaf.ndim == 2 else leaf + 0.5, params)
    moved = jax.tree.map(lambda leaf: leaf if leaf.ndim == 2 else leaf + 0.5, params)

    def total(layer: FeedForward, params: dict) -> jax.Array:
        return (layer.apply({"params": params}, x, deterministic=True) ** 2).sum()

    (value, by_convolution), (expected, by_dense) = (
        jax.value_and_grad(total, argnums=1)(layer, leaves)
        for layer, leaves in [(convolution, same), (dense, moved)]
    )
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a.reshape(b.shape), b, rtol=1e-5, atol=1e-6),
        by_convolution,
        by_dense,
    )


def test_residual_norms_before_or_after():
    x = np.random.default_rng(2).normal(size=(2, 3, 6)).astype(np.float32)
    for position in ("pre", "post"):
        layer = Residual(dataclasses.replace(CONFIG, norm_position=position))

        def run(params: dict, layer: Residual = layer) -> jax.Array:
            return layer.apply({"params": params}, x, lambda y: 3 * y, deterministic=True)

        params = layer.init(jax.random.key(0), x, lambda y: y, deterministic=True)["params"]
        assert set(params) == {"norm"}
        norm = make_norm(CONFIG)
        if position == "pre":
            expected = x + 3 * norm.apply({"params": params["norm"]}, x)
        else:
            expected = norm.apply({"params": params["norm"]}, x + 3 * x)
        np.testing.assert_allclose(run(params), expected, atol=1e-5)


def test_residual_drops_what_the_sublayer_adds_and_never_the_stream():
    layer = Residual(dataclasses.replace(CONFIG, dropout_rate=0.5))
    x = jnp.full((50, 6), 10.0)
    params = layer.init(jax.random.key(0), x, lambda y: y, deterministic=True)["params"]
    result = layer.apply(
        {"params": params},
        x,
        lambda y: jnp.ones_like(y),
        deterministic=False,
        rngs={"dropout": jax.random.key(1)},
    )
    assert set(np.unique(result)) == {10.0, 12.0}


ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "swiglu"])
@pytest.mark.parametrize("bias", [True, False])
def test_feedforward_by_its_formula(activation, bias):
    layer = FeedForward(dataclasses.replace(CONFIG, activation=activation, ffn_bias=bias))
    generator = np.random.default_rng(4)
    x = generator.normal(size=(3, 6))
    params = jax.tree.map(
        lambda leaf: generator.normal(size=leaf.shape),
        layer.init(jax.random.key(0), jnp.ones((1, 6)), deterministic=True)["params"],
    )
    names = {"input", "output"} | ({"gate"} if activation == "swiglu" else set())
    assert {name: set(leaves) for name, leaves in params.items()} == {
        name: {"kernel", "bias"} if bias else {"kernel"} for name in names
    }

    def dense(name: str, y: np.ndarray) -> np.ndarray:
        return y @ params[name]["kernel"] + params[name].get("bias", 0)

    if activation == "swiglu":
        gate = dense("gate", x)
        hidden = dense("input", x) * gate / (1 + np.exp(-gate))
    else:
        hidden = ACTIVATIONS[activation](dense("input", x))
    result = layer.apply({"params": params}, x.astype(np.float32), deterministic=True)
    np.testing.assert_allclose(result, dense("output", hidden), rtol=1e-4, atol=1e-4)


def test_feedforward_dropout_has_a_rate_of_its_own():
    x = jnp.ones((4, 6))
    for rate, alike in [(None, False), (0.0, True)]:
        layer = FeedForward(dataclasses.replace(CONFIG, dropout_rate=0.5, ffn_dropout_rate=rate))
        params = layer.init(jax.random.key(0), x, deterministic=True)["params"]
        first, second = (
            layer.apply({"params": params}, x, deterministic=False, rngs={"dropout": jax.random.key(seed)})
            for seed in (1, 2)
        )
        assert bool(jnp.array_equal(first, second)) is alike
