"""Operations on bfloat16 arrays other than products: in-place updates, row lookups and casts of parameters.

They avoid what XLA's CPU compiler does slowly with such arrays. Products are in matmul.py.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from flaxformer_mt.shapes import Array

# Paths of the parameters that products multiply.
_MULTIPLIED = re.compile(r"(kernel|_embedding/embedding)$")


def as_bits(x: Array) -> Array:
    """View bfloat16 numbers as unsigned integers, for arrays that loops update; keep other dtypes.

    XLA's CPU compiler computes updates of bfloat16 arrays in float32, and then copies and converts the whole
    array instead of writing a slice of it in place.
    """
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def from_bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def take_rows(table: Array, ids: Array) -> Array:
    """Take the rows [..., D] with indices `ids` [...] from a table [V, D].

    XLA's CPU compiler cannot gather bfloat16: it first converts the whole table to float32, in each call of a
    program. So rows are gathered as bits.
    """
    return _take_by_bits(table, ids) if table.dtype == jnp.bfloat16 else jnp.take(table, ids, axis=0)


@jax.custom_jvp
def _take_by_bits(table: Array, ids: Array) -> Array:
    return from_bits(jnp.take(as_bits(table), ids, axis=0))


@_take_by_bits.defjvp
def _differentiate_rows(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    """Differentiate with respect to the table; without this rule, the gradient would silently be 0."""
    table, ids = primals
    return _take_by_bits(table, ids), jnp.take(tangents[0], ids, axis=0)


def cast_kernels(params: Any, dtype: DTypeLike) -> Any:
    """Cast a model's matrices to the dtype in which they are multiplied; keep other parameters as they are.

    A program that multiplies by a matrix many times, as decoding does, then casts it only once. Vectors
    looked up in an embedding table become float32 again. Matrices of 8-bit integers stay unchanged.
    """

    dtype = jnp.dtype(dtype)

    def cast(path: tuple[Any, ...], leaf: Array) -> Array:
        name = "/".join(key.key for key in path)
        if leaf.dtype in (dtype, jnp.int8) or not _MULTIPLIED.search(name):
            return leaf
        return leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)
