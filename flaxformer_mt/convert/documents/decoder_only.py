"""Format decoder-only: the PyTorch class of document 002. Attention is causal; there is no padding mask."""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flaxformer_mt.config import Config
from flaxformer_mt.convert.formats import unsupported_fields
from flaxformer_mt.convert.name_table import (
    HEADS_OUT,
    TRANSPOSED,
    Constant,
    Rule,
    Shapes,
    feedforward_rules,
    linear_layout,
    rules_for,
)
from flaxformer_mt.convert.torch.state_dicts import StateDictFormat, tensor_of
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import Vocabs


class TransformerDecoder(nn.Module):
    """A causal stack with an output layer: a language model.

    positions="as_written" adds one vector to every token: the linear map of the numbers 0 to window_size.
    positions="one_hot" adds the map of each token's own index, for at most window_size + 1 tokens.
    """

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        window_size: int,
        d_k: int,
        d_v: int,
        n_heads: int,
        hidden: int,
        n_blocks: int,
        dropout: float,
        positions: str = "as_written",
    ) -> None:
        super().__init__()
        self.embedding = _OneHotMap(vocab_size, embedding_size)
        self.position = _OneHotMap(window_size + 1, embedding_size)
        self.blocks = nn.ModuleList(
            [_Block(embedding_size, d_k, d_v, n_heads, hidden, dropout) for _ in range(n_blocks)]
        )
        self.w = nn.Linear(embedding_size, vocab_size)
        self.positions = positions

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [B, V] of the token after the last of ids [B, T]."""
        return self.all_logits(ids)[:, -1]

    def all_logits(self, ids: Tensor) -> Tensor:
        """Return logits [B, T, V] of the token after each of ids [B, T]."""
        x = self.embedding(ids)
        if self.positions == "as_written":
            rows = self.position.embedding.in_features
            x = x + self.position.embedding(torch.arange(rows, device=ids.device, dtype=x.dtype))
        else:
            x = x + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.w(x)


class _OneHotMap(nn.Module):
    """A linear map of one-hot vectors: one column of the matrix plus the bias."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(size, width)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding.weight.T) + self.embedding.bias


class _Head(nn.Module):
    def __init__(self, width: int, d_k: int, d_v: int) -> None:
        super().__init__()
        self.wq = nn.Linear(width, d_k)
        self.wk = nn.Linear(width, d_k)
        self.wv = nn.Linear(width, d_v)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.wq(x) @ self.wk(x).mT / math.sqrt(self.wq.out_features)
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return scores.masked_fill(future, -math.inf).softmax(-1) @ self.wv(x)


class _Attention(nn.Module):
    def __init__(self, width: int, d_k: int, d_v: int, n_heads: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList([_Head(width, d_k, d_v) for _ in range(n_heads)])
        self.w = nn.Linear(n_heads * d_v, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.w(torch.cat([head(x) for head in self.heads], dim=-1))


class _Map(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.w = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.w(x)


class _Block(nn.Module):
    def __init__(self, width: int, d_k: int, d_v: int, n_heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention = _Attention(width, d_k, d_v, n_heads)
        self.ffl1 = _Map(width, hidden)
        self.ffl2 = _Map(hidden, width)
        self.d1 = nn.Dropout(dropout)
        self.d2 = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = _normalise(x + self.d1(self.attention(x)))
        return _normalise(x + self.d2(self.ffl2(F.gelu(self.ffl1(x)))))


def _normalise(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / x.std(-1, correction=0, keepdim=True)


# model.positions -> the argument `positions` of the class.
_POSITIONS = {"one_vector": "as_written", "learned": "one_hot"}

_ALLOWED: dict[str, tuple[Any, ...]] = {
    "model.architecture": ("decoder_only",),
    "model.activation": ("gelu",),
    "model.norm_position": ("post",),
    "model.norm": ("layer",),
    "model.norm_epsilon": (0,),
    "model.norm_affine": (False,),
    "model.final_norm": (None, False),
    "model.embedding_norm": (False,),
    "model.positions": tuple(_POSITIONS),
    "model.first_position": (0,),
    "model.embedding_scale": (False,),
    "model.logit_scale": (False,),
    "model.embedding_bias": (True,),
    "model.tying": ("none",),
    "model.attention_bias": (True,),
    "model.ffn_bias": (True,),
    "model.output_bias": (True,),
}


def _problems(config: Config) -> list[str]:
    problems = unsupported_fields(config, _ALLOWED)
    if config.model.padding_mask == "none" and config.data.source_language:
        # The settings both and source need no mask in the class: its rows have no padding before the target,
        # and causal attention hides padding after the target from every real token.
        problems.append(
            "model.padding_mask is none; supported with a source: source, both. Rows of the class have no "
            "padding, but with none the Flax model attends to the padding between source and target"
        )
    return problems


def _rules(config: Config, shapes: Shapes) -> list[Rule | Constant]:
    feedforward = feedforward_rules({"input": "ffl1.w", "output": "ffl2.w"}, linear_layout(config.model))
    attention = [
        *_head_rules("query", "wq"),
        *_head_rules("key", "wk"),
        *_head_rules("value", "wv"),
        Rule("self_attention/output/kernel", "attention.w.weight", HEADS_OUT),
        Rule("self_attention/output/bias", "attention.w.bias"),
    ]
    return [
        Rule("token_embedding/embedding", "embedding.embedding.weight", TRANSPOSED),
        Rule("token_embedding/bias", "embedding.embedding.bias"),
        Rule("decoder/positions/embedding", "position.embedding.weight", TRANSPOSED),
        Rule("decoder/positions/bias", "position.embedding.bias"),
        *rules_for([("decoder/layers_{n}/", "blocks.{n}.")], attention),
        *rules_for([("decoder/layers_{n}/feedforward", "blocks.{n}")], feedforward),
        Rule("output_kernel", "w.weight", TRANSPOSED),
        Rule("output_bias", "w.bias"),
    ]


def _head_rules(flax: str, foreign: str) -> list[Rule]:
    path, name = f"self_attention/{flax}", "attention.heads.{h}." + foreign
    return [
        Rule(f"{path}/kernel", f"{name}.weight", TRANSPOSED, head_axis=1),
        Rule(f"{path}/bias", f"{name}.bias", head_axis=0),
    ]


def _arguments(config: Config, vocabs: Vocabs) -> dict[str, Any]:
    model = config.model
    size = model.model_dim // model.num_heads
    return {
        "vocab_size": vocabs.target.size,
        "embedding_size": model.model_dim,
        # Of the table of positions; one_vector has it too, although its inputs are unbounded.
        "window_size": (model.max_positions or 512) - 1,
        "d_k": model.key_dim or size,
        "d_v": model.value_dim or size,
        "n_heads": model.num_heads,
        "hidden": model.ffn_dim,
        "n_blocks": model.num_decoder_layers,
        "dropout": model.dropout_rate,
        "positions": _POSITIONS[model.positions],
    }


def _run(module: torch.nn.Module, batch: Batch, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    assert isinstance(module, TransformerDecoder)
    if batch.source.shape[1] == 0:
        return module.all_logits(tensor_of(batch.target_in))
    rows = []
    for index, length in enumerate(np.asarray(batch.target_mask).sum(axis=1)):
        source = np.asarray(batch.source[index])[np.asarray(batch.source_mask[index])]
        row = np.concatenate([source, np.asarray(batch.target_in[index])[:length]])
        # No padding between source and target: no real token of the Flax model attends to it.
        rows.append(module.all_logits(tensor_of(row)[None])[0, len(source) :])
    return _pad(rows, batch.target_in.shape[1])


def _pad(rows: list[torch.Tensor], length: int) -> torch.Tensor:
    """Stack rows [t, V] of t <= T tokens to [B, T, V], with zeros after the last real token."""
    padded = rows[0].new_zeros(len(rows), length, rows[0].shape[-1])
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


STATE_DICT = StateDictFormat(
    name="decoder-only",
    problems=_problems,
    rules=_rules,
    arguments=_arguments,
    make_module=TransformerDecoder,
    run=_run,
)
FORMAT = STATE_DICT.make_format()
