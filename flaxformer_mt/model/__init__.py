"""The network: masks, positions, attention, feed-forward, blocks, and the models made of them.

Knows no devices, no files, no special ids.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.model.decoder_only import DecoderOnly
from flaxformer_mt.model.encoder_decoder import EncoderDecoder
from flaxformer_mt.model.scanned_layers import stack_layers
from flaxformer_mt.shapes import Array, Batch

Model = EncoderDecoder | DecoderOnly


def make_model(config: ModelConfig, *, source_size: int, target_size: int) -> Model:
    """The model that the config describes, for vocabularies of the given sizes."""
    if config.architecture == "decoder_only":
        return DecoderOnly(config, target_size)
    return EncoderDecoder(config, source_size, target_size)


def init_params(model: Model, key: Array) -> dict:
    """Random float32 parameters: of a key the same, up to rounding, whether layers are scanned or not."""
    plain = model.clone(config=dataclasses.replace(model.config, scan_layers=False, remat="none"))
    if not model.config.scan_layers:
        return _init_at_once(plain, key)
    # One program for all arrays would take longer to compile the deeper the model is; step by step does not.
    tokens: Any = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    mask: Any = jax.ShapeDtypeStruct((1, 2), jnp.bool_)
    batch = Batch(tokens, tokens, tokens, mask, mask)
    return stack_layers(plain.lazy_init(key, batch, deterministic=True)["params"])


@functools.partial(jax.jit, static_argnums=0)
def _init_at_once(model: Model, key: Array) -> dict:
    tokens, mask = jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool)
    return model.init(key, Batch(tokens, tokens, tokens, mask, mask), deterministic=True)["params"]
