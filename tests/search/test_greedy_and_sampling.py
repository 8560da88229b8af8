"""Sampling: what is drawn, how often, and on what it may not depend."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from test_search import EOS, QUICK, make_tables, run_greedy, search_lattice, tokens_of
from test_search_options import SAMPLE, limits, run

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.search import Lines
from flaxformer_mt.search.sampling import draw_tokens, keep_likely, make_keys

PROBABILITIES = np.array([0.02, 0.4, 0.03, 0.25, 0.2, 0.1])


def sample(**fields) -> SearchConfig:
    return SearchConfig(method="sample", **fields)


def seeds(*numbers) -> np.ndarray:
    return np.array(numbers, np.uint32)


# Options, and the tokens that they keep. Cumulated from the likeliest: .4 .65 .85 .95 .98 1.
KEPT = [
    (sample(), [0, 1, 2, 3, 4, 5]),
    (sample(top_k=3), [1, 3, 4]),
    (sample(top_p=0.7), [1, 3, 4]),
    (sample(top_p=0.01), [1]),
    (sample(min_p=0.3), [1, 3, 4]),
    (sample(min_p=0.2), [1, 3, 4, 5]),
    # Of .4 .25 .2, the first two are .765 of it: more than .7.
    (sample(top_k=3, top_p=0.7), [1, 3]),
    # At temperature 2 probabilities are as their square roots: .63 .5 .45 .32 .17 .14 of 2.21.
    (sample(temperature=2.0, top_p=0.6), [1, 3, 4]),
]
LIKELIEST = [sample(top_k=1), sample(top_p=1e-6), sample(min_p=1.0), sample(temperature=1e-3)]


@functools.partial(jax.jit, compiler_options=QUICK)
def draw_many(logits, others):
    """Draws with all options, in one program.

    20,000 from one distribution with those of KEPT, one from each row of others [200, 100, V] with those of
    LIKELIEST, and what top_p 0.5 keeps of an even distribution.
    """
    keys = make_keys(jnp.arange(200, dtype=jnp.uint32), 100)
    steps = jnp.zeros(200, jnp.int32)
    everywhere = jnp.broadcast_to(logits, (200, 100, len(logits)))
    return (
        [draw_tokens(everywhere, keys, steps, options) for options, _ in KEPT],
        [draw_tokens(others, keys, steps, options) for options in LIKELIEST],
        keep_likely(jnp.zeros((1, 1, 8)), sample(top_p=0.5)),
    )


def test_draws_are_from_what_the_options_keep():
    """Frequencies of tokens, the likeliest of each distribution, and which of an even one are kept."""
    others = np.random.default_rng(3).normal(size=(200, 100, 9)).astype(np.float32)
    drawn, likeliest, even = jax.device_get(draw_many(np.log(PROBABILITIES).astype(np.float32), others))
    for (options, kept), tokens in zip(KEPT, drawn, strict=True):
        counts = np.bincount(tokens.ravel(), minlength=6)
        expected = np.zeros(6)
        expected[kept] = PROBABILITIES[kept] ** (1 / options.temperature)
        expected *= tokens.size / expected.sum()
        assert counts[expected == 0].sum() == 0, options
        chi_square = ((counts - expected) ** 2 / np.maximum(expected, 1))[kept].sum()
        assert chi_square < 25, options  # five degrees of freedom: passed by chance once in 7,000 times
    for options, tokens in zip(LIKELIEST, likeliest, strict=True):
        differ = tokens != others.argmax(axis=-1)
        if options.temperature < 1:  # between the best two there may be less than the noise
            best = np.sort(others, axis=-1)
            differ &= best[..., -1] - best[..., -2] > 20 * options.temperature
        assert not differ.any(), options
    values, ids = even
    assert np.isfinite(values).sum() == 4 and sorted(ids.ravel().tolist()) == list(range(8))


def test_whole_samples_come_as_often_as_they_are_likely():
    """Sequences of a Markov chain, against their exact probabilities, beside rows that are not numbers."""
    table = make_tables(1, 5, seed=1)
    table[..., [0, 1]] = -np.inf
    tables = np.repeat(table, 43, axis=0)
    lines = Lines(np.full(43, 2, np.int32), seeds=np.arange(43, dtype=np.uint32))
    sizes = {"max_length": 2, "rows": 43, "vocab_size": 5}
    found = run(tables, lines, options=sample(), n_best=100, **sizes)
    count, words, probability = 40 * 100, {}, {}
    for row in range(40):
        for rank in range(100):
            tokens = tokens_of(found, row, rank)
            words[tokens] = words.get(tokens, 0) + 1
            probability[tokens] = float(np.exp(found.log_probs[row, rank]))
    assert len(words) > 5
    for tokens, p in probability.items():
        assert abs(words[tokens] / count - p) < 5 * np.sqrt(p * (1 - p) / count) + 1e-3
    poisons = {40: np.nan, 41: np.inf, 42: -np.inf}
    for row, poison in poisons.items():
        tables[row] = poison
    beside = run(tables, lines, options=sample(), n_best=100, **sizes)
    for row, poison in poisons.items():
        for rank in range(100):
            assert tokens_of(beside, row, rank) == () and beside.scores[row, rank] == -np.inf, poison
    np.testing.assert_array_equal(beside.tokens[:40], found.tokens[:40])


def test_a_sample_depends_on_its_line_and_seed_alone():
    tables = make_tables(4, 9, seed=2, sharpness=0.7)
    lines = limits(9, 9, 9, 9)._replace(seeds=seeds(5, 6, 7, 8))
    together = run(tables, lines, options=SAMPLE, n_best=3)
    order = [2, 0]
    fewer = Lines(np.array([9, 9], np.int32), seeds=seeds(7, 5))
    sizes = {"rows": 2, "max_length": 9}
    again = run(tables[order], fewer, options=SAMPLE, n_best=3, **sizes)
    one = run(tables[order], fewer, options=SAMPLE, n_best=1, **sizes)
    for row, other in enumerate(order):
        ours = [tokens_of(again, row, rank) for rank in range(3)]
        assert ours == [tokens_of(together, other, rank) for rank in range(3)]
        assert len(set(ours)) == 3 and tokens_of(one, row) in ours
        assert (np.diff(again.scores[row]) <= 0).all()
    reseeded = run(tables, lines._replace(seeds=seeds(9, 6, 7, 8)), options=SAMPLE, n_best=3)
    assert not np.array_equal(reseeded.tokens[0], together.tokens[0])
    np.testing.assert_array_equal(reseeded.tokens[1:], together.tokens[1:])
    same = run(tables[[0, 0]], fewer._replace(seeds=seeds(5, 5)), options=SAMPLE, **sizes)
    assert tokens_of(same, 0) == tokens_of(same, 1)


def test_sampling_the_likeliest_is_greedy_search():
    tables = make_tables(4, 9, seed=3)
    lines = limits(9, 7, 0, 9)._replace(seeds=seeds(1, 2, 3, 4))
    greedy = run_greedy(tables, [9, 7, 0, 9])
    for options in LIKELIEST:
        found = run(tables, lines, options=dataclasses.replace(options, length_penalty=0.7))
        np.testing.assert_array_equal(found.tokens, greedy.tokens, err_msg=str(options))
        np.testing.assert_allclose(found.scores, greedy.scores, rtol=1e-5, err_msg=str(options))


def test_a_search_ends_with_its_longest_sample():
    _, steps = search_lattice({EOS: 1.0}, [50, 50], n_best=4, seeds=seeds(1, 2), method="sample")
    assert steps == 1
