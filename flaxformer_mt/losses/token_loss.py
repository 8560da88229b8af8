"""The loss of the target tokens: cross-entropy of a model's hidden states, summed over the real tokens."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from flaxformer_mt.kernels.cross_entropy import Mixture, Output
from flaxformer_mt.shapes import Array, typed


class TokenSums(NamedTuple):
    """Sums of a loss over real tokens; weight is the number of real tokens, or the sum of their weights.

    correct_sum: the number of tokens whose most probable word is the target; None if not counted.
    """

    loss_sum: Float[Array, ""]
    weight: Float[Array, ""]
    correct_sum: Float[Array, ""] | None = None


@typed
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
    """Sum the cross-entropy in nats, and with `count` the correct tokens, of a model's hidden states.

    Args:
      module: the model, bound to its parameters, with the method `output_layer` and its `kernels`.
      smoothing: label smoothing (Szegedy et al. 2016, section 7).
      chunk_tokens: about how many tokens have logits in memory at a time. 0: all.
      token_weights: weights of the tokens in all sums. None: 1.
      mixture: the distributions to learn instead of the smoothed targets.
    """
    weights = jnp.asarray(mask, jnp.float32)
    if token_weights is not None:
        weights = weights * token_weights
    totals = module.kernels.cross_entropy(
        hidden,
        Output(*module.output_layer()),
        jnp.asarray(target),
        weights,
        smoothing=smoothing,
        chunk_tokens=chunk_tokens or target.size,
        count=count,
        mixture=mixture,
    )
    return TokenSums(totals.loss_sum, weights.sum(), totals.correct_sum)
