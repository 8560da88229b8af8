"""Cached keys and values of attention: their storage layout, and one decoding step's products with them.

Keys are [B, H, K, M] and values [B, H, M, E], the order in which they are multiplied; any other order would
require a copy in each step. M indexes the tokens of an encoded source, or slots for earlier target tokens:
slot t * W + w holds token t of beam w, so that a step writes one contiguous slice of each array. bfloat16
numbers are stored as bits (`as_bits`), so that this write is in place. If the layer's matrices are quantized,
keys and values are 8-bit integers as well, with scales per token `key_scale` and `value_scale`, [B, H, 1, M].
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from flaxformer_mt.kernels.bfloat16 import as_bits, from_bits
from flaxformer_mt.kernels.int8 import quantize_rows
from flaxformer_mt.kernels.kernel_table import Kernels
from flaxformer_mt.shapes import Array

# A cache of one layer, by the names of its arrays.
KeyValues = dict[str, Array]


def store(keys: Array, values: Array, *, quantized: bool) -> KeyValues:
    """Convert keys [B, M, H, K] and values [B, M, H, E] to the layout of the cache."""
    if not quantized:
        return {"keys": as_bits(keys.transpose(0, 2, 3, 1)), "values": as_bits(values.swapaxes(1, 2))}
    key_rows, value_rows = quantize_rows(keys), quantize_rows(values)
    return {
        "keys": key_rows.values.transpose(0, 2, 3, 1),
        "key_scale": key_rows.scale.transpose(0, 2, 3, 1),
        "values": value_rows.values.swapaxes(1, 2),
        "value_scale": value_rows.scale.transpose(0, 2, 3, 1),
    }


def write(cache: KeyValues, stored: KeyValues, slot: Array) -> KeyValues:
    """Write a few tokens, converted by `store`, into consecutive slots starting at `slot`."""
    update = jax.lax.dynamic_update_slice_in_dim
    return {
        name: update(cache[name], stored[name], slot, axis=2 if name == "values" else 3) for name in cache
    }


def score(
    kernels: Kernels, query: Array, cache: KeyValues, mask: Array | None, bias: Array | None = None
) -> Array:
    """Compute float32 scores [B, H, W, M] of scaled queries [B, H, W, K] with cached keys, plus a bias."""
    if "key_scale" in cache:
        rows = quantize_rows(query)
        sums = kernels.integer_product("BHWK,BHKM->BHWM", rows.values, cache["keys"])
        scores = sums.astype(jnp.float32) * (rows.scale * cache["key_scale"])
    else:
        scores = kernels.product("BHWK,BHKM->BHWM", query, from_bits(cache["keys"]))
    if bias is not None:
        scores = scores + bias
    return scores if mask is None else jnp.where(mask, scores, jnp.finfo(jnp.float32).min)


def average(kernels: Kernels, weights: Array, cache: KeyValues, dtype: DTypeLike) -> Array:
    """Average the cached values with float32 weights [B, H, W, M]; return [B, H, W, E] in `dtype`."""
    if "value_scale" in cache:
        rows = quantize_rows(weights * cache["value_scale"])
        sums = kernels.integer_product("BHWM,BHME->BHWE", rows.values, cache["values"])
        return (sums.astype(jnp.float32) * rows.scale).astype(dtype)
    return kernels.product("BHWM,BHME->BHWE", weights, from_bits(cache["values"])).astype(dtype)
