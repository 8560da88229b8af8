"""Factors that start along the gradient: against singular vectors of a gradient that is computed apart."""

import dataclasses
import itertools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_experiment import change

from flaxformer_mt.config import LoraConfig, ParallelConfig
from flaxformer_mt.data.batch_array import to_array
from flaxformer_mt.data.loader import train_batches
from flaxformer_mt.data.prepare import prepare
from flaxformer_mt.errors import UserError
from flaxformer_mt.model import make_model
from flaxformer_mt.model.lora import FACTORS, merge_factors
from flaxformer_mt.parallel import make_parallel
from flaxformer_mt.runs import array_files, atomic_folder
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.training import lora_start
from flaxformer_mt.training.loop import fit
from flaxformer_mt.training.lora_start import BATCHES, find_directions, start_along_gradient
from flaxformer_mt.training.optimizers import make_optimizer
from flaxformer_mt.training.state import init_state, init_training_params
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


@pytest.fixture(scope="module")
def tiny(tiny_config):
    """The config of a training with changes of all matrices, its vocabularies, and its first batches."""
    lora = LoraConfig(
        rank=RANK,
        embedding_rank=TABLE_RANK,
        alpha=float(RANK),
        targets=("*/kernel", "*/embedding"),
        initializer="gradient",
    )
    config = change(
        tiny_config,
        optim={"lora": lora, "warmup_steps": 1},
        model={"dropout_rate": 0.0},
        data={"test_split": "none"},
    )
    prepared = prepare(config)
    vocab = prepared.vocabs.target
    batches = train_batches(
        prepared.train, config.data, seed=config.seed, pad_id=vocab.pad_id, bos_id=vocab.bos_id
    )
    first = [batch for _, batch in itertools.islice(batches, BATCHES + 3)]
    batches.close()
    prepared.train.close()
    return config, prepared.vocabs, first


def make_network(config, vocabs):
    return make_model(
        config.model, source_size=vocabs.source.size, target_size=vocabs.target.size, platform="cpu"
    )


def start(config, vocabs, batches):
    """The state before and after it has its directions, by path, on the devices of the config."""
    model, parallel = make_network(config, vocabs), make_parallel(config)
    optimizer = make_optimizer(config.optim, lambda step: 0.1)
    before = parallel.init(lambda: init_state(init_training_params(model, config), optimizer, ema=True))
    pad_id, bos_id = vocabs.target.pad_id, vocabs.target.bos_id
    put = (parallel.put(to_array(batch, pad_id=pad_id, bos_id=bos_id)) for batch in batches)
    after = start_along_gradient(before, put, model=model, config=config, parallel=parallel)
    return [flatten_tree(parallel.fetch(tree)) for tree in (before.params, after.params, after.ema_params)]


def gradient_of(config, vocabs, params, batches):
    """The gradient of label-smoothed cross-entropy by path, summed, without the project's losses."""
    model, smoothing = make_network(config, vocabs), config.train.label_smoothing

    def loss_of(params, batch):
        log_probs = jax.nn.log_softmax(model.apply({"params": params}, batch, deterministic=True))
        right = jnp.take_along_axis(log_probs, batch.target_out[..., None], -1)[..., 0]
        loss = -(1 - smoothing) * right - smoothing * log_probs.mean(-1)
        return jnp.where(batch.target_mask, loss, 0).sum()

    gradient = jax.jit(jax.grad(loss_of))
    found = [flatten_tree(jax.device_get(gradient(params, batch))) for batch in batches]
    return {path: np.sum([one[path] for one in found], axis=0) for path in found[0]}


def test_changes_start_along_the_gradient_of_the_first_batches(tiny):
    config, vocabs, batches = tiny
    before, after, average = start(config, vocabs, batches)
    base = {path: leaf for path, leaf in before.items() if not path.startswith(FACTORS)}
    gradients = gradient_of(config, vocabs, nest_leaves(base), batches[:BATCHES])
    matrices = [path for path in gradients if path.endswith(("kernel", "embedding"))]
    assert len(matrices) == 17
    for path in matrices:
        down, up = after[f"{FACTORS}/{path}/down"], after[f"{FACTORS}/{path}/up"]
        matrix, table = gradients[path].reshape(len(down), up.shape[1]), path == TABLE
        matrix, directions, others = (matrix.T, up.T, down) if table else (matrix, down, up)
        rank = TABLE_RANK if table else RANK
        assert directions.shape[1] == rank and not others.any()
        own = projector(leading(matrix, rank))
        np.testing.assert_allclose(projector(directions), own, atol=2e-3, err_msg=path)
    assert before.keys() == after.keys() == average.keys()
    for path, leaf in after.items():
        np.testing.assert_array_equal(average[path], leaf, err_msg=path)
        if not path.endswith(("down", "up")):
            np.testing.assert_array_equal(before[path], leaf, err_msg=path)


def test_all_layouts_start_alike(tiny):
    """Rows and parameters split over devices, and layers that are stacked."""
    config, vocabs, batches = tiny
    one = start(config, vocabs, batches[:3])[1]
    for more in (
        {"parallel": ParallelConfig(devices=4, backend="mesh", data=2, fsdp=2)},
        {"parallel": ParallelConfig(devices=2, backend="pmap")},
        {"model": dataclasses.replace(config.model, scan_layers=True)},
    ):
        other = start(dataclasses.replace(config, **more), vocabs, batches[:3])[1]
        for path in (QUERY, TABLE):
            side, own = ("up" if path == TABLE else "down"), path
            theirs = other.get(f"{FACTORS}/{path}/{side}")
            if theirs is None:
                own = path.replace("layers_0", "layers")
                theirs = other[f"{FACTORS}/{own}/{side}"][0]
            both = one[f"{FACTORS}/{path}/{side}"], theirs
            turned = (leaf.T for leaf in both) if side == "up" else both
            np.testing.assert_allclose(*map(projector, turned), atol=2e-3, err_msg=f"{more} {own}")


def test_a_gradient_that_is_not_finite_is_named(tiny, monkeypatch):
    config, vocabs, batches = tiny
    spoiled = {QUERY: np.full((16, 2, 8), np.nan), TABLE: np.zeros((40, 16))}
    monkeypatch.setattr(lora_start, "_sum_gradients", lambda *arguments: spoiled)
    with pytest.raises(UserError, match=f"not finite for 1 matrices, such as {QUERY}.*initializer=random"):
        start(config, vocabs, batches)


def test_a_training_starts_so_and_goes_on_from_its_own_factors(tiny, tiny_run, tmp_path):
    """Until the first update one side is 0, so the other one is unchanged by it; a resumed run keeps both."""
    config = change(tiny[0], train={"steps": 2, "evaluate_every": 2, "checkpoint_every": 1})
    run = tmp_path / "run"
    fit(config, run, init=str(tiny_run))
    first, second = read_params(run, 1), read_params(run, 2)
    down, up = (first[f"{FACTORS}/{QUERY}/{name}"] for name in ("down", "up"))
    np.testing.assert_allclose(down.T @ down, np.eye(RANK) * len(down) / RANK, atol=1e-5)
    # An update of Adam by a rate of 0.02 moves the elements of each matrix by some 0.02, whatever the rank.
    merged = flatten_tree(merge_factors(nest_leaves(first)))
    for path in (QUERY, TABLE):
        assert 0.01 < np.sqrt(np.mean((merged[path] - first[path]) ** 2)) < 0.04, path
    assert np.any(second[f"{FACTORS}/{QUERY}/down"] != down) and np.any(up)
    shutil.rmtree(run / "checkpoints" / "2")
    (run / "report.json").unlink()
    fit(config, run)
    for path, leaf in read_params(run, 2).items():
        np.testing.assert_array_equal(second[path], leaf, err_msg=path)


def read_params(run, step):
    folder = Checkpoints(run).resolve(step)
    specs = atomic_folder.read_facts(folder)["trees"]["params"]
    return array_files.read_item(folder / "params", specs)
