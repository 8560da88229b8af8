"""Lines that take the rows of those that are done: the same results as if all were searched at once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_search import QUICK, SYMBOLS, make_tables, next_logits, start_cache

from flaxformer_mt import sentence_search
from flaxformer_mt.config import ModelConfig, SearchConfig
from flaxformer_mt.model import init_params, make_model
from flaxformer_mt.parallel import place_locally
from flaxformer_mt.search import OUTGROWN, Lines, Search, Symbols, search_queue
from flaxformer_mt.search.batches import deal_rows, plan_queues, round_up
from flaxformer_mt.sentence_search import Sentence, SentenceSearch

LENGTH = 9
LINES, COUNT = 12, 10
BEAM = SearchConfig(beam_size=3)


def known(**more) -> Lines:
    """Lines of all lengths; the last two are none."""
    limits = np.array([9, 2, 7, 7, 1, 5, 9, 3, 6, 4, 0, 0], np.int32)
    return Lines(limits, **more)


@functools.partial(jax.jit, static_argnames=("options", "rows", "refill", "room"), compiler_options=QUICK)
def run(tables, lines, *, options, rows, refill, room=LENGTH):
    task = Search(next_logits, options, SYMBOLS, room, 2 if options.method != "greedy" else 1)

    def load(numbers):
        some = jax.tree.map(lambda leaf: jnp.asarray(leaf)[numbers], (tables, lines))
        return start_cache(some[0], task.width), some[1]

    if rows == LINES:  # without a queue
        return task.finish(task.run(task.start(*load(np.arange(LINES)))))
    return search_queue(task, load, COUNT, num_lines=LINES, rows=rows, refill=refill)


def both_ways(options, *, rows, refill, room=LENGTH, **more):
    tables, lines = make_tables(LINES, 8, seed=3), known(**more)
    queued = run(tables, lines, options=options, rows=rows, refill=refill, room=room)
    at_once = run(tables, lines, options=options, rows=LINES, refill=1)
    return [jax.tree.map(lambda leaf: np.asarray(leaf)[:COUNT], found) for found in (queued, at_once)]


def assert_same(queued, at_once):
    np.testing.assert_array_equal(queued.tokens, at_once.tokens)
    np.testing.assert_array_equal(queued.lengths, at_once.lengths)
    np.testing.assert_allclose(queued.scores, at_once.scores, rtol=1e-6)
    np.testing.assert_allclose(queued.log_probs, at_once.log_probs, rtol=1e-6)


@pytest.mark.parametrize(("rows", "refill"), [(4, 1), (4, 2), (4, 4), (1, 1), (6, 3)])
def test_a_queue_finds_what_a_search_of_all_lines_at_once_finds(rows, refill):
    queued, at_once = both_ways(BEAM, rows=rows, refill=refill)
    assert_same(queued, at_once)
    assert len(set(queued.lengths[:, 0])) > 3  # lines end at different times


SEEDS = {"seeds": np.arange(LINES, dtype=np.uint32)}
RARE = np.full((LINES, 3), -1, np.int32)
RARE[1, 0], RARE[2, :2], RARE[6, :3] = 4, (5, 3), (3, 3, 6)


@pytest.mark.parametrize(
    ("options", "more"),
    [
        (SearchConfig(method="greedy"), {}),
        (SearchConfig(method="sample", temperature=2.0), SEEDS),
        (dataclasses.replace(BEAM, stopping="inexact"), {}),
        (dataclasses.replace(BEAM, no_repeat_ngram=2), {}),
        (SearchConfig(beam_size=4, diversity_groups=2), {}),
        (BEAM, {"prefixes": RARE}),
        (BEAM, {"required": RARE[:, None]}),
        (BEAM, {"min_lengths": np.full(LINES, 4, np.int32)}),
    ],
    ids=["greedy", "sampling", "inexact", "ngrams", "groups", "prefixes", "required", "min_lengths"],
)
def test_options_know_where_a_line_began(options, more):
    queued, at_once = both_ways(options, rows=4, refill=2, **more)
    assert_same(queued, at_once)


@pytest.mark.parametrize("method", ["beam", "greedy"])
def test_lines_that_there_is_not_enough_room_for_say_so_and_disturb_nobody(method):
    room = 5
    queued, at_once = both_ways(SearchConfig(method=method, beam_size=3), rows=4, refill=2, room=room)
    outgrown = queued.lengths[:, 0] == OUTGROWN
    assert 1 < outgrown.sum() < COUNT - 3
    assert outgrown[at_once.lengths[:, 0] > room].all()
    # Beam search may look further than the best hypothesis is long, greedy search does not.
    assert method == "beam" or not outgrown[at_once.lengths[:, 0] <= room].any()
    assert (queued.lengths[outgrown] == OUTGROWN).all()
    np.testing.assert_array_equal(queued.tokens[~outgrown], at_once.tokens[~outgrown, :, :room])
    np.testing.assert_allclose(queued.scores[~outgrown], at_once.scores[~outgrown], rtol=1e-6)


def test_rows_that_refill_does_not_divide_are_refused():
    with pytest.raises(ValueError, match="refill is 3; it must divide 4 rows and 12 lines"):
        both_ways(BEAM, rows=4, refill=3)


# ---- with a model ----

VOCAB, LONGEST = 24, 16
MODEL = ModelConfig(model_dim=8, ffn_dim=16, num_heads=2, num_encoder_layers=1, num_decoder_layers=2)


def make_sentences(count: int) -> list[Sentence]:
    random = np.random.default_rng(5)
    lengths = random.integers(2, LONGEST + 1, count)
    return [Sentence(np.append(random.integers(3, VOCAB, n - 1), 2).astype(np.int32)) for n in lengths]


def search_with(
    model: ModelConfig, options: SearchConfig, sentences, *, members: int = 1, spread: bool = False
):
    searcher = SentenceSearch(
        [model] * members,
        options,
        Symbols(0, 1, 2),
        sizes=(VOCAB, VOCAB),
        source_pad_id=0,
        longest_source=LONGEST,
        spread=spread,
    )
    network = make_model(model, source_size=VOCAB, target_size=VOCAB)
    params = [
        jax.tree.map(lambda leaf: leaf * 3, init_params(network, jax.random.key(number)))
        for number in range(members)
    ]
    params = [place_locally(own) if spread else own for own in params]
    found = dict(searcher.search_all(sentences, n_best=1, params=params))
    plan = searcher.plan([len(sentence.source) for sentence in sentences], 1)
    return [found[index] for index in range(len(sentences))], plan


@pytest.mark.parametrize(
    ("changes", "options", "members"),
    [
        ({}, {}, 1),
        ({"positions": "rotary"}, {"coverage_penalty": 0.3}, 2),
        (
            {"architecture": "decoder_only", "positions": "learned", "max_positions": 64, "tying": "all"},
            {},
            1,
        ),
    ],
    ids=["sinusoidal", "rotary_ensemble_coverage", "decoder_only"],
)
def test_sentences_of_a_queue_are_translated_as_if_alone(changes, options, members):
    model = dataclasses.replace(MODEL, **changes)
    sentences = make_sentences(14)
    narrow = SearchConfig(beam_size=3, max_length_ratio=1.0, max_length_offset=4, batch_tokens=160, **options)
    wide = dataclasses.replace(narrow, batch_tokens=1_000_000)
    queued, plan = search_with(model, narrow, sentences, members=members)
    at_once, plan_at_once = search_with(model, wide, sentences, members=members)
    assert any(queue.num_lines > queue.rows for queue in plan)
    assert all(queue.num_lines == queue.rows for queue in plan_at_once)
    assert_same_translations(queued, at_once)


def test_what_outgrows_the_usual_room_is_searched_again(monkeypatch):
    sentences = make_sentences(8)
    limit = {"max_length_ratio": 0.0, "max_length_offset": 40}
    options = SearchConfig(method="sample", temperature=8.0, batch_tokens=60, **limit)
    usual, _ = search_with(MODEL, options, sentences)
    lengths = [int(found.lengths[0]) for found in usual]
    assert max(lengths) > 24 > min(lengths)  # 24: there is usually room for so many
    monkeypatch.setattr(sentence_search, "_USUAL_SHARE", 1.0)
    whole, _ = search_with(MODEL, options, sentences)
    assert_same_translations(usual, whole)


def test_devices_search_queues_of_their_own_with_the_same_results():
    parts, sentences = jax.local_device_count(), make_sentences(60)
    assert parts > 1
    options = SearchConfig(method="greedy", max_length_ratio=1.0, max_length_offset=4, batch_tokens=40)
    alone, _ = search_with(MODEL, options, sentences)
    spread, plan = search_with(MODEL, options, sentences, spread=True)
    assert all(queue.rows % parts == 0 for queue in plan)
    assert any(queue.num_lines > queue.rows for queue in plan)
    assert_same_translations(spread, alone)


def assert_same_translations(found, expected):
    for one, other in zip(found, expected, strict=True):
        length = one.lengths[0]
        assert length == other.lengths[0]
        np.testing.assert_array_equal(one.tokens[0, :length], other.tokens[0, :length])
        np.testing.assert_allclose(one.scores, other.scores, rtol=1e-4)


# ---- plans ----


def test_each_part_is_dealt_like_lengths():
    assert deal_rows(6, 2).tolist() == [0, 2, 4, 1, 3, 5]
    assert deal_rows(4, 1).tolist() == [0, 1, 2, 3]
    assert sorted(deal_rows(12, 3)) == list(range(12))


@pytest.mark.parametrize("parts", [1, 2])
def test_queues_hold_every_sentence_once_and_are_long_or_of_one_rung(parts):
    lengths = np.random.default_rng(2).integers(1, 50, 900).tolist()
    queues = plan_queues(lengths, longest=48, rows_of=lambda length: 96 // length * 2, parts=parts)
    assert sorted(index for queue in queues for index in queue.indices) == list(range(900))
    for queue, after in zip(queues, queues[1:], strict=False):
        own = [lengths[index] for index in queue.indices]
        assert queue.rows % parts == 0 == queue.rows // parts % queue.refill
        assert queue.num_lines % (queue.refill * parts) == 0
        assert len(own) <= queue.num_lines
        assert max(own) <= queue.source_length or queue.source_length == 48
        if len(own) < 16 * queue.rows:
            assert len(own) >= 2 * queue.rows
            assert min(round_up(n) for n in own) >= round_up(lengths[after.indices[0]])
    assert min(lengths[index] for index in queues[0].indices) >= max(lengths[i] for i in queues[1].indices)


def test_shorter_sentences_have_a_queue_of_their_own_after_a_few_fills():
    queues = plan_queues([3, 30, 5, 28, 29], longest=48, rows_of=lambda length: 1)
    assert [(queue.indices, queue.source_length) for queue in queues] == [((1, 4, 3), 32), ((2, 0), 8)]


def test_a_few_sentences_are_searched_at_once():
    (queue,) = plan_queues([3, 9, 5], longest=48, rows_of=lambda length: 32, parts=2)
    assert (queue.rows, queue.num_lines, queue.source_length) == (4, 4, 12)
