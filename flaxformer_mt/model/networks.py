"""The network of a config and its initial parameters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.kernels import Kernels, choose_kernels
from flaxformer_mt.model.decoder_only import DecoderOnly
from flaxformer_mt.model.encoder_decoder import EncoderDecoder
from flaxformer_mt.model.scanned_layers import stack_layers
from flaxformer_mt.shapes import Array, Batch

Model = EncoderDecoder | DecoderOnly

# Layers of a stack from which on model.scan_layers=auto scans over them.
_LEAST_SCANNED = 3


def make_model(
    config: ModelConfig,
    *,
    source_size: int,
    target_size: int,
    platform: str | None = None,
    gathers_twice: bool = False,
) -> Model:
    """Build the model that the config describes, for vocabularies of the given sizes.

    Args:
      platform, gathers_twice: as in `choose_kernels`. Without a platform, the model computes with the
        references, which run everywhere.
    """
    kernels = Kernels() if platform is None else choose_kernels(config, platform, gathers_twice=gathers_twice)
    config = dataclasses.replace(config, scan_layers=_scans_layers(config, platform))
    if config.architecture == "decoder_only":
        return DecoderOnly(config, kernels, target_size)
    return EncoderDecoder(config, kernels, source_size, target_size)


def _scans_layers(config: ModelConfig, platform: str | None) -> bool:
    """Resolve model.scan_layers=auto: one scan halves the compile time on GPUs."""
    if config.scan_layers != "auto":
        return config.scan_layers
    depths = [config.num_decoder_layers]
    if config.architecture != "decoder_only":
        depths.append(config.num_encoder_layers)
    return platform in ("gpu", "cuda") and min(depths) >= _LEAST_SCANNED


def init_params(model: Model, key: Array) -> dict:
    """Initialise random float32 parameters.

    One key gives the same values, up to rounding, with and without `model.scan_layers`.
    """
    plain = model.clone(config=dataclasses.replace(model.config, scan_layers=False, remat="none"))
    params = _init_layers(plain, key)
    return stack_layers(params) if model.config.scan_layers else params


@functools.partial(jax.jit, static_argnums=0)
def _init_layers(model: Model, key: Array) -> dict:
    tokens, mask = jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool)
    return model.init(key, Batch(tokens, tokens, tokens, mask, mask), deterministic=True)["params"]
