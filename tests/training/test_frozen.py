"""Frozen parameters keep their values, have no gradient and no optimizer state; patterns are checked."""

import jax
import numpy as np
import pytest
from pytest import raises
from tiny_experiment import change

from flaxformer_mt.config import LoraConfig, OptimConfig
from flaxformer_mt.config.checks import validate
from flaxformer_mt.config.files import load_config
from flaxformer_mt.errors import UserError
from flaxformer_mt.parameter_trees import flatten_tree
from flaxformer_mt.training.optimizers import make_optimizer
from flaxformer_mt.training.trained_parameters import (
    check_patterns,
    describe_frozen,
    replace_trained,
    select_trained,
)

PARAMS = {
    "encoder": {"norm": {"scale": np.ones(5, np.float32)}, "kernel": np.full((2, 2), 3.0, np.float32)},
    "shared_embedding": {"embedding": np.ones((4, 2), np.float32)},
}


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "adafactor", "lion", "muon"])
def test_frozen_parameters_have_no_update_and_no_state(tiny_config, optimizer):
    """Not even weight decay changes them; the others change, clipped by their own gradients alone."""
    decay = 0.1 if optimizer in ("adamw", "lion", "muon") else 0.0
    fields = {"optimizer": optimizer, "weight_decay": decay, "freeze": ("encoder",), "clip_norm": 1.0}
    config = change(tiny_config, optim=fields).optim
    rule = make_optimizer(config, lambda step: 0.5)
    state = jax.jit(rule.init)(PARAMS)
    gradients = jax.tree.map(lambda leaf: 100 * np.ones_like(leaf), PARAMS)
    updates, _ = jax.jit(rule.update)(gradients, state, PARAMS)
    table = flatten_tree(updates)
    assert all(not np.any(leaf) for path, leaf in table.items() if path.startswith("encoder"))
    assert np.all(table["shared_embedding/embedding"] != 0)
    shapes = {np.shape(leaf) for leaf in jax.tree.leaves(state)}
    assert (2, 2) not in shapes and (5,) not in shapes


def test_frozen_parameters_have_no_gradient():
    """Not even one of zeros: the tree of gradients, and of their sums, has the trained parameters only."""
    optim = OptimConfig(freeze=("encoder/norm",))

    def loss(trained):
        return sum((leaf**2).sum() for leaf in jax.tree.leaves(replace_trained(PARAMS, trained, optim)))

    trained = select_trained(PARAMS, optim)
    gradients = flatten_tree(jax.grad(loss)(trained))
    assert gradients.keys() == {"encoder/kernel", "shared_embedding/embedding"}
    assert all(np.all(leaf == 2 * flatten_tree(PARAMS)[path]) for path, leaf in gradients.items())
    assert select_trained(PARAMS, OptimConfig()) is PARAMS
    assert replace_trained(PARAMS, trained, OptimConfig()) is trained


def test_patterns_that_match_nothing_or_everything_are_refused():
    check_patterns(PARAMS, OptimConfig(freeze=("encoder",)))
    with raises(UserError, match=r"'decoder', which matches no parameter.* encoder/.*shared_embedding/"):
        check_patterns(PARAMS, OptimConfig(freeze=("encoder", "decoder")))
    with raises(UserError, match="matches all 3 parameters"):
        check_patterns(PARAMS, OptimConfig(freeze=("encoder", "shared_embedding")))
    text = describe_frozen(PARAMS, OptimConfig(freeze=("encoder",)))
    assert text == "8 of 17 parameters (47.1%) are trained; the others are frozen"
    assert describe_frozen(PARAMS, OptimConfig()) == ""


def test_low_rank_changes_are_trained_whatever_else_is_frozen(tiny_config):
    """The recipe finetune_nllb freezes embeddings; LoRA freezes all but its factors anyway."""
    validate(load_config("finetune_nllb").replace({"optim.lora.rank": 4}))
    factors = {"shared_embedding": {"embedding": {"down": np.ones((4, 1), np.float32)}}}
    params = {**PARAMS, "lora": factors}
    for freeze in ((), ("*_embedding",), ("*",)):
        optim = OptimConfig(
            optimizer="adam", freeze=freeze, lora=LoraConfig(rank=1, targets=("*/embedding",))
        )
        check_patterns(PARAMS, optim)
        rule = make_optimizer(optim, lambda step: 0.5)
        updates, _ = rule.update(params, rule.init(params), params)
        ((path, update),) = flatten_tree(updates).items()
        assert path == "lora/shared_embedding/embedding/down" and np.all(update != 0)


def test_low_rank_changes_that_do_not_fit_are_refused():
    for lora, message in (
        (LoraConfig(rank=1, targets=("decoder",)), r"targets has 'decoder', which matches no matrix"),
        (LoraConfig(rank=1, targets=("encoder/norm",)), "which matches no matrix; those of the model are"),
        (LoraConfig(rank=1, also_train=("*bias",)), r"also_train has '\*bias', which matches no parameter"),
        (LoraConfig(rank=1, also_train=("*kernel",)), "both match 1 matrices, such as encoder/kernel"),
        (LoraConfig(rank=3), r"rank is 3, but encoder/kernel is a matrix of 2 x 2; give at most 2"),
        (LoraConfig(rank=1, targets=()), "targets is empty"),
        (
            LoraConfig(rank=1, embedding_rank=3, targets=("*",)),
            r"embedding_rank is 3, but shared_embedding/embedding is a matrix of 4 x 2; give at most 2",
        ),
        (LoraConfig(rank=1, embedding_rank=2), r"targets \*/kernel match no table of embeddings"),
    ):
        with raises(UserError, match=message):
            check_patterns(PARAMS, OptimConfig(lora=lora))
    check_patterns(PARAMS, OptimConfig(lora=LoraConfig(rank=2, targets=("*",), also_train=("*norm",))))
