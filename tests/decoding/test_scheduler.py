"""Sentences that join a running search: the same translations as if all were known at the beginning."""

import collections
import dataclasses
from concurrent.futures import Future

import jax
import numpy as np
import pytest
from test_engine import FEW, MODEL, Searcher, assert_same_translations, make_sentences

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.decoding import state_sizes
from flaxformer_mt.decoding.compiled_programs import StatePrograms
from flaxformer_mt.decoding.scheduler import Scheduler


@pytest.fixture(scope="module")
def searcher():
    return Searcher([MODEL], SearchConfig(beam_size=2, **FEW), longest_source=8)


@pytest.fixture
def live(searcher, monkeypatch):
    """Two slots for a few sentences, and 17 for many, some of which need more room and are searched again."""
    monkeypatch.setattr(state_sizes, "_FEW_HYPOTHESES", 4)
    monkeypatch.setattr(state_sizes, "_DEFAULT_SHARE", 0.5)
    monkeypatch.setattr(state_sizes, "_DEFAULT_EXTRA", 0)
    searcher.engine.budget.tokens = 400
    return Scheduler(searcher.engine, tuple(searcher.params))


def finish(live):
    found = {}
    while len(live):
        found |= live.step(2)
    assert not live.num_active
    return found


def test_warm_up_compiles_what_sentences_need(searcher, live):
    assert sum(searcher.engine.warm_up(live._params)) == len(searcher.engine.programs._found) * 3
    found = dict(searcher.engine.programs._found)
    for number, sentence in enumerate(make_sentences([8, 3, 6, 8, 2, 5])):
        live.submit({number: sentence}, n_best=1)
        for _ in range(number % 3):
            dict(live.step(2))
    finish(live)
    assert len(live._slots) == 2 and searcher.engine.programs._found == found


def test_sentences_join_and_leave_a_running_search(searcher, live):
    """One alone, six more in other rows, and later again one; two are cancelled, waiting and active."""
    sentences = make_sentences([8, 3, 6, 8, 2, 5, 7, 4, 8, 6])
    expected, _ = searcher.search(sentences, 1000)
    found = {}
    live.submit({0: sentences[0]}, n_best=1)
    found |= live.step(2)
    assert live.num_active == 1 and not found
    for number in range(1, 8):
        live.submit({number: sentences[number]}, n_best=1)
    live.cancel(7)
    for _ in range(2):  # the states take turns
        found |= live.step(2)
    assert live.num_active > 1
    active = {name for slots in live._slots.values() for busy in slots._busy for name in busy.values()}
    cancelled = min(active)
    live.cancel(cancelled)
    live.cancel("unknown")
    live.submit({8: sentences[8]}, n_best=1)
    found |= finish(live)
    live.submit({9: sentences[9]}, n_best=1)
    found |= finish(live)
    assert sorted(found) == [number for number in range(10) if number not in (7, cancelled)]
    assert_same_translations(
        [found[name] for name in sorted(found)], [expected[name] for name in sorted(found)]
    )


def test_what_compiles_holds_up_no_sentence_whose_programs_are_ready(searcher, live, monkeypatch):
    find, compiling = searcher.engine.programs.find, Future()

    def find_late(*args, n_best, **how):
        found = find(*args, n_best=n_best, **how)
        late = {"late": compiling} if n_best == 1 else {}
        return StatePrograms(found._parts, **found._programs | late)

    monkeypatch.setattr(searcher.engine.programs, "find", find_late)
    first, second = make_sentences([4, 5])
    live.submit({"first": first}, n_best=1)
    live.submit({"second": second}, n_best=2)
    found = {}
    while "second" not in found:
        found |= live.step(2)
    for _ in range(3):
        assert not dict(live.step(2)) and len(live) == 1, "it waits, and comes back soon"
    prepared = searcher.engine.warm_up(live._params)
    assert [next(prepared) for _ in range(3)] == [0, 0, 0]
    compiling.set_result(None)
    assert sum(prepared) >= 3
    assert finish(live).keys() == {"first"} and found.keys() == {"second"}


def test_the_sentences_of_a_long_text_hold_up_no_other_text(searcher, live):
    sentences = make_sentences([4] * 81)
    for number, sentence in enumerate(sentences[:80]):
        live.submit({number: dataclasses.replace(sentence, stream=(1, number))}, n_best=1)
    dict(live.step(2))
    live.submit({"other": dataclasses.replace(sentences[80], stream=(1, 0))}, n_best=1)
    found = {}
    while "other" not in found:
        found |= live.step(2)
    assert len(found) <= 40, "19 of the text are searched before it, and as many beside it"
    assert len(found | finish(live)) == 81


def test_a_device_that_fails(searcher, live, monkeypatch):
    """Too little memory: the sentences begin anew in fewer rows. Another error is their result."""
    sentences = make_sentences([6, 7, 5])
    expected, _ = searcher.search(sentences, 1000)
    generate = StatePrograms.generate
    messages = ["RESOURCE_EXHAUSTED: no memory"]

    def fail(*args, **more):
        if messages and live.num_active == 0 and len(live) == 3:
            raise jax.errors.JaxRuntimeError(messages.pop())
        return generate(*args, **more)

    monkeypatch.setattr(StatePrograms, "generate", fail)
    monkeypatch.setattr(searcher.engine.budget, "_warn", lambda message: None)
    for number, sentence in enumerate(sentences):
        live.submit({number: sentence}, n_best=1)
    found = finish(live)
    assert searcher.engine.budget.tokens == 500 and not messages
    assert_same_translations([found[number] for number in range(3)], expected)
    messages.append("INTERNAL: broken")
    for number, sentence in enumerate(sentences):
        live.submit({number: sentence}, n_best=1)
    found = finish(live)
    # Two of them were in the same state; the third one is in another, where nothing failed.
    assert sorted(found) == [0, 1, 2] and all("broken" in str(found[number]) for number in (0, 1))
    assert_same_translations([found[2]], expected[2:])
    live.submit({0: sentences[0]}, n_best=1)
    assert_same_translations([finish(live)[0]], expected[:1])


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ({10: 40, 30: 20}, {(32, 16): 40, (8, 32): 20}),
        ({10: 20, 30: 40}, {(16, 32): 60}),  # the shorter ones would leave rows free
        ({10: 20, 30: 13}, {(16, 32): 33}),
        ({10: 20, 30: 10}, {(8, 32): 30}),  # a few, in one state
        ({10: 3, 30: 9, 60: 1}, {(8, 64): 13}),
        ({10: 3, 60: 40}, {(8, 32): 3, (8, 64): 40}),
    ],
)
def test_sentences_that_do_not_fill_the_rows_of_a_size_join_a_larger_one(lengths, expected):
    options = SearchConfig(beam_size=2, batch_tokens=2000, **FEW)
    engine = Searcher([MODEL], options, longest_source=64).engine
    assert [size[:2] for size in engine.sizes(1).many()] == [(32, 16), (16, 32), (8, 64)]
    live = Scheduler(engine, ())
    sentences = make_sentences([length for length, count in lengths.items() for _ in range(count)])
    live.submit(dict(enumerate(sentences)), n_best=1)
    live._assign(all_of_them=True)
    assert {key.size[:2]: len(slots.waiting) for key, slots in live._slots.items()} == expected


def test_what_is_computed_beyond_the_lines_is_bounded(searcher, live, monkeypatch):
    """Steps of rows, free ones included, and positions of sources that are read, with those of padding."""
    generate, prefill = StatePrograms.generate, StatePrograms.prefill
    computed = collections.Counter()

    def count_steps(programs, params, state, *waiting, **limits):
        before = int(state[0][0])  # the first leaf of a packed state: the step of each row
        found = generate(programs, params, state, *waiting, **limits)
        computed["steps"] += len(found.owners) * (int(found.state[0][0]) - before)
        return found

    def count_positions(programs, params, sources):
        found = prefill(programs, params, sources)
        computed["positions"] += int((np.asarray(found[0]) > 0).sum()) * sources.ids.shape[1]
        return found

    monkeypatch.setattr(StatePrograms, "generate", count_steps)
    monkeypatch.setattr(StatePrograms, "prefill", count_positions)
    sentences = make_sentences([2 + number % 7 for number in range(70)])
    live.submit(dict(enumerate(sentences)), n_best=1)
    tokens = 0
    while len(live):
        tokens += sum(int(result.lengths[0]) for _, result in live.step(None))
    # 886 steps for 630 tokens and 1,104 positions for 350 when this was written: lines are searched again.
    assert tokens == pytest.approx(630, abs=20)
    assert computed["steps"] <= 900 and computed["positions"] <= 1_104
