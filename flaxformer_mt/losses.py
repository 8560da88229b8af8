"""Losses, each as (sum, weight): whoever adds batches up divides once, by the total weight.

Knows nothing of models or devices.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from flaxformer_mt.shapes import Array, typed


@typed
def smoothed_cross_entropy(
    logits: Float[Array, "B T V"], target: Int[Array, "B T"], mask: Bool[Array, "B T"], smoothing: float
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Cross-entropy in nats against (1 - smoothing) on the target and smoothing / V on every word.

    The smoothed distribution is that of Szegedy et al. 2016, section 7. Returns the sum over real tokens and
    their number. Its gradient is written out so that neither log-probabilities nor the smoothed targets, arrays
    as large as the logits, are ever stored.
    """
    token_losses = _token_losses(jnp.asarray(logits), jnp.asarray(target), jnp.asarray(mask, jnp.float32), smoothing)
    return token_losses.sum(), jnp.asarray(mask, jnp.float32).sum()


def _entropies(logits: Array, target: Array, smoothing: float) -> tuple[Array, Array]:
    log_total = jax.nn.logsumexp(logits, axis=-1)  # [B, T]
    at_target = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    loss = log_total - (1 - smoothing) * at_target
    if smoothing:
        loss = loss - smoothing * logits.mean(axis=-1)
    return loss, log_total


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _token_losses(logits: Array, target: Array, weights: Array, smoothing: float) -> Array:
    return _entropies(logits, target, smoothing)[0] * weights


def _token_losses_forward(logits: Array, target: Array, weights: Array, smoothing: float) -> tuple[Array, tuple]:
    loss, log_total = _entropies(logits, target, smoothing)
    return loss * weights, (logits, log_total, target, weights)


def _token_losses_backward(smoothing: float, saved: tuple, gradient: Array) -> tuple[Array, None, None]:
    logits, log_total, target, weights = saved
    size = logits.shape[-1]
    is_target = jnp.arange(size) == target[..., None]
    expected = jnp.where(is_target, 1 - smoothing + smoothing / size, smoothing / size)
    gradient_logits = (jnp.exp(logits - log_total[..., None]) - expected) * (gradient * weights)[..., None]
    return gradient_logits, None, None


_token_losses.defvjp(_token_losses_forward, _token_losses_backward)


@typed
def count_correct(
    logits: Float[Array, "B T V"], target: Int[Array, "B T"], mask: Bool[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """How many real tokens the most probable word gets right, and how many there are."""
    correct = (jnp.argmax(logits, axis=-1) == target) & jnp.asarray(mask)
    return correct.sum().astype(jnp.float32), jnp.asarray(mask, jnp.float32).sum()
