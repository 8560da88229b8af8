"""Target distributions that mix the smoothed target with a teacher's most probable tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flaxformer_mt.model.bfloat16 import take_rows
from flaxformer_mt.shapes import Array, TeacherTokens


class Mixture(NamedTuple):
    """The target distribution of each token: shares of the target, of a teacher's tokens, and of all evenly.

    target, even: [B, T]. teacher: of the tokens `ids` [B, T, K]. All shares of a token add up to 1.
    """

    target: Array
    even: Array
    teacher: Array
    ids: Array


def mix_teacher(teacher: TeacherTokens, *, weight: float, smoothing: float) -> Mixture:
    """Mix the smoothed target with a teacher's distribution (word-level distillation, Kim and Rush 2016).

    The smoothed target has 1 - `weight` of the mass, and the teacher's distribution the rest: its k most
    probable tokens have their probabilities, and what these leave is spread over the whole vocabulary, as
    that of label smoothing is. Where the teacher has no scores, the target has all mass.
    """
    probs = jnp.asarray(teacher.probs).astype(jnp.float32)
    covered = probs.sum(axis=-1)
    share = jnp.where(covered > 0, weight, 0.0)
    left = jnp.maximum(1 - covered, 0.0)
    # float16 may round probabilities to a sum above 1.
    probs = probs / jnp.maximum(covered, 1.0)[..., None]
    even = (1 - share) * smoothing + share * left
    return Mixture((1 - share) * (1 - smoothing), even, share[..., None] * probs, jnp.asarray(teacher.ids))


def logits_at_teacher(hidden: Array, table: Array, bias: Array, mixture: Mixture) -> Array:
    """Sum the logits [B, T] of a teacher's tokens, each times its share."""
    logits = (hidden * mean_of_teacher(table, mixture)).sum(-1)
    own = bias[mixture.ids] if bias.ndim else bias
    return logits + (mixture.teacher * own).sum(-1)


def mean_of_teacher(table: Array, mixture: Mixture) -> Array:
    """Sum the rows [B, T, D] of a teacher's tokens in the table, each times its share."""

    def add(place: Array, total: Array) -> Array:
        share = jax.lax.dynamic_index_in_dim(mixture.teacher, place, axis=-1)
        ids = jax.lax.dynamic_index_in_dim(mixture.ids, place, axis=-1, keepdims=False)
        return total + share * take_rows(table, ids).astype(jnp.float32)

    zeros = jnp.zeros((*mixture.ids.shape[:-1], table.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, mixture.ids.shape[-1], add, zeros)
