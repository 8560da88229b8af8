"""Relative biases and fairseq's sinusoids: the numbers of the systems that have trained with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_mt.kernels.relative_bias import RelativeBias, find_buckets
from flaxformer_mt.model.positions import sinusoidal_half_table

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("count", "longest"), [(32, 128), (8, 20), (64, 256), (32, 100)])
def test_buckets_are_those_of_t5(count, longest, bidirectional):
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = np.arange(-700, 701)
    theirs = T5Attention._relative_position_bucket(torch.from_numpy(distances), bidirectional, count, longest)
    found = find_buckets(distances, count, longest, bidirectional)
    np.testing.assert_array_equal(found, theirs.numpy())


@pytest.mark.parametrize(("queries", "attended"), [(5, 5), (1, 7), (7, 3), (3, 1)])
def test_biases_and_their_gradient_by_brute_force(queries, attended):
    table = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    buckets = find_buckets(np.arange(attended) - np.arange(queries)[:, None], 8, 20, True)

    def total(table, dense):
        weights = jnp.arange(3.0 * queries * attended).reshape(3, queries, attended)
        return (dense(table) * weights).sum()

    def ours(table):
        return RelativeBias(table, 20, True).dense(queries, attended)[0]

    def plain(table):
        return jnp.moveaxis(table[buckets], 2, 0)

    np.testing.assert_array_equal(ours(table), plain(table))
    gradients = [jax.jit(jax.grad(total), static_argnums=1)(table, dense) for dense in (ours, plain)]
    np.testing.assert_allclose(*gradients, rtol=1e-5)


def test_biases_of_ages_are_those_of_earlier_positions():
    bias = RelativeBias(np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32), 9, False)
    ages = np.arange(30)[:, None] - np.arange(30)
    found, dense = bias.of_ages(jnp.asarray(ages)), bias.dense(30, 30)
    earlier = np.broadcast_to(ages >= 0, found.shape)
    np.testing.assert_array_equal(np.asarray(found)[earlier], np.asarray(dense)[earlier])


@pytest.mark.parametrize("width", [4, 14, 16])
def test_the_table_of_halves_is_that_of_m2m100(width):
    from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding

    theirs = M2M100SinusoidalPositionalEmbedding.get_embedding(400, width).numpy()
    np.testing.assert_allclose(sinusoidal_half_table(400, width), theirs, rtol=0, atol=4e-5)
    np.testing.assert_allclose(sinusoidal_half_table(60, width), theirs[:60], rtol=0, atol=5e-6)
