"""Search against brute force, against a reference that never stops early, and against hand-made lattices."""

import dataclasses
import functools
import itertools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.decoding.sizes import plan_batches, round_down, round_up
from flaxformer_mt.errors import UserError
from flaxformer_mt.search import Lines, Symbols, search
from flaxformer_mt.search.candidates import top_candidates
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


@functools.partial(jax.jit, static_argnames=("options", "max_length", "n_best"), compiler_options=QUICK)
def search_tables(tables, lines, *, options, max_length, n_best):
    width = 1 if options.method == "greedy" else options.beam_size
    return search(
        next_logits,
        start_cache(tables, width),
        lines,
        options=options,
        symbols=SYMBOLS,
        max_length=max_length,
        n_best=n_best,
    )


def run_beam(tables, limits, *, width, alpha, max_length, n_best=1, kind="gnmt"):
    options = SearchConfig(beam_size=width, length_penalty=alpha, length_penalty_kind=kind)
    lines = Lines(np.asarray(limits))
    found = search_tables(tables, lines, options=options, max_length=max_length, n_best=n_best)
    return jax.tree.map(np.asarray, found)


def run_greedy(tables, limits, *, alpha, max_length):
    options = SearchConfig(method="greedy", length_penalty=alpha)
    found = search_tables(tables, Lines(np.asarray(limits)), options=options, max_length=max_length, n_best=1)
    return jax.tree.map(np.asarray, found)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - np.logaddexp.reduce(logits)


def penalty(length: int, alpha: float, kind: str = "gnmt") -> float:
    return ((5 + length) / 6) ** alpha if kind == "gnmt" else length**alpha


def brute_force(
    table: np.ndarray, limit: int, alpha: float, kind: str = "gnmt"
) -> list[tuple[float, float, tuple[int, ...]]]:
    """All (score, log-probability, tokens), the finished ones first, then those that the limit cuts off."""
    finished, cut = [], []
    words = [token for token in range(table.shape[0]) if token not in SPECIAL]
    for length in range(1, limit + 1):
        endings = [EOS] if length < limit else [EOS, *words]
        for prefix in itertools.product(words, repeat=length - 1):
            for ending in endings:
                tokens = (*prefix, ending)
                context = (BOS, BOS, *tokens)
                log_prob = sum(
                    log_softmax(table[a, b])[c] for a, b, c in zip(context, context[1:], tokens, strict=False)
                )
                group = finished if ending == EOS else cut
                group.append((log_prob / penalty(length, alpha, kind), log_prob, tokens))
    return sorted(finished, reverse=True) + sorted(cut, reverse=True)


def patient_beam(
    table: np.ndarray, limit: int, alpha: float, width: int, kind: str = "gnmt"
) -> list[tuple[float, tuple[int, ...]]]:
    """Beam search in plain Python that always goes on to the limit: (score, tokens), best first."""
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


# ---- exactness ----


@pytest.mark.parametrize(("alpha", "kind"), [(0.0, "gnmt"), (2.5, "gnmt"), (1.0, "length"), (0.6, "length")])
def test_a_wide_beam_finds_the_best_of_all(alpha, kind):
    limits = [4, 3, 1, 2]
    tables = make_tables(4, 6, seed=1)
    # 27 prefixes of three words, four continuations each: nothing is ever pruned.
    found = run_beam(tables, limits, width=108, alpha=alpha, max_length=4, n_best=8, kind=kind)
    for row, limit in enumerate(limits):
        expected = brute_force(tables[row], limit, alpha, kind)[:8]
        for rank, (score, log_prob, tokens) in enumerate(expected):
            assert tokens_of(found, row, rank) == tokens
            np.testing.assert_allclose(found.scores[row, rank], score, rtol=1e-5)
            np.testing.assert_allclose(found.log_probs[row, rank], log_prob, rtol=1e-5)
        for rank in range(len(expected), 8):  # fewer than eight exist
            assert tokens_of(found, row, rank) == ()
            assert found.scores[row, rank] == found.log_probs[row, rank] == -np.inf


def test_no_width_beats_the_best_of_all_and_wide_ones_reach_it():
    alpha = 1.0
    tables = make_tables(6, 6, seed=2)
    limits = np.full(6, 4)
    best = np.array([brute_force(table, 4, alpha)[0][0] for table in tables])
    reached = []
    for width in (1, 3, 108):
        found = run_beam(tables, limits, width=width, alpha=alpha, max_length=4)
        ended = [tokens_of(found, row)[-1] == EOS for row in range(6)]
        scores = np.where(ended, found.scores[:, 0], -np.inf)
        assert (scores <= best + 1e-5).all()
        reached.append(int(np.isclose(scores, best, rtol=1e-5).sum()))
    assert reached[-1] == 6 and reached[0] < 6


@pytest.mark.parametrize(
    ("width", "alpha", "kind"), [(2, 0.0, "gnmt"), (3, 1.0, "gnmt"), (5, 2.0, "gnmt"), (3, 1.0, "length")]
)
def test_stopping_early_changes_nothing(width, alpha, kind):
    limits = [9, 7, 12, 1, 5, 12]
    tables = make_tables(6, 11, seed=3)
    tables[..., EOS] += 1.0  # sentences end well before their limits
    found = run_beam(tables, limits, width=width, alpha=alpha, max_length=12, n_best=width, kind=kind)
    for row, limit in enumerate(limits):
        expected = patient_beam(tables[row], limit, alpha, width, kind)[:width]
        assert [tokens_of(found, row, rank) for rank in range(len(expected))] == [t for _, t in expected]
        np.testing.assert_allclose(found.scores[row, : len(expected)], [s for s, _ in expected], rtol=1e-5)


def constant_lattice(probabilities: dict[int, float]) -> tuple:
    """The same next token distribution everywhere, as (next_logits, a list that grows with its calls)."""
    logits = np.full(7, -np.inf, np.float32)
    for token, probability in probabilities.items():
        logits[token] = math.log(probability)
    calls = []

    def counted(tokens, cache):
        jax.debug.callback(lambda: calls.append(1))
        return jnp.broadcast_to(logits, (*tokens.shape, 7)), cache

    return counted, calls


# eos has log-probability -0.1054, the best word -2.996, whose score is at best -2.996 / ((5 + limit) / 6).
@pytest.mark.parametrize(
    ("alpha", "limit", "steps"),
    [
        (1.0, 40, 1),  # -2.996 / 7.5 = -0.399 is hopeless
        (1.0, 200, 2),  # -2.996 / 34.2 = -0.0877 is not: a second step is needed, then -5.99 / 34.2 = -0.175
    ],
)
def test_search_ends_when_no_prefix_can_win(alpha, limit, steps):
    counted, calls = constant_lattice({EOS: 0.9, 3: 0.05, 4: 0.05})
    found = search(
        counted,
        Cache({}, {}, jnp.zeros((), jnp.int32)),
        Lines(jnp.array([limit])),
        options=SearchConfig(beam_size=2, length_penalty=alpha),
        symbols=SYMBOLS,
        max_length=limit,
    )
    jax.effects_barrier()
    assert len(calls) == steps
    assert tokens_of(jax.tree.map(np.asarray, found), 0) == (EOS,)
    np.testing.assert_allclose(found.scores, [[math.log(0.9)]], rtol=1e-5)


# ---- by hand ----


def hand_made_table() -> np.ndarray:
    """Probabilities: first 5 .6, eos .3, 6 .1; after 5: 6 .5, eos .4, 5 .1; after 6: eos .9, 5 .1."""
    rows = {BOS: {5: 0.6, EOS: 0.3, 6: 0.1}, 5: {6: 0.5, EOS: 0.4, 5: 0.1}, 6: {EOS: 0.9, 5: 0.1}}
    table = np.full((1, 7, 7, 7), -1e9, np.float32)
    for last, following in rows.items():
        for token, probability in following.items():
            table[0, :, last, token] = math.log(probability)
    return table


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        # .3 = [eos], .6 * .4 = .24 = [5 eos], .6 * .5 * .9 = .27 = [5 6 eos]
        (0.0, [(0.3, (EOS,)), (0.27, (5, 6, EOS)), (0.24, (5, EOS))]),
        # ln .27 / (8/6) = -0.982, ln .3 = -1.204, ln .24 / (7/6) = -1.223
        (1.0, [(0.27, (5, 6, EOS)), (0.3, (EOS,)), (0.24, (5, EOS))]),
    ],
)
def test_the_pool_ranks_lengths_by_score(alpha, expected):
    found = run_beam(hand_made_table(), [4], width=3, alpha=alpha, max_length=4, n_best=3)
    assert [tokens_of(found, 0, rank) for rank in range(3)] == [tokens for _, tokens in expected]
    np.testing.assert_allclose(np.exp(found.log_probs[0]), [p for p, _ in expected], rtol=1e-5)


def test_greedy_follows_the_most_probable_token():
    found = run_greedy(hand_made_table(), [4], alpha=1.0, max_length=4)
    assert tokens_of(found, 0) == (5, 6, EOS)
    np.testing.assert_allclose(np.exp(found.log_probs[0, 0]), 0.27, rtol=1e-5)
    np.testing.assert_allclose(found.scores[0, 0], math.log(0.27) / (8 / 6), rtol=1e-5)


def test_a_limit_cuts_and_a_finished_hypothesis_goes_before_what_is_cut():
    # With one token, [eos] at .3 is finished, [5] at .6 is not. Width 1 has only [5] to offer.
    wide = run_beam(hand_made_table(), [1], width=3, alpha=1.0, max_length=4, n_best=3)
    assert [tokens_of(wide, 0, rank) for rank in range(3)] == [(EOS,), (5,), (6,)]
    narrow = run_beam(hand_made_table(), [1], width=1, alpha=1.0, max_length=4)
    assert tokens_of(narrow, 0) == (5,)
    assert tokens_of(run_greedy(hand_made_table(), [2], alpha=1.0, max_length=4), 0) == (5, 6)


def test_eos_at_the_first_step():
    table = hand_made_table()
    table[0, :, BOS, EOS] = 5.0
    for found in (
        run_beam(table, [4], width=3, alpha=0.0, max_length=4, n_best=3),
        run_greedy(table, [4], alpha=1.0, max_length=4),
    ):
        assert tokens_of(found, 0) == (EOS,)


# ---- greedy ----


def test_width_one_is_greedy():
    tables = make_tables(16, 23, seed=5)
    limits = [15, 1, 0, *range(2, 15)]
    beam = run_beam(tables, limits, width=1, alpha=0.7, max_length=15)
    greedy = run_greedy(tables, limits, alpha=0.7, max_length=15)
    assert len(set(np.asarray(greedy.lengths).ravel().tolist())) > 4  # the chains end at all kinds of lengths
    np.testing.assert_array_equal(beam.tokens, greedy.tokens)
    np.testing.assert_array_equal(beam.lengths, greedy.lengths)
    np.testing.assert_allclose(beam.scores, greedy.scores, rtol=1e-6)
    np.testing.assert_allclose(beam.log_probs, greedy.log_probs, rtol=1e-6)


# ---- what a result must not depend on ----


def test_a_sentence_does_not_depend_on_its_batch():
    tables = make_tables(5, 9, seed=7)
    limits = np.array([6, 12, 3, 9, 0])
    together = run_beam(tables, limits, width=4, alpha=1.0, max_length=12, n_best=3)
    order = [3, 1, 4, 0, 2]
    shuffled = run_beam(tables[order], limits[order], width=4, alpha=1.0, max_length=20, n_best=3)
    for row, other in enumerate(order):
        alone = run_beam(
            tables[other : other + 1], limits[[other]], width=4, alpha=1.0, max_length=12, n_best=3
        )
        for rank in range(3):
            assert tokens_of(together, other, rank) == tokens_of(alone, 0, rank)
            assert tokens_of(shuffled, row, rank) == tokens_of(alone, 0, rank)
        np.testing.assert_array_equal(together.scores[other], alone.scores[0])
        np.testing.assert_array_equal(shuffled.scores[row], alone.scores[0])


def test_rows_with_limit_zero_are_not_searched():
    counted, calls = constant_lattice({3: 1.0})
    cache = Cache({}, {}, jnp.zeros((), jnp.int32))
    beam, greedy = (
        search(counted, cache, Lines(np.zeros(2, int)), options=options, symbols=SYMBOLS, max_length=5)
        for options in (SearchConfig(beam_size=2), SearchConfig(method="greedy"))
    )
    jax.effects_barrier()
    assert not calls
    for found in (beam, greedy):
        assert tokens_of(found, 0) == tokens_of(found, 1) == ()


# ---- what must never happen ----


def test_pad_and_bos_are_never_chosen_but_keep_their_probability():
    tables = make_tables(3, 9, seed=8)
    tables[..., PAD] += 6.0
    tables[..., BOS] += 6.0
    for found in (
        run_beam(tables, np.full(3, 8), width=3, alpha=1.0, max_length=8, n_best=3),
        run_greedy(tables, np.full(3, 8), alpha=1.0, max_length=8),
    ):
        for row, rank in itertools.product(range(3), range(found.lengths.shape[1])):
            tokens = tokens_of(found, row, rank)
            assert tokens and not {PAD, BOS} & set(tokens)
            context = (BOS, BOS, *tokens)
            steps = zip(context, context[1:], tokens, strict=False)
            log_prob = sum(log_softmax(tables[row, a, b])[c] for a, b, c in steps)
            np.testing.assert_allclose(found.log_probs[row, rank], log_prob, rtol=1e-4)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_numbers_stay_where_they_are(poison):
    tables = make_tables(3, 9, seed=9)
    sound = run_beam(tables, np.full(3, 8), width=3, alpha=1.0, max_length=8, n_best=3)
    tables[1] = poison
    for found in (
        run_beam(tables, np.full(3, 8), width=3, alpha=1.0, max_length=8, n_best=3),
        run_greedy(tables, np.full(3, 8), alpha=1.0, max_length=8),
    ):
        assert tokens_of(found, 1) == ()
        assert found.scores[1, 0] == found.log_probs[1, 0] == -np.inf
        assert np.isfinite(found.scores[[0, 2]]).all()
    beam = run_beam(tables, np.full(3, 8), width=3, alpha=1.0, max_length=8, n_best=3)
    for row in (0, 2):
        assert tokens_of(beam, row) == tokens_of(sound, row)


def test_a_beam_that_breaks_does_not_break_the_others():
    table = hand_made_table()
    table[0, :, 5, 6] = np.nan  # whatever follows 5 is lost
    found = run_beam(table, [4], width=3, alpha=0.0, max_length=4, n_best=3)
    assert [tokens_of(found, 0, rank) for rank in range(2)] == [(EOS,), (6, EOS)]


def test_arguments_that_cannot_be():
    table = hand_made_table()
    with pytest.raises(UserError, match="n_best is 4, but beam search with beam_size 3 keeps 3; give 1 to 3"):
        run_beam(table, [4], width=3, alpha=0.0, max_length=4, n_best=4)
    with pytest.raises(UserError, match="n_best is 0"):
        run_beam(table, [4], width=3, alpha=0.0, max_length=4, n_best=0)
    with pytest.raises(ValueError, match="eos_id 0 must differ from pad_id 0"):
        Symbols(pad_id=0, bos_id=1, eos_id=0)
    with pytest.raises(ValueError, match="eos_id 2 is among the ids that are never chosen"):
        Symbols(pad_id=0, bos_id=1, eos_id=2, never=(2,))


# ---- candidates ----


@pytest.mark.parametrize(("size", "count"), [(7, 7), (64, 1), (130, 2), (1000, 5), (1000, 15), (1000, 16)])
def test_top_candidates_are_those_of_a_full_sort(size, count):
    logits = np.random.default_rng(size + count).normal(size=(3, 2, size)).astype(np.float32)
    logits[0, 0, 5:] = -np.inf  # fewer possible tokens than asked for
    compiled = jax.jit(lambda x: top_candidates(x, count=count, banned=(PAD, BOS)), compiler_options=QUICK)
    found, tokens = map(np.asarray, compiled(logits))
    for b, w in itertools.product(range(3), range(2)):
        expected = log_softmax(logits[b, w])
        expected[[PAD, BOS]] = -np.inf
        np.testing.assert_allclose(found[b, w], np.sort(expected)[::-1][:count], rtol=1e-5)
        chosen = tokens[b, w]
        assert len(set(chosen.tolist())) == count or np.isneginf(found[b, w]).any()
        assert ((chosen >= 0) & (chosen < size)).all()
        np.testing.assert_allclose(expected[chosen], found[b, w], rtol=1e-5)


@pytest.mark.parametrize(("size", "count"), [(100, 5), (1000, 5)])
def test_an_id_that_is_barred_for_some_beams_is_chosen_by_the_others(size, count):
    logits = np.random.default_rng(size).normal(size=(2, 3, size)).astype(np.float32)
    logits[:, :, EOS] = 9.0
    barred = np.array([[True], [False]])
    compiled = jax.jit(
        lambda x: top_candidates(x, count=count, banned=(PAD,), barred=(EOS, barred)), compiler_options=QUICK
    )
    found, tokens = map(np.asarray, compiled(logits))
    assert (tokens[0] != EOS).all() and (tokens[1, :, 0] == EOS).all()
    expected = np.stack([[log_softmax(own) for own in line] for line in logits])
    expected[:, :, PAD] = expected[0, :, EOS] = -np.inf
    np.testing.assert_allclose(found, -np.sort(-expected)[..., :count], rtol=1e-5, atol=1e-6)


# ---- batches ----


def test_the_ladder():
    assert [round_up(n) for n in (1, 2, 3, 4, 5, 6, 7, 9, 13, 17, 25, 33, 128, 129)] == [
        1, 2, 3, 4, 6, 6, 8, 12, 16, 24, 32, 48, 128, 192,
    ]  # fmt: skip
    assert [round_down(n) for n in (1, 2, 5, 7, 11, 12, 13, 100)] == [1, 2, 4, 6, 8, 12, 12, 96]


def test_batches_hold_every_sentence_once_and_fit():
    lengths = np.random.default_rng(0).integers(2, 101, size=333).tolist()
    batches = plan_batches(lengths, longest=100, rows_of=lambda length: round_down(max(1, 640 // length)))
    assert sorted(i for batch in batches for i in batch.indices) == list(range(333))
    for batch in batches:
        assert max(lengths[i] for i in batch.indices) <= batch.source_length <= 100
        assert len(batch.indices) <= batch.rows
    assert all(len(batch.indices) == batch.rows for batch in batches[:-1])
    assert len({(batch.rows, batch.source_length) for batch in batches}) < 12


def test_the_batches_of_the_docstring():
    batches = plan_batches([3, 30, 5], longest=64, rows_of=lambda length: 2)
    assert [(b.indices, b.rows, b.source_length) for b in batches] == [((1, 2), 2, 32), ((0,), 1, 8)]
    alone = plan_batches([3], longest=64, rows_of=lambda length: 2)
    assert [(b.indices, b.rows, b.source_length) for b in alone] == [((0,), 1, 8)]
    assert plan_batches([], longest=64, rows_of=lambda length: 2) == []


# ---- the document ----


def test_the_example_of_the_document_runs():
    text = (Path(__file__).resolve().parents[2] / "docs" / "search.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
    names: dict = {}
    exec(compile(code, "docs/search.md", "exec"), names)
    found = names["found"]
    assert [tokens_of(found, 0, rank) for rank in range(2)] == [(4, 2), (3, 2)]
    np.testing.assert_allclose(np.exp(found.log_probs[0]), [0.36, 0.24], rtol=1e-5)


def test_the_document_names_every_option():
    text = (Path(__file__).resolve().parents[2] / "docs" / "search.md").read_text(encoding="utf-8")
    missing = [
        field.name for field in dataclasses.fields(SearchConfig) if not re.search(f"`(--)?{field.name}", text)
    ]
    assert missing == ["batch_tokens"]  # which changes no result
