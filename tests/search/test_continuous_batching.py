"""Continuous batching: the same results as if all lines were searched at once."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_search import EOS, QUICK, SYMBOLS, make_tables, next_logits, start_cache

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.search import (
    NO_LINE,
    OVER_CAPACITY,
    Lines,
    Search,
    Size,
    StateLayout,
    begin_lines,
    empty_rows,
    find_layout,
    pack,
    search,
    search_queue,
    take_first_step,
)

LENGTH = 9
LIMITS = np.array([9, 2, 7, 7, 1, 5, 9, 3, 9, 4, 0, 0], np.int32)  # the last two are none
LINES, COUNT = len(LIMITS), 10
BEAM = SearchConfig(beam_size=3)


def make_task(options, capacity=LENGTH) -> Search:
    return Search(next_logits, options, SYMBOLS, capacity, 2 if options.method != "greedy" else 1)


def lay_out(options, tables, lines) -> StateLayout:
    table, line = jax.tree.map(lambda leaf: np.zeros_like(leaf[:1]), (tables, lines))

    def start(source_length, capacity):
        task = make_task(options, capacity)
        cache = start_cache(table, task.width)._replace(start_steps=jnp.zeros(1, jnp.int32))
        return pack(task.start(cache, line, clip=False))

    return find_layout(start, pad_id=SYMBOLS.pad_id)


@partial(jax.jit, static_argnames="options", compiler_options=QUICK)
def begin(tables, lines, *, options):
    task = make_task(options, 1)
    return take_first_step(task, begin_lines(task, start_cache(tables, 1), lines))


@partial(jax.jit, static_argnames=("options", "layout", "refill", "capacity"), compiler_options=QUICK)
def go_through(state, waiting, count, final_free_rows, *, options, layout, refill, capacity):
    return search_queue(
        make_task(options, capacity), layout, state, waiting, count, final_free_rows, refill=refill
    )


@partial(jax.jit, static_argnames="options", compiler_options=QUICK)
def search_at_once(tables, lines, *, options):
    task = make_task(options)
    return search(
        next_logits,
        start_cache(tables, task.width),
        lines,
        options=options,
        symbols=SYMBOLS,
        max_length=LENGTH,
        n_best=task.n_best,
    )


empty = jax.jit(empty_rows, static_argnames=("layout", "size"), compiler_options=QUICK)


def pick(leaves, numbers):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[numbers], leaves)


def search_in_turns(options, turns, *, rows, capacity, refill, lines, tables):
    found, busy = {}, {}
    layout = lay_out(options, tables, lines)
    state = empty(layout, Size(rows, 0, capacity))
    for turn, numbers in enumerate(turns):
        count = len(numbers)
        waiting = begin(*pick((tables, lines), [*numbers, *[LINES - 1] * (LINES - count)]), options=options)
        final_free_rows = rows if turn == len(turns) - 1 else 1
        sizes = {"options": options, "layout": layout, "refill": refill, "capacity": capacity}
        searched = go_through(state, waiting, count, final_free_rows, **sizes)
        everyone = {**dict(enumerate(numbers)), **{LINES + row: who for row, who in busy.items()}}
        owners, state = np.asarray(searched.owners), searched.state
        busy = {int(row): everyone[int(owners[row])] for row in np.flatnonzero(owners != NO_LINE)}
        assert (np.asarray(state.done) == (owners == NO_LINE)).all()
        ended = {place: who for place, who in everyone.items() if who not in busy.values()}
        found |= {who: pick(searched.results, place) for place, who in ended.items()}
    assert not busy and sorted(found) == sorted(n for numbers in turns for n in numbers)
    return [found[number] for number in sorted(found)]


def assert_same(queued, at_once):
    for one, other in zip(queued, at_once, strict=True):
        length = min(one.tokens.shape[-1], other.tokens.shape[-1])
        np.testing.assert_array_equal(one.tokens[:, :length], other.tokens[:, :length])
        np.testing.assert_array_equal(one.lengths, other.lengths)
        np.testing.assert_allclose(one.scores, other.scores, rtol=1e-6)
        np.testing.assert_allclose(one.log_probs, other.log_probs, rtol=1e-6)


def both_ways(options, turns, *, rows, refill, capacity=LENGTH, more_eos=0.0, **fields):
    tables, lines = make_tables(LINES, 8, seed=3), Lines(LIMITS, **fields)
    tables[..., EOS] += more_eos
    size = {"rows": rows, "capacity": capacity, "refill": refill}
    queued = search_in_turns(options, turns, **size, lines=lines, tables=tables)
    at_once = jax.tree.map(np.asarray, search_at_once(tables, lines, options=options))
    return queued, [pick(at_once, line) for line in range(COUNT)]


@pytest.mark.parametrize(
    ("rows", "refill"),
    [(4, 1), (4, 3), (1, 1), *(pytest.param(rows, rows, marks=pytest.mark.slow) for rows in (4, 12))],
)
def test_a_queue_finds_what_a_search_of_all_lines_at_once_finds(rows, refill):
    queued, at_once = both_ways(BEAM, [range(COUNT)], rows=rows, refill=refill)
    assert_same(queued, at_once)
    assert len({found.lengths[0] for found in queued}) > 3  # lines end at different times


GREEDY = SearchConfig(method="greedy")


@pytest.mark.parametrize("options", [BEAM, GREEDY], ids=["beam", "greedy"])
def test_a_state_continues_with_another_queue(options):
    queued, at_once = both_ways(options, [[2, 3, 5, 9], [1, 7], [0, 6, 4, 8]], rows=4, refill=1)
    assert_same(queued, at_once)


GROUPS = SearchConfig(beam_size=4, diversity_groups=2, stopping="inexact")
RULES = dataclasses.replace(BEAM, no_repeat_ngram=2)
SEEDS = np.arange(LINES, dtype=np.uint32)
PREFIXES, REQUIRED = np.full((LINES, 3), -1, np.int32), np.full((LINES, 1, 3), -1, np.int32)
PREFIXES[1, 0], PREFIXES[2, :2], PREFIXES[6, :3] = 4, (5, 3), (3, 3, 6)
REQUIRED[3, 0, :2], REQUIRED[4, 0, 0], REQUIRED[7, 0, :3], REQUIRED[8, 0, :2] = (5, 3), 4, (3, 3, 6), (7, 4)
MIN_LENGTHS = np.where(np.arange(LINES) % 2, 4, 1)


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (SearchConfig(method="sample", temperature=2.0), {"seeds": SEEDS}),
        (GROUPS, {}),
        (RULES, {"prefixes": PREFIXES, "required": REQUIRED, "min_lengths": MIN_LENGTHS}),
    ],
    ids=["sampling", "inexact_groups", "ngrams_prefixes_required_min_lengths"],
)
def test_options_count_from_the_first_step_of_a_line(options, fields):
    queued, at_once = both_ways(options, [[2, 1, 3, 4, 5], [0, 6, 7, 8, 9]], rows=3, refill=2, **fields)
    assert_same(queued, at_once)
    for line, found in enumerate(queued):
        tokens = found.tokens[0, : found.lengths[0]].tolist()
        if "prefixes" in fields:
            prefix = PREFIXES[line][PREFIXES[line] >= 0].tolist()
            assert tokens[: len(prefix)] == prefix, line
            pairs = list(zip(tokens, tokens[1:], strict=False))
            assert len(set(pairs)) == len(pairs) and len(tokens) >= min(MIN_LENGTHS[line], LIMITS[line]), line
            phrase = REQUIRED[line, 0][REQUIRED[line, 0] >= 0].tolist()
            contained = any(tokens[i : i + len(phrase)] == phrase for i in range(len(tokens)))
            assert contained or not phrase or not found.satisfied[0], line


@pytest.mark.parametrize("options", [BEAM, GREEDY], ids=["beam", "greedy"])
def test_lines_that_exceed_the_capacity_are_marked_and_do_not_disturb_others(options):
    capacity = 7
    queued, at_once = both_ways(options, [range(COUNT)], rows=3, capacity=capacity, refill=1, more_eos=-4.0)
    outgrown = np.array([found.lengths[0] == OVER_CAPACITY for found in queued])
    assert 1 < outgrown.sum() < COUNT - 3
    for found, expected in zip(queued, at_once, strict=True):
        if found.lengths[0] == OVER_CAPACITY:
            assert (found.lengths == OVER_CAPACITY).all()
            # Beam search may look further than the best hypothesis is long, greedy search does not.
            assert options is BEAM or expected.lengths[0] > capacity
        else:
            assert_same([found], [expected])
