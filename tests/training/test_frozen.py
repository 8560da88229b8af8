"""Frozen parameters keep their values, have no gradient and no optimizer state; patterns are checked."""

import jax
import numpy as np
import pytest
from tiny_experiment import change

from flaxformer_mt.errors import UserError
from flaxformer_mt.training.frozen import check_patterns, describe_frozen, is_frozen, stop_frozen_gradients
from flaxformer_mt.training.optimizers import make_optimizer
from flaxformer_mt.trees import flatten_tree

PARAMS = {
    "encoder": {"norm": {"scale": np.ones(5, np.float32)}, "kernel": np.full((2, 2), 3.0, np.float32)},
    "shared_embedding": {"embedding": np.ones((4, 2), np.float32)},
}


def test_patterns_name_a_parameter_or_all_below_it():
    assert is_frozen("encoder/norm/scale", ["encoder"]) and is_frozen("encoder/norm/scale", ["*/norm"])
    assert is_frozen("encoder/norm/scale", ["*scale"]) and is_frozen("encoder/kernel", ["x", "encoder/*"])
    assert not is_frozen("encoder_norm/scale", ["encoder"]) and not is_frozen("encoder/kernel", [])


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "adafactor", "lion", "muon"])
def test_frozen_parameters_have_no_update_and_no_state(tiny_config, optimizer):
    """Not even weight decay changes them; the others change, clipped by their own gradients alone."""
    decay = 0.1 if optimizer in ("adamw", "lion", "muon") else 0.0
    fields = {"optimizer": optimizer, "weight_decay": decay, "freeze": ("encoder",), "clip_norm": 1.0}
    config = change(tiny_config, optim=fields).optim
    rule = make_optimizer(config, lambda step: 0.5)
    state = rule.init(PARAMS)
    gradients = jax.tree.map(lambda leaf: 100 * np.ones_like(leaf), PARAMS)
    updates, _ = rule.update(gradients, state, PARAMS)
    table = flatten_tree(updates)
    assert all(not np.any(leaf) for path, leaf in table.items() if path.startswith("encoder"))
    assert np.all(table["shared_embedding/embedding"] != 0)
    shapes = {np.shape(leaf) for leaf in jax.tree.leaves(state)}
    assert (2, 2) not in shapes and (5,) not in shapes


def test_gradients_of_frozen_parameters_are_zero():
    def loss(params):
        params = stop_frozen_gradients(params, ("encoder/norm",))
        return sum(leaf.sum() for leaf in jax.tree.leaves(params))

    table = flatten_tree(jax.grad(loss)(PARAMS))
    assert {path for path, leaf in table.items() if not np.any(leaf)} == {"encoder/norm/scale"}
    assert stop_frozen_gradients(PARAMS, ()) is PARAMS


def test_patterns_that_match_nothing_or_everything_are_refused():
    check_patterns(PARAMS, ("encoder",))
    with pytest.raises(
        UserError, match=r"'decoder', which matches no parameter.* encoder/.*shared_embedding/"
    ):
        check_patterns(PARAMS, ("encoder", "decoder"))
    with pytest.raises(UserError, match="matches all 3 parameters"):
        check_patterns(PARAMS, ("encoder", "shared_embedding"))
    assert describe_frozen(PARAMS, ("encoder",)).startswith("8 parameters (47.1%) are trained")
    assert describe_frozen(PARAMS, ()) == ""
