"""What a hypothesis is worth: length penalty, coverage penalty, and the best that is still attainable.

Owns the formulas. Knows nothing of beams, caches or loops.
"""

import jax.numpy as jnp

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.shapes import Array

# Source positions that no token looked at count as if this much attention had fallen on them, not as
# infinitely bad: float32 rounds weights off to 0.
_LEAST_COVERAGE = 1e-10


def length_penalty(lengths: Array, options: SearchConfig) -> Array:
    """What log-probabilities of hypotheses of these lengths, eos included, are divided by.

    gnmt: ((5 + length) / 6) ** alpha (Wu et al. 2016, equation 14). length: length ** alpha.
    """
    lengths = lengths.astype(jnp.float32)
    base = (5.0 + lengths) / 6.0 if options.length_penalty_kind == "gnmt" else jnp.maximum(lengths, 1.0)
    return base**options.length_penalty


def coverage_penalty(coverage: Array, source_mask: Array, options: SearchConfig) -> Array:
    """beta times the sum over source tokens of log(min(attention so far, 1)), at most 0 (Wu et al. 2016).

    coverage [B, W, S], source_mask [B, S] -> [B, W].
    """
    terms = jnp.log(jnp.clip(coverage, _LEAST_COVERAGE, 1.0))
    return options.coverage_penalty * jnp.where(source_mask[:, None, :], terms, 0.0).sum(axis=-1)


def attainable(log_probs: Array, next_length: Array, limits: Array, options: SearchConfig) -> Array:
    """The best score [B] that any live prefix of log-probability [B, W] could still reach.

    Log-probabilities only fall, so at best they stay. The penalty is monotone in the length, so the best
    score lies at the next length or at the limit [B], whichever sign alpha has. Coverage costs 0 at best.
    """
    best = log_probs.max(axis=1)
    soon, late = length_penalty(next_length, options), length_penalty(limits, options)
    return jnp.maximum(best / soon, best / late)
