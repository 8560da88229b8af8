"""Search against brute force, against a reference that never stops early, and against hand-made lattices."""

import dataclasses
import itertools
import math
import re
import runpy
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.search import Lines, Symbols, search
from flaxformer_mt.search.candidates import chunk_size, top_candidates
from flaxformer_mt.shapes import Cache

PAD, BOS, EOS = 0, 1, 2
SYMBOLS = Symbols(pad_id=PAD, bos_id=BOS, eos_id=EOS)
SPECIAL = (PAD, BOS, EOS)


def make_tables(batch_size: int, vocab_size: int, *, seed: int, sharpness: float = 1.5) -> np.ndarray:
    """Random logits [B, V, V, V] of the next token, given the one before the last and the last."""
    shape = (batch_size, vocab_size, vocab_size, vocab_size)
    return np.random.default_rng(seed).normal(size=shape, scale=sharpness).astype(np.float32)


def next_logits(tokens, cache):
    """A second-order Markov chain: wrong unless per_beam follows its hypothesis and shared does not."""
    table = cache.shared  # [B, V, V, V]
    rows = jnp.arange(table.shape[0])[:, None]
    logits = table[rows, cache.per_beam["before"], tokens]
    return logits, cache._replace(per_beam={"before": tokens}, index=cache.index + 1)


def start_cache(tables: np.ndarray, width: int) -> Cache:
    before = jnp.full((tables.shape[0], width), BOS, jnp.int32)
    return Cache({"before": before}, jnp.asarray(tables), jnp.zeros((), jnp.int32))


# The programs are small and many: here it pays to compile quickly.
QUICK = {"xla_backend_optimization_level": 0}


# Most tests search rows and tokens of these numbers, so that those of the same options share a program.
ROWS, VOCAB, LONGEST = 16, 9, 15


@partial(jax.jit, static_argnames=("options", "max_length", "n_best", "symbols"), compiler_options=QUICK)
def _search_tables(tables, lines, *, options, max_length, n_best, symbols):
    width = {"greedy": 1, "beam": options.beam_size, "sample": n_best}[options.method]
    cache = start_cache(tables, width)
    return search(
        next_logits, cache, lines, options=options, symbols=symbols, max_length=max_length, n_best=n_best
    )


def pad_tables(tables: np.ndarray, rows: int, vocab_size: int) -> np.ndarray:
    """More rows, and tokens that are never probable."""
    padded = np.full((rows, vocab_size, vocab_size, vocab_size), -1e9, np.float32)
    size = tables.shape[1]
    padded[: len(tables), :size, :size, :size] = tables
    return padded


def pad_lines(lines: Lines, rows: int) -> Lines:
    def pad(leaf, fill):
        return np.pad(leaf, [(0, rows - len(leaf)), *[(0, 0)] * (leaf.ndim - 1)], constant_values=fill)

    fills = {"prefixes": -1, "required": -1}
    fields = {name: leaf for name, leaf in lines._asdict().items() if leaf is not None}
    return lines._replace(**{name: pad(leaf, fills.get(name, 0)) for name, leaf in fields.items()})


def search_tables(
    tables, lines, *, options, n_best, symbols=SYMBOLS, max_length=LONGEST, rows=ROWS, vocab_size=VOCAB
):
    padded = pad_tables(tables, rows, vocab_size), pad_lines(lines, rows)
    found = _search_tables(*padded, options=options, max_length=max_length, n_best=n_best, symbols=symbols)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[: len(tables)], found)


def run_beam(tables, limits, *, width, alpha=1.0, n_best=3, kind="gnmt", **sizes):
    options = SearchConfig(beam_size=width, length_penalty=alpha, length_penalty_kind=kind)
    return search_tables(tables, Lines(np.array(limits, np.int32)), options=options, n_best=n_best, **sizes)


GREEDY = SearchConfig(method="greedy", length_penalty=0.7)


def run_greedy(tables, limits):
    return search_tables(tables, Lines(np.array(limits, np.int32)), options=GREEDY, n_best=1)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - np.logaddexp.reduce(logits)


def penalty(length: int, alpha: float, kind: str = "gnmt") -> float:
    return ((5 + length) / 6) ** alpha if kind == "gnmt" else length**alpha


def brute_force(table, limit, alpha, kind="gnmt"):
    """All (score, log-probability, tokens), the finished ones first, then those that the limit cuts off."""
    finished, cut = [], []
    words = [token for token in range(table.shape[0]) if token not in SPECIAL]
    for length in range(1, limit + 1):
        endings = [EOS] if length < limit else [EOS, *words]
        for prefix in itertools.product(words, repeat=length - 1):
            for ending in endings:
                tokens = (*prefix, ending)
                context = (BOS, BOS, *tokens)
                steps = zip(context, context[1:], tokens, strict=False)
                log_prob = sum(log_softmax(table[a, b])[c] for a, b, c in steps)
                group = finished if ending == EOS else cut
                group.append((log_prob / penalty(length, alpha, kind), log_prob, tokens))
    return sorted(finished, reverse=True) + sorted(cut, reverse=True)


def patient_beam(table, limit, alpha, width, kind="gnmt"):
    """Beam search in plain Python that always continues to the limit: (score, tokens), best first."""
    live, finished = [(0.0, ())], []
    for length in range(1, limit + 1):
        candidates = []
        for log_prob, tokens in live:
            context = (BOS, BOS, *tokens)
            for token, step in enumerate(log_softmax(table[context[-2], context[-1]])):
                if token not in (PAD, BOS):
                    candidates.append((log_prob + step, (*tokens, token)))
        best = sorted(candidates, reverse=True)[:width]
        finished += [(lp / penalty(length, alpha, kind), tokens) for lp, tokens in best if tokens[-1] == EOS]
        live = [(log_prob, tokens) for log_prob, tokens in best if tokens[-1] != EOS]
    cut = [(log_prob / penalty(limit, alpha, kind), tokens) for log_prob, tokens in live]
    return sorted(finished, reverse=True) + sorted(cut, reverse=True)


def tokens_of(result, row: int, rank: int = 0) -> tuple[int, ...]:
    """A hypothesis without its padding, which is checked."""
    length = int(result.lengths[row, rank])
    tokens = np.asarray(result.tokens[row, rank]).tolist()
    assert tokens[length:] == [PAD] * (len(tokens) - length)
    return tuple(tokens[:length])


WIDE = {"max_length": 4, "vocab_size": 6}


@pytest.mark.parametrize(("alpha", "kind"), [(0.0, "gnmt"), (2.5, "gnmt"), (1.0, "length"), (0.6, "length")])
def test_a_wide_beam_finds_the_best_of_all(alpha, kind):
    limits = [4, 3, 1, 2]
    tables = make_tables(4, 6, seed=1)
    # 27 prefixes of three words, four continuations each: nothing is ever pruned.
    found = run_beam(tables, limits, width=108, alpha=alpha, n_best=8, kind=kind, **WIDE)
    for row, limit in enumerate(limits):
        expected = brute_force(tables[row], limit, alpha, kind)[:8]
        for rank, (score, log_prob, tokens) in enumerate(expected):
            assert tokens_of(found, row, rank) == tokens
            np.testing.assert_allclose(found.scores[row, rank], score, rtol=1e-5)
            np.testing.assert_allclose(found.log_probs[row, rank], log_prob, rtol=1e-5)
        for rank in range(len(expected), 8):  # fewer than eight exist
            assert tokens_of(found, row, rank) == ()
            assert found.scores[row, rank] == found.log_probs[row, rank] == -np.inf


@pytest.mark.parametrize(
    ("width", "alpha", "kind"), [(2, 0.0, "gnmt"), (3, 1.0, "gnmt"), (5, 2.0, "gnmt"), (3, 1.0, "length")]
)
def test_stopping_early_changes_nothing(width, alpha, kind):
    limits = [9, 7, 12, 1, 5, 12]
    tables = make_tables(6, 9, seed=3)
    tables[..., EOS] += 1.0  # sentences end well before their limits
    found = run_beam(tables, limits, width=width, alpha=alpha, n_best=width, kind=kind)
    for row, limit in enumerate(limits):
        expected = patient_beam(tables[row], limit, alpha, width, kind)[:width]
        assert [tokens_of(found, row, rank) for rank in range(len(expected))] == [t for _, t in expected]
        np.testing.assert_allclose(found.scores[row, : len(expected)], [s for s, _ in expected], rtol=1e-5)


_steps = []


@partial(jax.jit, static_argnames=("options", "n_best"), compiler_options=QUICK)
def _search_lattice(logits, lines, *, options, n_best):
    def counted(tokens, cache):
        jax.debug.callback(lambda: _steps.append(1))
        return jnp.broadcast_to(logits, (*tokens.shape, 7)), cache

    return search(
        counted,
        Cache({}, {}, jnp.zeros((), jnp.int32)),
        lines,
        options=options,
        symbols=SYMBOLS,
        max_length=200,
        n_best=n_best,
    )


def search_lattice(probabilities, limits, *, n_best=1, seeds=None, likely=None, **options):
    """A search with the same next token distribution everywhere: the result, and the number of its steps."""
    logits = np.full(7, -np.inf, np.float32)
    for token, probability in probabilities.items():
        logits[token] = math.log(probability)
    lines = Lines(np.array(limits, np.int32), likely, seeds=seeds)
    _steps.clear()
    found = _search_lattice(logits, lines, options=SearchConfig(**options), n_best=n_best)
    jax.effects_barrier()
    return jax.tree.map(np.asarray, found), len(_steps)


# eos has log-probability -0.1054, the best word -2.996, whose score is at best -2.996 / ((5 + limit) / 6).
@pytest.mark.parametrize(
    ("limit", "steps"),
    [
        (40, 1),  # -2.996 / 7.5 = -0.399 is hopeless
        (200, 2),  # -2.996 / 34.2 = -0.0877 is not: a second step is needed, then -5.99 / 34.2 = -0.175
        (0, 0),  # rows of limit 0 are not searched
    ],
)
def test_search_ends_when_no_prefix_can_win(limit, steps):
    found, counted = search_lattice({EOS: 0.9, 3: 0.05, 4: 0.05}, [limit] * 2, beam_size=2)
    assert counted == steps
    for row in range(2):
        assert tokens_of(found, row) == ((EOS,) if steps else ())
    if steps:
        np.testing.assert_allclose(found.scores, [[math.log(0.9)]] * 2, rtol=1e-5)


def hand_made_table() -> np.ndarray:
    """Probabilities: first 5 .6, eos .3, 6 .1; after 5: 6 .5, eos .4, 5 .1; after 6: eos .9, 5 .1."""
    rows = {BOS: {5: 0.6, EOS: 0.3, 6: 0.1}, 5: {6: 0.5, EOS: 0.4, 5: 0.1}, 6: {EOS: 0.9, 5: 0.1}}
    table = np.full((1, 7, 7, 7), -1e9, np.float32)
    for last, following in rows.items():
        for token, probability in following.items():
            table[0, :, last, token] = math.log(probability)
    return table


def test_greedy_follows_the_most_probable_token():
    found = run_greedy(hand_made_table(), [4])
    assert tokens_of(found, 0) == (5, 6, EOS)
    np.testing.assert_allclose(np.exp(found.log_probs[0, 0]), 0.27, rtol=1e-5)
    np.testing.assert_allclose(found.scores[0, 0], math.log(0.27) / (8 / 6) ** 0.7, rtol=1e-5)


def test_a_limit_cuts_and_a_finished_hypothesis_goes_before_what_is_cut():
    # With one token, [eos] at .3 is finished, [5] at .6 is not. Width 1 has only [5] to offer.
    wide = run_beam(hand_made_table(), [1], width=3)
    assert [tokens_of(wide, 0, rank) for rank in range(3)] == [(EOS,), (5,), (6,)]
    narrow = run_beam(hand_made_table(), [1], width=1, alpha=0.7, n_best=1)
    assert tokens_of(narrow, 0) == (5,)
    assert tokens_of(run_greedy(hand_made_table(), [2]), 0) == (5, 6)


def test_width_one_is_greedy():
    tables = make_tables(16, 9, seed=5)
    limits = [15, 1, 0, *range(2, 15)]
    beam = run_beam(tables, limits, width=1, alpha=0.7, n_best=1)
    greedy = run_greedy(tables, limits)
    assert len(set(np.asarray(greedy.lengths).ravel().tolist())) > 4  # the chains end at all kinds of lengths
    np.testing.assert_array_equal(beam.tokens, greedy.tokens)
    np.testing.assert_array_equal(beam.lengths, greedy.lengths)
    np.testing.assert_allclose(beam.scores, greedy.scores, rtol=1e-6)
    np.testing.assert_allclose(beam.log_probs, greedy.log_probs, rtol=1e-6)


def test_a_sentence_does_not_depend_on_its_batch():
    """Neither on the other rows and their order, nor on the size of the arrays."""
    tables = make_tables(5, 9, seed=7)
    limits = np.array([6, 12, 3, 9, 0])
    together = run_beam(tables, limits, width=4)
    order = [3, 1, 4, 0, 2]
    shuffled = run_beam(tables[order], limits[order], width=4)
    for row, other in enumerate(order):
        alone = run_beam(tables[[other]], limits[[other]], width=4, rows=1, max_length=20)
        for rank in range(3):
            assert tokens_of(together, other, rank) == tokens_of(alone, 0, rank)
            assert tokens_of(shuffled, row, rank) == tokens_of(alone, 0, rank)
        np.testing.assert_array_equal(together.scores[other], alone.scores[0])
        np.testing.assert_array_equal(shuffled.scores[row], alone.scores[0])


def test_pad_and_bos_are_never_chosen_but_keep_their_probability():
    tables = make_tables(3, 9, seed=8)
    tables[..., PAD] += 6.0
    tables[..., BOS] += 6.0
    for found in (run_beam(tables, np.full(3, 8), width=3), run_greedy(tables, np.full(3, 8))):
        for row, rank in itertools.product(range(3), range(found.lengths.shape[1])):
            tokens = tokens_of(found, row, rank)
            assert tokens and not {PAD, BOS} & set(tokens)
            context = (BOS, BOS, *tokens)
            steps = zip(context, context[1:], tokens, strict=False)
            log_prob = sum(log_softmax(tables[row, a, b])[c] for a, b, c in steps)
            np.testing.assert_allclose(found.log_probs[row, rank], log_prob, rtol=1e-4)


def test_logits_that_are_not_numbers_stay_where_they_are():
    tables = make_tables(7, 9, seed=9)
    sound = run_beam(tables, np.full(7, 8), width=3)
    poisons = {1: np.nan, 3: np.inf, 5: -np.inf}
    for row, poison in poisons.items():
        tables[row] = poison
    beam, greedy = run_beam(tables, np.full(7, 8), width=3), run_greedy(tables, np.full(7, 8))
    for found in (beam, greedy):
        for row, poison in poisons.items():
            assert tokens_of(found, row) == (), poison
            assert found.scores[row, 0] == found.log_probs[row, 0] == -np.inf, poison
        assert np.isfinite(found.scores[::2]).all()
    for row in range(0, 7, 2):
        assert tokens_of(beam, row) == tokens_of(sound, row)


def test_a_beam_that_breaks_does_not_break_the_others():
    table = hand_made_table()
    table[0, :, 5, 6] = np.nan  # whatever follows 5 is lost
    found = run_beam(table, [4], width=3, alpha=0.0)
    assert [tokens_of(found, 0, rank) for rank in range(2)] == [(EOS,), (6, EOS)]


def test_arguments_that_cannot_be():
    for n_best, message in ((4, "n_best is 4, but beam search with beam_size 3 keeps 3"), (0, "n_best is 0")):
        with pytest.raises(UserError, match=message):
            run_beam(hand_made_table(), [4], width=3, alpha=0.0, n_best=n_best)
    for ids, message in (
        ({"eos_id": 0}, "eos_id 0 must differ from pad_id 0"),
        ({"eos_id": 2, "never": (2,)}, "eos_id 2 is among the ids that are never chosen"),
    ):
        with pytest.raises(ValueError, match=message):
            Symbols(pad_id=0, bos_id=1, **ids)


@partial(jax.jit, compiler_options=QUICK)
def find_candidates(inputs):
    return {key: top_candidates(logits, count=key[1], banned=(PAD, BOS)) for key, logits in inputs.items()}


def test_top_candidates_are_those_of_a_full_sort():
    # 130 and 1,003 have padded chunks.
    assert [*map(chunk_size, (160, 1000, 32_000, 130, 1003))] == [80, 40, 64, 64, 64]
    cases = [(7, 7), (64, 1), (130, 2), (160, 1), (1000, 5), (1000, 24), (1000, 25), (1003, 5)]
    inputs = {}
    for size, count in cases:
        logits = np.random.default_rng(size + count).normal(size=(3, 2, size)).astype(np.float32)
        logits[0, 0, 5:] = -np.inf  # fewer possible tokens than asked for
        inputs[size, count] = logits
    free = jax.device_get(find_candidates(inputs))
    for size, count in cases:
        found, tokens = free[size, count]
        case = f"{count} of {size}"
        for b, w in itertools.product(range(3), range(2)):
            expected = log_softmax(inputs[size, count][b, w])
            expected[[PAD, BOS]] = -np.inf
            best = np.sort(expected)[::-1][:count]
            np.testing.assert_allclose(found[b, w], best, rtol=1e-5, err_msg=case)
            chosen = tokens[b, w]
            assert len(set(chosen.tolist())) == count or np.isneginf(found[b, w]).any(), case
            assert ((chosen >= 0) & (chosen < size)).all(), case
            np.testing.assert_allclose(expected[chosen], found[b, w], rtol=1e-5, err_msg=case)


def test_the_example_of_a_model_of_your_own_runs():
    found = runpy.run_path(str(Path(__file__).resolve().parents[2] / "recipes" / "own_model.py"))["found"]
    assert [tokens_of(found, 0, rank) for rank in range(2)] == [(4, 2), (3, 2)]
    np.testing.assert_allclose(np.exp(found.log_probs[0]), [0.36, 0.24], rtol=1e-5)


def test_the_document_names_every_option():
    text = (Path(__file__).resolve().parents[2] / "docs" / "decoding.md").read_text(encoding="utf-8")
    names = [field.name for field in dataclasses.fields(SearchConfig)]
    missing = [name for name in names if not re.search(f"`(--)?{name}", text)]
    assert not missing
