"""Batch shapes compiled before the first update, with and without padding, once for all runs of a sweep."""

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_experiment import array_of, change

from flaxformer_mt.config import Config
from flaxformer_mt.data.batch_array import BatchArray
from flaxformer_mt.data.batching import plan_epoch, plan_summary
from flaxformer_mt.data.buckets import Shape
from flaxformer_mt.data.loader import train_batches
from flaxformer_mt.errors import UserError
from flaxformer_mt.parallel.compilation import CompileClock
from flaxformer_mt.shapes import Batch
from flaxformer_mt.training.compile_ahead import (
    ProgramsByShape,
    compile_ahead,
    compiles_ahead,
    find_shapes,
    find_unpadded_sizes,
    fitting_sizes,
    shapes_of,
)
from flaxformer_mt.training.setup import TrainingSetup, compile_shapes, set_up_training
from flaxformer_mt.training.validation import Validation

SHAPES = (Shape(4, 3, 5), Shape(2, 5, 7), Shape(2, 7, 5))


def describe(*counts: int) -> dict[str, Any]:
    """The summary of an epoch with this many batches of each shape."""
    shapes = [{**shape._asdict(), "batches": n} for shape, n in zip(SHAPES, counts, strict=True)]
    return {"batches": sum(counts), "shapes": shapes}


def choose(*counts: int, updates: int = 1000) -> list[int]:
    """The indices of the shapes that a run will use."""
    return [SHAPES.index(shape) for shape in find_shapes(Config(), [describe(*counts)], updates=updates)]


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


def compile_all(program: ProgramsByShape, memory: int | None = None) -> list[str]:
    """Compiles the program for all shapes; returns the messages."""
    said: list[str] = []
    compile_ahead(
        program,
        [(batch_of(shape),) for shape in SHAPES],
        config=Config(),
        parallel=SimpleNamespace(memory_limit=lambda: memory, device_kind="tiny device"),
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
    setup = set_up_training(config, tmp_path / "run")
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda name, **_: events.append(name.rpartition("/")[2]))
    setup.train_step.by_shape.jitted = None  # whoever traces it fails
    compile_shapes(setup, print)
    assert not events
    vocab, prepared = setup.prepared.vocabs.target, setup.prepared
    options = {"seed": config.seed, "pad_id": vocab.pad_id, "bos_id": vocab.bos_id}
    batches = train_batches(prepared.train, config.data, **options, share=setup.row_share)
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
        setup = set_up_training(config, tmp_path / wanted)
        validation = Validation(config, setup.prepared, setup.model, setup.parallel, like=setup.state.params)
        if wanted == "none":  # whoever compiles at once fails
            validation._steps.compile_all = None
        found.append({**validation(setup.state.inference_params), "seconds": 0.0})
        assert len(validation._steps) == len({batch.shape for batch in validation._batches})
    assert found[0] == found[1]


def test_an_evaluation_is_compiled_beside_the_first_updates(tiny_config, tiny_run, tmp_path):
    """Its programs are those that the evaluation runs, and rates of training do not leave their time out."""
    config = change(tiny_config, train={"compile_ahead": "all"})
    setup = set_up_training(config, tmp_path / "run")
    validation = Validation(config, setup.prepared, setup.model, setup.parallel, like=setup.state.params)
    with CompileClock() as clock:
        validation.compile_beside(shapes_of(setup.state.inference_params), clock)
        validation._compiling.result()
        assert clock.compiling() == 0
    programs = validation._translator.search.programs
    known, steps = dict(programs._found), len(validation._steps)
    assert known and steps
    found = validation(setup.state.inference_params)
    assert np.isfinite(found["loss"]) and "bleu" in found
    assert programs._found == known and len(validation._steps) == steps


# ---- unpadded sizes ----
CPU = SimpleNamespace(platform="cpu", device_count=1)


def facts(rows: int, source: int, target: int, tokens: tuple[int, int], *, batches: int = 3) -> dict:
    return {"rows": rows, "source": source, "target": target, "batches": batches} | {
        "likely_tokens": list(tokens)
    }


def test_sizes_are_whole_rows_of_likely_tokens_and_at_most_those_of_the_shape():
    shapes = [
        facts(40, 20, 16, (641, 500)),
        facts(10, 40, 30, (390, 299)),  # 2% of padding are not worth it
        facts(16, 48, 40, (700, 900), batches=0),
        facts(9, 50, 50, (449, 300)),  # one side is full
    ]
    sizes = find_unpadded_sizes(Config(), CPU, [shapes])
    assert sizes == {Shape(40, 20, 16): (660, 512), Shape(9, 50, 50): (450, 300)}
    # of several stages, the largest
    stages = [[facts(40, 20, 16, (641, 400))], [facts(40, 20, 16, (500, 500))]]
    assert find_unpadded_sizes(Config(), CPU, stages) == {Shape(40, 20, 16): (660, 512)}


@pytest.mark.parametrize(
    "fields",
    [
        {"model": {"padding_mask": "none"}},
        {"model": {"decoder_self_attention": "ssru"}},
        {"model": {"architecture": "decoder_only"}},
        {"data": {"batching": "pack"}},
        {"platform": "gpu"},
        {"device_count": 2},
    ],
    ids=str,
)
def test_some_batches_keep_their_padding(fields):
    """Where a token reads padding, where there is next to none, and on all but a single CPU device."""
    sections = {name: value for name, value in fields.items() if isinstance(value, dict)}
    devices = SimpleNamespace(
        **{"platform": "cpu", "device_count": 1, **{k: v for k, v in fields.items() if k not in sections}}
    )
    config = change(Config(), **sections)
    assert find_unpadded_sizes(config, devices, [[facts(40, 20, 16, (600, 400))]]) == {}


def unpadded_sizes_batch_of(source: int, target: int) -> BatchArray:
    """A batch of 4 x 5 and 4 x 6 with this many tokens."""
    masks = np.arange(20).reshape(4, 5) < source, np.arange(24).reshape(4, 6) < target
    return array_of(Batch(masks[0], masks[1], masks[1], *masks))


def test_a_batch_with_more_tokens_than_its_shape_usually_has_keeps_its_padding():
    sizes = {Shape(4, 5, 6): (15, 18)}
    assert fitting_sizes(unpadded_sizes_batch_of(15, 18), sizes) == (15, 18)
    assert fitting_sizes(unpadded_sizes_batch_of(16, 18), sizes) is None
    assert fitting_sizes(unpadded_sizes_batch_of(15, 19), sizes) is None
    assert fitting_sizes(unpadded_sizes_batch_of(3, 3), {Shape(4, 5, 7): (15, 18)}) is None


def test_likely_tokens_hold_nearly_all_batches_of_all_epochs():
    random = np.random.default_rng(0)
    lengths = random.integers(3, 40, 20_000), random.integers(3, 40, 20_000)
    config = change(Config(), data={"num_shapes": 3, "batch_tokens": 4096, "max_target_length": 40}).data
    plan = plan_epoch(*lengths, config=config, seed=1, epoch=0)
    summary = plan_summary(plan, *lengths)["shapes"]
    sizes = {Shape(s["rows"], s["source"], s["target"]): s["likely_tokens"] for s in summary if s["batches"]}
    least = {shape: [0, 0] for shape in sizes}
    for epoch in range(3):
        plan = plan_epoch(*lengths, config=config, seed=1, epoch=epoch, shapes=plan.shapes)
        for planned in (plan[index] for index in range(len(plan))):
            for side, of in enumerate(lengths):
                tokens = of[planned.examples].sum()
                assert tokens <= sizes[planned.shape][side]
                least[planned.shape][side] = max(least[planned.shape][side], tokens)
    # and not many more than the fullest
    pairs = [pair for shape in sizes for pair in zip(sizes[shape], least[shape], strict=True)]
    assert all(size < 1.06 * most for size, most in pairs) and len(pairs) == 6


# ---- hyperparameters ----
# Shapes of which the fullest batch has another number of tokens in the epochs of another seed.
DATA = {"batch_tokens": 256, "num_shapes": 2}


def short_batch(setup: TrainingSetup, shape: Shape) -> BatchArray:
    """A batch of this shape with one token in each row, which any program without padding has room for."""
    source = np.zeros((shape.rows, shape.source), np.int32)
    target = np.zeros((shape.rows, shape.target), np.int32)
    masks = [np.arange(side.shape[1])[None] < np.ones((shape.rows, 1)) for side in (source, target)]
    target_in = target.copy()
    target_in[:, 0] = setup.prepared.vocabs.target.bos_id
    return array_of(Batch(source + 4 * masks[0], target_in, target + 5 * masks[1], *masks))


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_sweep_compiles_nothing_anew(tiny_config, tmp_path, accumulation):
    """The initial state and all of an update are found on disk, and compute with the numbers of their run.

    Batches without padding have the sizes of one run.
    """
    optim = {"warmup_steps": 1, "accumulation": accumulation}
    base = change(tiny_config, data=DATA, optim=optim)
    events: list[str] = []
    params, sizes = {}, []
    for name, changes in {
        "base": {},
        "seed": {"seed": 80_000 + accumulation},  # which no other test compiles anything for
        "rate": {"optim.learning_rate": 0.003, "optim.schedule": "cosine", "train.steps": 49},
    }.items():
        if name == "seed":
            jax.monitoring.register_event_listener(lambda name, **_: events.append(name.rpartition("/")[2]))
        setup = set_up_training(base.replace(changes), tmp_path / name)
        initial = jax.device_get(setup.state.params)
        sizes.append(setup.unpadded)
        shape = max(setup.unpadded)
        batch = setup.put(short_batch(setup, shape))
        assert batch.unpadded == setup.unpadded[shape]
        state, metrics = setup.train_step(setup.state, setup.numbers, [batch] * accumulation)
        assert np.isfinite(metrics.loss_sum)
        params[name] = jax.tree.leaves(initial), jax.tree.leaves(jax.device_get(state.params))
    assert sizes == [sizes[0]] * 3
    assert "cache_hits" in events and "cache_misses" not in events
    same = {
        name: [all(map(np.array_equal, *pair)) for pair in zip(params["base"], found, strict=True)]
        for name, found in params.items()
    }
    assert same == {"base": [True, True], "seed": [False, False], "rate": [True, False]}
