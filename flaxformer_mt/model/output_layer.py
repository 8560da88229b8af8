"""Logits: of the whole vocabulary, and of shortlists of it."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from flaxformer_mt.kernels import Kernels
from flaxformer_mt.kernels.bfloat16 import take_rows
from flaxformer_mt.kernels.int8 import Quantized, multiply_quantized
from flaxformer_mt.shapes import Array


def make_logits(kernels: Kernels, x: Array, table: Array | Quantized, bias: Array | None) -> Array:
    """Compute float32 logits [..., V] of x [..., D] against the rows of a table [V, D]."""
    spec = "...D,VD->...V"
    if isinstance(table, Quantized):
        scores = multiply_quantized(kernels.integer_product, spec, x, table)
    else:
        scores = kernels.product(spec, x, table)
    return scores if bias is None else scores + bias


class ListedOutput(NamedTuple):
    """Columns of the output layer for the shortlist of each row: those of its own tokens."""

    # float32 in any dtype of the model: so few columns are multiplied faster in float32 on CPUs.
    kernel: Array  # [B, D, C]
    bias: Array | None  # [B, C]
    # Which columns belong to a token; the others are padding.
    listed: Array  # [B, C]


def list_output(table: Array, bias: Array | None, tokens: Array) -> ListedOutput:
    """Gather the output layer's columns of tokens [B, C], which are ids plus 1; 0: padding."""
    ids = jnp.maximum(tokens - 1, 0)
    kernel = jnp.swapaxes(take_rows(table, ids).astype(jnp.float32), 1, 2)
    return ListedOutput(kernel, None if bias is None else jnp.take(bias, ids).astype(jnp.float32), tokens > 0)


def make_listed_logits(
    kernels: Kernels, x: Array, own: ListedOutput, common: tuple[Array, Array | None]
) -> Array:
    """Compute float32 logits [B, W, N + C] of x [B, W, D]: of N common tokens, then of each row's own.

    Args:
      common: rows [N, D] of the table of the output layer, and their biases [N].
    """
    scores = kernels.product("BWD,BDC->BWC", x.astype(jnp.float32), own.kernel)
    scores = scores if own.bias is None else scores + own.bias[:, None]
    scores = jnp.where(own.listed[:, None], scores, -jnp.inf)
    return jnp.concatenate([make_logits(kernels, x, *common), scores], axis=-1)


def find_output(params: dict[str, Any]) -> Quantized | None:
    """Return the quantised table [V, D] of the output layer, or None if parameters are not quantised."""
    return Quantized(params["output_int8"], params["output_scale"]) if "output_int8" in params else None
