"""Document 002, a causal stack alone, in plain PyTorch.

Owns the document's names in the state dict, its norm without epsilon or parameters and its position vector.
Padding is a token as any other. Knows nothing of JAX or of the package that the tests compare with it.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    """A linear map of one-hot vectors: a column of the weight, and the bias."""

    def __init__(self, vocab_size: int, embedding_size: int):
        super().__init__()
        self.embedding = nn.Linear(vocab_size, embedding_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] from vectors [..., V], or from integer ids [...], which become one-hot vectors here."""
        if not x.is_floating_point():
            x = F.one_hot(x.long(), self.embedding.in_features).to(self.embedding.weight)
        return self.embedding(x)


class LayerNorm(nn.Module):
    """Less the mean, over the population's standard deviation; nothing learned, NaN for a constant row."""

    def forward(self, x: Tensor) -> Tensor:
        """From [..., D] to [..., D]."""
        centered = x - x.mean(dim=-1, keepdim=True)
        return centered / centered.square().mean(dim=-1, keepdim=True).sqrt()


class SelfAttentionLayer(nn.Module):
    """One head."""

    def __init__(self, d_in: int, d_k: int, d_v: int, device: str):
        super().__init__()
        self.wq = nn.Linear(d_in, d_k)
        self.wk = nn.Linear(d_in, d_k)
        self.wv = nn.Linear(d_in, d_v)
        # Neither parameter nor buffer: `Module.to` leaves it where and what it is.
        self.sqrt_dk = torch.tensor([float(d_k)], dtype=torch.float32, device=device).sqrt()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mixed values [B, T, E] and weights [B, T, T] from [B, T, D]."""
        scores = self.wq(x) @ self.wk(x).transpose(1, 2) / self.sqrt_dk
        later = torch.ones_like(scores, dtype=torch.bool).triu(diagonal=1)
        weights = scores.masked_fill(later, -math.inf).softmax(dim=-1)
        return weights @ self.wv(x), weights


class MultiHeadAttentionLayer(nn.Module):
    """Heads side by side, then a map back to the width."""

    def __init__(self, d_in: int, d_k: int, d_v: int, n_heads: int, device: str):
        super().__init__()
        self.heads = nn.ModuleList(SelfAttentionLayer(d_in, d_k, d_v, device) for _ in range(n_heads))
        self.w = nn.Linear(n_heads * d_v, d_in)

    def forward(self, x: Tensor, weights_list: list[Tensor] | None = None) -> Tensor:
        """From [B, T, D] to [B, T, D]; weights [B, H, T, T] are appended."""
        mixed, weights = zip(*(head(x) for head in self.heads), strict=True)
        if weights_list is not None:
            weights_list.append(torch.stack(weights, dim=1))
        return self.w(torch.cat(mixed, dim=-1))


class PositionWiseFFL(nn.Module):
    """A linear map and what follows it."""

    def __init__(self, d_in: int, d_out: int, activation: nn.Module):
        super().__init__()
        self.w = nn.Linear(d_in, d_out)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """From [B, T, d_in] to [B, T, d_out]."""
        return self.activation(self.w(x))


class TransformerBlock(nn.Module):
    """Attention and two maps with the exact GELU between them; dropout, addition and norm after each."""

    def __init__(self, d_in: int, d_k: int, d_v: int, n_heads: int, hidden: int, dropout: float, device: str):
        super().__init__()
        self.attention = MultiHeadAttentionLayer(d_in, d_k, d_v, n_heads, device)
        self.layer_norm = LayerNorm()
        self.ffl1 = PositionWiseFFL(d_in, hidden, nn.GELU())
        self.ffl2 = PositionWiseFFL(hidden, d_in, nn.Identity())
        self.d1 = nn.Dropout(dropout)
        self.d2 = nn.Dropout(dropout)

    def forward(self, x: Tensor, weights_list: list[Tensor] | None = None) -> Tensor:
        """From [B, T, D] to [B, T, D]."""
        z = self.layer_norm(x + self.d1(self.attention(x, weights_list)))
        return self.layer_norm(z + self.d2(self.ffl2(self.ffl1(z))))


class TransformerDecoder(nn.Module):
    """The document's network.

    positions="as_written": one vector, the map of [0, 1, ..., window_size], is added at all positions alike,
    at any length. positions="one_hot", what the document's prose means: position p adds the map of the p-th
    one-hot vector, and a sequence longer than window_size + 1 raises RuntimeError.
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
        device: str = "cpu",
        positions: str = "as_written",
    ):
        super().__init__()
        if positions not in ("as_written", "one_hot"):
            raise ValueError(f"positions is {positions!r}: as_written or one_hot")
        self.positions = positions
        # Neither parameter nor buffer, as sqrt_dk.
        self.pids = torch.arange(window_size + 1, dtype=torch.float32, device=device)
        self.embedding = Embedding(vocab_size, embedding_size)
        self.position = Embedding(window_size + 1, embedding_size)
        self.blocks = nn.ModuleList(
            TransformerBlock(embedding_size, d_k, d_v, n_heads, hidden, dropout, device)
            for _ in range(n_blocks)
        )
        self.w = nn.Linear(embedding_size, vocab_size)
        self.to(device)

    def all_logits(self, ids: Tensor, weights_list: list[Tensor] | None = None) -> Tensor:
        """Logits [B, T, V] of every position, from ids [B, T] or one-hot vectors [B, T, V].

        Each block appends its weights [B, H, T, T] to `weights_list`.
        """
        x = self.embedding(ids)
        if self.positions == "as_written":
            x = x + self.position(self.pids)
        else:
            x = x + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x, weights_list)
        return self.w(x)

    def forward(self, ids: Tensor, weights_list: list[Tensor] | None = None) -> Tensor:
        """Logits [B, V] of the last position alone."""
        return self.all_logits(ids, weights_list)[:, -1]
