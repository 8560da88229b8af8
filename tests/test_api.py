"""The public API: the examples of docs/api.md run as one program, and importing the package is light."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import flaxformer_mt

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_public_name_has_an_example_and_loads():
    examples = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M))
    for name in flaxformer_mt.__all__:
        assert len(re.findall(rf"\b{name}\b", examples)) >= 2, f"{name} is imported, but no example uses it"
        assert getattr(flaxformer_mt, name) is not None
        assert name in dir(flaxformer_mt)
    with pytest.raises(AttributeError, match="has no attribute 'Translater'"):
        getattr(flaxformer_mt, "Translater")  # noqa: B009


def test_the_examples_run(tiny_text, tmp_path, monkeypatch, capfd):
    """Nothing but what the examples themselves print comes out, on either stream."""
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    text = tmp_path / "my_data"
    text.mkdir()
    for file in tiny_text.iterdir():
        language = {"xx": "de", "yy": "en"}[file.suffix.removeprefix(".")]
        (text / f"{file.stem}.{language}").write_bytes(file.read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLAXFORMER_MT_CACHE", str(tmp_path / "cache"))
    printed = 0
    names: dict = {}
    for example in re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M):
        capfd.readouterr()
        exec(compile(example, "docs/api.md", "exec"), names)
        out, err = capfd.readouterr()
        printed += "print(" in example and bool(out)
        assert not err
        assert bool(out) <= ("print(" in example), f"printed by the library: {out}"
    assert printed >= 6
    assert (tmp_path / "runs" / "imported" / "config.json").is_file()


def test_importing_is_light():
    code = "import sys, flaxformer_mt; print(len(sys.modules), *{'jax', 'numpy', 'flax'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    modules, *heavy = out.stdout.split()
    assert not heavy
    assert int(modules) < 150
