"""Learning-rate schedules and optimizers, by the names that the config gives them.

Pure functions of the config; knows nothing of models, losses or devices.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from flaxformer_mt.config import OptimConfig
from flaxformer_mt.shapes import Array

Schedule = Callable[[Array | int], Array]


def make_schedule(config: OptimConfig, *, model_dim: int, total_steps: int) -> Schedule:
    """The learning rate of the update number `step`, counted from 0.

    All schedules rise linearly over `warmup_steps` updates. noam is equation 3 of Vaswani et al. 2017,
    learning_rate * D^-0.5 * min(n^-0.5, n * warmup^-1.5) for the n-th update; inverse_sqrt has the same shape
    and learning_rate as its peak; cosine and linear fall to final_fraction of the peak at `total_steps`.
    """
    warmup = max(config.warmup_steps, 1)
    peak = config.learning_rate
    if config.schedule == "noam":
        peak = peak * model_dim**-0.5 * warmup**-0.5

    def schedule(step: Array | int) -> Array:
        number = jnp.asarray(step, jnp.float32) + 1  # the first update is number 1, not a wasted 0
        rising = number / warmup
        if config.schedule in ("noam", "inverse_sqrt"):
            falling = jnp.sqrt(warmup / number)
        elif config.schedule == "constant":
            falling = jnp.ones(())
        else:
            done = jnp.clip((number - warmup) / max(total_steps - warmup, 1), 0, 1)
            left = 1 - done if config.schedule == "linear" else 0.5 * (1 + jnp.cos(jnp.pi * done))
            falling = config.final_fraction + (1 - config.final_fraction) * left
        return peak * jnp.minimum(rising, falling)

    return schedule


def make_optimizer(config: OptimConfig, schedule: Schedule) -> optax.GradientTransformation:
    """Clipping by the global norm, then the update rule that the config names.

    Weight decay is decoupled (Loshchilov and Hutter 2019) and leaves vectors (biases, norms) alone.
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
            # Its own decay would pass over the embeddings, which are matrices that it leaves to Adam; so it
            # gives the direction alone (a rate of -1 undoes the turn of the sign), as for the other rules.
            contrib.muon(
                -1.0,
                beta=config.b1,
                adam_b1=config.b1,
                adam_b2=config.b2,
                eps=config.epsilon,
                muon_weight_dimension_numbers=_muon_dimensions,
                # Updates as large as Adam's (Liu et al. 2025), so that one learning rate fits both.
                consistent_rms=0.2,
            ),
            optax.add_decayed_weights(config.weight_decay, _matrices),
            optax.scale_by_learning_rate(schedule),
        ),
    }
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    return optax.chain(clip, rules[config.optimizer]())


def _matrices(params: dict) -> dict:
    """True for parameters that are matrices by nature: kernels and embeddings, not biases and scales."""

    def is_matrix(path: tuple, leaf: Array) -> bool:
        return path[-1].key in ("kernel", "embedding", "output_kernel")

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def _muon_dimensions(params: dict) -> dict:
    """Muon turns kernels as matrices from their inputs to their outputs; all else is left to Adam.

    Projections into heads [D, H, K] map axis 0 to the others; the one out of them [H, E, D] the reverse.
    """

    def dimensions(path: tuple, leaf: Array) -> contrib.MuonDimensionNumbers | None:
        if path[-1].key != "kernel":
            return None
        if leaf.ndim == 2:
            return contrib.MuonDimensionNumbers(0, 1)
        if path[-2].key == "output":
            return contrib.MuonDimensionNumbers((0, 1), 2)
        return contrib.MuonDimensionNumbers(0, (1, 2))

    return jax.tree_util.tree_map_with_path(dimensions, params)
