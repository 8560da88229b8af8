"""Attention whose weights nobody sees: by XLA's own function, or by cuDNN's flash kernel on NVIDIA GPUs.

Owns when they may stand in for the plain one. Such kernels keep no weights, so they serve neither those who
ask for weights nor dropout of weights: both get the plain attention, whatever is preferred.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from flaxformer_mt.shapes import Array

Kind = Literal["plain", "xla", "cudnn"]

# Of cuDNN: types, the multiple and the most of a head's size on all GPUs that have the kernel, and what
# lengths must be multiples of where there is a mask and a gradient.
_CUDNN_TYPES = (jnp.dtype("bfloat16"), jnp.dtype("float16"))
_CUDNN_HEAD_MULTIPLE, _CUDNN_MOST = 8, 128
_CUDNN_LENGTH_MULTIPLE = 2


def choose_attention(
    preferred: str, query: Array, keys: Array, values: Array, *, needs_weights: bool, platform: str
) -> Kind:
    """What computes attention of query [B, Q, H, K] over keys [B, M, H, K] and values [B, M, H, E].

    Args:
      preferred: `model.attention`. auto takes cudnn where it can and plain elsewhere; cudnn too gives way to
        plain where lengths, sizes or types are none of its own.
      needs_weights: someone asks for them, or drops some.
      platform: of the devices, as JAX names it: cpu, gpu, tpu.
    """
    if needs_weights or preferred == "plain" or keys.shape[-1] != values.shape[-1]:
        return "plain"
    if preferred == "xla":
        return "xla"
    if preferred == "auto" and platform != "gpu":
        return "plain"
    size, lengths = query.shape[-1], (query.shape[1], keys.shape[1])
    fits = query.dtype in _CUDNN_TYPES and size % _CUDNN_HEAD_MULTIPLE == 0 and size <= _CUDNN_MOST
    return "cudnn" if fits and not any(n % _CUDNN_LENGTH_MULTIPLE for n in lengths) else "plain"


def attend_fused(query: Any, keys: Any, values: Any, mask: Array | None, kind: str) -> Array:
    """Each query's mean of the values [B, Q, H, E], by `xla` or `cudnn`; scaled as equation 1 is."""
    if mask is not None:  # cuDNN broadcasts over rows and heads, not over positions
        shape = (*mask.shape[:2], query.shape[1], keys.shape[1])
        mask = jnp.broadcast_to(mask, shape)
    implementation: Any = kind
    return jax.nn.dot_product_attention(query, keys, values, mask=mask, implementation=implementation)
