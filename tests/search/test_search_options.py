"""The options of a search: rules, required sequences, coverage, groups, ensembles, sampling."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_search import (
    BOS,
    EOS,
    GREEDY,
    LONGEST,
    PAD,
    QUICK,
    SYMBOLS,
    VOCAB,
    brute_force,
    log_softmax,
    make_tables,
    next_logits,
    penalty,
    search_lattice,
    search_tables,
    start_cache,
    tokens_of,
)
from tiny_experiment import random_params, small_model

from flaxformer_mt.config import Config, ModelConfig, SearchConfig
from flaxformer_mt.config.checks import check_search, validate
from flaxformer_mt.errors import UserError
from flaxformer_mt.model import make_model
from flaxformer_mt.search import (
    WORD_START,
    Lines,
    Search,
    Symbols,
    ensemble,
    ensemble_caches,
    search,
)
from flaxformer_mt.search.sampling import draw_tokens, keep_likely, make_keys
from flaxformer_mt.shapes import Batch

# 27 prefixes of three words, four continuations each: with four steps and three words that may be chosen
# nothing is ever pruned.
EXHAUSTIVE = SearchConfig(beam_size=108, length_penalty=1.0)
# Nucleus sampling, which most tests share.
SAMPLE = SearchConfig(method="sample", top_p=0.95)


def run(tables, lines, *, options, n_best=1, **sizes):
    """The result on the host, all hypotheses checked to be what the tables say of them."""
    found = search_tables(tables, lines, options=options, n_best=n_best, **sizes)
    for row in range(len(tables)):
        tokens = [tokens_of(found, row, rank) for rank in range(found.lengths.shape[1])]
        expected = {hypothesis: log_prob_of(tables[row], hypothesis) for hypothesis in {*tokens} - {()}}
        for rank, hypothesis in enumerate(tokens):
            if hypothesis:
                np.testing.assert_allclose(found.log_probs[row, rank], expected[hypothesis], rtol=1e-4)
    return found


def log_prob_of(table, tokens) -> float:
    context = (BOS, BOS, *tokens)
    steps = zip(context, context[1:], tokens, strict=False)
    return sum(log_softmax(table[a, b])[c] for a, b, c in steps)


def limits(*lengths) -> Lines:
    return Lines(np.array(lengths, np.int32))


def filled(*rows) -> np.ndarray:
    """Sequences in an array, -1 after the shorter ones."""
    longest = max(map(len, rows))
    return np.array([[*row, *[-1] * (longest - len(row))] for row in rows], np.int32)


def contains(tokens, phrase) -> bool:
    size = len(phrase)
    return any(tuple(tokens[i : i + size]) == tuple(phrase) for i in range(len(tokens) - size + 1))


def test_rules_for_the_tokens_of_each_line():
    """Forced prefixes, suppressed tokens, minimum lengths and required sequences, in rows of one search.

    What is found is the best of all that the rules of its line allow. A prefix may have what is suppressed,
    what follows may not; after the prefix of the third line, a word begins.
    """
    never = 6
    prefixes = [(never, 3), (), (4, WORD_START), *[()] * 7]
    max_lengths = np.array([4, 4, 3, 4, 4, 2, 4, 4, 4, 4], np.int32)
    shortest = np.array([1, 1, 1, 3, 0, 2, 1, 1, 1, 1], np.int32)
    phrases = [*[[]] * 6, *PHRASES]
    tables = make_tables(10, 7, seed=1)
    tables[3:6, ..., [EOS, never]] += 2.0
    lines = Lines(
        max_lengths, prefixes=filled(*prefixes), min_lengths=shortest, required=make_required(phrases)
    )
    tables[2, ..., 4] += 2.0  # the best token after the prefix, if it need not begin a word
    symbols = Symbols(PAD, BOS, EOS, never=(never,), word_starts=(3, never))
    found = run(
        tables, lines, options=EXHAUSTIVE, n_best=4, symbols=symbols, max_length=4, vocab_size=never + 1
    )
    for row, (prefix, limit) in enumerate(zip(prefixes, max_lengths, strict=True)):
        prefix, next_tokens = (prefix[:-1], (3, EOS)) if WORD_START in prefix else (prefix, range(VOCAB))
        size = len(prefix)
        expected = [
            tokens
            for _, _, tokens in brute_force(tables[row], limit, 1.0)
            if tokens[:size] == prefix and never not in tokens[size:]
            if set(tokens[size : size + 1]) <= set(next_tokens)
            if len(tokens) >= shortest[row] and has_all(phrases[row], tokens)
        ][:4]
        assert expected
        for rank, tokens in enumerate(expected):
            assert tokens_of(found, row, rank) == tokens and found.satisfied[row, rank], row
        if phrases[row]:  # the rest is marked
            assert not found.satisfied[row, len(expected) :].any(), row


def test_samples_start_with_their_prefixes_and_follow_the_rules():
    never, tables = 8, make_tables(15, 9, seed=2)
    tables[1, ..., never] = -1e9
    tables[3:, ..., [EOS, never]] += 2.0
    prefixes = [(5, 7, 3), (), (4,), *[()] * 12]
    fields = {"prefixes": filled(*prefixes), "seeds": np.arange(15, dtype=np.uint32)}
    lines = limits(8, 8, 8, *[4, 4, 2] * 4)._replace(**fields)
    shortest = np.array([1, 1, 1, *[3, 0, 2] * 4], np.int32)
    symbols = Symbols(PAD, BOS, EOS, never=(never,))
    ruled = lines._replace(min_lengths=shortest)
    found = run(tables, ruled, options=SAMPLE, n_best=3, symbols=symbols)
    for row, rank in itertools.product(range(15), range(3)):
        tokens, size = tokens_of(found, row, rank), len(prefixes[row])
        assert tokens[:size] == prefixes[row], row
        assert never not in tokens and len(tokens) >= shortest[row], row
    free = run(tables, lines._replace(prefixes=None), options=SAMPLE, n_best=3)
    for rank in range(3):  # a line without a prefix is as it was
        assert tokens_of(free, 1, rank) == tokens_of(found, 1, rank)
    assert any(never in tokens_of(free, row, rank) for row in range(3, 15) for rank in range(3))


@pytest.mark.parametrize("n", [1, 2])
def test_no_ngram_occurs_twice(n):
    def repeats(tokens):
        grams = [tokens[i : i + n] for i in range(len(tokens) - n + 1)]
        return len(set(grams)) < len(grams)

    tables = make_tables(2, 6, seed=4)
    tables[..., 3:] += 1.5
    options = dataclasses.replace(EXHAUSTIVE, no_repeat_ngram=n)
    found = run(tables, limits(4, 3), options=options, n_best=6, max_length=4, vocab_size=6)
    for row, length in enumerate((4, 3)):
        everything = brute_force(tables[row], length, 1.0)
        expected = [tokens for _, _, tokens in everything if not repeats(tokens)][:6]
        assert [tokens_of(found, row, rank) for rank in range(len(expected))] == expected
    long = make_tables(4, 7, seed=5)
    long[..., EOS] = -9.0
    options = dataclasses.replace(GREEDY, no_repeat_ngram=n)
    path = run(long, limits(14, 14, 14, 14), options=options)
    free = run(long, limits(14, 14, 14, 14), options=GREEDY)
    assert not any(repeats(tokens_of(path, row)) for row in range(4))
    assert all(repeats(tokens_of(free, row)) for row in range(4))


PHRASES = [[(3, 4), (4, 5)], [(5, 5, 3)], [], [(4,), (4,), (5, 4)]]


def make_required(rows) -> np.ndarray:
    most, longest = max(map(len, rows)), max(len(phrase) for row in rows for phrase in row)
    array = np.full((len(rows), most, longest), -1, np.int32)
    for row, phrases in enumerate(rows):
        for number, phrase in enumerate(phrases):
            array[row, number, : len(phrase)] = phrase
    return array


def has_all(phrases, tokens) -> bool:
    return all(contains(tokens, phrase) for phrase in phrases)


@pytest.mark.parametrize(("width", "alpha", "n_best"), [(1, 0.7, 1), (4, 1.0, 3)])
def test_a_narrow_beam_contains_what_is_required_however_unlikely(width, alpha, n_best):
    never, tables = 8, make_tables(6, 9, seed=7)
    tables[..., [3, 4, 5]] -= 6.0
    tables[:4, ..., never] = -1e9
    # The last two cannot contain all, and are marked: a phrase longer than the limit, a suppressed token.
    phrases = [*PHRASES, [(3, never, 5)], [(3, never)]]
    lines = limits(12, 12, 12, 12, 2, 6)._replace(required=make_required(phrases))
    options = SearchConfig(beam_size=width, length_penalty=alpha)
    symbols = Symbols(PAD, BOS, EOS, never=(never,))
    found = run(tables, lines, options=options, n_best=n_best, symbols=symbols)
    for row in range(4):
        assert has_all(phrases[row], tokens_of(found, row)) and found.satisfied[row, 0]
    assert found.lengths[4:, 0].all() and not found.satisfied[4:].any() and never not in found.tokens[5]
    free = run(tables, limits(12, 12, 12, 12, 2, 6), options=options, n_best=n_best)
    assert tokens_of(free, 2) == tokens_of(found, 2)  # a line that requires nothing is as it was
    np.testing.assert_allclose(free.scores[2], found.scores[2], rtol=1e-5)
    assert not any(has_all(phrases[row], tokens_of(free, row)) for row in (0, 1, 3))


SOURCE_MASK = np.array([[True, True, True], [True, True, False]])
# What a token looks at, by its id: the end at the first source token, 3 at the second, and so on.
LOOKS_AT = np.array([[0, 0, 0], [0, 0, 0], [0.8, 0.2, 0], [0.1, 0.6, 0.3], [0, 0.5, 0.5], [0.3, 0.7, 0]])


def attentive(tokens, cache):
    """The Markov chain, which looks at the source as LOOKS_AT says of the token before the next."""
    logits, after = next_logits(tokens, cache._replace(per_beam={"before": cache.per_beam["before"]}))
    looks = jnp.asarray(LOOKS_AT, jnp.float32)[tokens]
    return logits, after._replace(per_beam={**after.per_beam, "attention": looks})


def coverage_of(tokens, mask, beta) -> float:
    total = LOOKS_AT[[BOS, *tokens[:-1]]].sum(axis=0)
    return beta * np.log(np.clip(total[mask], 1e-10, 1.0)).sum()


@functools.partial(jax.jit, static_argnums=2, compiler_options=QUICK)
def search_with_coverage(tables, lines, options):
    cache = start_cache(tables, 108)
    cache = cache._replace(per_beam={**cache.per_beam, "attention": jnp.zeros((2, 108, 3))})
    return search(
        attentive,
        cache,
        lines,
        options=options,
        symbols=SYMBOLS,
        max_length=4,
        n_best=4,
        attention_of=lambda cache: cache.per_beam["attention"],
    )


def test_coverage_ranks_hypotheses_by_what_they_looked_at():
    tables, beta = make_tables(2, 6, seed=9), 0.7
    options = SearchConfig(beam_size=108, length_penalty=1.0, coverage_penalty=beta)
    lines = limits(4, 4)._replace(source_mask=SOURCE_MASK)
    found = jax.device_get(search_with_coverage(tables, lines, options))
    without, rows = [], range(2)
    for row in rows:
        everything = brute_force(tables[row], 4, 1.0)
        finished = [(score, tokens) for score, _, tokens in everything if tokens[-1] == EOS]
        without.append([tokens for _, tokens in finished[:4]])
        scored = [(score + coverage_of(tokens, SOURCE_MASK[row], beta), tokens) for score, tokens in finished]
        for rank, (score, tokens) in enumerate(sorted(scored, reverse=True)[:4]):
            assert tokens_of(found, row, rank) == tokens
            np.testing.assert_allclose(found.scores[row, rank], score, rtol=1e-4)
    assert [[tokens_of(found, row, rank) for rank in range(4)] for row in rows] != without


def diverse_beam(table, limit, *, width, groups, strength):
    """Diverse beam search in plain Python, without an early end: (score, tokens), best first."""
    size = width // groups
    live = [[(0.0, ())] for _ in range(groups)]
    finished = set()
    for length in range(1, limit + 1):
        chosen = np.zeros(table.shape[0])
        for group in range(groups):
            candidates = []
            for log_prob, tokens in live[group]:
                context = (BOS, BOS, *tokens)
                for token, step in enumerate(log_softmax(table[context[-2], context[-1]])):
                    if token not in (PAD, BOS):
                        merit = log_prob + step - strength * chosen[token]
                        candidates.append((merit, log_prob + step, (*tokens, token)))
            best = [candidate[1:] for candidate in sorted(candidates, reverse=True)[:size]]
            for _, tokens in best:
                chosen[tokens[-1]] += 1
            finished |= {(lp / penalty(length, 1.0), tokens) for lp, tokens in best if tokens[-1] == EOS}
            live[group] = [(lp, tokens) for lp, tokens in best if tokens[-1] != EOS]
    return sorted(finished, reverse=True)


@pytest.mark.parametrize(("groups", "strength"), [(2, 0.5), (4, 2.0), (2, 0.0)])
def test_groups_are_those_of_diverse_beam_search(groups, strength):
    tables = make_tables(3, 9, seed=10)
    tables[..., EOS] += 1.0
    options = SearchConfig(beam_size=4, diversity_groups=groups, diversity_strength=strength)
    found = run(tables, limits(8, 8, 6), options=options, n_best=4)
    for row, limit in enumerate((8, 8, 6)):
        expected = diverse_beam(tables[row], limit, width=4, groups=groups, strength=strength)
        ours = [tokens_of(found, row, rank) for rank in range(4)]
        assert ours[0] == expected[0][1]
        np.testing.assert_allclose(found.scores[row, 0], expected[0][0], rtol=1e-4)
        ended = [tokens for tokens in ours if tokens and tokens[-1] == EOS]
        assert len(set(ended)) == len(ended) and set(ended) <= {tokens for _, tokens in expected}


EASY, INEXACT = {EOS: 0.9, 3: 0.05, 4: 0.05}, {"stopping": "inexact"}
# Each step one of two beams ends. An exact search would continue for long: words are almost free.
FREE = {"length_penalty": 2.0, **INEXACT}


@pytest.mark.parametrize(
    ("probabilities", "limits", "likely", "options", "steps"),
    [
        # With a limit of 200 a word is worth a second step, as above; one of 40 tokens is not.
        (EASY, [200] * 2, [40, 200], {}, 2),
        (EASY, [200] * 2, [40, 40], {}, 1),
        # Without a finished hypothesis the search goes on to the limit.
        ({3: 0.6, 4: 0.4}, [7], [2], {}, 7),
        # Four are to end: but nothing of up to 40 tokens exceeds the first.
        (EASY, [200] * 2, None, {"patience": 2.0, **INEXACT}, 2),
        (EASY, [200] * 2, [40] * 2, {"patience": 2.0, **INEXACT}, 1),
        ({EOS: 0.45, 3: 0.5, 4: 0.05}, [50], None, {"patience": 0.5, **FREE}, 1),
        ({EOS: 0.45, 3: 0.5, 4: 0.05}, [50], None, {"patience": 1.0, **FREE}, 2),
    ],
)
def test_a_search_stops_where_no_better_hypothesis_is_expected(probabilities, limits, likely, options, steps):
    likely = None if likely is None else np.array(likely, np.int32)
    found, counted = search_lattice(probabilities, limits, likely=likely, beam_size=2, **options)
    assert counted == steps and tokens_of(found, 0) == ((EOS,) if EOS in probabilities else (3,) * 7)


NARROW = SearchConfig(beam_size=3)


@functools.partial(jax.jit, compiler_options=QUICK)
def search_ensemble(tables, lines):
    cache = ensemble_caches([start_cache(table, 3) for table in tables])
    members = ensemble([next_logits] * len(tables))
    return search(members, cache, lines, options=NARROW, symbols=SYMBOLS, max_length=LONGEST, n_best=3)


def test_an_ensemble_is_one_model_of_the_mean():
    one, two = make_tables(2, 9, seed=12), make_tables(2, 9, seed=13)
    tables = [np.concatenate([one, one]), np.concatenate([one, two])]
    found = jax.device_get(search_ensemble(tables, limits(6, 6, 6, 6)))
    logs = [np.apply_along_axis(log_softmax, -1, table) for table in (one, two)]
    expected = run(np.concatenate([one, np.mean(logs, axis=0)]), limits(6, 6, 6, 6), options=NARROW, n_best=3)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.scores[:2], expected.scores[:2], rtol=1e-5)  # of a model and itself
    np.testing.assert_allclose(found.scores[2:], expected.scores[2:], rtol=1e-4)


def test_an_ensemble_has_one_vocabulary():
    with pytest.raises(UserError, match="vocabularies of 7 and 8 entries"):
        search_ensemble([make_tables(2, 7, seed=1), make_tables(2, 8, seed=1)], limits(6, 6))


@pytest.mark.parametrize(
    ("kind", "seed"), [("encoder_decoder", 3), ("encoder_decoder, ssru", 49), ("decoder_only", 11)]
)
def test_hypotheses_whose_tokens_stay_in_place_score_as_in_one_full_pass(kind, seed):
    architecture, _, recurrent = kind.partition(", ")
    attention = {"decoder_self_attention": recurrent or "attention", "tying": "none"}
    config = small_model(2, 8, 2, 8, num_encoder_layers=1, architecture=architecture, **attention)
    model = make_model(config, source_size=11, target_size=11)
    params = random_params(model, seed, scale=0.8)
    source = np.array([[5, 6, 7, EOS, PAD], [9, EOS, PAD, PAD, PAD]], np.int32)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def translate(params):
        cache = model.apply({"params": params}, source, source > 0, 4, 9, method="start_decoding")
        stayed = search(
            lambda tokens, cache: model.apply({"params": params}, tokens, cache, method="decode_step"),
            cache,
            limits(9, 7),
            options=SearchConfig(beam_size=4),
            symbols=SYMBOLS,
            max_length=9,
            n_best=4,
        )
        target_out = stayed.tokens.reshape(8, 9)
        target_in = jnp.pad(target_out[:, :-1], ((0, 0), (1, 0)), constant_values=BOS)
        rows = np.repeat(source, 4, axis=0)
        batch = Batch(rows, target_in, target_out, rows > 0, target_out != PAD)
        return stayed, jax.nn.log_softmax(model.apply({"params": params}, batch, deterministic=True))

    stayed, log_probs = jax.device_get(translate(params))
    assert len(np.unique(stayed.tokens[0])) > 4  # the beams are of different words
    target_out = stayed.tokens.reshape(8, 9)
    steps = np.take_along_axis(log_probs, target_out[..., None], axis=2)[..., 0]
    full = np.where(target_out != PAD, steps, 0.0).sum(axis=1).reshape(2, 4)
    np.testing.assert_allclose(stayed.log_probs, full, atol=1e-5 * 9)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"beam_size": 0}, "beam_size is 0; it must be from 1 to 1000"),
        ({"top_p": 1.5}, "top_p is 1.5; it must be above 0 and at most 1"),
        ({"min_p": -0.1}, "min_p is -0.1; it must be from 0"),
        ({"top_k": -1}, "top_k is -1; it must be at least 0"),
        ({"temperature": 0.0}, "temperature is 0.0; it must be above 0"),
        ({"length_penalty_kind": "wu"}, "length_penalty_kind is 'wu' \\(allowed: gnmt, length"),
        ({"method": "bean"}, "method is 'bean'; did you mean beam\\? \\(allowed: beam, greedy, sample"),
        ({"diversity_groups": 3}, "beam_size 4 is not divisible by .*diversity_groups 3; the nearest .* 3"),
        ({"min_length_offset": 30}, r"min_length_offset 30\) is above the maximum"),
        ({"min_length_ratio": 2.0}, r"min_length_ratio 2.0 \* source .*max_length_ratio 1.5 \* source"),
        ({"patience": float("nan")}, "patience is nan"),
        ({"seed": -1}, "seed is -1"),
        ({"coverage_penalty": float("inf")}, "coverage_penalty is inf; it must be a finite number"),
    ],
)
def test_options_that_cannot_be_are_named(fields, words):
    options = SearchConfig(**fields)
    with pytest.raises(UserError, match=words) as error:
        check_search(options)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=words):
        validate(Config(search=options))
    with pytest.raises(UserError, match=words):
        Search(next_logits, options, SYMBOLS, max_length=4)


def test_what_lines_need_is_named():
    def start(**fields):
        task = Search(next_logits, SearchConfig(**fields), SYMBOLS, max_length=4)
        tables, lines = make_tables(1, 6, seed=1), limits(4)._replace(required=filled((3,))[None])
        return jax.eval_shape(lambda: task.start(start_cache(tables, 4), lines))

    for fields, message in (
        ({"method": "sample"}, "needs a seed for each line"),
        ({"method": "greedy"}, "greedy search does not support required .*; use method beam"),
        ({"coverage_penalty": 1.0}, "needs attention_of"),
        ({"diversity_groups": 2}, "need a single group of beams; set diversity_groups to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            start(**fields)
    with pytest.raises(UserError, match="no cross-attention to measure coverage by"):
        check_search(SearchConfig(coverage_penalty=0.2), model=ModelConfig(architecture="decoder_only"))


def primitives_of(options, lines):
    """The names of all operations of a traced search."""
    tables = np.zeros((2, 9, 9, 9), np.float32)
    width = options.beam_size if options.method == "beam" else 1
    traced = jax.make_jaxpr(
        lambda tables: search(
            next_logits, start_cache(tables, width), lines, options=options, symbols=SYMBOLS, max_length=7
        )
    )(tables)
    return [name.replace("-", "_") for name in re.findall(r" = ([a-z][\w-]*)[\[ ]", str(traced))]


def test_options_that_are_off_are_not_in_the_program():
    plain = primitives_of(SearchConfig(), limits(5, 7))
    for options, lines, extra in (
        (SearchConfig(no_repeat_ngram=2), limits(5, 7), "scatter_max"),
        (SearchConfig(diversity_groups=2), limits(5, 7), "scatter_add"),
        (SearchConfig(), limits(5, 7)._replace(required=make_required([[(3, 4)], [(5,)]])), "cummax"),
    ):
        more = primitives_of(options, lines)
        assert len(more) > len(plain) and extra in more and extra not in plain
    unused = SearchConfig(min_length_ratio=0.0, diversity_strength=3.0, temperature=2.0)
    assert primitives_of(unused, limits(5, 7)) == plain
    drawn = limits(5, 7)._replace(seeds=np.arange(2, dtype=np.uint32))
    for top_p in (0.5, 1.0):
        sampled = primitives_of(SearchConfig(method="sample", top_p=top_p), drawn)
        assert ("cumsum" in sampled) == (top_p < 1)


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


def test_a_search_ends_with_its_longest_sample():
    _, steps = search_lattice({EOS: 1.0}, [50, 50], n_best=4, seeds=seeds(1, 2), method="sample")
    assert steps == 1
