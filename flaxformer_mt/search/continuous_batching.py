"""Continuous batching: when the search of a line ends, its row takes the next line of the queue.

One compiled program searches a whole queue without communication with the host. Lines that are still active
when the program ends continue with the next queue.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from flaxformer_mt.search.required_phrases import follow
from flaxformer_mt.search.search_loop import Search
from flaxformer_mt.search.types import Lines, SearchResult, State, take_rows
from flaxformer_mt.shapes import Array, Cache

# Source lengths and token capacities at which the shapes of states are compared.
_SHORT, _LONG = 2, 3


class Leaf(NamedTuple):
    """A leaf of a packed state: its shape at source length 1 and capacity 1, and the axes that grow."""

    shape: tuple[int, ...]
    dtype: str
    # Axis whose length is a multiple of the token capacity; None: the leaf has none.
    time: int | None
    # Axis whose length is a multiple of the source length; None: the leaf has none.
    source: int | None
    # Fill value where there is no token.
    blank: int = 0

    def fit(self, size: "Size") -> tuple[int, ...]:
        """Return the shape of the leaf in a state of this size."""
        shape = [size.rows, *self.shape]
        for axis, length in ((self.source, size.source_length), (self.time, size.capacity)):
            if axis is not None:
                shape[axis] *= length
        return tuple(shape)


class StateLayout(NamedTuple):
    """Layout of the states of a search, independent of their size; a static argument of compiled programs."""

    leaves: tuple[Leaf, ...]
    structure: Any


class Size(NamedTuple):
    """Size of a state: rows, source positions, and the token capacity of a translation."""

    rows: int
    source_length: int
    capacity: int


def pack(state: State) -> State:
    """Broadcast a state's scalars to shape [B], because compiled programs take only leaves [B, ...]."""
    shape = state.done.shape
    cache = state.cache._replace(index=jnp.broadcast_to(state.cache.index, shape))
    return state._replace(step=jnp.broadcast_to(state.step, shape), cache=cache)


def unpack(state: State) -> State:
    """Undo `pack`: replace its broadcast leaves [B] by scalars."""
    return state._replace(step=state.step[0], cache=state.cache._replace(index=state.cache.index[0]))


def find_layout(start: Callable[..., State], *arguments: Any, pad_id: int) -> StateLayout:
    """Derive the layout of states from how their shapes change with source length and token capacity.

    `start` takes a source length, a token capacity and `arguments`, and returns a packed state; only the
    shapes are evaluated. Each row of the state's cache must have its own start step (`Cache.start_steps`).
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
    """Write the state of N lines, which may already have tokens, into N rows of an unpacked state.

    Row indices out of range are dropped. A line whose cache has a single beam is written to the first beam.
    """
    capacity, line_capacity = state.tokens.shape[2], lines.tokens.shape[2]
    first = (state.step - 1) % capacity
    # The step of the token in each slot of the state, counted as in the lines, whose last step is now.
    steps = lines.step - 1 - (first - jnp.arange(capacity)) % capacity
    available = (steps >= 0) & (steps >= lines.step - line_capacity)

    def place(line: Array, axis: int, spec: Leaf) -> Array:
        """Move the values of each token of a line to the token's slot in the state, in the first beam."""
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


# Lengths of the hypotheses of a line that exceeded the token capacity.
OVER_CAPACITY = -1

# Owner of a free row.
NO_LINE = -1

# More steps than any search takes.
UNLIMITED = 2**31 - 1


class QueueResult(NamedTuple):
    """Result of searching a queue of lines: hypotheses, and the state from which to search the next queue."""

    # Packed, or the leaves of it; rows whose lines are done are free.
    state: Any
    # The active line of each row: i < M of the queue, M + r: line of row r before the queue, or NO_LINE.
    owners: Int[Array, "R"]
    # The hypotheses of the M lines of the queue, then of the R earlier rows; undefined for active lines.
    results: SearchResult


class _Queue(NamedTuple):
    """Loop state of the search of a queue: active lines, finished lines and the position in the queue."""

    state: State
    # Rows that were stopped at the token capacity.
    outgrown: Bool[Array, "R"]
    # The line of each row; M + R: free.
    owners: Int[Array, "R"]
    # Index of the first line that waits.
    next_line: Int[Array, ""]
    # For finished lines: the fields of the state from which results are made.
    ended: State
    # For finished lines: whether they were stopped at the token capacity.
    ended_outgrown: Bool[Array, "M+R"]


def begin_lines(task: Search, cache: Cache, lines: Lines) -> State:
    """Return the packed state of waiting lines before their first token.

    Task and cache have room for one token of one beam; max_lengths are limits for the whole search.
    """
    cache = cache._replace(start_steps=jnp.zeros(lines.max_lengths.shape, jnp.int32))
    if cache.ancestors is not None:
        cache = cache._replace(ancestors=jnp.zeros((len(cache.start_steps), task.width, 1), jnp.int32))
    return pack(task.start(cache, lines, clip=False))


def take_first_step(task: Search, state: State) -> State:
    """Return the state of waiting lines after their first token, computed once for all beams of a line."""

    def next_logits(last: Array, cache: Cache) -> tuple[Array, Cache]:
        """Return the logits [B, 1, V] of the single beam, and the cache expanded to all beams."""
        if cache.ancestors is None:
            logits, after = task.next_logits(last[:, :1], cache)
            return logits, after._replace(per_beam=jax.tree.map(spread, after.per_beam))
        logits, after = task.next_logits(last[:, :1], cache._replace(ancestors=cache.ancestors[:, :1]))
        return logits, after._replace(ancestors=cache.ancestors)

    def spread(leaf: Array) -> Array:
        return jnp.broadcast_to(leaf, (leaf.shape[0], task.width, *leaf.shape[2:]))

    after = replace(task, next_logits=next_logits).step(unpack(state))
    if (ancestors := after.cache.ancestors) is not None:  # the only beam that has tokens is the first
        after = after._replace(cache=after.cache._replace(ancestors=jnp.zeros_like(ancestors)))
    return pack(after)


def search_queue(
    task: Search,
    layout: StateLayout,
    state: State,
    lines: State,
    count: Array,
    final_free_rows: Array,
    *,
    refill: int,
    max_steps: Array | int = UNLIMITED,
) -> QueueResult:
    """Search the first `count` of `lines` in the rows of a state, together with lines already active there.

    Whenever `refill` rows are free (fewer at the end of the queue), the next lines of the queue take these
    rows. The search ends when no line waits and `final_free_rows` rows are free, or after `max_steps` steps.
    Lines are independent of each other, so the result of each line equals the result of searching all lines
    at once.

    A line's max_lengths may exceed the task's max_length, which is the token capacity of the rows. A line
    that needs more tokens is stopped at the capacity, and the lengths of its hypotheses are OVER_CAPACITY.

    With 2 free rows, refill 1, final_free_rows 2 and lines of 3, 1, 1 and 2 tokens, row 0 searches line 0 in
    steps 0 to 2; row 1 searches line 1 in step 0, line 2 in step 1, and line 3 in steps 2 and 3.

    `state` and `lines` are packed, [R, ...] and [M, ...]; see `empty_rows` and `take_first_step`. Lines after
    the first `count` are padding. If max_steps may end the search early, `count` must not exceed the number
    of free rows, so that all lines of the queue are active at the end.
    """
    waiting_lines = unpack(lines)
    first_step = state.step[0]

    def has_time(state: State) -> Array:
        return state.step - first_step < max_steps

    def unfinished(queue: _Queue) -> Array:
        more = (queue.next_line < count) | (queue.state.done.sum() < final_free_rows)
        return more & has_time(queue.state)

    def fill_and_search(queue: _Queue) -> _Queue:
        queue = _fill(layout, queue, waiting_lines, count, refill)
        num_waiting = count - queue.next_line
        free = jnp.where(num_waiting > 0, jnp.minimum(num_waiting, refill), final_free_rows)
        return _run(task, queue, free, has_time)

    queue = _start(unpack(state), len(waiting_lines.done))
    queue = jax.lax.while_loop(unfinished, fill_and_search, queue)
    return _finish(task, _collect(queue, jnp.arange(len(queue.owners))))


def _start(state: State, num_lines: int) -> _Queue:
    """Return the loop state before any line of the queue; active lines of the state get the next numbers."""
    rows = jnp.arange(len(state.done))
    total = num_lines + len(rows)
    ended = jax.tree.map(
        lambda leaf: jnp.zeros((total, *leaf.shape[1:]), leaf.dtype) if leaf.ndim else leaf, _strip(state)
    )
    return _Queue(
        state=state,
        outgrown=jnp.zeros(len(rows), bool),
        owners=jnp.where(state.done, total, num_lines + rows).astype(jnp.int32),
        next_line=jnp.zeros((), jnp.int32),
        ended=ended,
        ended_outgrown=jnp.zeros(total, bool),
    )


def _strip(state: State) -> State:
    """Return the state without its cached arrays, which take most memory; results do not need them."""
    return state._replace(cache=Cache((), (), state.cache.index, start_steps=state.cache.start_steps))


def _fill(layout: StateLayout, queue: _Queue, lines: State, count: Array, refill: int) -> _Queue:
    """Assign waiting lines to the first free rows."""
    out_of_range = len(queue.owners)
    rows = jnp.argsort(~queue.state.done, stable=True)[:refill]
    line_indices = queue.next_line + jnp.arange(len(rows), dtype=jnp.int32)
    taken = queue.state.done[rows] & (line_indices < count)
    queue = _collect(queue, rows)
    new_lines = take_rows(lines, jnp.minimum(line_indices, len(lines.done) - 1))
    rows = jnp.where(taken, rows, out_of_range)
    return queue._replace(
        state=put_rows(layout, queue.state, rows, new_lines),
        outgrown=queue.outgrown.at[rows].set(False, mode="drop"),
        owners=queue.owners.at[rows].set(line_indices, mode="drop"),
        next_line=queue.next_line + taken.sum(),
    )


def _run(task: Search, queue: _Queue, free: Array, has_time: Callable[[State], Array]) -> _Queue:
    """Advance the search until `free` rows are free, or the maximum number of steps is reached."""

    def step(carry: tuple[State, Array]) -> tuple[State, Array]:
        state, outgrown = carry
        state = task.step(state)
        at_capacity = (state.prefix_lengths >= task.max_length) & ~state.done
        return state._replace(done=state.done | at_capacity), outgrown | at_capacity

    state, outgrown = jax.lax.while_loop(
        lambda carry: (carry[0].done.sum() < free) & has_time(carry[0]), step, (queue.state, queue.outgrown)
    )
    return queue._replace(state=state, outgrown=outgrown)


def _collect(queue: _Queue, rows: Array) -> _Queue:
    """Store the results of those `rows` whose lines are done, and mark these rows as free."""
    total = len(queue.ended_outgrown)
    owners = jnp.where(queue.state.done[rows], queue.owners[rows], total)
    collected = take_rows(_strip(queue.state), rows)
    ended = jax.tree.map(
        lambda old, new: old.at[owners].set(new, mode="drop") if new.ndim else new, queue.ended, collected
    )
    return queue._replace(
        ended=ended,
        ended_outgrown=queue.ended_outgrown.at[owners].set(queue.outgrown[rows], mode="drop"),
        owners=queue.owners.at[rows].set(jnp.where(queue.state.done[rows], total, queue.owners[rows])),
    )


def _finish(task: Search, queue: _Queue) -> QueueResult:
    """Return the results of all finished lines, and the state of the active lines."""
    found = task.finish(queue.ended)
    found = found._replace(lengths=jnp.where(queue.ended_outgrown[:, None], OVER_CAPACITY, found.lengths))
    owners = jnp.where(queue.owners == len(queue.ended_outgrown), NO_LINE, queue.owners)
    return QueueResult(pack(queue.state), owners, found)


def align_prefixes(prefixes: Array, *, bos_id: int, pad_id: int) -> tuple[Array, Array, Array]:
    """Return right-aligned prefixes [B, P], decoder inputs [B, P], and the column [B] of each prefix's start.

    With bos 1 and pad 0, prefixes [[5 6 7] [8 -1 -1]] give [[5 6 7] [0 0 8]], [[1 5 6] [0 0 1]] and [0 2].
    """
    length = prefixes.shape[1]
    starts = length - (prefixes >= 0).sum(axis=1)
    places = jnp.arange(length) - starts[:, None]
    aligned = jnp.take_along_axis(prefixes, jnp.maximum(places, 0), axis=1)
    aligned = jnp.where(places >= 0, aligned, pad_id)
    before = jnp.pad(aligned[:, :-1], [(0, 0), (1, 0)], constant_values=pad_id)
    return aligned, jnp.where(places == 0, bos_id, before), starts


def begin_prefixed_lines(
    task: Search, cache: Cache, lines: Lines, logits: Array, attention: Array | None
) -> State:
    """Return the packed state of waiting lines after their prefixes, using a forward pass's outputs.

    The task has a capacity of P + 1 tokens, and the cache has one beam. Logits [B, P, V] predict the tokens
    of the right-aligned prefixes (see `align_prefixes`); attention is [B, P, S].
    """
    symbols, length = task.symbols, logits.shape[1]
    prefixes, _, starts = align_prefixes(lines.prefixes, bos_id=symbols.bos_id, pad_id=symbols.pad_id)
    is_token = jnp.arange(length) >= starts[:, None]
    counts = jnp.arange(length) >= starts[:, None] + symbols.num_free if symbols.num_free else is_token
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    log_probs = jnp.take_along_axis(log_probs, prefixes[..., None], axis=-1)[..., 0]
    sums = jnp.where(counts, log_probs, 0.0).sum(axis=1)
    sums = jnp.where(jnp.isnan(sums), -jnp.inf, sums)[:, None]
    ancestors = jnp.zeros((len(starts), task.width, task.max_length), jnp.int32)
    state = task.start(cache._replace(ancestors=ancestors), lines, clip=False)
    last = jnp.where(starts == length, symbols.bos_id, prefixes[:, -1])
    state = state._replace(
        step=jnp.asarray(length, jnp.int32),
        last=jnp.broadcast_to(last[:, None], state.last.shape),
        tokens=state.tokens.at[:, :, :length].set(prefixes[:, None]),
        log_probs=state.log_probs + sums,
    )
    if state.coverage is not None:
        assert attention is not None
        received = jnp.where(is_token[..., None], attention, 0.0).sum(axis=1)
        state = state._replace(coverage=jnp.broadcast_to(received[:, None], state.coverage.shape))
    return pack(_follow_prefixes(state, prefixes, is_token))


def _follow_prefixes(state: State, prefixes: Array, is_token: Array) -> State:
    """Return the state with `met` and `matched` advanced by the tokens of the prefixes."""
    if state.met is None or state.matched is None:
        return state

    def advance(constraints: Any, column: tuple[Array, Array]) -> tuple[Any, None]:
        tokens, valid = column
        met, matched = constraints
        tokens = jnp.broadcast_to(tokens[:, None], met.shape[:2])
        met_after, matched_after = follow(state.lines.required, met, matched, tokens)
        met = jnp.where(valid[:, None, None], met_after, met)
        return (met, jnp.where(valid[:, None, None, None], matched_after, matched)), None

    (met, matched), _ = jax.lax.scan(advance, (state.met, state.matched), (prefixes.T, is_token.T))
    return state._replace(met=met, matched=matched)
