"""Score penalties of hypotheses: for length and for coverage of the source."""

import jax.numpy as jnp

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.shapes import Array

# Lower bound of the coverage of a source position: float32 rounds small attention weights to 0, whose
# logarithm would be -inf.
_MIN_COVERAGE = 1e-10


def length_penalty(lengths: Array, options: SearchConfig) -> Array:
    """Return the divisor of each hypothesis's log-probability, given its length including eos.

    gnmt: ((5 + length) / 6) ** alpha (Wu et al. 2016, equation 14). length: length ** alpha.
    """
    lengths = lengths.astype(jnp.float32)
    base = (5.0 + lengths) / 6.0 if options.length_penalty_kind == "gnmt" else jnp.maximum(lengths, 1.0)
    return base**options.length_penalty


def coverage_penalty(coverage: Array, source_mask: Array, options: SearchConfig) -> Array:
    """Return beta * (sum over source tokens of log(min(coverage, 1))), which is at most 0 (Wu et al. 2016).

    The coverage of a source token is the attention it has received so far. Shapes: coverage [B, W, S],
    source_mask [B, S] -> [B, W].
    """
    terms = jnp.log(jnp.clip(coverage, _MIN_COVERAGE, 1.0))
    return options.coverage_penalty * jnp.where(source_mask[:, None, :], terms, 0.0).sum(axis=-1)


def attainable(log_probs: Array, next_length: Array, limits: Array, options: SearchConfig) -> Array:
    """Return the best score [B] that any live prefix, with `log_probs` [B, W], can still reach.

    Log-probabilities can only decrease, so the bound takes them as constant. The length penalty is monotone
    in the length, so the best score is at the next length or at the limit [B], whatever the sign of alpha.
    The coverage penalty is at most 0, so the bound takes it as 0.
    """
    best = log_probs.max(axis=1)
    at_next_length, at_limit = length_penalty(next_length, options), length_penalty(limits, options)
    return jnp.maximum(best / at_next_length, best / at_limit)
