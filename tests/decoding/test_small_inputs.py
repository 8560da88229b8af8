"""Small inputs: few programs for all of them, and the translations that the scheduler finds."""

import dataclasses
import itertools
import math

import numpy as np
from tiny_experiment import random_params

from flaxformer_mt.config import ModelConfig, SearchConfig
from flaxformer_mt.decoding import small_inputs
from flaxformer_mt.decoding.engine import SearchEngine, Sentence
from flaxformer_mt.decoding.sizes import LengthRule, SizeRule, plan_small_input, sizes_in_advance, small_size
from flaxformer_mt.model import make_model
from flaxformer_mt.search import Symbols

VOCAB = 24
MODEL = ModelConfig(
    model_dim=8, ffn_dim=16, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, output_bias=True
)
RULE = SizeRule(LengthRule(1.5, 20, 256, None), width=4, batch_tokens=8192)


def make_sentences(lengths) -> list[Sentence]:
    random = np.random.default_rng(5)
    return [Sentence(np.append(random.integers(3, VOCAB, n - 1), 2).astype(np.int32)) for n in lengths]


def test_single_sentences_of_up_to_128_tokens_need_four_programs():
    single = {small_size(length, 1, RULE) for length in range(1, 129)}
    assert len(single) == 4
    # none of them is searched again, whatever its length
    assert all(size.size.capacity == RULE.lengths.limit(size.size.source_length) for size in single)
    assert single <= set(sizes_in_advance(RULE))
    assert len(sizes_in_advance(RULE)) == 16  # four of them for single sentences
    short = dataclasses.replace(RULE, lengths=LengthRule(1.5, 20, 48, None))
    assert {small_size(length, 1, short).size.source_length for length in range(1, 49)} == {16, 32, 48}


def test_inputs_are_small_up_to_64_sentences_a_device():
    """Up to 16 sentences of a device take programs for at most 8; sizes never exceed a batch's tokens."""
    for parts in (1, 2):
        for count in range(1, 64 * parts + 1):
            calls = plan_small_input([10] * count, RULE, parts=parts)
            assert sorted(index for indices, _ in calls for index in indices) == list(range(count))
            most = next(n for n, of in ((1, 1), (2, 2), (8, 16), (64, 64)) if count <= of * parts)
            assert {size.lines for _, size in calls} <= ({64} if most == 64 else {1, 2, most})
            assert max(size.lines for _, size in calls) <= most
            assert len(calls) <= 3
            for indices, size in calls:
                assert len(indices) <= size.lines * parts
                assert size.size.rows * (16 + 4 * size.size.capacity) <= RULE.batch_tokens
        assert not plan_small_input([10] * (64 * parts + 1), RULE, parts=parts)
        # those that are searched again are never left for a program of the default capacity
        again = dataclasses.replace(RULE, full=True)
        assert all(size.lines <= 8 for _, size in plan_small_input([10] * 16 * parts, again, parts=parts))
        assert not plan_small_input([10] * (16 * parts + 1), again, parts=parts)
    (_, longest), (_, shortest) = plan_small_input([10] * 8 + [100] * 8, RULE, parts=1)
    assert (longest.size.source_length, shortest.size.source_length) == (128, 16)
    # several long sentences do not fit at once: they are the scheduler's
    few = dataclasses.replace(RULE, batch_tokens=200)
    assert plan_small_input([100], few, parts=1)
    assert not plan_small_input([100] * 2, few, parts=1)


def _call_time(longest: int, count: int, parts: int) -> float:
    size = small_size(longest, -(-count // parts), RULE)
    return size.size.capacity * (size.lines + 4) if size and size.lines < 64 else math.inf


def test_calls_of_a_small_input_take_the_least_time_of_all_divisions():
    """A long sentence is not searched beside short ones that would wait for it, if that takes longer."""
    calls = plan_small_input([10, 47, 9], RULE, parts=1)
    assert [(indices, size.lines, size.size.source_length) for indices, size in calls] == [
        ([1], 1, 64),
        ([0, 2], 2, 16),
    ]
    random = np.random.default_rng(2)
    for parts, count in ((1, 3), (2, 5), (1, 9), (2, 9), (3, 8)):
        lengths = random.integers(1, 129, count).tolist()
        ordered = sorted(lengths, reverse=True)
        least = math.inf
        for cuts in itertools.product((False, True), repeat=count - 1):
            bounds = [0, *(at for at, cut in enumerate(cuts, 1) if cut), count]
            calls_of = itertools.pairwise(bounds)
            least = min(least, sum(_call_time(ordered[one], two - one, parts) for one, two in calls_of))
        planned = plan_small_input(lengths, RULE, parts=parts)
        times = (_call_time(lengths[indices[0]], len(indices), parts) for indices, _ in planned)
        assert sum(times) == least


def make_engine(search: SearchConfig, small: bool, **options) -> SearchEngine:
    sizes = (VOCAB, VOCAB)
    symbols = Symbols(0, 1, 2)
    return SearchEngine(
        [MODEL],
        search,
        symbols,
        sizes=sizes,
        source_pad_id=0,
        longest_source=16,
        small_inputs=small,
        **options,
    )


def test_translations_are_those_of_the_scheduler(one_device, monkeypatch):
    search = SearchConfig(beam_size=3, batch_tokens=1600, max_length_ratio=1.0, max_length_offset=4)
    network = make_model(MODEL, source_size=VOCAB, target_size=VOCAB)
    params = random_params(network, 0, scale=0.7)
    params["output_bias"][2] -= 0.3
    compiled = []
    keep = small_inputs.compile_kept

    def watch(function, arguments, facts, devices):
        compiled.append(facts[1])
        return keep(function, arguments, facts, devices)

    monkeypatch.setattr(small_inputs, "compile_kept", watch)

    engines = make_engine(search, True), make_engine(search, False)
    place = small_inputs.jax.device_put(params, small_inputs.jax.devices()[0])
    assert engines[0].warm_up([place]) == 4 == len(compiled)
    assert engines[1].warm_up([place]) == 0
    sentences = make_sentences([3, 16, 9, 12, 2, 16, 5, 7, 11, 4, 6, 8, 15, 3, 3, 9, 14, 10, 4, 6])
    expected = dict(engines[1].search_all(sentences, n_best=1, params=[place]))
    assert len({int(one.lengths[0]) for one in expected.values()}) > 3
    for count in (1, 2, 5, 13, 20):  # one, two, eight, several calls, and 64 of which some wait for a row
        found = dict(engines[0].search_all(sentences[:count], n_best=1, params=[place]))
        assert sorted(found) == list(range(count))
        for index, one in found.items():
            assert one.lengths[0] == expected[index].lengths[0]
            tokens = slice(None, int(one.lengths[0]))
            np.testing.assert_array_equal(one.tokens[0, tokens], expected[index].tokens[0, tokens])
            np.testing.assert_allclose(one.scores, expected[index].scores, rtol=1e-4, atol=1e-4)
    assert len(compiled) == 4
    # Constraints are for the scheduler.
    prefixed = [dataclasses.replace(sentences[0], prefix=(5,))]
    assert dict(engines[0].search_all(prefixed, n_best=1, params=[place]))[0].tokens[0, 0] == 5
    assert len(compiled) == 4


def test_few_sentences_that_exceed_the_capacity_are_searched_again_by_programs_for_few(
    one_device, monkeypatch
):
    """They take programs that are ready, or soon compiled, with room for the longest translations."""
    search = SearchConfig(
        beam_size=3, batch_tokens=1600, max_length_ratio=1.0, max_length_offset=4, stopping="inexact"
    )
    params = random_params(make_model(MODEL, source_size=VOCAB, target_size=VOCAB), 0, scale=0.7)
    params["output_bias"][2] -= 0.3
    place = small_inputs.jax.device_put(params, small_inputs.jax.devices()[0])
    sentences = make_sentences([3, 16, 9, 12, 2, 16, 5, 7, 11, 4, 6, 8, 15, 3, 3, 9, 14, 10, 4, 6])
    expected = dict(make_engine(search, False).search_all(sentences, n_best=1, params=[place]))
    exceeding = sum(int(one.lengths[0]) > 8 for one in expected.values())
    assert 0 < exceeding <= 16
    engine = make_engine(search, True, target_lengths=(0.0, 8.0))
    searched = []
    search_small = engine._small.search

    def watch(params, sources, size, **options):
        searched.append((len(sources.ids) - 1, size.lines))
        return search_small(params, sources, size, **options)

    monkeypatch.setattr(engine._small, "search", watch)
    monkeypatch.setattr(engine, "_search", None)
    found = dict(engine.search_all(sentences, n_best=1, params=[place]))
    assert searched[0] == (20, 64)
    assert sum(count for count, lines in searched[1:] if lines <= 8) == exceeding
    assert [found[i].lengths[0] for i in range(20)] == [expected[i].lengths[0] for i in range(20)]
