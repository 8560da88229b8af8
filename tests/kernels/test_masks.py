"""Masks are the matrices drawn in their docstrings, and combine into what packed rows need."""

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from flaxformer_mt.kernels.masks import drop_ends, make_causal_mask, make_padding_mask, make_segment_mask

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def drawn(*rows: str) -> np.ndarray:
    """A mask from its drawing: "110" is a query that may attend to the first two of three."""
    return np.array([[mark == "1" for mark in row] for row in rows])


def test_padding_mask_lets_every_query_see_the_real_tokens():
    mask = make_padding_mask(drawn("110", "111"))
    assert mask.shape == (2, 1, 1, 3)
    assert mask.dtype == bool
    assert_array_equal(mask[:, 0, 0], drawn("110", "111"))


def test_causal_mask_is_the_lower_triangle():
    mask = make_causal_mask(4)
    assert mask.shape == (1, 1, 4, 4)
    assert_array_equal(mask[0, 0], drawn("1000", "1100", "1110", "1111"))
    assert_array_equal(make_causal_mask(1)[0, 0], drawn("1"))


def test_segment_mask_stays_within_segments_and_out_of_padding():
    mask = make_segment_mask(np.array([[1, 2, 0], [1, 1, 2]]), np.array([[1, 1, 2, 0], [2, 1, 0, 0]]))
    assert mask.shape == (2, 1, 3, 4)
    assert mask.dtype == bool
    assert_array_equal(mask[0, 0], drawn("1100", "0010", "0000"))
    assert_array_equal(mask[1, 0], drawn("0100", "0100", "1000"))


def test_packed_self_attention_is_causal_blocks():
    segments = np.array([[1, 1, 2, 2, 2, 0]])
    mask = make_segment_mask(segments, segments) & make_causal_mask(6)
    assert_array_equal(mask[0, 0], drawn("100000", "110000", "001000", "001100", "001110", "000000"))


def test_the_ends_of_segments_are_dropped():
    segments = jnp.array([[1, 1, 1, 2, 2, 3, 0], [1, 1, 0, 0, 0, 0, 0]], jnp.int32)
    assert_array_equal(drop_ends(segments), [[1, 1, 0, 2, 0, 3, 0], [1, 0, 0, 0, 0, 0, 0]])
