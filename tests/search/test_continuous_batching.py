"""Lines that take the rows of those that are done: the same results as if all were searched at once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_search import QUICK, SYMBOLS, make_tables, next_logits, start_cache

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.search import (
    NO_LINE,
    OVER_CAPACITY,
    Lines,
    Search,
    Size,
    StateLayout,
    append_rows,
    begin_lines,
    empty_rows,
    find_layout,
    move_rows,
    search_queue,
    shares_first_step,
    take_first_step,
    widen_rows,
)
from flaxformer_mt.search.state_rows import Leaf, put_rows, unpack

LENGTH = 9
LIMITS = np.array([9, 2, 7, 7, 1, 5, 9, 3, 6, 4, 0, 0], np.int32)  # the last two are none
LINES, COUNT = len(LIMITS), 10
BEAM = SearchConfig(beam_size=3)


def make_task(options, room=LENGTH) -> Search:
    return Search(next_logits, options, SYMBOLS, room, 2 if options.method != "greedy" else 1)


def lay_out(options, tables, lines) -> StateLayout:
    """The chain's states have no source."""

    def start(source_length, room):
        task = make_task(options, room)
        one = jax.tree.map(lambda leaf: leaf[:1], (tables, lines))
        cache = start_cache(one[0], task.width)._replace(begun=jnp.zeros(1, jnp.int32))
        return task.start(cache, one[1], clip=False)

    return find_layout(start, pad_id=SYMBOLS.pad_id)


@functools.partial(jax.jit, static_argnames="options", compiler_options=QUICK)
def begin(tables, lines, *, options):
    task = make_task(options, 1)
    if not shares_first_step(options):
        return begin_lines(task, start_cache(tables, task.width), lines)
    return take_first_step(task, begin_lines(task, start_cache(tables, 1), lines))


@functools.partial(jax.jit, static_argnames=("options", "layout", "refill", "room"), compiler_options=QUICK)
def go_through(state, waiting, count, final_free_rows, *, options, layout, refill, room):
    return search_queue(
        make_task(options, room), layout, state, waiting, count, final_free_rows, refill=refill
    )


@functools.partial(jax.jit, static_argnames="options", compiler_options=QUICK)
def search_at_once(tables, lines, *, options):
    task = make_task(options)
    return task.finish(task.run(task.start(start_cache(tables, task.width), lines)))


def pick(leaves, numbers):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[numbers], leaves)


def search_in_turns(options, turns, *, refill, lines, tables):
    """Searches in states of one size after the other, each given as (rows, room, lines)."""
    found, busy, state, ages = {}, {}, None, np.zeros(1)
    layout = lay_out(options, tables, lines)
    for turn, (rows, room, numbers) in enumerate(turns):
        if state is None:
            state = empty_rows(layout, Size(rows, 0, room))
        else:
            assert ages.max() <= room and busy
            stay = jnp.array([*busy, *[-1] * (rows - len(busy))])
            state = move_rows(layout, state, stay, source_length=0, room=room)
            busy = dict(enumerate(busy.values()))
        count = len(numbers)
        waiting = begin(*pick((tables, lines), [*numbers, *[LINES - 1] * (LINES - count)]), options=options)
        final_free_rows = rows if turn == len(turns) - 1 else 1
        searched = go_through(
            state, waiting, count, final_free_rows, options=options, layout=layout, refill=refill, room=room
        )
        everyone = {**dict(enumerate(numbers)), **{LINES + row: who for row, who in busy.items()}}
        owners, ages, state = np.asarray(searched.owners), np.asarray(searched.ages), searched.state
        busy = {int(row): everyone[int(owners[row])] for row in np.flatnonzero(owners != NO_LINE)}
        ages = np.where(owners == NO_LINE, 0, ages)
        assert (np.asarray(state.done) == (owners == NO_LINE)).all()
        ended = {place: who for place, who in everyone.items() if who not in busy.values()}
        found |= {who: pick(searched.results, place) for place, who in ended.items()}
    assert not busy and sorted(found) == sorted(n for _, _, numbers in turns for n in numbers)
    return [found[number] for number in sorted(found)]


def assert_same(queued, at_once):
    for one, other in zip(queued, at_once, strict=True):
        length = min(one.tokens.shape[-1], other.tokens.shape[-1])
        np.testing.assert_array_equal(one.tokens[:, :length], other.tokens[:, :length])
        np.testing.assert_array_equal(one.lengths, other.lengths)
        np.testing.assert_allclose(one.scores, other.scores, rtol=1e-6)
        np.testing.assert_allclose(one.log_probs, other.log_probs, rtol=1e-6)


def both_ways(options, turns, *, refill, **more):
    tables, lines = make_tables(LINES, 8, seed=3), Lines(LIMITS, **more)
    queued = search_in_turns(options, turns, refill=refill, lines=lines, tables=tables)
    at_once = jax.tree.map(np.asarray, search_at_once(tables, lines, options=options))
    return queued, [pick(at_once, line) for line in range(COUNT)]


@pytest.mark.parametrize(("rows", "refill"), [(4, 1), (4, 3), (4, 4), (1, 1), (12, 12)])
def test_a_queue_finds_what_a_search_of_all_lines_at_once_finds(rows, refill):
    queued, at_once = both_ways(BEAM, [(rows, LENGTH, range(COUNT))], refill=refill)
    assert_same(queued, at_once)
    assert len({found.lengths[0] for found in queued}) > 3  # lines end at different times


# Fewer rows and less room, then more of both.
TURNS = [(3, LENGTH, [2, 3, 5, 8]), (2, 7, [1, 7, 9]), (5, LENGTH, [0, 6, 4])]


@pytest.mark.parametrize("options", [BEAM, SearchConfig(method="greedy")], ids=["beam", "greedy"])
def test_a_state_goes_on_in_another_size(options):
    queued, at_once = both_ways(options, TURNS, refill=1)
    assert_same(queued, at_once)


SEEDS = {"seeds": np.arange(LINES, dtype=np.uint32)}
RARE = np.full((LINES, 3), -1, np.int32)
RARE[1, 0], RARE[2, :2], RARE[6, :3] = 4, (5, 3), (3, 3, 6)


@pytest.mark.parametrize(
    ("options", "more"),
    [
        (SearchConfig(method="sample", temperature=2.0), SEEDS),
        (dataclasses.replace(BEAM, stopping="inexact"), {}),
        (dataclasses.replace(BEAM, no_repeat_ngram=2), {}),
        (SearchConfig(beam_size=4, diversity_groups=2), {}),
        (BEAM, {"prefixes": RARE}),
        (BEAM, {"required": RARE[:, None]}),
        (BEAM, {"min_lengths": np.full(LINES, 4, np.int32)}),
    ],
    ids=["sampling", "inexact", "ngrams", "groups", "prefixes", "required", "min_lengths"],
)
def test_options_know_where_a_line_began(options, more):
    turns = [(3, 7, [2, 1, 3, 4, 5]), (4, LENGTH, [0, 6, 7, 8, 9])]
    queued, at_once = both_ways(options, turns, refill=2, **more)
    assert_same(queued, at_once)


@pytest.mark.parametrize("method", ["beam", "greedy"])
def test_lines_that_there_is_not_enough_room_for_say_so_and_disturb_nobody(method):
    room = 5
    options = SearchConfig(method=method, beam_size=3)
    queued, at_once = both_ways(options, [(4, room, range(COUNT))], refill=2)
    outgrown = np.array([found.lengths[0] == OVER_CAPACITY for found in queued])
    assert 1 < outgrown.sum() < COUNT - 3
    for found, expected in zip(queued, at_once, strict=True):
        if found.lengths[0] == OVER_CAPACITY:
            assert (found.lengths == OVER_CAPACITY).all()
            # Beam search may look further than the best hypothesis is long, greedy search does not.
            assert method == "beam" or expected.lengths[0] > room
        else:
            assert_same([found], [expected])


def test_what_a_program_leaves_is_nobodys_or_goes_on():
    tables, lines = make_tables(LINES, 8, seed=3), Lines(LIMITS)
    layout, waiting = lay_out(BEAM, tables, lines), begin(tables, lines, options=BEAM)
    state = empty_rows(layout, Size(4, 0, LENGTH))
    sizes = {"options": BEAM, "layout": layout, "refill": 1, "room": LENGTH}
    left = go_through(state, waiting, 6, 2, **sizes)
    owners = np.asarray(left.owners)
    assert (owners == NO_LINE).sum() >= 2 and (np.asarray(left.ages)[owners != NO_LINE] > 0).all()
    # With no more lines, the others end as they would have.
    rest = go_through(left.state, waiting, 0, 4, **sizes)
    assert (np.asarray(rest.owners) == NO_LINE).all()
    whole = go_through(state, waiting, 6, 4, **sizes)
    for row in np.flatnonzero(owners != NO_LINE):
        assert_same([pick(rest.results, LINES + row)], [pick(whole.results, owners[row])])


def test_beams_begin_as_one_unless_they_are_told_apart():
    assert shares_first_step(BEAM) and shares_first_step(SearchConfig(method="greedy"))
    assert not shares_first_step(SearchConfig(beam_size=4, diversity_groups=2))
    assert not shares_first_step(SearchConfig(method="sample"))


# ---- rows ----


def tokens_state(step: int, tokens) -> tuple[StateLayout, object]:
    """A packed state of the chain with these tokens [R, T], of one beam."""
    options = SearchConfig(method="greedy")
    tables, lines = make_tables(1, 8, seed=0), Lines(np.array([9], np.int32))
    layout = lay_out(options, tables, lines)
    tokens = jnp.asarray(tokens, jnp.int32)[:, None]
    state = empty_rows(layout, Size(len(tokens), 0, tokens.shape[2]))
    return layout, state._replace(tokens=tokens, step=jnp.full(len(tokens), step), done=state.done & False)


def test_the_layout_knows_which_axes_grow():
    tables, lines = make_tables(2, 8, seed=0), Lines(np.array([9, 9], np.int32))
    layout = lay_out(BEAM, tables, lines)
    leaves = jax.tree.unflatten(layout.structure, layout.leaves)
    assert leaves.tokens == Leaf((3, 1), "int32", time=2, source=None, blank=SYMBOLS.pad_id)
    assert leaves.log_probs == Leaf((3,), "float32", time=None, source=None)
    assert leaves.cache.shared == Leaf((8, 8, 8), "float32", time=None, source=None)
    empty = empty_rows(layout, Size(5, 0, 7))
    assert empty.tokens.shape == (5, 3, 7) and empty.done.all() and empty.step.shape == (5,)


@pytest.mark.parametrize(
    ("step", "before", "room", "after"),
    [
        (6, [4, 5, 2, 3], 3, [3, 4, 5]),  # by the steps of tokens: [3 4 5] in places 0, 1, 2
        (6, [4, 5, 2, 3], 4, [4, 5, 2, 3]),
        (7, [4, 5, 6, 3], 3, [6, 4, 5]),
        (6, [4, 5, 2, 3], 6, [0, 0, 2, 3, 4, 5]),
        (8, [4, 5, 6, 7], 6, [6, 7, 0, 0, 4, 5]),
        (2, [0, 1, 0, 0], 8, [0, 1, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_a_ring_of_tokens_is_laid_out_anew(step, before, room, after):
    layout, state = tokens_state(step, [before, [9] * len(before)])
    moved = move_rows(layout, state, jnp.array([0, -1, -1]), source_length=0, room=room)
    assert moved.tokens[0, 0].tolist() == after
    assert moved.done.tolist() == [False, True, True] and moved.step.tolist() == [step] * 3


def test_rows_are_put_where_the_next_step_looks_for_them():
    layout, state = tokens_state(6, [[4, 5, 2, 3], [4, 5, 2, 3], [4, 5, 2, 3]])
    _, line = tokens_state(1, [[7], [8]])
    line = line._replace(cache=line.cache._replace(begun=jnp.zeros(2, jnp.int32)))
    put = put_rows(layout, unpack(state), jnp.array([1, 3]), unpack(line))  # there is no row 3
    assert put.tokens[:, 0].tolist() == [[4, 5, 2, 3], [0, 7, 0, 0], [4, 5, 2, 3]]
    assert put.cache.begun[1] == 5 and put.ages[1] == 1


def test_blocks_are_joined_in_rows_of_one_state():
    layout, first = tokens_state(1, [[7], [8]])
    _, second = tokens_state(1, [[5]])
    both = append_rows(layout, widen_rows(layout, first, rows=4, source_length=0), second, jnp.array(2))
    assert both.tokens[:, 0, 0].tolist() == [7, 8, 5, 0]
