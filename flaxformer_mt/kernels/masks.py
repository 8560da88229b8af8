"""Attention masks, and their rules; masks are bool, True = may attend, broadcastable to [B, H, Q, M].

A model makes the rules once per batch and passes them to all layers; the attention kernel makes a mask from a
rule, or reads the rule itself. Padding is given as a mask or as segment 0.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from flaxformer_mt.kernels.relative_bias import RelativeBias
from flaxformer_mt.shapes import Array, typed


@typed
def make_padding_mask(is_token: Bool[Array, "B M"]) -> Bool[Array, "B 1 1 M"]:
    """Let every query attend to every real token: is_token [[1 1 0]] gives all queries the row [1 1 0]."""
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

    query_segments [[1 2 0]] and memory_segments [[1 1 2]] give
      [[1 1 0]
       [0 0 1]
       [0 0 0]]
    """
    query = jnp.asarray(query_segments)[:, None, :, None]
    memory = jnp.asarray(memory_segments)[:, None, None, :]
    return (query == memory) & (memory > 0)


@typed
def drop_ends(segments: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """Mark the last position of each segment as padding, unless it is the segment's only position.

    [[1 1 1 2 2 3 0]] gives [[1 1 0 2 0 3 0]].
    """
    ends = segments != jnp.pad(segments[:, 1:], ((0, 0), (0, 1)))
    begins = segments != jnp.pad(segments[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(ends & ~begins, 0, segments)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["query_segments", "memory_segments", "bias"],
    meta_fields=["causal", "padded_at_end"],
)
@dataclasses.dataclass(frozen=True)
class MaskRule:
    """The positions that a query may attend to: those in its own segment that are not padding.

    query_segments: int [B, Q]; None: all queries belong to segment 1. memory_segments: int [B, M], 0 for
    padding, or bool, True for tokens; None: all positions belong to segment 1. In batches without padding,
    both are `unpad.Places`. causal: whether a query attends only to its own and to earlier positions.
    padded_at_end: whether the padding of each row follows all of its tokens. bias: added to the scores of
    positions that a query may attend to; None: nothing.
    """

    query_segments: Any = None
    memory_segments: Any = None
    causal: bool = False
    padded_at_end: bool = False
    bias: RelativeBias | None = None

    def dense(self, length: int) -> Array | None:
        """Make the mask for `length` queries; None if every query may attend to all positions."""
        mask = make_causal_mask(length) if self.causal else None
        if self.memory_segments is None:
            return mask
        if self.query_segments is None:
            allowed = make_padding_mask(self._is_token())
        else:
            allowed = make_segment_mask(self.query_segments, self.memory_segments)
        return allowed if mask is None else allowed & mask

    def segments(self, query: Array, keys: Array) -> tuple[Array, Array]:
        """Return the segments of all queries [B, Q] and attended positions [B, M] as int32."""
        present = (self.query_segments, self.memory_segments)
        shapes = (query.shape[:2], keys.shape[:2])
        ones = (jnp.ones(shape, jnp.int32) for shape in shapes)
        query_segments, memory_segments = (
            one if segments is None else jnp.asarray(segments).astype(jnp.int32)
            for segments, one in zip(present, ones, strict=True)
        )
        return query_segments, memory_segments

    def memory_lengths(self) -> Array | None:
        """Count the attended tokens of each row, [B], at least 1; None if counts do not determine the mask.

        The minimum is 1 because kernels that take lengths give no result for a row without tokens, such as a
        row that only fills up the batch.
        """
        if self.query_segments is not None or not self.padded_at_end or self.memory_segments is None:
            return None
        return jnp.maximum(1, self._is_token().sum(axis=1, dtype=jnp.int32))

    def _is_token(self) -> Array:
        segments = jnp.asarray(self.memory_segments)
        return segments if segments.dtype == jnp.bool_ else segments > 0
