"""The attention weights of every layer, from the same forward pass that training and evaluation run.

Reads them from the collection `intermediates` of a model; figures.py draws them.
"""

from typing import Any, NamedTuple

from flax import linen as nn

from flaxformer_mt.model.scanned_layers import unstack_layers
from flaxformer_mt.shapes import Array, Batch


class AttentionMaps(NamedTuple):
    """Attention weights, one array [B, H, Q, M] per layer from the first to the last; rows sum to 1.

    encoder [B, H, S, S], decoder [B, H, T, T], cross [B, H, T, S]. A decoder-only model has only decoder
    maps, over source and target concatenated: [B, H, S + T, S + T]. A recurrent decoder has no decoder maps.
    """

    encoder: list[Array]
    decoder: list[Array]
    cross: list[Array]


def attention_maps(model: nn.Module, params: Any, batch: Batch) -> AttentionMaps:
    """Compute the attention weights of each head and layer for a batch, without dropout."""
    _, variables = model.apply(
        {"params": params}, batch, deterministic=True, method="hidden", mutable=["intermediates"]
    )
    intermediates = unstack_layers(variables["intermediates"])
    return AttentionMaps(
        _weights(intermediates.get("encoder", {}), "self_attention"),
        _weights(intermediates.get("decoder", {}), "self_attention"),
        _weights(intermediates.get("decoder", {}), "cross_attention"),
    )


def _weights(stack: dict[str, Any], attention: str) -> list[Array]:
    layers = [stack[f"layers_{number}"] for number in range(len(stack))]
    return [layer[attention]["attention_weights"][0] for layer in layers if attention in layer]
