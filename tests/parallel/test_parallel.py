"""However the work is laid over eight simulated devices, training computes the same."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from compiled_text import CompiledText, read_compiled
from tiny_experiment import change, mark_slow, small_model

from flaxformer_mt.commands import plot
from flaxformer_mt.config import Config, DataConfig, OptimConfig, ParallelConfig, TrainConfig
from flaxformer_mt.config.files import read_config
from flaxformer_mt.model import init_params, make_model
from flaxformer_mt.parallel import Parallel, make_parallel
from flaxformer_mt.parameter_trees import flatten_tree
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.runs.load_run import load_trained
from flaxformer_mt.shapes import Batch
from flaxformer_mt.training import setup
from flaxformer_mt.training.checkpoint_trees import load_state, to_trees
from flaxformer_mt.training.optimizers import make_hyperparameters
from flaxformer_mt.training.resume_position import TrainProgress
from flaxformer_mt.training.setup import compile_train_step
from flaxformer_mt.training.state import TrainState, init_state
from flaxformer_mt.training.update import (
    UpdateConfig,
    make_gradient_step,
    make_train_step,
)
from flaxformer_mt.translation import translator
from flaxformer_mt.translation.scorer import Scorer

V, STEPS = 24, 20
# No size of the model has the factor 7: a dimension that ROWS divides carries the rows of a whole batch.
ROWS, PART = 56, 7
CONFIG = Config(
    data=DataConfig(row_multiple=8),
    model=small_model(1, 16, 8, 24),
    # Biases of keys have no gradient but rounding, which Adam would blow up were epsilon not far above it.
    optim=OptimConfig(learning_rate=0.02, warmup_steps=2, ema_decay=0.9, epsilon=1e-3),
    train=TrainConfig(loss_chunk_tokens=8),
)
ONE = ParallelConfig(data=1)
LAYOUTS = (
    {"one": ONE, "pmap 8": ParallelConfig(backend="pmap")}
    | {"data 8": ParallelConfig(backend="mesh")}
    | {"fsdp 8": ParallelConfig(fsdp=8), "tensor 8": ParallelConfig(tensor=8)}
    | {"2 x 2 x 2": ParallelConfig(data=2, fsdp=2, tensor=2)}
)
# Splits along one axis, which "2 x 2 x 2" makes too, are left to the release.
NAMES = mark_slow(LAYOUTS, "data 8", "fsdp 8", "tensor 8")
DROPOUT = 0.3
# Collectives of an update, by kind, in JAX 0.10; later compilers combine some.
COLLECTIVES: dict[str, dict[str, int]] = {
    "one": {},
    "pmap 8": {"all-reduce": 1},
    "data 8": {"all-reduce": 1},
    # Of parameters, all but the table twice; of gradients; of those of vectors, and of squares for the norm.
    "fsdp 8": {"all-gather": 33, "reduce-scatter": 17, "all-reduce": 3},
    # Of activations, of the rows of the whole batch.
    "tensor 8": {"all-reduce": 15},
    # Of parameters over fsdp, all but the table twice, of their gradients, of activations over tensor, of all
    # gradients over data.
    "2 x 2 x 2": {"all-gather": 33, "reduce-scatter": 17, "all-reduce": 19},
}


def on(layout: str | ParallelConfig, config: Config = CONFIG) -> Config:
    parallel = LAYOUTS[layout] if isinstance(layout, str) else layout
    return dataclasses.replace(config, parallel=parallel)


def with_dropout(rate: float) -> Config:
    return dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, dropout_rate=rate))


def make_batch(seed: int) -> Batch:
    """Eight parts of 7 rows of 6, 1, 3, 0, 6, 6, 2 and 4 target tokens: no two halves have the same to do.

    The tokens have weights, which differ between rows.
    """
    generator = np.random.default_rng(seed)
    source, target = (generator.integers(4, V, (ROWS, n)).astype(np.int32) for n in (5, 6))
    source_lengths = np.repeat([5, 2, 3, 1, 4, 5, 1, 2], PART)
    target_lengths = np.repeat([6, 1, 3, 0, 6, 6, 2, 4], PART)
    source_mask = np.arange(5)[None] < source_lengths[:, None]
    target_mask = np.arange(6)[None] < target_lengths[:, None]
    weights = (target_mask * generator.choice([0.5, 1, 3], (ROWS, 1))).astype(np.float32)
    batch = Batch(source, np.roll(target, 1, axis=1), target, source_mask, target_mask)
    return batch._replace(target_weights=weights)


class Run(NamedTuple):
    state: TrainState
    placed: TrainState
    losses: np.ndarray
    metrics: list[Any]
    parallel: Parallel
    program: CompiledText


# With this seed of dropout no activation is so close to a rectifier's kink that rounding decides its side;
# with seed 0, one is on the mesh with tensor=2.
NUMBERS = make_hyperparameters(CONFIG)._replace(seed=np.uint32(1007))


@functools.cache
def make_network(rate: float = 0.0, gathers_twice: bool = False) -> Any:
    kernels = {"platform": "cpu", "gathers_twice": gathers_twice}
    return make_model(with_dropout(rate).model, source_size=V, target_size=V, **kernels)


@jax.jit
def make_state() -> TrainState:
    return init_state(init_params(make_network(), jax.random.key(0)), CONFIG.optim)


def train(name: str, rate: float = 0.0) -> Run:
    parallel = make_parallel(on(name))
    state = parallel.init(make_state)
    model = make_network(rate, parallel.layout.gathers_twice)
    update = make_train_step(model, UpdateConfig.of(with_dropout(rate)), parallel)
    train_step = parallel.compile(update, donate=(0,))
    train_step = train_step.lower(state, NUMBERS, parallel.put(make_batch(0))).compile()
    metrics = []
    for number in range(STEPS):
        state, found = train_step(state, NUMBERS, parallel.put(make_batch(number)))
        metrics.append(found)
    metrics = parallel.fetch(metrics)
    losses = np.array([m.loss_sum / m.weight for m in metrics])
    program = read_compiled(train_step.as_text())
    return Run(parallel.fetch(state), state, losses, metrics, parallel, program)


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    """With dropout, whose masks do not depend on the layout."""

    class Runs(dict):
        def __missing__(self, name: str) -> Run:
            return self.setdefault(name, train(name, DROPOUT))

    return Runs()


@pytest.mark.parametrize("name", NAMES[1:])
def test_every_layout_trains_as_one_device_does(runs, name):
    """Twenty updates with uneven padding, clipping and an average: the same up to the rounding of sums."""
    one, other = runs["one"], runs[name]
    assert one.losses[-1] < 0.9 * one.losses[0], "training that does not train would compare anything"
    np.testing.assert_allclose(other.losses, one.losses, rtol=1e-5)
    for left, right in zip(jax.tree.leaves(one.state), jax.tree.leaves(other.state), strict=True):
        np.testing.assert_allclose(right, left, rtol=2e-4, atol=2e-5)
    assert one.metrics[0].weight == other.metrics[0].weight == make_batch(0).target_weights.sum()


def test_devices_of_a_pmap_draw_dropout_of_their_own():
    """Rows that are all the same give different losses where masks differ."""
    config = on("pmap 8", with_dropout(0.5))
    parallel, model = make_parallel(config), make_network(0.5)
    state = parallel.init(make_state)
    gradient = make_gradient_step(model, UpdateConfig.of(config))
    same = jax.tree.map(lambda array: np.repeat(array[:1], 8, axis=0), make_batch(0))

    def loss_of(params, step, batch, *, part):
        return gradient(params, NUMBERS, step, batch, part=part).loss_sum

    rows = parallel.over_rows(loss_of, batch=2, partial=True)
    losses = parallel.compile(rows, partial=True)(state.params, state.step, parallel.put(same))
    assert len(set(np.asarray(losses).tolist())) == 8
    assert parallel.compile(lambda x: 2 * x)(state.step) == 0


SSRU = {"decoder_self_attention": "ssru", "dropout_rate": DROPOUT}
T5 = (
    {"positions": "relative", "relative_buckets": 8, "relative_distance": 6}
    | {"attention_scale": False, "activation": "geglu_tanh", "norm": "rms", "attention_bias": False}
    | {"tying": "embeddings"}
)


@pytest.mark.parametrize(
    ("fields", "path", "share"),
    [
        (SSRU, "layers_0/recurrence/forget/kernel", (8, 8)),
        pytest.param(T5, "relative_positions/embedding", (8, 4), marks=pytest.mark.slow),
    ],
    ids=["a recurrent decoder", "relative positions"],
)
def test_other_networks_are_split_as_one_is(fields, path, share):
    """An update on one device and on eight, split over three axes, is the same."""
    config = change(CONFIG, model=fields)
    batch = make_batch(3)
    model = make_model(config.model, source_size=V, target_size=V)
    found = {}
    for name in ("one", "2 x 2 x 2"):
        parallel = make_parallel(on(name, config))
        state = parallel.init(lambda: init_state(init_params(model, jax.random.key(0)), CONFIG.optim))
        train_step = make_train_step(model, UpdateConfig.of(config), parallel)
        state, metrics = parallel.compile(train_step, donate=(0,))(state, NUMBERS, parallel.put(batch))
        found[name] = flatten_tree(parallel.fetch(state).params), float(parallel.fetch(metrics).gradient_norm)
    leaf = flatten_tree(state.params)[f"decoder/{path}"]
    assert leaf.addressable_shards[0].data.shape == share
    for name, (params, norm) in found.items():
        assert norm == pytest.approx(found["one"][1], rel=1e-4), name
        for path, leaf in params.items():
            np.testing.assert_allclose(leaf, found["one"][0][path], atol=2e-5, err_msg=f"{name} {path}")


@pytest.mark.parametrize("name", NAMES)
def test_states_keep_the_sharding_of_their_initialization(runs, name):
    """After twenty updates the moments and the average are split as the parameters are."""
    run = runs[name]
    for leaf, sharding in zip(
        jax.tree.leaves(run.placed), jax.tree.leaves(run.parallel.shardings(run.placed)), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


@pytest.mark.parametrize("name", NAMES)
def test_programs_split_all_work_and_communicate_only_what_they_must(runs, name):
    """Read in the compiled program: products, collectives by kind, and the state in place of the old one."""
    run, program = runs[name], runs[name].program
    devices = run.parallel.device_count
    assert program.product_flops * devices == runs["one"].program.product_flops
    count = program.count()
    assert count.keys() == COLLECTIVES[name].keys()
    assert all(count[kind] <= COLLECTIVES[name][kind] for kind in count), count
    # Only tensor parallelism communicates activations, of a device's own rows.
    own_rows = {ROWS // run.parallel.layout.row_parts} if run.parallel.layout.tensor > 1 else set()
    for collective in program.collectives:
        rows = {size for _, shape in collective.arrays for size in shape if size % PART == 0}
        assert rows <= own_rows, collective
    assert program.donated == len(jax.tree.leaves(run.placed))


@pytest.mark.parametrize("name", mark_slow(["pmap 8", "fsdp 8"], "fsdp 8"))
def test_each_gradient_and_each_split_parameter_is_sent_once(runs, name):
    """Also those of the table that both embeddings and the output layer use."""
    params = jax.tree.leaves(runs[name].placed.params)
    sent = {"all-reduce": 0, "all-gather": 0, "reduce-scatter": 0}
    for collective in runs[name].program.collectives:
        sent[collective.kind] += collective.bytes
    split = sum(leaf.nbytes for leaf in params if not leaf.sharding.is_fully_replicated)
    assert sent["all-gather"] == split and 8 * sent["reduce-scatter"] == split, name
    # Beside the gradients: sums of losses, tokens and squares.
    whole = sum(leaf.nbytes for leaf in params) - split
    assert whole < sent["all-reduce"] < whole + 4 * (len(params) + 9), name


class Reading:
    """A backend that keeps the texts of the programs it compiles, each for one shape."""

    def __init__(self, parallel: Parallel) -> None:
        self._parallel, self.sum_parts, self.over_rows = parallel, parallel.sum_parts, parallel.over_rows
        self.platform, self.mesh = parallel.platform, parallel.mesh
        self.programs: list[CompiledText] = []

    def compile(self, function, **options):
        jitted, ready = self._parallel.compile(function, **options), []

        def call(*arguments):
            return (ready or [call.lower(*arguments).compile()])[0](*arguments)

        def compile_and_read(lowered):
            ready.append(lowered.compile())
            self.programs.append(read_compiled(ready[0].as_text()))
            return ready[0]

        call.lower = lambda *arguments: SimpleNamespace(
            compile=functools.partial(compile_and_read, jitted.lower(*arguments))
        )
        return call


def accumulate(parallel: Parallel) -> tuple[TrainState, list[CompiledText]]:
    """The state after two updates of two microbatches, and the loop's programs: gradient, sum and update."""
    config = change(with_dropout(DROPOUT), optim={"accumulation": 2})
    reading, state = Reading(parallel), parallel.init(make_state)
    step = compile_train_step(make_network(DROPOUT), config, reading)
    step.by_shape._on_disk = None  # a program from disk is not compiled
    for number in range(2):
        state, _ = step(state, NUMBERS, [parallel.put(make_batch(2 * number + part)) for part in range(2)])
    return parallel.fetch(state), reading.programs


@pytest.mark.parametrize("name", mark_slow(["pmap 8", "2 x 2 x 2"], "2 x 2 x 2"))
def test_accumulated_gradients_are_summed_over_data_once(runs, name):
    """Each device adds up its own microbatches; only the program of the update sums over data."""
    expected, _ = accumulate(runs["one"].parallel)
    found, (gradient, add, update) = accumulate(runs[name].parallel)
    for left, right in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(right, left, rtol=1e-4, atol=1e-5, err_msg=name)
    assert not add.collectives
    if name != "2 x 2 x 2":
        assert not gradient.collectives
        assert update.count() == {"all-reduce": 1}


@pytest.fixture(scope="module")
def saved(runs, tmp_path_factory) -> Callable[[str], Path]:
    @functools.cache
    def save(name: str) -> Path:
        checkpoints = Checkpoints(run_dir := tmp_path_factory.mktemp("saved"))
        progress = TrainProgress(step=STEPS, epoch=2, index=3).to_dict()
        checkpoints.save(STEPS, to_trees(runs[name].placed), progress)
        checkpoints.wait()
        return run_dir

    return save


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("source", NAMES)
def test_a_checkpoint_of_any_layout_can_be_resumed_on_any_other(runs, saved, source, target):
    """Bit for bit, optimizer state and place in the data included, and laid as the target lays it."""
    parallel = runs[target].parallel
    state, progress = load_state(Checkpoints(saved(source)), parallel, lambda: parallel.init(make_state))
    for left, right, sharding in zip(
        jax.tree.leaves(runs[source].state),
        jax.tree.leaves(state),
        jax.tree.leaves(parallel.shardings(state)),
        strict=True,
    ):
        np.testing.assert_array_equal(left, parallel.fetch(right))
        assert right.sharding.is_equivalent_to(sharding, right.ndim)
    assert progress.step == STEPS and (progress.epoch, progress.index) == (2, 3)


def test_all_devices_are_used_by_default_and_described():
    assert make_parallel(Config()).device_count == 8
    assert re.fullmatch(r".+ \(\d+ cores\)", make_parallel(on("one")).describe())
    two = make_parallel(on(ParallelConfig(data=2)))
    assert re.fullmatch(r".+ \(\d+ cores, 2 simulated devices\)", two.describe())


CACHING = """
import sys, time
from pathlib import Path
import jax, jax.numpy as jnp
from flaxformer_mt.parallel import enable_compilation_cache
enable_compilation_cache(Path(sys.argv[1]))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # this program compiles in no time
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
result = jax.jit(lambda x: jnp.tanh(x @ x.T).sum(0))(jnp.ones((3, 4)))
print(float(result[0]), sum(name == "/jax/compilation_cache/cache_hits" for name in events))
"""


def run_caching(directory: Path, **environment: str) -> tuple[list[str], str]:
    variables = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", CACHING, str(directory)],
        env={**variables, **environment},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split(), done.stderr


def test_compiled_programs_are_cached_without_output(tmp_path):
    (first, hits), noise = run_caching(tmp_path / "compiled")
    assert (hits, noise) == ("0", "")
    assert any((tmp_path / "compiled").iterdir())
    (second, hits), noise = run_caching(tmp_path / "compiled")
    assert int(hits) >= 1
    assert noise == ""
    assert second == first


@pytest.mark.parametrize("variable", ["", "JAX_COMPILATION_CACHE_DIR"])
def test_jaxs_cache_is_not_used_where_others_can_write(variable, tmp_path):
    """What it keeps is machine code."""
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o775)
    _, noise = run_caching(folder / "compiled", **({variable: str(folder)} if variable else {}))
    assert noise.count("nobody else can write to") == 1
    assert list(folder.iterdir()) == []


def test_a_run_does_not_choose_where_compiled_programs_come_from(tiny_run, monkeypatch, tmp_path):
    """They are executed: a run of another origin could name a folder that its author has filled."""

    class Enabled(Exception):
        pass

    def enable(directory):
        raise Enabled(str(directory))

    monkeypatch.setenv("FLAXFORMER_MT_CACHE", str(tmp_path))
    config = read_config(tiny_run / "config.json")
    assert config.data.cache_dir
    trained = load_trained(tiny_run)
    for module, use in [
        (translator, lambda: translator.Translator.load(tiny_run)),
        (translator, lambda: Scorer.load(tiny_run, use_all_devices=True)),
        (setup, lambda: setup.set_up_training(config, tiny_run)),
        (plot, lambda: plot._draw_sentence(trained, "aa", "run")),
    ]:
        monkeypatch.setattr(module, "enable_compilation_cache", enable)
        with pytest.raises(Enabled, match=f"^{tmp_path / 'compiled'}$"):
            use()


def test_a_cache_of_the_users_choice_is_left_alone(tmp_path):
    run_caching(tmp_path / "ours", JAX_COMPILATION_CACHE_DIR=str(tmp_path / "theirs"))
    assert not (tmp_path / "ours").exists()
    assert any((tmp_path / "theirs").iterdir())
