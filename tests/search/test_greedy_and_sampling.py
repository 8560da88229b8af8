"""Sampling: what is drawn, how often, and on what it may not depend."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_search import EOS, QUICK, SYMBOLS, make_tables, next_logits, run_greedy, start_cache, tokens_of
from test_search_options import limits, run

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.search import Lines, search
from flaxformer_mt.search.sampling import draw_tokens, keep_likely, make_keys
from flaxformer_mt.shapes import Cache

PROBABILITIES = np.array([0.02, 0.4, 0.03, 0.25, 0.2, 0.1])


def sample(**fields) -> SearchConfig:
    return SearchConfig(method="sample", **fields)


def seeds(*numbers) -> np.ndarray:
    return np.array(numbers, np.uint32)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def draw_many(options, logits):
    """20,000 draws from one distribution, and what is left of it."""
    keys = make_keys(jnp.arange(200, dtype=jnp.uint32), 100)
    everywhere = jnp.broadcast_to(logits, (200, 100, len(logits)))
    return draw_tokens(everywhere, keys, jnp.zeros(200, jnp.int32), options)


# Cumulated from the likeliest: .4 .65 .85 .95 .98 1.
@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_p": 0.7}, [1, 3, 4]),
        ({"top_p": 0.01}, [1]),
        ({"min_p": 0.3}, [1, 3, 4]),
        ({"min_p": 0.2}, [1, 3, 4, 5]),
        # Of .4 .25 .2, the first two are .765 of it: more than .7.
        ({"top_k": 3, "top_p": 0.7}, [1, 3]),
        # At temperature 2 probabilities are as their square roots: .63 .5 .45 .32 .17 .14 of 2.21.
        ({"temperature": 2.0, "top_p": 0.6}, [1, 3, 4]),
    ],
)
def test_frequencies_are_those_of_what_is_kept(fields, kept):
    options = sample(**fields)
    drawn = np.asarray(draw_many(options, jnp.log(jnp.asarray(PROBABILITIES, jnp.float32))))
    counts = np.bincount(drawn.ravel(), minlength=6)
    expected = np.zeros(6)
    expected[kept] = PROBABILITIES[kept] ** (1 / options.temperature)
    expected *= drawn.size / expected.sum()
    assert counts[expected == 0].sum() == 0
    chi_square = ((counts - expected) ** 2 / np.maximum(expected, 1))[kept].sum()
    assert chi_square < 25  # five degrees of freedom: passed by chance once in 7,000 times


def test_top_p_keeps_the_likeliest_of_even_distributions():
    values, ids = keep_likely(jnp.zeros((1, 1, 8)), sample(top_p=0.5))
    assert np.isfinite(values).sum() == 4 and sorted(np.asarray(ids).ravel().tolist()) == list(range(8))


def test_whole_samples_come_as_often_as_they_are_likely():
    """Sequences of a Markov chain, against their exact probabilities."""
    table = make_tables(1, 5, seed=1)
    tables = np.repeat(table, 40, axis=0)
    tables[..., [0, 1]] = -np.inf
    lines = Lines(np.full(40, 2, np.int32), seeds=np.arange(40, dtype=np.uint32))
    found = run(tables, lines, options=sample(), max_length=2, n_best=100)
    words = {}
    for row in range(40):
        for rank in range(100):
            tokens = tokens_of(found, row, rank)
            words[tokens] = words.get(tokens, 0) + 1
    share = {tokens: count / 4000 for tokens, count in words.items()}
    probability = {
        tokens_of(found, row, rank): float(np.exp(found.log_probs[row, rank]))
        for row in range(40)
        for rank in range(100)
    }
    assert len(share) > 5
    for tokens, p in probability.items():
        assert abs(share[tokens] - p) < 5 * np.sqrt(p * (1 - p) / 4000) + 1e-3


def test_a_sample_depends_on_its_line_and_seed_alone():
    tables = make_tables(4, 9, seed=2, sharpness=0.7)
    lines = limits(9, 9, 9, 9)._replace(seeds=seeds(5, 6, 7, 8))
    options = sample(top_p=0.95)
    together = run(tables, lines, options=options, max_length=9, n_best=3)
    order = [2, 0]
    fewer = Lines(np.array([9, 9], np.int32), seeds=seeds(7, 5))
    again = run(tables[order], fewer, options=options, max_length=12, n_best=3)
    one = run(tables[order], fewer, options=options, max_length=9, n_best=1)
    for row, other in enumerate(order):
        ours = [tokens_of(again, row, rank) for rank in range(3)]
        assert ours == [tokens_of(together, other, rank) for rank in range(3)]
        assert len(set(ours)) == 3 and tokens_of(one, row) in ours
        assert (np.diff(again.scores[row]) <= 0).all()
    reseeded = run(tables, lines._replace(seeds=seeds(9, 6, 7, 8)), options=options, max_length=9, n_best=3)
    assert not np.array_equal(reseeded.tokens[0], together.tokens[0])
    np.testing.assert_array_equal(reseeded.tokens[1:], together.tokens[1:])
    same = run(tables[[0, 0]], Lines(fewer.max_lengths, seeds=seeds(5, 5)), options=options, max_length=9)
    assert tokens_of(same, 0) == tokens_of(same, 1)


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-3}])
def test_sampling_the_likeliest_is_greedy_search(fields):
    tables = make_tables(4, 9, seed=3)
    lines = limits(9, 7, 0, 9)._replace(seeds=seeds(1, 2, 3, 4))
    found = run(tables, lines, options=sample(length_penalty=0.7, **fields), max_length=9)
    greedy = run_greedy(tables, [9, 7, 0, 9], alpha=0.7, max_length=9)
    np.testing.assert_array_equal(found.tokens, greedy.tokens)
    np.testing.assert_allclose(found.scores, greedy.scores, rtol=1e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_numbers_stay_where_they_are(poison):
    tables = make_tables(2, 9, seed=4)
    lines = limits(6, 6)._replace(seeds=seeds(1, 2))
    sound = run(tables, lines, options=sample(), max_length=6)
    tables[1] = poison

    found = jax.jit(
        lambda tables: search(
            next_logits, start_cache(tables, 1), lines, options=sample(), symbols=SYMBOLS, max_length=6
        ),
        compiler_options=QUICK,
    )(tables)
    found = jax.tree.map(np.asarray, found)
    assert tokens_of(found, 1) == () and found.scores[1, 0] == -np.inf
    assert tokens_of(found, 0) == tokens_of(sound, 0)


def test_a_search_ends_with_its_longest_sample():
    calls = []

    def counted(tokens, cache):
        jax.debug.callback(lambda: calls.append(1))
        return jnp.full((*tokens.shape, 5), -jnp.inf).at[..., EOS].set(0.0), cache

    lines = limits(50, 50)._replace(seeds=seeds(1, 2))
    cache = Cache({}, {}, jnp.zeros((), jnp.int32))
    search(counted, cache, lines, options=sample(), symbols=SYMBOLS, max_length=50, n_best=4)
    jax.effects_barrier()
    assert len(calls) == 1
