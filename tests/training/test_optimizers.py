"""Schedules against hand values, Adam against numpy, and which parameters each rule touches."""

import functools
import math
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from tiny_experiment import small_model

from flaxformer_mt import processor
from flaxformer_mt.config import Config, ModelConfig, OptimConfig, TrainConfig
from flaxformer_mt.model import init_params, make_model
from flaxformer_mt.training.optimizers import (
    learning_rate,
    make_hyperparameters,
    make_optimizer,
    warmup_updates,
)
from flaxformer_mt.training.setup_messages import describe_doubts, describe_long_warmup

CONFIG = OptimConfig(learning_rate=0.5, warmup_steps=4, clip_norm=0.0)


def rates(config, steps, *, model_dim=64, total_steps=12):
    model, train = ModelConfig(model_dim=model_dim), TrainConfig(steps=total_steps)
    numbers = make_hyperparameters(Config(model=model, optim=config, train=train))
    return [float(learning_rate(numbers, step)) for step in steps]


def test_noam_is_equation_3_of_the_paper():
    """lrate = D^-0.5 * min(n^-0.5, n * warmup^-1.5), where the first update is n = 1."""
    config = OptimConfig(schedule="noam", learning_rate=2.0, warmup_steps=4000)
    numbers = [1, 100, 3999, 4000, 4001, 100_000]
    expected = [2 * 512**-0.5 * min(n**-0.5, n * 4000**-1.5) for n in numbers]
    np.testing.assert_allclose(rates(config, [n - 1 for n in numbers], model_dim=512), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # updates 1, 2, 4 (the end of warm-up), 6, 8, 12 (the end), 16 (beyond)
        ("inverse_sqrt", [0.125, 0.25, 0.5, 0.5 * 1.5**-0.5, 0.5 * 0.5**0.5, 0.5 * 3**-0.5, 0.25]),
        ("constant", [0.125, 0.25, 0.5, 0.5, 0.5, 0.5, 0.5]),
        ("linear", [0.125, 0.25, 0.5, 0.375, 0.25, 0, 0]),
        ("cosine", [0.125, 0.25, 0.5, 0.25 * (1 + math.cos(math.pi / 4)), 0.25, 0, 0]),
    ],
)
def test_schedules_by_hand(schedule, expected):
    """Peak 0.5 after 4 updates; linear and cosine end at 0 after 12, and are halfway at 8."""
    config = replace(CONFIG, schedule=schedule)
    np.testing.assert_allclose(rates(config, [0, 1, 3, 5, 7, 11, 15]), expected, rtol=1e-5, atol=1e-7)
    at_once = replace(config, warmup_steps=0)  # then the first update is at the peak
    assert 0.499 < rates(at_once, [0], total_steps=1000)[0] <= 0.5


def test_a_schedule_that_ends_keeps_half_of_a_short_training_to_fall_in():
    for schedule in ("linear", "cosine"):
        config = replace(CONFIG, schedule=schedule, warmup_steps=300)
        assert [warmup_updates(config, total_steps=steps) for steps in (1, 20, 300, 301)] == [0, 10, 150, 300]
        rising_and_falling = rates(config, [0, 9, 14, 19], total_steps=20)
        np.testing.assert_allclose(rising_and_falling, [0.05, 0.5, 0.25, 0.0], atol=1e-6)
    for schedule in ("noam", "inverse_sqrt", "constant"):  # they do not depend on the number of steps
        config = replace(CONFIG, schedule=schedule, warmup_steps=300)
        assert warmup_updates(config, total_steps=20) == 300


def test_a_warmup_that_is_shortened_or_beyond_the_end_is_said():
    config = Config(optim=replace(CONFIG, schedule="linear"), train=TrainConfig(steps=4))
    (warning,) = describe_doubts(config, "cpu")
    assert warning.startswith(
        "optim.warmup_steps 4 is not below train.steps 4, at which schedule linear ends"
    )
    assert warning.endswith("shortened to 2 steps")
    assert not list(describe_doubts(replace(config, train=TrainConfig(steps=5)), "cpu"))
    for schedule in ("noam", "inverse_sqrt", "constant"):
        # The rate at the end is the one that the schedule computes there, as a share of its peak.
        optim = replace(CONFIG, schedule=schedule, warmup_steps=900)
        last, peak = rates(optim, [299, 899], total_steps=900)
        assert round(last / peak, 2) == 0.33
        (line,) = describe_long_warmup(Config(optim=optim, train=TrainConfig(steps=300)))
        assert line.endswith("rises to the end, where it is 33% of the highest")
        assert not list(describe_long_warmup(Config(optim=optim, train=TrainConfig(steps=900))))


def test_bfloat16_on_a_processor_that_is_no_faster_in_it_is_said(monkeypatch):
    facts = {"vendor_id": "GenuineIntel", "flags": "avx512_bf16"}
    monkeypatch.setattr(processor, "_read_cpuinfo", lambda: facts)
    config = Config(model=ModelConfig(dtype="bfloat16"))
    (warning,) = describe_doubts(config, "cpu")
    assert "model.dtype bfloat16 is no faster than float32 on this CPU, since avx512_bf16 of Intel" in warning
    assert not [*describe_doubts(config, "gpu"), *describe_doubts(Config(), "cpu")]
    facts["flags"] = "avx512_bf16 amx_bf16"
    assert not list(describe_doubts(config, "cpu"))


@functools.cache
def compiled(config: OptimConfig) -> tuple[Any, Any]:
    """The initial state of an optimizer, and its update at a constant rate of 0.5."""
    optimizer = make_optimizer(config, optax.constant_schedule(0.5))

    @jax.jit
    def step(gradient: dict, state: optax.OptState, params: dict) -> tuple[dict, optax.OptState]:
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(optimizer.init), step


def run(config: OptimConfig, params: dict, gradients: list[dict]) -> list[dict]:
    """The parameters after each update at a constant rate of 0.5."""
    init, step = compiled(config)
    state, history = init(params), []
    for gradient in gradients:
        params, state = step(gradient, state, params)
        history.append(params)
    return history


def random_tree(seed: int) -> dict:
    generator = np.random.default_rng(seed)
    return {
        "dense": {
            "kernel": generator.normal(size=(3, 4)).astype(np.float32),
            "bias": generator.normal(size=4).astype(np.float32),
        }
    }


def test_adam_is_its_definition():
    """Algorithm 1 of Kingma and Ba 2015 for three updates, in numpy."""
    config = replace(CONFIG, optimizer="adam", b1=0.8, b2=0.95, epsilon=1e-3)
    gradients = [random_tree(seed) for seed in (1, 2, 3)]
    history = run(config, random_tree(0), gradients)
    for leaf in ("kernel", "bias"):
        value = random_tree(0)["dense"][leaf].astype(np.float64)
        first = second = np.zeros_like(value)
        for number, gradient in enumerate(gradients, start=1):
            g = gradient["dense"][leaf]
            first = 0.8 * first + 0.2 * g
            second = 0.95 * second + 0.05 * g**2
            value = value - 0.5 * (first / (1 - 0.8**number)) / (np.sqrt(second / (1 - 0.95**number)) + 1e-3)
            np.testing.assert_allclose(history[number - 1]["dense"][leaf], value, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def params() -> dict:
    """The real tree of a small model, all entries 1, so that decay shows everywhere."""
    fields = {"tying": "none", "positions": "learned", "max_positions": 6, "output_bias": True}
    config = small_model(1, 8, 2, 10, key_dim=3, **fields)
    model = make_model(config, source_size=9, target_size=11)
    shapes = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    return jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes)


def leaf_names(tree: dict) -> list[str]:
    return [path[-1].key for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon"])
def test_weight_decay_shrinks_matrices_and_leaves_biases_and_scales_alone(optimizer, params):
    """Without a gradient, decay is all that moves: by learning rate x decay = 0.5 x 0.1."""
    config = replace(CONFIG, optimizer=optimizer, weight_decay=0.1)
    after = run(config, params, [jax.tree.map(np.zeros_like, params)])[0]
    seen = set()
    for name, leaf in zip(leaf_names(after), jax.tree.leaves(after), strict=True):
        expected = 0.95 if name in ("kernel", "embedding", "output_kernel") else 1.0
        np.testing.assert_allclose(leaf, np.full(leaf.shape, expected), rtol=1e-5, err_msg=name)
        seen.add(name)
    assert seen == {"kernel", "embedding", "output_kernel", "bias", "scale", "output_bias"}


def test_muon_makes_updates_orthogonal_as_matrices(params):
    """The update of a query projection [D, H, K] is, as a D x HK matrix, a multiple of an orthogonal one."""
    config = replace(CONFIG, optimizer="muon", weight_decay=0.1)
    gradients = jax.tree.map(
        lambda leaf: np.random.default_rng(leaf.size).normal(size=leaf.shape).astype(np.float32), params
    )
    after = run(config, params, [gradients])[0]
    attention, before = after["encoder"]["layers_0"]["self_attention"], 0.95  # decayed
    for name, rows in {"query": 8, "output": 8}.items():
        update = np.asarray(attention[name]["kernel"]) - before
        matrix = update.reshape(rows, -1) if name == "query" else update.reshape(-1, rows)
        singular = np.linalg.svd(matrix, compute_uv=False)
        # five Newton-Schulz iterations end within about 0.7 and 1.2 of the common value
        assert singular.max() / singular.min() < 2, name
        raw = gradients["encoder"]["layers_0"]["self_attention"][name]["kernel"].reshape(matrix.shape)
        assert np.linalg.svd(raw, compute_uv=False).max() / np.linalg.svd(raw, compute_uv=False).min() > 2


def test_muon_updates_convolutions_as_dense_layers():
    """A kernel [1, input, output] is the matrix that it is in a dense layer."""
    generator = np.random.default_rng(3)
    shapes = {"input": (8, 10), "gate": (8, 10), "output": (10, 8)}
    kernels, gradients = (
        {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(2)
    )

    def update(*axes):
        trees = [
            {"layers_0": {"feedforward": {n: {"kernel": x.reshape(*axes, *x.shape)} for n, x in one.items()}}}
            for one in (kernels, gradients)
        ]
        after = run(replace(CONFIG, optimizer="muon"), trees[0], trees[1:])[0]
        return {name: np.asarray(after["layers_0"]["feedforward"][name]["kernel"]) for name in shapes}

    dense, convolution = update(), update(1)
    for name in shapes:
        np.testing.assert_allclose(convolution[name][0], dense[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "rate"),
    [("adam", 0.05), ("adamw", 0.05), ("adafactor", 0.05), ("lion", 0.02), ("muon", 0.05)],
)
def test_every_optimizer_fits_a_line(optimizer, rate):
    generator = np.random.default_rng(7)
    inputs = generator.normal(size=(64, 3)).astype(np.float32)
    wanted = inputs @ generator.normal(size=(3, 4)).astype(np.float32) + 0.5

    def loss(params: dict) -> jax.Array:
        return ((inputs @ params["dense"]["kernel"] + params["dense"]["bias"] - wanted) ** 2).mean()

    update_rule = make_optimizer(replace(CONFIG, optimizer=optimizer), optax.constant_schedule(rate))
    params = jax.tree.map(lambda leaf: 0.1 * leaf, random_tree(0))
    state = jax.jit(update_rule.init)(params)

    @jax.jit
    def run_200(params: dict, state: optax.OptState) -> dict:
        def step(carry: tuple, _: None) -> tuple:
            params, state = carry
            updates, state = update_rule.update(jax.grad(loss)(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, state), None, length=200)[0][0]

    assert float(loss(run_200(params, state))) < 0.05 * float(loss(params))
