"""Matrix products of the network: operands in the compute dtype, sums in float32, forward and backward.

Every product of activations is a call of `Product`, in training, decoding and scoring. With
model.dtype=bfloat16 the operands are bfloat16; results and the gradients of parameters are float32. So scores
are not rounded before the softmax, and gradients of kernels are not rounded before they are summed over
devices.
"""

import dataclasses
import functools
import math
import string
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from flaxformer_mt.parallel.sharding import (
    gather,
    gather_after,
    is_gathered,
    is_split,
    sum_to_parts,
)
from flaxformer_mt.shapes import Array

# Approximate cost of moving a number if the last axis of an array changes; 1 if whole rows move.
_COST_OF_COLUMNS = 3


def multiply(spec: str, x: Array, y: Array) -> Array:
    """Compute `jnp.einsum(spec, x, y)` with float32 sums and results; for gradients, use `Product`."""
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)


def multiply_on_cpu(spec: str, x: Array, y: Array) -> Array:
    """Do the same as `multiply`, in the only form that XLA's CPU library really computes in bfloat16."""
    return multiply(spec, x, y) if jnp.result_type(x, y) == jnp.float32 else multiply_rows(spec, x, y)


@dataclasses.dataclass(frozen=True)
class Product:
    """An einsum of two operands with sums in float32, and its gradients.

    multiply: computes one product. gathers_twice: whether parameters that are split over devices are gathered
    again for the backward pass, instead of being kept.
    """

    multiply: Callable[[str, Array, Array], Array] = multiply
    gathers_twice: bool = False

    def __call__(self, spec: str, x: Array, y: Array, *, parameter: bool = False) -> Array:
        """Contract x and y as `jnp.einsum(spec, x, y)` does, to float32.

        Operands of different dtypes are multiplied in the narrower dtype: a kernel is passed as the float32
        parameter, or as its copy in the dtype of the activations. Each gradient has the dtype and layout of
        its operand, and is not rounded to another dtype. (JAX's own rule computes the gradient of a kernel as
        [F, D] and transposes it; on CPUs this first transposes the wider of two large arrays in memory.)

        Args:
          spec: einsum's notation; each letter is in two of the three terms. `...` in the terms of x and of
            the result stands for leading axes of x.
          parameter: whether y is a parameter; its letters must then be from `shapes`. If the parameter is
            split over devices, the devices gather it in the dtype of the product, and each device receives
            its own part of the summed gradient.
        """
        x, y = jnp.asarray(x), jnp.asarray(y)
        rows = string.ascii_lowercase[: x.ndim - len(spec.partition(",")[0].replace("...", ""))]
        return _contract(self, spec.replace("...", rows), (x.dtype, y.dtype), parameter, x, y)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _contract(
    product: Product, spec: str, dtypes: tuple[DTypeLike, DTypeLike], parameter: bool, x: Array, y: Array
) -> Array:
    return _contract_forward(product, spec, dtypes, parameter, x, y)[0]


def _contract_forward(
    product: Product, spec: str, dtypes: tuple[DTypeLike, DTypeLike], parameter: bool, x: Array, y: Array
) -> tuple[Array, tuple[Array, Array]]:
    smaller = min(dtypes, key=lambda dtype: jnp.dtype(dtype).itemsize)
    x_term, y_term, _ = _terms(spec)
    x, narrow = x.astype(smaller), y.astype(smaller)
    if not (parameter and is_gathered(y_term)):
        # The operand as it was given: a loop over layers would keep the cast parameters of all of them.
        return product.multiply(spec, x, narrow), (x, y)
    if product.gathers_twice:
        # Not before the activation: XLA would gather all matrices at once, and keep them.
        return product.multiply(spec, x, gather_after((x, x_term), narrow, y_term)), (x, y)
    whole = gather(narrow, y_term)
    return product.multiply(spec, x, whole), (x, whole)


def _contract_backward(
    product: Product,
    spec: str,
    dtypes: tuple[DTypeLike, DTypeLike],
    parameter: bool,
    saved: tuple[Array, Array],
    gradient: Array,
) -> tuple[Array, Array]:
    x_term, y_term, result = _terms(spec)
    x, y = saved
    gradient, y = gradient.astype(x.dtype), y.astype(x.dtype)
    if parameter and product.gathers_twice:
        y = gather_after((gradient, result), y, y_term)
    x_gradient = _multiply_in_order(product, x_term, (result, gradient), (y_term, y))
    y_gradient = _multiply_in_order(product, y_term, (result, gradient), (x_term, x))
    if parameter:
        y_gradient = sum_to_parts(y_gradient, y_term)
    return x_gradient.astype(dtypes[0]), y_gradient.astype(dtypes[1])


_contract.defvjp(_contract_forward, _contract_backward)


def _terms(spec: str) -> tuple[str, str, str]:
    operands, result = spec.split("->")
    x_term, y_term = operands.split(",")
    return x_term, y_term, result


def _multiply_in_order(product: Product, result: str, *operands: tuple[str, Array]) -> Array:
    """Contract two operands to `result`; pass first the one whose own axis leads, to avoid transposing."""
    (first, one), (second, other) = operands
    own = next(letter for letter in result if (letter in first) != (letter in second))
    if own in second:
        first, one, second, other = second, other, first, one
    return product.multiply(f"{first},{second}->{result}", one, other)


def multiply_rows(spec: str, x: Array, y: Array, *, sums: DTypeLike = jnp.float32) -> Array:
    """Compute an einsum as x @ y or x @ y.T, the products that XLA's CPU library supports in bfloat16.

    int8 is multiplied in the same form, with sums in int32.

    The axes of both operands are brought into this order in memory: for x, the shared axes, the axes that
    only x has, and the summed axes; for y, the shared axes, then its own and the summed axes in either order.
    The roles of x and y are swapped if fewer numbers then have to move in memory, counting the result.

    The library is chosen before XLA decides on layouts. At that point, a plain transposition still counts as
    a view in another layout, and XLA would compute the product in float32; if a transposition is fused into
    the product later, the product fails at run time. So barriers separate the product from the transposed
    arrays and from the operations after it. Between the barriers, the axes of each kind are merged into one:
    XLA would otherwise reshape the arrays there, and two reshapes around a barrier become a copy.

    The library also does not multiply single rows of a batch, as in greedy search, so these get a second row
    of zeros.
    """
    terms, result = spec.split("->")
    x_term, y_term = terms.split(",")
    sizes = dict(zip((*x_term, *y_term), (*x.shape, *y.shape), strict=True))
    if _moving_cost((y_term, x_term), result, sizes) < _moving_cost((x_term, y_term), result, sizes):
        x_term, y_term, x, y = y_term, x_term, y, x
    shared, own_of_x, own_of_y, summed = _kinds((x_term, y_term), result)
    rows, columns = [*shared, *summed, *own_of_y], [*shared, *own_of_y, *summed]
    by_columns = _disorder(y_term, columns) < _disorder(y_term, rows)
    # Axes of which XLA splits one over devices cannot become one axis.
    batch = [[axis] for axis in shared] if is_split() else [shared] * bool(shared)
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
    """Classify the axes of an einsum: shared, only in the first operand, only in the second, and summed."""
    x_term, y_term = terms
    shared = [axis for axis in result if axis in x_term and axis in y_term]
    summed = [axis for axis in x_term if axis in y_term and axis not in result]
    own_of_x, own_of_y = ([a for a in result if a in term and a not in shared] for term in terms)
    return shared, own_of_x, own_of_y, summed


def _moving_cost(terms: tuple[str, str], result: str, sizes: Mapping[str, int]) -> int:
    """Estimate the cost of transposing all arrays for multiplying rows of the first operand."""
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
    """Return the cost of a transposition per array element: 0 if nothing moves, low if whole rows move."""
    if list(term) == list(order):
        return 0
    return 1 if term[-1] == order[-1] else _COST_OF_COLUMNS


def _in_order(x: Array, term: str, groups: Sequence[Sequence[str]]) -> Array:
    """Transpose x from the order of axes in `term` to the order of `groups`; each group becomes one axis.

    The result is a separate array in memory, not a view in another layout. A reshape has this effect, since a
    reshaped array has the default layout; it costs nothing if the layout was already the default. If every
    group has one axis, an axis is added before a barrier and removed after it instead.
    """
    x = x.transpose([term.index(axis) for group in groups for axis in group])
    sizes = iter(x.shape)
    shape = tuple(math.prod(next(sizes) for _ in group) for group in groups)
    return x.reshape(shape) if shape != x.shape else jax.lax.optimization_barrier(x[None])[0]
