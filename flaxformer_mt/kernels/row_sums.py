"""Sums of normalisation and of biases: over the features of each row, and over all rows."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from flaxformer_mt.shapes import Array


def moments(x: Array) -> tuple[Array, Array]:
    """Return mean and variance [..., 1] of rows [..., D], in float32.

    The variance is the mean square of centred values: E[x^2] - E[x]^2 loses precision where means are large.
    """
    wide = x.astype(jnp.float32)
    mean = wide.mean(axis=-1, keepdims=True)
    centred = wide - mean
    return mean, (centred * centred).mean(axis=-1, keepdims=True)


def moments_in_one_pass(x: Array) -> tuple[Array, Array]:
    """Compute `moments`; of bfloat16 numbers at once, at the end of what computes them on a TPU.

    What E[x^2] - E[x]^2 loses in float32, 2^-24 of the squared mean in each sum, is less than the error that
    rounding to bfloat16 left in the variance, about 2^-20 of it.
    """
    if x.dtype != jnp.bfloat16:
        return moments(x)
    wide = x.astype(jnp.float32)
    mean = wide.mean(axis=-1, keepdims=True)
    return mean, jnp.maximum((wide * wide).mean(axis=-1, keepdims=True) - mean * mean, 0)


def sum_rows(arrays: Sequence[Array], axes: Sequence[int]) -> list[Array]:
    """Sum arrays over some axes, in float32."""
    return [x.sum(axes, dtype=jnp.float32) for x in arrays]


def sum_rows_at_once(arrays: Sequence[Array], axes: Sequence[int]) -> list[Array]:
    """Compute `sum_rows` in one kernel of a GPU, which reads once what the arrays are computed from."""
    if len({x.shape for x in arrays}) > 1:
        return sum_rows(arrays, axes)
    wide = [x.astype(jnp.float32) for x in arrays]
    zeros = [jnp.zeros(())] * len(wide)
    return jax.lax.reduce(wide, zeros, lambda x, y: [a + b for a, b in zip(x, y, strict=True)], axes)
