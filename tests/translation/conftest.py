"""One tiny network and vocabulary for all tests of translations: each search is compiled once per process.

Calls with 5 to 8 sentences, of which the longest has 10 to 12 tokens, share one size of search state.
"""

import dataclasses

import jax
import pytest
from make_translator import make_translator
from tiny_experiment import random_params

from flaxformer_mt.config import Config, DataConfig, ModelConfig, SearchConfig, VocabConfig
from flaxformer_mt.model import make_model
from flaxformer_mt.runs.load_run import TrainedModel
from flaxformer_mt.vocab import make_vocabs

TEXT = [
    ("der kleine Hund schläft im Garten .", "the small dog sleeps in the garden ."),
    ("die alte Katze trinkt heute Milch .", "the old cat drinks milk today ."),
    ("wir lesen ein gutes Buch .", "we read a good book ."),
    ("Anna kauft zwei rote Äpfel .", "Anna buys two red apples ."),
]


# Sources of 5 to 10 tokens.
SENTENCES = ["der Hund", "die Katze .", "ein Buch", "Milch", "im Garten"]

# Number of decoder layers, number of further models in an ensemble, and options of the search.
SEARCHES = {
    "beam": (1, 0, {}),
    "greedy": (1, 0, {"method": "greedy", "length_penalty": 0.5, "length_penalty_kind": "length"}),
    "coverage": (2, 0, {"coverage_penalty": 0.4}),
    "sample": (1, 0, {"method": "sample", "temperature": 1.5, "top_k": 20}),
    "ensemble": (1, 1, {}),
}


class Pair:
    def __init__(self, source, target):
        self.source, self.target = source, target


@pytest.fixture(scope="session")
def make_vocabularies(tmp_path_factory):
    def make(size, pairs):
        return make_vocabs(
            VocabConfig(size=size), [Pair(*pair) for pair in pairs * 5], tmp_path_factory.mktemp("vocab")
        )

    return make


@pytest.fixture(scope="session")
def vocabs(make_vocabularies):
    return make_vocabularies(320, TEXT)


@pytest.fixture(scope="session")
def make_characters(tmp_path_factory):
    """Makes vocabularies of characters and tags, each one token, as is the space before the first."""

    class Tagged(list):
        tags = ()

    def make(*tags):
        pairs = Tagged([Pair(*[" ".join(map(chr, range(33, 127)))] * 2)] * 3)
        pairs.tags = tags
        config = VocabConfig(kind="char", size=0, byte_fallback=False, normalization="identity")
        return make_vocabs(config, pairs, tmp_path_factory.mktemp("vocab"))

    return make


@pytest.fixture(scope="session")
def characters(make_characters):
    return make_characters()


@pytest.fixture(scope="session")
def config():
    return Config(
        data=DataConfig(max_source_length=12, max_target_length=12),
        vocab=VocabConfig(size=320),
        model=ModelConfig(
            num_encoder_layers=1,
            num_decoder_layers=1,
            model_dim=16,
            num_heads=2,
            ffn_dim=16,
            output_bias=True,
        ),
        search=SearchConfig(beam_size=3, max_length_ratio=0.5, max_length_offset=4, batch_tokens=600),
    )


@pytest.fixture(scope="session")
def make_params(vocabs):
    """Makes parameters whose outputs are words, which differ, and that end sentences now and then."""

    def make(model, seed=0, target=vocabs.target):
        network = make_model(model, source_size=vocabs.source.size, target_size=target.size)
        params = random_params(network, seed)
        (table,) = (name for name in params if name.endswith("embedding"))
        params[table]["embedding"] *= 2.5
        pieces = target.pieces(range(target.size))
        no_words = [number for number, piece in enumerate(pieces) if piece == "▁" or piece.startswith("<0x")]
        params["output_bias"][no_words] = -20.0
        params["output_bias"][target.eos_id] = 4.0
        return params

    return make


@pytest.fixture(scope="session")
def params(config, make_params):
    return make_params(config.model)


@pytest.fixture(scope="session")
def other_params(config, make_params):
    return jax.device_put(make_params(config.model, seed=1))


@pytest.fixture(scope="session")
def translator_with(config, params, other_params, vocabs, make_params):
    """Gives the translator with these options of its search: one translator for each name and options."""
    made = {}

    def get(name="beam", **fields):
        key = (name, *sorted(fields.items()))
        if key not in made:
            layers, ensemble, options = SEARCHES[name]
            model = dataclasses.replace(config.model, num_decoder_layers=layers)
            search = dataclasses.replace(config.search, **{**options, **fields})
            made[key] = make_translator(
                dataclasses.replace(config, model=model, search=search),
                params if model == config.model else make_params(model),
                vocabs,
                ensemble=[TrainedModel(config, vocabs, other_params, "best", {})] * ensemble,
                warn=pytest.fail,
            )
        return made[key]

    return get


@pytest.fixture(scope="session")
def shared_translator(translator_with):
    return translator_with("beam")


@pytest.fixture(scope="session")
def found_by_beam(shared_translator):
    """Three hypotheses of each of `SENTENCES`."""
    return shared_translator.translate(SENTENCES, n_best=3)


@pytest.fixture(scope="session")
def suppressed(found_by_beam):
    """Two tokens of translations: search.suppress of "greedy"."""
    words = sorted({token for t in found_by_beam for token in t.tokens[:-1]})
    return words[0], words[-1]


@pytest.fixture(scope="session")
def greedy_translator(translator_with, suppressed, vocabs):
    piece, other = suppressed
    return translator_with("greedy", suppress=(vocabs.target.pieces([piece])[0], str(other), "<unk>"))
