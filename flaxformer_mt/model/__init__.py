"""The network: position encodings, attention, feed-forward layers, blocks, and the models.

Padding is passed as masks or segments. The network modules, and Flax, are loaded when one of the public names
is first used, since a program that an earlier process has compiled runs without them.
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
