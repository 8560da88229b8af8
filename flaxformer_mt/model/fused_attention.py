"""Fused attention, which keeps no weights: XLA's function, cuDNN's flash kernel on GPUs, or ours on TPUs.

Decides when a fused kernel can replace plain attention. Callers that read the attention weights or apply
dropout to them always get plain attention, whatever is preferred.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.model.masks import MaskRule
from flaxformer_mt.model.pallas_attention import (
    LANES,
    LENGTH_MULTIPLE,
    MAX_SCORES,
    Segments,
    attend_rows,
    fits_kernel,
)
from flaxformer_mt.shapes import Array, local_shape, map_devices

Kind = Literal["plain", "xla", "cudnn", "pallas"]
Preference = Literal["auto", "plain", "xla", "cudnn", "pallas"]

# Limits of cuDNN on all GPUs that have its kernel: dtypes, the divisor and the maximum of the head size, and
# the divisor of both lengths where there is a mask and a gradient.
_CUDNN_TYPES = (jnp.dtype("bfloat16"), jnp.dtype("float16"))
_CUDNN_HEAD_MULTIPLE, _CUDNN_MAX_HEAD_SIZE = 8, 128
_CUDNN_LENGTH_MULTIPLE = 2


def resolve_attention(preferred: Preference, platform: str) -> Preference:
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


def takes_rules(preferred: str) -> bool:
    """Tell whether a kernel makes its masks itself, from a `MaskRule`."""
    return preferred in ("cudnn", "pallas")


def choose_attention(preferred: str, query: Any, keys: Any, values: Any, *, needs_weights: bool) -> Kind:
    """Choose the kernel for attention of query [B, Q, H, K] over keys [B, M, H, K] and values [B, M, H, E].

    Args:
      preferred: a result of `resolve_attention`; cudnn and pallas give way to plain for lengths, head sizes
        or dtypes that the kernel does not support. An unresolved auto is plain.
      needs_weights: the caller reads the attention weights or applies dropout to them.
    """
    if needs_weights or preferred in ("plain", "auto") or keys.shape[-1] != values.shape[-1]:
        return "plain"
    if preferred == "xla":
        return "xla"
    size, lengths = query.shape[-1], (query.shape[1], keys.shape[1])
    if preferred == "pallas":
        heads = local_shape(query.shape, "BTHK")[2]
        fits = query.dtype == jnp.bfloat16 and fits_kernel(*lengths, heads=heads, size=size)
        return "pallas" if fits else "plain"
    fits = query.dtype in _CUDNN_TYPES and size % _CUDNN_HEAD_MULTIPLE == 0 and size <= _CUDNN_MAX_HEAD_SIZE
    return "cudnn" if fits and not any(n % _CUDNN_LENGTH_MULTIPLE for n in lengths) else "plain"


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
    kinds = set()
    for length in {*lengths} - {0}:
        keys, values = (jax.ShapeDtypeStruct((1, length, heads, size), dtype) for size in sizes)
        kinds.add(choose_attention(preferred, keys, keys, values, needs_weights=False))
    if kinds == {preferred}:
        return kinds.pop(), f"{asked} on {platform}"
    return "plain", (
        f"{asked}, but the kernel {preferred} needs bfloat16, {_NEEDS[preferred]}, not "
        f"{dtype.name}, head sizes {sizes[0]} and {sizes[1]} and lengths {lengths[0]} and {lengths[1]}"
    )


def attend_fused(query: Any, keys: Any, values: Any, mask: Array | MaskRule | None, kind: str) -> Array:
    """Attend by a fused kernel, with the scaling of equation 1, and return [B, Q, H, E].

    Args:
      mask: a dense mask; cudnn and pallas take the rule of a mask too.
    """
    if kind == "pallas":
        assert mask is None or isinstance(mask, MaskRule)
        return attend_pallas((query, keys, values), mask or MaskRule())
    options: dict[str, Any] = {}
    if isinstance(mask, MaskRule):
        lengths = mask.memory_lengths()
        if mask.query_segments is None and (lengths is not None or mask.memory_segments is None):
            # XLA needs both lengths to mask; cuDNN then computes nothing for padding.
            options = {"is_causal": mask.causal, "key_value_seq_lengths": lengths}
            mask = None
        else:
            mask = mask.dense(query.shape[1])
    if mask is not None:  # cuDNN broadcasts masks over batch and heads, not over positions
        shape = (*mask.shape[:2], query.shape[1], keys.shape[1])
        mask = jnp.broadcast_to(mask, shape)
    implementation: Any = kind
    return jax.nn.dot_product_attention(
        query, keys, values, mask=mask, implementation=implementation, **options
    )


def attend_pallas(projected: Sequence[Array], rule: MaskRule, biases: Sequence[Array] = ()) -> Array:
    """Attend by the TPU kernel, and return [B, Q, H, K].

    Args:
      projected: queries, keys and values, each [B, T, H, K], or some beside each other [B, T, N, H, K].
      biases: on one device, those of `attend_rows`, [N, H, K].
    """
    heads, size = projected[0].shape[-2:]
    shape = (*projected[0].shape[:2], heads, size)
    segments = rule.segments(projected[0], projected[-1])

    def attend(*local: Array) -> Array:
        *arrays, query_segments, memory_segments = local
        flat = tuple(x.reshape(*x.shape[:2], -1) for x in arrays)
        vectors = tuple(x.reshape(-1) for x in biases)
        numbers = Segments(query_segments[:, None], memory_segments[:, None])
        attended = attend_rows(arrays[0].shape[-2], rule.causal, False, flat, vectors, numbers)
        return attended.reshape(*attended.shape[:2], -1, size)

    letters = ("BTHK" if x.ndim == 4 else "BTNHK" for x in projected)
    inputs = (*zip(projected, letters, strict=True), *((x, "BT") for x in segments))
    return map_devices(attend, *inputs, result=(shape, "BTHK"))
