"""Sums of arrays over all rows, as gradients of scales and biases are."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from flaxformer_mt.shapes import Array


def sum_rows(arrays: Sequence[Array], axes: Sequence[int]) -> list[Array]:
    """Sum arrays over some axes, in float32."""
    return [x.sum(axes, dtype=jnp.float32) for x in arrays]


def sum_rows_at_once(arrays: Sequence[Array], axes: Sequence[int]) -> list[Array]:
    """Compute `sum_rows` in one kernel of a GPU, which reads once what the arrays are computed from."""
    if len({x.shape for x in arrays}) > 1:
        return sum_rows(arrays, axes)
    wide, zeros = [x.astype(jnp.float32) for x in arrays], [jnp.zeros(())] * len(arrays)
    return jax.lax.reduce(wide, zeros, lambda x, y: [a + b for a, b in zip(x, y, strict=True)], axes)
