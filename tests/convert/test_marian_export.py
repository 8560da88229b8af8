"""Marian's files from our models: a twin over their arrays computes the same, and they come back equal."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import sentencepiece
import yaml
from test_huggingface import TEXT, assert_same, make_weights
from tiny_experiment import mark_slow

from benchmarks.originals.tiny_toolkits import marian_options
from benchmarks.originals.toolkit_twins import Marian
from flaxformer_mt.config import SearchConfig
from flaxformer_mt.convert.export_run import check_expressible
from flaxformer_mt.convert.formats import ImportOverrides, Weights, find_format
from flaxformer_mt.convert.parity_check import flax_outputs, make_batch, measure
from flaxformer_mt.errors import UserError
from flaxformer_mt.shapes import Batch

FORMAT = find_format("marian-npz")
OWN = {"positions": "sinusoidal_halves", "norm_epsilon": 1e-6, "target_start": "zeros"}
POOR = {"attention_bias": False, "ffn_bias": False, "norm_affine": False}
SSRU = {"decoder_self_attention": "ssru"}
# The network, and the vocabulary.
VARIANTS = {
    "post-norm, all tied": (OWN, {}),
    "pre-norm, untied": (
        OWN | {"norm_position": "pre", "tying": "none", "activation": "silu"},
        {"joint": False},
    ),
    "ssru, output tied": (OWN | SSRU | POOR | {"tying": "target_output"}, {"joint": False}),
    "pre-norm ssru": (
        OWN
        | SSRU
        | {"norm_position": "pre", "embedding_norm": True, "tying": "embeddings", "output_bias": True},
        {},
    ),
}
# Options that Marian's decoder reads of every file.
ASKED = """
bert-train-type-embeddings bert-type-vocab-size dec-cell dec-cell-base-depth dec-cell-high-depth dec-depth
dim-emb dim-rnn dim-vocabs enc-cell enc-cell-depth enc-depth enc-type factors-combine factors-dim-emb
input-types layer-normalization lemma-dependency lemma-dim-emb output-omit-bias right-left skip
tied-embeddings tied-embeddings-all tied-embeddings-src transformer-aan-activation transformer-aan-depth
transformer-aan-nogate transformer-decoder-autoreg transformer-decoder-dim-ffn transformer-decoder-ffn-depth
transformer-dim-aan transformer-dim-ffn transformer-ffn-activation transformer-ffn-depth
transformer-guided-alignment-layer transformer-heads transformer-no-projection transformer-postprocess
transformer-postprocess-emb transformer-postprocess-top transformer-preprocess transformer-tied-layers
transformer-train-position-embeddings type ulr ulr-dim-emb version
"""


# Each tying and each norm once.
@pytest.mark.parametrize("variant", mark_slow(VARIANTS, "ssru, output tied", "pre-norm, untied"))
def test_marian_computes_what_we_do_and_the_files_come_back(variant, tmp_path):
    model, vocab = VARIANTS[variant]
    weights = make_weights(tmp_path, model, vocab)
    # What Marian trains and scores as we do, but translates in another way.
    problems = FORMAT.problems(weights.config)
    assert problems == [] or variant == "pre-norm, untied" and "other keys than it trains with" in problems[0]
    folder = tmp_path / "out"
    folder.mkdir()
    FORMAT.write(weights, folder, "none")
    assert_same(weights, FORMAT.read(folder, ImportOverrides()))
    assert measure(weights, FORMAT.open(folder), quantity="log_probs").largest_difference < 1e-5
    stored = dict(np.load(folder / "model.npz"))
    options = yaml.safe_load(stored.pop("special:model.yml").tobytes()[:-1])
    assert set(ASKED.split()) <= options.keys()
    twin = Marian(marian_options() | options, tuple(options["dim-vocabs"]))
    assert {name: array.shape for name, array in twin.arrays.items()} == {
        name: array.shape for name, array in stored.items()
    }
    twin.arrays = stored
    batch = batch_of(weights)
    ours = flax_outputs(weights, batch, quantity="logits")[batch.target_mask]
    if twin.output is not None:
        twin.output = torch.from_numpy(stored["decoder_ff_logit_out_Wt"])
    theirs = twin(batch.source, batch.source_mask, batch.target_out).numpy()[batch.target_mask]
    assert np.ptp(theirs) > 1
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())
    # The vocabularies are those of the run, under the names that decoder.yml lists.
    vocabs = weights.vocabs
    for name, own in zip(read_search(folder)["vocabs"], (vocabs.source, vocabs.target), strict=True):
        processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / name))
        assert [*processor.encode(TEXT[0][0]), processor.eos_id()] == own.tokenize(TEXT[0][0])
    # Without our own files, the folder is one of Marian's.
    (folder / "config.json").unlink()
    again = FORMAT.read(folder, ImportOverrides())
    ours, theirs = (flax_outputs(one, batch_of(one), quantity="log_probs") for one in (weights, again))
    np.testing.assert_allclose(ours[batch.target_mask], theirs[batch.target_mask], rtol=0, atol=1e-4)


def batch_of(weights: Weights) -> Batch:
    vocabs = weights.vocabs
    rows = [(vocabs.source.tokenize(source), vocabs.target.tokenize(target)) for source, target in TEXT]
    return make_batch(*map(list, zip(*rows, strict=True)), vocabs, config=weights.config)


def read_search(folder: Path) -> dict:
    return yaml.safe_load((folder / "decoder.yml").read_text())


def test_search_options_are_in_marians_terms(tmp_path):
    weights = make_weights(tmp_path, OWN, {})
    search = SearchConfig(beam_size=6, length_penalty=0.6, max_length_ratio=2.0, max_length_offset=10)
    for changes, expected in [
        (
            {},
            {"beam-size": 6, "normalize": 0.5, "max-length-factor": 5, "word-penalty": 0, "allow-unk": True},
        ),
        ({"method": "greedy", "length_penalty_kind": "length"}, {"beam-size": 1, "normalize": 0.6}),
        ({"suppress": ("<unk>",)}, {"allow-unk": False}),
    ]:
        changed = dataclasses.replace(search, **changes)
        own = dataclasses.replace(weights, config=dataclasses.replace(weights.config, search=changed))
        folder = tmp_path / "out" / str(len(changes)) / str(len(expected))
        folder.mkdir(parents=True)
        FORMAT.write(own, folder, "none")
        stored = read_search(folder)
        assert {name: stored[name] for name in expected} == expected
        assert stored["vocabs"] == ["vocab.spm"] * 2 and stored["relative-paths"]
    lost = FORMAT.lost_options(SearchConfig(method="sample", mbr="chrf", suppress=("x", "<unk>")))
    assert lost == ["search.suppress=x", "search.mbr=chrf", "search.method=sample"]


def test_a_start_symbol_that_is_no_zero_is_refused(tmp_path):
    """In the first list of problems, with all others: whoever mends one at a time trains once for each."""
    weights = make_weights(tmp_path, OWN | {"target_start": "symbol", "norm_epsilon": 1e-5}, {})
    with pytest.raises(UserError) as caught:
        check_expressible(FORMAT, weights, "int8")
    first, second, third = str(caught.value).split("\n")
    assert "model.norm_epsilon is 1e-05; supported: 1e-06" in first
    assert (
        "target_start is symbol, whose" in second and "train with --config.model.target_start=zeros" in second
    )
    assert "has no --quantization=int8" in third
    weights.leaves["shared_embedding/embedding"][weights.vocabs.target.bos_id] = 0
    assert FORMAT.more_problems(weights) == []
