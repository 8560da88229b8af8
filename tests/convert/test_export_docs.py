"""What docs/export.md and docs/research-formats.md show runs as it is written, in order."""

import dataclasses
import io
import json
import pickle
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
ctranslate2 = pytest.importorskip("ctranslate2")

from tiny_experiment import write_untrained_run

from flaxformer_mt.commands.main import main
from flaxformer_mt.config import Config, DataConfig, ModelConfig, TrainConfig, VocabConfig
from flaxformer_mt.convert.export_run import export_run
from flaxformer_mt.convert.formats import NAMES
from flaxformer_mt.corpus.pairs import Pair
from flaxformer_mt.vocab import load_vocabs

ROOT = Path(__file__).resolve().parents[2]
PAGE = "".join((ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in ("export", "research-formats"))

TEXT = [
    ("Der Mann liest ein Buch.", "The man is reading a book."),
    ("Die Frau trinkt Milch.", "The woman drinks milk."),
    ("Der Hund schläft.", "The dog sleeps."),
    ("Wir lesen.", "We read."),
]
HANDBUILT = {
    "norm_position": "post",
    "first_position": 1,
    "embedding_scale": False,
    "tying": "none",
    "padding_mask": "both",
}
TINY = ModelConfig(num_encoder_layers=1, num_decoder_layers=1, model_dim=8, num_heads=2, ffn_dim=12)


def write_text(folder: Path) -> None:
    folder.mkdir()
    for split in ("train", "valid"):
        for side, language in enumerate(("de", "en")):
            text = "".join(f"{pair[side]}\n" for pair in TEXT * 2)
            (folder / f"{split}.{language}").write_text(text, encoding="utf-8")


def make_run(folder: Path, root: Path, **model: object) -> Config:
    config = Config(
        data=DataConfig(
            dataset="parallel_text",
            text_dir=str(root / "my_data"),
            cache_dir=str(root / "cache"),
            max_source_length=40,
            max_target_length=40,
        ),
        vocab=VocabConfig(size=320),
        model=dataclasses.replace(TINY, **model),
        train=TrainConfig(tensorboard=False),
    )
    write_untrained_run(folder, config, [Pair(*text) for text in TEXT * 3], step=1)
    return config


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with the runs and the files that the page speaks of."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "my_data")
    make_run(tmp_path / "runs" / "toy_de_en", tmp_path)
    make_run(tmp_path / "runs" / "handbuilt", tmp_path, **HANDBUILT)
    (tmp_path / "my_config.py").write_text(
        "from pathlib import Path\nfrom flaxformer_mt.config.files import read_config\n"
        "def get_config():\n    return read_config(Path('runs/handbuilt/config.json'))\n"
    )
    # A folder as the OPUS-MT project publishes them: nothing in it is ours.
    make_run(tmp_path / "post", tmp_path, norm_position="post")
    export_run(tmp_path / "post", format_name="marian", output=tmp_path / "opus-mt-de-en", warn=pytest.fail)
    facts = json.loads((tmp_path / "opus-mt-de-en" / "config.json").read_text(encoding="utf-8"))
    del facts["flaxformer_mt"]
    (tmp_path / "opus-mt-de-en" / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    shutil.copytree(tmp_path / "runs" / "toy_de_en" / "vocab", tmp_path / "exported" / "aiayn" / "vocab")
    (tmp_path / "test.de").write_text("".join(f"{source}\n" for source, _ in TEXT), encoding="utf-8")
    return tmp_path


# Translations of random models end at the limit: at this one, the first search finds all.
SHORT = ["--max_length_ratio=1.0", "--max_length_offset=4"]
# What would take minutes takes two updates, of one shape, on one device.
FEW_UPDATES = [
    "--config.train.steps=2",
    "--config.data.num_shapes=1",
    "--config.parallel.devices=1",
    *(flag.replace("--", "--config.search.") for flag in SHORT),
]


def run_line(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run one line of a shell block in this process: starting Python is slow."""
    piped = re.fullmatch(r'echo "(.*)" \| (.*)', line)
    command = piped[2] if piped else line
    with monkeypatch.context() as patch:
        if piped:
            text = (piped[1] + "\n").encode()
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))
        if command.startswith("python -m flaxformer_mt "):
            arguments = shlex.split(command.removeprefix("python -m flaxformer_mt "))
            if arguments[0] == "train":
                arguments = [word for word in arguments if not word.startswith("--config.train.steps=")]
                arguments += FEW_UPDATES
            if arguments[0] == "translate":
                arguments += SHORT
            if "--quantization=int8" in arguments:
                # Products of int8 are exact on some processors only: see test_ctranslate2.py.
                make = ctranslate2.Translator
                patch.setattr(
                    ctranslate2,
                    "Translator",
                    lambda folder, **options: make(folder, **options | {"compute_type": "float32"}),
                )
            assert main(arguments) == 0, line
            return
        if command.startswith("python recipes/"):
            _, script, *arguments = shlex.split(command)
            script = str(ROOT / script)
        else:
            folder, script = re.fullmatch(r"\(cd (\S+) && python (\S+)\)", command).groups()
            patch.chdir(folder)
            arguments = []
        patch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(script, run_name="__main__")


@pytest.mark.slow  # .ci/docs runs the page, too; each format has its tests
def test_every_snippet_runs(place, monkeypatch, capsysbinary):
    blocks = re.findall(r"^```(sh|python)\n(?!# Needs data of others)(.*?)^```", PAGE, re.S | re.M)
    assert len(blocks) == 8
    monkeypatch.setattr(sys, "path", list(sys.path))
    printed = {}
    for kind, text in blocks:
        if kind == "python":
            exec(compile(text, "docs/export.md", "exec"), {})
            continue
        for line in re.sub(r"\\\n +", "", text).rstrip("\n").split("\n"):
            capsysbinary.readouterr()
            run_line(line, monkeypatch)
            printed[line] = capsysbinary.readouterr()
            assert b"warning:" not in printed[line].err, line
    assert {path.name for path in (place / "exported").iterdir()} == {
        "torch",
        "ct2",
        "ct2_int8",
        "pegasus",
        "nn",
        "handbuilt",
        "aiayn",
    }
    data = pickle.loads((place / "data.pkl").read_bytes())  # noqa: S301
    numbers = [data["vocab"]["src"].vocab.stoi[piece] for piece in data["test"][0].src]
    assert numbers == load_vocabs(place / "runs" / "toy_de_en" / "vocab").source.tokenize(TEXT[0][0])
    for name in ("handbuilt_again", "theirs", "opus"):
        assert (place / "runs" / name / "config.json").is_file()
    assert json.loads((place / "runs" / "opus" / "report.json").read_text())["step"] == 2
    (translated,) = (output.out for line, output in printed.items() if line.endswith("python modeling.py)"))
    assert translated.count(b"\n") == 1
    (quantized,) = (json.loads(output.out) for line, output in printed.items() if "--quantization" in line)
    assert quantized["largest_difference"] < 1e-4 < quantized["quantized_difference"] < 1
    assert np.isfinite(quantized["quantized_difference"])


def test_every_format_has_its_row():
    table = PAGE[: PAGE.index("\n\nInstall ")]
    rows = re.findall(r"^\| (`.*?`) \|", table, re.M)
    assert sorted(name for row in rows for name in re.findall(r"`([\w-]+)`", row)) == sorted(NAMES)
