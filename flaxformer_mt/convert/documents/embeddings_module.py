"""PyTorch classes of document 004: scaled embeddings, and a table of positions that is added to them."""

import math

import torch
from torch import Tensor, nn


class Embeddings(nn.Module):
    """A table of vectors, multiplied by the square root of their width."""

    def __init__(self, d_model: int, vocab: int) -> None:
        super().__init__()
        self.lut = nn.Embedding(vocab, d_model)
        self.d_model = d_model

    def forward(self, x: Tensor) -> Tensor:
        """Return vectors [B, T, D] of ids [B, T]."""
        return self.lut(x) * math.sqrt(self.d_model)


class PositionalEncoding(nn.Module):
    """Adds a table of positions, which is in the state dict, and drops out of the sum."""

    pe: Tensor

    def __init__(self, d_model: int, dropout: float, max_len: int = 5000) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        self.register_buffer("pe", torch.zeros(1, max_len, d_model))

    def forward(self, x: Tensor) -> Tensor:
        """Return vectors [B, T, D] with their positions."""
        return self.dropout(x + self.pe[:, : x.shape[1]])
