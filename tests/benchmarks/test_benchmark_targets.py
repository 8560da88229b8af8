"""The table of recipes times targets: finished cells are kept, errors stand in the table."""

import importlib.util
import json
from pathlib import Path

import pytest

from flaxformer_mt.commands.targets.target_names import parse_target
from flaxformer_mt.config.find_config import find_config

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "targets.py"
FOUND = {
    "layout": "pmap over 4 devices",
    "batch": {"rows": 192, "source_length": 128, "target_length": 128},
    "fits": False,
    "peak_gib": 20.5,
    "memory_gib": 15.75,
    "attention": {"kernel": "plain", "reason": "", "calls": {}},
    "collectives": {
        "all-reduce": {"count": 1, "bytes": 2**30, "sent": 2**29},
        "all-gather": {"count": 2, "bytes": 2**30, "sent": 2**28},
    },
    "estimate": {"milliseconds": 143.6, "mfu": 0.341},
}


@pytest.fixture(scope="module")
def targets():
    spec = importlib.util.spec_from_file_location("benchmark_targets", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_recipes_and_targets_exist(targets):
    assert all(find_config(recipe) for recipe in targets.RECIPES)
    assert all(parse_target(target).name == target for target in targets.TARGETS)


def test_finished_cells_are_not_measured_again(targets, monkeypatch, tmp_path):
    asked = []

    def measure(recipe, target, flags):
        asked.append((recipe, target))
        return {"recipe": recipe, "target": target, "flags": list(flags), "found": FOUND}

    monkeypatch.setattr(targets, "measure", measure)
    output = tmp_path / "cells.jsonl"
    first = targets.run_cells(["a"], ["v5e:1x1"], ["--config.parallel.fsdp=4"], output)
    both = targets.run_cells(["a"], ["v5e:1x1", "h100:8"], ["--config.parallel.fsdp=4"], output)
    assert asked == [("a", "v5e:1x1"), ("a", "h100:8")] and both[0] == first[0] and len(both) == 2
    lines = output.read_text(encoding="utf-8").strip().split("\n")
    assert [json.loads(line) for line in lines] == both
    targets.run_cells(["a"], ["h100:8"], [], output)
    assert asked[2:] == [("a", "h100:8")]  # with other flags


def test_the_table_has_a_row_for_each_cell(targets):
    cell = {"recipe": "a", "target": "v5e:2x2", "flags": ["--config.parallel.fsdp=4"], "found": FOUND}
    gpu = {"recipe": "a", "target": "h100:1", "flags": [], "found": FOUND | {"estimate": None, "fits": True}}
    wrong = {"recipe": "a", "target": "v5e:3x3", "flags": [], "error": "no such\nslice"}
    rows = targets.format_table([cell, gpu, wrong]).split("\n")
    assert rows[2:] == [
        "| a parallel.fsdp=4 | v5e:2x2 | pmap over 4 devices | 192 x 128 | **does not fit** 20.50 of 15.75 "
        "| plain | 0.75 | 144 | 34% |",
        "| a | h100:1 | pmap over 4 devices | 192 x 128 | 20.50 of 15.75 | plain | 0.75 |  |  |",
        "| a | v5e:3x3 | no such slice |  |  |  |  |  |  |",
    ]
    assert len({row.count("|") for row in rows}) == 1
