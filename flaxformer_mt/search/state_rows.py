"""Rows of search states: creation, refilling, and moves between states of different sizes.

Contains the axes of each leaf that grow with the token capacity and the source length, and the reordering of
ring buffers of tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flaxformer_mt.search.types import State, take_rows
from flaxformer_mt.shapes import Array

# Source lengths and token capacities at which the shapes of states are compared.
_SHORT, _LONG = 2, 3


class Leaf(NamedTuple):
    """One leaf of a packed state: shape for source length 1 and token capacity 1, and the axes that grow."""

    shape: tuple[int, ...]
    dtype: str
    # Axis whose length is a multiple of the token capacity; None: the leaf has none.
    time: int | None
    # Axis whose length is a multiple of the source length; None: the leaf has none.
    source: int | None
    # Fill value where there is no token.
    blank: int = 0


class StateLayout(NamedTuple):
    """Layout of the states of a search, whatever their size; a static argument of compiled programs."""

    leaves: tuple[Leaf, ...]
    structure: Any


class Size(NamedTuple):
    """Size of a state: rows, source positions, and the token capacity of a translation."""

    rows: int
    source_length: int
    capacity: int


def pack(state: State) -> State:
    """Broadcast scalars to one value per row: all leaves are [B, ...], as compiled programs need them."""
    shape = state.done.shape
    cache = state.cache._replace(index=jnp.broadcast_to(state.cache.index, shape))
    return state._replace(step=jnp.broadcast_to(state.step, shape), cache=cache)


def unpack(state: State) -> State:
    """Invert `pack`."""
    return state._replace(step=state.step[0], cache=state.cache._replace(index=state.cache.index[0]))


def find_layout(start: Callable[[int, int], State], *, pad_id: int) -> StateLayout:
    """Derive the layout of states from the changes of their shapes with source length and token capacity.

    Args:
      start: returns a state for a source length and a token capacity; only its shapes are evaluated. The rows
        of its cache have a start step each (`Cache.start_steps`).
      pad_id: fill value of the tokens.
    """
    sizes = ((_SHORT, _SHORT), (_LONG, _SHORT), (_SHORT, _LONG))
    shapes = [jax.eval_shape(lambda size=size: pack(start(*size))) for size in sizes]
    blanks = jax.tree.map(lambda leaf: 0, shapes[0])
    blanks = blanks._replace(tokens=pad_id)
    if blanks.finished is not None:
        blanks = blanks._replace(finished=blanks.finished._replace(tokens=pad_id))
    leaves = []
    for base, longer_source, larger_capacity, blank in zip(
        *map(jax.tree.leaves, (*shapes, blanks)), strict=True
    ):
        source, time = _axis(base.shape, longer_source.shape), _axis(base.shape, larger_capacity.shape)
        shape = list(base.shape[1:])
        for axis in {source, time}:
            if axis is not None:
                assert shape[axis - 1] % _SHORT == 0
                shape[axis - 1] //= _SHORT
        leaves.append(Leaf(tuple(shape), base.dtype.name, time, source, blank))
    return StateLayout(tuple(leaves), jax.tree.structure(shapes[0]))


def _axis(shape: tuple[int, ...], other: tuple[int, ...]) -> int | None:
    changed = [axis for axis, (one, two) in enumerate(zip(shape, other, strict=True)) if one != two]
    assert len(changed) <= 1, f"{shape} and {other} differ in more than one axis"
    return changed[0] if changed else None


def empty_rows(layout: StateLayout, size: Size) -> State:
    """Return a packed state whose rows are all free."""
    leaves = []
    for leaf in layout.leaves:
        shape = [size.rows, *leaf.shape]
        for axis, length in ((leaf.source, size.source_length), (leaf.time, size.capacity)):
            if axis is not None:
                shape[axis] *= length
        leaves.append(jnp.full(shape, leaf.blank, leaf.dtype))
    state: State = jax.tree.unflatten(layout.structure, leaves)
    return state._replace(done=jnp.ones(size.rows, bool))


def move_rows(layout: StateLayout, state: State, rows: Array, *, source_length: int, capacity: int) -> State:
    """Return a packed state of the given rows [N], in that order; a negative index gives a free row.

    Source positions beyond the new source length and all but the last `capacity` tokens are cut off, so
    active lines must fit. At step 6, a ring buffer of capacity 4 that holds the tokens of steps [4 5 2 3]
    becomes [3 4 5] at capacity 3.
    """
    step, before = state.step[0], state.tokens.shape[2]
    positions = jnp.arange(capacity)
    steps = step - 1 - (step - 1 - positions) % capacity  # step of the token at each position
    available, old_positions = steps >= step - before, steps % before

    def move(leaf: Array, spec: Leaf) -> Array:
        if spec.source is not None:
            assert leaf.shape[spec.source] >= source_length * spec.shape[spec.source - 1]
            leaf = jax.lax.slice_in_dim(
                leaf, 0, source_length * spec.shape[spec.source - 1], axis=spec.source
            )
        if spec.time is None or before == capacity:
            return leaf
        unit = spec.shape[spec.time - 1]
        indices = (old_positions[:, None] * unit + jnp.arange(unit)).ravel()
        mask = jnp.repeat(available, unit).reshape(-1, *(1,) * (leaf.ndim - spec.time - 1))
        return jnp.where(mask, jnp.take(leaf, indices, axis=spec.time), spec.blank)

    moved = _map(move, layout, take_rows(state, jnp.maximum(rows, 0)))
    return moved._replace(done=moved.done | (rows < 0))


def widen_rows(layout: StateLayout, state: State, *, rows: int, source_length: int) -> State:
    """Return a packed state [B, ...] padded with zeros to more rows and to longer sources."""

    def widen(leaf: Array, spec: Leaf) -> Array:
        shape = [rows, *leaf.shape[1:]]
        if spec.source is not None:
            shape[spec.source] = source_length * spec.shape[spec.source - 1]
        return jnp.pad(leaf, [(0, new - old) for new, old in zip(shape, leaf.shape, strict=True)])

    return _map(widen, layout, state)


def append_rows(layout: StateLayout, state: State, block: State, first: Array) -> State:
    """Write the packed state `block` into the rows of another from `first` on; its sources may be shorter."""

    def append(leaf: Array, new: Array, spec: Leaf) -> Array:
        if spec.source is not None:
            missing = leaf.shape[spec.source] - new.shape[spec.source]
            new = jnp.pad(new, [(0, missing * (axis == spec.source)) for axis in range(new.ndim)])
        return jax.lax.dynamic_update_slice_in_dim(leaf, new, first, axis=0)

    return _map(append, layout, state, block)


def _map(change: Callable[..., Array], layout: StateLayout, *states: State) -> State:
    leaves = map(change, *map(jax.tree.leaves, states), layout.leaves)
    changed: State = jax.tree.unflatten(layout.structure, list(leaves))
    return changed


def put_rows(layout: StateLayout, state: State, rows: Array, lines: State) -> State:
    """Write lines [N], which may have tokens already, into the rows [N] of an unpacked state.

    Row indices out of range are dropped. If the lines' cache has one beam and the state's has more, the
    lines' tokens are the same for all beams and are written to the first beam.
    """
    capacity, line_capacity = state.tokens.shape[2], lines.tokens.shape[2]
    first = (state.step - 1) % capacity
    # Of each slot of the state: the step of its token, counted as in the lines, whose last step comes now.
    steps = lines.step - 1 - (first - jnp.arange(capacity)) % capacity
    available = (steps >= 0) & (steps >= lines.step - line_capacity)

    def place(line: Array, axis: int, spec: Leaf) -> Array:
        """Return the line's tokens in the slots of the state, each in the first of the state's beams."""
        unit = spec.shape[axis - 1]
        own = line.shape[axis] // line_capacity
        split = line.reshape(*line.shape[:axis], line_capacity, own, *line.shape[axis + 1 :])
        moved = jnp.take(split, steps % line_capacity, axis=axis)
        mask = available.reshape(-1, *(1,) * (moved.ndim - axis - 1))
        moved = jnp.where(mask, moved, jnp.asarray(spec.blank, line.dtype))
        widths = [(0, unit - own if number == axis + 1 else 0) for number in range(moved.ndim)]
        moved = jnp.pad(moved, widths, constant_values=spec.blank)
        return moved.reshape(*line.shape[:axis], capacity * unit, *line.shape[axis + 1 :])

    def put(leaf: Array, line: Array, spec: Leaf) -> Array:
        if leaf.ndim == 0:
            return leaf
        start: list[Array | int] = [0] * leaf.ndim
        if spec.time is not None and line_capacity == 1:
            start[spec.time] = first * spec.shape[spec.time - 1]
        elif spec.time is not None:
            line = place(line, spec.time, spec)
        blank = jnp.full((len(rows), *leaf.shape[1:]), spec.blank, leaf.dtype)
        return leaf.at[rows].set(jax.lax.dynamic_update_slice(blank, line, start), mode="drop")

    start_steps = state.step - lines.prefix_lengths
    lines = lines._replace(cache=lines.cache._replace(start_steps=start_steps))
    return _map(put, layout, state, lines)
