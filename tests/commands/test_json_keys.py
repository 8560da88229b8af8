"""The keys of the JSON that each command writes are an interface: those of 28 November 2026 are there."""

import json
import re
import shutil
from pathlib import Path

import pytest

from flaxformer_mt.commands.main import main

LISTED = (Path(__file__).parent / "json_keys_of_9d0436d.txt").read_text(encoding="utf-8")
KEYS = {name: keys.split() for name, keys in re.findall(r"^(\w+): ((?:.|\n )+)", LISTED, re.M)}
# The keys in them are names of packages, of extras and of modules.
NAMED = re.compile(r"^(packages|extras|parameters\.modules)\.[^.]+")


def list_keys(value, name=""):
    """{"a": {"b": [{"c": 1}]}} has a, a.b and a.b[].c."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        path = NAMED.sub(r"\1.*", f"{name}.{key}".lstrip("."))
        yield path
        yield from list_keys(inner, path)
    for item in value if isinstance(value, list) else ():
        yield from list_keys(item, f"{name}[]")


@pytest.fixture(scope="module")
def folder(tiny_run, two_way_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    shutil.copytree(tiny_run, folder / "run")
    shutil.copytree(two_way_run, folder / "two_way")
    return folder


@pytest.mark.parametrize(
    ("name", "lines"),
    {
        "train": ["--run=run"],
        "show": ["--run=run"],
        "prepare": ["--run=run"],
        "align": ["--run=run --output=align"],
        "evaluate": ["run {files} --against={target},run@last --bootstrap=2", "two_way --bootstrap=0"],
        "translate": ["run {source} --json --n_best=2 --alignments"],
        "score": ["run --source={source} --target={target} --json"],
        "backtranslate": ["run --input={source} --output=back"],
        "distil": ["run --input={source} --output=distil"],
        "average": ["run --last=2"],
        "export": ["run --format=torch --output=torch"],
        "import": ["torch --format=torch --run=imported"],
        "plot": ["run --source=gu --output=plots"],
        "report": ["run --output=report.html"],
        "doctor": ["run"],
    }.items(),
)
def test_no_key_is_lost(name, lines, folder, tiny_text, monkeypatch, capsysbinary):
    monkeypatch.chdir(folder)
    if name in ("export", "import"):
        pytest.importorskip("torch")
    source, target = tiny_text / "test.xx", tiny_text / "test.yy"
    found = set()
    for line in lines:
        words = line.format(source=source, target=target, files=f"--source={source} --reference={target}")
        assert main([name, *words.split()]) == 0, capsysbinary.readouterr().err.decode()
        text = capsysbinary.readouterr().out.decode().strip()
        for result in text.split("\n") if "--json" in line else [text]:
            found |= set(list_keys(json.loads(result)))
    assert set(KEYS[name]) - found == set()
