"""The loop over the chunks of a loss, of which those that are padding alone need not be scored."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flaxformer_mt.losses.target_mixture import Mixture
from flaxformer_mt.model.bfloat16 import as_bits, from_bits, take_rows
from flaxformer_mt.model.unpadding import order_tokens
from flaxformer_mt.shapes import Array, activations_are_sharded

# Hidden states, targets, weights and mixture, each in chunks [chunks, B, width, ...].
Chunks = tuple[Array, Array, Array, Mixture | None]

# From sums and a chunk to the sums with it, and the gradient of its hidden states.
Add = Callable[[Any, Chunks], tuple[Any, Array]]


def scan_chunks(add: Add, start: Any, rows: Chunks) -> tuple[Any, Array]:
    """Add up chunks as `jax.lax.scan(add, start, rows)`; on a CPU, only those with real tokens."""
    scan = functools.partial(jax.lax.scan, add, start)
    if activations_are_sharded():
        return scan(rows)
    return jax.lax.platform_dependent(rows, cpu=functools.partial(scan_real_tokens, add, start), default=scan)


def scan_real_tokens(add: Add, start: Any, rows: Chunks) -> tuple[Any, Array]:
    """Compute what `jax.lax.scan(add, start, rows)` does, without the chunks that would be padding alone.

    Tokens of weight 0 are moved behind the others, so that the last chunks have nothing else: of the weights
    [[1 1 0] [1 0 0] [1 1 1]] in chunks of three tokens, two are scored. A CPU gains by it what padding costs;
    the host of a GPU would wait for the condition of each turn of a loop whose number of turns is computed.

    Args:
      rows: hidden states, targets, weights and mixture in chunks [chunks, B, width, ...].
    """
    hidden, _, weights, _ = rows
    chunks, tokens = weights.shape[0], weights[0].size
    real = weights.ravel() != 0
    number = real.sum()
    order, place = order_tokens(real)
    ordered = jax.tree.map(
        lambda x: take_rows(x.reshape(-1, *x.shape[3:]), order).reshape(chunks, 1, tokens, *x.shape[3:]), rows
    )

    def add_at(index: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
        sums, gradients = carry
        chunk = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), ordered)
        sums, gradient = add(sums, chunk)
        return sums, jax.lax.dynamic_update_index_in_dim(gradients, as_bits(gradient), index, 0)

    gradients = jnp.zeros_like(as_bits(ordered[0]))
    sums, gradients = jax.lax.fori_loop(0, -(-number // tokens), add_at, (start, gradients))
    return sums, take_rows(from_bits(gradients).reshape(-1, hidden.shape[-1]), place).reshape(hidden.shape)
