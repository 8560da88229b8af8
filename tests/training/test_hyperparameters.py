"""A sweep over seeds, learning rates and lengths: the programs of one run serve all."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from tiny_experiment import change

from flaxformer_mt.config import Config
from flaxformer_mt.data.buckets import Shape
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.shapes import Batch
from flaxformer_mt.training.setup import TrainingSetup, set_up_training

# Shapes of which the fullest batch has another number of tokens in the epochs of another seed.
DATA = {"batch_tokens": 256, "num_shapes": 2}
# What differs from one run of a sweep to another, all at once.
SWEEPS: tuple[dict[str, Any], ...] = (
    {
        "seed": 2**31 + 7,
        "optim": {"learning_rate": 0.003, "warmup_steps": 7, "schedule": "cosine", "final_fraction": 0.1},
        "train": {"steps": 49},
    },
    {"seed": 6, "optim": {"learning_rate": 1.0, "schedule": "noam"}, "train": {"steps": 50}},
)


def vary(config: Config, *, seed: int | None = None, **sections: Any) -> Config:
    config = change(config, **sections)
    return config if seed is None else dataclasses.replace(config, seed=seed)


def short_batch(setup: TrainingSetup, shape: Shape) -> Batch:
    """A batch of this shape with one token in each row, which any program without padding has room for."""
    source = np.zeros((shape.rows, shape.source), np.int32)
    target = np.zeros((shape.rows, shape.target), np.int32)
    masks = [np.arange(side.shape[1])[None] < np.ones((shape.rows, 1)) for side in (source, target)]
    target_in = target.copy()
    target_in[:, 0] = setup.prepared.vocabs.target.bos_id
    return Batch(source + 4 * masks[0], target_in, target + 5 * masks[1], *masks)


def lowered(config: Config, folder: Any) -> tuple[TrainingSetup, dict[Shape, str]]:
    """What training is set up with, and the text of the program that reads a batch, for each shape."""
    setup = set_up_training(config, folder, Checkpoints(folder))
    texts = {}
    for shape in setup.unpadded:
        batch = setup.put(short_batch(setup, shape))
        assert batch.unpadded == setup.unpadded[shape]
        arguments = setup.train_step.arguments_of(setup.state, setup.numbers, batch)
        texts[shape] = setup.train_step.by_shape.lower(*arguments).as_text()
    return setup, texts


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_sweep_lowers_one_update(tiny_config, tmp_path, accumulation):
    """The text of the program that reads a batch, and the sizes without padding, are those of one run."""
    base = change(tiny_config, data=DATA, optim={"accumulation": accumulation})
    setup, expected = lowered(base, tmp_path / "base")
    assert expected
    for number, changes in enumerate(SWEEPS):
        optim = {**changes["optim"], "accumulation": accumulation}
        other, found = lowered(vary(base, **{**changes, "optim": optim}), tmp_path / str(number))
        assert found == expected
        assert other.unpadded == setup.unpadded
    # The texts say what is computed: a number that is no argument is seen in them.
    _, found = lowered(change(base, train={"label_smoothing": 0.3}), tmp_path / "smoothing")
    assert found.keys() == expected.keys() and found != expected


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_sweep_compiles_nothing_anew(tiny_config, tmp_path, accumulation):
    """The initial state and all of an update are found on disk, and compute with the numbers of their run."""
    optim = {"warmup_steps": 1, "accumulation": accumulation}
    base = change(tiny_config, data=DATA, optim=optim)
    events: list[str] = []
    params = {}
    for name, changes in {
        "base": {},
        "seed": {"seed": 80_000 + accumulation},  # which no other test compiles anything for
        "rate": {"optim": {**optim, "learning_rate": 0.003}, "train": {"steps": 49}},
    }.items():
        if name == "seed":
            jax.monitoring.register_event_listener(lambda name, **_: events.append(name.rpartition("/")[2]))
        setup = set_up_training(vary(base, **changes), tmp_path / name, Checkpoints(tmp_path / name))
        initial = jax.device_get(setup.state.params)
        shape = max(setup.unpadded)
        batch = setup.put(short_batch(setup, shape))
        state, metrics = setup.train_step(setup.state, setup.numbers, [batch] * accumulation)
        assert np.isfinite(metrics.loss_sum)
        params[name] = jax.tree.leaves(initial), jax.tree.leaves(jax.device_get(state.params))
    assert "cache_hits" in events and "cache_misses" not in events
    same = {
        name: [all(map(np.array_equal, *pair)) for pair in zip(params["base"], found, strict=True)]
        for name, found in params.items()
    }
    assert same == {"base": [True, True], "seed": [False, False], "rate": [True, False]}
