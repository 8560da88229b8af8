"""PyTorch class of document 002, with that system's computation and parameter names.

The parity check of the format `decoder-only` loads exported weights into this class. Attention is causal, and
there is no padding mask.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
    """Normalise the last axis to mean 0 and variance 1; a row of equal numbers becomes NaN."""
    return (x - x.mean(-1, keepdim=True)) / x.std(-1, correction=0, keepdim=True)
