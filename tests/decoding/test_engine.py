"""Sentences in states of several sizes: the same translations as if each were alone, by few programs."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny_experiment import random_params, small_model

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.decoding import compiled_programs, scheduler, state_sizes
from flaxformer_mt.decoding.compiled_programs import SearchPrograms
from flaxformer_mt.decoding.scheduler import Scheduler
from flaxformer_mt.decoding.search_engine import EngineOptions, SearchEngine
from flaxformer_mt.decoding.search_inputs import Form, Sentence, SentenceArrays
from flaxformer_mt.decoding.state_sizes import LengthRule, StateSizes
from flaxformer_mt.errors import UserError
from flaxformer_mt.model import make_model
from flaxformer_mt.parallel import replicate_locally
from flaxformer_mt.search import (
    NO_TOKEN,
    WORD_START,
    Size,
    Symbols,
    begin_lines,
    take_first_step,
)

# Users would see a warning for each size.
pytestmark = pytest.mark.filterwarnings("error:Some donated buffers were not usable")

VOCAB = 24
MODEL = small_model(1, 8, 2, 16, output_bias=True)
RECURRENT = dataclasses.replace(MODEL, positions="rotary", decoder_self_attention="ssru")
FEW = {"max_length_ratio": 1.0, "max_length_offset": 4}


def make_sentences(lengths, **more) -> list[Sentence]:
    random = np.random.default_rng(5)
    return [
        Sentence(np.append(random.integers(3, VOCAB, n - 1), 2).astype(np.int32), **more) for n in lengths
    ]


@pytest.fixture
def small_sizes(monkeypatch):
    """States for sources of 6 tokens and for the longest; for many, unless all have a slot among a few.

    The last sentences of a size, in half of its slots, begin again in a larger one.
    """
    monkeypatch.setattr(scheduler, "_LEFT_SHARE", 2)
    monkeypatch.setattr(state_sizes, "_MANY_LENGTHS", (6,))
    monkeypatch.setattr(state_sizes, "_FEW_LENGTHS", ())
    monkeypatch.setattr(state_sizes, "_FEW_FILLS", 1)


def make_engine(models, options, *, symbols=None, size=VOCAB, longest_source=8, **computing):
    computing["compiler_options"] = {"xla_backend_optimization_level": 0}
    return SearchEngine(
        models,
        options,
        symbols or Symbols(0, 1, 2),
        sizes=(size, size),
        source_pad_id=0,
        longest_source=longest_source,
        computing=EngineOptions(**computing),
    )


class Searcher:
    """A search engine with random networks, that notes which sizes it uses; `how`: see `make_engine`."""

    def __init__(self, models, options: SearchConfig, *, spread: bool = False, **how) -> None:
        self.engine = make_engine(models, options, spread=spread, **how)
        networks = [make_model(model, source_size=VOCAB, target_size=VOCAB) for model in models]
        params = [random_params(network, seed, scale=0.7) for seed, network in enumerate(networks)]
        for own in params:  # some translations end early, others at their limit
            own["output_bias"][2] -= 0.3
        self.params = [replicate_locally(own) if spread else own for own in params]
        self.ran = []
        make_slots = self.engine.make_slots

        def watched(params, size, form, *, n_best):
            slots = make_slots(params, size, form, n_best=n_best)
            start = slots.start

            def start_and_note(*args, **more):
                call = start(*args, **more)
                self.ran.append((size.rows, size.capacity, [len(part) for part in call.entered]))
                return call

            slots.start = start_and_note
            return slots

        self.engine.make_slots = watched

    def search(self, sentences, batch_tokens, *, n_best=1):
        """The translations, and each call's size and how many sentences of a part entered with it."""
        self.engine.budget.tokens = batch_tokens
        self.ran.clear()
        found = search_all(self.engine, sentences, self.params, n_best=n_best)
        ran = list(self.ran)
        assert sum(sum(counts) for _, _, counts in ran) >= len(sentences)
        return [found[index] for index in range(len(sentences))], ran


def search_all(engine, sentences, params, *, n_best=1):
    """The hypotheses of each sentence, by its index."""
    scheduler, found = Scheduler(engine, tuple(params)), {}
    scheduler.submit(dict(enumerate(sentences)), n_best=n_best)
    while len(scheduler):
        for index, result in scheduler.step(None):
            if isinstance(result, Exception):
                raise result
            found[index] = result
    return found


def assert_same_translations(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.lengths, other.lengths)
        most = one.lengths.max()
        np.testing.assert_array_equal(one.tokens[:, :most], other.tokens[:, :most])
        np.testing.assert_allclose(one.scores, other.scores, rtol=1e-4, atol=1e-4)


def test_sentences_of_an_ensemble_in_several_sizes_are_translated_as_if_alone(small_sizes):
    """Of a model with self-attention and one with a recurrence and rotary positions; a coverage penalty."""
    models = [MODEL, RECURRENT]
    options = SearchConfig(beam_size=3, coverage_penalty=0.3, **FEW)
    searcher = Searcher(models, options, longest_source=11)
    sentences = make_sentences([11, 6, 6, 10, 6, 5, 6, 6, 5, 6, 9, 11])
    found, ran = searcher.search(sentences, 120)
    assert [size[:2] for size in ran] == [(3, 10)] * 2 + [(2, 15)] * 3  # the last of the first ones again
    assert len({int(one.lengths[0]) for one in found}) > 3
    for first in (1, 4, 7):  # with one of the longest, among a few, where all have the same size
        few, ran = searcher.search([sentences[0], *sentences[first : first + 3]], 300)
        assert [size[:2] for size in ran] == [(5, 15)]
        assert_same_translations([found[0], *found[first : first + 3]], few)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (MODEL, {}),
        pytest.param(
            dataclasses.replace(
                MODEL, architecture="decoder_only", positions="learned", max_positions=64, tying="all"
            ),
            {"diversity_groups": 3},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["plain", "decoder_only_groups"],
)
def test_a_sentence_with_a_long_prefix_has_a_state_of_its_own(model, options, small_sizes):
    """All sentences are translated as if alone."""
    searcher = Searcher([model], SearchConfig(beam_size=3, **options, **FEW), longest_source=11)
    sentences = make_sentences([4, 11, 3, 10, 4, 7, 4, 8, 2, 4, 11, 4], least=2)
    prefix = tuple(range(3, 18)) * 2
    sentences[8] = dataclasses.replace(sentences[8], prefix=prefix)
    found, ran = searcher.search(sentences, 100)
    assert [size[:2] for size in ran] == [(2, 10)] * 2 + [(1, 15)] * 6 + [(1, 32)]
    assert tuple(found[8].tokens[0, :30]) == prefix
    alone = [searcher.search([sentence], 100)[0][0] for sentence in (sentences[1], sentences[8])]
    assert_same_translations([found[1], found[8]], alone)


def step_by_step(self, params, sources, n_best):
    """Replaces `SearchPrograms._read`: prefixes are not read in advance, but forced in the search."""
    task, members = self._make_task(params, 1, n_best)
    cache = members.encode(sources, 1, 1)
    return take_first_step(task, begin_lines(task, cache, members.add_source_mask(sources)))


BEAM_OPTIONS = {"coverage_penalty": 0.3, "no_repeat_ngram": 2}
PHRASES = ((5, 6), (9,), (17, 3))


@pytest.mark.parametrize(
    ("models", "options", "required"),
    [
        ([RECURRENT], BEAM_OPTIONS, PHRASES),
        pytest.param([MODEL, RECURRENT], BEAM_OPTIONS, PHRASES, marks=pytest.mark.slow),
        pytest.param([RECURRENT], {"method": "sample", "temperature": 2.0}, (), marks=pytest.mark.slow),
    ],
    ids=["beams", "ensemble", "samples"],
)
def test_prefixes_that_are_read_at_once_are_as_if_forced_step_by_step(models, options, required, monkeypatch):
    sentences = make_sentences([4, 8, 3, 8, 6, 7], required=required)
    prefixes = [(), (4,), (5, 6, 7), tuple(range(3, 18)), (9, 5, 6), (8, 17)]
    sentences = [
        dataclasses.replace(sentence, prefix=prefix, prefix_ends_word=len(prefix) == 3, stream=(number,))
        for number, (sentence, prefix) in enumerate(zip(sentences, prefixes, strict=True))
    ]
    found, symbols = {}, Symbols(0, 1, 2, word_starts=(3, 12, 13))
    for name in ("at once", "step by step"):
        if name == "step by step":
            monkeypatch.setattr(SearchPrograms, "_read", step_by_step)
        searcher = Searcher(models, SearchConfig(beam_size=3, **options, **FEW), symbols=symbols)
        found[name], _ = searcher.search(sentences, 1000, n_best=3)
    for result, prefix in zip(found["at once"], prefixes, strict=True):
        assert tuple(result.tokens[0, : len(prefix)]) == prefix
    assert_same_translations(found["at once"], found["step by step"])
    if required:
        satisfied = [[one.satisfied.tolist() for one in results] for results in found.values()]
        assert satisfied[0] == satisfied[1] and np.ravel(satisfied[0]).any()


@pytest.mark.slow  # `test_hypotheses_of_likely_lengths...` shows the same for beams
def test_sentences_that_exceed_the_likely_length_are_searched_again(small_sizes, monkeypatch):
    """Three samples of each sentence, each with its own cache."""
    sentences = make_sentences([8, 3, 5, 7, 2, 8, 4, 6])
    limit = {"max_length_ratio": 0.0, "max_length_offset": 32}
    options = SearchConfig(method="sample", temperature=8.0, **limit)
    default, ran = Searcher([MODEL], options).search(sentences, 180, n_best=3)
    capacities = [capacity for _, capacity, _ in ran]
    assert set(capacities) == {19, 32} and capacities == sorted(capacities)
    lengths = [int(length) for found in default for length in found.lengths]
    assert max(lengths) > 19 > min(lengths)
    monkeypatch.setattr(state_sizes, "_DEFAULT_SHARE", 1.0)
    whole, ran = Searcher([MODEL], options).search(sentences, 180, n_best=3)
    assert {capacity for _, capacity, _ in ran} == {32}
    assert_same_translations(default, whole)


def test_hypotheses_of_likely_lengths_are_found_as_without_these(small_sizes):
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


def test_inputs_of_a_search():
    """Each sentence has its row, and other rows are not searched."""
    sentences = make_sentences([8, 3, 5])
    options = SearchConfig(beam_size=3, max_length_ratio=3.0, max_length_offset=8)
    likely = {}
    for bound in ("learned", "limit"):
        engine = Searcher(
            [MODEL], dataclasses.replace(options, length_bound=bound), target_lengths=(1.0, 6.0)
        ).engine
        arrays = engine.arrays
        assert arrays.find_form(sentences) == Form()
        given = arrays.lay_out([sentences[:2], sentences[2:]], Form(), rows=3, source_length=9)
        likely[bound] = given.lines.likely_lengths
        assert given.ids.shape == (6, 9) and given.mask.sum(axis=1).tolist() == [8, 3, 1, 5, 1, 1]
        assert given.ids[3, :5].tolist() == sentences[2].source.tolist()
        assert given.lines.max_lengths.tolist() == [32, 17, 0, 23, 0, 0]
    assert likely["learned"].tolist() == [14, 9, 0, 11, 0, 0] and likely["limit"] is None
    fixed = dataclasses.replace(
        *sentences[:1],
        prefix=(4, 5, 6),
        prefix_ends_word=True,
        required=((7,), (8, 9, 10)),
        least=12,
    )
    form = arrays.find_form([fixed, sentences[1]])
    assert form == Form(prefix=4, phrases=2, phrase=4, minimum=True)
    lines = arrays.lay_out([[sentences[1], fixed]], form, rows=2, source_length=8).lines
    assert lines.prefixes.tolist() == [[NO_TOKEN] * 4, [4, 5, 6, WORD_START]]
    assert lines.required[1].tolist() == [[7, -1, -1, -1], [8, 9, 10, -1]]
    assert (lines.required[0] == NO_TOKEN).all() and lines.min_lengths.tolist() == [1, 12]


def test_devices_search_queues_of_their_own_with_the_same_results(small_sizes, all_devices):
    parts, sentences = jax.local_device_count(), make_sentences([8, 3, 5, 7, 2, 8, 4, 6] * 6)
    assert parts > 1
    options = SearchConfig(method="greedy", **FEW)
    at_once, ran = Searcher([MODEL], options).search(sentences, 1000)
    assert [sum(counts) for _, _, counts in ran] == [48]
    spread, ran = Searcher([MODEL], options, spread=True).search(sentences, 40)
    assert len(ran) > 1 and all(max(counts) - min(counts) <= 1 for _, _, counts in ran)
    assert_same_translations(spread, at_once)


def test_a_stream_of_any_length_takes_a_few_programs(monkeypatch):
    """Three for each size, one of them for a sentence alone; other parameters need no others."""
    compiled, submit = [], compiled_programs._compilers().submit

    def watch(function):
        compiled.append(function)
        return submit(function)

    monkeypatch.setattr(compiled_programs, "_compilers", lambda: SimpleNamespace(submit=watch))
    searcher = Searcher([MODEL], SearchConfig(method="greedy", max_length_ratio=2.0), longest_source=24)
    many = make_sentences([*range(2, 25)] * 12)
    whole, ran = searcher.search(many, 400)
    sizes_used = {size[:2] for size in ran}
    assert sorted(sizes_used) == [(4, 68), (6, 40), (8, 31)] and len(compiled) == 9
    for count in (1, 2, 9, 30, 100):
        part, _ = searcher.search(many[:count], 400)
        assert_same_translations(part, whole[:count])
    assert len(compiled) == 12
    searcher.params = [jax.tree.map(lambda leaf: leaf * 1.1, own) for own in searcher.params]
    searcher.search(many[:100], 400)
    assert sum(searcher.engine.warm_up(searcher.params)) == 12 == len(compiled)


# ---- sizes ----


RULE = StateSizes(LengthRule(1.5, 20, 256, None, learned=(1.1, 6.5)), width=4, batch_tokens=8192)


def test_states_are_few_and_within_the_tokens_of_a_batch():
    assert [size.source_length for size in RULE.many()] == [16, 32, 64, 128, 256]
    assert [size.source_length for size in RULE.few()] == [32, 64, 256]
    for size in [*RULE.many(), *RULE.few()]:
        assert size.rows * (size.source_length + 4 * size.capacity) <= 8192
    assert [size.capacity for size in RULE.many()] == [24, 41, 76, 147, 288]
    # A sentence among a few is never searched again.
    assert [size.capacity for size in RULE.few()] == [68, 116, 404]
    assert all(size.rows == 4 for size in RULE.few()) and RULE.one() == []
    on_cpu = dataclasses.replace(RULE, single=True, parts=2)
    assert on_cpu.one() == [(1, 32, 68)] and on_cpu.few() == RULE.few()
    assert [on_cpu.choose_few(9, 1, count=count).rows for count in (1, 2, 3, None)] == [1, 1, 4, 4]
    assert on_cpu.choose_few(40, 1, count=1) == RULE.few()[1]
    short = dataclasses.replace(RULE, lengths=LengthRule(1.5, 20, 48, 30), batch_tokens=10)
    assert [size.source_length for size in short.many()] == [16, 32, 48]
    assert {size.rows for size in short.many()} == {1} and max(size.capacity for size in short.many()) == 30


def test_what_constraints_need_is_counted():
    learned = LengthRule(1.5, 20, 128, 60, learned=(1.1, 6.5))
    assert [learned.likely(length) for length in (1, 10, 100)] == [7, 17, 60]
    assert [learned.likely(10, needed) for needed in (30, 90)] == [30, 60]
    assert LengthRule(1.0, 0, 128, None, learned=(1.1, 6.5)).likely(10) == 10  # the limit
    assert [learned.expected(10, needed) for needed in (0, 30)] == [17, 30]
    assert [LengthRule(1.5, 20, 128, None).expected(length) for length in (10, 100)] == [21, 108]
    for length, needed in ((10, 1), (10, 401), (100, 401), (3, 60), (256, 1000)):
        for size in (RULE.choose(length, needed), RULE.choose_few(length, needed)):
            assert size.source_length >= length and size.capacity >= max(
                needed, RULE.lengths.expected(length)
            )
    assert RULE.choose(10, 1).source_length == 16 and RULE.choose(10, 60).source_length == 64
    assert RULE.choose_few(10, 1000) == (1, 256, 1024)


def test_what_exceeds_a_state_joins_a_larger_one():
    """With room for the limit of the sentence, if there is one; few sentences of a size are among a few."""
    many, few = RULE.many(), RULE.few()
    assert RULE.choose_again(10, 1, others=many[1:]) == many[1]
    assert RULE.choose_again(60, 1, others=many[3:]) == many[3]
    assert (
        RULE.choose_again(16, 1, others=[]) == few[-1] and RULE.choose_again(16, 1, others=[few[0]]) == few[0]
    )
    assert RULE.fits_few(16, few[0]) and not RULE.fits_few(17, few[0])
    assert dataclasses.replace(RULE, parts=2).fits_few(32, few[0])


def test_another_seed_shares_no_sample_with_any_line():
    """As of fifteen equal lines of a file; a seed depends on the line and on nothing else of its batch."""
    lines = [dataclasses.replace(*make_sentences([4]), stream=(number, 0)) for number in range(1, 16)]

    def find_seeds(seed, sentences):
        arrays = SentenceArrays(SearchConfig(method="sample", seed=seed), RULE.lengths, source_pad_id=0)
        laid_out = arrays.lay_out([sentences], Form(), rows=16, source_length=8)
        return laid_out.lines.seeds[: len(sentences)].tolist()

    found = [find_seeds(seed, lines) for seed in (1, 2, 3)]
    assert len({number for own in found for number in own}) == 45
    assert find_seeds(2, lines[::-1]) == found[1][::-1]


def test_a_beam_that_exceeds_the_memory_is_refused_before_it_compiles(monkeypatch):
    monkeypatch.setenv("FLAXFORMER_MT_DEVICE_MEMORY", str(2**30))
    monkeypatch.setattr(compiled_programs, "_compilers", lambda: pytest.fail("it compiles"))
    searcher = Searcher([MODEL], SearchConfig(beam_size=3000, **FEW))
    with pytest.raises(UserError, match=r"beam_size 3000 needs about \d+\.\d GiB .* device has 1\.0"):
        searcher.search(make_sentences([4]), 400)
    for network in (MODEL, RECURRENT):
        state_sizes.check_memory(Size(8, 256, 512), 64, [network] * 2, 60_000)  # large, but it fits


def test_each_part_is_dealt_like_lengths(monkeypatch):
    monkeypatch.setattr(state_sizes, "_FEW_FILLS", 0)
    searcher = Searcher([MODEL], SearchConfig(method="greedy", **FEW))
    slots = searcher.engine.make_slots(searcher.params, Size(2, 8, 12), Form(), n_best=1)
    slots._busy = [{}, {}]
    slots.programs = SimpleNamespace(
        prefill=lambda params, sources: sources,
        empty=lambda: (),
        generate=lambda *arguments, **limits: SimpleNamespace(state=(), owners=None, results=limits),
    )
    slots.waiting = dict(zip("abcdefghi", make_sentences([8, 7, 6, 5, 4, 3, 3, 2, 2]), strict=True))
    call = slots.start()
    assert call.entered == [["a", "c", "e", "g"], ["b", "d", "f", "h"]] and list(slots.waiting) == ["i"]
    assert call.results["counts"] == [4, 4] and call.results["final_free_rows"] == [1, 1]
