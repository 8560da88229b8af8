"""Arrays without padding: only the real tokens of a batch, for layers that compute each token by itself.

On a CPU a padded token costs as much as a real one, and a fifth of a batch may be padding. Projections,
feed-forward layers, norms and residuals need no sentences, so they get the tokens alone, as [R, 32, ...];
attention gets sentences again, [B, T, ...]. Gradients and dropout masks are those of the padded batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from flaxformer_mt.model.bfloat16 import as_bits, from_bits
from flaxformer_mt.model.masks import MaskRule
from flaxformer_mt.shapes import Array, typed

# Tokens of a row. With a single row of all tokens, XLA's CPU library would compute the gradients of norms,
# which are sums of products over tokens, as products of matrices, and take longer.
ROW = 32


class TokenPlaces(NamedTuple):
    """Where the slots of an array with padding, [B, T], are in one without, and the reverse.

    slots: flat index of each entry's slot: those of real tokens, in order, and then some of the padding.
    entries: flat index of each slot's entry; slots of padding without one have numbers beyond the entries.
    """

    slots: Int[Array, "R N"]
    entries: Int[Array, "B T"]


class UnpaddedMask(NamedTuple):
    """A mask of attention between arrays without padding; `mask` is that of the rows."""

    mask: Array | MaskRule | None
    query: TokenPlaces
    memory: TokenPlaces


Mask = Array | MaskRule | UnpaddedMask | None


class BatchPlaces(NamedTuple):
    """The places of both sides of a batch."""

    source: TokenPlaces
    target: TokenPlaces


@typed
def order_tokens(is_token: Bool[Array, "*B"]) -> tuple[Int[Array, "M"], Int[Array, "*B"]]:
    """Order all slots, real tokens first: the slot of each place, and the place of each slot.

    [[1 1 0] [1 0 0]] gives slots [0 1 3 2 4 5] and places [[0 1 3] [2 4 5]].
    """
    real = jnp.ravel(is_token)
    number = real.sum(dtype=jnp.int32)
    places = (
        jnp.where(real, jnp.cumsum(real, dtype=jnp.int32), number + jnp.cumsum(~real, dtype=jnp.int32)) - 1
    )
    slots = jnp.zeros_like(places).at[places].set(jnp.arange(len(places), dtype=places.dtype))
    return slots, places.reshape(is_token.shape)


def find_places(is_token: Array, size: int) -> TokenPlaces:
    """Find the places of a batch's tokens, [B, T], of which there are at most `size`, a multiple of ROW."""
    slots, entries = order_tokens(is_token)
    return TokenPlaces(slots[:size].reshape(-1, ROW), entries)


def remove_padding(x: Array, places: TokenPlaces) -> Array:
    """Take the entries [R, 32, ...] of x [B, T, ...]."""
    flat, slots = x.reshape(-1, *x.shape[2:]), places.slots
    taken = _take_slots(flat, places) if jnp.issubdtype(x.dtype, jnp.inexact) else flat[slots.ravel()]
    return taken.reshape(*slots.shape, *x.shape[2:])


def restore_padding(x: Array, places: TokenPlaces) -> Array:
    """Put the entries of x [R, 32, ...] into their slots, [B, T, ...]; slots without one are 0."""
    taken = _take_entries(x.reshape(-1, *x.shape[2:]), places)
    return taken.reshape(*places.entries.shape, *x.shape[2:])


# Each is the other's transpose. JAX's own would add up rows of zeros one by one.


@jax.custom_vjp
def _take_slots(flat: Array, places: TokenPlaces) -> Array:
    return _rows_at(flat, places.slots.ravel())


@jax.custom_vjp
def _take_entries(entries: Array, places: TokenPlaces) -> Array:
    size = entries.shape[0]
    index = places.entries.ravel()
    rows = _rows_at(entries, jnp.minimum(index, size - 1))
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


def _rows_at(x: Array, rows: Array) -> Array:
    """Take rows of x, as bits (see `take_rows`), at indices that are within it.

    XLA's CPU compiler computes rows together with a transposition beside them, number by number, which takes
    several times as long as one after the other. Barriers keep float32 arrays apart, and bfloat16 gradients.
    """
    bits = jnp.asarray(as_bits(jax.lax.optimization_barrier(x)))
    taken = bits.at[rows].get(mode="promise_in_bounds")
    return jax.lax.optimization_barrier(from_bits(taken))
