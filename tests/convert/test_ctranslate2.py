"""CTranslate2 models: the same log-probabilities and greedy translations as ours, and what is refused."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from make_translator import make_translator
from tiny_experiment import mark_slow

from flaxformer_mt.config import (
    Config,
    DataConfig,
    GuidedAlignmentConfig,
    ModelConfig,
    SearchConfig,
    VocabConfig,
)
from flaxformer_mt.config.checks import validate
from flaxformer_mt.convert.export_run import check_expressible
from flaxformer_mt.convert.formats import ImportOverrides, Weights, find_config, shapes_of
from flaxformer_mt.convert.parity_check import flax_outputs, make_batch, measure
from flaxformer_mt.corpus.pairs import Pair
from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation.plots import attention_maps
from flaxformer_mt.model import make_model
from flaxformer_mt.translation.requests import Request
from flaxformer_mt.translation.result import Annotations
from flaxformer_mt.vocab import Vocab, load_vocabs, make_vocabs
from flaxformer_mt.vocab.shortlist import Shortlist

ctranslate2 = pytest.importorskip("ctranslate2")

from benchmarks.originals.tiny_toolkits import PAIRS as TEXT
from flaxformer_mt.convert.ctranslate2.backend import load_engine
from flaxformer_mt.convert.ctranslate2.model_folder import FORMAT

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "model_dim": 12,
    "num_heads": 2,
    "ffn_dim": 20,
    "max_positions": 60,
}
# Between them all that the format can express.
VARIANTS = {
    "pre": {"output_bias": True, "num_encoder_layers": 2, "num_decoder_layers": 2},
    "post": {
        "norm_position": "post",
        "tying": "none",
        "attention_bias": False,
        "ffn_bias": False,
        "activation": "gelu",
        "first_position": 1,
        "embedding_scale": False,
        "norm_epsilon": 1e-2,
        "padding_mask": "both",
        "target_start": "zeros",
    },
    "rotary": {
        "norm": "rms",
        "norm_epsilon": 1e-3,
        "activation": "swiglu",
        "positions": "rotary",
        "max_positions": None,
        "first_position": 3,
        "tying": "target_output",
    },
    "learned": {
        "norm_position": "post",
        "final_norm": True,
        "embedding_norm": True,
        "activation": "gelu_tanh",
        "positions": "learned",
        "first_position": 2,
        "tying": "embeddings",
        "output_bias": True,
        "logit_scale": True,
    },
    "wide_values": {
        "key_dim": 4,
        "value_dim": 5,
        "norm_affine": False,
        "final_norm": False,
        "ffn_layer": "convolution",
        "activation": "silu",
        "model_dim": 9,
        "num_heads": 3,
    },
    "wide_keys": {
        "key_dim": 8,
        "value_dim": 3,
        "positions": "rotary",
        "max_positions": None,
        "norm": "rms",
        "norm_affine": False,
        "embedding_norm": True,
        "ffn_layer": "convolution",
        "activation": "swiglu",
        "logit_scale": True,
    },
    "narrow_rotary_keys": {"key_dim": 4, "value_dim": 7, "positions": "rotary", "max_positions": None},
}


# For tests in which a second layer shows nothing more.
SHALLOW = {"num_encoder_layers": 1, "num_decoder_layers": 1}


@pytest.fixture(scope="module")
def vocabs_of(tmp_path_factory):
    """Joint vocabularies, or one for each language; of other special ids than usual."""
    pairs = [Pair(*text) for text in TEXT * 5]
    special = {"pad_id": 1, "bos_id": 3, "eos_id": 0, "unk_id": 2}
    return {
        joint: make_vocabs(
            VocabConfig(size=48, joint=joint, byte_fallback=False, **special),
            pairs,
            tmp_path_factory.mktemp("vocab"),
        )
        for joint in (True, False)
    }


def make_weights(vocabs_of, variant="pre", *, scale=0.4, **fields):
    model = ModelConfig(**{**TINY, **VARIANTS[variant], **fields})
    vocabs = vocabs_of[model.tying in ("all", "embeddings")]
    vocab = VocabConfig(size=48, joint=vocabs.joint, pad_id=1, bos_id=3, eos_id=0, unk_id=2)
    config = Config(data=DataConfig(max_source_length=30, max_target_length=30), vocab=vocab, model=model)
    validate(config)
    random = np.random.default_rng(len(variant))
    shapes = shapes_of(model, source_size=vocabs.source.size, target_size=vocabs.target.size)
    leaves = {
        path: (random.normal(size=shape) * scale + path.endswith("norm/scale")).astype(np.float32)
        for path, shape in shapes.items()
    }
    return Weights(config, vocabs, leaves, "best", 7)


def padded_batch(weights):
    random, vocabs = np.random.default_rng(1), weights.vocabs

    def sentences(vocab, lengths):
        return [[*random.integers(4, vocab.size, length).tolist(), vocab.eos_id] for length in lengths]

    return make_batch(
        sentences(vocabs.source, [5, 1, 11, 0, 20]),
        sentences(vocabs.target, [3, 9, 0, 14, 1]),
        vocabs,
        config=weights.config,
    )


def export(weights, folder, quantization="none"):
    folder.mkdir()
    FORMAT.write(weights, folder, quantization)
    return folder


def difference(weights, folder, batch):
    ours, theirs = flax_outputs(weights, batch, quantity="log_probs"), FORMAT.open(folder)(batch)
    assert np.isfinite(theirs).all()
    return np.abs(ours - theirs)[batch.target_mask].max(), np.std(ours[batch.target_mask])


@pytest.mark.parametrize("variant", mark_slow(VARIANTS, "wide_values", "narrow_rotary_keys"))
def test_log_probabilities_agree(variant, vocabs_of, tmp_path):
    weights = make_weights(vocabs_of, variant)
    assert FORMAT.problems(weights.config) == []
    before = {path: leaf.copy() for path, leaf in weights.leaves.items()}
    folder = export(weights, tmp_path / "out")
    largest, spread = difference(weights, folder, padded_batch(weights))
    assert largest < 1e-4
    assert spread > 0.3  # the tokens do differ
    assert all(np.array_equal(before[path], leaf) for path, leaf in weights.leaves.items())


def log_probs_as(folder, batch, compute_type, monkeypatch):
    """Log-probabilities, and the type in which CTranslate2 multiplies matrices here."""
    opened = []

    def translator(folder, **options):
        opened.append(make(folder, **(options | {"compute_type": compute_type})))
        return opened[0]

    make = ctranslate2.Translator
    with monkeypatch.context() as patch:
        patch.setattr(ctranslate2, "Translator", translator)
        return FORMAT.open(folder)(batch), opened[0].compute_type


def test_quantized_models_load_and_stay_near(vocabs_of, tmp_path, monkeypatch):
    """The stored numbers are near the parameters; products of them are those of CTranslate2's own conversion.

    Of products of int8 only the latter holds on every processor. Where it has no instruction for them (AVX2
    without VNNI), oneDNN adds pairs of products in 16 bits. Random weights, unlike trained ones, often exceed
    these, and the log-probabilities of this model differ by 3.5, with CTranslate2's own conversion as well.
    """
    weights = make_weights(vocabs_of)
    batch, sizes, stored, computed = padded_batch(weights), {}, {}, {}
    ours = flax_outputs(weights, batch, quantity="log_probs")
    assert set(FORMAT.quantizations) == {"none", *ctranslate2.specs.model_spec.ACCEPTED_MODEL_TYPES} - {
        "float32"
    }

    def largest(difference):
        return np.abs(difference)[batch.target_mask].max()

    for quantization in FORMAT.quantizations:
        folder = export(weights, tmp_path / quantization, quantization)
        theirs, compute_type = log_probs_as(folder, batch, "default", monkeypatch)
        # CTranslate2 converts the float32 model while it loads it.
        own, own_type = log_probs_as(tmp_path / "none", batch, compute_type, monkeypatch)
        assert own_type == compute_type
        computed[quantization] = largest(own - theirs)
        in_float32, compute_type = log_probs_as(folder, batch, "float32", monkeypatch)
        assert compute_type == "float32"
        stored[quantization] = largest(ours - in_float32)
        sizes[quantization] = (folder / "model.bin").stat().st_size
    assert stored.pop("none") < 1e-4
    assert all(1e-4 < value < 1 for value in stored.values()), stored
    assert max(computed[name] for name in ("none", "int8", "int8_float32")) < 1e-4, computed
    assert all(value < 1 for value in computed.values()), computed  # of weights that are rounded twice
    assert sizes["int8_float16"] < sizes["float16"] < sizes["none"]
    assert sizes["int8"] == sizes["int8_float32"] < sizes["int16"] < sizes["none"]
    assert (sizes["bfloat16"], sizes["int8_bfloat16"]) == (sizes["float16"], sizes["int8_float16"])


@pytest.mark.parametrize("joint", [True, False])
def test_the_folder_has_all_that_either_system_needs(joint, vocabs_of, tmp_path):
    weights = make_weights(vocabs_of, tying="all" if joint else "target_output", **SHALLOW)
    folder = export(weights, tmp_path / "out")
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    vocabularies = (
        {"shared_vocabulary.json"} if joint else {"source_vocabulary.json", "target_vocabulary.json"}
    )
    models = {"vocab/source.model", "vocab/target.model", "source.spm", "target.spm"}
    assert files == {"model.bin", "config.json"} | vocabularies | models
    for side in ("source", "target"):  # each with the normalization of its language
        spm = sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{side}.spm"))
        lines = ["the ﬁne dog", "ﬁn\u00a0２"]
        assert spm.encode(lines) == [getattr(weights.vocabs, side).tokenize(line)[:-1] for line in lines]
    for side, vocab in [("source", weights.vocabs.source), ("target", weights.vocabs.target)]:
        pieces = json.loads((folder / f"{'shared' if joint else side}_vocabulary.json").read_text())
        assert pieces == vocab.pieces(range(vocab.size))
        saved = getattr(load_vocabs(folder / "vocab"), side)
        assert saved.fingerprint == vocab.fingerprint
        assert Vocab.load(folder / f"{side}.spm").fingerprint == vocab.fingerprint
    facts = json.loads((folder / "config.json").read_text())
    assert facts["decoder_start_token"] == facts["bos_token"] == weights.vocabs.target.pieces([3])[0]
    assert (facts["eos_token"], facts["add_source_bos"], facts["add_source_eos"]) == ("</s>", False, True)
    assert facts["layer_norm_epsilon"] == 1e-5
    assert facts["flaxformer_mt"]["step"] == 7
    assert find_config(folder, ImportOverrides()) == weights.config


def test_tied_arrays_are_stored_once(vocabs_of, tmp_path):
    sizes = {}
    for tying in ("all", "embeddings"):
        folder = export(make_weights(vocabs_of, tying=tying, **SHALLOW), tmp_path / tying)
        sizes[tying] = (folder / "model.bin").stat().st_size
    table = 4 * 48 * TINY["model_dim"]
    assert sizes["embeddings"] - sizes["all"] == pytest.approx(table, abs=100)


def test_greedy_search_finds_the_same_tokens(vocabs_of, tmp_path):
    weights = make_weights(vocabs_of, scale=1.0, tying="none", **SHALLOW)
    vocabs, limit = weights.vocabs, 12
    never = [vocabs.target.pad_id, vocabs.target.bos_id]
    weights.leaves["output_bias"][vocabs.target.eos_id] = 8.0
    weights.leaves["output_bias"][never] = 9.0
    search = SearchConfig(method="greedy", max_length_ratio=0, max_length_offset=limit)
    config = dataclasses.replace(weights.config, search=search)
    lines = [" ".join(words) for text in TEXT for words in (text[0].split(), text[0].split()[:2], ["Hund"])]
    ours = [list(found.tokens) for found in make_translator(config, weights.params, vocabs).translate(lines)]
    ended = [tokens[-1] == vocabs.target.eos_id for tokens in ours]
    assert any(ended) and not all(ended) and len({tuple(tokens) for tokens in ours}) > 3
    assert min(map(len, ours)) == 1 and max(map(len, ours)) == limit  # an empty one, and one that is cut off
    folder, sources = export(weights, tmp_path / "out"), [vocabs.source.tokenize(line) for line in lines]
    rules = {(piece,): np.arange(4 + piece % 7, 48, 5, np.int32) for piece in range(4, 48, 2)}
    Shortlist(rules, [9, 30], vocabs).write(folder / "vmap.txt")
    translator = ctranslate2.Translator(str(folder))

    def translate(sources, **options):
        found = translator.translate_batch(
            [vocabs.source.pieces(source[:-1]) for source in sources],
            beam_size=1,
            min_decoding_length=0,
            max_input_length=0,
            max_decoding_length=limit,
            suppress_sequences=[[piece] for piece in vocabs.target.pieces(never)],
            return_end_token=True,
            **options,
        )
        return [result.hypotheses[0] for result in found]

    assert translate(sources) == [vocabs.target.pieces(tokens) for tokens in ours]
    # CTranslate2 has one shortlist for a batch, which is here a sentence.
    restricted = make_translator(config, weights.params, vocabs, shortlist=folder / "vmap.txt").translate(
        lines
    )
    pieces = [vocabs.target.pieces(found.tokens) for found in restricted]
    assert [translate([source], use_vmap=True)[0] for source in sources] == pieces
    assert sum(found.tokens != tuple(tokens) for found, tokens in zip(restricted, ours, strict=True)) > 3


def test_alignments_come_from_the_head_that_has_learned_them(vocabs_of, tmp_path):
    weights = make_weights(vocabs_of, scale=1.0)
    guided = GuidedAlignmentConfig(weight=0.1, layer=-2)
    model_config = dataclasses.replace(weights.config.model, alignment=guided)
    config = dataclasses.replace(weights.config, model=model_config)
    weights = dataclasses.replace(weights, config=config)
    vocabs = weights.vocabs
    source = vocabs.source.tokenize("der kleine Hund schläft")
    translator = ctranslate2.Translator(str(export(weights, tmp_path / "out")))
    pieces = vocabs.source.pieces(source[:-1])
    (found,) = translator.translate_batch(
        [pieces], beam_size=1, max_decoding_length=4, min_decoding_length=4, return_attention=True
    )
    target = [vocabs.target.pieces(range(vocabs.target.size)).index(piece) for piece in found.hypotheses[0]]
    batch = make_batch([source], [[*target, vocabs.target.eos_id]], vocabs, config=weights.config)
    model = make_model(model_config, source_size=vocabs.source.size, target_size=vocabs.target.size)
    ours = attention_maps(model, weights.params, batch).cross[0][0, 0]
    theirs = np.array(found.attention[0])
    np.testing.assert_allclose(theirs, ours[: len(theirs), : theirs.shape[1]], atol=1e-4)
    assert np.abs(theirs - 1 / len(source)).max() > 0.1


def test_positions_end_where_ours_end(vocabs_of, tmp_path):
    weights = make_weights(vocabs_of, max_positions=30, **SHALLOW)
    translator = ctranslate2.Translator(str(export(weights, tmp_path / "out")))
    piece = weights.vocabs.source.pieces([10])[0]
    translator.translate_batch([[piece] * 29], max_decoding_length=30)
    with pytest.raises(RuntimeError, match="No position encodings are defined for positions >= 30"):
        translator.translate_batch([[piece] * 30], max_decoding_length=30)


def test_a_model_that_it_cannot_express_is_refused_with_every_reason(vocabs_of):
    weights = make_weights(vocabs_of, **SHALLOW)

    def problems(**fields):
        model = dataclasses.replace(weights.config.model, **fields)
        return FORMAT.problems(dataclasses.replace(weights.config, model=model))

    assert problems(positions="one_vector", embedding_bias=True, padding_mask="none") == [
        "model.positions is one_vector; supported: sinusoidal, sinusoidal_halves, learned, rotary, relative",
        "model.embedding_bias is True; supported: False",
        "model.padding_mask is none; supported: source, both",
    ]
    (reason,) = problems(architecture="decoder_only")
    assert "model.architecture is decoder_only" in reason and "--format=torch" in reason
    with pytest.raises(UserError, match="ctranslate2 has no --quantization=int4; it has: none, int8"):
        check_expressible(FORMAT, weights, "int4")


def test_special_tokens_must_be_spelled_alike(vocabs_of, monkeypatch):
    weights = make_weights(vocabs_of, tying="none", **SHALLOW)
    pieces = weights.vocabs.source.pieces
    monkeypatch.setattr(
        weights.vocabs.source, "pieces", lambda ids: [piece.replace("</s>", "[END]") for piece in pieces(ids)]
    )
    (problem,) = FORMAT.more_problems(weights)
    assert "<unk>, <s>, [END] in the source" in problem


def test_sentences_that_are_cut_are_compared_too(vocabs_of, tmp_path):
    """They end in eos all the same, as a model's inputs do."""
    weights = make_weights(vocabs_of, **SHALLOW)
    data = DataConfig(
        dataset="parallel_text", text_dir=str(tmp_path / "none"), max_source_length=4, max_target_length=3
    )
    weights = dataclasses.replace(weights, config=dataclasses.replace(weights.config, data=data))
    found = measure(weights, FORMAT.open(export(weights, tmp_path / "out")), quantity="log_probs")
    assert found.checked_on.startswith("random tokens")
    assert found.largest_difference < 1e-4


def test_pytorch_is_not_needed(vocabs_of, tmp_path):
    """The same files where torch cannot be imported, also of the type for which CTranslate2 wants it."""
    weights, kinds = make_weights(vocabs_of, **SHALLOW), ["none", "bfloat16"]
    with_torch = [export(weights, tmp_path / f"with_{kind}", kind) for kind in kinds]
    np.savez(tmp_path / "leaves.npz", **weights.leaves)
    code = f"""
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
import pathlib
import numpy as np
from flaxformer_mt.convert.ctranslate2.model_folder import FORMAT
from flaxformer_mt.convert.formats import ImportOverrides, Weights, find_config, find_vocabs
given, out = pathlib.Path({str(with_torch[0])!r}), pathlib.Path({str(tmp_path)!r})
leaves = dict(np.load(out / "leaves.npz"))
weights = Weights(find_config(given, ImportOverrides()), find_vocabs(given, ImportOverrides()), leaves)
for kind in {kinds}:
    (out / kind).mkdir()
    FORMAT.write(weights, out / kind, kind)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    for kind, folder in zip(kinds, with_torch, strict=True):
        assert (tmp_path / kind / "model.bin").read_bytes() == (folder / "model.bin").read_bytes()


def test_language_tags_are_single_pieces_there_too(vocabs_of, tmp_path):
    class Tagged(list):
        tags = (">>fr<<", "<from:en>")

    special = {"pad_id": 1, "bos_id": 3, "eos_id": 0, "unk_id": 2}
    config = VocabConfig(size=48, byte_fallback=False, **special)
    vocabs = make_vocabs(config, Tagged([Pair(*text) for text in TEXT * 5]), tmp_path / "vocab")
    weights = make_weights({True: vocabs, False: vocabs}, **SHALLOW)
    folder = export(weights, tmp_path / "out")
    names = json.loads((folder / "shared_vocabulary.json").read_text(encoding="utf-8"))
    spm = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
    line = ">>fr<< <from:en> the dog"
    pieces = spm.encode(line, out_type=str)
    assert pieces[:2] == ["\u2581>>fr<<", "\u2581<from:en>"]
    assert [names.index(piece) for piece in pieces] == vocabs.source.tokenize(line)[:-1]
    asked = Request(line, annotations=Annotations(attention=True))
    ((found,),) = load_engine(folder).run([[asked]])
    assert list(found.source_pieces) == pieces
