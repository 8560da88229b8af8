"""A batch as one array of integers, so that a batch is one transfer to each device.

The devices make masks, shifted inputs, segments and positions from it, inside the program that uses them.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.shapes import Array, Batch, TeacherTokens

# In place of a token: padding.
_PADDING = -1


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["numbers", "target_weights", "alignment", "teacher"],
    meta_fields=["source_length", "packed", "pad_id", "bos_id", "unpadded"],
)
@dataclasses.dataclass(frozen=True)
class BatchArray:
    """The tokens of a batch as numbers [B, S + T] of type int32, source first.

    A token is 2 * id, plus 1 if it is the first of its sentence; padding is -1. source_length: S. packed:
    whether the batch has segments and positions. pad_id, bos_id, target_weights, alignment, teacher: as in
    the `Batch`. unpadded: sizes of the arrays of source and target tokens, at least as many as there are, if
    programs are to compute tokens without padding.
    """

    numbers: Array
    source_length: int
    packed: bool
    pad_id: int
    bos_id: int
    target_weights: Array | None = None
    alignment: Array | None = None
    teacher: TeacherTokens | None = None
    unpadded: tuple[int, int] | None = None

    def to_batch(self) -> Batch:
        """Compute the arrays of the batch, inside a program for the devices."""
        source = _read_side(self.numbers[:, : self.source_length], self.pad_id)
        target = _read_side(self.numbers[:, self.source_length :], self.pad_id)
        before = jnp.pad(target.tokens, ((0, 0), (1, 0)))[:, :-1]
        target_in = jnp.where(target.first, self.bos_id, before)
        batch = Batch(
            source=source.tokens,
            target_in=jnp.where(target.mask, target_in, self.pad_id),
            target_out=target.tokens,
            source_mask=source.mask,
            target_mask=target.mask,
            target_weights=self.target_weights,
            alignment=self.alignment,
            teacher=self.teacher,
        )
        if not self.packed:
            return batch
        return batch._replace(
            source_segments=source.segments(),
            target_segments=target.segments(),
            source_positions=source.positions(),
            target_positions=target.positions(),
        )


@dataclasses.dataclass(frozen=True)
class _Side:
    """One side of a batch, [B, L]: ids with padding, where tokens are, and where sentences begin."""

    tokens: Array
    mask: Array
    first: Array

    def segments(self) -> Array:
        """Number of each token's sentence within its row, from 1; 0: padding."""
        return jnp.where(self.mask, jnp.cumsum(self.first, axis=1, dtype=jnp.int32), 0)

    def positions(self) -> Array:
        index = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None]
        begin = jax.lax.cummax(jnp.where(self.first, index, 0), axis=1)
        return jnp.where(self.mask, index - begin, 0)


def _read_side(numbers: Array, pad_id: int) -> _Side:
    mask = numbers >= 0
    return _Side(jnp.where(mask, numbers >> 1, pad_id), mask, mask & (numbers & 1 == 1))


def to_array(
    batch: Batch, *, pad_id: int, bos_id: int, unpadded: tuple[int, int] | None = None
) -> BatchArray:
    """Write a batch of `make_batch`, on the host, as one array; with shapes in place of arrays, its shape."""
    fields: dict[str, Any] = {
        "source_length": batch.source.shape[1],
        "packed": batch.source_segments is not None,
        "pad_id": pad_id,
        "bos_id": bos_id,
        "target_weights": batch.target_weights,
        "alignment": batch.alignment,
        "teacher": batch.teacher,
        "unpadded": unpadded,
    }
    shape = (batch.source.shape[0], batch.source.shape[1] + batch.target_out.shape[1])
    if isinstance(batch.source, jax.ShapeDtypeStruct):
        only_shape: Any = jax.ShapeDtypeStruct(shape, np.int32)
        return BatchArray(only_shape, **fields)
    numbers = np.empty(shape, np.int32)
    sides = (
        (batch.source, batch.source_mask, batch.source_positions),
        (batch.target_out, batch.target_mask, batch.target_positions),
    )
    begin = 0
    for tokens, mask, positions in sides:
        part = numbers[:, begin : begin + tokens.shape[1]]
        np.multiply(tokens, 2, out=part)
        if positions is None:
            part[:, :1] += 1
        else:
            part += positions == 0
        np.copyto(part, _PADDING, where=~mask)
        begin += tokens.shape[1]
    return BatchArray(numbers, **fields)


def as_batch(batch: Batch | BatchArray) -> Batch:
    return batch.to_batch() if isinstance(batch, BatchArray) else batch
