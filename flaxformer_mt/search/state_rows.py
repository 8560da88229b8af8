"""States whose rows come and go: rows are emptied, filled with other lines, and given more or less room.

Owns where in each leaf of a state time runs and where the source lies, and how rings of tokens are laid out
anew. Knows neither how a search works, nor text, nor models.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flaxformer_mt.search.types import State, take_rows
from flaxformer_mt.shapes import Array

# Of sources and of rooms whose states are compared.
_SHORT, _LONG = 2, 3


class Leaf(NamedTuple):
    """One leaf of a packed state: its shape for a source and a room of one token, and which axes grow."""

    shape: tuple[int, ...]
    dtype: str
    # As many times as long as there is room for tokens; None: the leaf has nothing to do with them.
    time: int | None
    # As long as the source.
    source: int | None
    # What stands where there is no token.
    blank: int = 0


class Layout(NamedTuple):
    """Where things are in the states of a search, whatever their size; a static argument of programs."""

    leaves: tuple[Leaf, ...]
    structure: Any


class Size(NamedTuple):
    """Of a state: rows, positions of sources, and for how many tokens of a translation there is room."""

    rows: int
    source_length: int
    room: int


def pack(state: State) -> State:
    """The same with a row's worth of every number: all leaves [B, ...], as a program takes and gives them."""
    shape = state.done.shape
    cache = state.cache._replace(index=jnp.broadcast_to(state.cache.index, shape))
    return state._replace(step=jnp.broadcast_to(state.step, shape), cache=cache)


def unpack(state: State) -> State:
    """What `pack` was given."""
    return state._replace(step=state.step[0], cache=state.cache._replace(index=state.cache.index[0]))


def find_layout(start: Callable[[int, int], State], *, pad_id: int) -> Layout:
    """The layout of states from how their shapes change with the lengths of the source and the room.

    Args:
      start: gives a state for a source of so many positions and room for so many tokens; its shapes alone
        are looked at. The cache of a row begins at a step of its own (`Cache.begun`).
    """
    sizes = ((_SHORT, _SHORT), (_LONG, _SHORT), (_SHORT, _LONG))
    shapes = [jax.eval_shape(lambda size=size: pack(start(*size))) for size in sizes]
    blanks = jax.tree.map(lambda leaf: 0, shapes[0])
    blanks = blanks._replace(tokens=pad_id)
    if blanks.finished is not None:
        blanks = blanks._replace(finished=blanks.finished._replace(tokens=pad_id))
    leaves = []
    for base, other_source, other_room, blank in zip(*map(jax.tree.leaves, (*shapes, blanks)), strict=True):
        source, time = _axis(base.shape, other_source.shape), _axis(base.shape, other_room.shape)
        shape = list(base.shape[1:])
        for axis in {source, time}:
            if axis is not None:
                assert shape[axis - 1] % _SHORT == 0
                shape[axis - 1] //= _SHORT
        leaves.append(Leaf(tuple(shape), base.dtype.name, time, source, blank))
    return Layout(tuple(leaves), jax.tree.structure(shapes[0]))


def _axis(shape: tuple[int, ...], other: tuple[int, ...]) -> int | None:
    changed = [axis for axis, (one, two) in enumerate(zip(shape, other, strict=True)) if one != two]
    assert len(changed) <= 1, f"{shape} and {other} differ in more than one axis"
    return changed[0] if changed else None


def empty_rows(layout: Layout, size: Size) -> State:
    """A packed state without a line: all its rows are free."""
    leaves = []
    for leaf in layout.leaves:
        shape = [size.rows, *leaf.shape]
        for axis, length in ((leaf.source, size.source_length), (leaf.time, size.room)):
            if axis is not None:
                shape[axis] *= length
        leaves.append(jnp.full(shape, leaf.blank, leaf.dtype))
    state: State = jax.tree.unflatten(layout.structure, leaves)
    return state._replace(done=jnp.ones(size.rows, bool))


def move_rows(layout: Layout, state: State, rows: Array, *, source_length: int, room: int) -> State:
    """A packed state of the rows [N] that are named, in that order; of those below 0 it knows nothing: free.

    What lies behind the new source length is cut off, and so is all but the last `room` tokens: nobody must
    have more. At step 6 a ring of 4 places, [4 5 2 3] by the steps of its tokens, becomes [3 4 5] with room
    for 3.
    """
    step, before = state.step[0], state.tokens.shape[2]
    places = jnp.arange(room)
    steps = step - 1 - (step - 1 - places) % room  # of the token that each place is for
    known, olds = steps >= step - before, steps % before

    def move(leaf: Array, own: Leaf) -> Array:
        if own.source is not None:
            assert leaf.shape[own.source] >= source_length * own.shape[own.source - 1]
            leaf = jax.lax.slice_in_dim(leaf, 0, source_length * own.shape[own.source - 1], axis=own.source)
        if own.time is None or before == room:
            return leaf
        unit = own.shape[own.time - 1]
        within = (olds[:, None] * unit + jnp.arange(unit)).ravel()
        there = jnp.repeat(known, unit).reshape(-1, *(1,) * (leaf.ndim - own.time - 1))
        return jnp.where(there, jnp.take(leaf, within, axis=own.time), own.blank)

    moved = _map(move, layout, take_rows(state, jnp.maximum(rows, 0)))
    return moved._replace(done=moved.done | (rows < 0))


def widen_rows(layout: Layout, state: State, *, rows: int, source_length: int) -> State:
    """A packed state [B, ...] with more rows behind its own, and longer sources; what is new is 0."""

    def widen(leaf: Array, own: Leaf) -> Array:
        shape = [rows, *leaf.shape[1:]]
        if own.source is not None:
            shape[own.source] = source_length * own.shape[own.source - 1]
        return jnp.pad(leaf, [(0, new - old) for new, old in zip(shape, leaf.shape, strict=True)])

    return _map(widen, layout, state)


def append_rows(layout: Layout, state: State, block: State, first: Array) -> State:
    """A packed state [B, ...] with another in its rows from `first` on, whose sources may be shorter."""

    def append(leaf: Array, new: Array, own: Leaf) -> Array:
        if own.source is not None:
            missing = leaf.shape[own.source] - new.shape[own.source]
            new = jnp.pad(new, [(0, missing * (axis == own.source)) for axis in range(new.ndim)])
        return jax.lax.dynamic_update_slice_in_dim(leaf, new, first, axis=0)

    return _map(append, layout, state, block)


def _map(change: Callable[..., Array], layout: Layout, *states: State) -> State:
    leaves = map(change, *map(jax.tree.leaves, states), layout.leaves)
    changed: State = jax.tree.unflatten(layout.structure, list(leaves))
    return changed


def put_rows(layout: Layout, state: State, rows: Array, lines: State) -> State:
    """A state, not packed, in which lines [N] that have a token at most take the rows [N].

    Rows that there are not get nothing. The lines' cache may have one beam where the state's has more: then
    their token was the same for all beams, and is the first beam's.
    """
    first = (state.step - 1) % state.tokens.shape[2]

    def put(leaf: Array, line: Array, own: Leaf) -> Array:
        if leaf.ndim == 0:
            return leaf
        start: list[Array | int] = [0] * leaf.ndim
        if own.time is not None:
            start[own.time] = first * own.shape[own.time - 1]
        blank = jnp.full((len(rows), *leaf.shape[1:]), own.blank, leaf.dtype)
        return leaf.at[rows].set(jax.lax.dynamic_update_slice(blank, line, start), mode="drop")

    begun = state.step - lines.ages
    lines = lines._replace(cache=lines.cache._replace(begun=begun))
    return _map(put, layout, state, lines)
