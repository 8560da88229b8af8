"""Leaf layers: normalisation, dropout and the residual connection around a sublayer.

Leaf layers take sizes, not configs, except where a choice by name is made here once for all blocks.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

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
    return LayerNorm(config.norm_epsilon, dtype, affine, name=name)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + epsilon), times a scale [D] plus a bias [D] where `affine`."""

    epsilon: float
    dtype: DTypeLike
    affine: bool

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """x [..., D] normalised over its last axis."""
        normalised = _normalise(x, self.epsilon)
        if self.affine:
            scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
            bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
            normalised = normalised * scale + bias
        return normalised.astype(self.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _normalise(x: Array, epsilon: float) -> Array:
    """Rows [..., D] of any type, normalised in float32.

    The gradient is written out: it keeps x as it came and two numbers a row, and takes one pass.
    """
    return _normalise_forward(x, epsilon)[0]


def _normalise_forward(x: Array, epsilon: float) -> tuple[Array, tuple[Array, Array, Array]]:
    wide = x.astype(jnp.float32)
    mean = wide.mean(axis=-1, keepdims=True)
    centred = wide - mean
    inverse = jax.lax.rsqrt((centred * centred).mean(axis=-1, keepdims=True) + epsilon)
    return centred * inverse, (x, mean, inverse)


def _normalise_backward(epsilon: float, saved: tuple[Array, Array, Array], gradient: Array) -> tuple[Array]:
    x, mean, inverse = saved
    normalised = (x.astype(jnp.float32) - mean) * inverse
    along = (gradient * normalised).mean(axis=-1, keepdims=True)
    by_x = (gradient - gradient.mean(axis=-1, keepdims=True) - normalised * along) * inverse
    return (by_x.astype(x.dtype),)


_normalise.defvjp(_normalise_forward, _normalise_backward)


class Dropout(nn.Module):
    """Zeroes entries at `rate` and scales the others so that the expectation stays (Srivastava et al. 2014).

    The key gives two random words; every entry's number is a mix of them and its place in the array. Such
    numbers cost two multiplications, are made where they are used instead of going through memory, and do
    not depend on how the array is laid over devices.
    """

    rate: float

    @nn.compact
    def __call__(self, x: Array, *, deterministic: bool) -> Array:
        """x with entries dropped, or x itself when deterministic; takes its key from the `dropout` stream."""
        if deterministic or self.rate == 0:
            return x
        words = jax.random.bits(self.make_rng("dropout"), (2,), jnp.uint32)
        # Rates are below 1, so something always stays.
        threshold = min(round(self.rate * 2**32), 2**32 - 2**24)
        kept = _mix(_places(x.shape), words) >= jnp.uint32(threshold)
        scale = jnp.asarray(2**32 / (2**32 - threshold), x.dtype)
        return jnp.where(kept, x * scale, jnp.zeros((), x.dtype))


def _places(shape: tuple[int, ...]) -> Array:
    """Each entry's number in row-major order, modulo 2 ** 32."""
    numbers, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        step = jnp.uint32(stride % 2**32)
        numbers = numbers + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * step
        stride *= shape[axis]
    return numbers


def _mix(numbers: Array, words: Array) -> Array:
    """Random 32-bit words: a hash of each number, with one word of the key before it and one within it.

    The multipliers and shifts are those of lowbias32 (Wellons 2018), found by search for the least bias of
    any output bit to any input bit. The second word keeps two keys from giving the same sequence shifted.
    """
    x = numbers ^ words[0]
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = x ^ words[1]
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


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
