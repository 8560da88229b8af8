"""Matrices of 8-bit integers: dynamic quantisation for translation.

A matrix [I, O] is stored as whole numbers from -127 to 127 and a factor for each of its O outputs. In each
product the rows of activations become such numbers too, each with its own factor, so nothing is calibrated
(as Marian and CTranslate2 do). Sums are exact, in int32. A quantised parameter has its scales as a sibling:

    .../kernel int8 [*inputs, *outputs]    .../kernel_scale float32 [*outputs]

The table of the output layer is also looked up and gathered from, so it stays, and the root of the tree gets
`output_int8` [V, D] and `output_scale` [V]. Embeddings, norms and biases are not quantised, nor are the
columns of shortlists. Knows nothing of devices: parameters that devices split are not quantised.
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.model.lora import matrix_axes
from flaxformer_mt.model.products import multiply_rows
from flaxformer_mt.shapes import Array
from flaxformer_mt.trees import flatten_tree, nest_leaves

# The largest number; -128 is left out, so that signs are symmetrical.
_LARGEST = 127

# Numbers that one instruction compares, roughly.
_LANES = 16

# Where the output layer's table can be, the first that is there: of its own, tied, or one for all.
_TABLES = (
    "output_kernel",
    "target_embedding/embedding",
    "shared_embedding/embedding",
    "token_embedding/embedding",
)


class Quantized(NamedTuple):
    """A matrix of 8-bit integers, and the factors of its outputs."""

    values: Array
    scale: Array


def quantize_params(params: Any) -> Any:
    """Quantise all projections and the output layer of a model's parameters, with one subtree per layer.

    Args:
      params: nested dicts of float arrays, numpy's or JAX's; what is quantised becomes numpy's.
    """
    leaves = flatten_tree(params)
    quantized = dict(leaves)
    for path, leaf in leaves.items():
        if path.endswith("/kernel"):
            inputs, _ = matrix_axes(path, leaf.shape)
            quantized[path], quantized[f"{path}_scale"] = quantize_matrix(leaf, range(len(inputs)))
    table = next(path for path in _TABLES if path in leaves)
    rows = np.asarray(leaves[table]).T if table == "output_kernel" else leaves[table]
    quantized["output_int8"], quantized["output_scale"] = quantize_matrix(rows, [1])
    return nest_leaves(quantized)


def quantize_matrix(matrix: Any, inputs: Iterable[int]) -> Quantized:
    """Quantise a matrix whose axes `inputs` are summed over in products; outputs that are all 0 stay 0."""
    matrix = np.asarray(matrix, np.float32)
    axes = tuple(inputs)
    scale = np.abs(matrix).max(axes, keepdims=True) / np.float32(_LARGEST)
    with np.errstate(invalid="ignore"):  # NaN has no integer, but stays in the factor of its output
        values = np.rint(matrix / np.where(scale == 0, 1, scale)).astype(np.int8)
    return Quantized(values, scale.squeeze(axes))


def find_output(params: dict[str, Any]) -> Quantized | None:
    """Return the quantised table [V, D] of the output layer, or None if parameters are not quantised."""
    return Quantized(params["output_int8"], params["output_scale"]) if "output_int8" in params else None


def contract_quantized(spec: str, x: Array, matrix: Quantized) -> Array:
    """Multiply x [..., D] with a quantised matrix, "...D,DF->...F" or "...D,FD->...F", to float32 [..., F].

    Each row of x is rounded to multiples of 1/127 of its largest magnitude. It is not to be differentiated.
    """
    rows = quantize_rows(x)
    sums = multiply_integers(spec.replace("...", "B"), rows.values.reshape(-1, x.shape[-1]), matrix.values)
    return sums.reshape(*x.shape[:-1], -1).astype(jnp.float32) * (rows.scale * matrix.scale)


def multiply_integers(spec: str, x: Array, y: Array) -> Array:
    """Compute an einsum of 8-bit integers in int32, on CPUs in the form that XLA's library multiplies."""

    def multiply(x: Array, y: Array) -> Array:
        return jnp.einsum(spec, x, y, preferred_element_type=jnp.int32)

    by_rows = functools.partial(multiply_rows, spec, sums=jnp.int32)
    return jax.lax.platform_dependent(x, y, cpu=by_rows, default=multiply)


def quantize_rows(x: Array) -> Quantized:
    """Quantise each row of x [..., D]: int8 [..., D] and factors [..., 1]."""
    scale = _largest_magnitude(x).astype(jnp.float32) * (1 / _LARGEST)
    # A row of zeros has no factor; NaN and infinity stay in the factor, so no score hides them.
    inverse = jnp.where(scale == 0, 0.0, 1 / scale)
    return Quantized(jnp.round(x.astype(jnp.float32) * inverse).astype(jnp.int8), scale)


def _largest_magnitude(x: Array) -> Array:
    """Return the largest magnitude of each row of x [..., D], as [..., 1].

    The bits of numbers without their signs have the order of the magnitudes, NaN last. XLA's CPU compiler
    finds the largest of such integers, half a row against the other half, several times as fast as it
    reduces floating-point numbers.
    """
    dtype = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, dtype) & jnp.asarray(jnp.iinfo(dtype).max >> 1, dtype)
    while bits.shape[-1] > _LANES and bits.shape[-1] % 2 == 0:
        bits = jnp.maximum(*jnp.split(bits, 2, axis=-1))
    return jax.lax.bitcast_convert_type(bits.max(axis=-1, keepdims=True), x.dtype)
