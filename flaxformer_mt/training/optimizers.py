"""Optimizers, selected by their names in the config, with what they decay and how they see matrices.

Contains pure functions of `OptimConfig`; model, loss and devices are left to the caller.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from flaxformer_mt.config import OptimConfig
from flaxformer_mt.shapes import Array
from flaxformer_mt.training.frozen import label_parameters, select_trained

# From the number of an update, counted from 0, to its learning rate.
Schedule = Callable[[Array | int], Array]


def make_optimizer(config: OptimConfig, schedule: Schedule) -> optax.GradientTransformation:
    """Build the optimizer: the update rule that the config names, of gradients that are clipped already.

    Weight decay is decoupled (Loshchilov and Hutter 2019) and applies to matrices only: biases and the
    parameters of normalization layers are exempt. Of trees of all parameters, those that are trained count.
    """
    rules = {
        "adam": lambda: optax.adam(schedule, b1=config.b1, b2=config.b2, eps=config.epsilon),
        "adamw": lambda: optax.adamw(
            schedule,
            b1=config.b1,
            b2=config.b2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=_matrices,
        ),
        "adafactor": lambda: optax.adafactor(schedule),
        "lion": lambda: optax.lion(
            schedule, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay, mask=_matrices
        ),
        "muon": lambda: optax.chain(
            # Muon's own weight decay excludes the embeddings, since Muon leaves these matrices to Adam. So
            # Muon computes only the direction (the rate -1 cancels its change of sign), and the decay of all
            # matrices and the learning rate are applied after it.
            contrib.muon(
                -1.0,
                beta=config.b1,
                adam_b1=config.b1,
                adam_b2=config.b2,
                eps=config.epsilon,
                muon_weight_dimension_numbers=_muon_dimensions,
                # Scales updates to the RMS of Adam's (Liu et al. 2025), so that one learning rate fits both.
                consistent_rms=0.2,
            ),
            optax.add_decayed_weights(config.weight_decay, _matrices),
            optax.scale_by_learning_rate(schedule),
        ),
    }
    # Checkpoints have the state of two transformations: clipping, which has none, was the first one.
    rule = optax.chain(optax.identity(), rules[config.optimizer]())
    if config.freeze:  # nothing is frozen here any more: this is the form of the state in checkpoints
        rule = optax.multi_transform(
            {"trained": rule, "frozen": optax.set_to_zero()},
            lambda params: label_parameters(params, config.freeze),
        )

    def select(tree: optax.Params | None) -> Any:
        return select_trained(tree, config)

    return optax.GradientTransformation(
        lambda params: rule.init(select(params)),
        lambda gradients, state, params=None: rule.update(select(gradients), state, select(params)),
    )


def clip_factor(norm: Array, config: OptimConfig) -> Array:
    """Compute by what a gradient is multiplied so that its norm is at most `clip_norm`; 1 without clipping.

    Args:
      norm: the global norm of the gradient.
    """
    return jnp.minimum(1.0, config.clip_norm / norm) if config.clip_norm else jnp.ones(())


def _matrices(params: dict) -> dict:
    """Mark the parameters that decay: True for kernels and embeddings, False for biases and scales."""

    def is_matrix(path: tuple, leaf: Array) -> bool:
        return path[-1].key in ("kernel", "embedding", "output_kernel", "down", "up", "rows")

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def _muon_dimensions(params: dict) -> dict:
    """Return the input and output axes of each kernel, which Muon treats as one matrix; None: left to Adam.

    A projection into heads [D, H, K] maps axis 0 to axes 1 and 2; the output projection [H, E, D], and a
    convolution [1, D, F] of the feed-forward layers, map axes 0 and 1 to axis 2.
    """

    def dimensions(path: tuple, leaf: Array) -> contrib.MuonDimensionNumbers | None:
        if path[-1].key != "kernel":
            return None
        if leaf.ndim == 2:
            return contrib.MuonDimensionNumbers(0, 1)
        if path[-2].key == "output" or path[-3].key == "feedforward":
            return contrib.MuonDimensionNumbers((0, 1), 2)
        return contrib.MuonDimensionNumbers(0, (1, 2))

    return jax.tree_util.tree_map_with_path(dimensions, params)
