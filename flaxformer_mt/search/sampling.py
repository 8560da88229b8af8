"""Drawing the next token: temperature, top-k, top-p and min-p, from random numbers of each line's own.

Owns the distributions that are drawn from. Knows nothing of loops or caches.
"""

import math

import jax
import jax.numpy as jnp

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.search.candidates import top_k
from flaxformer_mt.shapes import Array


def make_keys(seeds: Array, width: int) -> Array:
    """One random key for each of `width` samples of each line, [B, W], from the lines' seeds [B].

    A key depends on its line's seed and the number of the sample, so company in a batch changes nothing.
    """
    lines = jax.vmap(lambda seed: jax.random.key(seed, impl="threefry2x32"))(seeds)
    return jax.vmap(lambda key: jax.vmap(lambda n: jax.random.fold_in(key, n))(jnp.arange(width)))(lines)


def draw_tokens(masked: Array, keys: Array, steps: Array, options: SearchConfig) -> Array:
    """One token [B, W] for each row of masked logits [B, W, V], as likely as `keep_likely` leaves it.

    steps [B]: how many tokens each line has.
    """
    values, ids = keep_likely(masked, options)

    def noise(key: Array, step: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(key, step), values.shape[-1:])

    # The largest of logits with Gumbel noise is each token with the probability of its logit.
    chosen = jnp.argmax(values + jax.vmap(jax.vmap(noise, in_axes=(0, None)))(keys, steps), axis=-1)
    return chosen if ids is None else jnp.take_along_axis(ids, chosen[..., None], axis=-1)[..., 0]


def keep_likely(masked: Array, options: SearchConfig) -> tuple[Array, Array | None]:
    """Logits [B, W, C] to draw from, -inf for what is left out, and whose they are (None: C is V, in order).

    Temperature first; then, each over what the one before it left: top_k keeps the k likeliest tokens, top_p
    the fewest likeliest whose probabilities add up to p or more (Holtzman et al. 2020), min_p those with at
    least p times the probability of the likeliest (Nguyen et al. 2024).

    Probabilities .5 .3 .15 .05 with top_p .7: .5 .3 stay, and are drawn with 5/8 and 3/8.
    """
    values, ids = masked / options.temperature, None
    size = values.shape[-1]
    if 0 < options.top_k < size:
        values, ids = top_k(values, options.top_k)
    elif options.top_p < 1:
        values, ids = jax.lax.top_k(values, size)
    if options.top_p < 1:
        shares = jax.nn.softmax(values, axis=-1)
        before = jnp.cumsum(shares, axis=-1) - shares
        likeliest = jnp.arange(values.shape[-1]) == 0  # stays whatever rounding does
        values = jnp.where(likeliest | (before < options.top_p), values, -jnp.inf)
    if options.min_p > 0:
        least = values.max(axis=-1, keepdims=True) + math.log(options.min_p)
        values = jnp.where(values >= least, values, -jnp.inf)
    return values, ids
