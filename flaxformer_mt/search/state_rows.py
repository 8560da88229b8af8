"""Rows of search states: their layout, free rows, and lines that enter them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flaxformer_mt.search.types import State
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

    def fit(self, size: "Size") -> tuple[int, ...]:
        """Return the shape of the leaf in a state of a size."""
        shape = [size.rows, *self.shape]
        for axis, length in ((self.source, size.source_length), (self.time, size.capacity)):
            if axis is not None:
                shape[axis] *= length
        return tuple(shape)


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


def find_layout(start: Callable[..., State], *arguments: Any, pad_id: int) -> StateLayout:
    """Derive the layout of states from the changes of their shapes with source length and token capacity.

    Args:
      start: returns a packed state for a source length, a token capacity and the arguments; only its shapes
        are evaluated. The rows of its cache have a start step each (`Cache.start_steps`).
      arguments: arrays or their shapes.
      pad_id: fill value of the tokens.
    """
    sizes = ((_SHORT, _SHORT), (_LONG, _SHORT), (_SHORT, _LONG))
    shapes = [jax.eval_shape(functools.partial(start, *size), *arguments) for size in sizes]
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
    leaves = [jnp.full(leaf.fit(size), leaf.blank, leaf.dtype) for leaf in layout.leaves]
    state: State = jax.tree.unflatten(layout.structure, leaves)
    return state._replace(done=jnp.ones(size.rows, bool))


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
