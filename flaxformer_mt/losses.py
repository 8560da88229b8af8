"""Losses, each as (sum, weight): whoever adds batches up divides once, by the total weight.

Knows nothing of models or devices.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from flaxformer_mt.flops import loss_chunk_width
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
    return (_entropies(jnp.asarray(logits), jnp.asarray(target), smoothing) * weights).sum(), weights.sum()


class Output(NamedTuple):
    """The last layer, as a loss over the vocabulary needs it: logits = x @ table.T + bias."""

    table: Float[Array, "V D"]
    bias: Float[Array, "V"] | None


class TokenSums(NamedTuple):
    """What a loss adds up over real tokens; weight is how many they are.

    correct_sum: how many of them the most probable word gets right; None where nobody counts.
    """

    loss_sum: Float[Array, ""]
    weight: Float[Array, ""]
    correct_sum: Float[Array, ""] | None = None


@typed
def projected_cross_entropy(
    hidden: Float[Array, "B T D"],
    output: Output,
    target: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    smoothing: float,
    chunk_tokens: int,
    count: bool = False,
) -> TokenSums:
    """`smoothed_cross_entropy` of the logits of `hidden`, which are never all there at once.

    The target axis is cut into pieces of about `chunk_tokens` tokens; each piece's logits are made, scored,
    with `count` compared with the target as `count_correct` does, and turned into gradients while they are in
    the cache, in one pass. The batch axis stays whole, so that it may be split over devices.
    """
    weights = jnp.asarray(mask, jnp.float32)
    batch, length = target.shape
    width = loss_chunk_width(batch, length, chunk_tokens=chunk_tokens)
    padding = -length % width

    def cut(x: Array) -> Array:  # [B, T, ...] -> [chunks, B, width, ...]
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(batch, -1, width, *x.shape[2:]).swapaxes(0, 1)

    chunks = cut(jnp.asarray(target)), cut(weights)
    totals = _chunked_totals(smoothing, count, cut(hidden), output, *chunks)
    return TokenSums(totals.loss_sum, weights.sum(), totals.correct_sum)


def _entropies(logits: Array, target: Array, smoothing: float) -> Array:
    log_total = jax.nn.logsumexp(logits, axis=-1)
    at_target = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    loss = log_total - (1 - smoothing) * at_target
    return loss - smoothing * logits.mean(axis=-1) if smoothing else loss


def _project(hidden: Array, output: Output) -> Array:
    table = output.table.astype(hidden.dtype)
    logits = jnp.einsum("BTD,VD->BTV", hidden, table, preferred_element_type=jnp.float32)
    return logits if output.bias is None else logits + output.bias


class _Totals(NamedTuple):
    """What the chunks so far add up to; `correct_sum` is None unless it is counted."""

    loss_sum: Array
    correct_sum: Array | None


def _no_totals(count: bool) -> _Totals:
    return _Totals(jnp.zeros(()), jnp.zeros(()) if count else None)


def _add_chunk(totals: _Totals, loss: Array, logits: Array, target: Array, weights: Array) -> _Totals:
    loss_sum = totals.loss_sum + (loss * weights).sum()
    if totals.correct_sum is None:
        return _Totals(loss_sum, None)
    return _Totals(loss_sum, totals.correct_sum + (_is_best(logits, target) * weights).sum())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked_totals(
    smoothing: float, count: bool, hidden: Array, output: Output, target: Array, weights: Array
) -> _Totals:
    def add(totals: _Totals, chunk: tuple[Array, Array, Array]) -> tuple[_Totals, None]:
        hidden, target, weights = chunk
        logits = _project(hidden, output)
        loss = _entropies(logits, target, smoothing)
        return _add_chunk(totals, loss, logits, target, weights), None

    return jax.lax.scan(add, _no_totals(count), (hidden, target, weights))[0]


def _chunked_totals_forward(
    smoothing: float, count: bool, hidden: Array, output: Output, target: Array, weights: Array
) -> tuple[_Totals, tuple[Array, Output]]:
    """The gradient is made here, where the logits are at hand; the backward pass only scales it.

    By the logits it is the softmax minus what is expected of it. The softmax is exponentials over their sum;
    only the exponentials are of the size of the logits, and they go into the two products as they are: the
    sum and the weights scale single tokens, before or after, and what is expected is the same for all words
    but one.
    """
    size = output.table.shape[0]
    table = output.table.astype(hidden.dtype)
    table_mean = table.mean(0, dtype=jnp.float32)
    bias: Array = jnp.zeros(()) if output.bias is None else output.bias

    def add(
        sums: tuple[_Totals, Output], chunk: tuple[Array, Array, Array]
    ) -> tuple[tuple[_Totals, Output], Array]:
        totals, gradient = sums
        hidden, target, weights = chunk
        logits = _project(hidden, output)
        largest = logits.max(axis=-1, keepdims=True)
        exponentials = jnp.exp(logits - largest)
        total = exponentials.sum(axis=-1)
        # Of a token's logits two numbers are left to find, by products of their own instead of a second look.
        wide = hidden.astype(jnp.float32)
        at_target = (wide * table[target]).sum(-1) + (bias[target] if bias.ndim else bias)
        mean = (wide * table_mean).sum(-1) + bias.mean()
        loss = jnp.log(total) + largest[..., 0] - (1 - smoothing) * at_target - smoothing * mean
        totals = _add_chunk(totals, loss, logits, target, weights)
        narrow = exponentials.astype(hidden.dtype)
        shares = (weights / total)[..., None]  # of a token's exponentials in the gradient
        even = weights[..., None] * smoothing
        extra = weights[..., None] * (1 - smoothing)  # what the target word has above the others
        by_hidden = shares * jnp.einsum("BTV,VD->BTD", narrow, table, preferred_element_type=jnp.float32)
        by_hidden = by_hidden - even * table_mean - extra * table[target]
        scaled = (wide * shares).astype(hidden.dtype)
        by_table = jnp.einsum("BTD,BTV->DV", scaled, narrow, preferred_element_type=jnp.float32)
        by_table = by_table - (even * wide).sum((0, 1))[:, None] / size
        by_bias = gradient.bias
        if by_bias is not None:
            by_bias = by_bias + (exponentials * shares).sum((0, 1)) - even.sum() / size
        return (totals, Output(gradient.table + by_table, by_bias)), by_hidden.astype(hidden.dtype)

    # The table's gradient is added up with its axes swapped: then no chunk's logits need to be transposed.
    zeros = Output(table.T, output.bias)
    start = (_no_totals(count), jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), zeros))
    (totals, by_output), by_hidden = jax.lax.scan(add, start, (hidden, target, weights))
    extra = weights[..., None] * (1 - smoothing)
    by_table = by_output.table.T.at[target].add(-extra * hidden.astype(jnp.float32))
    by_bias = None if by_output.bias is None else by_output.bias.at[target].add(-extra[..., 0])
    return totals, (by_hidden, Output(by_table, by_bias))


def _chunked_totals_backward(
    smoothing: float, count: bool, saved: tuple[Array, Output], gradient: _Totals
) -> tuple[Array, Output, None, None]:
    by_hidden, by_output = saved
    scale = gradient.loss_sum  # what is counted has no gradient
    return by_hidden * scale.astype(by_hidden.dtype), jax.tree.map(lambda x: x * scale, by_output), None, None


_chunked_totals.defvjp(_chunked_totals_forward, _chunked_totals_backward)


def _is_best(logits: Array, target: Array) -> Array:
    """[B, T] bool: whether argmax, which takes the first of equals, is the target; not where a NaN is.

    Comparing is a plain reduction, which costs CPUs far less than finding a place.
    """
    at_target = jnp.take_along_axis(logits, target[..., None], axis=-1)
    before = jnp.arange(logits.shape[-1]) < target[..., None]
    return jnp.where(before, logits < at_target, logits <= at_target).all(axis=-1)


@typed
def count_correct(
    logits: Float[Array, "B T V"], target: Int[Array, "B T"], mask: Bool[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """How many real tokens the most probable word gets right, and how many there are."""
    correct = _is_best(jnp.asarray(logits), jnp.asarray(target)) & jnp.asarray(mask)
    return correct.sum().astype(jnp.float32), jnp.asarray(mask, jnp.float32).sum()
