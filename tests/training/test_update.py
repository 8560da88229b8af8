"""The update: one batch is its microbatches, padding weighs nothing, and bad gradients leave no trace."""

import functools
import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from tiny_experiment import change, random_params, small_model

from benchmarks.originals.plain_losses import smoothed_cross_entropy
from flaxformer_mt.config import (
    Config,
    GuidedAlignmentConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from flaxformer_mt.evaluation.perplexity import make_evaluation_step
from flaxformer_mt.kernels.dropout import make_dropout_key
from flaxformer_mt.model import Model, make_model
from flaxformer_mt.parallel import make_parallel
from flaxformer_mt.shapes import Batch
from flaxformer_mt.training.optimizers import make_hyperparameters
from flaxformer_mt.training.state import TrainState, init_state
from flaxformer_mt.training.update import (
    LossTerm,
    Sums,
    UpdateConfig,
    add_sums,
    make_gradient_step,
    make_train_step,
    make_update,
)

V = 19
CONFIG = Config(
    seed=3,
    model=small_model(1, 8, 2, 12, output_bias=True),
    optim=OptimConfig(learning_rate=0.02, warmup_steps=2, ema_decay=0.5),
    train=TrainConfig(label_smoothing=0.1),
)
ONE_DEVICE = Config(parallel=ParallelConfig(data=1))
# What does not depend on the architecture is tested with the smaller one.
SMALL = change(CONFIG, model={"architecture": "decoder_only"})
ADD = jax.jit(add_sums)
DROPOUT = change(SMALL, model={"dropout_rate": 0.4, "attention_dropout_rate": 0.0, "ffn_dropout_rate": 0.0})


class Compiled(NamedTuple):
    """The programs of a config; none donates, so that states can be used again."""

    state: TrainState
    train_step: Any
    gradient: Any
    update: Any


def numbers_of(config: Config) -> Any:
    return make_hyperparameters(change(config, train={"steps": 100}))


@functools.cache
def compiled_update(optim: OptimConfig) -> Any:
    config = replace(CONFIG, optim=optim)
    update, numbers = jax.jit(make_update(UpdateConfig.of(config))), numbers_of(config)
    return lambda state, sums: update(state, numbers, sums)


@functools.cache
def initial_state(model: Model, optim: OptimConfig) -> TrainState:
    return jax.jit(functools.partial(init_state, config=optim))(random_params(model, scale=0.25))


@functools.cache
def compiled(config: Config) -> Compiled:
    model = make_model(config.model, source_size=V, target_size=V)
    numbers = numbers_of(config)
    selected = UpdateConfig.of(config)
    train_step = jax.jit(make_train_step(model, selected, make_parallel(ONE_DEVICE)))
    gradient_step = jax.jit(make_gradient_step(model, selected))
    return Compiled(
        initial_state(model, config.optim),
        lambda state, batch: train_step(state, numbers, batch),
        lambda params, step, batch, microbatch=0: gradient_step(params, numbers, step, batch, microbatch),
        compiled_update(config.optim),
    )


@functools.cache
def forward(config: ModelConfig) -> Any:
    model = make_model(config, source_size=V, target_size=V)
    return jax.jit(lambda params, batch: model.apply({"params": params}, batch, deterministic=True))


def random_batch(rows: list[int]) -> Batch:
    """Row n of an endless batch for each n in `rows`, of lengths of its own; -1 is a row of padding."""
    source, target = np.zeros((len(rows), 5), np.int32), np.zeros((len(rows), 6), np.int32)
    target_in, source_lengths, target_lengths = target.copy(), np.zeros(len(rows)), np.zeros(len(rows))
    for place, row in enumerate(rows):
        if row < 0:
            continue
        generator = np.random.default_rng(row)
        source_lengths[place], target_lengths[place] = generator.integers(1, 6), generator.integers(1, 7)
        source[place], target[place] = generator.integers(4, V, 5), generator.integers(4, V, 6)
        target_in[place] = [1, *target[place, :-1]]
    source_mask = np.arange(5)[None] < source_lengths[:, None]
    target_mask = np.arange(6)[None] < target_lengths[:, None]
    return Batch(
        source * source_mask, target_in * target_mask, target * target_mask, source_mask, target_mask
    )


def assert_close(left: Any, right: Any, atol: float = 1e-6) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol), left, right)


def assert_same_bits(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def differs(left: Any, right: Any) -> bool:
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return any(not np.array_equal(a, b) for a, b in pairs)


def test_a_batch_is_its_microbatches():
    """Four rows at once, or in two halves with 9 and 4 target tokens: the same update."""
    state, train_step, gradient, update = compiled(CONFIG)
    rows = [0, 1, 2, 3]
    halves = [random_batch(rows[:2]), random_batch(rows[2:])]
    weights = [int(half.target_mask.sum()) for half in halves]
    assert weights[0] != weights[1]
    whole, metrics = train_step(state, random_batch(rows))
    sums = [gradient(state.params, state.step, half, number) for number, half in enumerate(halves)]
    sums = ADD(*sums)
    accumulated, accumulated_metrics = update(state, sums)
    assert float(metrics.weight) == sum(weights)
    assert_close(accumulated_metrics, metrics)
    assert differs(whole.params, state.params)
    # Adam's first update is g / (|g| + epsilon): where a gradient is rounding, so is its sign
    assert_close(accumulated.opt_state, whole.opt_state, atol=1e-7)
    squares = [np.square(g / sum(weights)).sum() for g in jax.tree.leaves(jax.device_get(sums.gradients))]
    assert_close(np.sqrt(sum(squares)), metrics.gradient_norm)


LOOP = {"scan_layers": True, "remat": "full", "num_encoder_layers": 2, "num_decoder_layers": 2}


@pytest.mark.parametrize("model", [{}, pytest.param(LOOP, marks=pytest.mark.slow)])
def test_a_further_term_may_run_a_second_pass(model):
    """recipes/loss_term.py: equations 2 to 4 of Liang et al. (2021), from the logits of both passes."""
    recipe = runpy.run_path(str(Path(__file__).resolve().parents[2] / "recipes" / "loss_term.py"))
    terms = [LossTerm(recipe["sum_r_drop"], weight=0.5)]
    config = change(CONFIG, model={"dropout_rate": 0.4, **model}, train={"loss_chunk_tokens": 8})
    network = make_model(config.model, source_size=V, target_size=V)
    state, batch = initial_state(network, config.optim), random_batch([0, 1, 2, 3])
    step = jax.jit(make_gradient_step(network, UpdateConfig.of(config), loss_terms=terms))
    sums = step(state.params, numbers_of(config), state.step, batch)
    key = make_dropout_key(numbers_of(config).seed, state.step)

    @jax.jit
    def losses(params):
        def twice(module):
            return [module(batch, deterministic=False) for _ in range(2)]

        logs = [
            jax.nn.log_softmax(x) for x in nn.apply(twice, network)({"params": params}, rngs={"dropout": key})
        ]
        hot = jax.nn.one_hot(batch.target_out, V)
        targets = 0.9 * hot + 0.1 / V, hot
        entropies = [-(target * log).sum(-1) for target, log in zip(targets, logs, strict=True)]
        divergences = [(jnp.exp(p) * (p - q)).sum(-1) for p, q in (logs, logs[::-1])]
        first, second, forth, back = ((x * batch.target_mask).sum() for x in (*entropies, *divergences))
        return first + 0.5 * (second + 5.0 * (forth + back) / 2), (first, forth)

    expected, (first, forth) = jax.grad(losses, has_aux=True)(state.params)
    assert forth > 0.1
    np.testing.assert_allclose(sums.loss_sum, first, rtol=1e-5)
    assert_close(sums.gradients, expected, atol=2e-5)


def test_guided_alignment_adds_its_weighted_loss():
    """The gradient by finite differences, and on a mesh of data and tensor parallelism."""
    config = change(CONFIG, model={"alignment": GuidedAlignmentConfig(weight=0.5)})
    state, _, gradient, update = compiled(config)
    batch = random_batch([0, 1, 2, 3])
    links = np.random.default_rng(1).random((4, 6, 5)) < 0.3
    links &= batch.target_mask[:, :, None] & batch.source_mask[:, None]
    batch = batch._replace(alignment=np.packbits(links, axis=2, bitorder="little"))
    whole = gradient(state.params, state.step, batch, 0)
    _, plain = compiled(CONFIG).train_step(state, batch._replace(alignment=None))
    assert_close((whole.loss_sum, whole.weight), (plain.loss_sum, plain.weight))
    assert plain.aligned == 0 and 0 < float(whole.aligned) < float(whole.weight)
    twice = ADD(whole, whole)
    assert (twice.alignment_sum, twice.aligned) == (2 * whole.alignment_sum, 2 * whole.aligned)
    assert update(state, twice)[1].alignment_sum == twice.alignment_sum
    direction = jax.tree.map(lambda leaf: 1e-3 * jnp.sign(leaf), whole.gradients)
    ahead, behind = (
        gradient(jax.tree.map(lambda p, d, s=s: p + s * d, state.params, direction), state.step, batch, 0)
        for s in (1, -1)
    )
    ahead, behind = (sums.loss_sum + 0.5 * sums.alignment_sum for sums in (ahead, behind))
    leaves = zip(*map(jax.tree.leaves, (whole.gradients, direction)), strict=True)
    slope = sum(float((g * d).sum()) for g, d in leaves)
    np.testing.assert_allclose((ahead - behind) / 2, slope, rtol=0.02)
    # A head that aligns a token when it is read learns at the next step.
    later = change(config, model={"alignment": replace(config.model.alignment, step="read")})
    links[:, 1:], links[:, 0] = links[:, :-1].copy(), False
    moved = batch._replace(alignment=np.packbits(links, axis=2, bitorder="little"))
    expected = gradient(state.params, state.step, moved, 0).alignment_sum
    assert_close(compiled(later)[2](state.params, state.step, batch, 0).alignment_sum, expected)
    assert abs(float(expected - whole.alignment_sum)) > 0.1
    layout = ParallelConfig(data=2, tensor=2)
    parallel = make_parallel(replace(config, parallel=layout))
    model = make_model(config.model, source_size=V, target_size=V)
    step = parallel.compile(parallel.over_rows(make_gradient_step(model, UpdateConfig.of(config)), batch=3))
    found = step(
        parallel.place(jax.device_get(state.params)), numbers_of(config), state.step, parallel.put(batch)
    )
    assert_close(jax.device_get(found), jax.device_get(whole), atol=1e-5)


def test_padding_rows_weights_and_repeated_rows_are_the_tokens_that_they_stand_for():
    """Twice the same rows, or half of them padding; a pair of weight 2 is the pair twice, and of 0 none."""
    state, train_step, gradient, _ = compiled(CONFIG)
    padded, padded_metrics = train_step(state, random_batch([0, 1, -1, -1]))
    doubled, doubled_metrics = train_step(state, random_batch([0, 1, 0, 1]))
    assert float(doubled_metrics.weight) == 2 * float(padded_metrics.weight)
    assert_close(doubled_metrics.gradient_norm, padded_metrics.gradient_norm)
    assert_close(doubled.opt_state, padded.opt_state, atol=1e-7)
    batch = random_batch([0, 1, 2, 3])
    weights = batch.target_mask * np.array([2, 1, 1, 0], np.float32)[:, None]
    weighted = gradient(state.params, state.step, batch._replace(target_weights=weights), 0)
    repeated = gradient(state.params, state.step, random_batch([0, 0, 1, 2]), 0)
    assert float(weighted.weight) == float(repeated.weight)
    assert_close(weighted, repeated, atol=1e-5)


def test_dropout_follows_seed_step_and_microbatch():
    state, _, gradient, _ = compiled(DROPOUT)
    batch = random_batch([0, 1, 2, 3])
    base = gradient(state.params, jnp.int32(0), batch, 0)
    assert_same_bits(gradient(state.params, jnp.int32(0), batch, 0), base)
    assert differs(gradient(state.params, jnp.int32(1), batch, 0), base)
    assert differs(gradient(state.params, jnp.int32(0), batch, 1), base)
    other_seed = compiled(replace(DROPOUT, seed=4)).gradient
    assert differs(other_seed(state.params, jnp.int32(0), batch, 0), base)


@pytest.mark.parametrize("loss_chunk_tokens", [0, 7])
def test_right_predictions_are_counted_while_training(loss_chunk_tokens):
    """As evaluation counts them, summed over microbatches; the update is the one without counting."""
    config = change(SMALL, train={"log_accuracy": True, "loss_chunk_tokens": loss_chunk_tokens})
    state, train_step, gradient, update = compiled(config)
    for _ in range(15):  # until some are right
        state, metrics = train_step(state, random_batch([0, 1, 2, 3]))
    batch, halves = random_batch([0, 1, 2, 3]), [random_batch([0, 1]), random_batch([2, 3])]
    logits = forward(SMALL.model)(state.params, batch)
    right = ((np.asarray(logits).argmax(-1) == batch.target_out) & batch.target_mask).sum()
    assert 0 < right < batch.target_mask.sum()
    _, metrics = train_step(state, batch)
    sums = [gradient(state.params, state.step, half, np.int32(number)) for number, half in enumerate(halves)]
    _, accumulated = update(state, ADD(*sums))
    assert metrics.correct_sum == accumulated.correct_sum == right
    bad = sums[0]._replace(loss_sum=jnp.float32(np.nan))
    _, skipped = update(state, bad)
    assert (int(skipped.skipped), float(skipped.correct_sum)) == (1, float(sums[0].correct_sum))


def small_state() -> tuple[TrainState, Any]:
    config = replace(CONFIG, optim=replace(CONFIG.optim, ema_decay=0.9, warmup_steps=0))
    numbers, update = numbers_of(config), jax.jit(make_update(UpdateConfig.of(config)))
    params = {"kernel": jnp.array([[1.0, -2.0]]), "bias": jnp.array([3.0])}
    return init_state(params, config.optim), lambda state, sums: update(state, numbers, sums)


def sums_of(kernel: list[float], bias: float, *, loss: float = 6.0, weight: float = 2.0) -> Sums:
    gradients = {"kernel": jnp.array([kernel]), "bias": jnp.array([bias])}
    return Sums(gradients, *map(jnp.float32, (loss, weight, 0, 0, 0)))


GOOD = sums_of([0.2, -0.4], 0.6)
BAD = {
    "NaN in a gradient": sums_of([0.2, np.nan], 0.6),
    "infinity in a gradient": sums_of([0.2, -0.4], -np.inf),
    "gradient whose norm overflows": sums_of([3e38, 3e38], 0.6),
    "loss that is not finite": sums_of([0.2, -0.4], 0.6, loss=np.inf),
    "batch without tokens": sums_of([0.0, 0.0], 0.0, loss=0.0, weight=0.0),
}


@pytest.mark.parametrize(("clip", "scale"), [(0.25, 0.25 / 0.5), (1.0, 1.0), (0.0, 1.0)])
def test_the_mean_gradient_is_clipped_to_its_norm(clip, scale):
    """Seen through Adam with betas 0, which divides by |g| + epsilon."""
    fields = {"optimizer": "adam", "b1": 0.0, "b2": 0.0, "epsilon": 1.0, "clip_norm": clip, "ema_decay": 0.0}
    config = change(CONFIG, optim=fields | {"warmup_steps": 0, "schedule": "constant", "learning_rate": 0.5})
    state = init_state({"kernel": jnp.zeros((1, 2)), "bias": jnp.zeros(1)}, config.optim)
    sums = sums_of([0.6, 0.0], 0.8, weight=2.0)
    after, metrics = make_update(UpdateConfig.of(config))(state, numbers_of(config), sums)
    assert_close(metrics.gradient_norm, 0.5)  # before clipping, of the mean over two tokens
    assert after.ema_params is None and after.inference_params is after.params
    wanted = {"kernel": np.array([[0.3, 0.0]]) * scale, "bias": np.array([0.4]) * scale}
    assert_close(after.params, jax.tree.map(lambda g: -0.5 * g / (g + 1), wanted))


@pytest.mark.parametrize("case", BAD)
def test_a_bad_gradient_leaves_everything_but_the_counters(case):
    state, update = small_state()
    for _ in range(3):  # so that optimizer state and average are not at their beginnings
        state, _ = update(state, GOOD)
    assert differs(state.params, state.ema_params)
    after, metrics = update(state, BAD[case])
    for name in ("params", "opt_state", "ema_params"):
        assert_same_bits(getattr(after, name), getattr(state, name))
    assert (int(after.step), int(after.skipped), int(after.skipped_in_a_row)) == (4, 1, 1)
    assert (int(metrics.skipped), int(metrics.skipped_in_a_row)) == (1, 1)


def test_an_accelerator_selects_elements_instead_of_a_branch():
    """A GPU's host would wait for the condition: the program has none, and still donates all of the state.

    Selected or not, the results are those of the branch, bit for bit.
    """
    state, branching = small_state()
    config = change(CONFIG, optim={"ema_decay": 0.9, "warmup_steps": 0})
    numbers = numbers_of(config)
    programs = {
        platform: jax.jit(make_update(UpdateConfig.of(config), platform=platform), donate_argnums=0)
        for platform in ("cpu", "gpu", "tpu")
    }
    compiled = {name: program.lower(state, numbers, GOOD).compile() for name, program in programs.items()}
    texts = {name: program.as_text() for name, program in compiled.items()}
    assert [name for name, text in texts.items() if " conditional(" in text] == ["cpu"]
    leaves = len(jax.tree.leaves(state))
    for text in texts.values():
        donated = re.search(r"input_output_alias=\{(.*?)\}, entry", text)[1]
        assert donated.count("-alias") == leaves
    for sums in (GOOD, *BAD.values(), GOOD):
        expected = branching(state, sums)
        assert_same_bits(compiled["gpu"](jax.tree.map(jnp.copy, state), numbers, sums), expected)
        state = expected[0]


# A little more than was measured (602 with JAX 0.12; 145, 69, 43): whoever lowers a number lowers its bound.
MOST = {"cpu": {"kernels": 660}, "gpu": {"reduce": 152, "dot_general": 72, "select": 45}}


@pytest.mark.parametrize("platform", MOST)
def test_an_update_has_few_kernels(platform):
    """What a compiled update takes on a CPU, and what one for a GPU sums, multiplies and selects."""
    options = {"dtype": "bfloat16" if platform == "gpu" else "float32", "dropout_rate": 0.1}
    config = change(CONFIG, model=options)
    model = make_model(config.model, source_size=V, target_size=V, platform=platform)
    gradient_step = make_gradient_step(model, UpdateConfig.of(config))
    update = make_update(UpdateConfig.of(config), platform=platform)

    def step(state: TrainState, numbers: Any, batch: Batch) -> Any:
        return update(state, numbers, gradient_step(state.params, numbers, state.step, batch))

    inputs = initial_state(model, config.optim), numbers_of(config), random_batch([0, 1])
    lowered = jax.jit(step).trace(*inputs).lower(lowering_platforms=(platform.replace("gpu", "cuda"),))
    if platform == "gpu":
        counts = {name: lowered.as_text().count(f"stablehlo.{name}") for name in MOST[platform]}
    else:
        text = lowered.compile().as_text()
        found = re.findall(
            r"^ +(?:ROOT )?%?\S+ = (?:\(.*?\)|\S+) ([\w-]+)\(", text[text.index("\nENTRY") :], re.M
        )
        no_kernels = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast")
        counts = {"kernels": sum(name not in no_kernels for name in found)}
    assert all(0 < count <= MOST[platform][name] for name, count in counts.items()), counts


def test_bad_updates_are_counted_and_training_recovers():
    state, update = small_state()
    counts = []
    not_number, infinite = BAD["NaN in a gradient"], BAD["infinity in a gradient"]
    for sums in (GOOD, not_number, infinite, GOOD, not_number):
        before = state
        state, _ = update(state, sums)
        counts.append((int(state.step), int(state.skipped), int(state.skipped_in_a_row)))
        assert differs(before.params, state.params) is (sums is GOOD)
    assert counts == [(1, 0, 0), (2, 1, 1), (3, 2, 2), (4, 2, 0), (5, 3, 1)]


def test_the_moving_average_by_hand():
    """Decay of update n = 0, 1, 2, ... is the smaller of 0.9 and (1 + n) / (10 + n)."""
    state, update = small_state()
    average = np.float64(state.params["bias"][0])
    assert float(state.ema_params["bias"][0]) == average
    for number in range(5):
        state, _ = update(state, GOOD)
        decay = min(0.9, (1 + number) / (10 + number))
        average = decay * average + (1 - decay) * np.float64(state.params["bias"][0])
        np.testing.assert_allclose(state.ema_params["bias"][0], average, rtol=1e-6)
        assert state.inference_params is state.ema_params
    late = replace(state, step=jnp.int32(10_000))  # where the config's own decay is the smaller
    after, _ = update(late, GOOD)
    expected = 0.9 * np.float64(late.ema_params["bias"][0]) + 0.1 * np.float64(after.params["bias"][0])
    np.testing.assert_allclose(after.ema_params["bias"][0], expected, rtol=1e-6)


def test_evaluation_is_plain_cross_entropy_without_dropout():
    """With the loss in chunks as well, and then no array has the size of all logits."""
    model = make_model(DROPOUT.model, source_size=V, target_size=V)
    params = compiled(DROPOUT).state.params
    batch = random_batch([0, 1, 2, -1])
    logits = forward(SMALL.model)(params, batch)
    hits = (np.asarray(logits).argmax(-1) == batch.target_out) & batch.target_mask
    for chunk_tokens, whole in ((0, True), (8, False)):
        step = make_evaluation_step(model, TrainConfig(loss_chunk_tokens=chunk_tokens))
        scores = jax.jit(step)(params, batch)
        assert_close(scores["loss"], smoothed_cross_entropy(logits, batch.target_out, batch.target_mask, 0.0))
        assert [float(x) for x in scores["accuracy"]] == [hits.sum(), batch.target_mask.sum()]
        program = str(jax.make_jaxpr(step)(params, batch))
        assert (f"f32[4,6,{V}]" in program) == whole and f",{V}]" in program
