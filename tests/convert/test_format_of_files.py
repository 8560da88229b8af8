"""The format of foreign files is found from them; a list of words is a vocabulary by line numbers."""

import errno
import json
import shutil
from pathlib import Path

import pytest

from benchmarks.originals import aiayn, decoder_only, handbuilt, kokoyi
from flaxformer_mt.commands.main import main
from flaxformer_mt.convert import formats
from flaxformer_mt.convert.formats import NAMES
from flaxformer_mt.convert.import_run import find_format_name, read_user_vocabs
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import load_vocabs

torch = pytest.importorskip("torch")


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


WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", ".", "der", "Hund", "New York", "ﬁn", "weiß"]


def write(path, words):
    path.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    return path


def test_ids_are_line_numbers(tmp_path):
    vocabs = read_user_vocabs(write(tmp_path / "words.txt", WORDS))
    vocab = vocabs.source
    assert vocabs.joint and vocab.size == len(WORDS)
    assert (vocab.pad_id, vocab.bos_id, vocab.eos_id, vocab.unk_id) == (0, 1, 2, 3)
    # Words are what spaces separate, as they are written; others are unknown, and so are symbols in a text.
    # SentencePiece gives adjacent unknown words one id.
    assert vocab.tokenize("der Hund weiß .") == [5, 6, 9, 4, 2]
    assert vocab.tokenize("  ﬁn  fin . <eos> . der. Hund New York") == [8, 3, 4, 3, 4, 3, 6, 3, 2]
    assert vocab.detokenize([1, 5, 7, 4, 2, 6]) == "der New York ."


def test_symbols_may_have_other_places_and_spellings(tmp_path):
    words = ["</s>", "eins", "<unk>", "<blank>", "zwei", "<s>"]
    vocab = read_user_vocabs(write(tmp_path / "words.txt", words)).target
    assert (vocab.pad_id, vocab.bos_id, vocab.eos_id, vocab.unk_id) == (3, 5, 0, 2)
    assert vocab.tokenize("zwei eins") == [4, 1, 0]


def test_each_language_may_have_its_list(tmp_path):
    write(tmp_path / "source.txt", WORDS)
    write(tmp_path / "target.txt", [*WORDS[:4], "the", "dog"])
    vocabs = read_user_vocabs(tmp_path)
    assert not vocabs.joint and (vocabs.source.size, vocabs.target.size) == (10, 6)
    vocabs.save(tmp_path / "run")
    again = load_vocabs(tmp_path / "run")
    assert (again.source.fingerprint, again.target.fingerprint) == (
        vocabs.source.fingerprint,
        vocabs.target.fingerprint,
    )
    assert read_user_vocabs(tmp_path / "run").target.size == 6
    assert read_user_vocabs(tmp_path / "run" / "source.model").target.size == 10
    write(tmp_path / "joint.txt", WORDS)
    assert read_user_vocabs(tmp_path).joint


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*WORDS, "der"], "lines 6 and 11 of .* are both 'der'"),
        ([*WORDS, "", "x"], "line 11 of .* is empty"),
        ([*WORDS, "\u2581x"], "line 11 of .* contains '\u2581'"),
        (WORDS[2:], r"lacks pad \(<pad>, .*\) and bos \(<bos>, .*\); each special symbol needs a line"),
    ],
)
def test_lists_that_are_no_vocabulary_are_refused(tmp_path, words, message):
    with pytest.raises(UserError, match=message):
        read_user_vocabs(write(tmp_path / "words.txt", words))


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "words.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not a list of words that can be read"):
        read_user_vocabs(tmp_path / "words.txt")
