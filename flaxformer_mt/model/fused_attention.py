"""Fused attention, which keeps no weights: XLA's function, or cuDNN's flash kernel on NVIDIA GPUs.

Decides when a fused kernel can replace plain attention. Callers that read the attention weights or apply
dropout to them always get plain attention, whatever is preferred.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.shapes import Array

Kind = Literal["plain", "xla", "cudnn"]
Preference = Literal["auto", "plain", "xla", "cudnn"]

# Limits of cuDNN on all GPUs that have its kernel: dtypes, the divisor and the maximum of the head size, and
# the divisor of both lengths where there is a mask and a gradient.
_CUDNN_TYPES = (jnp.dtype("bfloat16"), jnp.dtype("float16"))
_CUDNN_HEAD_MULTIPLE, _CUDNN_MAX_HEAD_SIZE = 8, 128
_CUDNN_LENGTH_MULTIPLE = 2


def resolve_attention(preferred: Preference, platform: str) -> Preference:
    """Resolve the value `auto` of `model.attention`: cudnn on GPUs, plain elsewhere.

    Args:
      platform: the platform that programs are compiled for, as JAX names it: cpu, gpu (or cuda), tpu.
    """
    if preferred != "auto":
        return preferred
    return "cudnn" if platform in ("gpu", "cuda") else "plain"


def choose_attention(preferred: str, query: Any, keys: Any, values: Any, *, needs_weights: bool) -> Kind:
    """Choose the kernel for attention of query [B, Q, H, K] over keys [B, M, H, K] and values [B, M, H, E].

    Args:
      preferred: a result of `resolve_attention`; cudnn gives way to plain for lengths, head sizes or dtypes
        that its kernel does not support. An unresolved auto is plain.
      needs_weights: the caller reads the attention weights or applies dropout to them.
    """
    if needs_weights or preferred in ("plain", "auto") or keys.shape[-1] != values.shape[-1]:
        return "plain"
    if preferred == "xla":
        return "xla"
    size, lengths = query.shape[-1], (query.shape[1], keys.shape[1])
    fits = query.dtype in _CUDNN_TYPES and size % _CUDNN_HEAD_MULTIPLE == 0 and size <= _CUDNN_MAX_HEAD_SIZE
    return "cudnn" if fits and not any(n % _CUDNN_LENGTH_MULTIPLE for n in lengths) else "plain"


def explain_attention(config: ModelConfig, platform: str, *, lengths: tuple[int, int]) -> tuple[Kind, str]:
    """Tell which kernel computes attention in training, and why.

    Args:
      platform: the platform that programs are compiled for.
      lengths: source and target length of the batches.
    """
    rate = config.dropout_rate if config.attention_dropout_rate is None else config.attention_dropout_rate
    preferred = resolve_attention(config.attention, platform)
    asked = f"model.attention={config.attention}"
    if preferred == "plain":
        return "plain", asked + ("" if config.attention == "plain" else f" has no fused kernel on {platform}")
    if rate > 0:
        return "plain", (
            f"{asked}, but fused kernels have no attention dropout, and its rate is {rate:g}; "
            "model.attention_dropout_rate=0 allows one"
        )
    dtype = jnp.dtype(config.dtype)
    sizes = [size or config.model_dim // config.num_heads for size in (config.key_dim, config.value_dim)]
    kinds = set()
    for length in {*lengths} - {0}:
        shapes = [(1, length, config.num_heads, size) for size in sizes]
        keys, values = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
        kinds.add(choose_attention(preferred, keys, keys, values, needs_weights=False))
    if kinds == {preferred}:
        return kinds.pop(), f"{asked} on {platform}"
    return "plain", (
        f"{asked}, but the kernel {preferred} needs bfloat16, keys and values of one head size that is a "
        f"multiple of {_CUDNN_HEAD_MULTIPLE} up to {_CUDNN_MAX_HEAD_SIZE}, and even lengths, not "
        f"{dtype.name}, head sizes {sizes[0]} and {sizes[1]} and lengths {lengths[0]} and {lengths[1]}"
    )


def attend_fused(query: Any, keys: Any, values: Any, mask: Array | None, kind: str) -> Array:
    """Attend by `xla` or `cudnn`, with the scaling of equation 1, and return [B, Q, H, E]."""
    if mask is not None:  # cuDNN broadcasts masks over batch and heads, not over positions
        shape = (*mask.shape[:2], query.shape[1], keys.shape[1])
        mask = jnp.broadcast_to(mask, shape)
    implementation: Any = kind
    return jax.nn.dot_product_attention(query, keys, values, mask=mask, implementation=implementation)
