"""The table of recipes times targets: finished cells are kept, errors stand in the table."""

import importlib.util
import json
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from flaxformer_mt.commands.compile_for_target import parse_target
from flaxformer_mt.config.files import list_recipes, load_config

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
}


@pytest.fixture(scope="module")
def targets():
    spec = importlib.util.spec_from_file_location("benchmark_targets", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_recipes_are_planned_for_targets_that_exist(targets):
    # A pretrained model's vocabulary comes with its parameters, which are not at hand.
    recipes = {name for name in list_recipes() if load_config(name).vocab.kind != "pretrained"}
    assert set(targets.PLAN) == recipes
    ordered = [target for targets in targets.ROUNDS for target in targets]
    assert all(parse_target(target).name == target for target in ordered)
    assert all(set(found) <= set(ordered) and found for found in targets.PLAN.values())
    cells = targets.plan_cells([], [], [])
    assert len(set(cells)) == len(cells) == sum(map(len, targets.PLAN.values()))


def test_cells_are_those_of_the_plan_or_of_the_flags(targets):
    (own,) = targets.plan_cells(["wmt14_en_de_big_h100_8"], [], [])
    assert own == ("wmt14_en_de_big_h100_8", "h100:8", ())
    words, other = targets.plan_cells(["kokoyi_iwslt", "my_config.py"], ["h100:1"], ["--config.seed=2"])
    assert words.flags == ("--config.vocab.size=30000", "--config.seed=2")  # its text is not at hand
    assert other == ("my_config.py", "h100:1", ("--config.seed=2",))


@pytest.fixture
def compiled(targets, monkeypatch):
    """Makes cells without a compiler; returns the list of those that were asked for."""
    asked = []

    def compile_apart(cells):
        for cell in cells:
            asked.append((cell.recipe, cell.target))
            yield {"error": "refused"} if cell.target == "h200:1" else {"found": FOUND}

    monkeypatch.setattr(targets, "compile_apart", compile_apart)
    return asked


def test_finished_cells_are_not_compiled_again(targets, compiled, tmp_path):
    output, names = tmp_path / "cells.jsonl", ["v5e:4x4", "v5e:1x1"]
    first = targets.run_cells(targets.plan_cells(["a"], names[:1], []), output, minutes=1)
    assert first == [{"recipe": "a", "target": "v5e:4x4", "flags": [], "found": FOUND}]
    wanted = targets.plan_cells(["a", "b"], [*names, "h200:1"], [])
    found = targets.run_cells(wanted, output, minutes=1)
    assert compiled == [  # round by round
        ("a", "v5e:4x4"),
        ("a", "v5e:1x1"),
        ("b", "v5e:1x1"),
        ("a", "h200:1"),
        ("b", "h200:1"),
        ("b", "v5e:4x4"),
    ]
    assert [(cell["recipe"], cell["target"]) for cell in found] == [cell[:2] for cell in wanted]
    assert found[2]["error"] == "refused" and found[0] == first[0]
    lines = output.read_text(encoding="utf-8").strip().split("\n")
    assert len(lines) == 6 and all(json.loads(line) in found for line in lines)
    targets.run_cells(targets.plan_cells(["a"], ["v5e:1x1"], ["--config.seed=1"]), output, minutes=1)
    assert compiled[6:] == [("a", "v5e:1x1")]  # with other flags


def test_cells_that_are_not_compiled_stand_in_the_table(targets, compiled, tmp_path):
    output = tmp_path / "cells.jsonl"
    targets.run_cells(targets.plan_cells(["a"], ["h100:1"], []), output, minutes=1)
    wanted = targets.plan_cells(["a", "b"], ["v5e:1x1", "h100:1", "h100:8"], [])
    found = targets.run_cells(wanted, output, minutes=0)
    assert len(compiled) == 1
    there, *missing = targets.format_table(found).split("\n")[2:]
    assert "20.50 of 15.75" in there
    assert [row.split(" | ")[:3] for row in missing] == [
        ["| a", "v5e:1x1, h100:8", "not compiled"],
        ["| b", "v5e:1x1, h100:1, h100:8", "not compiled"],
    ]
    assert len({row.count("|") for row in [there, *missing]}) == 1


def test_a_crash_of_the_compiler_is_the_result_of_one_cell(targets, monkeypatch):
    """Processes are made of threads here, so that nothing is imported."""

    class Pool(ThreadPoolExecutor):
        def __init__(self, workers, mp_context):
            super().__init__(workers)

    def compile_cell(cell):
        if cell.recipe == "bad":
            raise BrokenProcessPool
        return {"found": cell.recipe}

    monkeypatch.setattr(targets, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(targets, "compile_cell", compile_cell)
    cells = targets.plan_cells(["a", "bad", "b"], ["h100:1"], [])
    results = list(targets.compile_apart(cells))
    assert results == [{"found": "a"}, {"error": "the compiler ended the process"}, {"found": "b"}]


def test_a_user_error_is_the_result_of_a_cell(targets):
    (cell,) = targets.plan_cells(["toy_de_en"], ["h100:1"], ["--config.model.num_heads=7"])
    assert "num_heads" in targets.compile_cell(cell)["error"]
    (cell,) = targets.plan_cells(["toy_de_en"], ["v5e:3x3"], [])
    assert "has no slice 3x3" in targets.compile_cell(cell)["error"]


def test_the_table_has_a_row_for_each_cell(targets):
    cell = {"recipe": "a", "target": "v5e:2x2", "flags": ["--config.parallel.fsdp=4"], "found": FOUND}
    gpu = {"recipe": "a", "target": "h100:1", "flags": [], "found": FOUND | {"fits": True}}
    wrong = {"recipe": "a", "target": "v5e:3x3", "flags": [], "error": "no such\nslice | 3"}
    rows = targets.format_table([cell, gpu, wrong]).split("\n")
    assert rows[2:] == [
        "| a parallel.fsdp=4 | v5e:2x2 | pmap over 4 devices | 192 x 128 | **does not fit** 20.50 of 15.75 "
        "| plain | 0.75 |",
        "| a | h100:1 | pmap over 4 devices | 192 x 128 | 20.50 of 15.75 | plain | 0.75 |",
        "| a | v5e:3x3 | no such slice \\| 3 |  |  |  |  |",
    ]
    assert len({row.replace("\\|", "").count("|") for row in rows}) == 1
