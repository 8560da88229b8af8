"""Target distributions that mix the smoothed target with a teacher's most probable tokens."""

import jax.numpy as jnp

from flaxformer_mt.kernels.cross_entropy import Mixture
from flaxformer_mt.shapes import TeacherTokens


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
