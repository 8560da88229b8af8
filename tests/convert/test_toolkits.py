"""Models of other toolkits, in files written as these write them: their numbers, their pieces, refusals."""

import collections
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import sentencepiece
import yaml
from tiny_experiment import mark_slow

from benchmarks.originals.tiny_toolkits import (
    GERMAN,
    PAIRS,
    eole_model,
    fairseq_args,
    joey_config,
    marian_options,
    onmt_options,
    train_pieces,
    write_eole,
    write_fairseq,
    write_joey,
    write_marian,
    write_onmt,
)
from benchmarks.originals.toolkit_twins import as_ids, half_sinusoids
from flaxformer_mt.config import SearchConfig
from flaxformer_mt.config.checks import validate
from flaxformer_mt.config.directions import Direction, find_directions
from flaxformer_mt.convert.export_run import export_run
from flaxformer_mt.convert.formats import ImportOverrides, Weights, find_format
from flaxformer_mt.convert.import_run import find_format_name, import_run
from flaxformer_mt.convert.parity_check import flax_outputs, make_batch
from flaxformer_mt.convert.stored_tensors import Record, attributes_of, load_checkpoint
from flaxformer_mt.convert.toolkits import fairseq
from flaxformer_mt.convert.toolkits.toolkit_model import languages_of, parse_yaml, read_vocabs
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs.load_run import read_config
from flaxformer_mt.shapes import Batch
from flaxformer_mt.translation.translator import Translator

pytestmark = pytest.mark.filterwarnings("ignore:.* has no SentencePiece model")


def batch_of(weights: Weights, *, longest: int = 4) -> Batch:
    lines = [(" ".join(a.split()[: 2 + n]), " ".join(b.split()[: 5 - n])) for n, (a, b) in enumerate(PAIRS)]
    return make_batch(
        [weights.vocabs.source.tokenize(source) for source, _ in lines[:longest]],
        [weights.vocabs.target.tokenize(target) for _, target in lines[:longest]],
        weights.vocabs,
        config=weights.config,
    )


def assert_same_logits(weights: Weights, batch: Batch, theirs: Any) -> None:
    validate(weights.config)
    ours = flax_outputs(weights, batch, quantity="logits")[batch.target_mask]
    expected = theirs.detach().numpy()[batch.target_mask]
    assert not batch.source_mask.all() and not batch.target_mask.all()
    assert np.ptp(expected) > 0.5
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


FAIRSEQ = {
    "post-norm, output tied": {},
    "pre-norm, all tied": {
        "normalize_before": True,
        "share_all_embeddings": True,
        "activation_fn": "gelu_accurate",
    },
    "learned, untied": {
        "learned_pos": True,
        "share_decoder_input_output_embed": False,
        "layernorm_embedding": True,
        "no_scale_embedding": True,
        "activation_fn": "gelu",
    },
}


@pytest.mark.parametrize("changes", FAIRSEQ.values(), ids=FAIRSEQ)
@pytest.mark.parametrize("modern", [True, False], ids=["cfg", "args"])
def test_fairseq_computes_what_its_twin_does(changes, modern, tmp_path):
    twin = write_fairseq(tmp_path / "model", fairseq_args(**changes), modern=modern)
    assert find_format_name(tmp_path / "model") == find_format_name(tmp_path / "model/model.pt") == "fairseq"
    weights = find_format("fairseq").read(tmp_path / "model", ImportOverrides())
    batch = batch_of(weights)
    assert set(batch.target_in[:, 0]) == {2}  # </s>
    assert_same_logits(weights, batch, twin(as_ids(batch.source), as_ids(batch.target_in)))
    data = weights.config.data
    assert (data.source_language, data.target_language) == ("de", "en")
    source = weights.vocabs.source
    spm = next((tmp_path / "model").glob("s*.model" if weights.vocabs.joint else "spm.de.model"))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(spm)).encode(GERMAN[0], out_type=str)
    names = ["<s>", "<pad>", "</s>", "<unk>"]
    rows = (tmp_path / "model/dict.de.txt").read_text(encoding="utf-8").splitlines()
    names += [row.rpartition(" ")[0] for row in rows]
    assert source.tokenize(GERMAN[0]) == [*map(names.index, pieces), 2]
    assert source.detokenize(source.tokenize(GERMAN[0])) == GERMAN[0]


# The toolkit, its writer, and what this is given.
TOOLKITS = {
    "opennmt-py, untied": ("opennmt-py", write_onmt, onmt_options()),
    "opennmt-py, all tied, gated, without biases": (
        "opennmt-py",
        write_onmt,
        onmt_options(
            share_embeddings=True,
            share_decoder_embeddings=True,
            pos_ffn_activation_fn="silu",
            add_qkvbias=False,
            add_ffnbias=False,
            position_encoding_type="SinusoidalConcat",
        ),
    ),
    "opennmt-py, output tied": (
        "opennmt-py",
        write_onmt,
        onmt_options(share_decoder_embeddings=True, pos_ffn_activation_fn="gelu"),
    ),
    "eole, tied": ("eole", write_eole, eole_model(share_decoder_embeddings=True)),
    "eole, untied": ("eole", write_eole, eole_model(share_decoder_embeddings=False)),
    "joeynmt, pre-norm, output tied": ("joeynmt", write_joey, joey_config()),
    "joeynmt, post-norm, all tied": (
        "joeynmt",
        write_joey,
        joey_config(layer_norm="post", tied_embeddings=True, activation="swish"),
    ),
    "joeynmt, unscaled, untied": (
        "joeynmt",
        write_joey,
        joey_config(tied_softmax=False, embeddings={"embedding_dim": 16, "scale": False}, activation="gelu"),
    ),
}


# Each toolkit with and without tied tables.
@pytest.mark.parametrize(
    "case", mark_slow(TOOLKITS, "opennmt-py, output tied", "joeynmt, unscaled, untied", "eole, untied")
)
def test_a_toolkit_computes_what_its_twin_does(case, tmp_path):
    name, write, options = TOOLKITS[case]
    twin = write(tmp_path / "model", options)
    assert find_format_name(tmp_path / "model") == name
    weights = find_format(name).read(tmp_path / "model", ImportOverrides())
    batch = batch_of(weights)
    lengths = () if name == "joeynmt" else (as_ids(batch.source_mask.sum(1) - 1),)
    assert_same_logits(weights, batch, twin(as_ids(batch.source), *lengths, as_ids(batch.target_in)))
    if name == "opennmt-py":
        assert set(batch.target_in[:, 0]) == {2} and batch.source[0, batch.source_mask[0]][-1] == 3
    if name == "joeynmt":
        assert weights.config.data.source_language == "de"


def test_sources_without_symbols_of_older_versions_of_opennmt_py(tmp_path):
    twin = write_onmt(tmp_path / "model", onmt_options(), symbols=False)
    weights = find_format("opennmt-py").read(tmp_path / "model", ImportOverrides())
    batch = batch_of(weights)
    source = np.minimum(batch.source, weights.vocabs.source.size - 2)  # the twin has no end symbol
    lengths = as_ids(batch.source_mask.sum(1) - 1)
    assert_same_logits(weights, batch, twin(as_ids(source), lengths, as_ids(batch.target_in)))


MARIAN: dict[str, dict] = {
    "post-norm, all tied": {"tied_embeddings_all": True},
    "pre-norm, untied": {
        "transformer_preprocess": "n",
        "transformer_postprocess": "da",
        "transformer_postprocess_top": "n",
        "transformer_postprocess_emb": "nd",
        "transformer_ffn_activation": "relu",
    },
    "ssru, output tied": {"transformer_decoder_autoreg": "rnn", "dec_cell": "ssru", "tied_embeddings": True},
    "pre-norm ssru, embeddings tied": {
        "transformer_decoder_autoreg": "rnn",
        "dec_cell": "ssru",
        "transformer_preprocess": "n",
        "transformer_postprocess": "da",
        "tied_embeddings_src": True,
    },
}


@pytest.mark.parametrize("yml", [False, True], ids=["spm", "yml"])
@pytest.mark.parametrize("changes", MARIAN.values(), ids=MARIAN)
def test_marian_computes_what_its_twin_does(changes, yml, tmp_path):
    folder = tmp_path / "model"
    twin = write_marian(folder, marian_options(**changes), yml=yml)
    assert find_format_name(folder) == find_format_name(folder / "model.npz") == "marian-npz"
    weights = find_format("marian-npz").read(folder, ImportOverrides())
    batch = batch_of(weights)
    pad = weights.vocabs.target.pad_id
    assert set(batch.target_in[:, 0]) == {pad} and pad == weights.vocabs.source.pad_id
    validate(weights.config)
    ours = flax_outputs(weights, batch, quantity="logits")[batch.target_mask]
    rows = twin.arrays["decoder_ff_logit_out_b"].shape[1]
    source, target = (np.where(one == pad, 0, one) for one in (batch.source, batch.target_out))
    theirs = twin(source, batch.source_mask, target).numpy()[batch.target_mask]
    assert pad >= rows and np.ptp(theirs) > 0.5
    np.testing.assert_allclose(ours[:, :rows], theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())
    assert (ours[:, rows:] < -50).all()  # probabilities are those of Marian
    line = GERMAN[0]
    assert weights.vocabs.source.detokenize(weights.vocabs.source.tokenize(line)) == line
    assert weights.vocabs.source.tokenize(line)[-1] == 0


def assert_ctranslate2_agrees(weights: Weights, folder: Path, pieces: list[list[str]]) -> None:
    """CTranslate2's own converter has read the file: its log-probabilities of the targets are ours."""
    ctranslate2 = pytest.importorskip("ctranslate2")
    translator = ctranslate2.Translator(str(folder), device="cpu", compute_type="float32")
    batch = batch_of(weights)
    targets = [
        weights.vocabs.target.pieces(row[mask][:-1])
        for row, mask in zip(batch.target_out, batch.target_mask, strict=True)
    ]
    found = translator.score_batch(pieces, targets)
    ours = flax_outputs(weights, batch, quantity="log_probs")
    for row, mask, result in zip(ours, batch.target_mask, found, strict=True):
        assert np.ptp(result.log_probs) > 0.5
        np.testing.assert_allclose(row[mask], result.log_probs, rtol=0, atol=1e-4)


def source_pieces(weights: Weights) -> list[list[str]]:
    batch = batch_of(weights)
    vocab = weights.vocabs.source
    return [vocab.pieces(row[m][:-1]) for row, m in zip(batch.source, batch.source_mask, strict=True)]


def set_epsilon(folder: Path) -> None:
    """CTranslate2's converters leave out the epsilon of norms, which is 1e-6 in both toolkits."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"layer_norm_epsilon": 1e-6}))


def test_ctranslate2_reads_the_same_opennmt_py_model(tmp_path):
    converters = pytest.importorskip("ctranslate2.converters")
    write_onmt(tmp_path / "model", onmt_options(pos_ffn_activation_fn="gelu"))
    file = str(tmp_path / "model/model_step_10.pt")
    converters.OpenNMTPyConverter(file, unsafe_deserialization=True).convert(str(tmp_path / "ct2"))
    set_epsilon(tmp_path / "ct2")
    weights = find_format("opennmt-py").read(tmp_path / "model", ImportOverrides())
    assert_ctranslate2_agrees(weights, tmp_path / "ct2", source_pieces(weights))


def test_ctranslate2_reads_the_same_marian_model(tmp_path):
    """With Marian's table of positions: CTranslate2 computes other rates, but reads a table of a file."""
    converters = pytest.importorskip("ctranslate2.converters")
    options = marian_options(tied_embeddings_all=True, transformer_ffn_activation="relu")
    twin = write_marian(tmp_path / "model", options, yml=True)
    text = np.frombuffer(yaml.safe_dump(options).encode() + b"\0", np.int8)
    arrays = twin.arrays | {"Wpos": half_sinusoids(50, 16).numpy(), "special:model.yml": text}
    np.savez(tmp_path / "with_table.npz", **arrays)
    vocab = str(tmp_path / "model/vocab.yml")
    converters.MarianConverter(str(tmp_path / "with_table.npz"), [vocab]).convert(str(tmp_path / "ct2"))
    set_epsilon(tmp_path / "ct2")
    weights = find_format("marian-npz").read(tmp_path / "model", ImportOverrides())
    assert_ctranslate2_agrees(weights, tmp_path / "ct2", source_pieces(weights))


def test_exports_of_imports_compute_the_same(tmp_path):
    write_onmt(tmp_path / "model", onmt_options())
    run = tmp_path / "run"
    with pytest.raises(UserError, match="this model has no tags of languages; give the two"):
        import_run(tmp_path / "model", run_dir=run, languages=["de", "en", "fr"])
    found = import_run(tmp_path / "model", run_dir=run, languages=["sv", "da"])
    assert find_directions(read_config(run / "config.json").data) == [Direction("sv", "da")]
    assert found["checked_on"] == "nothing: opennmt-py files are read without their toolkit"
    for name in ("ctranslate2", "torch"):
        out = export_run(run, format_name=name, output=tmp_path / name)
        assert out["largest_difference"] < 1e-4, name
    with pytest.raises(UserError, match="opennmt-py cannot express this model: its files are only read"):
        export_run(run, format_name="opennmt-py", output=tmp_path / "out")
    with pytest.raises(UserError, match="model.source_end is False; supported: True"):
        export_run(run, format_name="torch-nn", output=tmp_path / "out")
    lines, greedy = [*GERMAN[:2], "", "a"], SearchConfig(method="greedy")
    translator = Translator.load(run, search=greedy)
    alone = [translator.translate([line])[0].text for line in lines]
    assert [one.text for one in translator.translate(lines)] == alone


def write_all(root: Path) -> dict[str, Path]:
    root.mkdir()
    write_fairseq(root / "fairseq", fairseq_args(), spm=False)
    write_onmt(root / "opennmt-py", onmt_options(), spm=False)
    write_eole(root / "eole", eole_model(), spm=False)
    write_marian(root / "marian-npz", marian_options(), yml=True)
    write_joey(root / "joeynmt", joey_config(), spm=False)
    return {folder.name: folder for folder in root.iterdir()}


@pytest.mark.parametrize(
    ("write", "changes", "message"),
    [
        ("fairseq", {"adaptive_softmax_cutoff": "100,200"}, "softmax_cutoff is '100,200'; supported"),
        ("fairseq", {"no_token_positional_embeddings": True}, "positional_embeddings is 'True'; supported"),
        ("fairseq", {"activation_fn": "tanh"}, "activation_fn is 'tanh'; supported: 'relu', 'gelu', "),
        ("fairseq", {"task": "translation_multi_simple_epoch"}, "task is 'translation_multi_simple_epoch'"),
        ("fairseq", {"encoder_embed_dim": None}, "lacks encoder_embed_dim; give the file of a complete"),
        ("onmt", {"copy_attn": True}, "copy_attn is 'True'; supported: False"),
        ("onmt", {"max_relative_positions": -1}, "max_relative_positions is '-1'; supported: 0"),
        ("onmt", {"pos_ffn_activation_fn": "gated-gelu"}, "activation_fn is 'gated-gelu'; supported: 'relu'"),
        ("onmt", {"layer_norm": "rms"}, "layer_norm is 'rms'; supported: 'standard'"),
        ("onmt", {"encoder_type": "brnn"}, "encoder_type is 'brnn'; supported: 'transformer'"),
        ("eole", {"embeddings": {"position_encoding_type": "Rotary"}}, "type is 'Rotary'; supported"),
        ("eole", {"decoder": {"heads": 4}}, "encoder.heads is 2 and decoder.heads is 4; they must be equal"),
        ("eole", {"encoder": {"heads_kv": 1}}, "heads_kv is '1'; supported: 2"),
        ("eole", {"encoder": None}, "model.encoder is None; it must be a Transf"),
        ("marian", {"transformer_ffn_activation": "gelu"}, "'gelu'; supported: 'relu', 'swish'"),
        ("marian", {"transformer_decoder_autoreg": "average-attention"}, "autoreg is 'average-attention'"),
        ("marian", {"transformer_decoder_autoreg": "rnn"}, "dec-cell is 'gru'; supported: 'ssru'"),
        ("marian", {"transformer_preprocess": "nr"}, "postprocess is .*'nr', 'an'.*; supported: .'n', 'a'"),
        ("marian", {"transformer_train_positions": True}, "train-positions is 'True'; supported: False"),
        ("marian", {"type": "s2s"}, "type is 's2s'; supported: 'transformer'"),
        ("joey", {"type": "recurrent"}, "type is 'recurrent'; supported: 'transformer'"),
        ("joey", {"alpha": 0.5}, "alpha is '0.5'; supported: 1"),
    ],
)
def test_what_a_toolkit_has_and_this_package_lacks_is_named(write, changes, message, tmp_path):
    folder = tmp_path / "model"
    if write == "fairseq":
        write_fairseq(folder, fairseq_args(), spm=False)
        args = fairseq_args(**changes)
        torch.save(torch.load(folder / "model.pt", weights_only=False) | {"args": args}, folder / "model.pt")
    elif write == "onmt":
        write_onmt(folder, onmt_options(), spm=False)
        file = folder / "model_step_10.pt"
        torch.save(torch.load(file, weights_only=False) | {"opt": onmt_options(**changes)}, file)
    elif write == "eole":
        write_eole(folder, eole_model(), spm=False)
        if changes.get("encoder", "") is None:
            model = eole_model() | changes
        else:
            model = eole_model(**changes)
        (folder / "config.json").write_text(json.dumps({"model": model}))
    elif write == "marian":
        twin = write_marian(folder, marian_options(), yml=True)
        np.savez(folder / "model.npz", **twin.arrays)
        (folder / "model.npz.yml").write_text(yaml.safe_dump(marian_options(**changes)))
    else:
        write_joey(folder, joey_config(), spm=False)
        (folder / "config.yaml").write_text(yaml.safe_dump(joey_config(**changes)))
    with pytest.raises(UserError, match=message):
        import_run(folder, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_missing_files_are_named_with_the_remedy(tmp_path):
    folders = write_all(tmp_path / "models")
    for name, file, message in [
        ("fairseq", "dict.de.txt", "has no dict.de.txt and no dict.txt; copy the dictionaries"),
        ("eole", "model.00.safetensors", "has no file model.00.safetensors"),
        ("eole", "vocab.json", "vocab.json does not exist or is empty; give the folder that eole"),
        ("marian-npz", "model.npz.decoder.yml", None),
        ("marian-npz", "vocab.de.yml", None),
        ("marian-npz", "vocab.en.yml", "has no vocabulary, such as vocab.spm or vocab.yml"),
        ("joeynmt", "trg_vocab.txt", "trg_vocab.txt cannot be read: .*model_dir of Joey NMT"),
        ("joeynmt", "config.yaml", "config.yaml cannot be read"),
    ]:
        (folders[name] / file).unlink()
        if message is not None:
            with pytest.raises(UserError, match=message):
                find_format(name).read(folders[name], ImportOverrides())
    for name in folders:
        with pytest.raises(UserError, match="leave out --config and --vocab"):
            find_format(name).read(folders[name], ImportOverrides(vocabs=object()))


def test_vocabularies_that_contradict_a_model_are_refused(tmp_path):
    folder = tmp_path / "model"
    write_fairseq(folder, fairseq_args(), spm=False)
    rows = (folder / "dict.de.txt").read_text(encoding="utf-8")
    for text, message in [
        (rows + "more 1\n", "is not a fairseq model of this config; "),
        (rows + rows.split("\n")[0] + "\n", "repeats '.'; each piece needs an id of its own"),
        (rows + "nothing\n", "each line is a piece and its count"),
    ]:
        (folder / "dict.de.txt").write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=message):
            find_format("fairseq").read(folder, ImportOverrides())
    for name in ("a.model", "b.model"):
        (folder / name).write_bytes(train_pieces(GERMAN))
    (folder / "dict.de.txt").write_text(rows, encoding="utf-8")
    with pytest.raises(UserError, match=r"several SentencePiece models \(a.model, b.model\); put source and"):
        find_format("fairseq").read(folder, ImportOverrides())


OVERWRITE = "0 #fairseq:overwrite"


@pytest.mark.parametrize(
    ("lines", "hund", "der", "size"),
    [
        (["Hund 9", "der 8"], 4, 5, 6),
        ([*(f"{symbol} {OVERWRITE}" for symbol in ("<s>", "</s>", "<unk>")), "Hund 9", "der 8"], 7, 8, 9),
        ([f"<pad> {OVERWRITE}", "Hund 9", f"<pad> {OVERWRITE}", "der 8"], 5, 7, 8),
        (["Hund 9", "der 8", f"Hund {OVERWRITE}", "madeupword0000 0"], 6, 5, 8),
    ],
)
@pytest.mark.filterwarnings("ignore:.*has no SentencePiece model")
def test_ids_of_a_dictionary_are_those_of_fairseq(lines, hund, der, size, tmp_path):
    """As fairseq/data/dictionary.py gives them: a symbol that is given again has its last number as a word,
    but decoders start with </s> at 2 and searches end there.
    """
    (tmp_path / "dict.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    read = fairseq._read_dictionary(tmp_path, None)
    vocab = read_vocabs(tmp_path, [read, read], languages_of([None, None])).target
    assert (vocab.bos_id, vocab.pad_id, vocab.eos_id, vocab.unk_id, vocab.size) == (2, 1, 2, 3, size)
    assert vocab.tokenize("der Katze Hund") == [der, 3, hund, 2]
    assert vocab.tokenize("") == [2]


class Harmful:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple:
        return subprocess.call, (["touch", str(self.path)],)


class Foreign:
    """A class that the reader of the file does not have, with a dict of another kind."""

    def __init__(self):
        self.counts = collections.defaultdict(int, {"a": 1})


@pytest.mark.parametrize("modern", [True, False])
def test_objects_of_a_checkpoint_are_not_made(modern, tmp_path):
    content = {"model": {"a": torch.ones(2)}, "harm": Harmful(tmp_path / "harm"), "own": Foreign()}
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=modern)
    found = load_checkpoint(tmp_path / "a.pt")
    assert not (tmp_path / "harm").exists()
    assert type(found["harm"]) is Record and type(found["own"]) is Record
    assert attributes_of(found["own"])["counts"] == {"a": 1}
    assert torch.equal(found["model"]["a"], torch.ones(2))
    for function in (os.system, getattr):
        torch.save({"a": function}, tmp_path / "a.pt", _use_new_zipfile_serialization=modern)
        with pytest.raises(UserError, match=f"GLOBAL .*{function.__name__} .*(not an allowed|blocked)"):
            load_checkpoint(tmp_path / "a.pt")


def test_yaml_of_a_model_is_a_mapping():
    assert parse_yaml("a: &x {b: 1}\nc: *x", "config.yaml") == {"a": {"b": 1}, "c": {"b": 1}}
    assert parse_yaml("no: 1\n1_0: 2\n~: 3", "vocab.yml", as_text=True) == {"no": "1", "1_0": "2", "~": "3"}
    for text in ("a: !!python/object/apply:os.system [x]", "[1]", "a: ["):
        with pytest.raises(UserError, match="config.yaml"):
            parse_yaml(text, "config.yaml")


@pytest.mark.parametrize("kind", ["itself", "each other", "wide"])
def test_options_that_hold_themselves_are_refused_at_once(kind, tmp_path):
    value: list = []
    value += [value] * (1000 if kind == "wide" else 2)
    if kind == "each other":
        value = ["x"]
        for _ in range(40):
            value = [value, value]
    torch.save({"model": {"a": torch.ones(2)}, "args": {"activation_fn": value}}, tmp_path / "a.pt")
    with pytest.raises(UserError, match="a.pt has more than 2097152 values, each list counted where"):
        load_checkpoint(tmp_path / "a.pt")
