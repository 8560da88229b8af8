"""Format torch-nn: a model around torch.nn.Transformer, with embeddings, positions and an output layer.

The class may be copied as a starting point for other code.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flaxformer_mt.config import Config, ModelConfig
from flaxformer_mt.convert.formats import unsupported_fields
from flaxformer_mt.convert.name_table import (
    FLAT,
    HEADS_IN,
    HEADS_OUT,
    NORM,
    Constant,
    Rule,
    Shapes,
    TableNames,
    embedding_rules,
    feedforward_rules,
    linear_layout,
    rules_for,
)
from flaxformer_mt.convert.torch.state_dicts import StateDictFormat, tensor_of
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import Vocabs


class TransformerModel(nn.Module):
    """Embeddings, torch.nn.Transformer (batch first) and an output layer; maps ids to logits.

    activation: relu or gelu. positions: sinusoidal or learned, counted from first_position. tying: none,
    embeddings, target_output or all; tied matrices are the same parameter. padding_mask: source, both or
    none. final_norm: whether both stacks end in a norm, as the default stacks of torch.nn.Transformer do.
    """

    def __init__(
        self,
        source_size: int,
        target_size: int,
        d_model: int,
        nhead: int,
        num_encoder_layers: int,
        num_decoder_layers: int,
        dim_feedforward: int,
        dropout: float = 0.1,
        activation: str = "relu",
        layer_norm_eps: float = 1e-5,
        norm_first: bool = False,
        final_norm: bool = True,
        positions: str = "sinusoidal",
        first_position: int = 0,
        max_positions: int = 5000,
        embedding_scale: bool = True,
        logit_scale: bool = False,
        output_bias: bool = True,
        tying: str = "none",
        padding_mask: str = "source",
    ) -> None:
        super().__init__()
        layer = (d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, True, norm_first)
        norms = [nn.LayerNorm(d_model, layer_norm_eps) if final_norm else None for _ in range(2)]
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(*layer), num_encoder_layers, norms[0], enable_nested_tensor=False
        )
        decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(*layer), num_decoder_layers, norms[1])
        self.transformer = nn.Transformer(
            d_model, nhead, custom_encoder=encoder, custom_decoder=decoder, batch_first=True
        )
        self.target_embedding = nn.Embedding(target_size, d_model)
        shared = tying in ("all", "embeddings")
        self.source_embedding = self.target_embedding if shared else nn.Embedding(source_size, d_model)
        self.output = nn.Linear(d_model, target_size, bias=output_bias)
        if tying in ("all", "target_output"):
            self.output.weight = self.target_embedding.weight
        rows = max_positions + first_position
        table = nn.Embedding if positions == "learned" else _Sinusoids
        self.source_positions: nn.Module = table(rows, d_model)
        self.target_positions: nn.Module = table(rows, d_model)
        self.dropout = nn.Dropout(dropout)
        self.first_position, self.padding_mask = first_position, padding_mask
        self.embedding_factor = d_model**0.5 if embedding_scale else 1.0
        self.logit_factor = d_model**-0.5 if logit_scale else 1.0

    def forward(self, source: Tensor, target: Tensor, source_mask: Tensor, target_mask: Tensor) -> Tensor:
        """Return logits [B, T, V] for ids [B, S] and [B, T]; masks are True at tokens, False at padding."""
        length = target.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        source_padding = None if self.padding_mask == "none" else ~source_mask
        x = self.transformer(
            self._embed(source, self.source_embedding, self.source_positions),
            self._embed(target, self.target_embedding, self.target_positions),
            tgt_mask=future,
            src_key_padding_mask=source_padding,
            tgt_key_padding_mask=~target_mask if self.padding_mask == "both" else None,
            memory_key_padding_mask=source_padding,
        )
        return self.output(x * self.logit_factor)

    def _embed(self, ids: Tensor, embedding: nn.Module, position_table: nn.Module) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device) + self.first_position
        return self.dropout(embedding(ids) * self.embedding_factor + position_table(positions))


class _Sinusoids(nn.Module):
    """Table of interleaved sines and cosines, which is not part of the state dict."""

    table: Tensor

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.arange(rows, dtype=torch.float64)[:, None] * rates
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :width].float()
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        return self.table[positions]


_ALLOWED: dict[str, tuple[Any, ...]] = {
    "model.architecture": ("encoder_decoder",),
    "model.decoder_self_attention": ("attention",),
    "model.activation": ("relu", "gelu"),
    "model.norm": ("layer",),
    "model.norm_affine": (True,),
    "model.embedding_norm": (False,),
    "model.positions": ("sinusoidal", "learned"),
    "model.embedding_bias": (False,),
}

_PROJECTIONS = ("/query", "/key", "/value")
_ATTENTION = [
    Rule(tuple(f"{name}/kernel" for name in _PROJECTIONS), ".in_proj_weight", HEADS_IN),
    Rule(tuple(f"{name}/bias" for name in _PROJECTIONS), ".in_proj_bias", FLAT),
    Rule("/output/kernel", ".out_proj.weight", HEADS_OUT),
    Rule("/output/bias", ".out_proj.bias"),
]
_STACKS = {
    "encoder": {"self_attention": "self_attn"},
    "decoder": {"self_attention": "self_attn", "cross_attention": "multihead_attn"},
}


def _problems(config: Config) -> list[str]:
    """Return reasons why the class cannot express the model; its heads all have the size d_model / nhead."""
    model = config.model
    size = model.model_dim / model.num_heads
    sizes = (None, int(size)) if size.is_integer() else (None,)
    return unsupported_fields(config, {**_ALLOWED, "model.key_dim": sizes, "model.value_dim": sizes})


def _rules(config: Config, shapes: Shapes) -> list[Rule | Constant]:
    model = config.model
    feedforward = feedforward_rules({"input": "linear1", "output": "linear2"}, linear_layout(model))
    rules: list[Rule | Constant] = [*_embedding_rules(model)]
    for stack, attentions in _STACKS.items():
        foreign = f"transformer.{stack}"
        rules += rules_for([(f"{stack}/final_norm", f"{foreign}.norm")], NORM)
        flax, foreign = f"{stack}/layers_{{n}}/", f"{foreign}.layers.{{n}}"
        rules += rules_for([(flax + a, f"{foreign}.{b}") for a, b in attentions.items()], _ATTENTION)
        rules += rules_for([(f"{flax}feedforward", foreign)], feedforward)
        sublayers = [*attentions, "feedforward"]
        norms = [(f"{flax}{name}_residual/norm", f"{foreign}.norm{i}") for i, name in enumerate(sublayers, 1)]
        rules += rules_for(norms, NORM)
    return [*rules, *_zeros(model)]


def _embedding_rules(model: ModelConfig) -> list[Rule]:
    names = TableNames("source_embedding.weight", "target_embedding.weight", "output.weight")
    source, target, output = embedding_rules(model, names)
    return [
        source,
        target,
        Rule("encoder/positions/embedding", "source_positions.weight"),
        Rule("decoder/positions/embedding", "target_positions.weight"),
        Rule("output_bias", "output.bias"),
        output,
    ]


def _zeros(model: ModelConfig) -> list[Constant]:
    """Return zeros for the biases that PyTorch's layers have and a model without biases lacks."""
    width, zeros = model.model_dim, []
    layers = {"encoder": model.num_encoder_layers, "decoder": model.num_decoder_layers}
    for stack, attentions in _STACKS.items():
        for number in range(layers[stack]):
            layer = f"transformer.{stack}.layers.{number}"
            if not model.attention_bias:
                for name in attentions.values():
                    zeros.append((f"{layer}.{name}.in_proj_bias", 3 * width))
                    zeros.append((f"{layer}.{name}.out_proj.bias", width))
            if not model.ffn_bias:
                zeros += [(f"{layer}.linear1.bias", model.ffn_dim), (f"{layer}.linear2.bias", width)]
    return [Constant(name, np.zeros(size, np.float32)) for name, size in zeros]


def _arguments(config: Config, vocabs: Vocabs) -> dict[str, Any]:
    model = config.model
    pre = model.norm_position == "pre"
    return {
        "source_size": vocabs.source.size,
        "target_size": vocabs.target.size,
        "d_model": model.model_dim,
        "nhead": model.num_heads,
        "num_encoder_layers": model.num_encoder_layers,
        "num_decoder_layers": model.num_decoder_layers,
        "dim_feedforward": model.ffn_dim,
        "dropout": model.dropout_rate,
        "activation": model.activation,
        "layer_norm_eps": model.norm_epsilon,
        "norm_first": pre,
        "final_norm": pre if model.final_norm is None else model.final_norm,
        "positions": model.positions,
        "first_position": model.first_position,
        "max_positions": model.longest_input,
        "embedding_scale": model.embedding_scale,
        "logit_scale": model.logit_scale,
        "output_bias": model.output_bias,
        "tying": model.tying,
        "padding_mask": model.padding_mask,
    }


def _run(module: torch.nn.Module, batch: Batch, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    masks = (torch.from_numpy(np.array(mask)) for mask in (batch.source_mask, batch.target_mask))
    return module(tensor_of(batch.source), tensor_of(batch.target_in), *masks)


STATE_DICT = StateDictFormat(
    name="torch-nn",
    problems=_problems,
    rules=_rules,
    arguments=_arguments,
    make_module=TransformerModel,
    run=_run,
)
FORMAT = STATE_DICT.make_format()
