"""Leaf layers: normalisation, dropout, and the residual connection around a sublayer.

Leaf layers take sizes; only those that select a variant by name take the model config.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.shapes import Array, constrain, current_part, current_slots


def make_norm(config: ModelConfig, *, name: str | None = None) -> nn.Module:
    """Make layer normalisation (Ba et al. 2016) or RMS normalisation (Zhang and Sennrich 2019).

    Statistics and parameters are float32; the result has dtype `model.dtype`. The variance is the mean square
    of centred values: E[x^2] - E[x]^2 loses precision where the mean is large.
    """
    dtype, affine = jnp.dtype(config.dtype), config.norm_affine
    if config.norm == "rms":
        return nn.RMSNorm(epsilon=config.norm_epsilon, dtype=dtype, use_scale=affine, name=name)
    return LayerNorm(config.norm_epsilon, dtype, affine, name=name)


class LayerNorm(nn.Module):
    """Layer norm: (x - mean) / sqrt(variance + epsilon), times a scale [D] plus a bias [D] if `affine`."""

    epsilon: float
    dtype: DTypeLike
    affine: bool

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Normalise x [..., D] over its last axis."""
        normalised = _normalise(x, self.epsilon)
        if self.affine:
            scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
            bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
            normalised = normalised * scale + bias
        return normalised.astype(self.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _normalise(x: Array, epsilon: float) -> Array:
    """Normalise rows [..., D] of any dtype in float32.

    The gradient is written by hand: it saves x in its own dtype and two numbers per row, and takes one pass.
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
    projection = (gradient * normalised).mean(axis=-1, keepdims=True)
    x_gradient = (gradient - gradient.mean(axis=-1, keepdims=True) - normalised * projection) * inverse
    return (x_gradient.astype(x.dtype),)


_normalise.defvjp(_normalise_forward, _normalise_backward)


class Kept(NamedTuple):
    """What dropout leaves: which entries of an array, and the factor that keeps their expectation."""

    entries: Array
    scale: float


class Dropout(nn.Module):
    """Zero entries with probability `rate` and rescale the others (Srivastava et al. 2014).

    Rescaling keeps the expectation. The key gives two random words; the random number of an entry is a hash
    of these words and of the flat index of the entry. Such numbers cost two multiplications each, are
    computed where they are used instead of passing through memory, and are the same for every sharding, and
    with or without padding.
    """

    rate: float

    def __call__(self, x: Array, *, deterministic: bool) -> Array:
        """Drop entries of x, unless `deterministic`; the key comes from the RNG stream `dropout`."""
        kept = self.draw(x.shape, deterministic=deterministic)
        if kept is None:
            return x
        # In float32, so that numbers are rounded once.
        scaled = x.astype(jnp.float32) * kept.scale
        return jnp.where(kept.entries, scaled, 0.0).astype(x.dtype)

    def draw(self, shape: tuple[int, ...], *, deterministic: bool) -> Kept | None:
        """Draw which entries of an array stay, from the RNG stream `dropout`; None if all do."""
        if deterministic or self.rate == 0:
            return None
        words = jax.random.bits(self.make_rng("dropout"), (2,), jnp.uint32)
        # Rates are below 1; the cap keeps some entries even where rounding would drop all.
        threshold = min(round(self.rate * 2**32), 2**32 - 2**24)
        numbers, part = _flat_indices(shape, current_slots()), current_part()
        if part is not None:
            numbers = numbers + jnp.asarray(part, jnp.uint32) * jnp.uint32(math.prod(shape) % 2**32)
        return Kept(hash_numbers(numbers, words) >= jnp.uint32(threshold), 2**32 / (2**32 - threshold))


def _flat_indices(shape: tuple[int, ...], slots: Array | None) -> Array:
    """Compute the flat index of each entry in row-major order, modulo 2 ** 32.

    Args:
      slots: of entries [R, N, ...], the flat indices [R, N] of their slots [B, T]; None: they are their own.
    """
    numbers, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        step = jnp.uint32(stride % 2**32)
        index = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        if axis == 1 and slots is not None:
            index = jnp.asarray(slots, jnp.uint32).reshape(*slots.shape, *(1,) * (len(shape) - 2))
            return numbers + index * step
        numbers = numbers + index * step
        stride *= shape[axis]
    return numbers


def hash_numbers(numbers: Array, words: Array | tuple[Array, Array]) -> Array:
    """Hash each number to a random 32-bit word, with one key word mixed in before the hash and one inside it.

    The multipliers and shifts are those of lowbias32 (Wellons 2018), which a search selected for the least
    bias of any output bit to any input bit. The second word prevents two keys from giving the same sequence
    at different offsets.
    """
    x = numbers ^ words[0]
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = x ^ words[1]
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


class Residual(nn.Module):
    """Residual x + sublayer(x), normalised before the sublayer (pre) or after the sum (post, the paper)."""

    config: ModelConfig

    def setup(self) -> None:
        self.norm = make_norm(self.config)
        self.dropout = Dropout(self.config.dropout_rate)

    def __call__(self, x: Array, sublayer: Callable[[Array], Array], *, deterministic: bool) -> Array:
        """Run the sublayer on x [B, T, D] inside the residual connection."""
        if self.config.norm_position == "pre":
            return constrain(x + self.dropout(sublayer(self.norm(x)), deterministic=deterministic), "BTD")
        return constrain(self.norm(x + self.dropout(sublayer(x), deterministic=deterministic)), "BTD")
