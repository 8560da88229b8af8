"""Attention masks: bool, True = may attend, broadcastable to [B, H, Q, M].

A model makes them once per batch and passes them to all layers. Padding arrives as a mask or as segment 0.
"""

import jax.numpy as jnp
from jaxtyping import Bool, Int

from flaxformer_mt.shapes import Array, typed


@typed
def make_padding_mask(is_token: Bool[Array, "B M"]) -> Bool[Array, "B 1 1 M"]:
    """Let every query attend to every real token.

    is_token [[1 1 0]] gives, for each query, the row [1 1 0].
    """
    return jnp.asarray(is_token)[:, None, None, :]


@typed
def make_causal_mask(length: int) -> Bool[Array, "1 1 T T"]:
    """Let a query attend to its own position and to earlier positions.

    length 3 gives
      [[1 0 0]
       [1 1 0]
       [1 1 1]]
    The causal mask also hides target padding from real tokens, as padding follows the last token.
    """
    rows = jnp.arange(length)
    return (rows[:, None] >= rows[None, :])[None, None]


@typed
def make_segment_mask(
    query_segments: Int[Array, "B Q"], memory_segments: Int[Array, "B M"]
) -> Bool[Array, "B 1 Q M"]:
    """Let a query attend within its own segment; segment 0 is padding.

    query_segments [[1 2 0]], memory_segments [[1 1 2]] gives
      [[1 1 0]
       [0 0 1]
       [0 0 0]]
    """
    query = jnp.asarray(query_segments)[:, None, :, None]
    memory = jnp.asarray(memory_segments)[:, None, None, :]
    return (query == memory) & (memory > 0)
