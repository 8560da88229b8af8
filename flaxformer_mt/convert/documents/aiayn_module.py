"""PyTorch class of document 003, with that system's computation and parameter names.

The parity check of the format `aiayn` loads exported weights into this class.
"""

import numpy as np
import torch
from torch import Tensor, nn

_EPSILON = 1e-6
_MASKED_SCORE = -1e9
# Dropout rate of attention weights, independent of the argument `dropout`.
_WEIGHT_DROPOUT = 0.1


class AiaynTransformer(nn.Module):
    """Encoder, decoder and projection; a norm precedes the first layer of each stack and none ends a stack.

    trg_emb_prj_weight_sharing: ties the projection to the target embedding. emb_src_trg_weight_sharing: ties
    the source embedding to the target embedding. scale_emb_or_prj: emb (embeddings are multiplied by the
    square root of d_model), prj (logits are divided by it) or none; without effect unless the projection is
    tied.
    """

    def __init__(
        self,
        n_src_vocab: int,
        n_trg_vocab: int,
        src_pad_idx: int,
        trg_pad_idx: int,
        d_word_vec: int = 512,
        d_model: int = 512,
        d_inner: int = 2048,
        n_layers: int = 6,
        n_head: int = 8,
        d_k: int = 64,
        d_v: int = 64,
        dropout: float = 0.1,
        n_position: int = 200,
        trg_emb_prj_weight_sharing: bool = True,
        emb_src_trg_weight_sharing: bool = True,
        scale_emb_or_prj: str = "prj",
    ) -> None:
        super().__init__()
        assert scale_emb_or_prj in ("emb", "prj", "none"), scale_emb_or_prj
        assert d_word_vec == d_model, (d_word_vec, d_model)
        scale = scale_emb_or_prj if trg_emb_prj_weight_sharing else "none"
        embedding_scale = d_model**0.5 if scale == "emb" else 1.0
        self.logit_scale = d_model**-0.5 if scale == "prj" else 1.0
        self.src_pad_idx, self.trg_pad_idx = src_pad_idx, trg_pad_idx
        sizes = (d_model, n_head, d_k, d_v, d_inner, dropout)
        self.encoder = _Encoder(n_src_vocab, src_pad_idx, n_position, embedding_scale, n_layers, sizes)
        self.decoder = _Decoder(n_trg_vocab, trg_pad_idx, n_position, embedding_scale, n_layers, sizes)
        self.trg_word_prj = nn.Linear(d_model, n_trg_vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        if trg_emb_prj_weight_sharing:
            self.trg_word_prj.weight = self.decoder.trg_word_emb.weight
        if emb_src_trg_weight_sharing:
            self.encoder.src_word_emb.weight = self.decoder.trg_word_emb.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logits [B * T, V] of ids [B, S] and [B, T]."""
        source_visible = (source != self.src_pad_idx)[:, None, None, :]
        length = target.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=target.device).tril()
        target_visible = (target != self.trg_pad_idx)[:, None, None, :] & causal
        memory = self.encoder(source, source_visible)
        x = self.decoder(target, memory, target_visible, source_visible)
        return (self.trg_word_prj(x) * self.logit_scale).flatten(0, 1)


class _Attention(nn.Module):
    def __init__(self, d_model: int, n_head: int, d_k: int, d_v: int, dropout: float) -> None:
        super().__init__()
        self.w_qs = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_ks = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_vs = nn.Linear(d_model, n_head * d_v, bias=False)
        self.fc = nn.Linear(n_head * d_v, d_model, bias=False)
        self.layer_norm = nn.LayerNorm(d_model, eps=_EPSILON)
        self.weight_dropout, self.dropout = nn.Dropout(_WEIGHT_DROPOUT), nn.Dropout(dropout)
        self.n_head = n_head

    def forward(self, x: Tensor, memory: Tensor, visible: Tensor) -> Tensor:
        query, key, value = (
            layer(y).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for layer, y in ((self.w_qs, x), (self.w_ks, memory), (self.w_vs, memory))
        )
        scores = query / query.shape[-1] ** 0.5 @ key.mT
        weights = self.weight_dropout(scores.masked_fill(~visible, _MASKED_SCORE).softmax(-1))
        mixed = (weights @ value).transpose(1, 2).flatten(2)
        return self.layer_norm(self.dropout(self.fc(mixed)) + x)


class _FeedForward(nn.Module):
    def __init__(self, d_model: int, d_inner: int, dropout: float) -> None:
        super().__init__()
        self.w_1 = nn.Linear(d_model, d_inner)
        self.w_2 = nn.Linear(d_inner, d_model)
        self.layer_norm = nn.LayerNorm(d_model, eps=_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer_norm(self.dropout(self.w_2(self.w_1(x).relu())) + x)


class _EncoderLayer(nn.Module):
    def __init__(self, d_model: int, n_head: int, d_k: int, d_v: int, d_inner: int, dropout: float) -> None:
        super().__init__()
        self.slf_attn = _Attention(d_model, n_head, d_k, d_v, dropout)
        self.pos_ffn = _FeedForward(d_model, d_inner, dropout)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        return self.pos_ffn(self.slf_attn(x, x, visible))


class _DecoderLayer(nn.Module):
    def __init__(self, d_model: int, n_head: int, d_k: int, d_v: int, d_inner: int, dropout: float) -> None:
        super().__init__()
        self.slf_attn = _Attention(d_model, n_head, d_k, d_v, dropout)
        self.enc_attn = _Attention(d_model, n_head, d_k, d_v, dropout)
        self.pos_ffn = _FeedForward(d_model, d_inner, dropout)

    def forward(self, x: Tensor, memory: Tensor, visible: Tensor, memory_visible: Tensor) -> Tensor:
        x = self.slf_attn(x, x, visible)
        return self.pos_ffn(self.enc_attn(x, memory, memory_visible))


class _Positions(nn.Module):
    pos_table: Tensor

    def __init__(self, d_model: int, n_position: int) -> None:
        super().__init__()
        column = np.arange(d_model)
        angles = np.arange(n_position)[:, None] / 10000.0 ** (2 * (column // 2) / d_model)
        table = np.where(column % 2, np.cos(angles), np.sin(angles)).astype(np.float32)
        self.register_buffer("pos_table", torch.from_numpy(table)[None])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pos_table[:, : x.shape[1]]


class _Encoder(nn.Module):
    def __init__(
        self, vocabulary: int, pad: int, n_position: int, scale: float, n_layers: int, sizes: tuple
    ) -> None:
        super().__init__()
        width, dropout = sizes[0], sizes[-1]
        self.src_word_emb = nn.Embedding(vocabulary, width, padding_idx=pad)
        self.position_enc = _Positions(width, n_position)
        self.layer_stack = nn.ModuleList([_EncoderLayer(*sizes) for _ in range(n_layers)])
        self.layer_norm = nn.LayerNorm(width, eps=_EPSILON)
        self.dropout = nn.Dropout(dropout)
        self.scale = scale

    def forward(self, source: Tensor, visible: Tensor) -> Tensor:
        x = self.position_enc(self.src_word_emb(source) * self.scale)
        x = self.layer_norm(self.dropout(x))
        for layer in self.layer_stack:
            x = layer(x, visible)
        return x


class _Decoder(nn.Module):
    def __init__(
        self, vocabulary: int, pad: int, n_position: int, scale: float, n_layers: int, sizes: tuple
    ) -> None:
        super().__init__()
        width, dropout = sizes[0], sizes[-1]
        self.trg_word_emb = nn.Embedding(vocabulary, width, padding_idx=pad)
        self.position_enc = _Positions(width, n_position)
        self.layer_stack = nn.ModuleList([_DecoderLayer(*sizes) for _ in range(n_layers)])
        self.layer_norm = nn.LayerNorm(width, eps=_EPSILON)
        self.dropout = nn.Dropout(dropout)
        self.scale = scale

    def forward(self, target: Tensor, memory: Tensor, visible: Tensor, memory_visible: Tensor) -> Tensor:
        x = self.position_enc(self.trg_word_emb(target) * self.scale)
        x = self.layer_norm(self.dropout(x))
        for layer in self.layer_stack:
            x = layer(x, memory, visible, memory_visible)
        return x
