"""Batches of token ids as one integer array, so that a batch needs only one transfer to each device.

Masks, shifted inputs, segments and positions are computed from this array on the devices, inside the program
that uses them.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.corpus.columns import NO_SENTENCES, Column, Layout, Places
from flaxformer_mt.corpus.pairs import Side
from flaxformer_mt.data.batching import PlannedBatch
from flaxformer_mt.data.buckets import Shape
from flaxformer_mt.data.token_store import TokenStore
from flaxformer_mt.shapes import Array, Batch

# In place of a token: padding.
_PADDING = -1


class TokenRows(NamedTuple):
    """Computes masks, segments and positions of one side of a `BatchArray` from its `numbers` [B, L]."""

    numbers: Array

    @property
    def mask(self) -> Array:
        return self.numbers >= 0

    @property
    def first(self) -> Array:
        return self.mask & (self.numbers & 1 == 1)

    def segments(self, xp: Any) -> Array:
        """Return the number of each token's sentence within its row, counted from 1; 0: padding."""
        return xp.where(self.mask, xp.cumsum(self.first, axis=1, dtype=np.int32), 0)

    def positions(self, xp: Any) -> Array:
        index = xp.arange(self.numbers.shape[1], dtype=np.int32)[None]
        begin = xp.where(self.first, index, 0)
        begin = np.maximum.accumulate(begin, axis=1) if xp is np else jax.lax.cummax(begin, axis=1)
        return xp.where(self.mask, index - begin, 0)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["numbers", "columns"],
    meta_fields=["source_length", "packed", "pad_id", "bos_id", "unpadded"],
)
@dataclass(frozen=True)
class BatchArray:
    """The tokens of a batch as numbers [B, S + T] of type int32, source first.

    A token is 2 * id, plus 1 if it is the first of its sentence; padding is -1.

    source_length: S. packed: whether the batch has segments and positions. columns: further arrays of the
    `Batch`, such as alignments, by field name. unpadded: if programs are to compute without padding, the
    sizes of the arrays of source and target tokens, which must hold all tokens of the batch.
    """

    numbers: Array
    source_length: int
    packed: bool
    pad_id: int
    bos_id: int
    columns: Mapping[str, Any] = field(default_factory=dict)
    unpadded: tuple[int, int] | None = None

    @property
    def shape(self) -> Shape:
        rows, length = self.numbers.shape
        return Shape(rows, self.source_length, length - self.source_length)

    @property
    def sides(self) -> tuple[TokenRows, TokenRows]:
        source, target = self.numbers[:, : self.source_length], self.numbers[:, self.source_length :]
        return TokenRows(source), TokenRows(target)

    def to_batch(self, xp: Any = jnp) -> Batch:
        """Compute the `Batch`; `xp` is jax.numpy inside a program for the devices, or numpy on the host."""
        source, target = self.sides
        ids, target_out = (xp.where(side.mask, side.numbers >> 1, self.pad_id) for side in self.sides)
        before = xp.pad(target_out, ((0, 0), (1, 0)))[:, :-1]
        target_in = xp.where(target.first, self.bos_id, before)
        batch = Batch(
            source=ids,
            target_in=xp.where(target.mask, target_in, self.pad_id),
            target_out=target_out,
            source_mask=source.mask,
            target_mask=target.mask,
            **self.columns,
        )
        if not self.packed:
            return batch
        return batch._replace(
            source_segments=source.segments(xp),
            target_segments=target.segments(xp),
            source_positions=source.positions(xp),
            target_positions=target.positions(xp),
        )


def as_batch(batch: Batch | BatchArray) -> Batch:
    return batch.to_batch() if isinstance(batch, BatchArray) else batch


class RowShare(NamedTuple):
    """Selects blocks of rows, by index, from a batch that is cut into `parts` equal blocks."""

    parts: int
    blocks: tuple[int, ...]


ALL_ROWS = RowShare(1, (0,))


def make_batch(
    store: TokenStore, planned: PlannedBatch, *, pad_id: int, bos_id: int, share: RowShare = ALL_ROWS
) -> BatchArray:
    """Build a batch from token ids; rows without a pair are padding. Only the rows of `share` are built."""
    planned = _take_rows(planned, share)
    rows, source, target = planned.shape
    numbers = np.full((rows, source + target), _PADDING, np.int32)
    layout = Layout(
        planned.examples,
        planned.rows,
        _fill(numbers[:, :source], store.source, planned),
        _fill(numbers[:, source:], store.target, planned),
        planned.shape,
    )
    columns = {name: column.lay_out(layout) for name, column in store.columns.items()}
    return BatchArray(numbers, source, planned.packed, pad_id, bos_id, columns)


def make_empty_batch(shape: Shape, columns: Mapping[str, Column], *, packed: bool, **ids: Any) -> BatchArray:
    """Make a batch that has only padding, to compile programs for its shape."""
    none = np.zeros(0, np.int64)
    store = TokenStore(None, NO_SENTENCES, NO_SENTENCES, columns=columns)
    return make_batch(store, PlannedBatch(none, none, shape, packed), **ids)


def pad_pairs(
    sources: Sequence[Any], targets: Sequence[Any], least: tuple[int, int, int] = (0, 0, 0), **ids: Any
) -> BatchArray:
    """Make a batch with one pair of token ids per row; its shape is at least `least` in each dimension."""
    store, numbers = TokenStore.of_ids(sources, targets), np.arange(len(targets))
    sizes = len(targets), store.source_lengths.max(initial=0), store.target_lengths.max(initial=0)
    shape = Shape(*(max(int(size), wanted) for size, wanted in zip(sizes, least, strict=True)))
    return make_batch(store, PlannedBatch(numbers, numbers, shape), **ids)


def _take_rows(planned: PlannedBatch, share: RowShare) -> PlannedBatch:
    """Keep the rows of a share and renumber them from 0.

    For example, if rows 0 to 3 form 4 parts and the share is (1, 3), rows 1 and 3 become 0 and 1. Rows of
    padding are added if the number of rows is not divisible by the number of parts.
    """
    if share == ALL_ROWS:
        return planned
    height = -(-planned.shape.rows // share.parts)
    new_numbers = np.full(share.parts, -1)
    new_numbers[list(share.blocks)] = np.arange(len(share.blocks))
    new_part = new_numbers[planned.rows // height]
    inside = new_part >= 0
    own_rows = new_part[inside] * height + planned.rows[inside] % height
    shape = planned.shape._replace(rows=height * len(share.blocks))
    return planned._replace(shape=shape, examples=planned.examples[inside], rows=own_rows)


def _fill(numbers: np.ndarray, side: Side, planned: PlannedBatch) -> Places:
    """Write the sentences of one side into `numbers`, by array indexing instead of a loop over sentences.

    Returns the places of the tokens: sentences of 2, 3 and 1 tokens in rows 0, 0 and 1 give
    rows 0 0 0 0 0 1, columns 0 1 2 3 4 0, firsts 0 2 5.
    """
    tokens, lengths = side.take(planned.examples)
    firsts = np.cumsum(lengths) - lengths
    positions = np.arange(len(tokens)) - np.repeat(firsts, lengths)
    # The sentences of a row are adjacent, so a search finds the first sentence of each row.
    first_of_row = firsts[np.searchsorted(planned.rows, planned.rows)]
    columns = positions + np.repeat(firsts - first_of_row, lengths)
    places = Places(np.repeat(planned.rows, lengths), columns, lengths, firsts)
    numbers[places.rows, columns] = tokens.astype(np.int32) * 2 + (positions == 0)
    return places
