"""The post-norm network of Vaswani et al. (2017) in PyTorch, for the formats handbuilt, kokoyi and aiayn."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.convert.network_fields import Field, any_value

State = dict[str, Tensor]

FIELDS = (Field("norm_position", values="post"), *any_value("key_dim", "value_dim"))
_MASKED_SCORE = -1e9


def find_unequal_stacks(model: ModelConfig) -> Iterator[str]:
    if model.num_encoder_layers != model.num_decoder_layers:
        yield (
            f"model.num_encoder_layers is {model.num_encoder_layers} and model.num_decoder_layers is "
            f"{model.num_decoder_layers}; they must be equal"
        )


def linear(state: State, name: str, x: Tensor) -> Tensor:
    """Apply a linear layer, or a convolution of kernel size 1."""
    return functional.linear(x, state[f"{name}.weight"].flatten(1), state.get(f"{name}.bias"))


def norm(state: State, name: str, x: Tensor, epsilon: float = 1e-5) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], epsilon)


def attend(query: Tensor, key: Tensor, value: Tensor, blocked: Tensor, *, heads: int) -> Tensor:
    """Return the outputs of all attention heads, [B, Q, HE]; `blocked` is True where attention is masked."""
    query, key, value = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    mixed = scores.masked_fill(blocked, _MASKED_SCORE).softmax(-1) @ value
    return mixed.transpose(1, 2).flatten(2)


def is_future(ids: Tensor) -> Tensor:
    return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).triu(1)


class Layers(NamedTuple):
    """The encoder and decoder layers.

    encoder, decoder: the number of layers, then the names of their sublayers; {n} is the layer number.
    attention, feedforward: functions that compute a sublayer, whose first argument is the sublayer's name.
    """

    encoder: tuple[Any, ...]
    decoder: tuple[Any, ...]
    attention: Callable[[str, Tensor, Tensor, Tensor], Tensor]
    feedforward: Callable[[str, Tensor], Tensor]

    def run(self, x: Tensor, y: Tensor, source_blocked: Tensor, target_blocked: Tensor) -> Tensor:
        """Return the decoder output for embedded sources x and targets y."""
        count, *names = self.encoder
        for itself, inner in ([name.format(n=n) for name in names] for n in range(count)):
            x = self.feedforward(inner, self.attention(itself, x, x, source_blocked))
        count, *names = self.decoder
        for itself, cross, inner in ([name.format(n=n) for name in names] for n in range(count)):
            y = self.attention(itself, y, y, target_blocked)
            y = self.feedforward(inner, self.attention(cross, y, x, source_blocked))
        return y
