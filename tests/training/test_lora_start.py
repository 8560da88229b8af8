"""Factors that start along the gradient: against singular vectors of a gradient that is computed apart."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_experiment import change

from flaxformer_mt.config.files import read_config
from flaxformer_mt.data.loader import train_batches
from flaxformer_mt.data.prepare import prepare
from flaxformer_mt.errors import UserError
from flaxformer_mt.model import make_model
from flaxformer_mt.model.lora import FACTORS, merge_factors
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.runs.load_run import load_named
from flaxformer_mt.training.loop import fit
from flaxformer_mt.training.lora_start import BATCHES, find_directions
from flaxformer_mt.trees import flatten_tree, nest_leaves

RANK, TABLE_RANK = 3, 5
QUERY = "decoder/layers_0/self_attention/query/kernel"
TABLE = "shared_embedding/embedding"


def projector(directions):
    """The projection on the space of columns, whatever their signs and lengths."""
    basis = np.linalg.qr(np.asarray(directions, np.float64))[0]
    return basis @ basis.T


def leading(matrix, rank):
    return np.linalg.svd(np.asarray(matrix, np.float64))[0][:, :rank]


@pytest.mark.parametrize("shape", [(7, 2, 5), (30, 2, 5)])
def test_directions_are_leading_singular_vectors(shape):
    gradient = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    inputs, flat = shape[0], gradient.reshape(shape[0], -1)
    shapes = {f"{QUERY}/down": (inputs, RANK), f"{QUERY}/up": (RANK, flat.shape[1])}
    found = find_directions({QUERY: gradient}, shapes)
    down, up = (found[f"{FACTORS}/{QUERY}/{name}"] for name in ("down", "up"))
    assert down.shape == (inputs, RANK) and not up.any() and up.shape == (RANK, flat.shape[1])
    np.testing.assert_allclose(projector(down), projector(leading(flat, RANK)), atol=1e-5)
    np.testing.assert_allclose(down.T @ down, np.eye(RANK) * inputs / RANK, atol=1e-5)
    # Layers of a stack have what each of them has alone.
    both = np.stack([gradient, gradient[::-1]])
    stacked = QUERY.replace("layers_0", "layers")
    shapes = {f"{stacked}/{name}": (2, *found[f"{FACTORS}/{QUERY}/{name}"].shape) for name in ("down", "up")}
    of_stack = find_directions({stacked: both}, shapes)[f"{FACTORS}/{stacked}/down"]
    np.testing.assert_array_equal(of_stack[0], down)
    np.testing.assert_allclose(projector(of_stack[1]), projector(leading(flat[::-1], RANK)), atol=1e-5)


def test_tokens_get_coordinates_and_share_the_directions():
    gradient = np.random.default_rng(4).normal(size=(40, 16)).astype(np.float32)
    gradient[7:] = 0  # tokens that do not occur
    found = find_directions({TABLE: gradient}, {f"{TABLE}/down": (40, 5), f"{TABLE}/up": (5, 16)})
    down, up = (found[f"{FACTORS}/{TABLE}/{name}"] for name in ("down", "up"))
    assert down.shape == (40, 5) and not down.any()
    np.testing.assert_allclose(projector(up.T), projector(leading(gradient.T, 5)), atol=1e-5)
    np.testing.assert_allclose(up @ up.T, np.eye(5) * 16 / 5, atol=1e-5)
    # A rank beyond that of the gradient: the other directions are any that are orthogonal.
    found = find_directions({TABLE: gradient}, {f"{TABLE}/down": (40, 12), f"{TABLE}/up": (12, 16)})
    up = found[f"{FACTORS}/{TABLE}/up"]
    np.testing.assert_allclose(up @ up.T, np.eye(12) * 16 / 12, atol=1e-5)


def adapted(config, **more):
    """The config of a short training with changes of all matrices, from the gradient."""
    lora = {"rank": RANK, "embedding_rank": TABLE_RANK, "alpha": float(RANK), "initializer": "gradient"}
    lora["targets"] = ("*/kernel", "*/embedding")
    changed = change(
        config,
        optim={"lora": dataclasses.replace(config.optim.lora, **lora), "warmup_steps": 1},
        model={"dropout_rate": 0.0},
        train={"steps": 1, "evaluate_every": 1, "checkpoint_every": 1, "log_accuracy": False},
        data={"test_split": "none"},
    )
    return change(changed, **more) if more else changed


def gradient_of_first_batches(run, config):
    """The gradient of label-smoothed cross-entropy by the base model, without the project's losses."""
    base = load_named(str(run))
    prepared, vocab = prepare(config), base.vocabs.target
    sizes = {"source_size": base.vocabs.source.size, "target_size": vocab.size}
    model = make_model(config.model, **sizes, platform="cpu")
    batches = train_batches(
        prepared.train, config.data, seed=config.seed, pad_id=vocab.pad_id, bos_id=vocab.bos_id
    )

    def loss_of(params, batch):
        log_probs = jax.nn.log_softmax(model.apply({"params": params}, batch, deterministic=True))
        smooth = config.train.label_smoothing
        right = jnp.take_along_axis(log_probs, batch.target_out[..., None], -1)[..., 0]
        loss = -(1 - smooth) * right - smooth * log_probs.mean(-1)
        return jnp.where(batch.target_mask, loss, 0).sum()

    total = None
    gradient = jax.jit(jax.grad(loss_of))
    for _, batch in itertools.islice(batches, BATCHES):
        found = gradient(base.params, batch)
        total = found if total is None else jax.tree.map(np.add, total, found)
    batches.close()
    return flatten_tree(jax.device_get(total)), flatten_tree(jax.device_get(base.params))


def read_params(run, step=1):
    from flaxformer_mt.runs import array_files, atomic_folder

    folder = Checkpoints(run).resolve(step)
    specs = atomic_folder.read_facts(folder)["trees"]["params"]
    return array_files.read_item(folder / "params", specs)


def test_a_training_starts_along_the_gradient_of_its_first_batches(tiny_run, tmp_path):
    """After one update the sides with directions are as they began, since the others were 0 until then."""
    config = adapted(read_config(tiny_run / "config.json"))
    fit(config, tmp_path / "run", init=str(tiny_run))
    gradients, base = gradient_of_first_batches(tiny_run, config)
    stored = read_params(tmp_path / "run")
    seen = 0
    for path in (path for path in gradients if path.endswith(("kernel", "embedding"))):
        down, up = stored[f"{FACTORS}/{path}/down"], stored[f"{FACTORS}/{path}/up"]
        matrix = gradients[path].reshape(len(down), up.shape[1])
        matrix, directions = (matrix.T, up.T) if path == TABLE else (matrix, down)
        rank = TABLE_RANK if path == TABLE else RANK
        assert directions.shape[1] == rank
        np.testing.assert_allclose(
            projector(directions), projector(leading(matrix, rank)), atol=2e-3, err_msg=path
        )
        assert np.any(up) and np.any(down)  # the other side has learned
        np.testing.assert_array_equal(stored[path], base[path])
        seen += 1
    assert seen == 17
    merged = flatten_tree(merge_factors(nest_leaves(stored)))
    # An update of Adam by a rate of 0.02 moves the elements of each matrix by some 0.02, whatever the rank.
    for path in (QUERY, TABLE):
        moved = np.sqrt(np.mean((merged[path] - base[path]) ** 2))
        assert 0.5 * 0.02 < moved < 2 * 0.02, (path, moved)


def test_all_layouts_start_alike(tiny_run, tmp_path):
    """Data and parameters split over devices, and layers that are stacked."""
    config = adapted(read_config(tiny_run / "config.json"))
    fit(config, tmp_path / "one", init=str(tiny_run))
    one = read_params(tmp_path / "one")
    for name, more in (
        ("mesh", {"parallel": {"devices": 4, "backend": "mesh", "data": 2, "fsdp": 2}}),
        ("pmap", {"parallel": {"devices": 2, "backend": "pmap"}}),
        ("stacked", {"model": {"scan_layers": True}}),
    ):
        fit(adapted(read_config(tiny_run / "config.json"), **more), tmp_path / name, init=str(tiny_run))
        other = read_params(tmp_path / name)
        for path in (QUERY, TABLE):
            side = "up" if path == TABLE else "down"
            mine, theirs = one[f"{FACTORS}/{path}/{side}"], other[f"{FACTORS}/{path}/{side}"]
            both = (mine.T, theirs.T) if side == "up" else (mine, theirs)
            np.testing.assert_allclose(*map(projector, both), atol=2e-3, err_msg=f"{name} {path}")


def test_an_interrupted_training_goes_on_from_its_own_factors(tiny_run, tmp_path):
    """Resumed after an update: the directions are not computed again."""
    config = adapted(read_config(tiny_run / "config.json"))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fit(change(config, train={"steps": 2}), whole, init=str(tiny_run))
    fit(config, parts, init=str(tiny_run))
    fit(change(config, train={"steps": 2}), parts)
    for path, leaf in read_params(whole, 2).items():
        np.testing.assert_array_equal(read_params(parts, 2)[path], leaf, err_msg=path)


def test_a_gradient_that_is_not_finite_ends_with_one_line(tiny_run, tmp_path, monkeypatch):
    from flaxformer_mt.training import lora_start

    whole = lora_start._sum_gradients

    def spoiled(*arguments):
        return {path: np.where(path == QUERY, np.nan, leaf) for path, leaf in whole(*arguments).items()}

    monkeypatch.setattr(lora_start, "_sum_gradients", spoiled)
    config = adapted(read_config(tiny_run / "config.json"))
    with pytest.raises(UserError, match=f"not finite for 1 matrices, such as {QUERY}.*initializer=random"):
        fit(config, tmp_path / "run", init=str(tiny_run))
