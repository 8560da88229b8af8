"""Small inputs: few programs for all of them, and the translations that the scheduler finds."""

import dataclasses

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
    assert len(sizes_in_advance(RULE)) == 12
    short = dataclasses.replace(RULE, lengths=LengthRule(1.5, 20, 48, None))
    assert {small_size(length, 1, short).size.source_length for length in range(1, 49)} == {16, 32, 48}


def test_inputs_are_small_up_to_64_sentences_a_device():
    """Up to 16 sentences of a device take programs for 8; sizes never exceed the tokens of a batch."""
    for parts in (1, 2):
        for count in range(1, 64 * parts + 1):
            calls = plan_small_input([10] * count, RULE, parts=parts)
            assert sorted(index for indices, _ in calls for index in indices) == list(range(count))
            lines = 1 if count <= parts else 8 if count <= 16 * parts else 64
            assert {size.lines for _, size in calls} <= {1, lines}
            for indices, size in calls:
                assert len(indices) <= size.lines * parts
                assert size.size.rows * (16 + 4 * size.size.capacity) <= RULE.batch_tokens
        assert not plan_small_input([10] * (64 * parts + 1), RULE, parts=parts)
    (_, longest), (_, shortest) = plan_small_input([10] * 8 + [100] * 8, RULE, parts=1)
    assert (longest.size.source_length, shortest.size.source_length) == (128, 16)
    # several long sentences do not fit at once: they are the scheduler's
    few = dataclasses.replace(RULE, batch_tokens=200)
    assert plan_small_input([100], few, parts=1)
    assert not plan_small_input([100] * 2, few, parts=1)


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

    def make_engine(small: bool) -> SearchEngine:
        return SearchEngine(
            [MODEL],
            search,
            Symbols(0, 1, 2),
            sizes=(VOCAB, VOCAB),
            source_pad_id=0,
            longest_source=16,
            small_inputs=small,
        )

    engines = make_engine(True), make_engine(False)
    place = small_inputs.jax.device_put(params, small_inputs.jax.devices()[0])
    assert engines[0].warm_up([place]) == 3 == len(compiled)
    assert engines[1].warm_up([place]) == 0
    sentences = make_sentences([3, 16, 9, 12, 2, 16, 5, 7, 11, 4, 6, 8, 15, 3, 3, 9, 14, 10, 4, 6])
    expected = dict(engines[1].search_all(sentences, n_best=1, params=[place]))
    assert len({int(one.lengths[0]) for one in expected.values()}) > 3
    for count in (1, 5, 13, 20):  # one, eight, twice eight, and 64 of which some wait for a row
        found = dict(engines[0].search_all(sentences[:count], n_best=1, params=[place]))
        assert sorted(found) == list(range(count))
        for index, one in found.items():
            assert one.lengths[0] == expected[index].lengths[0]
            tokens = slice(None, int(one.lengths[0]))
            np.testing.assert_array_equal(one.tokens[0, tokens], expected[index].tokens[0, tokens])
            np.testing.assert_allclose(one.scores, expected[index].scores, rtol=1e-4, atol=1e-4)
    assert len(compiled) == 3
    # Constraints are for the scheduler.
    prefixed = [dataclasses.replace(sentences[0], prefix=(5,))]
    assert dict(engines[0].search_all(prefixed, n_best=1, params=[place]))[0].tokens[0, 0] == 5
    assert len(compiled) == 3
