"""Matrix products of the network: operands in the compute dtype, sums in float32, forward and backward.

Every product of activations in model/ is a call of `contract`, in training, decoding and scoring. With
model.dtype=bfloat16 the operands are bfloat16; results and the gradients of parameters are float32. So no
score is rounded before the softmax, and no gradient of a kernel before it is summed over devices.
"""

import functools
import math
import string
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from flaxformer_mt.model.bfloat16 import narrow
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

# About what it costs to move a number where the last axis of an array changes; where whole rows move, 1.
_COST_OF_COLUMNS = 3


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
    smaller = min(dtypes, key=lambda dtype: jnp.dtype(dtype).itemsize)
    x, y = x.astype(smaller), y.astype(smaller)
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
    return narrow(x_gradient, dtypes[0]), narrow(y_gradient, dtypes[1])


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
    and own and summed ones of y in either order. Of x and y, that one takes the part of x which leaves less
    to move in memory, the result included. The library is chosen before XLA decides on layouts. A plain
    transposition still counts as a view in another layout then, and would send the product to float32; one
    that is folded into the product later makes it fail at run time. So the transposed array, and what comes
    after the product, are kept apart by barriers. The axes of each kind are one axis between the barriers:
    XLA would reshape arrays of more axes there, and two reshapes around a barrier become a copy.
    Nor does the library multiply single rows of a batch, such as those of greedy search: they get a second
    row of zeros.
    """
    terms, result = spec.split("->")
    x_term, y_term = terms.split(",")
    sizes = dict(zip((*x_term, *y_term), (*x.shape, *y.shape), strict=True))
    if _moving_cost((y_term, x_term), result, sizes) < _moving_cost((x_term, y_term), result, sizes):
        x_term, y_term, x, y = y_term, x_term, y, x
    shared, own_of_x, own_of_y, summed = _kinds((x_term, y_term), result)
    rows, columns = [*shared, *summed, *own_of_y], [*shared, *own_of_y, *summed]
    by_columns = _disorder(y_term, columns) < _disorder(y_term, rows)
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


def _moving_cost(terms: tuple[str, str], result: str, sizes: Mapping[str, int]) -> int:
    """Estimate what it costs to bring all arrays into order to multiply rows of the first operand."""
    x_term, y_term = terms
    shared, own_of_x, own_of_y, summed = _kinds(terms, result)
    moved = [
        (x_term, [[*shared, *own_of_x, *summed]]),
        (y_term, [[*shared, *summed, *own_of_y], [*shared, *own_of_y, *summed]]),
        (result, [[*shared, *own_of_x, *own_of_y]]),
    ]
    return sum(
        math.prod(sizes[axis] for axis in term) * min(_disorder(term, order) for order in orders)
        for term, orders in moved
    )


def _disorder(term: str, order: Sequence[str]) -> int:
    """Weigh a transposition by what a number of it costs: 0 if nothing moves, little if whole rows do."""
    if list(term) == list(order):
        return 0
    return 1 if term[-1] == order[-1] else _COST_OF_COLUMNS


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
    return narrow(product + bias, dtype)


def _add_bias_forward(product: Array, bias: Array, dtype: DTypeLike) -> tuple[Array, tuple[int, ...]]:
    return add_bias(product, bias, dtype), bias.shape


def _add_bias_backward(dtype: DTypeLike, shape: tuple[int, ...], gradient: Array) -> tuple[Array, Array]:
    del dtype  # that of the gradient
    return gradient.astype(jnp.float32), sum_rows(gradient, len(shape))


add_bias.defvjp(_add_bias_forward, _add_bias_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def rectify(product: Array, bias: Array | None, kept: Array | None, scale: float, dtype: DTypeLike) -> Array:
    """Add a bias as `add_bias` does, take the positive part, and drop entries that are not `kept`.

    It is the rectifier of Vaswani et al. 2017 (section 3.3) with dropout, in one pass over a product
    [..., *features] of `contract`; the result has dtype `dtype`, both gradients are float32. The gradient is
    that of the result's positive entries, so that neither the sum nor the entries that dropout keeps are
    saved for it, or computed again: sums [1, -1, 2], of which the last is dropped, become [1, 0, 0] times
    the scale, and the gradient of the first one passes.

    Args:
      bias: float32 [*features], or None.
      kept: bool [..., *features]; None: all.
      scale: the factor of what is kept.
    """
    total = jnp.maximum(product if bias is None else product + bias, 0.0) * scale
    return (total if kept is None else jnp.where(kept, total, 0.0)).astype(dtype)


def _rectify_forward(
    product: Array, bias: Array | None, kept: Array | None, scale: float, dtype: DTypeLike
) -> tuple[Array, tuple[Array, int | None]]:
    result = rectify(product, bias, kept, scale, dtype)
    return result, (result, None if bias is None else bias.ndim)


def _rectify_backward(
    scale: float, dtype: DTypeLike, saved: tuple[Array, int | None], gradient: Array
) -> tuple[Array, Array | None, None]:
    result, features = saved
    passed = jnp.where(result > 0, gradient.astype(jnp.float32) * scale, 0.0)
    gradient = passed.astype(dtype)
    return gradient.astype(jnp.float32), None if features is None else sum_rows(gradient, features), None


rectify.defvjp(_rectify_forward, _rectify_backward)


def sum_rows(x: Array, features: int) -> Array:
    """Sum x [..., *features] over all but the last `features` axes, in float32; not to be differentiated.

    On CPUs the sum of bfloat16 numbers is a product with ones: XLA would write a float32 copy of x, and read
    that.
    """

    def reduce(x: Array) -> Array:
        return x.sum(tuple(range(x.ndim - features)), dtype=jnp.float32)

    def multiply(x: Array) -> Array:
        matrix = x.reshape(-1, math.prod(x.shape[x.ndim - features :]))
        ones = jnp.ones((_ROWS_OF_ONES, matrix.shape[0]), x.dtype)
        return multiply_rows("NT,TF->NF", ones, matrix)[0].reshape(x.shape[x.ndim - features :])

    return _sum_by(multiply, reduce, x)


def sum_columns(x: Array) -> Array:
    """Sum x [..., F] over its last axis, in float32, as `sum_rows` sums; not to be differentiated."""

    def reduce(x: Array) -> Array:
        return x.sum(axis=-1, dtype=jnp.float32)

    def multiply(x: Array) -> Array:
        ones = jnp.ones((x.shape[-1], _ROWS_OF_ONES), x.dtype)
        rows = string.ascii_lowercase[: x.ndim - 1]
        return multiply_rows(f"{rows}F,FN->{rows}N", x, ones)[..., 0]

    return _sum_by(multiply, reduce, x)


def _sum_by(multiply: Callable[[Array], Array], reduce: Callable[[Array], Array], x: Array) -> Array:
    if x.dtype != jnp.bfloat16 or activations_are_sharded():
        return reduce(x)
    return jax.lax.platform_dependent(x, cpu=multiply, default=reduce)


def multiply_and_sum(x: Array, y: Array) -> Array:
    """Sum the products of two float32 arrays [..., D] over the last axis.

    XLA's CPU library takes ten times as long for an array of three axes as for one of two.
    """
    if activations_are_sharded():
        return (x * y).sum(axis=-1)
    width = x.shape[-1]
    return (x.reshape(-1, width) * y.reshape(-1, width)).sum(axis=-1).reshape(x.shape[:-1])
