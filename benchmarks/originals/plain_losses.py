"""The loss and the count of correct tokens in their plain forms, from logits of all tokens at once."""

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from flaxformer_mt.kernels.cross_entropy import _entropies, _is_argmax
from flaxformer_mt.shapes import Array, typed


@typed
def smoothed_cross_entropy(
    logits: Float[Array, "B T V"], target: Int[Array, "B T"], mask: Bool[Array, "B T"], smoothing: float
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Compute the cross-entropy in nats with label smoothing (Szegedy et al. 2016, section 7).

    The target distribution has 1 - smoothing on the target and smoothing / V on every vocabulary entry.
    Returns the sum over real tokens and the number of real tokens.
    """
    weights = jnp.asarray(mask, jnp.float32)
    entropies = _entropies(jnp.asarray(logits), jnp.asarray(target), smoothing)
    return jnp.sum(entropies * weights), jnp.sum(weights)


@typed
def count_correct(
    logits: Float[Array, "B T V"], target: Int[Array, "B T"], mask: Bool[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Count the real tokens whose most probable word is the target, and all real tokens."""
    correct = _is_argmax(jnp.asarray(logits), jnp.asarray(target)) & jnp.asarray(mask)
    return correct.sum().astype(jnp.float32), jnp.asarray(mask, jnp.float32).sum()
