"""The attention of one head of cross-attention, which learns word alignments (guided alignment).

A forward pass with the mutable collection `GUIDED` stores the queries and keys of this head in each decoder
layer; those of the layer that nobody reads are removed by the compiler.
"""

from typing import Any

import jax.numpy as jnp

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.kernels import MaskRule
from flaxformer_mt.kernels.product import Product
from flaxformer_mt.kernels.unpad import Places, restore_padding
from flaxformer_mt.model.scanned_layers import unstack_layers
from flaxformer_mt.shapes import Array, Batch

# Name of the collection.
GUIDED = "guided_alignment"


def head_scores(config: ModelConfig, stored: Any, batch: Batch, rule: MaskRule, product: Product) -> Array:
    """Compute the float32 scores [B, T, S], before the softmax, of the head of `config.alignment`.

    Args:
      stored: the collection `GUIDED` of a forward pass of an encoder-decoder.
      rule: the rule of cross-attention.
    """
    layer = config.alignment.layer % config.num_decoder_layers
    head = unstack_layers(stored["decoder"])[f"layers_{layer}"]["cross_attention"]
    (query,), (keys,) = head["head_query"], head["head_keys"]
    if isinstance(batch.source_segments, Places) and isinstance(batch.target_segments, Places):
        query, keys = (
            restore_padding(query, batch.target_segments),
            restore_padding(keys, batch.source_segments),
        )
        rule = MaskRule(None, batch.source_segments.is_token)
    query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    scores = product("BTK,BSK->BTS", query, keys)
    mask = rule.dense(query.shape[1])
    return scores if mask is None else jnp.where(mask[:, 0], scores, jnp.finfo(jnp.float32).min)
