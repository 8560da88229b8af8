"""What docs/export.md shows runs as it is written: every command, every line of Python, in order."""

import dataclasses
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("ctranslate2")

from flaxformer_mt.commands.main import main
from flaxformer_mt.config import Config, DataConfig, ModelConfig, TrainConfig, VocabConfig
from flaxformer_mt.config.files import save_config
from flaxformer_mt.convert.export_run import export_run
from flaxformer_mt.convert.format_registry import NAMES
from flaxformer_mt.model import init_params, make_model
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.vocab import make_vocabs

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")

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


class Pair:
    def __init__(self, source, target):
        self.source, self.target = source, target


def write_text(folder: Path) -> None:
    folder.mkdir()
    for split in ("train", "valid", "test"):
        for side, language in enumerate(("de", "en")):
            text = "".join(f"{pair[side]}\n" for pair in TEXT * 2)
            (folder / f"{split}.{language}").write_text(text, encoding="utf-8")


def make_run(folder: Path, root: Path, **model: object) -> Config:
    """A run directory with random parameters."""
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
    folder.mkdir(parents=True)
    save_config(config, folder / "config.json")
    vocabs = make_vocabs(config.vocab, [Pair(*text) for text in TEXT * 3], folder / "vocab")
    network = make_model(config.model, source_size=vocabs.source.size, target_size=vocabs.target.size)
    checkpoints = Checkpoints(folder)
    params = init_params(network, jax.random.key(0))
    checkpoints.save(1, {"params": params}, {"step": 1, "metrics": {"bleu": 1.0}})
    checkpoints.wait()
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
    return tmp_path


def run_line(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line of a shell block, in this process if it is a command of ours: starting Python is slow."""
    piped = re.fullmatch(r'echo "(.*)" \| (.*)', line)
    command = piped[2] if piped else line
    if piped:
        text = (piped[1] + "\n").encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))
    if command.startswith("python -m flaxformer_mt "):
        arguments = shlex.split(command.removeprefix("python -m flaxformer_mt "))
        # What would take minutes takes two updates.
        arguments = [re.sub(r"^(--config\.train\.steps)=\d+$", r"\1=2", word) for word in arguments]
        assert main(arguments) == 0, line
        return
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(line, shell=True, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1


def test_every_snippet_runs(place, monkeypatch, capsysbinary):
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```", PAGE, re.S | re.M)
    assert len(blocks) == 12
    monkeypatch.setattr(sys, "path", list(sys.path))
    for kind, text in blocks:
        if kind == "python":
            exec(compile(text, "docs/export.md", "exec"), {})
            continue
        for line in text.rstrip("\n").split("\n"):
            run_line(line, monkeypatch)
    assert {path.name for path in (place / "exported").iterdir()} == {
        "torch",
        "ct2",
        "ct2_int8",
        "pegasus",
        "nn",
        "handbuilt",
    }
    for name in ("handbuilt_again", "theirs", "opus"):
        assert (place / "runs" / name / "config.json").is_file()
    assert json.loads((place / "runs" / "opus" / "report.json").read_text())["step"] == 2


def test_every_format_has_its_row():
    rows = re.findall(r"^\| `([\w-]+)` \|", PAGE, re.M)
    assert sorted(rows) == sorted(NAMES)


def test_quantizing_is_told_apart(place):
    result = export_run(
        place / "runs" / "toy_de_en",
        format_name="ctranslate2",
        output=place / "out",
        quantization="int8",
        warn=pytest.fail,
    )
    assert result["largest_difference"] < 1e-4 < result["quantized_difference"] < 1
    assert np.isfinite(result["quantized_difference"])
