"""The attention weights of every layer, from the same forward pass that training and evaluation run.

Owns where the layers leave them. Knows nothing of tokens or of pictures.
"""

from typing import Any, NamedTuple

from flax import linen as nn

from flaxformer_mt.model.scanned_layers import unstack_layers
from flaxformer_mt.shapes import Array, Batch


class AttentionMaps(NamedTuple):
    """One array a layer, [B, H, Q, M], from the first layer; rows sum to 1.

    encoder [B, H, S, S], decoder [B, H, T, T], cross [B, H, T, S]. A decoder-only model has decoder maps
    alone, over source and target in a row: [B, H, S + T, S + T].
    """

    encoder: list[Array]
    decoder: list[Array]
    cross: list[Array]


def attention_maps(model: nn.Module, params: Any, batch: Batch) -> AttentionMaps:
    """The weights with which each head of each layer reads a batch, without dropout."""
    _, kept = model.apply(
        {"params": params}, batch, deterministic=True, method="hidden", mutable=["intermediates"]
    )
    found = unstack_layers(kept["intermediates"])
    return AttentionMaps(
        _weights(found.get("encoder", {}), "self_attention"),
        _weights(found.get("decoder", {}), "self_attention"),
        _weights(found.get("decoder", {}), "cross_attention"),
    )


def _weights(stack: dict[str, Any], attention: str) -> list[Array]:
    layers = [stack[f"layers_{number}"] for number in range(len(stack))]
    return [layer[attention]["attention_weights"][0] for layer in layers if attention in layer]
