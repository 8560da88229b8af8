"""The losses of training: cross-entropy with label smoothing, and the loss of guided alignment."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, UInt8

from flaxformer_mt.kernels.cross_entropy import Output
from flaxformer_mt.shapes import Array, Batch, typed


class AlignmentSums(NamedTuple):
    """The sum of the alignment loss over aligned target tokens, and `weight`, the number of these tokens."""

    loss_sum: Float[Array, ""]
    weight: Float[Array, ""]


@typed
def alignment_cross_entropy(
    scores: Float[Array, "B T S"], links: UInt8[Array, "B T S8"], *, delay: int = 0
) -> AlignmentSums:
    """Compute the cross-entropy between attention and word alignments (Garg et al. 2019), in nats.

    If a target token is aligned with several source tokens, each has an equal share of the target
    distribution. Target tokens without alignment are left out.

    Args:
      scores: the attention scores before the softmax, very negative where they are masked.
      links: the alignments as bits, see `Batch`.
      delay: which decoder step's attention is trained to align a token: 0 for the step that predicts the
        token, 1 for the next step, which reads it (Chen et al. 2020). With delay 1, each aligned token has a
        next step, also in packed rows, since a sequence ends in eos, which is not aligned.
    """
    scores, links = scores[:, delay:], links[:, : links.shape[1] - delay]
    bits = (jnp.asarray(links)[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
    linked = bits.reshape(*links.shape[:2], -1)[..., : scores.shape[2]] > 0
    count = linked.sum(axis=-1)
    loss = -jnp.where(linked, jax.nn.log_softmax(scores, axis=-1), 0).sum(axis=-1) / jnp.maximum(count, 1)
    return AlignmentSums(loss.sum(), (count > 0).sum(dtype=jnp.float32))


class TokenSums(NamedTuple):
    """The sum of a loss over real tokens, and `weight`, the number of these tokens or their total weight.

    correct_sum: the number of tokens whose most probable prediction is the target; None if not counted.
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
    """Sum the cross-entropy, in nats, of the predictions that a model makes from its hidden states.

    Args:
      module: the model, bound to its parameters, with the method `output_layer` and its `kernels`.
      smoothing: the weight of label smoothing (Szegedy et al. 2016, section 7).
      chunk_tokens: about how many tokens have logits in memory at the same time; 0: all.
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
