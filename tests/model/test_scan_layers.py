"""Stacked layers run as a loop: the same function as layers one by one, and the same runs."""

import dataclasses
import functools
import json
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_experiment import change, random_params, small_model

from flaxformer_mt.commands.show import count_parameters
from flaxformer_mt.config import Config, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from flaxformer_mt.config.files import load_config, read_config
from flaxformer_mt.evaluation.evaluate import evaluate_run
from flaxformer_mt.evaluation.plots import AttentionMaps, attention_maps
from flaxformer_mt.model import init_params, make_model
from flaxformer_mt.model.scanned_layers import STACKED, stack_layers, unstack_layers
from flaxformer_mt.parallel import make_parallel
from flaxformer_mt.parameter_trees import flatten_tree, nest_leaves
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.runs.load_run import load_trained
from flaxformer_mt.shapes import Batch
from flaxformer_mt.training.checkpoint_trees import _name_trees, load_state, to_trees
from flaxformer_mt.training.loop import fit
from flaxformer_mt.training.state import choose_scan, init_state

V = 11
TINY = small_model(1, 8, 2, 10, num_decoder_layers=2, max_positions=16)
MODELS = {
    "pre": TINY,
    "post": dataclasses.replace(
        TINY, num_encoder_layers=2, num_decoder_layers=1, norm_position="post", tying="none"
    ),
    "packed": dataclasses.replace(TINY, positions="rotary", norm="rms", activation="swiglu"),
    "recurrent, packed": dataclasses.replace(TINY, decoder_self_attention="ssru"),
    "decoder_only": dataclasses.replace(TINY, architecture="decoder_only", positions="learned"),
}


def is_stacked(params: Any) -> bool:
    return isinstance(params, dict) and (STACKED in params or any(map(is_stacked, params.values())))


def make_tiny(config: ModelConfig, **changes: Any) -> Any:
    return make_model(dataclasses.replace(config, **changes), source_size=V, target_size=V)


@functools.cache
def params_of(name: str) -> Any:
    """Parameters away from zeros and ones, a tree for each layer."""
    return random_params(make_tiny(MODELS[name]), scale=0.25)


def make_batch(packed: bool) -> Batch:
    """Two rows: of one pair and padding each, or of two pairs and padding."""
    random = np.random.default_rng(0)
    segments = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 2, 2, 2, 2]])
    positions = np.array([[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]])
    source, target_in, target_out = random.integers(3, V, (3, 2, 6))
    batch = Batch(source, target_in, target_out, segments > 0, segments > 0)
    return batch._replace(
        **{f"{side}_segments": segments for side in ("source", "target") if packed},
        **{f"{side}_positions": positions for side in ("source", "target") if packed},
    )


# For each model, the values of model.remat that its loop over layers is tested with.
REMAT = {
    "pre": ["full"],
    "post": ["dots"],
    "packed": ["none"],
    "recurrent, packed": ["full"],
    "decoder_only": ["none", "dots"],
}


@functools.cache
def compute(name: str) -> dict[str, tuple[np.ndarray, Any]]:
    """Logits, and gradients in the layout of single layers, from the same parameters.

    "single": of layers one by one; other keys are those of `REMAT`, of a loop over layers.
    """
    models = {"single": make_tiny(MODELS[name])}
    models |= {remat: make_tiny(MODELS[name], scan_layers=True, remat=remat) for remat in REMAT[name]}

    @jax.jit
    def run(single: Any, stacked: Any, batch: Batch) -> Any:
        def loss(params: Any, model: Any) -> Any:
            logits = model.apply({"params": params}, batch, deterministic=True)
            return (jnp.sin(logits) * batch.target_mask[..., None].astype(jnp.float32)).sum(), logits

        differentiate = jax.value_and_grad(loss, has_aux=True)
        return {
            kind: differentiate(single if kind == "single" else stacked, model)
            for kind, model in models.items()
        }

    params = params_of(name)
    found = jax.device_get(run(params, stack_layers(params), make_batch(packed=name == "packed")))
    return {kind: (logits, unstack_layers(gradients)) for kind, ((_, logits), gradients) in found.items()}


# ---- the layouts ----
def test_the_layouts_by_hand():
    single = {
        "encoder": {"layers_0": {"scale": np.array([1, 2])}, "layers_1": {"scale": np.array([3, 4])}},
        "output_bias": np.array([5]),
    }
    stacked = stack_layers(single)
    assert list(stacked) == ["encoder", "output_bias"] and list(stacked["encoder"]) == ["layers"]
    assert stacked["encoder"]["layers"]["scale"].tolist() == [[1, 2], [3, 4]]
    assert isinstance(stacked["encoder"]["layers"]["scale"], np.ndarray)
    assert is_stacked(stacked) and not is_stacked(single)
    # More than ten keep their order.
    single = {f"layers_{number}": {"x": np.array(number)} for number in reversed(range(12))}
    assert stack_layers(single)["layers"]["x"].tolist() == list(range(12))


@pytest.mark.usefixtures("strict_dtypes")
def test_each_way_undoes_the_other():
    single = {name: params_of(name) for name in MODELS}
    again = unstack_layers(stack_layers(single))
    assert jax.tree.structure(again) == jax.tree.structure(single)
    assert jax.tree.all(jax.tree.map(np.array_equal, again, single))
    traced = jax.jit(lambda params: unstack_layers(stack_layers(params)))(single)
    assert jax.tree.structure(traced) == jax.tree.structure(single)
    assert jax.tree.all(jax.tree.map(np.array_equal, traced, single))


def test_trees_that_are_no_stack_are_refused():
    with pytest.raises(ValueError, match=r"numbered 0 to 1: \[0, 2\]"):
        stack_layers({"layers_0": {"x": np.zeros(1)}, "layers_2": {"x": np.zeros(1)}})
    with pytest.raises(ValueError, match="same leading axis"):
        unstack_layers({"layers": {"x": np.zeros(2), "y": np.zeros(3)}})


# ---- the network ----
def test_parameters_start_as_the_same_numbers():
    single = jax.device_get(init_params(make_tiny(TINY, remat="full"), jax.random.key(3)))
    model = make_tiny(TINY, scan_layers=True)
    stacked = jax.device_get(init_params(model, jax.random.key(3)))
    assert is_stacked(stacked)
    shapes = jax.eval_shape(functools.partial(init_params, model), jax.random.key(3))
    assert jax.tree.map(jnp.shape, stacked) == jax.tree.map(lambda leaf: leaf.shape, shapes)
    assert jax.tree.structure(unstack_layers(stacked)) == jax.tree.structure(single)
    # One program rounds the product of two factors where another has two.
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=5e-7, atol=0), unstack_layers(stacked), single
    )
    assert count_parameters(stacked) == count_parameters(single)


@pytest.mark.usefixtures("strict_dtypes")
@pytest.mark.parametrize(("name", "remat"), [(name, remat) for name in MODELS for remat in REMAT[name]])
def test_a_loop_over_layers_is_the_same_function(name, remat):
    (logits, gradients), (expected_logits, expected) = compute(name)[remat], compute(name)["single"]
    np.testing.assert_allclose(logits, expected_logits, rtol=0, atol=1e-6 * np.abs(expected_logits).max())
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    assert jax.tree.structure(gradients) == jax.tree.structure(expected)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6 * largest), gradients, expected
    )


@pytest.mark.usefixtures("strict_dtypes")
def test_each_layer_drops_by_numbers_of_its_own():
    """Blocks that add 1 to a stream of zeros, dropped at a half: two of three is a sum that must occur."""
    model = make_tiny(
        MODELS["decoder_only"],
        scan_layers=True,
        num_decoder_layers=3,
        dropout_rate=0.5,
        embedding_dropout_rate=0.0,
        ffn_dropout_rate=0.0,
        final_norm=False,
    )
    shapes = jax.eval_shape(functools.partial(init_params, model), jax.random.key(0))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    params["decoder"]["layers"]["feedforward"]["output"]["bias"] += 1

    @jax.jit
    def run(params: Any, batch: Batch) -> jax.Array:
        rngs = {"dropout": jax.random.key(0)}
        return model.apply({"params": params}, batch, deterministic=False, method="hidden", rngs=rngs)

    values, counts = np.unique(run(params, make_batch(packed=False)), return_counts=True)
    np.testing.assert_allclose(values, [0, 2, 4, 6])
    # 96 sums of three coins: by chance each of the inner ones is below 12 once in a million.
    assert counts[1] >= 12 and counts[2] >= 12


@pytest.mark.usefixtures("strict_dtypes")
def test_attention_maps_are_those_of_each_layer():
    @jax.jit
    def run(single: Any, stacked: Any, batch: Batch) -> tuple[AttentionMaps, AttentionMaps]:
        of_single = attention_maps(make_tiny(TINY), single, batch)
        return of_single, attention_maps(make_tiny(TINY, scan_layers=True), stacked, batch)

    params = params_of("pre")
    expected, found = jax.device_get(run(params, stack_layers(params), make_batch(packed=False)))
    assert [len(maps) for maps in found] == [1, 2, 2]
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)


def test_decoding_says_which_model_it_wants():
    batch = make_batch(packed=False)
    with pytest.raises(ValueError, match="make the model with scan_layers=False"):
        make_tiny(TINY, scan_layers=True).apply(
            {"params": stack_layers(params_of("pre"))},
            batch.source,
            batch.source_mask,
            1,
            4,
            method="start_decoding",
        )


# ---- runs ----
@pytest.fixture(scope="module")
def base(tiny_config) -> Config:
    return change(
        tiny_config,
        model={"num_decoder_layers": 2, "scan_layers": True, "dropout_rate": 0.0, "ffn_dropout_rate": 0.1},
        optim={"schedule": "constant", "learning_rate": 1e-7, "warmup_steps": 0},
        train={"steps": 2, "evaluate_every": 2, "checkpoint_every": 1, "log_accuracy": False},
        search={"method": "greedy", "beam_size": 1, "max_length_offset": 2},
    )


@pytest.fixture(scope="module")
def run(base, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "scanned"
    fit(base, run_dir)
    return run_dir


def test_a_run_is_stored_and_read_as_single_layers(base, run):
    assert read_config(run / "config.json") == base
    stored, _ = Checkpoints(run).restore_params(2)
    assert not is_stacked(stored)
    trained = load_trained(run, checkpoint="2", warn=print)
    assert not trained.config.model.scan_layers
    assert jax.tree.all(jax.tree.map(np.array_equal, trained.params, stored))
    Checkpoints(run).average(2)
    assert not is_stacked(load_trained(run, checkpoint="average", warn=print).params)
    # Translated from stacked parameters while it was trained, and from single layers now.
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    assert evaluate_run(run)["chrf"] == report["test"]["chrf"] > 0


# ---- checkpoints ----
@pytest.mark.parametrize(
    "optim", [{}, {"optimizer": "adafactor"}, {"freeze": ("encoder",), "ema_decay": 0.9}], ids=str
)
def test_a_state_moves_between_stacked_and_single_layers(optim, tmp_path):
    """Bit for bit, the optimizer's state included, from what this version and what earlier versions wrote."""
    config = OptimConfig(**optim)
    parallel = make_parallel(Config(parallel=ParallelConfig(data=1)))

    def make_state(scan: bool) -> Any:
        return init_state(init_params(make_tiny(TINY, scan_layers=scan), jax.random.key(0)), config)

    def draw(path: Any, leaf: Any) -> np.ndarray:
        number = zlib.crc32(jax.tree_util.keystr(path).encode())
        return np.random.default_rng(number).integers(0, 99, leaf.shape).astype(leaf.dtype)

    single, stacked = (jax.eval_shape(functools.partial(make_state, scan)) for scan in (False, True))
    random = jax.tree_util.tree_map_with_path(draw, stacked)
    earlier, now = Checkpoints(tmp_path / "earlier"), Checkpoints(tmp_path / "now")
    trees = {name: nest_leaves(flatten_tree(tree)) for name, tree in _name_trees(random).items()}
    for checkpoints, written in ((earlier, trees), (now, to_trees(random))):
        checkpoints.save(7, written, {"step": 7})
        checkpoints.wait()
    assert any("/layers/" in path for path in earlier.read_specs(7)["opt_state"])
    assert not any("/layers/" in path for path in now.read_specs(7)["opt_state"])
    apart = {}
    for checkpoints in (earlier, now):
        for scan, wanted in enumerate((single, stacked)):
            found, _ = load_state(checkpoints, parallel, functools.partial(make_state, bool(scan)))
            assert jax.tree.structure(found) == jax.tree.structure(wanted)
            assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, wanted)
            apart[checkpoints, wanted is stacked] = found
            if wanted is stacked:
                jax.tree.map(np.testing.assert_array_equal, found, random)
    jax.tree.map(np.testing.assert_array_equal, apart[earlier, False], apart[now, False])


def test_auto_stacks_on_gpus_and_not_for_optimizers_that_see_whole_arrays():
    for platform, depth, optimizer, steps, expected in [
        ("gpu", 3, "adam", 100, True),
        ("cuda", 6, "adamw", 100, True),
        ("gpu", 2, "adam", 100, False),
        ("gpu", 6, "muon", 100, False),
        ("cpu", 6, "adam", 100, False),
        ("tpu", 6, "adam", 100, False),
        ("gpu", 6, "adam", 10**9, False),
    ]:
        model = dataclasses.replace(TINY, num_encoder_layers=depth, num_decoder_layers=6, scan_layers="auto")
        config = Config(model=model, optim=OptimConfig(optimizer=optimizer), train=TrainConfig(steps=steps))
        chosen, reason = choose_scan(config, platform=platform, device_kind="NVIDIA H100 80GB HBM3", cores=2)
        assert ("not scanned" not in reason) is expected
        made = make_model(chosen, source_size=11, target_size=11, platform=platform)
        assert made.config.scan_layers is expected, (platform, depth, optimizer)


def test_the_papers_models_are_scanned_on_gpus_in_short_trials_alone():
    """Transformer-big on an H100: 43 s are saved on two cores, and 29 ms lost an update, so 1,500 updates."""
    big = load_config("configs/wmt14_en_de_big.py").replace(
        {"data.batching": "pack", "data.max_source_length": 100, "data.max_target_length": 100}
    )
    h100 = {"platform": "gpu", "device_kind": "NVIDIA H100 80GB HBM3"}

    def scans(steps: int, **options: Any) -> bool:
        config = big.replace({"train.steps": steps, "data.batch_tokens": 32_768})
        return choose_scan(config, **(h100 | {"cores": 2} | options))[0].scan_layers is True

    assert scans(1_000) and not scans(3_000)
    assert scans(8_000, devices=8) and not scans(30_000, devices=8)
    assert not scans(1_000, cores=16)
    assert not scans(300_000, device_kind="a GPU of next year")
