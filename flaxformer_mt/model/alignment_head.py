"""The attention of one head of cross-attention, which learns word alignments (guided alignment).

A forward pass with the mutable collection `GUIDED` stores the queries and keys of this head in each decoder
layer; those of the layer that nobody reads are removed by the compiler.
"""

from typing import Any

import jax.numpy as jnp

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.model.products import contract
from flaxformer_mt.model.scanned_layers import unstack_layers
from flaxformer_mt.shapes import Array

# Name of the collection.
GUIDED = "guided_alignment"


def head_scores(config: ModelConfig, stored: Any, mask: Array | None) -> Array:
    """Compute the float32 scores [B, T, S], before the softmax, of the head of `config.alignment`.

    Args:
      stored: the collection `GUIDED` of a forward pass of an encoder-decoder.
      mask: the mask of cross-attention, broadcastable to [B, 1, T, S].
    """
    layer = config.alignment.layer % config.num_decoder_layers
    head = unstack_layers(stored["decoder"])[f"layers_{layer}"]["cross_attention"]
    (query,), (keys,) = head["head_query"], head["head_keys"]
    query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    scores = contract("BTK,BSK->BTS", query, keys)
    return scores if mask is None else jnp.where(mask[:, 0], scores, jnp.finfo(jnp.float32).min)
