"""The format of foreign files is found from them: from config.json, or from names that only one class has."""

import errno
import json
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from documents import aiayn, decoder_only, handbuilt, kokoyi

from flaxformer_mt.commands.main import main
from flaxformer_mt.convert import formats
from flaxformer_mt.convert.formats import NAMES
from flaxformer_mt.convert.import_run import find_format_name
from flaxformer_mt.errors import UserError


class Translation(torch.nn.Module):
    """PyTorch's own Transformer, under the name that a class of torch-nn gives it."""

    def __init__(self):
        super().__init__()
        self.transformer = torch.nn.Transformer(8, 2, 1, 1, 16)


HEADS = {"n_heads": 2, "d_k": 3, "d_v": 5}
ORIGINALS = {
    "aiayn": lambda: aiayn.Transformer(13, 13, 0, 0, d_word_vec=8, d_model=8, d_inner=16, n_layers=2),
    "decoder-only": lambda: decoder_only.TransformerDecoder(
        vocab_size=13, embedding_size=8, window_size=4, hidden=16, n_blocks=2, dropout=0.1, **HEADS
    ),
    "handbuilt": lambda: handbuilt.Transformer(
        11, 13, 8, 7, d_embedding=8, d_ff=16, encoder_n_layers=2, decoder_n_layers=1, **HEADS
    ),
    "kokoyi": lambda: kokoyi.Transformer(L=2, num_heads=2, embed_dim=8, hidden_dim=6, out_dim=13),
    "torch-nn": Translation,
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", ORIGINALS)
def test_the_originals_are_known_by_the_names_of_their_tensors(name, tmp_path):
    torch.save(ORIGINALS[name]().state_dict(), tmp_path / "any.pt")
    (tmp_path / "notes.txt").write_text("x")
    assert find_format_name(tmp_path) == find_format_name(tmp_path / "any.pt") == name


@pytest.mark.parametrize(("kind", "name"), [("MarianConfig", "marian"), ("PegasusConfig", "hf-pre-norm")])
def test_transformers_models_are_known_by_their_type(kind, name, tmp_path):
    transformers = pytest.importorskip("transformers")
    getattr(transformers, kind)().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert find_format_name(tmp_path) == find_format_name(tmp_path / "model.safetensors") == name


def test_an_export_comes_back_without_a_format(tiny_run, tmp_path, capsys):
    run, folder = f"--run={tiny_run}", tmp_path / "exported"
    assert main(["export", run, "--format=torch", f"--output={folder}"]) == 0
    capsys.readouterr()
    assert main(["import", f"--input={folder}", f"--run={tmp_path / 'again'}"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "torch"
    weights = shutil.copy(folder / "model.safetensors", tmp_path)  # without config.json
    assert find_format_name(Path(weights)) == "torch"
    for kind in (["bert"], "bert"):
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
        assert main(["import", f"--input={folder}", f"--run={tmp_path / 'other'}"]) == 2
        error = capsys.readouterr().err
        assert f"do not say their format (its config.json has model_type {kind}; known: marian, peg" in error
    assert error.rstrip().endswith(f"give --format={'|'.join(NAMES)}")
    assert not (tmp_path / "other").exists()


def test_files_that_do_not_say_it_are_asked_about(tmp_path):
    with pytest.raises(UserError, match="does not exist; give the folder of the model as --input=PATH"):
        find_format_name(tmp_path / "absent")
    with pytest.raises(UserError, match=r"its files have no tensors .*--format=torch\|"):
        find_format_name(tmp_path)
    (tmp_path / "README.md").write_text("no model")
    with pytest.raises(UserError, match=r"its files have no tensors .*--format=torch\|"):
        find_format_name(tmp_path / "README.md")
    torch.save({"weight": torch.zeros(2)}, tmp_path / "a.pt")
    with pytest.raises(UserError, match="no format is known that has its tensors"):
        find_format_name(tmp_path)
    # Of two models in a folder, none is chosen.
    for name in ("aiayn", "handbuilt"):
        torch.save(ORIGINALS[name]().state_dict(), tmp_path / f"{name}.pt")
    with pytest.raises(UserError, match=r"the tensors are those of handbuilt and aiayn"):
        find_format_name(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="b.safetensors cannot be read as safetensors"):
        find_format_name(tmp_path / "b.safetensors")
    (tmp_path / "model.chkpt").touch()
    assert find_format_name(tmp_path / "model.chkpt") == "aiayn"


def test_a_config_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(formats, "read_json_object", refuse)
    with pytest.raises(PermissionError):
        find_format_name(tmp_path)
