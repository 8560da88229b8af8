"""Cross-entropy from hidden states and the output matrix: logits exist for only one chunk at a time."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from flaxformer_mt.flops import loss_chunk_width
from flaxformer_mt.kernels.bfloat16 import take_rows
from flaxformer_mt.kernels.matmul import multiply
from flaxformer_mt.parallel.sharding import constrain
from flaxformer_mt.shapes import Array

Multiply = Callable[[str, Array, Array], Array]


class Output(NamedTuple):
    """The output layer: logits = x @ table.T + bias."""

    table: Float[Array, "V D"]
    bias: Float[Array, "V"] | None


class _Chunk(NamedTuple):
    """Tokens whose logits are computed together; or all chunks, stacked."""

    hidden: Array
    target: Array
    weights: Array


class Totals(NamedTuple):
    """Weighted sums over tokens: the losses, and the number of correct tokens (None if not counted)."""

    loss_sum: Array
    correct_sum: Array | None


class _Words(NamedTuple):
    """Scores of all vocabulary entries for each token: exponentials of logits minus `shift`, and their sum.

    exponentials: [B, T, V], in the dtype of the hidden states. correct: whether the target is the most
    probable entry; None if not requested.
    """

    shift: Array
    total: Array
    exponentials: Array
    correct: Array | None


def score_words(multiply: Multiply, hidden: Array, output: Output, target: Array | None) -> _Words:
    """Score all vocabulary entries; with `target`, also compare the most probable entry with the target."""
    logits = project(multiply, hidden, output)
    largest = logits.max(axis=-1).astype(jnp.float32)
    exponentials = jnp.exp(logits.astype(jnp.float32) - largest[..., None])
    correct = None if target is None else _is_argmax(logits, target)
    return _Words(largest, exponentials.sum(axis=-1), exponentials.astype(hidden.dtype), correct)


def score_in_bfloat16(multiply: Multiply, hidden: Array, output: Output, target: Array | None) -> _Words:
    """Do the same as `score_words`, with logits in `hidden.dtype`, because GPUs write and reread logits."""
    return score_words(lambda *operands: multiply(*operands).astype(hidden.dtype), hidden, output, target)


def score_rounded(multiply: Multiply, hidden: Array, output: Output, target: Array | None) -> _Words:
    """Do the same as `score_words`, but sum exponentials, at most exp(0) = 1, rounded to `hidden.dtype`.

    To sum unrounded exponentials, XLA's CPU compiler would write them in float32 and read them twice: for the
    sum and for rounding.
    """
    words = score_words(multiply, hidden, output, target)
    return words._replace(total=words.exponentials.sum(axis=-1, dtype=jnp.float32))


def score_in_two_passes(multiply: Multiply, hidden: Array, output: Output, target: Array | None) -> _Words:
    """Do the same as `score_words`, but compute the logits twice, unless `target` is given.

    A TPU computes the largest logit, and then the exponentials, as part of the product. Computing the
    product twice is faster for it than writing and reading logits in float32.
    """
    if target is not None:
        return score_words(multiply, hidden, output, target)
    largest = project(multiply, *jax.lax.optimization_barrier((hidden, output))).max(axis=-1)
    exponentials = jnp.exp(project(multiply, hidden, output) - largest[..., None])
    return _Words(largest, exponentials.sum(axis=-1), exponentials.astype(hidden.dtype), None)


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """The cross-entropy in chunks of tokens, with gradients computed in the same pass.

    For each chunk, one pass computes the logits, scores them, compares the most probable entry with the
    target if requested, and computes gradients while the logits are in the CPU's cache. score: the function
    that scores a chunk.
    """

    multiply: Multiply = multiply
    score: Callable[..., _Words] = score_words

    def __call__(
        self,
        hidden: Array,
        output: Output,
        target: Array,
        weights: Array,
        *,
        smoothing: float,
        chunk_tokens: int,
        count: bool = False,
    ) -> Totals:
        """Sum the cross-entropy in nats with label smoothing (Szegedy et al. 2016, section 7).

        The target distribution has 1 - smoothing on the target and smoothing / V on every vocabulary entry.
        hidden: [B, T, D]; target, weights: [B, T]. Chunks of about `chunk_tokens` tokens split the axis T.
        With `count`, the correct tokens are summed as well.
        """
        chunks = cut_chunks(_Chunk(hidden, target, weights), chunk_tokens)
        return _sum_chunks(self, smoothing, count, output, chunks)


def cut_chunks(arrays: Any, chunk_tokens: int) -> Any:
    """Cut arrays [B, T, ...] into [chunks, B, width, ...], where B * width is about `chunk_tokens`."""
    rows, length = jax.tree.leaves(arrays)[0].shape[:2]
    width = loss_chunk_width(rows, length, chunk_tokens=chunk_tokens)

    def cut(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, -length % width)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(rows, -1, width, *x.shape[2:]).swapaxes(0, 1)

    return jax.tree.map(cut, arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _sum_chunks(
    kernel: CrossEntropy, smoothing: float, count: bool, output: Output, chunks: _Chunk
) -> Totals:
    def add(totals: Totals, chunk: _Chunk) -> tuple[Totals, None]:
        logits = project(kernel.multiply, chunk.hidden, output)
        loss = _entropies(logits, chunk.target, smoothing)
        correct = _is_argmax(logits, chunk.target) if count else None
        return _add_chunk(totals, loss, correct, chunk.weights), None

    return jax.lax.scan(add, _no_totals(count), chunks)[0]


def _sum_chunks_forward(
    kernel: CrossEntropy, smoothing: float, count: bool, output: Output, chunks: _Chunk
) -> tuple[Totals, tuple[Output, Array]]:
    """Compute the gradients together with the totals; the backward pass only scales them.

    The gradient of the logits is the softmax minus the smoothed target distribution. The softmax is the
    exponentials divided by their sum. Only the exponentials have the size of the logits, and both products
    take them unscaled: sums and weights scale single tokens before or after a product, and the target
    distribution is equal for all vocabulary entries but one.
    """
    size, table = output.table.shape[0], output.table.astype(chunks.hidden.dtype)
    table_mean = table.sum(0, dtype=jnp.float32) / size
    bias: Array = jnp.zeros(()) if output.bias is None else output.bias

    def add(sums: tuple[Totals, Output], chunk: _Chunk) -> tuple[tuple[Totals, Output], Array]:
        totals, gradient = sums
        hidden, target, weights = chunk
        words = kernel.score(kernel.multiply, hidden, output._replace(table=table), target if count else None)
        # The row of the table under the target distribution gives its mean logit without a second pass over
        # the logits, and is what the gradient of the hidden states lacks.
        hidden32 = hidden.astype(jnp.float32)
        expected_row = (1 - smoothing) * take_rows(table, target).astype(jnp.float32) + smoothing * table_mean
        expected_bias = (1 - smoothing) * (bias[target] if bias.ndim else bias) + smoothing * bias.mean()
        loss = jnp.log(words.total) + words.shift - (hidden32 * expected_row).sum(-1) - expected_bias
        totals = _add_chunk(totals, loss, words.correct, weights)
        exponentials = words.exponentials
        factors = (weights / words.total)[..., None]  # of the exponentials in the gradient
        even_mass = (weights * smoothing)[..., None]
        d_hidden = factors * kernel.multiply("BTV,VD->BTD", exponentials, table)
        d_hidden = d_hidden - weights[..., None] * expected_row
        scaled = (hidden32 * factors).astype(hidden.dtype)
        d_table = kernel.multiply("BTD,BTV->DV", scaled, exponentials)
        d_table = d_table - (even_mass * hidden32).sum((0, 1))[:, None] / size
        d_bias = gradient.bias
        if d_bias is not None:
            d_bias = (
                d_bias + (exponentials.astype(jnp.float32) * factors).sum((0, 1)) - even_mass.sum() / size
            )
        so_far = Output(constrain(jnp.asarray(gradient.table) + d_table, "DV"), d_bias)
        return (totals, so_far), d_hidden.astype(hidden.dtype)

    # The table's gradient is accumulated as [D, V], so that no chunk's logits need to be transposed.
    zeros = Output(table.T, output.bias)
    start = (_no_totals(count), jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), zeros))
    (totals, d_output), d_hidden = jax.lax.scan(add, start, chunks)
    d_output = d_output._replace(table=d_output.table.T)
    return totals, (_subtract_targets(d_output, smoothing, chunks), d_hidden)


def _subtract_targets(gradient: Output, smoothing: float, chunks: _Chunk) -> Output:
    """Subtract the target distributions from the gradients, except the smoothing that all entries share."""
    hidden, target, weights = chunks
    mass = weights * (1 - smoothing)
    table = jnp.asarray(gradient.table).at[target].add(-mass[..., None] * hidden.astype(jnp.float32))
    return Output(table, None if gradient.bias is None else gradient.bias.at[target].add(-mass))


def _sum_chunks_backward(
    kernel: CrossEntropy, smoothing: float, count: bool, saved: tuple[Output, Array], gradient: Totals
) -> tuple[Output, _Chunk]:
    d_output, d_hidden = saved
    scale = gradient.loss_sum  # correct_sum has no gradient
    d_hidden = d_hidden * scale.astype(d_hidden.dtype)
    nothing: Any = None  # the targets and their weights are data
    return jax.tree.map(lambda x: x * scale, d_output), _Chunk(d_hidden, nothing, nothing)


_sum_chunks.defvjp(_sum_chunks_forward, _sum_chunks_backward)


def _entropies(logits: Array, target: Array, smoothing: float) -> Array:
    log_total = jax.nn.logsumexp(logits, axis=-1)
    at_target = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    loss = log_total - (1 - smoothing) * at_target
    return loss - smoothing * logits.mean(axis=-1) if smoothing else loss


def project(multiply: Multiply, hidden: Array, output: Output) -> Array:
    """Compute the logits [B, T, V] of hidden states."""
    table = output.table.astype(hidden.dtype)
    logits = multiply("BTD,VD->BTV", hidden, table)
    return constrain(logits if output.bias is None else logits + output.bias, "BTV")


def _no_totals(count: bool) -> Totals:
    return Totals(jnp.zeros(()), jnp.zeros(()) if count else None)


def _add_chunk(totals: Totals, loss: Array, correct: Array | None, weights: Array) -> Totals:
    loss_sum = totals.loss_sum + (loss * weights).sum()
    if totals.correct_sum is None or correct is None:
        return Totals(loss_sum, None)
    return Totals(loss_sum, totals.correct_sum + (correct.astype(weights.dtype) * weights).sum())


def _is_argmax(logits: Array, target: Array) -> Array:
    """Return whether the target is the argmax (the first of equal logits), [B, T]; False where one is NaN.

    A comparison is a plain reduction, which is far cheaper on CPUs than argmax.
    """
    at_target = jnp.take_along_axis(logits, target[..., None], axis=-1)
    before = jnp.arange(logits.shape[-1]) < target[..., None]
    return jnp.where(before, logits < at_target, logits <= at_target).all(axis=-1)


def maxima_of_chunks(chunks: Array) -> Array:
    """Return the maxima over the last axis, behind an optimization barrier.

    Without the barrier, XLA would compute the maximum of all maxima from `chunks`, which it would read again.
    """
    return jax.lax.optimization_barrier(chunks.max(axis=-1))
