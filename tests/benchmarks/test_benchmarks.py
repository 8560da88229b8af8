"""The scripts of benchmarks/, made small: they run, and what they print is what they measured."""

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import jax
import pytest
from tiny_experiment import mark_slow

from flaxformer_mt.commands.target_devices import parse_target
from flaxformer_mt.config.checks import validate
from flaxformer_mt.config.files import list_recipes, load_config

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.slow  # as the next two tests: .ci/docs runs the commands of the page
def test_the_command_prints_rates_and_their_ratio(load_benchmark, tmp_path, monkeypatch, capsys):
    data = load_benchmark("data")
    ticks = itertools.count()
    monkeypatch.setattr(data, "time", types.SimpleNamespace(perf_counter=lambda: next(ticks)))
    monkeypatch.setattr(data, "MODES", ("bucket",))
    monkeypatch.setattr(sys, "argv", ["data.py", "--tiny", "--part=pipeline", f"--work={tmp_path}"])
    data.main()
    found = json.loads(capsys.readouterr().out)["pipeline"]["bucket"]
    assert found["ratio"] == round(found["on_device"] / found["training"], 1)
    assert found["enough"] == (found["on_device"] >= 30 * found["training"])
    assert min(found["as_arrays"], found["on_device"], found["training"]) > 0
    assert not list(tmp_path.iterdir())


@pytest.fixture
def scaling(load_benchmark):
    """The benchmark of scaling: which rows there are, what a row measures, and the table."""
    return load_benchmark("scaling")


@pytest.mark.parametrize("tiny", [False, True])
def test_rows_have_unique_names_and_valid_configs(scaling, tiny):
    cases = list(scaling.plan_cases(tiny=tiny))
    names = [(case.axis, case.value) for case in cases]
    assert len(set(names)) == len(names)
    assert list(dict.fromkeys(case.axis for case in cases)) == list(scaling.AXES)
    for case in cases:
        config = scaling.make_config(case)
        validate(config)
        assert config.model.scan_layers == case.value.endswith("scanned")
    layouts = {case.value.partition(" ")[2] for case in cases if case.devices > 1}
    assert layouts == {"pmap", "mesh data", "mesh fsdp", "mesh tensor"}


@pytest.mark.slow
def test_a_row_measures_the_update_of_the_model_that_it_names(scaling, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(scaling, "time", types.SimpleNamespace(perf_counter=lambda: next(ticks)))
    case = dataclasses.replace(scaling.TINY, axis="devices", value="x", devices=2, layout={"fsdp": 2})
    row = scaling.measure(case, seconds=0.0)
    model = scaling.make_model(scaling.make_config(case).model, source_size=40, target_size=40)
    params = jax.eval_shape(lambda: scaling.init_params(model, jax.random.key(0)))
    assert row["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert row["compile_s"] == row["init_s"] == 1 and row["peak_mib"] > 50
    assert (row["step_ms"], row["tokens_per_second"]) == (1000, 8 * 8)
    assert row["state_mib"] is not None


@pytest.fixture
def systems(load_benchmark):
    """Names of compared systems, and packages that are missing: one line each, not a traceback."""
    return load_benchmark("systems")


def test_unknown_and_repeated_systems_are_refused(systems, capsys):
    parser = argparse.ArgumentParser()
    assert systems.choose_systems(parser, "torch,ours", ("marian", "torch")) == ["torch", "ours"]
    for text, message in (
        ("ours,fairseq", "unknown systems fairseq; known: ours, marian, torch"),
        ("", "unknown systems ; known: ours, marian, torch"),
        ("ours,torch,ours", "--systems=ours,torch,ours has ours more than once"),
    ):
        with pytest.raises(SystemExit) as ended:
            systems.choose_systems(parser, text, ("marian", "torch"))
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    mark_slow(["train.py", "exports.py --source=A --target=B C"], "exports.py --source=A --target=B C"),
)
def test_a_benchmark_without_the_packages_of_others_ends_with_one_line(command, tmp_path):
    """As where only the package itself is installed: modules of others cannot be found."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: (\n"
        "    None if name in ('torch', 'transformers', 'ctranslate2') else find(name, package))\n",
        encoding="utf-8",
    )
    script, *flags = command.split(" ")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{FOLDER.parent}"}
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *flags], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: not installed: ") and done.stderr.count("\n") == 1


@pytest.fixture
def targets(load_benchmark):
    """The table of recipes times targets: finished cells are kept, errors stand in the table."""
    return load_benchmark("targets")


FOUND = {
    "layout": "pmap over 4 devices",
    "batch": {"rows": 192, "source_length": 128, "target_length": 128},
    "fits": False,
    "peak_gib": 20.5,
    "memory_gib": 15.75,
    "attention": {"kernel": "plain", "reason": "", "calls": {}},
}


def test_all_recipes_are_planned_for_targets_that_exist(targets):
    # A pretrained model's vocabulary comes with its parameters, which are not at hand.
    recipes = {name for name in list_recipes() if load_config(name).vocab.kind != "pretrained"}
    assert set(targets.PLAN) == recipes
    ordered = [target for targets in targets.ROUNDS for target in targets]
    assert all(parse_target(target).name == target for target in ordered)
    assert all(set(found) <= set(ordered) and found for found in targets.PLAN.values())
    cells = targets.plan_cells([], [], [])
    assert len(set(cells)) == len(cells) == sum(map(len, targets.PLAN.values()))


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


def test_the_table_has_a_row_for_each_cell(targets):
    cell = {"recipe": "a", "target": "v5e:2x2", "flags": ["--config.parallel.fsdp=4"], "found": FOUND}
    gpu = {"recipe": "a", "target": "h100:1", "flags": [], "found": FOUND | {"fits": True}}
    wrong = {"recipe": "a", "target": "v5e:3x3", "flags": [], "error": "no such\nslice | 3"}
    rows = targets.format_table([cell, gpu, wrong]).split("\n")
    assert rows[2:] == [
        "| a parallel.fsdp=4 | v5e:2x2 | pmap over 4 devices | 192 x 128 | **does not fit** 20.50 of 15.75 "
        "| plain |",
        "| a | h100:1 | pmap over 4 devices | 192 x 128 | 20.50 of 15.75 | plain |",
        "| a | v5e:3x3 | no such slice \\| 3 |  |  |  |",
    ]
    assert len({row.replace("\\|", "").count("|") for row in rows}) == 1


def test_committed_records_of_targets_make_a_table(targets):
    """Records of an earlier version lacked a value, and the command of the page ended with a traceback."""
    cells = targets.run_cells([], FOLDER / "records" / "targets.jsonl", minutes=0)
    assert len(targets.format_table(cells).split("\n")) == 2 + len(cells)


def test_links_are_known_where_the_lexicon_is_clear(load_benchmark):
    module = load_benchmark("word_links")
    lexicon = module.make_lexicon()
    pair = "Der alte Hund hat Anna und den Hut oft gesehen.", "The old dog often saw Anna and the hat."
    found = sorted((i, j) for i, j, _ in module.known_links(*pair, lexicon))
    assert found == [(1, 1), (2, 2), (4, 5), (7, 8), (8, 3)]
    assert module.known_links("Hund und Hund", "dog and dog", lexicon) == []


@pytest.fixture
def latency(load_benchmark):
    """The benchmark of single sentences: caches of its processes, medians, and what a process measures."""
    return load_benchmark("latency")


def test_the_first_process_finds_an_empty_cache_and_the_later_ones_what_it_left(latency, monkeypatch):
    calls = []

    def measure(name):
        def system(options, cache):
            calls.append((name, cache, sorted(path.name for path in cache.parent.glob(f"{name}/*"))))
            cache.mkdir(exist_ok=True)
            (cache / "program").touch()
            return {"seconds": [9, 1, 5, 3][sum(call[0] == name for call in calls) - 1], "inner": {"a": 2}}

        return system

    monkeypatch.setattr(latency, "SYSTEMS", {name: measure(name) for name in ("command", "api")})
    found = latency.measure(latency.parse_options(["--run=x", "--rounds=3"]))
    expected = {"cold": {"seconds": 9, "inner": {"a": 2}}, "warm": {"seconds": 3, "inner": {"a": 2}}}
    assert found == {"command": expected, "api": expected}
    assert [name for name, *_ in calls] == [*("command", "api"), *("command", "api") * 3]
    assert [files for *_, files in calls] == [[]] * 2 + [["program"]] * 6
    assert len({cache for _, cache, _ in calls}) == 2


def test_lines_of_each_length_differ(latency):
    lines = latency.make_lines("a b c d")
    assert lines["2 words"] == ["a b", "b c", "c d", "d a"]
    assert {len(line.split()) for line in lines["80 words"]} == {80}
    (made_up,) = [group for name, group in lines.items() if "made-up" in name]
    assert len(set(made_up)) == 200 and max(len(line.split()) for line in made_up) == 24


def test_a_process_counts_the_programs_that_it_prepares(latency, tiny_run, monkeypatch):
    monkeypatch.setattr(latency, "LENGTHS", (1, 3))
    monkeypatch.setattr(latency, "MADE_UP", 2)
    monkeypatch.setattr(latency, "MADE_UP_WORDS", 1)
    found = latency.serve_api(str(tiny_run), "ba da fa")
    assert list(found["later"]) == ["1 words", "3 words", "up to 1 made-up words"]
    assert all(0 < times["median_ms"] <= times["max_ms"] for times in found["later"].values())
    assert found["programs"] > 0 and min(found[name] for name in ("import", "load", "warm_up")) > 0
