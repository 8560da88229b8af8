"""Positions: the paper's table in float64, turns that keep lengths and depend on distances alone."""

import math

import jax
import numpy as np
import pytest
from flax import linen

from flaxformer_mt.model.positions import LearnedPositions, rotate, sinusoidal_table

pytestmark = pytest.mark.usefixtures("strict_dtypes")

turn = jax.jit(rotate)


def paper_table(length: int, model_dim: int) -> np.ndarray:
    """Section 3.5 word for word, in Python's floats."""
    table = np.zeros((length, model_dim))
    for position in range(length):
        for column in range(model_dim):
            angle = position / 10000 ** (2 * (column // 2) / model_dim)
            table[position, column] = math.cos(angle) if column % 2 else math.sin(angle)
    return table


@pytest.mark.parametrize("model_dim", [2, 7, 14])
def test_sinusoidal_table_is_the_papers(model_dim):
    """An odd width ends in a sine."""
    table = sinusoidal_table(300, model_dim)
    assert table.dtype == np.float32
    np.testing.assert_allclose(table, paper_table(300, model_dim), rtol=0, atol=1e-7)


def test_rotation_by_hand():
    """One head of size 4 holds the pairs (0, 2) and (1, 3), which turn by p and by p / 100."""
    turned = turn(np.array([[[[1.0, 1.0, 0.0, 0.0]]]], np.float32), np.array([[3]]))
    expected = [math.cos(3), math.cos(0.03), math.sin(3), math.sin(0.03)]
    np.testing.assert_allclose(np.ravel(turned), expected, atol=1e-6)


def test_rotary_scores_depend_on_distances_alone():
    query, key = np.random.default_rng(1).normal(size=(2, 1, 1, 3, 8)).astype(np.float32)

    def scores(query_position: int, key_position: int) -> np.ndarray:
        turned_query = turn(query, np.array([[query_position]]))
        turned_key = turn(key, np.array([[key_position]]))
        return np.einsum("bthk,bthk->h", turned_query, turned_key)

    np.testing.assert_allclose(scores(7, 4), scores(103, 100), atol=1e-4)
    np.testing.assert_allclose(scores(0, 9), scores(50, 59), atol=1e-4)
    assert np.abs(scores(7, 4) - scores(4, 7)).max() > 1e-2  # the order matters, not only how far


def test_learned_positions_are_rows_of_a_trained_table():
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    positions = np.array([[3, 0]], np.int32)
    plain = LearnedPositions(4, 3, linen.initializers.ones)
    rows = jax.jit(plain.apply)({"params": {"embedding": table}}, positions)
    np.testing.assert_array_equal(rows, [[[9, 10, 11], [0, 1, 2]]])
    layer = LearnedPositions(4, 3, linen.initializers.zeros, linen.initializers.ones)
    params = linen.unbox(jax.eval_shape(layer.init, jax.random.key(3), positions)["params"])
    assert {name: leaf.shape for name, leaf in params.items()} == {"embedding": (4, 3), "bias": (3,)}
    params = {"embedding": table, "bias": np.ones(3, np.float32)}
    shifted = jax.jit(layer.apply)({"params": params}, positions)
    np.testing.assert_array_equal(shifted, np.asarray(rows) + 1)


def test_one_vector_is_the_linear_map_of_all_positions():
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    layer = LearnedPositions(4, 3, linen.initializers.zeros, linen.initializers.zeros)
    params = {"embedding": table, "bias": np.full(3, 0.5, np.float32)}
    vector = jax.jit(lambda params: layer.apply({"params": params}, method="one_vector"))(params)
    np.testing.assert_array_equal(vector, [3 + 12 + 27 + 0.5, 4 + 14 + 30 + 0.5, 5 + 16 + 33 + 0.5])
