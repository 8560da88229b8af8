"""Format torch-nn: a model around torch.nn.Transformer, with embeddings, positions and an output layer.

The class may be copied as a starting point for other code.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flaxformer_mt.config import Config
from flaxformer_mt.convert.name_table import read_names
from flaxformer_mt.convert.network_fields import Field, any_value, write_options
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
        """Return logits [B, T, V] for source ids [B, S] and target ids [B, T]; masks are False at padding."""
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
    """A table of interleaved sines and cosines, which is not part of the state dict."""

    table: Tensor

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.arange(rows, dtype=torch.float64)[:, None] * rates
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :width].float()
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        return self.table[positions]


_FIELDS = (
    Field("model_dim", "d_model"),
    Field("num_heads", "nhead"),
    Field("num_encoder_layers", "num_encoder_layers"),
    Field("num_decoder_layers", "num_decoder_layers"),
    Field("ffn_dim", "dim_feedforward"),
    Field("dropout_rate", "dropout"),
    Field("activation", "activation", ("relu", "gelu")),
    Field("norm_epsilon", "layer_norm_eps"),
    Field("norm_position", "norm_first", {True: "pre", False: "post"}),
    Field("final_norm", "final_norm"),
    Field("positions", "positions", ("sinusoidal", "learned")),
    Field("first_position", "first_position"),
    Field("max_positions", "max_positions"),
    Field("embedding_scale", "embedding_scale"),
    Field("logit_scale", "logit_scale"),
    Field("output_bias", "output_bias"),
    Field("tying", "tying"),
    Field("padding_mask", "padding_mask"),
    *any_value("attention_bias", "ffn_bias"),
)
_NAMES = """
source_embedding                                               source_embedding
target_embedding                                               target_embedding
(encoder|decoder)/positions                                    (source|target)_positions
output_bias                                                    output.bias
output                                                         output
encoder/final_norm                                             transformer.encoder.norm
encoder/layers_{n}/self_attention/query+key+value/(kernel|bias)   transformer.encoder.layers.{n}.self_attn.in_proj_(weight|bias)
encoder/layers_{n}/self_attention/output                       transformer.encoder.layers.{n}.self_attn.out_proj
encoder/layers_{n}/feedforward/(input|output)                  transformer.encoder.layers.{n}.linear(1|2)
encoder/layers_{n}/(self_attention|feedforward)_residual/norm  transformer.encoder.layers.{n}.norm(1|2)
decoder/final_norm                                             transformer.decoder.norm
decoder/layers_{n}/self_attention/query+key+value/(kernel|bias)   transformer.decoder.layers.{n}.self_attn.in_proj_(weight|bias)
decoder/layers_{n}/self_attention/output               transformer.decoder.layers.{n}.self_attn.out_proj
decoder/layers_{n}/cross_attention/query+key+value/(kernel|bias)   transformer.decoder.layers.{n}.multihead_attn.in_proj_(weight|bias)
decoder/layers_{n}/cross_attention/output               transformer.decoder.layers.{n}.multihead_attn.out_proj
decoder/layers_{n}/feedforward/(input|output)                  transformer.decoder.layers.{n}.linear(1|2)
decoder/layers_{n}/(self_attention|cross_attention|feedforward)_residual/norm  transformer.decoder.layers.{n}.norm(1|2|3)
"""  # noqa: E501


def _arguments(config: Config, vocabs: Vocabs) -> dict[str, Any]:
    sizes = {"source_size": vocabs.source.size, "target_size": vocabs.target.size}
    return sizes | write_options(_FIELDS, config.model)


def _run(state: dict[str, Tensor], arguments: dict[str, Any], batch: Batch) -> Tensor:
    module = TransformerModel(**arguments)
    module.load_state_dict(state, strict=True)
    masks = (torch.from_numpy(np.array(mask)) for mask in (batch.source_mask, batch.target_mask))
    return module.eval()(tensor_of(batch.source), tensor_of(batch.target_in), *masks)


STATE_DICT = StateDictFormat(
    "torch-nn",
    _FIELDS,
    lambda config: read_names(_NAMES),
    _arguments,
    _run,
    absent=("attention_bias", "ffn_bias"),
)
FORMAT = STATE_DICT.make_format()
