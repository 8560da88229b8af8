"""The public API: the examples of docs/api.md run as one program, and importing the package is light."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import flaxformer_mt
from flaxformer_mt.corpus.toy import toy_de_en

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


TINY = {
    "data.train_split": "train[:600]",
    "data.valid_split": "valid[:6]",
    "data.test_split": "test[:6]",
    "data.num_shapes": 1,
    "vocab.size": 500,
    "vocab.byte_fallback": False,
    "model.num_encoder_layers": 1,
    "model.num_decoder_layers": 1,
    "model.model_dim": 16,
    "model.num_heads": 2,
    "model.ffn_dim": 16,
    "optim.warmup_steps": 2,
    "train.steps": 8,
    "train.evaluate_every": 4,
    "train.checkpoint_every": 4,
    "search.beam_size": 2,
    "search.max_length_ratio": 1.0,
    "search.max_length_offset": 8,
}


def test_every_public_name_has_an_example_and_loads():
    examples = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M))
    for name in flaxformer_mt.__all__:
        assert len(re.findall(rf"\b{name}\b", examples)) >= 2, f"{name} is imported, but no example uses it"
        assert getattr(flaxformer_mt, name) is not None
        assert name in dir(flaxformer_mt)
    with pytest.raises(AttributeError, match="has no attribute 'Translater'"):
        getattr(flaxformer_mt, "Translater")  # noqa: B009


@pytest.mark.slow  # .ci/docs runs the page, too, and each function that it calls has tests of its own
def test_the_examples_run(tmp_path, monkeypatch, capfd):
    """In an empty folder: they print what they say, on standard output, and the library prints nothing."""
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    device = jax.devices()[0]
    monkeypatch.setattr(jax, "devices", lambda *options, **more: [device])  # so that programs are few
    monkeypatch.setattr(jax, "device_count", lambda *options: 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLAXFORMER_MT_CACHE", str(tmp_path / "cache"))
    printed = 0
    names: dict = {}
    load = flaxformer_mt.load_config
    monkeypatch.setattr(flaxformer_mt, "load_config", lambda name: load(name).replace(TINY))
    monkeypatch.setattr(toy_de_en, "SIZES", {"train": 1000, "valid": 10, "test": 10})
    for example in re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M):
        capfd.readouterr()
        exec(compile(example, "docs/api.md", "exec"), names)
        out, err = capfd.readouterr()
        printed += "print(" in example and bool(out)
        assert not err
        assert bool(out) <= ("print(" in example), f"printed by the library: {out}"
    assert printed >= 6
    assert (tmp_path / "runs" / "from_api" / "config.json").is_file()


# What only training, tracing, other commands, and checkpoints in unusual layouts need.
_NOT_TO_TRANSLATE = {
    *("flax", "beartype", "optax", "orbax", "tensorflow_datasets", "sacrebleu", "tensorboardX"),
    *("matplotlib", "torch", "rich"),
}


def test_a_second_process_traces_nothing_and_imports_little(tiny_run):
    """The API finds the program that the command has compiled; without Flax it could not trace another."""
    command = [sys.executable, "-m", "flaxformer_mt", "translate", f"--run={tiny_run}"]
    first = subprocess.run(command, input="a b", cwd=ROOT, capture_output=True, text=True, check=True)
    code = (
        "import sys; from flaxformer_mt import Translator; "
        f"print(Translator.load({str(tiny_run)!r})(['a b'])[0].text); "
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    second = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    text, modules = second.stdout.splitlines()
    assert text == first.stdout.rstrip("\n")
    assert not _NOT_TO_TRANSLATE & set(modules.split())
