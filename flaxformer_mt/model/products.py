"""Matrix products of the network: operands in the compute dtype, sums in float32, forward and backward.

Every product of activations in model/ is a call of `contract`, in training, decoding and scoring. With
model.dtype=bfloat16 the operands are bfloat16; results and the gradients of parameters are float32. So no
score is rounded before the softmax, and no gradient of a kernel before it is summed over devices.
"""

import functools
import re
import string
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from flaxformer_mt.shapes import Array

# Paths of the parameters that products multiply.
_MULTIPLIED = re.compile(r"(kernel|_embedding/embedding)$")


def contract(spec: str, x: Array, y: Array) -> Array:
    """Contract x and y as `jnp.einsum(spec, x, y)` does, to float32.

    Operands of different dtypes are multiplied in the narrower one: a kernel is given as the float32
    parameter, or as its copy in the dtype of the activations. Each gradient has the dtype and the layout of
    its operand, and is rounded to no other dtype. (JAX's own rule computes the gradient of a kernel as [F, D]
    and transposes it; on CPUs this first transposes the wider of two large arrays in memory.)

    Args:
      spec: einsum's notation; each letter is in two of the three terms. `...` in the terms of x and of the
        result stands for leading axes of x.
    """
    x, y = jnp.asarray(x), jnp.asarray(y)
    rows = string.ascii_lowercase[: x.ndim - len(spec.partition(",")[0].replace("...", ""))]
    return _contract(spec.replace("...", rows), (x.dtype, y.dtype), x, y)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _contract(spec: str, dtypes: tuple[DTypeLike, DTypeLike], x: Array, y: Array) -> Array:
    return _contract_forward(spec, dtypes, x, y)[0]


def _contract_forward(
    spec: str, dtypes: tuple[DTypeLike, DTypeLike], x: Array, y: Array
) -> tuple[Array, tuple[Array, Array]]:
    narrow = min(dtypes, key=lambda dtype: jnp.dtype(dtype).itemsize)
    x, y = x.astype(narrow), y.astype(narrow)
    return einsum_to_float32(spec, x, y), (x, y)


def _contract_backward(
    spec: str, dtypes: tuple[DTypeLike, DTypeLike], saved: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    x, y = saved
    gradient = gradient.astype(x.dtype)
    terms, result = spec.split("->")
    x_term, y_term = terms.split(",")
    x_gradient = _einsum_in_order(x_term, (result, gradient), (y_term, y))
    y_gradient = _einsum_in_order(y_term, (result, gradient), (x_term, x))
    return x_gradient.astype(dtypes[0]), y_gradient.astype(dtypes[1])


_contract.defvjp(_contract_forward, _contract_backward)


def _einsum_in_order(result: str, *operands: tuple[str, Array]) -> Array:
    """Contract two operands to `result`, first the one with the first axis of its own: no transposition."""
    (first, one), (second, other) = operands
    own = next(letter for letter in result if (letter in first) != (letter in second))
    if own in second:
        first, one, second, other = second, other, first, one
    return einsum_to_float32(f"{first},{second}->{result}", one, other)


def einsum_to_float32(spec: str, x: Array, y: Array) -> Array:
    """Compute `jnp.einsum(spec, x, y)` with sums and a result in float32; it is not to be differentiated.

    XLA's CPU compiler decides early which products of bfloat16 numbers its library computes, and then fails
    at run time if it has folded a transposition into one of them afterwards. There, barriers keep what comes
    before and after a product apart from it.
    """

    def multiply(x: Array, y: Array) -> Array:
        return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)

    def multiply_apart(x: Array, y: Array) -> Array:
        return jax.lax.optimization_barrier(multiply(*jax.lax.optimization_barrier((x, y))))

    if jnp.result_type(x, y) == jnp.float32:
        return multiply(x, y)
    return jax.lax.platform_dependent(x, y, cpu=multiply_apart, default=multiply)


def cast_kernels(params: Any, dtype: DTypeLike) -> Any:
    """Cast the matrices of a model's parameters to the dtype of its products; other parameters keep theirs.

    A program that multiplies a matrix many times, as decoding does, then casts it once. The vectors that are
    looked up in a table of embeddings become float32 again.

    Args:
      params: nested dicts of numpy arrays or of JAX arrays, traced or not.
    """

    dtype = jnp.dtype(dtype)

    def cast(path: tuple[Any, ...], leaf: Array) -> Array:
        name = "/".join(key.key for key in path)
        return leaf.astype(dtype) if leaf.dtype != dtype and _MULTIPLIED.search(name) else leaf

    return jax.tree_util.tree_map_with_path(cast, params)
