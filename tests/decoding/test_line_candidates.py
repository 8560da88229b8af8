"""Shortlists in the search: each sentence is translated as by a model that has its candidates alone."""

import dataclasses

import numpy as np
import pytest
from test_engine import assert_same_translations, make_engine, search_all
from tiny_experiment import random_params, small_model

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.decoding.scheduler import Scheduler
from flaxformer_mt.decoding.search_engine import SearchEngine
from flaxformer_mt.decoding.search_inputs import Candidates, Sentence
from flaxformer_mt.errors import UserError
from flaxformer_mt.model import make_model
from flaxformer_mt.search import Symbols

VOCAB = 29
MODEL = small_model(1, 8, 2, 16, output_bias=True)
# Of the first source token; 7 is suppressed, 28 is for all.
OWN = {3: (20, 9, 7, 5, 11), 4: (6, 21, 5, 13, 19, 8, 28)}
COMMON = (28, 14, 1)


class Rules:
    """A shortlist whose candidates depend on the first source token."""

    common = np.array(COMMON, np.int32)

    def find(self, source):
        return np.array(OWN.get(int(source[0]), ()) * 2, np.int32)


def make_sentences(lengths, **more) -> list[Sentence]:
    random = np.random.default_rng(5)
    rows = [np.append(random.integers(3, VOCAB, n - 1), 2).astype(np.int32) for n in lengths]
    for number, row in enumerate(rows):
        row[0] = 3 + number % 2
    return [Sentence(row, stream=(number,), **more) for number, row in enumerate(rows)]


def make(options: SearchConfig, models, **rules) -> SearchEngine:
    options = dataclasses.replace(options, batch_tokens=300)
    return make_engine(models, options, symbols=Symbols(0, 1, 2, never=(7,)), size=VOCAB, **rules)


def only(params, token: int, *more: int):
    """Returns the parameters with a bias that leaves nothing but the candidates of sentences with `token`."""
    allowed = {2, 28, 14, *OWN[token], *more} - {7}
    bias = np.where(np.isin(np.arange(VOCAB), sorted(allowed)), params["output_bias"], -1e9)
    return params | {"output_bias": bias.astype(np.float32)}


@pytest.mark.parametrize(
    ("fields", "constraints", "architecture"),
    [
        (
            {"min_length_ratio": 0.7, "no_repeat_ngram": 2},
            {"required": ((17, 9), (5,))},
            "encoder_decoder",
        ),
        pytest.param(
            {"method": "sample", "min_length_ratio": 0.7}, {}, "decoder_only", marks=pytest.mark.slow
        ),
    ],
    ids=["constraints of an ensemble", "samples"],
)
def test_translations_are_those_of_a_model_without_other_tokens(fields, constraints, architecture):
    """In states for a few sentences and for many, and in a live search."""
    options = SearchConfig(beam_size=3, max_length_ratio=1.0, max_length_offset=4, **fields)
    models = [dataclasses.replace(MODEL, architecture=architecture)] * (2 if constraints else 1)
    networks = [make_model(model, source_size=VOCAB, target_size=VOCAB) for model in models]
    params = [random_params(network, seed, scale=1.5) for seed, network in enumerate(networks)]
    sentences = make_sentences([4, 8, 3, 8, 6, 7, 5, 2, 8, 7, 3], **constraints)
    plain = make(options, models)
    expected = [None] * len(sentences)
    for first in (3, 4):
        numbers = [n for n, one in enumerate(sentences) if one.source[0] == first]
        alone = [only(own, first, *sum(constraints.get("required", ()), ())) for own in params]
        chosen = [sentences[n] for n in numbers]
        for index, result in search_all(plain, chosen, alone).items():
            expected[numbers[index]] = result
    engine = make(options, models, shortlist=Rules())
    found = search_all(engine, sentences, params)
    assert_same_translations([found[n] for n in range(len(sentences))], expected)
    assert len({result.tokens.tobytes() for result in expected}) > 3
    if constraints:
        assert all(result.satisfied[0] for result in found.values())
    else:
        live = Scheduler(engine, tuple(params))
        live.submit({"one": sentences[1]}, n_best=1)
        results = {}
        while len(live):
            results |= dict(live.step(8))
        assert_same_translations([results["one"]], expected[1:2])


def test_candidates_are_the_first_ones_without_banned_and_common_tokens():
    candidates = Candidates(Rules(), Symbols(0, 1, 2, never=(7,)), VOCAB, longest_source=8)
    assert candidates.shortlists.common.tolist() == [2, 28, 14] and candidates.shortlists.size == VOCAB
    rows = [candidates.find(np.array([3, 2]), ()), candidates.find(np.array([4, 2]), ((13, 28), (9,)))]
    assert [row.tolist() for row in rows] == [[21, 10, 6, 12], [14, 10, 7, 22, 6, 20, 9]]
    short = Candidates(Rules(), Symbols(0, 1, 2), VOCAB, longest_source=1)
    with pytest.raises(UserError, match="line 4 requires phrases of 17 different tokens.* room for 16"):
        short.check(np.array([2]), (tuple(range(3, 20)),), "line 4")
