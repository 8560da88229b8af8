"""Matrices of 8-bit integers: exact products, which are quantized, and what a program makes of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bfloat16_models import CONFIG, KINDS, make_bfloat16
from numpy.testing import assert_allclose, assert_array_equal
from test_products_in_programs import equations_in, make_batch
from tiny_experiment import random_params

from flaxformer_mt.kernels.bfloat16 import cast_kernels
from flaxformer_mt.kernels.int8 import (
    Quantized,
    integer_product,
    integer_product_on_cpu,
    multiply_quantized,
    quantize_matrix,
)
from flaxformer_mt.kernels.kernel_table import choose_kernels
from flaxformer_mt.kernels.key_value_cache import average, score, store, write
from flaxformer_mt.parameter_trees import flatten_tree
from flaxformer_mt.translation.translator import quantize_params

ALL_KINDS = KINDS | {"two tables, recurrent": {"tying": "decoder", "decoder_self_attention": "ssru"}}


def products_of(function: Any, *arguments: Any) -> list[tuple[str, ...]]:
    """The types of both operands and of the result of every product in a program."""
    equations = equations_in(jax.make_jaxpr(function)(*arguments).jaxpr)
    products = [one for one in equations if one.primitive.name == "dot_general"]
    return [tuple(v.aval.dtype.name for v in (*one.invars, *one.outvars)) for one in products]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", ["...D,DF->...F", "...D,FD->...F"])
@pytest.mark.parametrize("multiply", [integer_product, integer_product_on_cpu], ids=["plain", "cpu"])
def test_whole_numbers_are_multiplied_exactly(multiply, spec, dtype):
    """Whole numbers up to 127, with a 127 in each row and in each output, are their own 8-bit integers."""
    generator = np.random.default_rng(2)
    x, y = generator.integers(-127, 128, (3, 4, 8)), generator.integers(-127, 128, (8, 24))
    x[..., 3], y[5] = -127, 127
    matrix = quantize_matrix(2.0 * y.T, [1]) if ",FD" in spec else quantize_matrix(2.0 * y, [0])
    assert matrix.values.dtype == np.int8 and np.all(matrix.scale == 2)
    run = jax.jit(lambda x, matrix: multiply_quantized(multiply, spec, x, matrix))
    found = run(jnp.asarray(x, dtype), matrix)
    assert found.dtype == jnp.float32
    assert_array_equal(found, 2.0 * x @ y)


def test_rows_are_rounded_to_their_own_steps():
    """A row of small numbers loses nothing beside one of large numbers; zeros stay, and NaN is not hidden."""
    matrix = quantize_matrix(np.eye(64), [0])
    generator = np.random.default_rng(3)
    x = generator.uniform(-1, 1, (6, 64)).astype(np.float32) * 10.0 ** np.arange(-3, 3)[:, None]
    x[0], x[1, 7], x[2, 9] = 0, np.nan, np.inf
    found = np.asarray(multiply_quantized(integer_product, "...D,DF->...F", jnp.asarray(x), matrix))
    assert not found[0].any() and np.isnan(found[1]).all() and not np.isfinite(found[2]).any()
    steps = np.abs(x[3:]).max(axis=1, keepdims=True) / 127
    errors = np.abs(found[3:] - x[3:]) / steps
    assert 0.3 < errors.max() < 0.51


def test_a_matrix_is_rounded_by_its_outputs():
    generator = np.random.default_rng(4)
    matrix = generator.standard_normal((2, 5, 3, 4)) * 10.0 ** np.arange(4)
    matrix[..., 1, 2] = 0
    values, scale = quantize_matrix(matrix, [0, 1])
    assert values.shape == matrix.shape and scale.shape == (3, 4) and scale.dtype == np.float32
    largest = np.abs(values).reshape(10, -1).max(axis=0).tolist()
    assert scale[1, 2] == 0 and largest == [127] * 6 + [0] + [127] * 5
    assert np.all(np.abs(values * scale - matrix) <= 0.5001 * scale)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_every_matrix_is_multiplied_in_8_bits_and_logits_stay_close(kind):
    model, batch = make_bfloat16(ALL_KINDS[kind]), make_batch()
    params = random_params(model)
    quantized = quantize_params(params)
    kernels = {path: leaf for path, leaf in flatten_tree(params).items() if path.endswith("/kernel")}
    leaves = flatten_tree(quantized)
    assert kernels and all(leaves[path].dtype == np.int8 for path in kernels)
    assert all(leaves[path].shape == kernel.shape for path, kernel in kernels.items())
    cast = cast_kernels(quantized, "bfloat16")
    assert all(flatten_tree(cast)[path].dtype == np.int8 for path in kernels)

    def logits(params: Any) -> Any:
        return model.apply({"params": params}, batch, deterministic=True)

    products = products_of(logits, cast)
    kinds = {kind: products.count(kind) for kind in set(products)}
    # The others multiply activations: attention's scores and averages.
    assert set(kinds) == {("int8", "int8", "int32"), ("bfloat16", "bfloat16", "float32")}
    plain = products_of(logits, cast_kernels(params, "bfloat16"))
    assert len(plain) == len(products)
    attentions = {"decoder-only, gated": 1, "two tables, recurrent": 2}.get(kind, 3)
    assert kinds["bfloat16", "bfloat16", "float32"] == 2 * attentions
    wide = make_bfloat16(ALL_KINDS[kind] | {"dtype": "float32"})
    apply = jax.jit(lambda params: wide.apply({"params": params}, batch, deterministic=True))
    exact = apply(params)
    for other in (jax.jit(logits)(cast), apply(quantized)):
        error = np.abs(np.asarray(other) - exact).max() / np.abs(exact).max()
        assert 1e-5 < error < 0.05


def test_decoding_multiplies_the_same_matrices():
    model, batch = make_bfloat16({}), make_batch()
    params = cast_kernels(quantize_params(random_params(model)), "bfloat16")

    def step(params: Any) -> Any:
        variables = {"params": params}
        cache = model.apply(variables, batch.source, batch.source_mask, 2, 4, method="start_decoding")
        tokens = np.full((3, 2), 5, np.int32)
        return model.apply(variables, tokens, cache, method="decode_step")

    both = products_of(step, params)
    # Encoder 6; keys and values of the source 2; the step 4 of self-attention, 2 of cross-attention, 2 of the
    # feed-forward network, 1 of logits, 4 of keys and values.
    assert both.count(("int8", "int8", "int32")) == 6 + 2 + 9 + 4
    logits, plain = (jax.jit(step)(p)[0] for p in (params, cast_kernels(random_params(model), "bfloat16")))
    assert np.abs(logits - plain).max() < 0.05 * np.abs(plain).max()


def test_the_compiled_product_reads_8_bits():
    """No wider copy of the matrix is made in the program: the product itself takes 8-bit integers."""
    matrix = quantize_matrix(np.random.default_rng(5).standard_normal((64, 128)), [0])

    def multiply(x: Any, values: Any, scale: Any) -> Any:
        return multiply_quantized(integer_product_on_cpu, "...D,DF->...F", x, Quantized(values, scale))

    text = jax.jit(multiply).lower(jnp.ones((8, 4, 64), jnp.bfloat16), *matrix).compile().as_text()
    assert any("s32[32,128]" in line and "dot(" in line for line in text.splitlines()), text
    for kind in ("s32", "f32", "bf16", "s16"):
        assert f"{kind}[64,128]" not in text


def test_cached_keys_and_values_are_8_bit_integers():
    """Scores and averages are nearly those of float32, also of slots that are written later."""
    generator = np.random.default_rng(6)
    keys, values = (jnp.asarray(generator.standard_normal((2, 8, 3, 16)), jnp.bfloat16) for _ in range(2))
    query = jnp.asarray(generator.standard_normal((2, 3, 4, 16)), jnp.bfloat16)
    weights = jax.nn.softmax(jnp.asarray(generator.standard_normal((2, 3, 4, 8)), jnp.float32))
    exact, narrow = (
        store(keys.astype(t), values.astype(t), quantized=t != "float32") for t in ("float32", "bfloat16")
    )
    assert {name: array.dtype.name for name, array in narrow.items()} == {
        "keys": "int8",
        "key_scale": "float32",
        "values": "int8",
        "value_scale": "float32",
    }
    empty = jax.tree.map(jnp.zeros_like, narrow)
    first, last = (store(keys[:, part], values[:, part], quantized=True) for part in (slice(6), slice(6, 8)))
    written = write(write(empty, first, 0), last, 6)
    for name in narrow:
        assert_array_equal(written[name], narrow[name])
    mask = np.arange(8) % 3 > 0
    kernels = choose_kernels(CONFIG, "cpu")
    wide = (
        score(kernels, query.astype(jnp.float32), exact, mask),
        average(kernels, weights, exact, "float32"),
    )
    found = score(kernels, query, narrow, mask), average(kernels, weights, narrow, "bfloat16")
    assert found[0].dtype == jnp.float32 and found[1].dtype == jnp.bfloat16
    assert_array_equal(found[0] == jnp.finfo(jnp.float32).min, np.broadcast_to(~mask, (2, 3, 4, 8)))
    assert_allclose(found[0][..., mask], wide[0][..., mask], atol=0.03 * np.abs(wide[0][..., mask]).max())
    assert_allclose(found[1].astype(jnp.float32), wide[1], atol=0.03 * np.abs(wide[1]).max())
