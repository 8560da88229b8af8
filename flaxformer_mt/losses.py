"""The losses of training: cross-entropy with smoothed labels, and that of guided alignment."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, UInt8

from flaxformer_mt.kernels.cross_entropy import Output
from flaxformer_mt.shapes import Array, Batch, typed


class AlignmentSums(NamedTuple):
    """Sum of the loss of alignments over target tokens; weight is the number of aligned target tokens."""

    loss_sum: Float[Array, ""]
    weight: Float[Array, ""]


@typed
def alignment_cross_entropy(
    scores: Float[Array, "B T S"], links: UInt8[Array, "B T S8"], *, delay: int = 0
) -> AlignmentSums:
    """Compute the cross-entropy between attention and alignments (Garg et al. 2019), in nats.

    The source tokens that a target token is aligned with have equal shares of its distribution; target tokens
    without alignment are left out.

    Args:
      scores: of the attention before its softmax, very negative where it is masked.
      links: the alignments as bits, see `Batch`.
      delay: number of steps after the one that predicts a token whose attention aligns it: 1 for the step
        that reads it (Chen et al. 2020). A sequence ends in eos, which is not aligned, so this many of its
        steps exist for each other token, also in packed rows.
    """
    scores, links = scores[:, delay:], links[:, : links.shape[1] - delay]
    bits = (jnp.asarray(links)[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
    linked = bits.reshape(*links.shape[:2], -1)[..., : scores.shape[2]] > 0
    count = linked.sum(axis=-1)
    loss = -jnp.where(linked, jax.nn.log_softmax(scores, axis=-1), 0).sum(axis=-1) / jnp.maximum(count, 1)
    return AlignmentSums(loss.sum(), (count > 0).sum(dtype=jnp.float32))


class TokenSums(NamedTuple):
    """Sums of a loss over real tokens; weight is the number of real tokens, or the sum of their weights.

    correct_sum: the number of tokens whose most probable word is the target; None if not counted.
    """

    loss_sum: Float[Array, ""]
    weight: Float[Array, ""]
    correct_sum: Float[Array, ""] | None = None


@typed
def smoothed_cross_entropy(
    module: Any,
    hidden: Float[Array, "B T D"],
    batch: Batch,
    *,
    smoothing: float,
    chunk_tokens: int,
    count: bool,
) -> TokenSums:
    """Sum the cross-entropy in nats, and with `count` the correct tokens, of a model's hidden states.

    Args:
      module: the model, bound to its parameters, with the method `output_layer` and its `kernels`.
      smoothing: label smoothing (Szegedy et al. 2016, section 7).
      chunk_tokens: about how many tokens have logits in memory at a time. 0: all.
    """
    target, weights = jnp.asarray(batch.target_out), jnp.asarray(batch.target_mask, jnp.float32)
    weights = weights if batch.target_weights is None else weights * batch.target_weights
    totals = module.kernels.cross_entropy(
        hidden,
        Output(*module.output_layer()),
        target,
        weights,
        smoothing=smoothing,
        chunk_tokens=chunk_tokens or target.size,
        count=count,
    )
    return TokenSums(totals.loss_sum, weights.sum(), totals.correct_sum)
