"""Attention over whole sequences: by plain products, by fused kernels, and over batches without padding.

All take queries [B, Q, H, K], keys [B, M, H, K], values [B, M, H, E] and the rule of a mask, and return [B,
Q, H, E].
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Float

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.kernels.masks import MaskRule
from flaxformer_mt.kernels.pallas_attention import (
    LANES,
    LENGTH_MULTIPLE,
    MAX_SCORES,
    Segments,
    attend_rows,
    fits_kernel,
)
from flaxformer_mt.kernels.product import Product
from flaxformer_mt.kernels.unpad import Places, remove_padding, restore_padding
from flaxformer_mt.parallel.sharding import map_parts
from flaxformer_mt.shapes import Array, AttentionMask, typed

Kind = Literal["plain", "xla", "cudnn", "pallas"]
Preference = Literal["auto", "plain", "xla", "cudnn", "pallas"]

# From weights [B, H, Q, M] to those that average the values, as dropout does.
SeeWeights = Callable[[Array], Array]
Attention = Callable[..., Array]

# Limits of cuDNN on all GPUs that have its kernel: dtypes, the divisor and the maximum of the head size, and
# the divisor of both lengths where there is a mask and a gradient.
_CUDNN_TYPES = (jnp.dtype("bfloat16"), jnp.dtype("float16"))
_CUDNN_HEAD_MULTIPLE, _CUDNN_MAX_HEAD_SIZE = 8, 128
_CUDNN_LENGTH_MULTIPLE = 2


def attend(
    product: Product,
    query: Array,
    keys: Array,
    values: Array,
    mask: MaskRule,
    *,
    scale: float | None = None,
    see_weights: SeeWeights | None = None,
) -> Array:
    """Average the values under softmax(query keys / sqrt(K)) (Vaswani et al. 2017, equation 1).

    Args:
      scale: factor of the products in place of 1 / sqrt(K).
      see_weights: gets the weights, and returns those to use, as dropout does.
    """
    bias = None if mask.bias is None else mask.bias.dense(query.shape[1], keys.shape[1])
    weights = attention_weights(product, query, keys, mask.dense(query.shape[1]), scale=scale, bias=bias)
    if see_weights is not None:
        weights = see_weights(weights)
    return product("BHQM,BMHE->BQHE", weights, values).astype(values.dtype)


@typed
def attention_weights(
    product: Product,
    query: Float[Array, "B Q H K"],
    keys: Float[Array, "B M H K"],
    mask: AttentionMask | None = None,
    *,
    scale: float | None = None,
    bias: Float[Array, "1 H Q M"] | None = None,
) -> Float[Array, "B H Q M"]:
    """Compute the softmax of scaled query-key products, plus a bias, in float32.

    A query whose mask is False everywhere gets uniform weights instead of NaN.
    """
    query = query * jnp.asarray(query.shape[-1] ** -0.5 if scale is None else scale, query.dtype)
    scores = product("BQHK,BMHK->BHQM", query, keys)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores, axis=-1)


def attend_unpadded(
    attention: Attention,
    query: Array,
    keys: Array,
    values: Array,
    mask: MaskRule,
    *,
    scale: float | None = None,
    see_weights: SeeWeights | None = None,
) -> Array:
    """Attend over the rows of sentences of a batch without padding; to others, apply `attention` as it is."""
    if not isinstance(mask.query_segments, Places):
        return attention(query, keys, values, mask, scale=scale, see_weights=see_weights)
    assert isinstance(mask.memory_segments, Places)
    own, memory = mask.query_segments, mask.memory_segments
    rule = MaskRule(None, memory.is_token, mask.causal, padded_at_end=True, bias=mask.bias)
    keys, values = (restore_padding(heads, memory) for heads in (keys, values))
    query = restore_padding(query, own)
    heads = attention(query, keys, values, rule, scale=scale, see_weights=see_weights)
    return remove_padding(heads, own)


def attend_fused(
    kind: Kind,
    plain: Attention,
    query: Array,
    keys: Array,
    values: Array,
    mask: MaskRule,
    *,
    scale: float | None = None,
    see_weights: SeeWeights | None = None,
) -> Array:
    """Attend by a fused kernel on the heads of each device; by `plain` where the kernel cannot be used.

    That is where somebody sees the weights, which a fused kernel does not keep, where scores have another
    scale or a bias, and for lengths, head sizes or dtypes that it does not support.
    """
    changed = scale is not None or mask.bias is not None
    if see_weights is not None or changed or keys.shape[-1] != values.shape[-1]:
        return plain(query, keys, values, mask, scale=scale, see_weights=see_weights)
    segments = {
        name: given
        for name in ("query_segments", "memory_segments")
        if (given := getattr(mask, name)) is not None
    }

    def attend_part(query: Array, keys: Array, values: Array, *own: Array) -> Array:
        rule = dataclasses.replace(mask, **dict(zip(segments, own, strict=True)))
        if not fits(kind, query, keys):
            return plain(query, keys, values, rule)
        if kind == "pallas":
            return attend_rows_on_tpu(query, keys, values, rule)
        return attend_by_jax(kind, query, keys, values, rule)

    inputs = [(heads, "BTHK") for heads in (query, keys, values)]
    inputs += [(jnp.asarray(given), "BT") for given in segments.values()]
    return map_parts(attend_part, *inputs, result=(query.shape, "BTHK"))


def attend_by_jax(kind: Any, query: Array, keys: Array, values: Array, mask: MaskRule) -> Array:
    """Attend by `jax.nn.dot_product_attention`: cuDNN's flash kernel, or XLA's."""
    options: dict[str, Any] = {}
    lengths = mask.memory_lengths()
    if (
        kind == "cudnn"
        and mask.query_segments is None
        and (lengths is not None or mask.memory_segments is None)
    ):
        # XLA needs both lengths to mask; cuDNN then computes nothing for padding.
        options = {"is_causal": mask.causal, "key_value_seq_lengths": lengths}
    elif (dense := mask.dense(query.shape[1])) is not None:
        # cuDNN broadcasts masks over batch and heads, not over positions.
        options = {"mask": jnp.broadcast_to(dense, (*dense.shape[:2], query.shape[1], keys.shape[1]))}
    return jax.nn.dot_product_attention(query, keys, values, implementation=kind, **options)


def attend_rows_on_tpu(query: Array, keys: Array, values: Array, mask: MaskRule) -> Array:
    """Attend by the kernel of pallas_attention.py."""
    flat = tuple(heads.reshape(*heads.shape[:2], -1) for heads in (query, keys, values))
    own, memory = mask.segments(query, keys)
    segments = Segments(own[:, None], memory[:, None])
    return attend_rows(query.shape[2], mask.causal, False, flat, segments).reshape(query.shape)


def resolve_attention(preferred: Preference, platform: str) -> Kind:
    """Resolve the value `auto` of `model.attention`: cudnn on GPUs, pallas on TPUs, plain elsewhere.

    The kernel pallas runs on TPUs alone: elsewhere it resolves to plain.

    Args:
      platform: the platform that programs are compiled for, as JAX names it: cpu, gpu (or cuda), tpu.
    """
    if preferred == "pallas":
        return "pallas" if platform == "tpu" else "plain"
    if preferred != "auto":
        return preferred
    return "cudnn" if platform in ("gpu", "cuda") else "pallas" if platform == "tpu" else "plain"


def fits(kind: Kind, query: Any, keys: Any) -> bool:
    """Tell whether a kernel supports heads [B, Q, H, K] and [B, M, H, K] of these shapes and dtypes."""
    size, lengths = query.shape[-1], (query.shape[1], keys.shape[1])
    if kind == "pallas":
        return query.dtype == jnp.bfloat16 and fits_kernel(*lengths, heads=query.shape[2], size=size)
    if kind == "cudnn":
        fitting = query.dtype in _CUDNN_TYPES and size % _CUDNN_HEAD_MULTIPLE == 0
        return (
            fitting and size <= _CUDNN_MAX_HEAD_SIZE and not any(n % _CUDNN_LENGTH_MULTIPLE for n in lengths)
        )
    return True


_NEEDS = {
    "cudnn": (
        f"keys and values of one head size that is a multiple of {_CUDNN_HEAD_MULTIPLE} up to "
        f"{_CUDNN_MAX_HEAD_SIZE}, and even lengths"
    ),
    "pallas": (
        f"keys and values of one head size that divides {LANES} or is a multiple of it, a multiple of "
        f"{LANES} numbers in the heads of a device, and lengths that are multiples of {LENGTH_MULTIPLE} with "
        f"a product of at most {MAX_SCORES}"
    ),
}


def explain_attention(
    config: ModelConfig, platform: str, *, lengths: tuple[int, int], tensor: int = 1
) -> tuple[Kind, str]:
    """Tell which kernel computes attention in training, and why.

    Args:
      platform: the platform that programs are compiled for.
      lengths: source and target length of the batches.
      tensor: number of devices that share the heads.
    """
    rate = config.dropout_rate if config.attention_dropout_rate is None else config.attention_dropout_rate
    preferred = resolve_attention(config.attention, platform)
    asked = f"model.attention={config.attention}"
    if config.positions == "relative" or not config.attention_scale:
        return "plain", f"{asked}, but fused kernels have neither relative positions nor unscaled scores"
    if preferred == "plain":
        return "plain", asked + ("" if config.attention == "plain" else f" has no fused kernel on {platform}")
    if rate > 0:
        return "plain", (
            f"{asked}, but fused kernels have no attention dropout, and its rate is {rate:g}; "
            "model.attention_dropout_rate=0 allows one"
        )
    dtype = jnp.dtype(config.dtype)
    heads = config.num_heads if config.num_heads % tensor else config.num_heads // tensor
    sizes = [size or config.model_dim // config.num_heads for size in (config.key_dim, config.value_dim)]
    shapes = [jax.ShapeDtypeStruct((1, length, heads, sizes[0]), dtype) for length in {*lengths} - {0}]
    if sizes[0] == sizes[1] and all(fits(preferred, shape, shape) for shape in shapes):
        return preferred, f"{asked} on {platform}"
    return "plain", (
        f"{asked}, but the kernel {preferred} needs bfloat16, {_NEEDS[preferred]}, not "
        f"{dtype.name}, head sizes {sizes[0]} and {sizes[1]} and lengths {lengths[0]} and {lengths[1]}"
    )
