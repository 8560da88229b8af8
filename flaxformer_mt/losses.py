"""Losses, each as (sum, weight): whoever adds batches up divides once, by the total weight.

Knows nothing of models or devices.
"""

import functools
from typing import NamedTuple

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
    their number.
    """
    weights = jnp.asarray(mask, jnp.float32)
    return (_entropies(jnp.asarray(logits), jnp.asarray(target), smoothing)[0] * weights).sum(), weights.sum()


class Output(NamedTuple):
    """The last layer, as a loss over the vocabulary needs it: logits = x @ table.T + bias."""

    table: Float[Array, "V D"]
    bias: Float[Array, "V"] | None


@typed
def projected_cross_entropy(
    hidden: Float[Array, "B T D"],
    output: Output,
    target: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    smoothing: float,
    chunk_tokens: int,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`smoothed_cross_entropy` of the logits of `hidden`, which are never all there at once.

    The target axis is cut into pieces of about `chunk_tokens` tokens; each piece's logits are made, scored
    and turned into gradients while they are in the cache, in one pass. The batch axis stays whole, so that it
    may be split over devices. Returns (sum, weight).
    """
    weights = jnp.asarray(mask, jnp.float32)
    batch, length = target.shape
    width = max(1, min(length, chunk_tokens // batch))
    padding = -length % width

    def cut(x: Array) -> Array:  # [B, T, ...] -> [chunks, B, width, ...]
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(batch, -1, width, *x.shape[2:]).swapaxes(0, 1)

    loss_sum = _chunked_loss_sum(smoothing, cut(hidden), output, cut(jnp.asarray(target)), cut(weights))
    return loss_sum, weights.sum()


def _entropies(logits: Array, target: Array, smoothing: float) -> tuple[Array, Array]:
    log_total = jax.nn.logsumexp(logits, axis=-1)
    at_target = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    loss = log_total - (1 - smoothing) * at_target
    if smoothing:
        loss = loss - smoothing * logits.mean(axis=-1)
    return loss, log_total


def _project(hidden: Array, output: Output) -> Array:
    table = output.table.astype(hidden.dtype)
    logits = jnp.einsum("BTD,VD->BTV", hidden, table, preferred_element_type=jnp.float32)
    return logits if output.bias is None else logits + output.bias


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_loss_sum(
    smoothing: float, hidden: Array, output: Output, target: Array, weights: Array
) -> Array:
    def add(total: Array, chunk: tuple[Array, Array, Array]) -> tuple[Array, None]:
        hidden, target, weights = chunk
        return total + (_entropies(_project(hidden, output), target, smoothing)[0] * weights).sum(), None

    return jax.lax.scan(add, jnp.zeros(()), (hidden, target, weights))[0]


def _chunked_loss_sum_forward(
    smoothing: float, hidden: Array, output: Output, target: Array, weights: Array
) -> tuple[Array, tuple[Array, Output]]:
    """The gradient is made here, where the logits are at hand; the backward pass only scales it."""
    size = output.table.shape[0]
    table = output.table.astype(hidden.dtype)

    def add(
        sums: tuple[Array, Output], chunk: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Output], Array]:
        total, gradient = sums
        hidden, target, weights = chunk
        logits = _project(hidden, output)
        loss, log_total = _entropies(logits, target, smoothing)
        expected = smoothing / size + jnp.where(jnp.arange(size) == target[..., None], 1 - smoothing, 0.0)
        by_logits = (jnp.exp(logits - log_total[..., None]) - expected) * weights[..., None]
        narrow = by_logits.astype(hidden.dtype)
        by_table = jnp.einsum("BTV,BTD->VD", narrow, hidden, preferred_element_type=jnp.float32)
        by_bias = None if gradient.bias is None else gradient.bias + by_logits.sum((0, 1))
        by_hidden = jnp.einsum("BTV,VD->BTD", narrow, table)
        return (total + (loss * weights).sum(), Output(gradient.table + by_table, by_bias)), by_hidden

    start = (jnp.zeros(()), jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), output))
    (total, by_output), by_hidden = jax.lax.scan(add, start, (hidden, target, weights))
    return total, (by_hidden, by_output)


def _chunked_loss_sum_backward(
    smoothing: float, saved: tuple[Array, Output], gradient: Array
) -> tuple[Array, Output, None, None]:
    by_hidden, by_output = saved
    return (
        by_hidden * gradient.astype(by_hidden.dtype),
        jax.tree.map(lambda x: x * gradient, by_output),
        None,
        None,
    )


_chunked_loss_sum.defvjp(_chunked_loss_sum_forward, _chunked_loss_sum_backward)


@typed
def count_correct(
    logits: Float[Array, "B T V"], target: Int[Array, "B T"], mask: Bool[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """How many real tokens the most probable word gets right, and how many there are."""
    correct = (jnp.argmax(logits, axis=-1) == target) & jnp.asarray(mask)
    return correct.sum().astype(jnp.float32), jnp.asarray(mask, jnp.float32).sum()
