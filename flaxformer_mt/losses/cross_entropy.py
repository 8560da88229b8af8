"""Cross-entropy of hidden states and the matrix of the output layer: logits are made a chunk at a time."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from flaxformer_mt.flops import loss_chunk_width
from flaxformer_mt.losses.chunks import scan_chunks
from flaxformer_mt.losses.target_mixture import Mixture, logits_at_teacher, mean_of_teacher
from flaxformer_mt.model.bfloat16 import narrow, take_rows
from flaxformer_mt.model.products import einsum_to_float32, multiply_and_sum, sum_columns, sum_rows
from flaxformer_mt.shapes import (
    Array,
    SharedByRows,
    constrain,
    row_parts,
    share_by_rows,
    sum_over_row_parts,
    typed,
)


class Output(NamedTuple):
    """The output layer: logits = x @ table.T + bias."""

    table: Float[Array, "V D"] | SharedByRows
    bias: Float[Array, "V"] | None


class TokenSums(NamedTuple):
    """Sums of a loss over real tokens; weight is the number of real tokens.

    correct_sum: the number of tokens whose most probable word is the target; None if not counted.
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
    token_weights: Float[Array, "B T"] | None = None,
    mixture: Mixture | None = None,
) -> TokenSums:
    """Compute the cross-entropy in nats with label smoothing (Szegedy et al. 2016, section 7).

    The sums are over the real tokens, each multiplied by its weight if `token_weights` are given; the weight
    of the result is the sum of these weights.

    The target distribution has 1 - smoothing on the target and smoothing / V on every vocabulary entry, or is
    `mixture`. The target axis is split into chunks of about `chunk_tokens` tokens. One pass computes the
    logits of a chunk, scores them, compares the most probable words with the target if `count`, and computes
    their gradients while they are in the CPU cache. The batch axis stays whole, so it can be sharded over
    devices: a chunk has about `chunk_tokens` tokens of each device.
    """
    weights = jnp.asarray(mask, jnp.float32)
    if token_weights is not None:
        weights = weights * token_weights
    rows, length = target.shape
    width = loss_chunk_width(rows // row_parts(rows), length, chunk_tokens=chunk_tokens)
    padding = -length % width

    def cut(x: Array) -> Array:  # [B, T, ...] -> [chunks, B, width, ...]
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(x.shape[0], -1, width, *x.shape[2:]).swapaxes(0, 1)

    def add_chunks(rows: tuple[Array, Array, Array, Mixture | None], output: Output) -> _Totals:
        hidden, target, weights, mixture = jax.tree.map(cut, rows)
        return _chunked_totals(smoothing, count, hidden, output, target, weights, mixture)

    if not isinstance(output.table, SharedByRows):
        # A table that is split along D is gathered once, not in each chunk.
        output = output._replace(table=share_by_rows(output.table, "VD"))
    totals = sum_over_row_parts(add_chunks, (hidden, jnp.asarray(target), weights, mixture), output)
    return TokenSums(totals.loss_sum, weights.sum(), totals.correct_sum)


def _entropies(logits: Array, target: Array, smoothing: float, mixture: Mixture | None) -> Array:
    log_total = jax.nn.logsumexp(logits, axis=-1)
    at_target = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    if mixture is not None:
        at_teacher = (mixture.teacher * jnp.take_along_axis(logits, mixture.ids, axis=-1)).sum(-1)
        return log_total - mixture.target * at_target - at_teacher - mixture.even * logits.mean(axis=-1)
    loss = log_total - (1 - smoothing) * at_target
    return loss - smoothing * logits.mean(axis=-1) if smoothing else loss


def _project(hidden: Array, output: Output) -> Array:
    table = output.table.astype(hidden.dtype)
    logits = einsum_to_float32("BTD,VD->BTV", hidden, table)
    return constrain(logits if output.bias is None else logits + output.bias, "BTV")


class _Totals(NamedTuple):
    """Sums over the chunks so far; `correct_sum` is None if not counted."""

    loss_sum: Array
    correct_sum: Array | None


def _no_totals(count: bool) -> _Totals:
    return _Totals(jnp.zeros(()), jnp.zeros(()) if count else None)


def _add_chunk(totals: _Totals, loss: Array, correct: Array | None, weights: Array) -> _Totals:
    loss_sum = totals.loss_sum + (loss * weights).sum()
    if totals.correct_sum is None or correct is None:
        return _Totals(loss_sum, None)
    return _Totals(loss_sum, totals.correct_sum + (correct.astype(weights.dtype) * weights).sum())


class _Scores(NamedTuple):
    """The words of each token: exponentials of logits minus `shift`, and their sum.

    exponentials: [B, T, V], in the dtype of the hidden states. correct: whether the target is the most
    probable word; None if not asked for.
    """

    shift: Array
    total: Array
    exponentials: Array
    correct: Array | None


def _score_words(hidden: Array, output: Output, target: Array | None) -> _Scores:
    """Score all words; with `target`, compare the most probable one with it."""

    def with_logits(hidden: Array, output: Output, *, round_first: bool = False) -> _Scores:
        logits = _project(hidden, output)
        largest = logits.max(axis=-1)
        exponentials = jnp.exp(logits - largest[..., None])
        correct = None if target is None else _is_argmax(logits, target)
        if round_first:
            # XLA's CPU compiler would write the exponentials in float32, and read them twice: for their sum
            # and to round them. This is the sum of the rounded ones, of which the largest, 1, is exact.
            rounded = narrow(exponentials, hidden.dtype)
            return _Scores(largest, sum_columns(rounded), rounded, correct)
        return _Scores(largest, exponentials.sum(axis=-1), exponentials.astype(hidden.dtype), correct)

    def in_two_passes(hidden: Array, output: Output) -> _Scores:
        # A TPU computes the largest logit, and then the exponentials, at the end of a product: to compute
        # the product twice takes it less time than to write and to read logits in float32.
        largest = _project(*jax.lax.optimization_barrier((hidden, output))).max(axis=-1)
        exponentials = jnp.exp(_project(hidden, output) - largest[..., None])
        return _Scores(largest, exponentials.sum(axis=-1), exponentials.astype(hidden.dtype), None)

    tpu = in_two_passes if target is None else with_logits
    cpu = functools.partial(with_logits, round_first=True)
    return jax.lax.platform_dependent(hidden, output, tpu=tpu, cpu=cpu, default=with_logits)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked_totals(
    smoothing: float,
    count: bool,
    hidden: Array,
    output: Output,
    target: Array,
    weights: Array,
    mixture: Mixture | None,
) -> _Totals:
    def add(totals: _Totals, chunk: tuple[Any, ...]) -> tuple[_Totals, None]:
        hidden, target, weights, mixture = chunk
        logits = _project(hidden, output)
        loss = _entropies(logits, target, smoothing, mixture)
        return _add_chunk(totals, loss, _is_argmax(logits, target) if count else None, weights), None

    return jax.lax.scan(add, _no_totals(count), (hidden, target, weights, mixture))[0]


def _chunked_totals_forward(
    smoothing: float,
    count: bool,
    hidden: Array,
    output: Output,
    target: Array,
    weights: Array,
    mixture: Mixture | None,
) -> tuple[_Totals, tuple[Array, Output]]:
    """Compute the gradients together with the totals; the backward pass only scales them.

    The gradient of the logits is the softmax minus the smoothed target distribution. The softmax is
    exponentials over their sum; only the exponentials have the size of the logits, and both products take
    them unscaled: the sum and the weights scale single tokens before or after a product, and the target
    distribution is equal for all words but one, and those of a teacher.
    """
    size, table = output.table.shape[0], output.table.astype(hidden.dtype)
    table_mean = sum_rows(table, 1) / size
    bias: Array = jnp.zeros(()) if output.bias is None else output.bias

    def add(sums: tuple[_Totals, Output], chunk: tuple[Any, ...]) -> tuple[tuple[_Totals, Output], Array]:
        totals, gradient = sums
        hidden, target, weights, mixture = chunk
        shares = (1 - smoothing, smoothing) if mixture is None else (mixture.target, mixture.even)
        scores = _score_words(hidden, output._replace(table=table), target if count else None)
        # The row of the table under the target distribution gives its mean logit without a second pass over
        # the logits, and is what the gradient of the hidden states lacks.
        hidden32 = hidden.astype(jnp.float32)
        target_share, even_share = (jnp.asarray(share)[..., None] for share in shares)
        expected_row = target_share * take_rows(table, target).astype(jnp.float32) + even_share * table_mean
        expected_bias = shares[0] * (bias[target] if bias.ndim else bias) + shares[1] * bias.mean()
        loss = jnp.log(scores.total) + scores.shift - multiply_and_sum(hidden32, expected_row) - expected_bias
        if mixture is not None:
            loss = loss - logits_at_teacher(hidden32, table, bias, mixture)
        totals = _add_chunk(totals, loss, scores.correct, weights)
        exponentials = scores.exponentials
        factors = (weights / scores.total)[..., None]  # of the exponentials in the gradient
        even_mass = (weights * shares[1])[..., None]
        d_hidden = factors * einsum_to_float32("BTV,VD->BTD", exponentials, table)
        d_hidden = d_hidden - weights[..., None] * expected_row
        if mixture is not None:
            d_hidden = d_hidden - weights[..., None] * mean_of_teacher(table, mixture)
        scaled = narrow(hidden32 * factors, hidden.dtype)
        d_table = einsum_to_float32("BTD,BTV->DV", scaled, exponentials)
        d_table = d_table - (even_mass * hidden32).sum((0, 1))[:, None] / size
        d_bias = gradient.bias
        if d_bias is not None:
            d_bias = (
                d_bias + (exponentials.astype(jnp.float32) * factors).sum((0, 1)) - even_mass.sum() / size
            )
        so_far = Output(constrain(jnp.asarray(gradient.table) + d_table, "DV"), d_bias)
        return (totals, so_far), narrow(d_hidden, hidden.dtype)

    # The table's gradient is accumulated as [D, V], so that no chunk's logits need to be transposed.
    zeros = Output(table.T, output.bias)
    start = (_no_totals(count), jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), zeros))
    (totals, d_output), d_hidden = scan_chunks(add, start, (hidden, target, weights, mixture))
    d_output = d_output._replace(table=d_output.table.T)
    return totals, (d_hidden, _subtract_targets(d_output, smoothing, hidden, target, weights, mixture))


def _subtract_targets(
    gradient: Output,
    smoothing: float,
    hidden: Array,
    target: Array,
    weights: Array,
    mixture: Mixture | None,
) -> Output:
    """Subtract the target distributions from the gradients, but for what all words share."""
    if mixture is None:
        return _subtract_at(gradient, target, weights * (1 - smoothing), hidden)
    gradient = _subtract_at(gradient, target, weights * mixture.target, hidden)
    for place in range(mixture.ids.shape[-1]):
        mass = weights * mixture.teacher[..., place]
        gradient = _subtract_at(gradient, mixture.ids[..., place], mass, hidden)
    return gradient


def _subtract_at(gradient: Output, ids: Array, mass: Array, hidden: Array) -> Output:
    """Subtract the mass of one token per position from the gradients of its row of the table and its bias."""
    table = jnp.asarray(gradient.table).at[ids].add(-mass[..., None] * hidden.astype(jnp.float32))
    return Output(table, None if gradient.bias is None else gradient.bias.at[ids].add(-mass))


def _chunked_totals_backward(
    smoothing: float, count: bool, saved: tuple[Array, Output], gradient: _Totals
) -> tuple[Array, Output, None, None, None]:
    d_hidden, d_output = saved
    scale = gradient.loss_sum  # correct_sum has no gradient
    d_hidden = d_hidden * scale.astype(d_hidden.dtype)
    return d_hidden, jax.tree.map(lambda x: x * scale, d_output), None, None, None


_chunked_totals.defvjp(_chunked_totals_forward, _chunked_totals_backward)


def _is_argmax(logits: Array, target: Array) -> Array:
    """Tell whether argmax, the first of equal logits, is the target: bool [B, T], False where a logit is NaN.

    A comparison is a plain reduction, which is far cheaper on CPUs than argmax.
    """
    at_target = jnp.take_along_axis(logits, target[..., None], axis=-1)
    before = jnp.arange(logits.shape[-1]) < target[..., None]
    return jnp.where(before, logits < at_target, logits <= at_target).all(axis=-1)


def sum_over_tokens(
    module: Any,
    hidden: Float[Array, "B T D"],
    target: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    smoothing: float,
    chunk_tokens: int,
    count: bool,
    token_weights: Float[Array, "B T"] | None = None,
    mixture: Mixture | None = None,
) -> TokenSums:
    """Sum the loss, and with `count` the correct tokens, of a model's hidden states over the real tokens.

    Args:
      module: the model, bound to its parameters, with the method `shared_output_layer`.
      token_weights: weights of the tokens in all sums. None: 1.
      mixture: the distributions to learn instead of the smoothed targets.
      chunk_tokens: about how many tokens have logits in memory at a time. 0: all.
    """
    output = Output(*module.shared_output_layer())
    return projected_cross_entropy(
        hidden,
        output,
        target,
        mask,
        smoothing=smoothing,
        chunk_tokens=chunk_tokens or target.size,
        count=count,
        token_weights=token_weights,
        mixture=mixture,
    )
