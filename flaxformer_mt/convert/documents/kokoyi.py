"""Format kokoyi: the PyTorch class of document 001, whose inputs are embedded tokens."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flaxformer_mt.config import Config
from flaxformer_mt.convert.formats import unsupported_fields
from flaxformer_mt.convert.name_table import (
    FLAT_ROWS,
    HEAD_STACKED,
    NORM,
    Constant,
    Rule,
    Shapes,
    feedforward_rules,
    linear_layout,
    rules_for,
)
from flaxformer_mt.convert.torch.state_dicts import POST_NORM, STATE_NAME, StateDictFormat, tensor_of
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import Vocabs


class KokoyiTransformer(nn.Module):
    """Post-norm layers and an output matrix; the only mask is causal, so padding is treated like any token.

    Matrices are [in, out], except those of the feed-forward layers. `hidden_dim` is the width of each head
    and of the feed-forward layers.
    """

    def __init__(self, L: int, num_heads: int, embed_dim: int, hidden_dim: int, out_dim: int) -> None:
        super().__init__()
        sizes = (num_heads, embed_dim, hidden_dim)
        self.EncLayers = nn.ModuleList([_EncoderLayer(*sizes) for _ in range(L)])
        self.DecLayers = nn.ModuleList([_DecoderLayer(*sizes) for _ in range(L)])
        self.W = init_matrix(embed_dim, out_dim)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return logits [..., T, V] from embedded source [..., S, D] and target [..., T, D]."""
        memory = _add_positions(x)
        for layer in self.EncLayers:
            memory = layer(memory)
        y = _add_positions(y)
        for layer in self.DecLayers:
            y = layer(y, memory)
        return y @ self.W


def init_matrix(rows: int, columns: int) -> nn.Parameter:
    """Return an embedding table or output matrix: Xavier uniform with the gain of ReLU."""
    return nn.Parameter(nn.init.xavier_uniform_(torch.empty(rows, columns), gain=math.sqrt(2)))


def _add_positions(x: Tensor) -> Tensor:
    length, width = x.shape[-2:]
    column = np.arange(width)
    angles = np.arange(length)[:, None] / 10000.0 ** (2 * (column // 2) / width)
    table = np.where(column % 2, np.cos(angles), np.sin(angles))
    return x + torch.from_numpy(table).to(x)


class _Attention(nn.Module):
    def __init__(self, num_heads: int, embed_dim: int, hidden_dim: int, *, is_causal: bool) -> None:
        super().__init__()
        gain = math.sqrt((embed_dim + hidden_dim) / (embed_dim + num_heads * hidden_dim))

        def matrix(*shape: int) -> nn.Parameter:
            return nn.Parameter(nn.init.xavier_uniform_(torch.empty(shape), gain=gain))

        self.Wq, self.Wk, self.Wv = (matrix(num_heads, embed_dim, hidden_dim) for _ in range(3))
        self.Wo = matrix(num_heads * hidden_dim, embed_dim)
        self.is_causal = is_causal

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x, memory = x.unsqueeze(-3), memory.unsqueeze(-3)
        scores = (x @ self.Wq) @ (memory @ self.Wk).mT / math.sqrt(self.Wq.shape[-1])
        if self.is_causal:
            future = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        mixed = scores.softmax(-1) @ (memory @ self.Wv)
        return mixed.transpose(-3, -2).flatten(-2) @ self.Wo


class _FeedForward(nn.Module):
    def __init__(self, embed_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.Linears = nn.ModuleList([nn.Linear(embed_dim, hidden_dim), nn.Linear(hidden_dim, embed_dim)])

    def forward(self, x: Tensor) -> Tensor:
        return self.Linears[1](self.Linears[0](x).relu())


class _EncoderLayer(nn.Module):
    def __init__(self, num_heads: int, embed_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.attn = _Attention(num_heads, embed_dim, hidden_dim, is_causal=False)
        self.norm1 = nn.LayerNorm(embed_dim)
        self.norm2 = nn.LayerNorm(embed_dim)
        self.ffn = _FeedForward(embed_dim, hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x, x))
        return self.norm2(x + self.ffn(x))


class _DecoderLayer(nn.Module):
    def __init__(self, num_heads: int, embed_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.mask_attn = _Attention(num_heads, embed_dim, hidden_dim, is_causal=True)
        self.attn = _Attention(num_heads, embed_dim, hidden_dim, is_causal=False)
        self.ffn = _FeedForward(embed_dim, hidden_dim)
        self.norm1 = nn.LayerNorm(embed_dim)
        self.norm2 = nn.LayerNorm(embed_dim)
        self.norm3 = nn.LayerNorm(embed_dim)

    def forward(self, y: Tensor, memory: Tensor) -> Tensor:
        y = self.norm1(y + self.mask_attn(y, y))
        y = self.norm2(y + self.attn(y, memory))
        return self.norm3(y + self.ffn(y))


EMBEDDINGS_NAME = "embeddings.pt"
_SOURCE, _TARGET = "src_embedding", "tgt_embedding"

_ALLOWED = POST_NORM | {
    "model.norm_epsilon": (1e-5,),
    "model.embedding_norm": (False,),
    "model.first_position": (0,),
    "model.embedding_scale": (False,),
    "model.logit_scale": (False,),
    "model.tying": ("none",),
    "model.attention_bias": (False,),
}

_ATTENTION = [
    Rule("/query/kernel", ".Wq", HEAD_STACKED),
    Rule("/key/kernel", ".Wk", HEAD_STACKED),
    Rule("/value/kernel", ".Wv", HEAD_STACKED),
    Rule("/output/kernel", ".Wo", FLAT_ROWS),
]


def _problems(config: Config) -> Iterator[str]:
    yield from unsupported_fields(config, _ALLOWED)
    model = config.model
    if model.padding_mask != "none":
        yield (
            f"model.padding_mask is {model.padding_mask}; supported: none. The class does not mask padding, "
            "so its logits would depend on the padding of the batch, unlike those of the Flax model"
        )
    if model.num_encoder_layers != model.num_decoder_layers:
        yield (
            f"model.num_encoder_layers is {model.num_encoder_layers} and model.num_decoder_layers is "
            f"{model.num_decoder_layers}; they must be equal"
        )
    size = model.model_dim // model.num_heads
    key_dim, value_dim = model.key_dim or size, model.value_dim or size
    if not key_dim == value_dim == model.ffn_dim:
        yield (
            f"model.key_dim is {key_dim}, model.value_dim is {value_dim} and model.ffn_dim is "
            f"{model.ffn_dim}; they must be equal: the class has one size for all three, hidden_dim"
        )


def _rules(config: Config, shapes: Shapes) -> list[Rule | Constant]:
    feedforward = feedforward_rules({"input": "0", "output": "1"}, linear_layout(config.model))
    encoder, decoder = "encoder/layers_{n}/", "decoder/layers_{n}/"
    attentions = [
        (encoder + "self_attention", "EncLayers.{n}.attn"),
        (decoder + "self_attention", "DecLayers.{n}.mask_attn"),
        (decoder + "cross_attention", "DecLayers.{n}.attn"),
    ]
    feedforwards = [
        (encoder + "feedforward", "EncLayers.{n}.ffn.Linears"),
        (decoder + "feedforward", "DecLayers.{n}.ffn.Linears"),
    ]
    norms = [
        (encoder + "self_attention", "EncLayers.{n}.norm1"),
        (encoder + "feedforward", "EncLayers.{n}.norm2"),
        (decoder + "self_attention", "DecLayers.{n}.norm1"),
        (decoder + "cross_attention", "DecLayers.{n}.norm2"),
        (decoder + "feedforward", "DecLayers.{n}.norm3"),
    ]
    return [
        Rule("source_embedding/embedding", _SOURCE),
        Rule("target_embedding/embedding", _TARGET),
        *rules_for(attentions, _ATTENTION),
        *rules_for(feedforwards, feedforward),
        *rules_for([(f"{sublayer}_residual/norm", name) for sublayer, name in norms], NORM),
        Rule("output_kernel", "W"),
    ]


def _arguments(config: Config, vocabs: Vocabs) -> dict[str, Any]:
    model = config.model
    return {
        "L": model.num_encoder_layers,
        "num_heads": model.num_heads,
        "embed_dim": model.model_dim,
        "hidden_dim": model.ffn_dim,
        "out_dim": vocabs.target.size,
    }


def _run(module: torch.nn.Module, batch: Batch, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return module(tensors[_SOURCE][tensor_of(batch.source)], tensors[_TARGET][tensor_of(batch.target_in)])


STATE_DICT = StateDictFormat(
    name="kokoyi",
    problems=lambda config: list(_problems(config)),
    rules=_rules,
    arguments=_arguments,
    make_module=KokoyiTransformer,
    run=_run,
    file_of=lambda name: EMBEDDINGS_NAME if name in (_SOURCE, _TARGET) else STATE_NAME,
)
FORMAT = STATE_DICT.make_format()
