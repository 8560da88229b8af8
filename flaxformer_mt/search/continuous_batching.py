"""A search of more lines than it has room for: a line that is done makes room for the next one in the queue.

Owns which line is searched in which row, and what becomes of its result. One compiled program searches a
queue without a word with the host; what is left of it goes on with the next queue, in a program of another
size. Knows neither text nor models.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.search.search_loop import Search
from flaxformer_mt.search.state_rows import Layout, pack, put_rows, unpack
from flaxformer_mt.search.types import Lines, SearchResult, State, take_rows
from flaxformer_mt.shapes import Array, Cache

# Lengths of the hypotheses of a line that there was not enough room for.
OUTGROWN = -1

# The line of a row that is free.
NOBODY = -1


class Searched(NamedTuple):
    """What a queue leaves behind: a state that goes on with the next one, and what was found."""

    # Packed; rows that are done are free.
    state: State
    # The line that is still searched in each row: i < M of the queue, M + r of row r before it, or NOBODY.
    owners: Int[Array, "R"]
    # How many tokens its prefixes have.
    ages: Int[Array, "R"]
    # Of the M lines of the queue, then of the R rows before it; those that are still searched have none.
    results: SearchResult


class _Queue(NamedTuple):
    """Lines that are searched, those that were, and those that wait."""

    state: State
    # Which of the rows were stopped because there is no room for more of their tokens.
    outgrown: Bool[Array, "R"]
    # The line of each row, M + R: nobody's.
    owners: Int[Array, "R"]
    # The first line that waits.
    waiting: Int[Array, ""]
    # Of lines that are done, what their results are made of.
    ended: State
    stopped: Bool[Array, "M+R"]


def shares_first_step(options: SearchConfig) -> bool:
    """Whether all hypotheses of a line begin as one, so that its first token needs computing once."""
    return options.method == "greedy" or (options.method == "beam" and options.diversity_groups == 1)


def begin_lines(task: Search, cache: Cache, lines: Lines) -> State:
    """The packed state of lines before their first token, as they wait for a row.

    Args:
      task: with room for one token (max_length 1).
      cache: with room for one token too; of one beam where `shares_first_step`, of task.width otherwise.
      lines: max_lengths are those of the search.
    """
    cache = cache._replace(begun=jnp.zeros(lines.max_lengths.shape, jnp.int32))
    if cache.ancestors is not None and shares_first_step(task.options):
        cache = cache._replace(ancestors=jnp.zeros((len(cache.begun), task.width, 1), jnp.int32))
    return pack(task.start(cache, lines, clip=False))


def take_first_step(task: Search, state: State) -> State:
    """The same lines after their first token, where all beams of a line share that step."""

    def next_logits(last: Array, cache: Cache) -> tuple[Array, Cache]:
        """Of the only beam there is, [B, 1, V], and the cache as if there were all."""
        if cache.ancestors is None:
            logits, after = task.next_logits(last[:, :1], cache)
            return logits, after._replace(per_beam=jax.tree.map(spread, after.per_beam))
        logits, after = task.next_logits(last[:, :1], cache._replace(ancestors=cache.ancestors[:, :1]))
        return logits, after._replace(ancestors=cache.ancestors)

    def spread(leaf: Array) -> Array:
        return jnp.broadcast_to(leaf, (leaf.shape[0], task.width, *leaf.shape[2:]))

    return pack(replace(task, next_logits=next_logits).step(unpack(state)))


def search_queue(
    task: Search, layout: Layout, state: State, lines: State, count: Array, leave: Array, *, refill: int
) -> Searched:
    """Searches `count` lines in the rows of a state, beside what is searched there already.

    As soon as `refill` rows are free, the next so many lines take them. It ends when none waits any more and
    `leave` rows are free. Each line's result is what it would be if all were searched at once: lines have
    nothing to do with each other.

    A line's max_lengths may be above the task's max_length, which says for how many tokens there is room. One
    that needs more is stopped there, and its lengths are all OUTGROWN.

    With 2 free rows, refill 1, leave 2 and lines of 3, 1, 1 and 2 tokens, row 0 searches line 0 in steps 0 to
    2; row 1 searches line 1 in step 0, line 2 in step 1, and line 3 in steps 2 and 3.

    Args:
      state: packed [R, ...]; see `empty_rows` and `move_rows`.
      lines: packed [M, ...]; see `begin_lines` and `take_first_step`.
    """
    waiting = unpack(lines)

    def goes_on(queue: _Queue) -> Array:
        return (queue.waiting < count) | (queue.state.done.sum() < leave)

    def fill_and_search(queue: _Queue) -> _Queue:
        queue = _fill(layout, queue, waiting, count, refill)
        left = count - queue.waiting
        return _run(task, queue, jnp.where(left > 0, jnp.minimum(left, refill), leave))

    queue = _start(unpack(state), len(waiting.done))
    queue = jax.lax.while_loop(goes_on, fill_and_search, queue)
    return _finish(task, _collect(queue, jnp.arange(len(queue.owners))))


def _start(state: State, num_lines: int) -> _Queue:
    """No line of the queue is searched yet; those of the state are numbered behind them."""
    rows = jnp.arange(len(state.done))
    most = num_lines + len(rows)
    ended = jax.tree.map(
        lambda leaf: jnp.zeros((most, *leaf.shape[1:]), leaf.dtype) if leaf.ndim else leaf, _strip(state)
    )
    return _Queue(
        state=state,
        outgrown=jnp.zeros(len(rows), bool),
        owners=jnp.where(state.done, most, num_lines + rows).astype(jnp.int32),
        waiting=jnp.zeros((), jnp.int32),
        ended=ended,
        stopped=jnp.zeros(most, bool),
    )


def _strip(state: State) -> State:
    """The state without what only the next steps need, which is most of it."""
    return state._replace(cache=Cache((), (), state.cache.index, begun=state.cache.begun))


def _fill(layout: Layout, queue: _Queue, lines: State, count: Array, refill: int) -> _Queue:
    """The first free rows go to the lines that wait."""
    nowhere = len(queue.owners)
    rows = jnp.argsort(~queue.state.done, stable=True)[:refill]
    numbers = queue.waiting + jnp.arange(len(rows), dtype=jnp.int32)
    taken = queue.state.done[rows] & (numbers < count)
    queue = _collect(queue, rows)
    fresh = take_rows(lines, jnp.minimum(numbers, len(lines.done) - 1))
    rows = jnp.where(taken, rows, nowhere)
    return queue._replace(
        state=put_rows(layout, queue.state, rows, fresh),
        outgrown=queue.outgrown.at[rows].set(False, mode="drop"),
        owners=queue.owners.at[rows].set(numbers, mode="drop"),
        waiting=queue.waiting + taken.sum(),
    )


def _run(task: Search, queue: _Queue, free: Array) -> _Queue:
    """Goes on until so many rows are free."""

    def step(carry: tuple[State, Array]) -> tuple[State, Array]:
        state, outgrown = carry
        state = task.step(state)
        over = (state.ages >= task.max_length) & ~state.done
        return state._replace(done=state.done | over), outgrown | over

    state, outgrown = jax.lax.while_loop(
        lambda carry: carry[0].done.sum() < free, step, (queue.state, queue.outgrown)
    )
    return queue._replace(state=state, outgrown=outgrown)


def _collect(queue: _Queue, rows: Array) -> _Queue:
    """Keeps what the results of some rows are made of, if their lines are done, and sets them free."""
    most = len(queue.stopped)
    owners = jnp.where(queue.state.done[rows], queue.owners[rows], most)
    some = take_rows(_strip(queue.state), rows)
    ended = jax.tree.map(
        lambda all_, own: all_.at[owners].set(own, mode="drop") if own.ndim else own, queue.ended, some
    )
    return queue._replace(
        ended=ended,
        stopped=queue.stopped.at[owners].set(queue.outgrown[rows], mode="drop"),
        owners=queue.owners.at[rows].set(jnp.where(queue.state.done[rows], most, queue.owners[rows])),
    )


def _finish(task: Search, queue: _Queue) -> Searched:
    """The results of lines that are done, all at once, and the state of the others."""
    found = task.finish(queue.ended)
    found = found._replace(lengths=jnp.where(queue.stopped[:, None], OUTGROWN, found.lengths))
    owners = jnp.where(queue.owners == len(queue.stopped), NOBODY, queue.owners)
    return Searched(pack(queue.state), owners, queue.state.ages, found)
