"""Makes the network that a config describes, and its initial parameters."""

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.kernels import Kernels, choose_kernels
from flaxformer_mt.kernels.dropout import make_hash_key
from flaxformer_mt.model.decoder_only import DecoderOnly
from flaxformer_mt.model.encoder_decoder import EncoderDecoder
from flaxformer_mt.model.initializers import Declared, Initializer
from flaxformer_mt.model.scanned_layers import STACKED
from flaxformer_mt.parameter_trees import nest_leaves
from flaxformer_mt.shapes import Array, Batch

Model = EncoderDecoder | DecoderOnly


def make_model(
    config: ModelConfig,
    *,
    source_size: int,
    target_size: int,
    platform: str | None = None,
    gathers_twice: bool = False,
) -> Model:
    """Build the model that the config describes, for vocabularies of the given sizes.

    Without a `platform`, it has the reference kernels, which run everywhere; see `choose_kernels`.
    """
    kernels = Kernels() if platform is None else choose_kernels(config, platform, gathers_twice=gathers_twice)
    config = dataclasses.replace(config, scan_layers=config.scan_layers is True)  # auto: see `choose_scan`
    if config.architecture == "decoder_only":
        return DecoderOnly(config, kernels, target_size)
    return EncoderDecoder(config, kernels, source_size, target_size)


def init_params(
    model: Model, key: Array, *, sharding_of: Callable[[str, tuple[int, ...]], Any] = lambda path, shape: None
) -> dict:
    """Initialize random float32 parameters.

    The same key gives the same values, up to rounding, on all devices, with and without `model.scan_layers`:
    the key of each array is derived from `key` and the path of the array in unscanned layers. Arrays of the
    same shape share one small program; a single program for all arrays would take longer to compile than the
    training step. `sharding_of` returns the sharding for a path and a shape; None: the sharding of the key.
    """
    stacked = dataclasses.replace(model.config, scan_layers=True, remat="none")
    declared = _declare_params(model.clone(config=stacked, kernels=Kernels()))
    parameters: dict[str, tuple[Declared, tuple[int, ...], list[str]]] = {}  # shape, and paths of the keys
    for entries, leaf in jax.tree.leaves_with_path(declared, is_leaf=lambda node: isinstance(node, Declared)):
        path, shape = jax.tree_util.keystr(entries, simple=True, separator="/"), leaf.value.shape
        stack, layers, rest = path.partition(f"/{STACKED}/")
        names = [f"{stack}/{STACKED}_{number}/{rest}" for number in range(shape[0])] if layers else [path]
        if layers and model.config.scan_layers:
            parameters[path] = leaf, shape, names
        else:
            parameters |= {name: (leaf, shape[bool(layers) :], [name]) for name in names}
    numbers = [zlib.crc32(name.encode()) for *_, names in parameters.values() for name in names]
    keys = _fold_in_each(key, np.asarray(numbers, np.uint32))
    places = itertools.count()
    return nest_leaves(
        {
            path: _draw(
                leaf.init,
                shape,
                sharding_of(path, shape),
                keys,
                np.asarray([next(places) for _ in names], np.int32),
            )
            for path, (leaf, shape, names) in parameters.items()
        }
    )


@functools.lru_cache(maxsize=64)  # tracing a network takes longer than all else here
def _declare_params(model: Model) -> dict:
    """Return a tree with the initializer and the shape of each parameter."""
    tokens, mask = jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool)
    init = functools.partial(model.init, deterministic=True)
    return jax.eval_shape(init, jax.random.key(0), Batch(tokens, tokens, tokens, mask, mask))["params"]


@jax.jit
def _fold_in_each(key: Array, numbers: Array) -> Array:
    return jax.vmap(functools.partial(jax.random.fold_in, make_hash_key(key)))(numbers)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _draw(init: Initializer, shape: tuple[int, ...], sharding: Any, keys: Array, places: Array) -> Array:
    """Draw an array with one key, or an array of stacked layers with one key per layer."""
    if len(places) == 1:
        drawn = init(keys[places[0]], shape, jnp.float32)
    else:
        drawn = jax.vmap(lambda place: init(keys[place], shape[1:], jnp.float32))(places)
    return drawn if sharding is None else jax.lax.with_sharding_constraint(drawn, sharding)
