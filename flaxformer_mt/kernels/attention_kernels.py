"""Attention over whole sequences: by plain products, by fused kernels, and for batches without padding.

Attention functions take queries [B, Q, H, K], keys [B, M, H, K], values [B, M, H, E] and a mask rule, and
return [B, Q, H, E]. `drop` is the dropout of attention weights [B, H, Q, M]. `see_weights` is called with the
weights before dropout, and returns the weights to use.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.kernels import triton_attention
from flaxformer_mt.kernels.dropout import dropout, is_hash_key, split_key
from flaxformer_mt.kernels.masks import MaskRule
from flaxformer_mt.kernels.matmul import Product
from flaxformer_mt.kernels.pallas_attention import (
    LANES,
    LENGTH_MULTIPLE,
    MAX_SCORES,
    Segments,
    attend_rows,
    fits_kernel,
)
from flaxformer_mt.kernels.unpad import Places, remove_padding, restore_padding
from flaxformer_mt.parallel.sharding import map_parts
from flaxformer_mt.shapes import Array, AttentionMask, typed

# pallas is the kernel of TPUs, triton the one of GPUs that has attention dropout and biases.
Kind = Literal["plain", "cudnn", "pallas", "triton"]
Preference = Literal["auto", "plain", "cudnn", "pallas"]

SeeWeights = Callable[[Array], Array]


class Drop(NamedTuple):
    """Dropout of attention weights: its key and rate."""

    key: Array
    rate: float


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
    drop: Drop | None = None,
    see_weights: SeeWeights | None = None,
) -> Array:
    """Average the values with weights softmax(query keys / sqrt(K)) (Vaswani et al. 2017, equation 1).

    `scale` replaces the factor 1 / sqrt(K).
    """
    bias = None if mask.bias is None else mask.bias.dense(query.shape[1], keys.shape[1])
    weights = attention_weights(product, query, keys, mask.dense(query.shape[1]), scale=scale, bias=bias)
    if see_weights is not None:
        weights = see_weights(weights)
    if drop is not None:
        weights = dropout(weights, *drop)
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
    **options: Any,
) -> Array:
    """Call `attention`; if padding was removed from the batch, restore it before and remove it afterwards."""
    if not isinstance(mask.query_segments, Places):
        return attention(query, keys, values, mask, **options)
    assert isinstance(mask.memory_segments, Places)
    own, memory = mask.query_segments, mask.memory_segments
    rule = MaskRule(None, memory.is_token, mask.causal, padded_at_end=True, bias=mask.bias)
    keys, values = (restore_padding(heads, memory) for heads in (keys, values))
    query = restore_padding(query, own)
    heads = attention(query, keys, values, rule, **options)
    return remove_padding(heads, own)


def attend_fused(
    kinds: tuple[Kind, ...],
    plain: Attention,
    query: Array,
    keys: Array,
    values: Array,
    mask: MaskRule,
    *,
    biases: Sequence[Array] = (),
    **options: Any,
) -> Array:
    """Attend on each device with the first kernel of `kinds` that supports its heads, or else with `plain`.

    With `see_weights`, `plain` is used, because fused kernels do not keep the weights. `biases`: none, or the
    biases [H, K] that were added to queries, keys and values as constants; their gradients are summed here.
    """
    scale, drop = options.get("scale"), options.get("drop")
    only_plain = options.get("see_weights") is not None or keys.shape[-1] != values.shape[-1]
    changes = mask.bias is not None or scale is not None or drop is not None
    if only_plain or changes:
        query, keys, values = _leave_gradients((query, keys, values), biases)
    if only_plain:
        return plain(query, keys, values, mask, **options)
    if changes:
        if "triton" in kinds and fits("triton", query, keys) and (drop is None or is_hash_key(drop.key)):
            return attend_rows_on_gpu(query, keys, values, mask, scale, drop)
        return plain(query, keys, values, mask, **options)
    segments = {
        name: array
        for name in ("query_segments", "memory_segments")
        if (array := getattr(mask, name)) is not None
    }

    def attend_part(query: Array, keys: Array, values: Array, *own: Array) -> Array:
        rule = dataclasses.replace(mask, **dict(zip(segments, own, strict=False)))
        kind, added = next((kind for kind in kinds if fits(kind, query, keys)), "plain"), own[len(segments) :]
        if kind == "pallas":
            return attend_rows_on_tpu(query, keys, values, rule, added)
        query, keys, values = _leave_gradients((query, keys, values), added)
        if kind == "plain":
            return plain(query, keys, values, rule)
        if kind == "triton":
            return attend_rows_on_gpu(query, keys, values, rule, None, None)
        return attend_by_cudnn(query, keys, values, rule)

    inputs = [(heads, "BTHK") for heads in (query, keys, values)]
    inputs += [(jnp.asarray(array), "BT") for array in segments.values()]
    inputs += [(bias, "HK") for bias in biases]
    return map_parts(attend_part, *inputs, result=(query.shape, "BTHK"))


def _leave_gradients(heads: Sequence[Array], biases: Sequence[Array]) -> Sequence[Array]:
    return [_leave_gradient(*pair) for pair in zip(heads, biases, strict=True)] if biases else heads


@jax.custom_vjp
def _leave_gradient(x: Array, bias: Array) -> Array:
    """Return x [B, T, H, K] unchanged; the gradient of `bias` [H, K] is x's gradient summed over B and T."""
    del bias
    return x


_leave_gradient.defvjp(
    lambda x, bias: (x, None), lambda _, gradient: (gradient, gradient.astype(jnp.float32).sum((0, 1)))
)


def attend_rows_on_gpu(
    query: Array, keys: Array, values: Array, mask: MaskRule, scale: float | None, drop: Drop | None
) -> Array:
    """Attend with the kernel of triton_attention.py, which supports biases, any scale and weight dropout."""
    (batch, length, heads, size), memory_length = query.shape, keys.shape[1]
    rule = triton_attention.Rule(
        mask.causal, size**-0.5 if scale is None else scale, 0.0 if drop is None else drop.rate
    )
    arrays: dict[str, tuple[Array, str]] = {}
    if drop is not None:
        numbers = jnp.arange(batch * heads, dtype=jnp.uint32).reshape(batch, heads) * (length * memory_length)
        words, first = split_key(drop.key, batch * heads * length * memory_length)
        arrays |= {"key": (words, "K"), "first_numbers": (first + numbers, "BH")}
    if mask.bias is not None:
        arrays["bias"] = (mask.bias.dense(length, memory_length)[0], "HQM")

    def attend_part(
        query: Array, keys: Array, values: Array, own: Array, memory: Array, *others: Array
    ) -> Array:
        inputs = triton_attention.Inputs(own, memory, **dict(zip(arrays, others, strict=True)))
        return triton_attention.attend_rows(rule, (query, keys, values), inputs)

    inputs = [(part, "BTHK") for part in (query, keys, values)]
    inputs += [(part, "BT") for part in mask.segments(query, keys)]
    return map_parts(attend_part, *inputs, *arrays.values(), result=(query.shape, "BTHK"))


def attend_by_cudnn(query: Array, keys: Array, values: Array, mask: MaskRule) -> Array:
    options: dict[str, Any] = {}
    lengths = mask.memory_lengths()
    if mask.query_segments is None and (lengths is not None or mask.memory_segments is None):
        # cuDNN computes nothing for padding.
        options = {"is_causal": mask.causal, "key_value_seq_lengths": lengths}
    elif (dense := mask.dense(query.shape[1])) is not None:
        # cuDNN broadcasts masks over batch and heads, not over positions.
        options = {"mask": jnp.broadcast_to(dense, (*dense.shape[:2], query.shape[1], keys.shape[1]))}
    return jax.nn.dot_product_attention(query, keys, values, implementation="cudnn", **options)


def attend_rows_on_tpu(
    query: Array, keys: Array, values: Array, mask: MaskRule, biases: tuple[Array, ...]
) -> Array:
    flat = tuple(heads.reshape(*heads.shape[:2], -1) for heads in (query, keys, values))
    own, memory = mask.segments(query, keys)
    segments = Segments(own[:, None], memory[:, None])
    return attend_rows(query.shape[2], mask.causal, False, flat, biases, segments).reshape(query.shape)


def resolve_attention(preferred: Preference, platform: str) -> tuple[Kind, ...]:
    """Return the fused kernels that `model.attention` allows on a platform, the preferred kernel first.

    `platform`: JAX's name for the platform that programs are compiled for: cpu, gpu (or cuda), tpu.
    """
    kinds: dict[tuple[str, str], tuple[Kind, ...]] = {
        ("auto", "gpu"): ("cudnn", "triton"),
        ("auto", "tpu"): ("pallas",),
        ("pallas", "gpu"): ("triton",),
        ("pallas", "tpu"): ("pallas",),
    }
    others: tuple[Kind, ...] = ("cudnn",) if preferred == "cudnn" else ()
    return kinds.get((preferred, platform.replace("cuda", "gpu")), others)


def fits(kind: Kind, query: Any, keys: Any) -> bool:
    """Return whether a kernel supports the dtypes and sizes of queries [B, Q, H, K] and keys [B, M, H, K]."""
    size, lengths = query.shape[-1], (query.shape[1], keys.shape[1])
    if kind == "pallas":
        return query.dtype == jnp.bfloat16 and fits_kernel(*lengths, heads=query.shape[2], size=size)
    if kind == "triton":
        return query.dtype == jnp.bfloat16 and triton_attention.fits_kernel(keys.shape[1], size=size)
    fitting = query.dtype in _CUDNN_TYPES and size % _CUDNN_HEAD_MULTIPLE == 0
    return fitting and size <= _CUDNN_MAX_HEAD_SIZE and not any(n % _CUDNN_LENGTH_MULTIPLE for n in lengths)


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
    "triton": (
        f"keys and values of one head size, {triton_attention.HEAD_SIZES}, and rows of at most "
        f"{triton_attention.MAX_LENGTH}"
    ),
}


def explain_attention(
    config: ModelConfig, platform: str, *, lengths: tuple[int, int], tensor: int = 1
) -> tuple[Kind, str]:
    """Return the kernel that computes attention in training, and the reason.

    `lengths`: source and target length of the batches. `tensor`: number of devices that share the heads.
    """
    rate = config.dropout_rate if config.attention_dropout_rate is None else config.attention_dropout_rate
    kinds, asked = resolve_attention(config.attention, platform), f"model.attention={config.attention}"
    if not kinds:
        return "plain", asked + ("" if config.attention == "plain" else f" has no fused kernel on {platform}")
    relative = config.positions == "relative" or not config.attention_scale
    if (relative or rate > 0) and "triton" not in kinds:
        if relative:
            return "plain", f"{asked}, but {kinds[0]} has neither relative positions nor unscaled scores"
        return "plain", (
            f"{asked}, but {kinds[0]} has no attention dropout, and its rate is {rate:g}; "
            "model.attention_dropout_rate=0 allows it"
        )
    kinds = ("triton",) if relative or rate > 0 else kinds
    dtype = jnp.dtype(config.dtype)
    heads = config.num_heads if config.num_heads % tensor else config.num_heads // tensor
    sizes = [size or config.model_dim // config.num_heads for size in (config.key_dim, config.value_dim)]
    shapes = [jax.ShapeDtypeStruct((1, length, heads, sizes[0]), dtype) for length in {*lengths} - {0}]
    for kind in kinds:
        if sizes[0] == sizes[1] and all(fits(kind, shape, shape) for shape in shapes):
            return kind, f"{asked} on {platform}"
    return "plain", (
        f"{asked}, but the kernel {kinds[0]} needs bfloat16, {_NEEDS[kinds[0]]}, not "
        f"{dtype.name}, head sizes {sizes[0]} and {sizes[1]} and lengths {lengths[0]} and {lengths[1]}"
    )
