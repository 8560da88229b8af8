"""Products of 8-bit integers: matrices have one scale per output, activations one scale per row.

Each product rounds the rows of activations to integers from -127 to 127, each row with its own scale, so no
calibration is needed (as in Marian and CTranslate2). Sums are exact, in int32. The products have no gradient.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.kernels.matmul import multiply_rows
from flaxformer_mt.shapes import Array

# The largest number; -128 is left out, so that signs are symmetrical.
_LARGEST = 127

# Numbers that one instruction compares, roughly.
_LANES = 16

IntegerProduct = Callable[[str, Array, Array], Array]


def integer_product(spec: str, x: Array, y: Array) -> Array:
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.int32)


# In the form that XLA's CPU library multiplies.
integer_product_on_cpu = functools.partial(multiply_rows, sums=jnp.int32)


class Quantized(NamedTuple):
    """A matrix of 8-bit integers, and the scales of its outputs."""

    values: Array
    scale: Array


def quantize_matrix(matrix: Any, inputs: Iterable[int]) -> Quantized:
    """Quantize a matrix; products sum over its axes `inputs`; outputs whose weights are all 0 stay 0."""
    matrix = np.asarray(matrix, np.float32)
    axes = tuple(inputs)
    scale = np.abs(matrix).max(axes, keepdims=True) / np.float32(_LARGEST)
    with np.errstate(invalid="ignore"):  # NaN has no integer, but stays in the factor of its output
        values = np.rint(matrix / np.where(scale == 0, 1, scale)).astype(np.int8)
    return Quantized(values, scale.squeeze(axes))


def multiply_quantized(multiply: IntegerProduct, spec: str, x: Array, matrix: Quantized) -> Array:
    """Compute the einsum "...D,DF->...F" or "...D,FD->...F" of x and a quantized matrix, as float32."""
    rows = quantize_rows(x)
    sums = multiply(spec.replace("...", "B"), rows.values.reshape(-1, x.shape[-1]), matrix.values)
    return sums.reshape(*x.shape[:-1], -1).astype(jnp.float32) * (rows.scale * matrix.scale)


def quantize_rows(x: Array) -> Quantized:
    """Quantize each row of x [..., D] to int8 [..., D] and scales [..., 1]."""
    scale = _largest_magnitude(x).astype(jnp.float32) * (1 / _LARGEST)
    # A row of zeros has no factor; NaN and infinity stay in the factor, so no score hides them.
    inverse = jnp.where(scale == 0, 0.0, 1 / scale)
    return Quantized(jnp.round(x.astype(jnp.float32) * inverse).astype(jnp.int8), scale)


def _largest_magnitude(x: Array) -> Array:
    """Return the largest magnitude of each row of x [..., D], as [..., 1].

    Without the sign bit, the bits of numbers are ordered by magnitude, with NaN last. XLA's CPU compiler
    computes the maximum of such integers, one half of a row against the other, several times as fast as it
    reduces floating-point numbers.
    """
    dtype = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, dtype) & jnp.asarray(jnp.iinfo(dtype).max >> 1, dtype)
    while bits.shape[-1] > _LANES and bits.shape[-1] % 2 == 0:
        bits = jnp.maximum(*jnp.split(bits, 2, axis=-1))
    return jax.lax.bitcast_convert_type(bits.max(axis=-1, keepdims=True), x.dtype)
