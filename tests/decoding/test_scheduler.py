"""Sentences that continue through programs of several sizes: the same translations as if each were alone."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny_experiment import random_params

from flaxformer_mt.config import ModelConfig, SearchConfig
from flaxformer_mt.decoding import sizes
from flaxformer_mt.decoding.compiled_programs import SearchPrograms
from flaxformer_mt.decoding.engine import SearchEngine, Sentence
from flaxformer_mt.decoding.ensemble_members import Sources
from flaxformer_mt.decoding.sizes import (
    LengthRule,
    SizeRule,
    choose_size,
    deal,
    group_by_need,
    round_up_finely,
)
from flaxformer_mt.model import make_model
from flaxformer_mt.parallel import replicate_locally
from flaxformer_mt.search import Size, Symbols, begin_lines

# Users would see a warning for each size.
pytestmark = pytest.mark.filterwarnings("error:Some donated buffers were not usable")

VOCAB = 24
MODEL = ModelConfig(
    model_dim=8, ffn_dim=16, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, output_bias=True
)
RECURRENT = dataclasses.replace(MODEL, positions="rotary", decoder_self_attention="ssru")
FEW = {"max_length_ratio": 1.0, "max_length_offset": 4}
AT_ONCE = 1_000_000


def make_sentences(lengths, **more) -> list[Sentence]:
    random = np.random.default_rng(5)
    return [
        Sentence(np.append(random.integers(3, VOCAB, n - 1), 2).astype(np.int32), **more) for n in lengths
    ]


class Searcher:
    """A search engine whose programs are compiled once for all numbers of tokens per batch.

    Sources of up to 8 tokens have arrays of one length.
    """

    def __init__(
        self,
        models,
        options: SearchConfig,
        *,
        longest_source=8,
        spread: bool = False,
        word_starts=(),
        target_lengths=None,
    ) -> None:
        self.engine = SearchEngine(
            models,
            options,
            Symbols(0, 1, 2, word_starts=word_starts),
            sizes=(VOCAB, VOCAB),
            source_pad_id=0,
            longest_source=longest_source,
            spread=spread,
            target_lengths=target_lengths,
        )
        networks = [make_model(model, source_size=VOCAB, target_size=VOCAB) for model in models]
        params = [random_params(network, seed, scale=0.7) for seed, network in enumerate(networks)]
        for own in params:  # some translations end early, others at their limit
            own["output_bias"][2] -= 0.3
        self.params = [replicate_locally(own) if spread else own for own in params]
        programs, self.ran = self.engine.programs, []
        programs.compile(compiler_options={"xla_backend_optimization_level": 0})
        unwatched = programs.search

        def watched(params, layout, state, lines, **more):
            rows, _, capacity = state.tokens.shape
            self.ran.append((rows // programs.parts, capacity, more["counts"]))
            return unwatched(params, layout, state, lines, **more)

        programs.search = watched

    def search(self, sentences, batch_tokens, *, n_best=1):
        """The translations, and each program's size and how many sentences a part began with it."""
        self.engine.budget.tokens = batch_tokens
        self.ran.clear()
        found = dict(self.engine.search_all(sentences, n_best=n_best, params=self.params))
        ran = list(self.ran)
        assert sum(sum(counts) for _, _, counts in ran) >= len(sentences)
        return [found[index] for index in range(len(sentences))], ran


def assert_same_translations(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.lengths, other.lengths)
        most = one.lengths.max()
        np.testing.assert_array_equal(one.tokens[:, :most], other.tokens[:, :most])
        np.testing.assert_allclose(one.scores, other.scores, rtol=1e-4, atol=1e-4)


def test_sentences_of_an_ensemble_in_several_sizes_are_translated_as_if_alone():
    """Of a model with self-attention and one with a recurrence and rotary positions; a coverage penalty."""
    models = [MODEL, RECURRENT]
    options = SearchConfig(beam_size=3, coverage_penalty=0.3, **FEW)
    searcher = Searcher(models, options, longest_source=11)
    sentences = make_sentences([11, 6, 6, 10, 6, 5, 6, 6, 5, 6])
    found, ran = searcher.search(sentences, 120)
    assert len(ran) > 1 and max(capacity for _, capacity, _ in ran) > min(capacity for _, capacity, _ in ran)
    assert len({int(one.lengths[0]) for one in found}) > 3
    for first in (1, 4, 7):  # three beside the longest, so that all sizes are the same
        few, ran = searcher.search([sentences[0], *sentences[first : first + 3]], AT_ONCE)
        assert [rows for rows, _, _ in ran] == [4]
        assert_same_translations([found[0], *found[first : first + 3]], few)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (MODEL, {}),
        (
            dataclasses.replace(
                MODEL, architecture="decoder_only", positions="learned", max_positions=64, tying="all"
            ),
            {"diversity_groups": 3},
        ),
    ],
    ids=["plain", "decoder_only_groups"],
)
def test_a_sentence_with_a_long_prefix_has_a_state_of_its_own(model, options):
    """After sizes became smaller; all sentences are translated as if alone."""
    searcher = Searcher([model], SearchConfig(beam_size=3, **options, **FEW), longest_source=11)
    sentences = make_sentences([4, 11, 3, 10, 4, 7, 4, 8, 2, 4, 11, 4], least=2)
    prefix = tuple(range(3, 18)) * 2
    sentences[8] = dataclasses.replace(sentences[8], prefix=prefix)
    found, ran = searcher.search(sentences, 100)
    capacities = [capacity for _, capacity, _ in ran]
    assert min(capacities) < capacities[0] <= max(capacities[:-1]) < 31 <= capacities[-1]
    # No more tokens at a time than asked for, or a single row.
    assert all(rows == 1 or rows * (8 + 3 * capacity) <= 100 for rows, capacity, _ in ran)
    assert tuple(found[8].tokens[0, :30]) == prefix
    at_once, ran = searcher.search(sentences, AT_ONCE)
    assert [rows for rows, _, _ in ran] == [16]
    assert_same_translations(found, at_once)


def step_by_step(self, params, ids, mask, lines, *, n_best):
    """Replaces `SearchPrograms._read_rows`: prefixes are not read in advance, but forced in the search."""
    task, members = self._make_task(params, 1, n_best)
    sources = Sources(ids, mask, lines)
    cache = members.encode(sources, 1 if self._shares_first_step else task.width, 1)
    return begin_lines(task, cache, members.add_source_mask(sources))


@pytest.mark.parametrize(
    ("options", "required"),
    [
        ({"coverage_penalty": 0.3, "no_repeat_ngram": 2, "ensemble_mean": "probs"}, ((5, 6), (9,), (17, 3))),
        ({"method": "sample", "temperature": 2.0}, ()),
    ],
    ids=["ensemble", "samples"],
)
def test_prefixes_that_are_read_at_once_are_as_if_forced_step_by_step(options, required, monkeypatch):
    models = [RECURRENT] if "method" in options else [MODEL, RECURRENT]
    sentences = make_sentences([4, 8, 3, 8, 6, 7], required=required)
    prefixes = [(), (4,), (5, 6, 7), tuple(range(3, 18)), (9, 5, 6), (8, 17)]
    sentences = [
        dataclasses.replace(sentence, prefix=prefix, prefix_ends_word=len(prefix) == 3, stream=(number,))
        for number, (sentence, prefix) in enumerate(zip(sentences, prefixes, strict=True))
    ]
    found = {}
    for name in ("at once", "step by step"):
        if name == "step by step":
            monkeypatch.setattr(SearchPrograms, "_read_rows", step_by_step)
        searcher = Searcher(models, SearchConfig(beam_size=3, **options, **FEW), word_starts=(3, 12, 13))
        found[name], _ = searcher.search(sentences, AT_ONCE, n_best=3)
    for result, prefix in zip(found["at once"], prefixes, strict=True):
        assert tuple(result.tokens[0, : len(prefix)]) == prefix
    assert_same_translations(found["at once"], found["step by step"])
    if required:
        satisfied = [[one.satisfied.tolist() for one in results] for results in found.values()]
        assert satisfied[0] == satisfied[1] and np.ravel(satisfied[0]).any()


def test_sentences_that_exceed_the_default_capacity_are_searched_again(monkeypatch):
    """Three samples of each sentence, each with its own cache."""
    sentences = make_sentences([8, 3, 5, 7, 2, 8, 4, 6])
    limit = {"max_length_ratio": 0.0, "max_length_offset": 32}
    searcher = Searcher([MODEL], SearchConfig(method="sample", temperature=8.0, **limit))
    default, _ = searcher.search(sentences, 180, n_best=3)
    lengths = [int(length) for found in default for length in found.lengths]
    assert max(lengths) > 20 > min(lengths)  # 20: the default capacity
    monkeypatch.setattr(sizes, "_DEFAULT_SHARE", 1.0)
    whole, _ = searcher.search(sentences, 180, n_best=3)
    assert_same_translations(default, whole)


def test_hypotheses_of_likely_lengths_are_found_as_without_these():
    """Others are found, too, in states that have less room and are searched again."""
    sentences = make_sentences([8, 3, 5, 7, 2, 8, 4, 6] * 2)
    options = SearchConfig(beam_size=3, max_length_ratio=3.0, max_length_offset=8)
    found = []
    for line in (None, (1.0, 6.0)):
        searcher = Searcher([MODEL], options, target_lengths=line)
        searcher.params[0]["output_bias"][2] += 2.5  # some translations end soon, others at their limit
        found.append(searcher.search(sentences, 180))
    (whole, wide), (learned, narrow) = found
    likely = [len(sentence.source) + 6 for sentence in sentences]
    within = [one.lengths.max() <= most for one, most in zip(whole, likely, strict=True)]
    assert 0 < sum(within) < len(within)
    chosen = [number for number, inside in enumerate(within) if inside]
    assert_same_translations([learned[n] for n in chosen], [whole[n] for n in chosen])
    assert all(one.lengths[0] > 0 and np.isfinite(one.scores[0]) for one in learned)
    assert min(capacity for _, capacity, _ in narrow) < min(capacity for _, capacity, _ in wide)
    for stopping in ("exact", "inexact"):
        stops = dataclasses.replace(options, stopping=stopping)
        lines = Searcher([MODEL], stops, target_lengths=(1.0, 6.0)).engine.lay_out(sentences).lines
        assert lines.likely_lengths[:-1].tolist() == likely
    limit = dataclasses.replace(options, length_bound="limit")
    engine = Searcher([MODEL], limit, target_lengths=(1.0, 6.0)).engine
    assert engine.lengths.learned is None and engine.lay_out(sentences).lines.likely_lengths is None


def test_devices_search_queues_of_their_own_with_the_same_results():
    parts, sentences = jax.local_device_count(), make_sentences([8, 3, 5, 7, 2, 8, 4, 6] * 4)
    assert parts > 1
    options = SearchConfig(method="greedy", **FEW)
    at_once, ran = Searcher([MODEL], options).search(sentences, AT_ONCE)
    assert [rows for rows, _, _ in ran] == [32]
    spread, ran = Searcher([MODEL], options, spread=True).search(sentences, 40)
    assert len(ran) > 1 and all(max(counts) - min(counts) <= 1 for _, _, counts in ran)
    assert_same_translations(spread, at_once)


# ---- sizes ----


def test_fine_sizes_are_a_fifth_too_large_at_most():
    assert [round_up_finely(n) for n in (1, 7, 9, 11, 13, 15, 17, 21, 97)] == [
        1,
        7,
        10,
        12,
        14,
        16,
        20,
        24,
        112,
    ]
    assert all(n <= round_up_finely(n) <= max(n + 1, 1.25 * n) for n in range(1, 3000))


def test_what_constraints_need_is_counted_within_the_tokens_of_a_batch():
    learned = LengthRule(1.5, 20, 128, 60, learned=(1.1, 6.5))
    assert [learned.likely(length) for length in (1, 10, 100)] == [7, 17, 60]
    assert [learned.likely(10, needed) for needed in (30, 90)] == [30, 60]
    assert LengthRule(1.0, 0, 128, None, learned=(1.1, 6.5)).likely(10) == 10  # the limit
    assert [learned.capacity(10, needed, full=False) for needed in (0, 30)] == [20, 32]
    rule = SizeRule(LengthRule(1.0, 8, 128, None), width=4, batch_tokens=2000)
    for full in (False, True):
        rule = dataclasses.replace(rule, full=full)
        for length, needed in ((10, 1), (10, 401), (100, 401), (3, 60)):
            size = rule.size(length, needed)
            assert size.capacity >= needed and size.rows >= 1
            assert size.rows == 1 or size.rows * (size.source_length + 4 * size.capacity) <= 2000
    lengths = [*range(5, 45), 10, 12, 100, 7]
    needed = [*[1] * 40, 401, 390, 420, 60]
    rule = dataclasses.replace(rule, full=False)
    free, short, long = group_by_need(lengths, needed, needed, rule, parts=1)
    assert free == (list(range(40)), [1] * 40)  # sizes as without the others
    assert short == ([43], [60]) and long == ([40, 41, 42], [420] * 3)
    # minimum lengths without fixed tokens are an order within one group, not groups
    assert group_by_need(lengths, needed, [1] * 44, rule, parts=1) == [(list(range(44)), needed)]
    rule, last = dataclasses.replace(rule, batch_tokens=10_000), needed[-4:]
    together = group_by_need(lengths[-4:], last, last, rule, parts=1)
    assert together == [([0, 1, 2, 3], [401, 390, 420, 60])]


LARGE, SMALL = Size(4, 48, 64), Size(12, 24, 32)


@pytest.mark.parametrize(
    ("own", "before", "busy", "waiting", "chosen"),
    [
        (LARGE, None, 0, 100, LARGE),
        (SMALL, None, 0, 3, Size(4, 24, 32)),  # for few sentences there are few rows
        (SMALL, None, 0, 1, Size(1, 24, 32)),
        (SMALL, LARGE, 2, 24, SMALL),
        (SMALL, LARGE, 2, 23, LARGE),  # which do not fill it twice
        (
            Size(3, 24, 80),
            LARGE,
            4,
            24,
            Size(4, 48, 80),
        ),  # more capacity is needed, in the rows that there are
        (LARGE, LARGE, 3, 0, LARGE),
        (LARGE, LARGE, 2, 0, Size(2, 48, 64)),
    ],
)
def test_sizes_follow_the_sentences(own, before, busy, waiting, chosen):
    assert choose_size(own, before, busy=busy, waiting=waiting) == chosen


def test_each_part_is_dealt_like_lengths():
    assert deal(5, 2) == [[0, 2, 4], [1, 3]]
    assert deal(3, 1) == [[0, 1, 2]]
    assert deal(1, 2) == [[0], []]
