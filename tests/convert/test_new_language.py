"""A pretrained model gets a language: rows, ids and files, in this package, transformers and CTranslate2."""

import dataclasses
import json
import random
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from make_translator import make_translator
from test_finetuning import make_config, write_text
from tiny_experiment import mark_slow

from benchmarks.originals.tiny_hub import CORPUS, MAKERS
from flaxformer_mt import fit
from flaxformer_mt.commands.main import main
from flaxformer_mt.config import SearchConfig
from flaxformer_mt.config.directions import choose_tags, choose_target_tag, find_directions
from flaxformer_mt.convert.export_run import export_run, load_weights
from flaxformer_mt.convert.formats import ImportOverrides, Weights, find_format
from flaxformer_mt.convert.huggingface.new_languages import NewVocabulary
from flaxformer_mt.convert.import_run import import_run
from flaxformer_mt.convert.parity_check import flax_outputs, make_batch
from flaxformer_mt.errors import UserError
from flaxformer_mt.training.initial_model import start_run
from flaxformer_mt.vocab.new_pieces import learn_pieces
from flaxformer_mt.vocab.tokenizer_json import TokenizerJson

# Family -> --languages and --new_language.
LANGUAGES = {
    "nllb": (["de", "en", "tyv_Cyrl"], "tyv_Cyrl:kaz_Cyrl"),
    "m2m_100": (["de", "en", "tyv"], "tyv:kk"),
    "mbart_50": (["de", "en", "tyv_XX"], "tyv_XX:kk_KZ"),
    "madlad": (["de", "en", "tyv"], "tyv:fr"),
    "mt5": (["de", "tyv"], "tyv"),
}
FAMILIES = mark_slow(LANGUAGES, "mbart_50", "mt5")
WORDS = "чүве кижи ыраажы бажың өөреникчи аныяк сөглээн көрүп турган чурт derlemek Hundun gartenda".split()
# A range of letters of each of 12 scripts.
SCRIPTS = ("az", "αω", "ая", "աֆ", "את", "ءي", "अह", "কহ", "กฮ", "აჰ", "가힣", "一龥")


def write_corpus(path: Path, words: list[str] = WORDS, lines: int = 300) -> Path:
    draw = random.Random(0)
    text = (" ".join(draw.choices(words, k=draw.randint(1, 6))) for _ in range(lines))
    path.write_text("".join(f"{line} .\n" for line in text), encoding="utf-8")
    return path


def make_lines(number: int = 1000) -> list[str]:
    """Lines of 12 scripts, of the new and the old languages, with tags, emoji and rare characters."""
    draw, lines = random.Random(1), []
    extra = [
        "<b>",
        "</i>",
        "eng_Latn",
        "__de__",
        ">>fr<<",
        "\U0001f600",
        "\u2603",
        "\ufb01",
        "\u0138",
        "\u200b",
        "  ",
    ]
    old = " ".join(CORPUS).split()
    for _ in range(number):
        first, last = map(ord, draw.choice(SCRIPTS))
        script = [
            "".join(chr(draw.randint(first, last)) for _ in range(draw.randint(1, 7))) for _ in range(3)
        ]
        lines.append(" ".join(draw.sample([*script, *draw.choices(WORDS, k=2), *draw.choices(old, k=2)], 5)))
        if draw.random() < 0.3:
            lines[-1] += " " + draw.choice(extra) + draw.choice(script)
    return lines


LINES = make_lines()


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    """A family, the model as transformers writes it, the run with the new language, and what was said."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    MAKERS[name](folder / "hub")
    languages, new = LANGUAGES[name]
    request = NewVocabulary([write_corpus(folder / "corpus.tyv")], [new])
    said = import_run(folder / "hub", run_dir=folder / "run", languages=languages, new_vocabulary=request)
    return name, folder, find_format("hf").read(folder / "hub", ImportOverrides()), said


def expand(new: Weights, old: Weights, ids: list[int]) -> list[str]:
    """Return the original pieces that ids stand for, and nothing for unknown characters."""
    names = "".join(new.vocabs.target.pieces([one for one in ids if one != new.vocabs.target.unk_id]))
    return names


def test_old_languages_keep_their_logits_and_new_rows_are_means(model):
    name, folder, old, said = model
    new = load_weights(folder / "run")
    pieces = old.vocabs.target.pieces(range(old.vocabs.target.size))
    numbers = {
        piece: number for number, piece in enumerate(new.vocabs.target.pieces(range(new.vocabs.target.size)))
    }
    kept = [number for number, piece in enumerate(pieces) if piece in numbers]
    assert [numbers[pieces[number]] for number in kept] == list(range(len(kept)))
    assert said["pieces_added"] == new.vocabs.target.size - len(kept) > 40
    before, after = said["pieces_per_word"][str(folder / "corpus.tyv")]
    assert after < before / 2
    lines = [*CORPUS, "das Hinterdorf im Licht"]
    for line in lines:
        assert new.vocabs.target.tokenize(line) == old.vocabs.target.tokenize(line)
    ids = [old.vocabs.target.tokenize(line) for line in lines]
    logits = [
        flax_outputs(
            weights, make_batch(ids, ids[::-1], weights.vocabs, config=weights.config), quantity="logits"
        )
        for weights in (old, new)
    ]
    np.testing.assert_array_equal(logits[1][..., : len(kept)], logits[0][..., kept])
    path = next(path for path in old.leaves if path.endswith("_embedding/embedding"))
    model = TokenizerJson(new.vocabs.target.files["tokenizer.json"])
    long = next(piece for piece in numbers if piece.endswith("artenda"))
    parts = [number for number in old.vocabs.target.tokenize("gartenda")[:-1] if pieces[number] != "▁"]
    assert model.names[numbers[long]] == long
    if long == "▁gartenda":
        expected = old.leaves[path][old.vocabs.target.tokenize("gartenda")[:-1]].mean(axis=0)
        np.testing.assert_allclose(new.leaves[path][numbers[long]], expected, rtol=1e-6)
    assert parts
    if name != "mt5":
        relative, tag = (spelled[name] for spelled in (RELATIVES, TAGS))
        rows = new.leaves[path]
        np.testing.assert_array_equal(
            rows[new.vocabs.target.tags[tag]], old.leaves[path][old.vocabs.target.tags[relative]]
        )


RELATIVES = {"nllb": "kaz_Cyrl", "m2m_100": "__kk__", "mbart_50": "kk_KZ", "madlad": "<2fr>"}
TAGS = {"nllb": "tyv_Cyrl", "m2m_100": "__tyv__", "mbart_50": "tyv_XX", "madlad": "<2tyv>", "mt5": ">>tyv<<"}


def test_transformers_gives_the_same_ids_after_save_and_load(model, tmp_path):
    name, folder, _, _ = model
    said = export_run(folder / "run", format_name="hf", output=tmp_path / "out")
    assert said["differing_lines"] == 0 and said["lines"] > 900 and said["largest_difference"] < 1e-4
    vocab = load_weights(folder / "run").vocabs.target
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    tokenizer.save_pretrained(tmp_path / "again")
    for tokenizer in (tokenizer, transformers.AutoTokenizer.from_pretrained(tmp_path / "again")):
        lead, tag = "", TAGS[name]
        if vocab.metadata.target_tags:
            tokenizer.src_lang, lead = tag, f"{tag} "
        lines = LINES if lead else [f"{tag} {line}" for line in LINES]
        ours = vocab.tokenize_all([lead + line for line in lines])
        assert list(map(list, ours)) == tokenizer(lines)["input_ids"]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "tokenizer.json" in names and names.isdisjoint({"vocab.json", "spiece.model"})
