"""Document 001, the network of the kokoyi notebook, in plain PyTorch.

Owns the document's names in the state dict and its initialization. Inputs are embedded already: the two
tables are loose parameters of the document's training script, made here by `init_embedding`. The only mask is
the causal one, so padding is attended to as any token. Knows nothing of JAX or of the package that the tests
compare with it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.originals.sinusoids import sinusoid_table


def init_embedding(vocab: int, embed_dim: int) -> nn.Parameter:
    """One of the script's two tables [V, D]; the row of the padding is as random as the others."""
    return nn.Parameter(nn.init.xavier_uniform_(torch.empty(vocab, embed_dim), gain=math.sqrt(2)))


def embed(ids: Tensor, table: Tensor, pad_id: int = 0) -> Tensor:
    """The script's look-up [..., T, D] of ids [..., T]: padding is read, and its row gets no gradient."""
    return functional.embedding(ids, table, padding_idx=pad_id)


class MHAttn(nn.Module):
    """Attention without biases; matrices are (in, out), with an axis of heads in front of three of them."""

    causal = False

    def __init__(self, num_heads: int, embed_dim: int, hidden_dim: int):
        super().__init__()
        gain = math.sqrt(embed_dim + hidden_dim) / math.sqrt(embed_dim + num_heads * hidden_dim)

        def matrix(*shape: int) -> nn.Parameter:
            # To torch the fans of (heads, E, H) are E * H and heads * H; most initializers take others.
            return nn.Parameter(nn.init.xavier_uniform_(torch.empty(shape), gain=gain))

        self.Wq = matrix(num_heads, embed_dim, hidden_dim)
        self.Wk = matrix(num_heads, embed_dim, hidden_dim)
        self.Wv = matrix(num_heads, embed_dim, hidden_dim)
        self.Wo = matrix(num_heads * hidden_dim, embed_dim)

    def forward(self, x: Tensor, h: Tensor, weights_list: list[Tensor] | None = None) -> Tensor:
        """[..., Q, D] from queries [..., Q, D] and memory [..., M, D]; appends weights [..., H, Q, M]."""
        q, k, v = (
            vectors.unsqueeze(-3) @ matrix  # [..., H, Q or M, K]
            for vectors, matrix in ((x, self.Wq), (h, self.Wk), (h, self.Wv))
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if self.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(diagonal=1)
            scores = scores.masked_fill(later, -math.inf)
        weights = scores.softmax(dim=-1)
        if weights_list is not None:
            weights_list.append(weights)
        return (weights @ v).transpose(-3, -2).flatten(-2) @ self.Wo

    def get_parameters(self):
        """In the order of the declaration."""
        return self.Wq, self.Wk, self.Wv, self.Wo


class MaskedMHAttn(MHAttn):
    """The same, where row i attends to rows 0 to i."""

    causal = True


class FFN(nn.Module):
    """Two torch linear maps, so (out, in) and with biases; as wide inside as one head of attention."""

    def __init__(self, embed_dim: int, hidden_dim: int):
        super().__init__()
        self.Linears = nn.ModuleList([nn.Linear(embed_dim, hidden_dim), nn.Linear(hidden_dim, embed_dim)])

    def forward(self, x: Tensor) -> Tensor:
        """From [..., D] to [..., D]."""
        return self.Linears[1](self.Linears[0](x).relu())

    def get_parameters(self):
        """In the order of the declaration."""
        return self.Linears


class EncLayer(nn.Module):
    """Self-attention and feed-forward, each added and then normalized."""

    def __init__(self, num_heads: int, embed_dim: int, hidden_dim: int):
        super().__init__()
        self.attn = MHAttn(num_heads, embed_dim, hidden_dim)
        self.norm1, self.norm2 = nn.LayerNorm(embed_dim), nn.LayerNorm(embed_dim)
        self.ffn = FFN(embed_dim, hidden_dim)

    def forward(self, x: Tensor, weights_list: list[Tensor] | None = None) -> Tensor:
        """From [..., S, D] to [..., S, D]."""
        u = self.norm1(x + self.attn(x, x, weights_list))
        return self.norm2(u + self.ffn(u))

    def get_parameters(self):
        """In the order of the declaration, which is not that of the members."""
        return self.attn, [self.norm1, self.norm2], self.ffn


class DecLayer(nn.Module):
    """Causal self-attention, attention to the encoder and feed-forward, each added and then normalized."""

    def __init__(self, num_heads: int, embed_dim: int, hidden_dim: int):
        super().__init__()
        self.mask_attn = MaskedMHAttn(num_heads, embed_dim, hidden_dim)
        self.attn = MHAttn(num_heads, embed_dim, hidden_dim)
        self.ffn = FFN(embed_dim, hidden_dim)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(embed_dim) for _ in range(3))

    def forward(self, y: Tensor, h: Tensor, weights_list: list[Tensor] | None = None) -> Tensor:
        """[..., T, D] from [..., T, D] and memory [..., S, D]; causal weights are appended first."""
        u = self.norm1(y + self.mask_attn(y, y, weights_list))
        v = self.norm2(u + self.attn(u, h, weights_list))
        return self.norm3(v + self.ffn(v))

    def get_parameters(self):
        """In the order of the declaration."""
        return self.mask_attn, self.attn, self.ffn, [self.norm1, self.norm2, self.norm3]


def with_positions(vectors: Tensor) -> Tensor:
    """Vectors [..., T, D] and the sines and cosines of 0 to T - 1, added in the vectors' type."""
    return vectors + sinusoid_table(*vectors.shape[-2:]).to(vectors)


class Transformer(nn.Module):
    """The document's network; L layers on each side."""

    def __init__(self, L: int, num_heads: int, embed_dim: int, hidden_dim: int, out_dim: int):
        super().__init__()
        sizes = (num_heads, embed_dim, hidden_dim)
        self.EncLayers = nn.ModuleList(EncLayer(*sizes) for _ in range(L))
        self.DecLayers = nn.ModuleList(DecLayer(*sizes) for _ in range(L))
        self.W = nn.Parameter(nn.init.xavier_uniform_(torch.empty(embed_dim, out_dim), gain=math.sqrt(2)))

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        batch_level: Sequence[int] | None = None,
        weights_list: list[Tensor] | None = None,
    ) -> Tensor:
        """Logits [..., T, V] from embedded sources [..., S, D] and targets [..., T, D].

        Weights [..., H, Q, M] are appended to `weights_list`: every encoder layer's, then each decoder
        layer's causal ones and those of its attention to the encoder. ValueError: x and y have not as many
        axes before their last two as `batch_level` says.
        """
        axes = [x.dim() - 2, y.dim() - 2]
        if batch_level is not None and list(batch_level) != axes:
            raise ValueError(f"batch_level is {list(batch_level)} where x and y have {axes} batch axes")
        h = with_positions(x)
        for layer in self.EncLayers:
            h = layer(h, weights_list)
        k = with_positions(y)
        for layer in self.DecLayers:
            k = layer(k, h, weights_list)
        return k @ self.W

    def get_parameters(self):
        """In the order of the declaration."""
        return self.EncLayers, self.DecLayers, self.W
