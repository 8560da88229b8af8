"""Removes padding from batches, because on a CPU a padding token costs as much as a real one.

A batch without padding has fewer rows of the same length. Sentences follow each other across the ends of
rows, and `*_segments` of the batch are `Places`. Layers that compute each token separately work unchanged;
attention restores one sentence per row, and removes the padding again afterwards (attention_kernels.py).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from flaxformer_mt.shapes import Array, Batch, typed

# The fields of a batch with one value per target token, besides ids and places.
_OF_TARGET_TOKENS = {*Batch._fields[Batch._fields.index("target_positions") + 1 :]} - {"alignment"}


class Places(NamedTuple):
    """Maps slots of an array with padding, [B, T], to entries of one without padding, [R, T], and back.

    slots: the flat slot index of each entry: first the slots of real tokens in order, then some padding
    slots. entries: the flat entry index of each slot; a padding slot without an entry has an index beyond the
    entries. is_token: whether a slot has a token.
    """

    slots: Int[Array, "R T"]
    entries: Int[Array, "B T"]
    is_token: Bool[Array, "B T"]


def unpad(batch: Batch, sizes: tuple[int, int]) -> Batch:
    """Remove most padding from a batch that has one sentence per row; alignments are not changed.

    `sizes`: the numbers of source and target entries to keep: at least the numbers of real tokens, and
    multiples of the row lengths.
    """
    source = find_places(jnp.asarray(batch.source_mask), sizes[0])
    target = find_places(jnp.asarray(batch.target_mask), sizes[1])

    of_source = functools.partial(remove_padding, places=source)
    of_target = functools.partial(remove_padding, places=target)

    def positions(tokens: Array) -> Array:
        return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)

    return Batch(
        of_source(batch.source),
        of_target(batch.target_in),
        of_target(batch.target_out),
        of_source(batch.source_mask),
        of_target(batch.target_mask),
        source_segments=source,
        target_segments=target,
        source_positions=of_source(positions(batch.source)),
        target_positions=of_target(positions(batch.target_in)),
        alignment=batch.alignment,
        **{name: jax.tree.map(of_target, getattr(batch, name)) for name in _OF_TARGET_TOKENS},
    )


@typed
def find_places(is_token: Bool[Array, "B T"], size: int) -> Places:
    """Return the `Places` of a batch of at most `size` tokens, where `size` is a multiple of T.

    [[1 1 0] [1 0 0]] with size 3 gives slots [[0 1 3]] and entries [[0 1 3] [2 4 5]].
    """
    real = jnp.ravel(is_token)
    number = real.sum(dtype=jnp.int32)
    entries = (
        jnp.where(real, jnp.cumsum(real, dtype=jnp.int32), number + jnp.cumsum(~real, dtype=jnp.int32)) - 1
    )
    slots = jnp.zeros_like(entries).at[entries].set(jnp.arange(len(entries), dtype=entries.dtype))
    return Places(slots[:size].reshape(-1, is_token.shape[1]), entries.reshape(is_token.shape), is_token)


def remove_padding(x: Array, places: Places) -> Array:
    """Pack the tokens of x [B, T, ...] into rows [R, T, ...]."""
    x = jnp.asarray(x)
    flat, slots = x.reshape(-1, *x.shape[2:]), places.slots
    taken = _take_slots(flat, places) if jnp.issubdtype(x.dtype, jnp.inexact) else flat[slots.ravel()]
    return taken.reshape(*slots.shape, *x.shape[2:])


def restore_padding(x: Array, places: Places) -> Array:
    """Unpack the entries x [R, T, ...] into the slots [B, T, ...]; slots without an entry are 0."""
    taken = _take_entries(x.reshape(-1, *x.shape[2:]), places)
    return taken.reshape(*places.entries.shape, *x.shape[2:])


# Each is the other's transpose. JAX's own would add up rows of zeros one by one.


@jax.custom_vjp
def _take_slots(flat: Array, places: Places) -> Array:
    return flat[places.slots.ravel()]


@jax.custom_vjp
def _take_entries(entries: Array, places: Places) -> Array:
    size, index = entries.shape[0], places.entries.ravel()
    rows = entries[jnp.minimum(index, size - 1)]
    exists = (index < size).reshape(-1, *(1,) * (rows.ndim - 1))
    return jnp.where(exists, rows, jnp.zeros((), rows.dtype))


_take_slots.defvjp(
    lambda flat, places: (_take_slots(flat, places), places),
    lambda places, gradient: (_take_entries(gradient, places), None),
)
_take_entries.defvjp(
    lambda entries, places: (_take_entries(entries, places), places),
    lambda places, gradient: (_take_slots(gradient, places), None),
)
