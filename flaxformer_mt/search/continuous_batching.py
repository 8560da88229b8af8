"""Continuous batching: a row whose line is done takes the next line of the queue.

One compiled program searches a whole queue without communication with the host. Lines that are still active
at its end continue with the next queue.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from flaxformer_mt.search.search_loop import Search
from flaxformer_mt.search.state_rows import StateLayout, pack, put_rows, unpack
from flaxformer_mt.search.types import Lines, SearchResult, State, take_rows
from flaxformer_mt.shapes import Array, Cache

# Lengths of the hypotheses of a line that exceeded the token capacity.
OVER_CAPACITY = -1

# Owner of a free row.
NO_LINE = -1

# More steps than any search takes.
UNLIMITED = 2**31 - 1


class QueueResult(NamedTuple):
    """Output of the search of a queue: a state that continues with the next queue, and the results."""

    # Packed, or the leaves of it; rows whose lines are done are free.
    state: Any
    # The active line of each row: i < M of the queue, M + r: line of row r before the queue, or NO_LINE.
    owners: Int[Array, "R"]
    # Of the M lines of the queue, then of the R rows before it; undefined for lines that are still active.
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
    # Of finished lines: the parts of the state that results are made of.
    ended: State
    # Of finished lines: whether they were stopped at the token capacity.
    ended_outgrown: Bool[Array, "M+R"]


def begin_lines(task: Search, cache: Cache, lines: Lines) -> State:
    """Return the packed state of waiting lines before their first token.

    Args:
      task: with a capacity of one token (max_length 1).
      cache: with a capacity of one token, of one beam.
      lines: max_lengths are those of the whole search.
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
    """Search `count` lines in the rows of a state, together with the lines that are already active there.

    Whenever `refill` rows are free (fewer at the end of the queue), the next lines of the queue take them.
    The search ends when no line waits and `final_free_rows` rows are free, or after `max_steps` steps. Lines
    are independent of each other, so the result of each line equals the result of a search of all lines at
    once.

    A line's max_lengths may exceed the task's max_length, which is the token capacity of the rows. A line
    that needs more tokens is stopped at the capacity, and all its lengths are OVER_CAPACITY.

    With 2 free rows, refill 1, final_free_rows 2 and lines of 3, 1, 1 and 2 tokens, row 0 searches line 0 in
    steps 0 to 2; row 1 searches line 1 in step 0, line 2 in step 1, and line 3 in steps 2 and 3.

    Args:
      state: packed [R, ...]; see `empty_rows`.
      lines: packed [M, ...]; see `begin_lines` and `take_first_step`.
      count: number of lines in the queue; the other rows of `lines` are padding.
      final_free_rows: number of free rows at which the search ends once no line waits.
      refill: number of free rows that are refilled together.
      max_steps: maximum number of steps; with fewer steps than the whole queue needs, `count` must not exceed
        the free rows, so that all lines of the queue are active when the search ends.
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
    """Return the loop state before any line of the queue; lines of the state are numbered after the queue."""
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
    """Return the state without the contents of its cache, its largest part, which results do not need."""
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
    """Advance the search until `free` rows are free, or no time is left."""

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
    """Store what the results of the given rows need, if their lines are done, and mark these rows as free."""
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
