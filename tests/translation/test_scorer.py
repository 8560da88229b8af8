"""Given translations: their scores are those of the search that found them, line by line."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from make_translator import make_translator

from flaxformer_mt.config import DataConfig
from flaxformer_mt.decoding.forced_decoding import Pair, TokenScorer, Watched
from flaxformer_mt.decoding.search_engine import TokenBudget
from flaxformer_mt.errors import UserError
from flaxformer_mt.model import make_model
from flaxformer_mt.shapes import Batch
from flaxformer_mt.translation.scorer import Scorer, find_longest
from flaxformer_mt.vocab import Vocabs

SENTENCES = ["der Hund", "die Katze .", "ein Buch", "Milch", "im Garten"]


def make_scorer(config, params, vocabs, *, programs_of=None, **options):
    """A scorer, which may use the compiled programs of another one, and what it warns of."""
    told = []
    scorer = Scorer(make_translator(config, params, vocabs, warn=told.append), **options)
    if programs_of is not None:
        scorer.tokens.run = programs_of.tokens.run
    return scorer, told


@pytest.fixture(scope="module")
def scorer(config, params, vocabs):
    """Reads batches of up to 16 pairs of up to 12 tokens."""
    config = dataclasses.replace(config, search=dataclasses.replace(config.search, batch_tokens=384))
    return make_scorer(config, params, vocabs)[0]


def assert_same_scores(scored, found):
    assert len({one.tokens for one in found}) > len(SENTENCES) // 2
    np.testing.assert_allclose([s.log_prob for s in scored], [t.log_prob for t in found], atol=1e-4)
    np.testing.assert_allclose([s.score for s in scored], [t.score for t in found], atol=1e-4)
    for one, translation in zip(scored, found, strict=True):
        assert one.tokens == translation.tokens and len(one.token_log_probs) == len(one.tokens)
        assert math.isclose(sum(one.token_log_probs), one.log_prob, abs_tol=1e-5)


@pytest.mark.parametrize("name", ["beam", "greedy", "coverage", "sample"])
def test_scores_of_translations_are_those_that_the_search_found(
    name, scorer, vocabs, found_by_beam, greedy_translator, translator_with
):
    if name == "beam":
        again, found = scorer, found_by_beam
    elif name == "greedy":
        parameters = greedy_translator.all_params[0]
        again, _ = make_scorer(greedy_translator.config, parameters, vocabs, programs_of=scorer)
        found = greedy_translator.translate(SENTENCES) * 3
    else:
        translator = translator_with(name)
        same_model = scorer if translator.config.model == scorer.config.model else None
        again, _ = make_scorer(translator.config, translator.all_params[0], vocabs, programs_of=same_model)
        found = translator.translate(SENTENCES, n_best=3)
    hypotheses = [one for t in found for one in t.n_best]
    lines = SENTENCES * 3 if name == "greedy" else [line for line in SENTENCES for _ in range(3)]
    sources = [vocabs.source.tokenize(line) for line in lines]
    scored = again.score_tokens(sources, [one.tokens for one in hypotheses])
    assert_same_scores(scored, hypotheses)
    if name == "coverage":  # without its penalty, the scores are higher
        again.tokens.options = dataclasses.replace(again.config.search, coverage_penalty=0.0)
        plain = again.score_tokens(sources, [one.tokens for one in hypotheses])
        assert all(one.score < more.score for one, more in zip(scored, plain, strict=True))


def test_an_ensemble_scores_as_it_searches(translator_with, params, other_params, vocabs):
    translator = translator_with("ensemble")
    hypotheses = [one for t in translator.translate(SENTENCES, n_best=3) for one in t.n_best]
    sources = [vocabs.source.tokenize(line) for line in SENTENCES for _ in range(3)]
    pairs = [Pair(source, one.tokens) for source, one in zip(sources, hypotheses, strict=True)]
    assert_same_scores(translator.scorer.score_all(pairs, params=(params, other_params)), hypotheses)


def test_text_is_scored_in_order_whatever_it_is_batched_with(scorer, vocabs):
    sources = [*SENTENCES, "", "Hund", "Katze", "der Hund", "wir"]
    targets = ["the dog", "", "we", "the cat .", "", "dog", "\u2028 x", "a cat", "the old", "a book"]
    sources, targets = sources + sources[::-1] + SENTENCES * 2, targets + targets[::-1] + targets
    together = scorer.score(sources, targets)
    assert [one.tokens for one in together] == [tuple(vocabs.target.tokenize(t)) for t in targets]
    streamed = list(scorer.score_stream(iter(sources), iter(targets), window=15))
    for one, two in zip(together, streamed, strict=True):
        assert one.tokens == two.tokens and not one.truncated
        assert math.isclose(one.score, two.score, rel_tol=1e-4)


def test_an_empty_translation_is_its_end_symbol_and_one_without_tokens_is_nothing(scorer, vocabs):
    empty = scorer.score(SENTENCES * 3, [""] * 15)[0]
    assert (
        empty.tokens == (vocabs.target.eos_id,)
        and empty.score == pytest.approx(empty.log_prob)
        and empty.score < 0
    )
    nothing = scorer.score_tokens([vocabs.source.tokenize("der Hund")] * 15, [()] * 15)[0]
    assert math.isnan(nothing.score) and (nothing.log_prob, nothing.token_log_probs) == (0.0, ())


def test_lines_without_a_partner_are_refused_with_both_counts(scorer, monkeypatch):
    def run(params, batch, *, watched):
        return np.zeros((batch.shape.rows, batch.shape.target)), []

    monkeypatch.setattr(scorer.tokens, "run", run)
    with pytest.raises(UserError, match="there are 2 source lines and 1 target lines"):
        scorer.score(["a", "b"], ["a"])
    with pytest.raises(UserError, match="put the string in a list"):
        scorer.score("ab", "cd")
    with pytest.raises(UserError, match="needs its source"):
        scorer.score(None, ["a"])
    for sources, targets in ((5, 3), (3, 5), (4, 2), (0, 1)):
        read = []
        with pytest.raises(UserError, match=f"there are {sources} source lines and {targets} target lines"):
            for one in scorer.score_stream(iter(["Hund"] * sources), iter(["dog"] * targets), window=2):
                read.append(one)
        assert len(read) == min(sources, targets)


def test_pairs_are_scored_when_their_input_pauses(scorer, monkeypatch):
    windows, ready, score_all = [], iter([True, False, True, True]), scorer.tokens.score_all

    def note(pairs, **options):
        windows.append(len(pairs))
        return score_all(pairs, **options)

    monkeypatch.setattr(scorer.tokens, "score_all", note)
    sides = iter(SENTENCES), iter(["dog", "cat", "a", "we", "old"])
    found = list(scorer.score_stream(*sides, window=3, is_ready=lambda: next(ready)))
    assert [one.text for one in found] == ["dog", "cat", "a", "we", "old"] and windows == [2, 3]


def test_long_lines_are_refused_or_cut_but_never_silently(scorer, params, vocabs):
    config = scorer.config
    search = dataclasses.replace(config.search, max_length_offset=6)
    longer = dataclasses.replace(
        config, data=DataConfig(max_source_length=24, max_target_length=12), search=search
    )
    assert find_longest(config) == (12, 12) and find_longest(longer) == (24, 18)
    long = "Hund " * 40
    with pytest.raises(UserError, match="source line 2 is longer than 12 tokens.*--long_lines=cut"):
        scorer.score(["Hund", long], ["dog", "dog"])
    with pytest.raises(UserError, match="target line 18 is longer than 12 tokens"):
        streams = iter(SENTENCES * 6), iter([*["dog"] * 17, "dog " * 40, *["dog"] * 12])
        list(scorer.score_stream(*streams, window=15))
    with pytest.raises(UserError, match="target line 1 is longer"):
        scorer.score_tokens([[2]], [[5] * 13])
    cutting, told = make_scorer(config, params, vocabs, programs_of=scorer, cuts_lines=True)
    found = cutting.score([long, *["Hund"] * 14], ["dog", "dog " * 40, *["dog"] * 13])
    assert [one.truncated for one in found] == [True, True, *[False] * 13]
    # A cut target has not ended: it has the score of its first tokens, without an end symbol.
    assert found[1].tokens == tuple(vocabs.target.tokenize("dog " * 40)[:12])
    source = vocabs.source.tokenize("Hund")
    beginning = cutting.score_tokens([source] * 15, [found[1].tokens] * 15)[0]
    assert found[1].score == pytest.approx(beginning.score, abs=1e-4)
    assert [message.split(":")[0] for message in told] == ["source line 1", "target line 2"]


def test_a_language_model_scores_text_alone(config, vocabs, make_params):
    model = dataclasses.replace(
        config.model, architecture="decoder_only", num_encoder_layers=0, positions="learned", max_positions=24
    )
    config = dataclasses.replace(
        config, model=model, data=dataclasses.replace(config.data, source_language="")
    )
    one = Vocabs(vocabs.target, vocabs.target, joint=True)
    params = make_params(model, target=one.target)
    scorer, _ = make_scorer(config, params, one)
    assert find_longest(config) == (0, 24)
    found = scorer.score(None, ["we read a book .", "", "the dog"])
    # By hand, one text at a time: the network over the text itself.
    network = make_model(config.model, source_size=one.source.size, target_size=one.target.size)
    ids = np.array([one.target.tokenize("we read a book .")])
    target_in = np.concatenate([[[one.target.bos_id]], ids[:, :-1]], axis=1)
    nothing, mask = np.zeros((1, 0), np.int32), np.ones(ids.shape, bool)
    batch = Batch(nothing, target_in, ids, nothing.astype(bool), mask)
    logits = jax.jit(
        lambda params: jax.nn.log_softmax(network.apply({"params": params}, batch, deterministic=True))
    )(params)
    expected = np.take_along_axis(np.asarray(logits), ids[..., None], axis=-1)[0, :, 0]
    np.testing.assert_allclose(found[0].token_log_probs, expected, atol=1e-4)
    with pytest.raises(UserError, match="language model scores text alone"):
        scorer.score(["a"], ["a"])
    with pytest.raises(UserError, match="target line 1 is longer than 24"):
        scorer.score(None, ["dog " * 60])


def test_attention_is_of_the_given_layer_and_head(translator_with, vocabs):
    two_layers = translator_with("coverage")
    targets = ["the dog", "the cat .", "a book", "milk", "the old"]
    pairs = [
        Pair(vocabs.source.tokenize(line), vocabs.target.tokenize(target))
        for line, target in zip(SENTENCES, targets, strict=True)
    ]
    watched = [Watched(0), Watched(0, 0), Watched(0, 1), Watched(1), Watched(-1), Watched(1, reading=True)]
    readings = two_layers.scorer.read_all(pairs, params=(two_layers.all_params[0],), watched=watched)
    for pair, reading in zip(pairs, readings, strict=True):
        mean, first, second, last, also_last, reads = reading.attention
        assert mean.shape == (len(pair.target), len(pair.source))
        np.testing.assert_allclose(mean.sum(axis=1), 1.0, rtol=1e-5)  # none of it falls on padding
        np.testing.assert_allclose((first + second) / 2, mean, atol=1e-6)
        np.testing.assert_array_equal(last, also_last)
        np.testing.assert_array_equal(reads, [*last[1:], last[-1]])  # no step reads the last token
        assert np.abs(last - mean).max() > 1e-3


def test_pairs_of_all_lengths_share_few_shapes(config, vocabs, monkeypatch):
    search = dataclasses.replace(config.search, batch_tokens=8192)
    scorer = TokenScorer([config.model], search, vocabs, longest=(128, 200), warn=pytest.fail)
    shapes = []

    def run(params, batch, *, watched):
        shapes.append(batch.shape)
        return np.zeros((batch.shape.rows, batch.shape.target)), []

    monkeypatch.setattr(scorer, "run", run)
    lengths = np.random.default_rng(0).integers(1, 128, (3000, 2))
    pairs = [Pair([5] * source, [5] * target) for source, target in lengths]
    assert len(scorer.read_all(pairs, params=())) == 3000
    assert len(shapes) > 30 and len(set(shapes)) <= 9
    assert all(rows * (source + target) <= search.batch_tokens for rows, source, target in shapes)


def test_less_memory_means_smaller_batches_and_one_warning():
    told = []
    budget = TokenBudget(64, warn=told.append)
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")
    assert [(budget.halve_after(full), budget.tokens) for _ in range(3)] == [
        (True, 32),
        (True, 16),
        (True, 8),
    ]
    assert len(told) == 1 and "batches of 64 tokens" in told[0] and "--batch_tokens=32" in told[0]
    assert not budget.halve_after(jax.errors.JaxRuntimeError("INTERNAL: something else"))
    assert not budget.halve_after(ValueError("Out of memory"))
    with pytest.raises(UserError, match="too little memory for a batch of 8 tokens"):
        budget.halve_after(full)
