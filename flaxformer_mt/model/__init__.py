"""The network: masks, position encodings, attention, feed-forward layers, blocks, and the models.

Imports nothing of parallel/: parallel/sharding.py shards parameters by their path. Padding arrives as
masks or segments. The networks, and Flax with them, are loaded when one of these names is first used: a
program that an earlier process has compiled runs without them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flaxformer_mt.model.networks import Model, init_params, make_model

__all__ = ["Model", "init_params", "make_model"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flaxformer_mt.model import networks

    value = getattr(networks, name)
    globals()[name] = value
    return value
