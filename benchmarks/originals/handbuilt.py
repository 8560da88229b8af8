"""Document 000, an encoder and a decoder built by hand, in plain PyTorch.

Owns the document's names in the state dict, its masks (True: blocked) and its positions, which start at 1.
Pads are id 0. Residual and norm are inside attention and feed-forward; there is no dropout and no scaling of
embeddings. Knows nothing of JAX or of the package that the tests compare with it.
"""

import torch
from torch import Tensor, nn

from benchmarks.originals.sinusoids import sinusoid_table

PAD = 0


def pad_mask(queries: Tensor, keys: Tensor) -> Tensor:
    """True where the key is padding, for ids [B, Q] and [B, M]: [B, Q, M]. Queries may be padding."""
    return (keys == PAD)[:, None, :].expand(-1, queries.shape[1], -1)


def subsequent_mask(ids: Tensor) -> Tensor:
    """1 where the key comes after the query, as bytes [B, T, T]."""
    batch, length = ids.shape
    return torch.triu(torch.ones(batch, length, length, device=ids.device), diagonal=1).byte()


class MultiHeadAttention(nn.Module):
    """Attention with its residual, the query, and its norm."""

    def __init__(self, width: int, heads: int, d_k: int, d_v: int):
        super().__init__()
        self.heads, self.d_k, self.d_v = heads, d_k, d_v
        self.W_Q = nn.Linear(width, heads * d_k)
        self.W_K = nn.Linear(width, heads * d_k)
        self.W_V = nn.Linear(width, heads * d_v)
        self.linear = nn.Linear(heads * d_v, width)
        self.layer_norm = nn.LayerNorm(width)

    def forward(self, query: Tensor, memory: Tensor, blocked: Tensor) -> tuple[Tensor, Tensor]:
        """Output [B, Q, D] and weights [B, H, Q, M] from [B, Q, D], [B, M, D] and a mask [B, Q, M]."""
        q = self.W_Q(query).unflatten(-1, (self.heads, self.d_k)).transpose(1, 2)  # [B, H, Q, K]
        k = self.W_K(memory).unflatten(-1, (self.heads, self.d_k)).transpose(1, 2)  # [B, H, M, K]
        v = self.W_V(memory).unflatten(-1, (self.heads, self.d_v)).transpose(1, 2)  # [B, H, M, E]
        scores = q @ k.transpose(-1, -2) / self.d_k**0.5
        # Replaced and finite: a query whose keys are all blocked attends to all of them alike.
        weights = scores.masked_fill(blocked[:, None], -1e9).softmax(dim=-1)
        context = (weights @ v).transpose(1, 2).flatten(2)  # [B, Q, H * E]
        return self.layer_norm(self.linear(context) + query), weights


class ConvFeedForward(nn.Module):
    """The two maps as convolutions of width one."""

    def __init__(self, width: int, d_ff: int):
        super().__init__()
        self.conv1 = nn.Conv1d(width, d_ff, kernel_size=1)
        self.conv2 = nn.Conv1d(d_ff, width, kernel_size=1)
        self.layer_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """From [B, T, D] to [B, T, D]."""
        mapped = self.conv2(self.conv1(x.transpose(1, 2)).relu()).transpose(1, 2)
        return self.layer_norm(mapped + x)


class DenseFeedForward(nn.Module):
    """The same two maps as matrices."""

    def __init__(self, width: int, d_ff: int):
        super().__init__()
        self.fc1 = nn.Linear(width, d_ff)
        self.fc2 = nn.Linear(d_ff, width)
        self.layer_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """From [B, T, D] to [B, T, D]."""
        return self.layer_norm(self.fc2(self.fc1(x).relu()) + x)


FEED_FORWARD = {"conv": ConvFeedForward, "fc": DenseFeedForward}


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward."""

    def __init__(self, width: int, heads: int, d_k: int, d_v: int, d_ff: int, ffn: str):
        super().__init__()
        self.enc_self_attn = MultiHeadAttention(width, heads, d_k, d_v)
        self.pos_ffn = FEED_FORWARD[ffn](width, d_ff)

    def forward(self, x: Tensor, blocked: Tensor) -> tuple[Tensor, Tensor]:
        """Output [B, S, D] and weights."""
        x, weights = self.enc_self_attn(x, x, blocked)
        return self.pos_ffn(x), weights


class DecoderLayer(nn.Module):
    """Self-attention, attention to the encoder, then feed-forward."""

    def __init__(self, width: int, heads: int, d_k: int, d_v: int, d_ff: int, ffn: str):
        super().__init__()
        self.dec_self_attn = MultiHeadAttention(width, heads, d_k, d_v)
        self.dec_enc_attn = MultiHeadAttention(width, heads, d_k, d_v)
        self.pos_ffn = FEED_FORWARD[ffn](width, d_ff)

    def forward(
        self, x: Tensor, memory: Tensor, self_blocked: Tensor, cross_blocked: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output [B, T, D] and the weights of both attentions."""
        x, self_weights = self.dec_self_attn(x, x, self_blocked)
        x, cross_weights = self.dec_enc_attn(x, memory, cross_blocked)
        return self.pos_ffn(x), self_weights, cross_weights


def frozen_positions(length: int, width: int) -> nn.Embedding:
    """Rows 0 to `length`: a parameter that training leaves alone, whose row 0 is never read."""
    return nn.Embedding.from_pretrained(sinusoid_table(length + 1, width).float(), freeze=True)


def positions_of(ids: Tensor) -> Tensor:
    """1 to T, padding counted, as [1, T]; nn.Embedding raises an IndexError where the table ends before."""
    return torch.arange(1, ids.shape[1] + 1, device=ids.device)[None]


class Encoder(nn.Module):
    """Source ids to memory."""

    def __init__(self, vocab: int, length: int, layers: int, width: int, *sizes):
        super().__init__()
        self.src_emb = nn.Embedding(vocab, width)
        self.pos_emb = frozen_positions(length, width)
        self.layers = nn.ModuleList(EncoderLayer(width, *sizes) for _ in range(layers))

    def forward(self, source: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Memory [B, S, D] from ids [B, S], and each layer's weights [B, H, S, S]."""
        x = self.src_emb(source) + self.pos_emb(positions_of(source))
        blocked = pad_mask(source, source)
        all_weights = []
        for layer in self.layers:
            x, weights = layer(x, blocked)
            all_weights.append(weights)
        return x, all_weights


class Decoder(nn.Module):
    """Target ids and memory to the vectors that the projection reads."""

    def __init__(self, vocab: int, length: int, layers: int, width: int, *sizes):
        super().__init__()
        self.tgt_emb = nn.Embedding(vocab, width)
        self.pos_emb = frozen_positions(length, width)
        self.layers = nn.ModuleList(DecoderLayer(width, *sizes) for _ in range(layers))

    def forward(
        self, target: Tensor, source: Tensor, memory: Tensor
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Vectors [B, T, D] and each layer's weights [B, H, T, T] and [B, H, T, S]."""
        x = self.tgt_emb(target) + self.pos_emb(positions_of(target))
        self_blocked = (pad_mask(target, target) + subsequent_mask(target)) > 0
        cross_blocked = pad_mask(target, source)
        all_self, all_cross = [], []
        for layer in self.layers:
            x, self_weights, cross_weights = layer(x, memory, self_blocked, cross_blocked)
            all_self.append(self_weights)
            all_cross.append(cross_weights)
        return x, all_self, all_cross


class Transformer(nn.Module):
    """The document's network; what it took from globals and a corpus are arguments here."""

    def __init__(
        self,
        src_vocab: int,
        tgt_vocab: int,
        src_len: int,
        tgt_len: int,
        d_embedding: int,
        n_heads: int,
        d_k: int,
        d_v: int,
        d_ff: int,
        encoder_n_layers: int,
        decoder_n_layers: int,
        ffn: str = "conv",
    ):
        super().__init__()
        sizes = (d_embedding, n_heads, d_k, d_v, d_ff, ffn)
        self.encoder = Encoder(src_vocab, src_len, encoder_n_layers, *sizes)
        self.decoder = Decoder(tgt_vocab, tgt_len, decoder_n_layers, *sizes)
        self.projection = nn.Linear(d_embedding, tgt_vocab, bias=False)

    def forward(
        self, source: Tensor, target: Tensor
    ) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
        """Logits [B, T, V] from ids [B, S] and [B, T]; weights of encoder, decoder and cross-attention."""
        memory, encoder_weights = self.encoder(source)
        x, decoder_weights, cross_weights = self.decoder(target, source, memory)
        return self.projection(x), encoder_weights, decoder_weights, cross_weights
