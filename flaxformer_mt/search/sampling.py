"""Sampling of the next token: temperature, top-k, top-p and min-p, with a random stream for each line."""

import math

import jax
import jax.numpy as jnp

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.search.candidates import top_k
from flaxformer_mt.shapes import Array


def make_keys(seeds: Array, width: int) -> Array:
    """Return one random key for each of `width` samples of each line, [B, W], from the lines' seeds [B].

    A key depends only on its line's seed and the index of the sample, so the other lines of a batch do not
    affect it.
    """
    lines = jax.vmap(lambda seed: jax.random.key(seed, impl="threefry2x32"))(seeds)
    return jax.vmap(lambda key: jax.vmap(lambda n: jax.random.fold_in(key, n))(jnp.arange(width)))(lines)


def draw_tokens(masked: Array, keys: Array, steps: Array, options: SearchConfig) -> Array:
    """Draw one token [B, W] for each row of masked logits [B, W, V] from the distribution of `keep_likely`.

    steps [B]: the number of tokens each line has.
    """
    values, ids = keep_likely(masked, options)

    def noise(key: Array, step: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(key, step), values.shape[-1:])

    # Gumbel-max: the argmax of logits plus Gumbel noise is a sample from their softmax.
    chosen = jnp.argmax(values + jax.vmap(jax.vmap(noise, in_axes=(0, None)))(keys, steps), axis=-1)
    return chosen if ids is None else jnp.take_along_axis(ids, chosen[..., None], axis=-1)[..., 0]


def keep_likely(masked: Array, options: SearchConfig) -> tuple[Array, Array | None]:
    """Return the logits [B, W, C] to sample from, -inf for excluded tokens, and their ids.

    The ids are None if C is V and the order is that of the vocabulary. Temperature comes first, then three
    filters, each applied to the result of the one before: top_k keeps the k most likely tokens, top_p the
    fewest most likely tokens whose probabilities sum to p or more (Holtzman et al. 2020), min_p the tokens
    with at least p times the probability of the most likely one (Nguyen et al. 2024).

    Of probabilities .5 .3 .15 .05, top_p .7 keeps .5 and .3, which are drawn with probabilities 5/8 and 3/8.
    """
    values, ids = masked / options.temperature, None
    size = values.shape[-1]
    if 0 < options.top_k < size:
        values, ids = top_k(values, options.top_k)
    elif options.top_p < 1:
        values, ids = jax.lax.top_k(values, size)
    if options.top_p < 1:
        probs = jax.nn.softmax(values, axis=-1)
        cumulative_before = jnp.cumsum(probs, axis=-1) - probs
        most_likely = jnp.arange(values.shape[-1]) == 0  # always kept, despite rounding
        values = jnp.where(most_likely | (cumulative_before < options.top_p), values, -jnp.inf)
    if options.min_p > 0:
        threshold = values.max(axis=-1, keepdims=True) + math.log(options.min_p)
        values = jnp.where(values >= threshold, values, -jnp.inf)
    return values, ids
