"""The network: masks, positions, attention, feed-forward, blocks, and the models made of them.

Knows no devices, no files, no special ids.
"""

import jax
import jax.numpy as jnp

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.model.decoder_only import DecoderOnly
from flaxformer_mt.model.encoder_decoder import EncoderDecoder
from flaxformer_mt.shapes import Array, Batch

Model = EncoderDecoder | DecoderOnly


def make_model(config: ModelConfig, *, source_size: int, target_size: int) -> Model:
    """The model that the config describes, for vocabularies of the given sizes."""
    if config.architecture == "decoder_only":
        return DecoderOnly(config, target_size)
    return EncoderDecoder(config, source_size, target_size)


def init_params(model: Model, key: Array) -> dict:
    """Random float32 parameters."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    mask = jnp.ones((1, 2), bool)
    return jax.jit(model.init, static_argnames="deterministic")(
        key, Batch(tokens, tokens, tokens, mask, mask), deterministic=True
    )["params"]
