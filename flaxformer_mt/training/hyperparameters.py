"""Numbers of a config that are arguments of compiled programs: a sweep over them compiles once.

Contains the learning-rate schedules, which are functions of these numbers.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from flaxformer_mt.config import Config, OptimConfig
from flaxformer_mt.shapes import Array

# Shapes of schedules after the warm-up, by the index that programs choose one with.
_FALLING = ("constant", "inverse_sqrt", "linear", "cosine")


class Hyperparameters(NamedTuple):
    """The seed of dropout and the schedule of the learning rate, as scalars.

    peak: the highest learning rate. warmup: number of updates in which the rate rises, at least 1. steps: the
    update at which it has fallen to `final_fraction` of the peak. falling: index of the schedule's shape.
    """

    seed: Array
    peak: Array
    warmup: Array
    steps: Array
    final_fraction: Array
    falling: Array


def make_hyperparameters(config: Config) -> Hyperparameters:
    """Return the numbers of a config as numpy arrays without axes; seeds are taken modulo 2 ** 32."""
    optim, steps = config.optim, config.train.steps
    warmup = max(warmup_updates(optim, total_steps=steps), 1)
    peak, shape = optim.learning_rate, optim.schedule
    if shape == "noam":  # equation 3 of Vaswani et al. 2017
        peak, shape = peak * config.model.model_dim**-0.5 * warmup**-0.5, "inverse_sqrt"
    return Hyperparameters(
        np.asarray(config.seed % 2**32, np.uint32),
        np.asarray(peak, np.float32),
        np.asarray(warmup, np.float32),
        np.asarray(steps, np.float32),
        np.asarray(optim.final_fraction, np.float32),
        np.asarray(_FALLING.index(shape), np.int32),
    )


def learning_rate(numbers: Hyperparameters, step: Array | int) -> Array:
    """Compute the learning rate of an update, counted from 0.

    All schedules rise linearly over the warm-up. noam is learning_rate * D^-0.5 * min(n^-0.5, n *
    warmup^-1.5) for the n-th update; inverse_sqrt has the same shape and learning_rate as its peak; cosine
    and linear fall to final_fraction of the peak at the last step.
    """
    number = jnp.asarray(step, jnp.float32) + 1  # from 1, since a rate of 0 would waste the first update
    gone = jnp.clip((number - numbers.warmup) / jnp.maximum(numbers.steps - numbers.warmup, 1), 0, 1)
    linear, cosine = 1 - gone, 0.5 * (1 + jnp.cos(jnp.pi * gone))
    final = numbers.final_fraction
    falling = (
        jnp.ones(()),
        jnp.sqrt(numbers.warmup / number),
        final + (1 - final) * linear,
        final + (1 - final) * cosine,
    )
    return numbers.peak * jnp.minimum(number / numbers.warmup, jnp.stack(falling)[numbers.falling])


def warmup_updates(config: OptimConfig, *, total_steps: int) -> int:
    """Return the number of updates in which the rate rises; 0: none.

    That is `warmup_steps`. Schedules that fall until `total_steps` need updates to fall in: where the warm-up
    would take all of them, as in a short trial of a recipe, it takes half of them.
    """
    falls_until_the_end = config.schedule in ("cosine", "linear")
    if falls_until_the_end and config.warmup_steps >= total_steps:
        return total_steps // 2
    return config.warmup_steps
