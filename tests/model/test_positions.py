"""Positions: the paper's table in float64, turns that keep lengths and depend on distances alone."""

import math

import jax
import numpy as np
import pytest

from flaxformer_mt.model.positions import rotate, sinusoidal_table

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
