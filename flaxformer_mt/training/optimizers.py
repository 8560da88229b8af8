"""The optimizers that the config can select, gradient clipping, and learning-rate schedules.

All functions are pure functions of the config; they do not depend on the model, the loss or the devices.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from flaxformer_mt.config import Config, OptimConfig
from flaxformer_mt.shapes import Array
from flaxformer_mt.training.trained_parameters import select_trained

# From the number of an update, counted from 0, to its learning rate.
Schedule = Callable[[Array | int], Array]


def make_optimizer(config: OptimConfig, schedule: Schedule) -> optax.GradientTransformation:
    """Build the optimizer that the config names; it expects gradients that are already clipped.

    Weight decay is decoupled (Loshchilov and Hutter 2019) and applies to matrices only, not to biases or the
    parameters of normalization layers. The optimizer takes trees of all parameters and uses the trained ones.
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
    # Nothing is frozen here any more: this is the form of the state in checkpoints.
    if config.freeze and not config.lora.rank:
        rule = optax.multi_transform(
            {"trained": rule, "frozen": optax.set_to_zero()},
            lambda params: jax.tree.map(lambda _: "trained", params),
        )

    def select(tree: optax.Params | None) -> Any:
        return select_trained(tree, config)

    return optax.GradientTransformation(
        lambda params: rule.init(select(params)),
        lambda gradients, state, params=None: rule.update(select(gradients), state, select(params)),
    )


def clip_factor(norm: Array, config: OptimConfig) -> Array:
    """Compute the factor that scales a gradient to a norm of at most `clip_norm`; 1 without clipping."""
    return jnp.minimum(1.0, config.clip_norm / norm) if config.clip_norm else jnp.ones(())


def _matrices(params: dict) -> dict:
    """Mark the parameters to which weight decay applies: kernels and embeddings, not biases and scales."""

    def is_matrix(path: tuple, leaf: Array) -> bool:
        return path[-1].key in ("kernel", "embedding", "output_kernel", "down", "up", "rows")

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def _muon_dimensions(params: dict) -> dict:
    """Return the input and output axes with which Muon treats each kernel as a matrix; None: left to Adam.

    A projection into heads [D, H, K] has input axis 0 and output axes 1 and 2. The output projection [H, E,
    D] of attention, and a feed-forward convolution [1, D, F], have input axes 0 and 1 and output axis 2.
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


# Shapes of schedules after the warm-up, by the index that programs choose one with.
_FALLING = ("constant", "inverse_sqrt", "linear", "cosine")


class Hyperparameters(NamedTuple):
    """Scalar arguments of compiled programs: the dropout seed, and numbers of the learning-rate schedule.

    peak: the highest learning rate. warmup: the number of steps in which the rate rises, at least 1. steps:
    the step at which linear and cosine schedules reach 0. falling: the index of the schedule after the
    warm-up.
    """

    seed: Array
    peak: Array
    warmup: Array
    steps: Array
    falling: Array


def make_hyperparameters(config: Config) -> Hyperparameters:
    optim, steps = config.optim, config.train.steps
    warmup = max(warmup_updates(optim, total_steps=steps), 1)
    peak, shape = optim.learning_rate, optim.schedule
    if shape == "noam":  # equation 3 of Vaswani et al. 2017
        peak, shape = peak * config.model.model_dim**-0.5 * warmup**-0.5, "inverse_sqrt"
    return Hyperparameters(
        np.asarray(config.seed, np.uint32),
        np.asarray(peak, np.float32),
        np.asarray(warmup, np.float32),
        np.asarray(steps, np.float32),
        np.asarray(_FALLING.index(shape), np.int32),
    )


def learning_rate(numbers: Hyperparameters, step: Array | int) -> Array:
    """Compute the learning rate of step number `step`, counted from 0.

    All schedules rise linearly over the warm-up. noam is learning_rate * D^-0.5 * min(n^-0.5, n *
    warmup^-1.5) for the n-th step, where D is the model width. inverse_sqrt has the same shape, with
    learning_rate as its peak. cosine and linear fall to 0 at the last step.
    """
    number = jnp.asarray(step, jnp.float32) + 1  # from 1, since a rate of 0 would waste the first update
    gone = jnp.clip((number - numbers.warmup) / jnp.maximum(numbers.steps - numbers.warmup, 1), 0, 1)
    falling = (
        jnp.ones(()),
        jnp.sqrt(numbers.warmup / number),
        1 - gone,
        0.5 * (1 + jnp.cos(jnp.pi * gone)),
    )
    return numbers.peak * jnp.minimum(number / numbers.warmup, jnp.stack(falling)[numbers.falling])


def warmup_updates(config: OptimConfig, *, total_steps: int) -> int:
    """Return the number of warm-up steps, in which the learning rate rises; 0: none.

    If the warm-up of a cosine or linear schedule would take all steps, as in a short trial of a recipe, it
    takes half of the steps.
    """
    falls_until_the_end = config.schedule in ("cosine", "linear")
    if falls_until_the_end and config.warmup_steps >= total_steps:
        return total_steps // 2
    return config.warmup_steps
