"""Batch shapes compiled before the first update: which, in which order, and what if one is too large."""

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_experiment import change

from flaxformer_mt.config import Config
from flaxformer_mt.data.batch_array import BatchArray
from flaxformer_mt.data.buckets import Shape
from flaxformer_mt.data.loader import train_batches
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.training.compile_ahead import (
    ProgramsByShape,
    compile_ahead,
    compiles_ahead,
    find_shapes,
)
from flaxformer_mt.training.setup import compile_shapes, set_up_training
from flaxformer_mt.training.validation import Validation

SHAPES = (Shape(4, 3, 5), Shape(2, 5, 7), Shape(2, 7, 5))


def describe(*counts: int) -> dict[str, Any]:
    """The summary of an epoch with this many batches of each shape."""
    shapes = [{**shape._asdict(), "batches": n} for shape, n in zip(SHAPES, counts, strict=True)]
    return {"batches": sum(counts), "shapes": shapes}


def choose(*counts: int, updates: int = 1000) -> list[int]:
    """The indices of the shapes that a run will use."""
    return [SHAPES.index(shape) for shape in find_shapes(Config(), describe(*counts), updates=updates)]


def test_the_shapes_that_a_run_will_use_are_compiled_ahead():
    """The largest first, since it takes longest and may not fit; a CPU compiles when a shape occurs."""
    assert choose(5, 5, 90) == choose(5, 5, 90, updates=20) == [0, 1, 2]
    assert choose(5, 0, 90) == [0, 2]
    assert choose(1, 1, 98, updates=30) == [2]  # only one shape is likely to occur
    ahead = {
        wanted: [
            compiles_ahead(change(Config(), train={"compile_ahead": wanted}), platform)
            for platform in ("gpu", "cpu")
        ]
        for wanted in ("auto", "all", "none")
    }
    assert ahead == {"auto": [True, False], "all": [True, True], "none": [False, False]}


def batch_of(shape: Shape) -> BatchArray:
    numbers = np.full((shape.rows, shape.source + shape.target), 3, np.int32)
    return BatchArray(numbers, shape.source, packed=False, pad_id=0, bos_id=1)


def parallel_of(memory: int | None) -> Any:
    return SimpleNamespace(memory_limit=lambda: memory, device_kind="tiny device")


def compile_all(program: ProgramsByShape, memory: int | None = None) -> list[str]:
    """Compiles the program for all shapes; returns the messages."""
    said: list[str] = []
    compile_ahead(
        program,
        SHAPES,
        lambda shape: (batch_of(shape), (batch_of(shape),)),
        config=Config(),
        parallel=parallel_of(memory),
        say=said.append,
    )
    return said


def test_compiled_shapes_are_run_and_others_are_compiled_when_they_occur(monkeypatch):
    """Two shapes have as many rows and columns: their programs differ."""
    traced = []

    def count(batch: BatchArray) -> jax.Array:
        traced.append(batch.numbers.shape)
        return jnp.sum(batch.to_batch().source)

    program = ProgramsByShape(jax.jit(count), batch=0)
    monkeypatch.setattr("flaxformer_mt.training.compile_ahead._MESSAGE_EVERY", -1.0)
    said = compile_all(program)
    assert said[-1] == "compiled 3 of 3 batch shapes"
    assert len(traced) == 3
    assert [int(program(batch_of(shape))) for shape in SHAPES] == [12, 10, 14]
    assert len(traced) == 3
    new = batch_of(Shape(1, 2, 2))
    assert batch_of(SHAPES[0]) in program and new not in program and len(program) == 3
    assert int(program(new)) == 2
    assert new in program
    assert len(traced) == 4


def test_a_shape_that_does_not_fit_is_named_before_training():
    program = ProgramsByShape(jax.jit(lambda batch: batch.to_batch().source * 2), batch=0)
    assert not compile_all(program, memory=2**30)
    needed = re.escape("2 rows of 5 source and 7 target tokens does not fit into the memory of tiny device")
    program.lower = lambda batch: SimpleNamespace(compile=lambda: refuse(batch))
    with pytest.raises(UserError, match=rf"{needed} \(RESOURCE_EXHAUSTED: 20G of 15G\); lower data.batch_to"):
        compile_all(program)
    # The one that is compiled first.
    with pytest.raises(UserError, match=r"\d rows of \d .* \(it needs 0.00 GiB of 0.00 GiB\).*model.remat"):
        compile_all(ProgramsByShape(jax.jit(lambda batch: batch.to_batch().source * 2), batch=0), memory=1)


def refuse(batch: BatchArray) -> Any:
    """What a compiler does whose devices have room for the first shape only."""
    if batch.source_length == 5:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 20G of 15G\nand a table")
    return SimpleNamespace(memory_analysis=lambda: None)


def test_programs_compiled_ahead_are_those_of_the_cache_and_of_training(tiny_config, tiny_run, tmp_path):
    """Those that a run without them has compiled are found on disk, and training uses nothing else."""
    config = change(tiny_config, train={"compile_ahead": "all"})
    setup = set_up_training(config, tmp_path / "run", Checkpoints(tmp_path / "run"))
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda name, **_: events.append(name.rpartition("/")[2]))
    compile_shapes(config, setup, print)
    assert events.count("cache_hits") == 1 and "cache_misses" not in events
    vocab, prepared = setup.prepared.vocabs.target, setup.prepared
    options = {"seed": config.seed, "pad_id": vocab.pad_id, "bos_id": vocab.bos_id}
    batches = train_batches(prepared.train, config.data, **options, share=setup.row_share)
    setup.train_step.by_shape._jitted = None  # whoever calls it fails
    state, losses = setup.state, []
    for _ in range(2):
        state, metrics = setup.train_step(state, setup.numbers, [setup.put(next(batches)[1])])
        losses.append(float(metrics.loss_sum))
    batches.close()
    assert int(state.step) == 2 and np.isfinite(losses).all()


def test_the_loss_of_the_validation_set_is_compiled_for_all_shapes_at_once(tiny_config, tiny_run, tmp_path):
    """On a GPU, where each shape takes seconds, and they would follow one another."""
    found = []
    for wanted in ("all", "none"):
        config = change(tiny_config, train={"compile_ahead": wanted})
        setup = set_up_training(config, tmp_path / wanted, Checkpoints(tmp_path / wanted))
        validation = Validation(config, setup.prepared, setup.model, setup.parallel, like=setup.state.params)
        if wanted == "all":  # whoever calls what compiles at the first call fails
            validation._step = SimpleNamespace(lower=validation._step.lower)
        found.append({**validation(setup.state.inference_params), "seconds": 0.0})
        shapes = {(batch.source.shape, batch.target_in.shape) for batch in validation._batches}
        assert len(validation._steps) == (len(shapes) if wanted == "all" else 0)
    assert found[0] == found[1]
