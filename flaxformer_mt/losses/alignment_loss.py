"""The loss of guided alignment: cross-entropy between attention and given word alignments."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, UInt8

from flaxformer_mt.shapes import Array, typed


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
