"""Sentences that flow through programs of several sizes: the same translations as if each were alone."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from flaxformer_mt.config import ModelConfig, SearchConfig
from flaxformer_mt.decoding import sizes
from flaxformer_mt.decoding.engine import SearchEngine, Sentence
from flaxformer_mt.decoding.sizes import choose_size, deal, round_up_finely
from flaxformer_mt.model import init_params, make_model
from flaxformer_mt.parallel import replicate_locally
from flaxformer_mt.search import Size, Symbols

# Users would see a warning for each size.
pytestmark = pytest.mark.filterwarnings("error:Some donated buffers were not usable")

VOCAB, LONGEST = 24, 11
MODEL = ModelConfig(model_dim=8, ffn_dim=16, num_heads=2, num_encoder_layers=1, num_decoder_layers=1)
FEW = {"max_length_ratio": 1.0, "max_length_offset": 4}


def make_sentences(count: int, **more) -> list[Sentence]:
    random = np.random.default_rng(5)
    lengths = random.integers(2, LONGEST + 1, count)
    return [
        Sentence(np.append(random.integers(3, VOCAB, n - 1), 2).astype(np.int32), **more) for n in lengths
    ]


@functools.cache
def make_params(model: ModelConfig, seed: int):
    network = make_model(model, source_size=VOCAB, target_size=VOCAB)
    return jax.tree.map(lambda leaf: np.asarray(leaf) * 3, init_params(network, jax.random.key(seed)))


def search_with(model: ModelConfig, options: SearchConfig, sentences, *, members=1, spread=False, n_best=1):
    """The translations, and each program's size and how many sentences a part began with it."""
    searcher = SearchEngine(
        [model] * members,
        options,
        Symbols(0, 1, 2),
        sizes=(VOCAB, VOCAB),
        source_pad_id=0,
        longest_source=LONGEST,
        spread=spread,
    )
    params = [make_params(model, number) for number in range(members)]
    params = [replicate_locally(own) if spread else own for own in params]
    programs, ran = searcher.programs, []
    programs.compile(compiler_options={"xla_backend_optimization_level": 0})
    unwatched = programs.search

    def watched(params, layout, state, lines, **more):
        ran.append((state.tokens.shape[0] // programs.parts, state.tokens.shape[2], more["counts"]))
        return unwatched(params, layout, state, lines, **more)

    programs.search = watched
    found = dict(searcher.search_all(sentences, n_best=n_best, params=params))
    assert sum(sum(counts) for _, _, counts in ran) >= len(sentences)
    return [found[index] for index in range(len(sentences))], ran


def assert_same_translations(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.lengths, other.lengths)
        most = one.lengths.max()
        np.testing.assert_array_equal(one.tokens[:, :most], other.tokens[:, :most])
        np.testing.assert_allclose(one.scores, other.scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "options", "members"),
    [
        ({}, {}, 1),
        ({"positions": "rotary"}, {"coverage_penalty": 0.3}, 2),
        (
            {"architecture": "decoder_only", "positions": "learned", "max_positions": 64, "tying": "all"},
            {"diversity_groups": 3},
            1,
        ),
    ],
    ids=["sinusoidal", "rotary_ensemble_coverage", "decoder_only_groups"],
)
def test_sentences_of_a_flow_are_translated_as_if_alone(changes, options, members):
    model = dataclasses.replace(MODEL, **changes)
    sentences = make_sentences(12)
    narrow = SearchConfig(beam_size=3, batch_tokens=160, **FEW, **options)
    wide = dataclasses.replace(narrow, batch_tokens=1_000_000)
    flowing, ran = search_with(model, narrow, sentences, members=members)
    at_once, ran_at_once = search_with(model, wide, sentences, members=members)
    assert len(ran) > 1 and max(room for _, room, _ in ran) > min(room for _, room, _ in ran)
    assert [rows for rows, _, _ in ran_at_once] == [16]
    assert_same_translations(flowing, at_once)


def test_what_outgrows_the_usual_room_is_searched_again(monkeypatch):
    """Three samples of each, which have a past each."""
    sentences = make_sentences(8)
    limit = {"max_length_ratio": 0.0, "max_length_offset": 40}
    options = SearchConfig(method="sample", temperature=8.0, batch_tokens=180, **limit)
    usual, _ = search_with(MODEL, options, sentences, n_best=3)
    lengths = [int(length) for found in usual for length in found.lengths]
    assert max(lengths) > 24 > min(lengths)  # 24: there is usually room for so many
    monkeypatch.setattr(sizes, "_DEFAULT_SHARE", 1.0)
    whole, _ = search_with(MODEL, options, sentences, n_best=3)
    assert_same_translations(usual, whole)


def test_a_long_prefix_of_a_short_sentence_gets_its_room_when_it_comes():
    sentences = [dataclasses.replace(one, least=2) for one in make_sentences(16)]
    order = sorted(range(16), key=lambda index: len(sentences[index].source))
    prefix = tuple(range(3, 18)) * 2
    sentences[order[0]] = dataclasses.replace(sentences[order[0]], prefix=prefix)
    options = SearchConfig(beam_size=2, batch_tokens=240, **FEW)
    found, ran = search_with(MODEL, options, sentences)
    rooms = [room for _, room, _ in ran]
    assert max(rooms) >= 31 > rooms[0]
    assert tuple(found[order[0]].tokens[0, :30]) == prefix
    alone, _ = search_with(MODEL, options, [sentences[order[0]]])
    assert_same_translations([found[order[0]]], alone)


def test_devices_search_queues_of_their_own_with_the_same_results():
    parts, sentences = jax.local_device_count(), make_sentences(32)
    assert parts > 1
    options = SearchConfig(method="greedy", batch_tokens=80, **FEW)
    alone, _ = search_with(MODEL, dataclasses.replace(options, batch_tokens=1_000_000), sentences)
    spread, ran = search_with(MODEL, options, sentences, spread=True)
    assert len(ran) > 1 and all(max(counts) - min(counts) <= 1 for _, _, counts in ran)
    assert_same_translations(spread, alone)


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


LARGE, SMALL = Size(4, 48, 64), Size(12, 24, 32)


@pytest.mark.parametrize(
    ("own", "before", "busy", "waiting", "chosen"),
    [
        (LARGE, None, 0, 100, LARGE),
        (SMALL, None, 0, 3, Size(4, 24, 32)),  # for few sentences there are few rows
        (SMALL, None, 0, 1, Size(1, 24, 32)),
        (SMALL, LARGE, 2, 24, SMALL),
        (SMALL, LARGE, 2, 23, LARGE),  # which do not fill it twice
        (Size(3, 24, 80), LARGE, 4, 24, Size(4, 48, 80)),  # more room is needed, in the rows that there are
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
