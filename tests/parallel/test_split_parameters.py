"""A model that is too large for one device is trained, validated and translated with, on all of them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from compiled_text import read_compiled
from tiny_experiment import change

from flaxformer_mt.commands.main import main
from flaxformer_mt.errors import UserError
from flaxformer_mt.parallel import SplitParameters, rows_per_device, split_for_search
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.tracking import read_metrics
from flaxformer_mt.training.loop import fit

BUDGET = 400_000


@pytest.fixture(scope="module")
def wide(tiny_config) -> Any:
    """A config whose parameters take more than one device has, with BUDGET bytes, but less than four have."""
    return change(
        tiny_config,
        model={"model_dim": 64, "num_heads": 8, "ffn_dim": 256},
        optim={"ema_decay": 0.0, "learning_rate": 0.005},
        train={"steps": 4, "evaluate_every": 4, "checkpoint_every": 4, "log_accuracy": False},
        parallel={"data": 1, "fsdp": 2, "tensor": 2},
        # Four updates do not teach when a sentence ends.
        search={"method": "greedy", "beam_size": 1, "batch_tokens": 64, "max_length_ratio": 0.0}
        | {"max_length_offset": 6, "min_length_offset": 4},
    )


def watch_programs(monkeypatch) -> list[tuple[str, Any, Any]]:
    """The name, the compiled program and the parameters of each program of a search, as it is first run."""
    programs: list[tuple[str, Any, Any]] = []
    compile_split = SplitParameters.compile

    def watch(self, function, **options):
        compiled, ready = compile_split(self, function, **options), {}

        def lower(params, *arrays, **static):
            program = compiled.lower(params, *arrays, **static).compile()
            programs.append((function.__name__, program, params))
            return SimpleNamespace(compile=lambda: program)

        def call(params, *arrays, **static):
            shapes = [np.shape(leaf) for leaf in jax.tree.leaves(arrays)]
            key = str((shapes, jax.tree.structure(arrays), static))
            if key not in ready:
                ready[key] = lower(params, *arrays, **static).compile()
            return ready[key](params, *arrays)

        call.lower = lower
        return call

    monkeypatch.setattr(SplitParameters, "compile", watch)
    return programs


def refuse_copies(monkeypatch) -> None:
    def refuse(tree):
        raise AssertionError("whole parameters on every device")

    monkeypatch.setattr(rows_per_device, "replicate_locally", refuse)
    monkeypatch.setattr("flaxformer_mt.parallel.mesh.replicate_locally", refuse)


def assert_split(programs: list[tuple[str, Any, Any]], whole: int, largest: int) -> None:
    """No program takes, makes or sends the parameters of the model: neither all of them, nor a large one."""
    names = {name for name, _, params in programs if jax.tree.leaves(params)}
    assert names >= {"prefill", "generate"}
    for name, program, params in programs:
        for leaf in jax.tree.leaves(params):
            if leaf.ndim > 1:
                assert leaf.addressable_shards[0].data.size <= leaf.size / 2, name
        memory = program.memory_analysis()
        assert memory.argument_size_in_bytes < whole / 2 and memory.temp_size_in_bytes < whole / 2, name
        for collective in read_compiled(program.as_text()).collectives:
            assert collective.bytes < largest / 2, (name, collective)


def test_no_device_ever_holds_the_parameters(wide, jobs, tmp_path, monkeypatch):
    monkeypatch.setenv("FLAXFORMER_MT_DEVICE_MEMORY", str(BUDGET))
    refuse_copies(monkeypatch)
    programs = watch_programs(monkeypatch)
    run = tmp_path / "run"
    report = fit(wide, run)
    params = Checkpoints(run).restore_params("last")[0]
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(params)]
    assert 2 * sum(sizes) > BUDGET > 2 * sum(sizes) / 4
    assert_split(programs, sum(sizes), max(sizes))
    (valid,) = [record for record in read_metrics(run) if record["split"] == "valid"]
    assert valid["bleu"] >= 0 and report["test"]["bleu"] >= 0

    source = tmp_path / "source.txt"
    source.write_text("ba do\n\nmi nu ba\n", encoding="utf-8")
    translate = ["translate", "--json", f"--run={run}", f"--input={source}", "--checkpoint=last"]
    flags = [*translate, f"--output={tmp_path / 'two'}"]
    jobs.run("command", flags=flags, memory=BUDGET, devices=2)
    monkeypatch.undo()
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    assert main([*translate, f"--output={tmp_path / 'whole'}"]) == 0
    two, whole = (read_lines(tmp_path / name) for name in ("two", "whole"))
    assert [len(line["tokens"]) for line in whole] == [6, 0, 6]
    for mine, theirs in zip(whole, two, strict=True):
        assert (mine["text"], mine["tokens"]) == (theirs["text"], theirs["tokens"])
        assert theirs["alignment"] == mine["alignment"]
        assert theirs["score"] == pytest.approx(mine["score"], abs=1e-5)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_model_is_split_only_where_it_has_to_be(wide, monkeypatch):
    assert split_for_search(wide, 10**15) is None, "CPUs do not say how much memory they have"
    monkeypatch.setenv("FLAXFORMER_MT_DEVICE_MEMORY", "1000")
    assert split_for_search(wide, 500) is None
    for parallel, wanted in [
        ({}, (1, 2, 2)),
        ({"data": 1, "fsdp": 1, "tensor": 1}, (1, 8, 1)),
        ({"fsdp": 3, "tensor": 1}, (1, 8, 1)),
    ]:
        layout = split_for_search(change(wide, parallel=parallel), 501)._mesh.devices.shape
        assert layout == wanted
    odd = change(wide, model={"model_dim": 60, "num_heads": 2}, parallel={"fsdp": 1, "tensor": 1})
    assert split_for_search(odd, 501)._mesh.devices.shape == (2, 4, 1)
    monkeypatch.setenv("FLAXFORMER_MT_DEVICE_MEMORY", "16GB")
    with pytest.raises(UserError, match="FLAXFORMER_MT_DEVICE_MEMORY=16GB: give the bytes"):
        split_for_search(wide, 1)
