"""Matrix products of the network: operands in the compute dtype, sums in float32, forward and backward.

Every product of activations in model/ is a call of `contract`, in training, decoding and scoring. With
model.dtype=bfloat16 the operands are bfloat16; results and the gradients of parameters are float32. So no
score is rounded before the softmax, and no gradient of a kernel before it is summed over devices.
"""

import functools
import math
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from flaxformer_mt.shapes import (
    Array,
    activations_are_sharded,
    constrain,
    constrain_gradient,
    gather_after,
    gathers_again,
)

# Rows of a product that is computed for one of them.
_ROWS_OF_ONES = 8

# Paths of the parameters that products multiply.
_MULTIPLIED = re.compile(r"(kernel|_embedding/embedding)$")


def contract(spec: str, x: Array, y: Array, *, parameter: bool = False) -> Array:
    """Contract x and y as `jnp.einsum(spec, x, y)` does, to float32.

    Operands of different dtypes are multiplied in the narrower one: a kernel is given as the float32
    parameter, or as its copy in the dtype of the activations. Each gradient has the dtype and the layout of
    its operand, and is rounded to no other dtype. (JAX's own rule computes the gradient of a kernel as [F, D]
    and transposes it; on CPUs this first transposes the wider of two large arrays in memory.)

    Args:
      spec: einsum's notation; each letter is in two of the three terms. `...` in the terms of x and of the
        result stands for leading axes of x.
      parameter: y is a parameter, and its letters are those of `shapes`. Where devices split it, they gather
        it in the dtype of the product, once for both directions or for each (`shapes.gathers_again`), and
        each receives its own part of the gradient's sum.
    """
    x, y = jnp.asarray(x), jnp.asarray(y)
    rows = string.ascii_lowercase[: x.ndim - len(spec.partition(",")[0].replace("...", ""))]
    return _contract(spec.replace("...", rows), (x.dtype, y.dtype), parameter, x, y)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _contract(spec: str, dtypes: tuple[DTypeLike, DTypeLike], parameter: bool, x: Array, y: Array) -> Array:
    return _contract_forward(spec, dtypes, parameter, x, y)[0]


def _contract_forward(
    spec: str, dtypes: tuple[DTypeLike, DTypeLike], parameter: bool, x: Array, y: Array
) -> tuple[Array, tuple[Array, Array]]:
    narrow = min(dtypes, key=lambda dtype: jnp.dtype(dtype).itemsize)
    x, y = x.astype(narrow), y.astype(narrow)
    whole, kept = _gather(spec, x, y) if parameter else (y, y)
    return einsum_to_float32(spec, x, whole), (x, kept)


def _contract_backward(
    spec: str,
    dtypes: tuple[DTypeLike, DTypeLike],
    parameter: bool,
    saved: tuple[Array, Array],
    gradient: Array,
) -> tuple[Array, Array]:
    x, y = saved
    gradient = gradient.astype(x.dtype)
    terms, result = spec.split("->")
    x_term, y_term = terms.split(",")
    if parameter and gathers_again():
        y = gather_after((gradient, result), y, y_term)
    x_gradient = _einsum_in_order(x_term, (result, gradient), (y_term, y))
    y_gradient = _einsum_in_order(y_term, (result, gradient), (x_term, x))
    if parameter:
        y_gradient = constrain_gradient(y_gradient, y_term)
    return x_gradient.astype(dtypes[0]), y_gradient.astype(dtypes[1])


_contract.defvjp(_contract_forward, _contract_backward)


def _gather(spec: str, x: Array, y: Array) -> tuple[Array, Array]:
    """Gather a split parameter y; returns what to multiply with, and what to keep for the backward pass."""
    x_term, y_term = spec.partition("->")[0].split(",")
    if gathers_again():
        return gather_after((x, x_term), y, y_term), y
    whole = constrain(y, y_term)
    return whole, whole


def _einsum_in_order(result: str, *operands: tuple[str, Array]) -> Array:
    """Contract two operands to `result`, first the one with the first axis of its own: no transposition."""
    (first, one), (second, other) = operands
    own = next(letter for letter in result if (letter in first) != (letter in second))
    if own in second:
        first, one, second, other = second, other, first, one
    return einsum_to_float32(f"{first},{second}->{result}", one, other)


def einsum_to_float32(spec: str, x: Array, y: Array) -> Array:
    """Compute `jnp.einsum(spec, x, y)` with sums and a result in float32; it is not to be differentiated.

    On CPUs, products of bfloat16 numbers are given to XLA in the one form that its library multiplies in
    bfloat16 (`_multiply_rows`); products in any other form it converts to float32 first.
    """

    def multiply(x: Array, y: Array) -> Array:
        return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)

    if jnp.result_type(x, y) == jnp.float32:
        return multiply(x, y)
    by_rows = functools.partial(multiply_rows, spec)
    return jax.lax.platform_dependent(x, y, cpu=by_rows, default=multiply)


def multiply_rows(spec: str, x: Array, y: Array, *, sums: DTypeLike = jnp.float32) -> Array:
    """Compute an einsum as XLA's CPU library multiplies bfloat16: rows of x with rows or with columns of y.

    It multiplies int8 in the same form, to sums in int32.

    The axes of both operands are brought into this order in memory: shared, own and summed ones of x; shared,
    and own and summed ones of y in either order. Of x and y, that one takes the part of x which leaves fewer
    numbers to transpose, those of the result included. The library is chosen before XLA decides on layouts. A
    plain transposition still counts as a view in another layout then, and would send the product to float32;
    one that is folded into the product later makes it fail at run time. So the transposed array, and what
    comes after the product, are kept apart by barriers. The axes of each kind are one axis between the
    barriers: XLA would reshape arrays of more axes there, and two reshapes around a barrier become a copy.
    Nor does the library multiply single rows of a batch, such as those of greedy search: they get a second
    row of zeros.
    """
    terms, result = spec.split("->")
    x_term, y_term = terms.split(",")
    sizes = dict(zip((*x_term, *y_term), (*x.shape, *y.shape), strict=True))
    if _moved((y_term, x_term), result, sizes) < _moved((x_term, y_term), result, sizes):
        x_term, y_term, x, y = y_term, x_term, y, x
    shared, own_of_x, own_of_y, summed = _kinds((x_term, y_term), result)
    by_columns = [*shared, *own_of_y, *summed] == list(y_term)
    # Axes of a batch that devices split cannot be one axis.
    batch = [[axis] for axis in shared] if activations_are_sharded() else [shared] * bool(shared)
    x = _in_order(x, x_term, [*batch, own_of_x, summed])
    y = _in_order(y, y_term, [*batch, own_of_y, summed] if by_columns else [*batch, summed, own_of_y])
    single = bool(shared) and x.shape[-2] == 1
    if single:
        x = jnp.pad(x, [(0, int(axis == x.ndim - 2)) for axis in range(x.ndim)])
    x, y = jax.lax.optimization_barrier((x, y))
    batch_axes = tuple(range(len(batch)))
    summed_axes = (x.ndim - 1,), (y.ndim - 1 if by_columns else y.ndim - 2,)
    dimensions = summed_axes, (batch_axes, batch_axes)
    product = jax.lax.dot_general(x, y, dimensions, preferred_element_type=sums)
    product = jax.lax.optimization_barrier(product)
    if single:
        product = jax.lax.slice_in_dim(product, 0, 1, axis=product.ndim - 2)
    axes = [*shared, *own_of_x, *own_of_y]
    product = product.reshape([sizes[axis] for axis in axes])
    if axes == list(result):
        return product
    return _in_order(product, "".join(axes), [[axis] for axis in result])


def _kinds(terms: tuple[str, str], result: str) -> tuple[list[str], list[str], list[str], list[str]]:
    """Sort the axes of an einsum: shared ones, own ones of the first and second operand, summed ones."""
    x_term, y_term = terms
    shared = [axis for axis in result if axis in x_term and axis in y_term]
    summed = [axis for axis in x_term if axis in y_term and axis not in result]
    own_of_x, own_of_y = ([a for a in result if a in term and a not in shared] for term in terms)
    return shared, own_of_x, own_of_y, summed


def _moved(terms: tuple[str, str], result: str, sizes: Mapping[str, int]) -> int:
    """Count the numbers that are transposed in memory to multiply rows of the first operand."""
    x_term, y_term = terms
    shared, own_of_x, own_of_y, summed = _kinds(terms, result)
    moved = [
        (x_term, [[*shared, *own_of_x, *summed]]),
        (y_term, [[*shared, *summed, *own_of_y], [*shared, *own_of_y, *summed]]),
        (result, [[*shared, *own_of_x, *own_of_y]]),
    ]
    return sum(math.prod(sizes[axis] for axis in term) for term, orders in moved if list(term) not in orders)


def _in_order(x: Array, term: str, groups: Sequence[Sequence[str]]) -> Array:
    """Transpose x from the order of axes in `term` to that of the groups, each of which becomes one axis.

    The result is an array of its own in memory, not a view in another layout: a reshaped array has the
    default layout, and costs nothing if it had it before. Where all groups have one axis, an axis is added
    before a barrier and removed after it.
    """
    x = x.transpose([term.index(axis) for group in groups for axis in group])
    sizes = iter(x.shape)
    shape = tuple(math.prod(next(sizes) for _ in group) for group in groups)
    return x.reshape(shape) if shape != x.shape else jax.lax.optimization_barrier(x[None])[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def add_bias(product: Array, bias: Array, dtype: DTypeLike) -> Array:
    """Add a float32 bias [*features] to a product [..., *features] of `contract`, and cast the sum to dtype.

    The gradient of the bias is summed in float32.
    """
    return (product + bias).astype(dtype)


def _add_bias_forward(product: Array, bias: Array, dtype: DTypeLike) -> tuple[Array, tuple[int, ...]]:
    return add_bias(product, bias, dtype), bias.shape


def _add_bias_backward(dtype: DTypeLike, shape: tuple[int, ...], gradient: Array) -> tuple[Array, Array]:
    del dtype  # that of the gradient
    return gradient.astype(jnp.float32), sum_rows(gradient, len(shape))


add_bias.defvjp(_add_bias_forward, _add_bias_backward)


def sum_rows(x: Array, features: int) -> Array:
    """Sum x [..., *features] over all but the last `features` axes, in float32; not to be differentiated.

    On CPUs the sum of bfloat16 numbers is a product with ones: XLA would write a float32 copy of x, and read
    that.
    """

    def reduce(x: Array) -> Array:
        return x.sum(range(x.ndim - features), dtype=jnp.float32)

    def multiply(x: Array) -> Array:
        matrix = x.reshape(-1, math.prod(x.shape[x.ndim - features :]))
        ones = jnp.ones((_ROWS_OF_ONES, matrix.shape[0]), x.dtype)
        return multiply_rows("NT,TF->NF", ones, matrix)[0].reshape(x.shape[x.ndim - features :])

    if x.dtype != jnp.bfloat16 or activations_are_sharded():
        return reduce(x)
    return jax.lax.platform_dependent(x, cpu=multiply, default=reduce)


def as_bits(x: Array) -> Array:
    """Represent bfloat16 numbers as unsigned integers, for arrays that loops update; others stay as they are.

    XLA's CPU compiler computes updates of bfloat16 arrays in float32, and then copies and converts the whole
    array instead of writing a slice of it in place.
    """
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def from_bits(x: Array) -> Array:
    """Return the numbers that `as_bits` represents."""
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def take_rows(table: Array, ids: Array) -> Array:
    """Take the rows [..., D] of ids [...] from a table [V, D].

    XLA's CPU compiler gathers no bfloat16: it first converts the whole table to float32, in each call of a
    program. So rows are gathered as bits.
    """
    return _take_by_bits(table, ids) if table.dtype == jnp.bfloat16 else jnp.take(table, ids, axis=0)


@jax.custom_jvp
def _take_by_bits(table: Array, ids: Array) -> Array:
    return from_bits(jnp.take(as_bits(table), ids, axis=0))


@_take_by_bits.defjvp
def _differentiate_rows(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    """Bits have no derivative: without this rule, that of the table would silently be zero."""
    table, ids = primals
    return _take_by_bits(table, ids), jnp.take(tangents[0], ids, axis=0)


def cast_kernels(params: Any, dtype: DTypeLike) -> Any:
    """Cast the matrices of a model's parameters to the dtype of its products; other parameters keep theirs.

    A program that multiplies a matrix many times, as decoding does, then casts it once. The vectors that are
    looked up in a table of embeddings become float32 again. Matrices of 8-bit integers stay as they are.

    Args:
      params: nested dicts of numpy arrays or of JAX arrays, traced or not.
    """

    dtype = jnp.dtype(dtype)

    def cast(path: tuple[Any, ...], leaf: Array) -> Array:
        name = "/".join(key.key for key in path)
        if leaf.dtype in (dtype, jnp.int8) or not _MULTIPLIED.search(name):
            return leaf
        return leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)
