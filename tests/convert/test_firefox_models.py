"""Models in the files that Firefox ships: they come in, learn a domain, and go back."""

import dataclasses
import json
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import sentencepiece
import yaml
from test_finetuning import make_config, write_text

from benchmarks.originals.tiny_toolkits import marian_options, write_marian
from flaxformer_mt import Translator, fit
from flaxformer_mt.commands.main import main
from flaxformer_mt.config import LoraConfig
from flaxformer_mt.convert.export_run import export_run, load_weights
from flaxformer_mt.convert.formats import ImportOverrides, find_format
from flaxformer_mt.convert.import_run import import_run
from flaxformer_mt.convert.toolkits import marian_binary
from flaxformer_mt.runs.load_run import load_trained
from flaxformer_mt.training.initial_model import start_run
from flaxformer_mt.vocab.model_file import read_pieces

# By the number of vocabularies: how matrices are tied, and what is trained.
CASES = {
    "vocab": ("tied_embeddings_all", {}),
    "srcvocab, trgvocab": ("tied_embeddings", {"lora": LoraConfig(8)}),
}
OPTIONS = {"transformer_decoder_autoreg": "rnn", "dec_cell": "ssru", "transformer_ffn_activation": "relu"}
SIZES = {"dim_emb": 64, "transformer_dim_ffn": 128}
SEARCH = {"beam-size": 1, "normalize": 1.0, "word-penalty": 0, "gemm-precision": "int8shiftAlphaAll"}


def write_as_firefox(root: Path, kinds: list[str], tying: str) -> Path:
    """A random student in 8 bits, with Marian's ids of pieces, under the names of Mozilla's files."""
    write_marian(root / "marian", marian_options(**OPTIONS, **SIZES, **{tying: True}))
    weights = find_format("marian-npz").read(root / "marian", ImportOverrides())
    data = make_config(root).data  # sentences to measure activations
    weights = dataclasses.replace(weights, config=dataclasses.replace(weights.config, data=data))
    written, folder = root / "written", root / "firefox"
    written.mkdir()
    folder.mkdir()
    find_format("bergamot").write(weights, written, "int8")
    model, vocabs = "model.deen.intgemm.alphas.bin", [f"{kind}.deen.spm" for kind in kinds]
    for name in (model, *vocabs):
        shutil.copy(written / name, folder)
    shutil.copy(written / "lex.deen.s2t.bin", folder / "lex.50.50.deen.s2t.bin")
    listed = {"relative-paths": True, "models": [model], "vocabs": [vocabs[0], vocabs[-1]]}
    listed |= {"shortlist": ["lex.50.50.deen.s2t.bin", False]} | SEARCH
    (folder / "config.yml").write_text(yaml.safe_dump(listed))
    return folder


def read_arrays(folder: Path) -> tuple[dict[str, np.ndarray], dict]:
    arrays = marian_binary.read_arrays(folder / "model.deen.intgemm.alphas.bin")
    options = yaml.safe_load(arrays.pop("special:model.yml").tobytes().rstrip(b"\0"))
    return arrays, {name: value for name, value in options.items() if "dropout" not in name}


@pytest.mark.parametrize("case", CASES)
def test_a_model_of_firefox_learns_a_domain_and_goes_back(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kinds, (tying, optim) = case.split(", "), CASES[case]
    write_text(tmp_path / "text")
    firefox = write_as_firefox(tmp_path, kinds, tying)
    found = import_run(firefox, run_dir="base")
    assert found["format"] == "bergamot" and found["largest_difference"] < 1e-4
    base = load_trained(Path("base")).config
    assert (base.data.source_language, base.data.target_language) == ("de", "en")
    assert base.search.method == "greedy" and base.model.decoder_self_attention == "ssru"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = dataclasses.replace(make_config(tmp_path, **optim), search=base.search)
        fit(start_run(config, tmp_path / "tuned", "base"), tmp_path / "tuned")
    assert main(["prepare", "--run=tuned", "--shortlist=shortlist.txt"]) == 0
    options = {"quantization": "int8", "shortlist": "shortlist.txt", "checkpoint": "last"}
    written = export_run("tuned", format_name="bergamot", output="out", **options)
    assert written["largest_difference"] < 1e-4
    # The same files, network, arrays and vocabularies; the values are others.
    names = {file.name.replace("lex.50.50.", "lex.") for file in firefox.iterdir()} - {"config.yml"}
    assert names <= {*written["files"]}
    (theirs, network), (ours, our_network) = read_arrays(firefox), read_arrays(tmp_path / "out")
    assert network == our_network and theirs.keys() == ours.keys()
    assert {name: array.shape for name, array in theirs.items()} == {
        name: array.shape for name, array in ours.items()
    }
    moved = [np.abs(ours[name] - theirs[name]).max() for name in theirs if name.endswith("_W1")]
    assert 1e-3 < min(moved) and max(moved) < 1
    for kind in kinds:
        file = f"{kind}.deen.spm"
        assert read_pieces(Path("out", file).read_bytes()) == read_pieces((firefox / file).read_bytes())
        processors = [
            sentencepiece.SentencePieceProcessor(model_file=str(folder / file))
            for folder in (Path("out"), firefox)
        ]
        assert len({tuple(one.encode("die Katze schläft, 漢")) for one in processors}) == 1
    registry = json.loads(Path("out/registry.json").read_text())["deen"]
    assert registry["config"]["beam-size"] == 1 and registry["config"]["skip-cost"]
    assert written["bytes"] == sum(file.stat().st_size for file in Path("out").iterdir() if file.is_file())
    # What Mozilla's tools would read comes in again, rounded to 8 bits.
    for name in ("config.json", "registry.json"):
        Path("out", name).unlink()
    import_run("out", run_dir="again")
    tuned, again = load_weights(Path("tuned"), checkpoint="last"), load_weights(Path("again"))
    for path, leaf in tuned.leaves.items():
        # Padding, at the end, is in none of the files.
        rows = slice(-1 if re.search("embedding/embedding|output_bias", path) else None)
        close = {"rtol": 0, "atol": np.abs(leaf).max() / 250, "err_msg": path}
        np.testing.assert_allclose(again.leaves[path][rows], leaf[rows], **close)
    lines = ["der Hund", "die Katze und der Hund"]
    assert all(one.text for one in Translator.load("tuned", checkpoint="last").translate(lines))
