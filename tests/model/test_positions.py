"""Positions: the paper's table in float64, turns that keep lengths and depend on distances alone."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from flaxformer_mt.model.positions import (
    LearnedPositions,
    rotate,
    sinusoidal_positions,
    sinusoidal_table,
)


def paper_table(length: int, model_dim: int) -> np.ndarray:
    """Section 3.5 word for word, in Python's floats."""
    table = np.zeros((length, model_dim))
    for position in range(length):
        for i in range(model_dim // 2):
            angle = position / 10000 ** (2 * i / model_dim)
            table[position, 2 * i] = math.sin(angle)
            table[position, 2 * i + 1] = math.cos(angle)
    return table


@pytest.mark.parametrize("model_dim", [2, 6, 14])
def test_sinusoidal_table_is_the_papers(model_dim):
    table = sinusoidal_table(300, model_dim)
    assert table.dtype == np.float32
    np.testing.assert_allclose(table, paper_table(300, model_dim), rtol=0, atol=1e-7)


def test_sinusoidal_positions_are_rows_of_the_table():
    positions = np.array([[0, 1, 2], [511, 0, 77]], np.int32)
    rows = sinusoidal_positions(positions, length=512, model_dim=10)
    assert rows.shape == (2, 3, 10)
    np.testing.assert_array_equal(rows, sinusoidal_table(512, 10)[positions])


def test_an_odd_width_ends_in_a_sine():
    table = sinusoidal_table(50, 7)
    expected = [math.sin(p / 10000 ** (6 / 7)) for p in range(50)]
    np.testing.assert_allclose(table[:, 6], expected, atol=1e-7)
    np.testing.assert_allclose(table[:, 5], [math.cos(p / 10000 ** (4 / 7)) for p in range(50)], atol=1e-7)


def test_rotation_by_hand():
    """One head of size 4 holds the pairs (0, 2) and (1, 3), which turn by p and by p / 100."""
    turned = rotate(jnp.array([[[[1.0, 1.0, 0.0, 0.0]]]]), jnp.array([[3]]))[0, 0, 0]
    expected = [math.cos(3), math.cos(0.03), math.sin(3), math.sin(0.03)]
    np.testing.assert_allclose(turned, expected, atol=1e-6)


def test_rotation_at_the_start_is_the_identity_and_keeps_lengths():
    vectors = jax.random.normal(jax.random.key(0), (2, 5, 3, 6))
    np.testing.assert_array_equal(rotate(vectors, jnp.zeros((1, 5), jnp.int32)), vectors)
    turned = rotate(vectors, jnp.arange(5)[None])
    np.testing.assert_allclose(jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(vectors, axis=-1), rtol=1e-5)
    assert not np.allclose(turned[:, 1:], vectors[:, 1:], atol=0.1)


def test_rotary_scores_depend_on_distances_alone():
    query, key = jax.random.normal(jax.random.key(1), (2, 1, 1, 3, 8))

    def scores(query_position: int, key_position: int) -> np.ndarray:
        turned_query = rotate(query, jnp.array([[query_position]]))
        turned_key = rotate(key, jnp.array([[key_position]]))
        return np.asarray(jnp.einsum("bthk,bthk->h", turned_query, turned_key))

    np.testing.assert_allclose(scores(7, 4), scores(103, 100), atol=1e-4)
    np.testing.assert_allclose(scores(0, 9), scores(50, 59), atol=1e-4)
    assert np.abs(scores(7, 4) - scores(4, 7)).max() > 1e-2  # the order matters, not only how far


def test_rotation_takes_one_row_of_positions_for_all_or_one_for_each():
    vectors = jax.random.normal(jax.random.key(2), (2, 3, 1, 4))
    rows = jnp.array([[0, 1, 2], [0, 0, 1]])
    each = rotate(vectors, rows)
    np.testing.assert_array_equal(each[0], rotate(vectors, rows[:1])[0])
    np.testing.assert_array_equal(each[1], rotate(vectors, rows[1:])[1])
    assert rotate(vectors.astype(jnp.bfloat16), rows).dtype == jnp.bfloat16


def test_learned_positions_are_rows_of_a_trained_table():
    table = jnp.arange(12.0).reshape(4, 3)
    plain = LearnedPositions(4, 3, linen.initializers.ones)
    rows = plain.apply({"params": {"embedding": table}}, jnp.array([[3, 0]]))
    np.testing.assert_array_equal(rows, [[[9, 10, 11], [0, 1, 2]]])
    layer = LearnedPositions(4, 3, linen.initializers.zeros, linen.initializers.ones)
    params = layer.init(jax.random.key(3), jnp.zeros((1, 1), jnp.int32))["params"]
    assert {name: leaf.shape for name, leaf in params.items()} == {"embedding": (4, 3), "bias": (3,)}
    shifted = layer.apply({"params": {"embedding": table, "bias": jnp.ones(3)}}, jnp.array([[3, 0]]))
    np.testing.assert_array_equal(shifted, rows + 1)


def test_one_vector_is_the_linear_map_of_all_positions():
    table = jnp.arange(12.0).reshape(4, 3)
    layer = LearnedPositions(4, 3, linen.initializers.zeros, linen.initializers.zeros)
    vector = layer.apply({"params": {"embedding": table, "bias": jnp.full(3, 0.5)}}, method="one_vector")
    np.testing.assert_array_equal(vector, [3 + 12 + 27 + 0.5, 4 + 14 + 30 + 0.5, 5 + 16 + 33 + 0.5])
