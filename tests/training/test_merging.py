"""LoRA's changes that are merged into their matrices now and then, and begin anew."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
from tiny_experiment import change, random_params

from flaxformer_mt.commands.main import main
from flaxformer_mt.config import Config, LoraConfig, OptimConfig, TrainConfig
from flaxformer_mt.config.checks import validate
from flaxformer_mt.errors import UserError
from flaxformer_mt.model import make_model
from flaxformer_mt.model.lora import add_factors, merge_factors
from flaxformer_mt.parallel import make_parallel
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.training.frozen import find_targets
from flaxformer_mt.training.merging import make_merging, merges_after
from flaxformer_mt.training.optimizers import make_optimizer, make_schedule
from flaxformer_mt.training.state import init_state
from flaxformer_mt.trees import flatten_tree, unflatten_like

LORA = LoraConfig(
    rank=2,
    targets=("decoder", "*_embedding"),
    also_train=("*/bias",),
    embedding_rank=3,
    tokens=4,
    merge_every=5,
)


def make_state(config: Config):
    """A state in which every number of the factors, moments and averages is another one than at first."""
    model = make_model(config.model, source_size=20, target_size=20)
    optimizer = make_optimizer(config.optim, make_schedule(config.optim, model_dim=16, total_steps=20))
    params = random_params(model)
    lora = config.optim.lora
    params = add_factors(
        params,
        find_targets(params, lora),
        rank=lora.rank,
        embedding_rank=lora.embedding_rank,
        alpha=lora.alpha,
        key=jax.random.key(1),
        tokens={"shared_embedding/embedding": np.array([1, 4, 5, 19])},
    )
    state = init_state(params, optimizer, ema=True)
    generator = np.random.default_rng(3)

    def disturb(path: str, leaf):
        if not np.issubdtype(leaf.dtype, np.floating) or path.endswith("lora/scale"):
            return leaf
        return leaf + np.float32(0.1) * generator.standard_normal(leaf.shape).astype(np.float32)

    state = unflatten_like(state, {path: disturb(path, leaf) for path, leaf in flatten_tree(state).items()})
    return optimizer, dataclasses.replace(state, step=state.step + 5)


@pytest.mark.parametrize(
    "layout",
    [{"backend": "pmap", "devices": 2}, {"backend": "mesh", "devices": 8, "data": 2, "fsdp": 2, "tensor": 2}],
)
def test_merging_changes_no_network_and_begins_new_changes(tiny_config, layout):
    """Parameters and moving average compute what they did before; the optimizer forgets the factors only."""
    config = change(tiny_config, optim={"lora": LORA}, parallel=layout)
    optimizer, state = make_state(config)
    parallel = make_parallel(config)
    before = jax.device_get(state)
    merge = parallel.compile(make_merging(optimizer, config), donate=(0,))
    after = jax.device_get(merge(parallel.place(state)))
    for old, new in ((before.params, after.params), (before.ema_params, after.ema_params)):
        wanted, found = (flatten_tree(merge_factors(tree)) for tree in (old, new))
        assert wanted.keys() == found.keys()
        for path, leaf in wanted.items():
            np.testing.assert_allclose(found[path], leaf, rtol=1e-5, atol=1e-6, err_msg=path)
    old, new, average = (flatten_tree(tree) for tree in (before.params, after.params, after.ema_params))
    for path, leaf in new.items():
        if path.endswith(("/up", "/rows")):
            assert not leaf.any() and not average[path].any(), path
        elif path.endswith("/down"):
            assert (leaf != old[path]).all(), path
            np.testing.assert_array_equal(leaf, average[path])
        elif path.endswith(("/ids", "lora/scale")):
            np.testing.assert_array_equal(leaf, old[path])
    moments, kept = flatten_tree(after.opt_state), flatten_tree(before.opt_state)
    assert any("/lora/" in path for path in moments) and any("/bias" in path for path in moments)
    for path, leaf in moments.items():
        if "/lora/" in path:
            assert not leaf.any(), path
        else:
            np.testing.assert_array_equal(leaf, kept[path], err_msg=path)
    assert after.step == 5


def test_merged_changes_have_more_directions_than_one_change(tiny_run, tmp_path, capsys):
    """Three changes of rank 2 are one of rank 6; a resumed run has the same bits as an undisturbed one."""
    run = tmp_path / "merged"
    flags = [f"--init={tiny_run}@last", "--config.optim.lora.rank=2", "--config.optim.lora.targets=decoder"]
    flags += ["--config.optim.lora.merge_every=4", "--config.optim.lora.merge_warmup=2"]
    # The moving average of two products is no product of such narrow factors.
    flags += ["--config.optim.ema_decay=0"]
    flags += ["--config.optim.warmup_steps=2", "--config.train.evaluate_every=12"]
    flags += ["--config.train.checkpoint_every=6", "--config.data.test_split=none"]
    assert main(["train", f"--run={run}", *flags, "--config.train.steps=12"]) == 0
    assert "they are merged, and begin anew, every 4 updates" in capsys.readouterr().err
    stored = read_params(run, 12)
    shutil.rmtree(run / "checkpoints" / "12")
    (run / "report.json").unlink()
    assert main(["train", f"--run={run}"]) == 0
    for path, leaf in read_params(run, 12).items():
        np.testing.assert_array_equal(leaf, stored[path], err_msg=path)
    start, end = (read_params(run, step)["decoder/layers_0/feedforward/input/kernel"] for step in (0, 12))
    values = np.linalg.svd(end - start, compute_uv=False)
    assert values[5] > 1e-3 * values[0] and values[6] < 1e-5 * values[0], values


def read_params(run, step):
    """The parameters of the network in a checkpoint, by path."""
    return flatten_tree(jax.device_get(Checkpoints(run).restore_params(step)[0]))


def test_when_changes_are_merged():
    """The last update is not followed by a merging: its changes remain in the checkpoint."""
    config = Config(optim=OptimConfig(lora=LORA), train=TrainConfig(steps=15))
    assert [step for step in range(1, 16) if merges_after(config, step)] == [5, 10]
    assert not merges_after(Config(), 5)


def test_the_learning_rate_rises_again_after_merging():
    optim = OptimConfig(
        learning_rate=1.0, schedule="constant", warmup_steps=2, lora=dataclasses.replace(LORA, merge_warmup=4)
    )
    schedule = make_schedule(optim, model_dim=16, total_steps=20)
    assert [float(schedule(step)) for step in range(12)] == pytest.approx(
        [0.5, 1, 1, 1, 1, 0.25, 0.5, 0.75, 1, 1, 0.25, 0.5]
    )


def test_settings_that_do_nothing_are_refused():
    for lora, message in (
        (LoraConfig(merge_every=5), "optim.lora.rank is 0"),
        (LoraConfig(rank=2, merge_warmup=3), "optim.lora.merge_every is 0, and nothing is merged"),
        (LoraConfig(rank=2, merge_every=5, merge_warmup=5), "merge_warmup 5 is not below"),
    ):
        with pytest.raises(UserError, match=message):
            validate(Config(optim=OptimConfig(lora=lora)))
