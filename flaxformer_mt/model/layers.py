"""Leaf layers: normalisation, dropout and the residual connection around a sublayer.

Leaf layers take sizes, not configs, except where a choice by name is made here once for all blocks.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.shapes import Array


def make_norm(config: ModelConfig, *, name: str | None = None) -> nn.Module:
    """Layer normalisation (Ba et al. 2016) or RMS normalisation (Zhang and Sennrich 2019).

    Statistics and parameters are float32; the result has the computation's type. The variance is that of the
    centred numbers: a difference of means loses its digits where a mean is large.
    """
    dtype, affine = jnp.dtype(config.dtype), config.norm_affine
    if config.norm == "rms":
        return nn.RMSNorm(epsilon=config.norm_epsilon, dtype=dtype, use_scale=affine, name=name)
    return nn.LayerNorm(
        epsilon=config.norm_epsilon,
        dtype=dtype,
        use_scale=affine,
        use_bias=affine,
        use_fast_variance=False,
        name=name,
    )


class Dropout(nn.Module):
    """Zeroes entries at `rate` and scales the others so that the expectation stays (Srivastava et al. 2014).

    Draws one random byte an entry, not a 32-bit word: random numbers are a visible part of a training step.
    The rate is thus a multiple of 1/256 (0.1 becomes 26/256), and the scale is that of the rate in effect.
    """

    rate: float

    @nn.compact
    def __call__(self, x: Array, *, deterministic: bool) -> Array:
        """x with entries dropped, or x itself when deterministic; takes its key from the `dropout` stream."""
        threshold = min(round(self.rate * 256), 255)  # rates are below 1, so something always stays
        if deterministic or threshold == 0:
            return x
        words = jax.random.bits(self.make_rng("dropout"), (-(-x.size // 4),), jnp.uint32)
        draws = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)[: x.size].reshape(x.shape)
        return jnp.where(
            draws >= threshold, x * jnp.asarray(256 / (256 - threshold), x.dtype), jnp.zeros((), x.dtype)
        )


class Residual(nn.Module):
    """x + sublayer(x) with the norm before the sublayer (pre) or after the sum (post, as in the paper)."""

    config: ModelConfig

    def setup(self) -> None:
        self.norm = make_norm(self.config)
        self.dropout = Dropout(self.config.dropout_rate)

    def __call__(self, x: Array, sublayer: Callable[[Array], Array], *, deterministic: bool) -> Array:
        """Runs the sublayer around which this connection is laid."""
        if self.config.norm_position == "pre":
            return x + self.dropout(sublayer(self.norm(x)), deterministic=deterministic)
        return self.norm(x + self.dropout(sublayer(x), deterministic=deterministic))
