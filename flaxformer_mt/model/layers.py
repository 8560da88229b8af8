"""Basic layers: normalization, dropout, and the residual connection around a sublayer."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.kernels import Kernels
from flaxformer_mt.kernels.dropout import dropout
from flaxformer_mt.model.initializers import Declared, declare
from flaxformer_mt.parallel.sharding import constrain
from flaxformer_mt.shapes import Array

_REFERENCES = Kernels()


def make_norm(config: ModelConfig, kernels: Kernels = _REFERENCES, *, name: str | None = None) -> nn.Module:
    """Make layer normalization (Ba et al. 2016) or RMS normalization (Zhang and Sennrich 2019).

    Statistics and parameters are float32; the result has the dtype `model.dtype`.
    """
    dtype, affine = jnp.dtype(config.dtype), config.norm_affine
    if config.norm == "rms":
        return nn.RMSNorm(
            epsilon=config.norm_epsilon, dtype=dtype, use_scale=affine, scale_init=_declared_ones, name=name
        )
    return LayerNorm(config.norm_epsilon, dtype, affine, kernels, name=name)


def _declared_ones(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    return Declared(jnp.ones(shape, dtype), nn.initializers.ones)


class LayerNorm(nn.Module):
    """Layer norm: (x - mean) / sqrt(variance + epsilon); if `affine`, times a scale [D], plus a bias [D]."""

    epsilon: float
    dtype: DTypeLike
    affine: bool
    kernels: Kernels = _REFERENCES

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Normalize x [..., D] over its last axis."""
        scale = bias = None
        if self.affine:
            scale = declare(self, "scale", nn.initializers.ones, (x.shape[-1],))
            bias = declare(self, "bias", nn.initializers.zeros, (x.shape[-1],))
        return _normalize(x, scale, bias, self.epsilon, self.kernels).astype(self.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _normalize(x: Array, scale: Array | None, bias: Array | None, epsilon: float, kernels: Kernels) -> Array:
    """Normalize rows [..., D] of any dtype in float32, then multiply with a scale [D] and add a bias [D].

    The hand-written gradient needs one pass, and saves only x, in its own dtype, and two numbers per row.
    """
    return _normalize_forward(x, scale, bias, epsilon, kernels)[0]


def _normalize_forward(
    x: Array, scale: Array | None, bias: Array | None, epsilon: float, kernels: Kernels
) -> tuple[Array, tuple[Array, Array, Array, Array | None]]:
    wide = x.astype(jnp.float32)
    mean = wide.mean(axis=-1, keepdims=True)
    centered = wide - mean
    if kernels.one_pass and x.dtype == jnp.bfloat16:
        variance = jnp.maximum(jnp.square(wide).mean(axis=-1, keepdims=True) - mean * mean, 0)
    else:
        variance = jnp.mean(centered * centered, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(variance + epsilon)
    normalized = centered * inverse
    result = normalized if scale is None or bias is None else normalized * scale + bias
    return result, (x, mean, inverse, scale)


def _normalize_backward(
    epsilon: float, kernels: Kernels, saved: tuple[Array, Array, Array, Array | None], gradient: Array
) -> tuple[Array, Array | None, Array | None]:
    x, mean, inverse, scale = saved
    mean, inverse = kernels.materialize((mean, inverse))
    normalized = (x.astype(jnp.float32) - mean) * inverse
    d_scale = d_bias = None
    if scale is not None:
        rows = tuple(range(x.ndim - 1))
        d_scale, d_bias = (gradient * normalized).sum(rows), gradient.sum(rows)
        gradient = gradient * scale
    projection = (gradient * normalized).mean(axis=-1, keepdims=True)
    x_gradient = (gradient - gradient.mean(axis=-1, keepdims=True) - normalized * projection) * inverse
    return kernels.materialize(x_gradient.astype(x.dtype)), d_scale, d_bias


_normalize.defvjp(_normalize_forward, _normalize_backward)


class Dropout(nn.Module):
    """Dropout with the given rate; its random keys come from the Flax RNG stream `dropout`."""

    rate: float

    def __call__(self, x: Array, *, deterministic: bool) -> Array:
        """Apply dropout to x, unless `deterministic`."""
        key = self.draw_key(deterministic=deterministic)
        return x if key is None else dropout(x, key, self.rate)

    def draw_key(self, *, deterministic: bool) -> Array | None:
        return None if deterministic or self.rate == 0 else self.make_rng("dropout")


class Residual(nn.Module):
    """Residual connection x + sublayer(x), with a norm before the sublayer (pre) or after the sum (post)."""

    config: ModelConfig
    kernels: Kernels = _REFERENCES

    def setup(self) -> None:
        self.norm = make_norm(self.config, self.kernels)
        self.dropout = Dropout(self.config.dropout_rate)

    def before(self, x: Array) -> Array:
        return self.norm(x) if self.config.norm_position == "pre" else x

    def after(self, x: Array, output: Array, *, deterministic: bool) -> Array:
        total = x + self.dropout(output, deterministic=deterministic)
        return constrain(total if self.config.norm_position == "pre" else self.norm(total), "BTD")
