"""A search of more lines than it has room for: a line that is done makes room for the next one in the queue.

Owns which line is searched where. Everything happens in one compiled program, without a word with the host.
Knows neither text nor models.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from flaxformer_mt.search.loop import Search
from flaxformer_mt.search.task import Lines, SearchResult, State, take_rows
from flaxformer_mt.shapes import Array, Cache

# Lengths of the hypotheses of a line that there was not enough room for.
OUTGROWN = -1

# From the numbers [R] of lines: their cache before the first token, and what is known of them.
Load = Callable[[Array], tuple[Cache, Lines]]


class _Queue(NamedTuple):
    """Lines that are searched, those that were, and those that wait."""

    state: State
    # Which of the rows were stopped because there is no room for more of their tokens.
    outgrown: Bool[Array, "B"]
    # Which line is searched in each row of the state; num_lines: none.
    owners: Int[Array, "B"]
    # The first line that waits.
    waiting: Int[Array, ""]
    # Of all lines, as far as they are known.
    results: SearchResult


def search_queue(
    task: Search, load: Load, count: Array, *, num_lines: int, rows: int, refill: int
) -> SearchResult:
    """The hypotheses of num_lines lines [num_lines, N, ...], of which `rows` are searched at a time.

    As soon as `refill` of them are done, the next so many lines take their rows; when none waits any more
    and half of the rows are free, the other half goes on alone. Each line's result is what it would be if all
    were searched at once: lines have nothing to do with each other.

    A line's max_lengths may be above the task's max_length, which says for how many tokens there is room. One
    that needs more is stopped there, and its lengths are all OUTGROWN.

    With 2 rows, refill 1, and lines of 3, 1, 1 and 2 tokens, row 0 searches line 0 in steps 0 to 2; row 1
    searches line 1 in step 0, line 2 in step 1, and line 3 in steps 2 and 3.

    Args:
      load: gives the next lines; those from `count` on have max_lengths 0.
      count: how many lines there are, if not as many as num_lines.
      refill: divides rows and num_lines.
    """
    if rows % refill or num_lines % refill:
        raise ValueError(f"refill is {refill}; it must divide {rows} rows and {num_lines} lines")
    # Lines that are searched all at once are few: to compile another loop for half of them does not pay.
    half = rows // 2 if num_lines > rows else 0

    def fill_and_search(queue: _Queue) -> _Queue:
        queue = _fill(task, load, queue, refill)
        return _run(task, queue, jnp.where(queue.waiting < count, refill, rows - half))

    queue = _start(task, load, num_lines, rows, refill)
    queue = jax.lax.while_loop(lambda queue: queue.waiting < count, fill_and_search, queue)
    queue = _collect(task, queue, jnp.arange(rows))
    if not half:
        return queue.results
    left = jnp.argsort(queue.state.done, stable=True)[:half]
    state, outgrown, owners = take_rows(queue.state, left), queue.outgrown[left], queue.owners[left]
    queue = _run(task, queue._replace(state=state, outgrown=outgrown, owners=owners), half)
    return _collect(task, queue, jnp.arange(half)).results


def _run(task: Search, queue: _Queue, free: Array | int) -> _Queue:
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


def _start(task: Search, load: Load, num_lines: int, rows: int, refill: int) -> _Queue:
    """Nothing is searched yet, and all rows are free."""
    shapes = jax.eval_shape(lambda: _begin(task, load, jnp.arange(refill), jnp.zeros((), jnp.int32)))
    state: State = _zeros(shapes, rows)
    state = state._replace(done=jnp.ones(rows, bool))
    results = _zeros(jax.eval_shape(task.finish, state), num_lines)
    owners = jnp.full(rows, num_lines, jnp.int32)
    return _Queue(state, jnp.zeros(rows, bool), owners, jnp.zeros((), jnp.int32), results)


def _begin(task: Search, load: Load, numbers: Array, step: Array) -> State:
    """The state of some lines before their first token, which is that of `step`."""
    cache, lines = load(numbers)
    begun = jnp.broadcast_to(step, numbers.shape)
    return task.start(cache._replace(begun=begun), lines, clip=False)


def _fill(task: Search, load: Load, queue: _Queue, refill: int) -> _Queue:
    """The first free rows go to the lines that wait; the hypotheses of their former lines to the results."""
    rows = jnp.argsort(~queue.state.done, stable=True)[:refill]
    queue = _collect(task, queue, rows)
    numbers = queue.waiting + jnp.arange(refill, dtype=jnp.int32)
    fresh = _begin(task, load, numbers, queue.state.step)
    state = jax.tree.map(lambda old, new: old.at[rows].set(new) if old.ndim else old, queue.state, fresh)
    return queue._replace(
        state=state,
        outgrown=queue.outgrown.at[rows].set(False),
        owners=queue.owners.at[rows].set(numbers),
        waiting=queue.waiting + refill,
    )


def _collect(task: Search, queue: _Queue, rows: Array) -> _Queue:
    """Writes the hypotheses of some rows down; rows without a line have none."""
    found = task.finish(take_rows(queue.state, rows))
    found = found._replace(lengths=jnp.where(queue.outgrown[rows, None], OUTGROWN, found.lengths))
    owners = queue.owners[rows]
    results = jax.tree.map(lambda all_, some: all_.at[owners].set(some, mode="drop"), queue.results, found)
    return queue._replace(results=results)


def _zeros(tree: Any, rows: int) -> Any:
    """Arrays like those of a tree, but of so many rows."""
    return jax.tree.map(
        lambda leaf: jnp.zeros((rows, *leaf.shape[1:]) if leaf.ndim else (), leaf.dtype), tree
    )
