"""Given translations: their scores are those of the search that found them, line by line."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from flaxformer_mt.config import Config, DataConfig, ModelConfig, SearchConfig, VocabConfig
from flaxformer_mt.decoding.forced_decoding import Pair, Watched
from flaxformer_mt.decoding.memory_backoff import TokenBudget
from flaxformer_mt.errors import UserError
from flaxformer_mt.model import init_params, make_model
from flaxformer_mt.runs.load_run import TrainedModel
from flaxformer_mt.translation.scorer import Scorer, TokenScorer, find_longest
from flaxformer_mt.translation.translator import Translator
from flaxformer_mt.vocab import Vocabs, make_vocabs

TEXT = ["der kleine Hund schläft .", "the small dog sleeps .", "wir lesen ein Buch .", "we read a book ."]
SENTENCES = ["der Hund", "wir lesen ein Buch .", "Buch", "der kleine Hund schläft"]
O0 = {"xla_backend_optimization_level": 0}


class Text:
    def __init__(self, text):
        self.source = self.target = text


@pytest.fixture(scope="module")
def vocabs(tmp_path_factory):
    return make_vocabs(VocabConfig(size=300), list(map(Text, TEXT * 5)), tmp_path_factory.mktemp("vocab"))


@pytest.fixture(scope="module")
def config():
    return Config(
        data=DataConfig(max_source_length=24, max_target_length=12),
        model=ModelConfig(
            num_encoder_layers=1,
            num_decoder_layers=2,
            model_dim=8,
            num_heads=2,
            ffn_dim=8,
            output_bias=True,
        ),
        search=SearchConfig(beam_size=3, max_length_ratio=0.5, max_length_offset=6),
    )


def random_params(config, vocabs, seed=0):
    """Parameters of a network whose outputs differ from token to token, and that ends sentences at times."""
    model = make_model(config.model, source_size=vocabs.source.size, target_size=vocabs.target.size)
    params = init_params(model, jax.random.key(seed))
    (table,) = (name for name in params if name.endswith("embedding"))
    params[table]["embedding"] = 3.0 * params[table]["embedding"]
    params["output_bias"] = params["output_bias"].at[vocabs.target.eos_id].set(3.0)
    return params


@pytest.fixture(scope="module")
def params(config, vocabs):
    return random_params(config, vocabs)


def make_scorer(config, params, vocabs, **options):
    told = []
    scorer = Scorer(config, params, vocabs, warn=told.append, **options)
    scorer.tokens.decoder.compile(compiler_options=O0)
    return scorer, told


@pytest.fixture(scope="module")
def scorer(config, params, vocabs):
    return make_scorer(config, params, vocabs)[0]


def translate(config, params, vocabs, *, ensemble=(), **fields):
    search = dataclasses.replace(config.search, **fields)
    translator = Translator(
        dataclasses.replace(config, search=search), params, vocabs, ensemble=ensemble, warn=pytest.fail
    )
    translator.search.programs.compile(compiler_options=O0)
    n_best = 1 if search.method == "greedy" else 3
    return search, [one for t in translator.translate(SENTENCES, n_best=n_best) for one in t.n_best]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"method": "greedy", "length_penalty": 0.5, "length_penalty_kind": "length"},
        {"coverage_penalty": 0.4, "coverage_layer": 0},
        {"method": "sample", "temperature": 1.5, "top_k": 20},
    ],
    ids=["beam", "greedy", "coverage", "sample"],
)
def test_scores_of_translations_are_those_that_the_search_found(config, params, vocabs, fields):
    search, found = translate(config, params, vocabs, **fields)
    again, _ = make_scorer(dataclasses.replace(config, search=search), params, vocabs)
    n_best = len(found) // len(SENTENCES)
    sources = [vocabs.source.tokenize(line) for line in SENTENCES for _ in range(n_best)]
    scored = again.score_tokens(sources, [one.tokens for one in found])
    assert len({one.tokens for one in found}) > len(SENTENCES) // 2
    np.testing.assert_allclose([s.log_prob for s in scored], [t.log_prob for t in found], atol=1e-4)
    np.testing.assert_allclose([s.score for s in scored], [t.score for t in found], atol=1e-4)
    for one, translation in zip(scored, found, strict=True):
        assert one.tokens == translation.tokens and len(one.token_log_probs) == len(one.tokens)
        assert math.isclose(sum(one.token_log_probs), one.log_prob, abs_tol=1e-5)


@pytest.mark.parametrize("mean", ["log_probs", "probs"])
def test_an_ensemble_scores_as_it_searches(config, params, vocabs, mean):
    others = random_params(config, vocabs, seed=1)
    member = TrainedModel(config, vocabs, others, "best", {})
    search, found = translate(config, params, vocabs, ensemble=[member], ensemble_mean=mean)
    scorer = TokenScorer([config.model] * 2, search, vocabs, longest=(24, 20), warn=pytest.fail)
    scorer.decoder.compile(compiler_options=O0)
    sources = [vocabs.source.tokenize(line) for line in SENTENCES for _ in range(3)]
    pairs = [Pair(source, one.tokens) for source, one in zip(sources, found, strict=True)]
    scored = scorer.score_all(pairs, params=(params, others))
    np.testing.assert_allclose([s.score for s in scored], [t.score for t in found], atol=1e-4, rtol=1e-5)


def test_text_is_scored_in_order_whatever_it_is_batched_with(scorer, vocabs):
    sources = [*SENTENCES, "", "Hund", "wir"]
    targets = ["the dog", "", "we read", "the small dog sleeps .", "", "dog", "\u2028 x"]
    together = scorer.score(sources, targets)
    assert [one.tokens for one in together] == [tuple(vocabs.target.tokenize(t)) for t in targets]
    streamed = list(scorer.score_stream(iter(sources), iter(targets), window=3))
    for one, two in zip(together, streamed, strict=True):
        assert one.tokens == two.tokens and not one.truncated
        assert math.isclose(one.score, two.score, rel_tol=1e-4)


def test_an_empty_translation_is_its_end_symbol_and_one_without_tokens_is_nothing(scorer, vocabs):
    (empty,) = scorer.score(["der Hund"], [""])
    assert (
        empty.tokens == (vocabs.target.eos_id,)
        and empty.score == pytest.approx(empty.log_prob)
        and empty.score < 0
    )
    (nothing,) = scorer.score_tokens([vocabs.source.tokenize("der Hund")], [()])
    assert (nothing.score, nothing.log_prob, nothing.token_log_probs) == (0.0, 0.0, ())


def test_lines_without_a_partner_are_refused_with_both_counts(scorer):
    with pytest.raises(UserError, match="there are 2 source lines and 1 target lines"):
        scorer.score(["a", "b"], ["a"])
    for sources, targets in ((5, 3), (3, 5), (4, 2), (0, 1)):
        read = []
        with pytest.raises(UserError, match=f"there are {sources} source lines and {targets} target lines"):
            for one in scorer.score_stream(iter(["Hund"] * sources), iter(["dog"] * targets), window=2):
                read.append(one)
        assert len(read) == min(sources, targets)


def test_long_lines_are_refused_or_cut_but_never_silently(scorer, config, params, vocabs):
    assert find_longest(config) == (24, 18)
    long = "Hund " * 40
    with pytest.raises(UserError, match="source line 2 is longer than 24 tokens.*--long_lines=cut"):
        scorer.score(["Hund", long], ["dog", "dog"])
    with pytest.raises(UserError, match="target line 3 is longer than 18 tokens"):
        list(scorer.score_stream(iter(["Hund"] * 3), iter(["dog", "dog", "dog " * 40]), window=2))
    with pytest.raises(UserError, match="target line 1 is longer"):
        scorer.score_tokens([[2]], [[5] * 19])
    cutting, told = make_scorer(config, params, vocabs, long_lines="cut")
    found = cutting.score([long, "Hund", "Hund"], ["dog", "dog " * 40, "dog"])
    assert [one.truncated for one in found] == [True, True, False]
    assert len(found[1].tokens) == 18 and found[1].tokens[-1] == vocabs.target.eos_id
    assert [message.split(":")[0] for message in told] == ["target line 2", "source line 1"]


def test_a_language_model_scores_text_alone(config, vocabs):
    model = dataclasses.replace(
        config.model, architecture="decoder_only", num_encoder_layers=0, positions="learned", max_positions=24
    )
    config = dataclasses.replace(
        config, model=model, data=dataclasses.replace(config.data, source_language="")
    )
    one = Vocabs(vocabs.target, vocabs.target, joint=True)
    params = random_params(config, one)
    scorer, _ = make_scorer(config, params, one)
    assert find_longest(config) == (0, 24)
    found = scorer.score(None, ["we read a book .", "", "the dog"])
    # By hand, one text at a time: the network over the text itself.
    network = make_model(config.model, source_size=one.source.size, target_size=one.target.size)
    ids = np.array([one.target.tokenize("we read a book .")])
    target_in = np.concatenate([[[one.target.bos_id]], ids[:, :-1]], axis=1)
    batch = scorer.tokens.decoder._make_batch(
        [Pair((), ids[0])], dataclasses.make_dataclass("Plan", ["rows", "source_length"])(1, ids.shape[1])
    )
    assert batch.source.shape == (1, 0) and batch.target_in.tolist() == target_in.tolist()
    logits = jax.nn.log_softmax(network.apply({"params": params}, batch, deterministic=True))
    expected = np.take_along_axis(np.asarray(logits), ids[..., None], axis=-1)[0, :, 0]
    np.testing.assert_allclose(found[0].token_log_probs, expected, atol=1e-4)
    with pytest.raises(UserError, match="language model scores text alone"):
        scorer.score(["a"], ["a"])
    with pytest.raises(UserError, match="target line 1 is longer than 24"):
        scorer.score(None, ["dog " * 60])


def test_a_translator_needs_the_source(scorer):
    with pytest.raises(UserError, match="needs its source"):
        scorer.score(None, ["a"])


def test_attention_is_of_the_layer_and_head_that_is_asked_for(scorer, config, params, vocabs):
    pairs = [Pair(vocabs.source.tokenize(line), vocabs.target.tokenize(line)) for line in SENTENCES]
    asked = [Watched(0), Watched(0, 0), Watched(0, 1), Watched(1), Watched(-1)]
    for pair, reading in zip(
        pairs, scorer.tokens.read_all(pairs, params=(params,), watched=asked), strict=True
    ):
        mean, first, second, last, also_last = reading.attention
        assert mean.shape == (len(pair.target), len(pair.source))
        np.testing.assert_allclose(mean.sum(axis=1), 1.0, rtol=1e-5)  # none of it falls on padding
        np.testing.assert_allclose((first + second) / 2, mean, atol=1e-6)
        np.testing.assert_array_equal(last, also_last)
        assert np.abs(last - mean).max() > 1e-3


def test_pairs_of_all_lengths_share_few_shapes(config, vocabs, monkeypatch):
    scorer = TokenScorer([config.model], config.search, vocabs, longest=(128, 200), warn=pytest.fail)
    shapes = []

    def run(params, batch, *, watched):
        shapes.append((*batch.source.shape, batch.target_in.shape[1]))
        return np.zeros(batch.target_in.shape), []

    monkeypatch.setattr(scorer.decoder, "run", run)
    lengths = np.random.default_rng(0).integers(1, 128, (3000, 2))
    pairs = [Pair([5] * source, [5] * target) for source, target in lengths]
    assert len(scorer.read_all(pairs, params=())) == 3000
    assert len(shapes) > 30 and len(set(shapes)) <= 9
    assert all(rows * (source + target) <= config.search.batch_tokens for rows, source, target in shapes)


def test_less_memory_means_smaller_batches_and_one_warning():
    told, tried = [], []
    budget = TokenBudget(64, warn=told.append)

    def work(indices, tokens):
        tried.append((len(indices), tokens))
        for place, index in enumerate(indices):
            if index >= 2 and tokens > 16:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")
            yield place, index * 10

    assert dict(budget.run_all(work, 5)) == {index: index * 10 for index in range(5)}
    assert tried == [(5, 64), (3, 32), (3, 16)] and budget.tokens == 16
    assert len(told) == 1 and "batches of 64 tokens" in told[0] and "--batch_tokens=32" in told[0]

    def never(indices, tokens):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        yield

    with pytest.raises(UserError, match="too little memory for a batch of 8 tokens"):
        list(budget.run_all(never, 1))

    def broken(indices, tokens):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
        yield

    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        list(budget.run_all(broken, 1))
