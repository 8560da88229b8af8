"""PyTorch class of document 001, with that system's computation and parameter names.

The parity check of the format `kokoyi` loads exported weights into this class. Inputs are embedded tokens.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn


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
    """Return an embedding table or output matrix with its initial values: Xavier uniform with the gain of
    ReLU.
    """
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
