"""A model around torch.nn.Transformer with embeddings, positions, masks and an output layer.

The parity check of the format `torch-nn` loads exported weights into this class. The file may be copied as a
starting point for other code.
"""

import torch
from torch import Tensor, nn


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
