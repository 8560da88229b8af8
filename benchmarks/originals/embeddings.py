"""Document 004, scaled embeddings and positions from a table in float32, in plain PyTorch.

Owns the document's names in the state dict. Knows nothing of JAX or of the package that the tests compare
with it.
"""

import math

import torch
from torch import Tensor, nn


class Embeddings(nn.Module):
    """A table, times the root of its width; padding is a word as any other."""

    def __init__(self, d_model: int, vocab: int):
        super().__init__()
        self.lut = nn.Embedding(vocab, d_model)
        self.d_model = d_model

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T, D] from ids [B, T]."""
        return self.lut(ids) * math.sqrt(self.d_model)


class PositionalEncoding(nn.Module):
    """Adds sines and cosines of positions from 0 on, then drops out of the sum.

    The table is a buffer of the state dict, computed in float32 through a logarithm: far down it differs from
    the formula in float64 (by 4e-4 at 5000 rows of 512). RuntimeError: d_model is odd.
    """

    def __init__(self, d_model: int, dropout: float, max_len: int = 5000):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        position = torch.arange(max_len)[:, None]
        rate = torch.exp(torch.arange(0, d_model, 2) * -(math.log(10000.0) / d_model))
        table = torch.zeros(max_len, d_model)
        table[:, 0::2] = torch.sin(position * rate)
        table[:, 1::2] = torch.cos(position * rate)
        self.register_buffer("pe", table[None])

    def forward(self, x: Tensor) -> Tensor:
        """From [B, T, D] to [B, T, D]. RuntimeError: T is more than max_len."""
        return self.dropout(x + self.pe[:, : x.shape[1]])
