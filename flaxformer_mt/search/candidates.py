"""What every search method shares: its result, the length penalty, and the best next tokens of each beam.

Owns the conventions of scores; knows nothing of loops, caches or stopping.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from flaxformer_mt.shapes import Array, Cache, typed

# From the last tokens [B, W] and the cache: float32 logits [B, W, V] of the next ones, and the cache grown
# by one.
NextLogits = Callable[[Array, Cache], tuple[Array, Cache]]

# Vocabularies are looked through in chunks of this many entries (see `_top_k`).
_CHUNK = 64


class SearchResult(NamedTuple):
    """The N best hypotheses of each sentence, best first.

    `tokens` have no bos, end in eos where the hypothesis is finished, and are pad after that; `lengths`
    count them with their eos. `log_probs` are plain sums, `scores` those divided by the length penalty. A
    hypothesis that does not exist (a search space smaller than N, logits that are not numbers) has length 0
    and -inf twice.
    """

    tokens: Int[Array, "B N T"]
    scores: Float[Array, "B N"]
    log_probs: Float[Array, "B N"]
    lengths: Int[Array, "B N"]


def penalty_of(lengths: Array, alpha: float) -> Array:
    """((5 + length) / 6) ** alpha, by which log-probabilities are divided (Wu et al. 2016, equation 14)."""
    return ((5.0 + lengths.astype(jnp.float32)) / 6.0) ** alpha


@typed
def top_candidates(
    logits: Float[Array, "B W V"], *, count: int, banned: tuple[int, ...]
) -> tuple[Float[Array, "B W C"], Int[Array, "B W C"]]:
    """The `count` most probable next tokens of each beam: float32 log-probabilities, best first, and ids.

    Banned ids are never chosen, but keep their probability: scores are those of the model. Where any logit is
    not a number, the whole beam is impossible (-inf), so that it cannot displace a sound one.
    """
    logits = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    ids = jnp.arange(logits.shape[-1])
    allowed = jnp.all(jnp.stack([ids != token for token in banned]), axis=0)
    best, tokens = _top_k(jnp.where(allowed, logits, -jnp.inf), count)
    log_probs = best - total
    return jnp.where(jnp.isnan(log_probs), -jnp.inf, log_probs), tokens


def _top_k(values: Array, count: int) -> tuple[Array, Array]:
    """`lax.top_k` over the last axis, up to the order of ties, in two stages.

    The largest `count` values lie in the `count` chunks with the largest maxima, so only those are sorted:
    on a CPU, for 5 of 8,000, that takes a fifth of the time of `lax.top_k`.
    """
    size = values.shape[-1]
    if count * _CHUNK >= size:
        return jax.lax.top_k(values, count)
    num_chunks = -(-size // _CHUNK)
    widths = [(0, 0)] * (values.ndim - 1) + [(0, num_chunks * _CHUNK - size)]
    chunks = jnp.pad(values, widths, constant_values=-jnp.inf).reshape(*values.shape[:-1], num_chunks, _CHUNK)
    _, chosen = jax.lax.top_k(chunks.max(axis=-1), count)  # [..., C]
    kept = jnp.take_along_axis(chunks, chosen[..., None], axis=-2).reshape(*values.shape[:-1], count * _CHUNK)
    best, where = jax.lax.top_k(kept, count)
    ids = jnp.take_along_axis(chosen, where // _CHUNK, axis=-1) * _CHUNK + where % _CHUNK
    return best, jnp.minimum(ids, size - 1)  # a chunk's padding is chosen only where everything is -inf
