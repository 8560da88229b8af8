"""Bergamot's files from our models: what the layout says, what Marian's tools wrote, and they come back.

test_bergamot_engine.py has the engine itself.
"""

import base64
import dataclasses
import hashlib
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import sentencepiece
from test_huggingface import TEXT, assert_same, make_weights
from test_marian_export import OWN, SSRU, batch_of
from tiny_experiment import mark_slow

from flaxformer_mt.convert.formats import ImportOverrides, Weights, find_format
from flaxformer_mt.convert.import_run import find_format_name
from flaxformer_mt.convert.parity_check import flax_outputs, measure
from flaxformer_mt.convert.toolkits import bergamot, marian_binary
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.lora import is_matrix
from flaxformer_mt.vocab.shortlist import Shortlist

FORMAT = find_format("bergamot")
WIDE = OWN | {"model_dim": 64, "ffn_dim": 128}
VARIANTS = {
    "ssru, all tied": (WIDE | SSRU, {}),
    "pre-norm ssru, untied": (WIDE | SSRU | {"norm_position": "pre", "tying": "none"}, {"joint": False}),
    "post-norm, output tied": (WIDE | {"tying": "target_output", "activation": "silu"}, {"joint": False}),
}
# Written by Marian 1.12.42, `convert`: a binary model, and a shortlist of `convert --shortlist FILE 0 3 0`.
MODEL = (
    "c-muRfB+UK%?jf~1(=|G21W=aPC#CmfV>cl%ZMTjXN0HbCNZR>Cg-Q57R9Hf#pmRwXO_h0mzKmQF{I`}gmVnzi&Jyb"
    ";=>CWiVIScGZS;Ha)A;#dX>3349rl^fXsujS)dkhGvELX_CUe`h=8~Oh!+6y0U&+=#0-uM3<5x`0K^8448sl}`+Xz="
    "g#)WsaRKqG{lGZi9~wFph(m#FhW)EoY3&1IJ0RO0C<eq+fnjyP9;g<Gxq#uNFyzB5B{NqSnB}Y#Ot?xa3sS8VN{SNm"
    "iqrCoa#M>&LhJ(o=G;S3"
)
SHORTLIST = "c-s3aZo+ugL+T@w{%tww(uvO)pnw@lb3tiV2I2rr9}58*W*!q%48&)L@&T%V2H5"


def make_student(folder: Path, variant: str) -> Weights:
    weights = make_weights(folder, *VARIANTS[variant])
    leaves = {path: leaf * (0.4 if leaf.ndim > 1 else 1) for path, leaf in weights.leaves.items()}
    return dataclasses.replace(weights, leaves=leaves)


def write(weights: Weights, folder: Path, quantization: str) -> dict:
    """Write a folder; return what its registry has of the only pair."""
    folder.mkdir(parents=True)
    FORMAT.write(weights, folder, quantization)
    return json.loads((folder / "registry.json").read_text())["deen"]


@pytest.mark.parametrize("variant", mark_slow(VARIANTS, "post-norm, output tied"))
def test_the_files_compute_what_we_do_and_come_back(variant, tmp_path, monkeypatch):
    monkeypatch.setattr(bergamot, "_SENTENCES", 8)
    weights = make_student(tmp_path, variant)
    assert FORMAT.problems(weights.config) == []
    entry = write(weights, tmp_path / "none", "none")
    assert measure(weights, FORMAT.open(tmp_path / "none"), quantity="log_probs").is_within(1e-5)
    again = FORMAT.read(tmp_path / "none", ImportOverrides())
    assert_same(weights, again)
    for kind, file in entry.items():
        if kind != "config":
            content = (tmp_path / "none" / file["name"]).read_bytes()
            assert file["expectedSha256Hash"] == hashlib.sha256(content).hexdigest()
            assert file["size"] == len(content)
    # Vocabularies of a multiple of eight pieces, which segment text as ours do.
    for kind, own in (("srcvocab", weights.vocabs.source), ("trgvocab", weights.vocabs.target)):
        file = tmp_path / "none" / entry.get(kind, entry.get("vocab"))["name"]
        processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
        assert processor.vocab_size() % 8 == 0
        assert [*processor.encode(TEXT[0][0]), processor.eos_id()] == own.tokenize(TEXT[0][0])
    # In 8 bits a quarter of the size, and near.
    batch = batch_of(weights)
    sizes = {"none": entry["model"]["size"]}
    for quantization, precision in (("int8", "int8shiftAlphaAll"), ("int8_dynamic", "int8shiftAll")):
        folder = tmp_path / quantization
        entry = write(weights, folder, quantization)
        assert entry["config"]["gemm-precision"] == precision
        sizes[quantization] = entry["model"]["size"]
        ours = flax_outputs(weights, batch, quantity="log_probs")
        theirs = FORMAT.open(folder)(batch)
        difference = np.abs(ours - theirs)[batch.target_mask]
        assert 1e-4 < difference.mean() < 0.05 * np.abs(ours[batch.target_mask]).mean()
        again = FORMAT.read(folder, ImportOverrides())
        assert again.config == weights.config
        imported = FORMAT.open(folder, ImportOverrides())
        assert measure(again, imported, quantity="log_probs").is_within(1e-5)
        for path, leaf in weights.leaves.items():
            scale = 127 / np.abs(leaf).max() if is_matrix(path) else 1
            rounded = np.rint(leaf * scale) / scale if is_matrix(path) else leaf
            np.testing.assert_allclose(again.leaves[path], rounded, rtol=1e-6, err_msg=path)
            assert (again.leaves[path] == leaf).all() != is_matrix(path)
    assert sizes["int8"] < 0.4 * sizes["none"] and sizes["int8_dynamic"] < sizes["int8"]
    # Without our own files, the folder is one as Mozilla's.
    (folder / "config.json").unlink()
    assert find_format_name(folder) == find_format_name(folder / entry["model"]["name"]) == "bergamot"
    foreign = FORMAT.read(folder, ImportOverrides())
    assert foreign.config.data.source_language == "de"
    first, second = (flax_outputs(one, batch_of(one), quantity="log_probs") for one in (again, foreign))
    np.testing.assert_allclose(first[batch.target_mask], second[batch.target_mask], rtol=0, atol=1e-4)


def unpack(text: str) -> bytes:
    return zlib.decompress(base64.b85decode(text))


def test_marians_binary_model_is_read_and_written(tmp_path):
    (tmp_path / "marian.bin").write_bytes(unpack(MODEL))
    arrays = {name: np.asarray(a) for name, a in marian_binary.read_arrays(tmp_path / "marian.bin").items()}
    assert arrays.pop("special:model.yml").tobytes().rstrip(b"\0") == b"dim-emb: 4\ntype: transformer"
    expected = {
        "Wemb": np.arange(12, dtype=np.float32).reshape(3, 4),
        "decoder_ff_logit_out_b": np.array([[1, 2, 3]], np.float32),
        "encoder_l1_self_Wq": (np.arange(16, dtype=np.float32).reshape(4, 4) - 7.5) / 3,
    }
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(arrays[name], array)
    text = np.zeros(256, np.int8)  # Marian fills it too
    marian_binary.write_arrays(tmp_path / "ours.bin", expected | {"special:model.yml": text})
    ours, theirs = ((tmp_path / name).read_bytes() for name in ("ours.bin", "marian.bin"))
    # What follows an array, up to 256 bytes, is whatever was in Marian's memory.
    assert len(ours) == len(theirs) and ours[:256] == theirs[:256]


def test_marians_binary_shortlist_is_written(tmp_path):
    lists = [np.array(one, np.int32) for one in ([], [], [], [5, 2, 4], [7], [], [], [], [2])]
    marian_binary.write_shortlist(tmp_path / "lex.bin", lists)
    assert (tmp_path / "lex.bin").read_bytes() == unpack(SHORTLIST)


def test_matrices_in_8_bits_are_transposed_and_followed_by_their_factor(tmp_path):
    matrix = np.array([[1.0, -2.0, 0.5], [0.0, 4.0, -4.0]], np.float32)
    arrays = {"a_Wq": matrix, "Wemb": matrix, "a_bq": np.ones((1, 3), np.float32)}
    arrays["special:model.yml"] = np.frombuffer(b"type: x\0", np.int8)
    marian_binary.write_arrays(tmp_path / "model.bin", arrays, ("a_Wq", "Wemb"))
    content = (tmp_path / "model.bin").read_bytes()
    assert struct.unpack("<2Q", content[:16]) == (1, 4)
    headers = [struct.unpack("<4Q", content[start : start + 32]) for start in range(16, 144, 32)]
    # Names with their zero, types, axes, and data up to a multiple of 256 bytes, but for the text.
    assert headers == [(5, 0x4101, 2, 256), (5, 0x4101, 2, 256), (5, 0x404, 2, 256), (18, 0x101, 1, 8)]
    start = len(content) - 3 * 256 - 8
    assert start % 256 == 0
    values = np.frombuffer(content, np.int8, 6, start)
    assert values.tolist() == [32, 0, -64, 127, 16, -127]
    assert np.frombuffer(content, np.float32, 1, start + 6) == np.float32(127 / 4)
    assert np.frombuffer(content, np.int8, 6, start + 256).tolist() == [32, -64, 16, 0, 127, -127]
    stored = marian_binary.read_arrays(tmp_path / "model.bin")
    for name in ("a_Wq", "Wemb"):
        np.testing.assert_allclose(np.asarray(stored[name]), matrix, atol=4 / 254)
    assert np.asarray(stored["special:model.yml"]).tobytes() == b"type: x\0"


def test_a_shortlist_has_rules_and_common_pieces(tmp_path):
    weights = make_student(tmp_path, "ssru, all tied")
    entry = write(weights, tmp_path / "out", "none")
    vocabs = weights.vocabs
    file = tmp_path / "out" / entry["lex"]["name"]
    pieces = weights.vocabs.target.size + -weights.vocabs.target.size % 8
    offsets, ids = read_shortlist(file)
    end = vocabs.source.eos_id
    assert len(offsets) == pieces + 1
    assert ids[offsets[end] : offsets[end + 1]].tolist() == list(range(vocabs.target.size))
    shortlist = Shortlist({(7,): np.array([30, 9]), (8,): np.array([5])}, [11], vocabs)
    FORMAT.write_shortlist(shortlist, tmp_path / "out")
    offsets, ids = read_shortlist(file)
    lists = [ids[start:stop].tolist() for start, stop in zip(offsets, offsets[1:], strict=False)]
    expected = {7: [9, 30], 8: [5], end: sorted({11, vocabs.target.eos_id, vocabs.target.unk_id})}
    expected[pieces - 1] = [vocabs.target.eos_id]
    assert lists == [expected.get(number, []) for number in range(pieces)]
    registry = json.loads((tmp_path / "out" / "registry.json").read_text())
    assert registry["deen"]["lex"]["expectedSha256Hash"] == hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(UserError, match="a rule of the shortlist has 2 subwords, .*prepare --shortlist=FILE"):
        FORMAT.write_shortlist(Shortlist({(7, 8): np.array([5])}, [], vocabs), tmp_path / "out")


def read_shortlist(path: Path) -> tuple[np.ndarray, np.ndarray]:
    content = path.read_bytes()
    magic, _, first, _, offsets, ids = struct.unpack("<6Q", content[:48])
    assert magic == 0xF11A48D5013417F5 and first == 0
    assert len(content) == 48 + 8 * offsets + 4 * ids
    return np.frombuffer(content, np.uint64, offsets, 48), np.frombuffer(
        content, np.uint32, ids, 48 + 8 * offsets
    )


def test_scales_need_sentences(tmp_path):
    weights = make_student(tmp_path, "ssru, all tied")
    data = dataclasses.replace(weights.config.data, dataset="parallel_text", text_dir=str(tmp_path))
    weights = dataclasses.replace(weights, config=dataclasses.replace(weights.config, data=data))
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="--quantization=int8 measures activations .*=int8_dynamic, which"):
        FORMAT.write(weights, tmp_path / "out", "int8")


def test_search_options_are_the_engines(tmp_path):
    weights = make_student(tmp_path, "ssru, all tied")
    entry = write(weights, tmp_path / "out", "none")
    search = weights.config.search
    assert search.method == "beam" and entry["config"]["beam-size"] == search.beam_size
    assert entry["config"]["skip-cost"] is False and entry["config"]["allow-unk"] is True
