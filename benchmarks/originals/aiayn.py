"""Document 003, attention-is-all-you-need-pytorch, in plain PyTorch.

Owns the document's names in the state dict, its masks (True: visible), what it ties and when it scales. There
is a norm before the first layer and none after the last. Knows nothing of JAX or of the package that the
tests compare with it.
"""

import torch
from torch import Tensor, nn

from benchmarks.originals.sinusoids import sinusoid_table

EPSILON = 1e-6
# The document's layers hand `dropout` on to all but the attention weights.
WEIGHT_DROPOUT = 0.1


def get_pad_mask(ids: Tensor, pad_id: int) -> Tensor:
    """True where there is a token: [B, 1, T] from ids [B, T]."""
    return (ids != pad_id)[:, None, :]


def get_subsequent_mask(ids: Tensor) -> Tensor:
    """True where the key is not after the query: [1, T, T]."""
    length = ids.shape[1]
    return torch.ones(1, length, length, dtype=torch.bool, device=ids.device).tril()


class MultiHeadAttention(nn.Module):
    """Attention without biases, its residual, the query, and its norm."""

    def __init__(self, n_head: int, d_model: int, d_k: int, d_v: int, dropout: float):
        super().__init__()
        self.n_head, self.d_k, self.d_v = n_head, d_k, d_v
        self.w_qs = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_ks = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_vs = nn.Linear(d_model, n_head * d_v, bias=False)
        self.fc = nn.Linear(n_head * d_v, d_model, bias=False)
        self.weight_dropout = nn.Dropout(WEIGHT_DROPOUT)
        self.dropout = nn.Dropout(dropout)
        self.layer_norm = nn.LayerNorm(d_model, eps=EPSILON)

    def forward(self, query: Tensor, memory: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output [B, Q, D] and weights [B, H, Q, M], dropout and all; the mask is [B, Q or 1, M]."""
        q = self.w_qs(query).unflatten(-1, (self.n_head, self.d_k)).transpose(1, 2)  # [B, H, Q, K]
        k = self.w_ks(memory).unflatten(-1, (self.n_head, self.d_k)).transpose(1, 2)  # [B, H, M, K]
        v = self.w_vs(memory).unflatten(-1, (self.n_head, self.d_v)).transpose(1, 2)  # [B, H, M, E]
        scores = q / self.d_k**0.5 @ k.transpose(2, 3)
        if visible is not None:
            # Replaced and finite: a query that sees no key attends to all of them alike.
            scores = scores.masked_fill(~visible[:, None], -1e9)
        weights = self.weight_dropout(scores.softmax(dim=-1))
        mixed = (weights @ v).transpose(1, 2).flatten(2)  # [B, Q, H * E]
        return self.layer_norm(self.dropout(self.fc(mixed)) + query), weights


class PositionwiseFeedForward(nn.Module):
    """Two maps with biases, their residual and their norm."""

    def __init__(self, d_model: int, d_inner: int, dropout: float):
        super().__init__()
        self.w_1 = nn.Linear(d_model, d_inner)
        self.w_2 = nn.Linear(d_inner, d_model)
        self.layer_norm = nn.LayerNorm(d_model, eps=EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """From [B, T, D] to [B, T, D]."""
        return self.layer_norm(self.dropout(self.w_2(self.w_1(x).relu())) + x)


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward."""

    def __init__(self, d_model: int, d_inner: int, n_head: int, d_k: int, d_v: int, dropout: float):
        super().__init__()
        self.slf_attn = MultiHeadAttention(n_head, d_model, d_k, d_v, dropout)
        self.pos_ffn = PositionwiseFeedForward(d_model, d_inner, dropout)

    def forward(self, x: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Output [B, S, D] and weights."""
        x, weights = self.slf_attn(x, x, visible)
        return self.pos_ffn(x), weights


class DecoderLayer(nn.Module):
    """Self-attention, attention to the encoder, then feed-forward."""

    def __init__(self, d_model: int, d_inner: int, n_head: int, d_k: int, d_v: int, dropout: float):
        super().__init__()
        self.slf_attn = MultiHeadAttention(n_head, d_model, d_k, d_v, dropout)
        self.enc_attn = MultiHeadAttention(n_head, d_model, d_k, d_v, dropout)
        self.pos_ffn = PositionwiseFeedForward(d_model, d_inner, dropout)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        self_visible: Tensor | None = None,
        cross_visible: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output [B, T, D] and the weights of both attentions."""
        x, self_weights = self.slf_attn(x, x, self_visible)
        x, cross_weights = self.enc_attn(x, memory, cross_visible)
        return self.pos_ffn(x), self_weights, cross_weights


class PositionalEncoding(nn.Module):
    """Adds the rows of a table, a buffer, from position 0 on."""

    def __init__(self, width: int, n_position: int):
        super().__init__()
        self.register_buffer("pos_table", sinusoid_table(n_position, width).float()[None])

    def forward(self, x: Tensor) -> Tensor:
        """From [B, T, D] to [B, T, D]. RuntimeError: T is more than the table's rows."""
        return x + self.pos_table[:, : x.shape[1]]


class Encoder(nn.Module):
    """Source ids to memory; embeddings, positions and dropout are normalized before the first layer."""

    def __init__(self, vocab: int, pad_id: int, n_position: int, scale_emb: bool, n_layers: int, **sizes):
        super().__init__()
        self.d_model, self.scale_emb = sizes["d_model"], scale_emb
        self.src_word_emb = nn.Embedding(vocab, self.d_model, padding_idx=pad_id)
        self.position_enc = PositionalEncoding(self.d_model, n_position)
        self.dropout = nn.Dropout(sizes["dropout"])
        self.layer_stack = nn.ModuleList(EncoderLayer(**sizes) for _ in range(n_layers))
        self.layer_norm = nn.LayerNorm(self.d_model, eps=EPSILON)

    def forward(self, source: Tensor, visible: Tensor, return_attns: bool = False) -> tuple:
        """(memory [B, S, D],), and with `return_attns` each layer's weights [B, H, S, S] in a list."""
        x = self.src_word_emb(source)
        if self.scale_emb:
            x = x * self.d_model**0.5
        x = self.layer_norm(self.dropout(self.position_enc(x)))
        all_weights = []
        for layer in self.layer_stack:
            x, weights = layer(x, visible)
            all_weights.append(weights)
        return (x, all_weights) if return_attns else (x,)


class Decoder(nn.Module):
    """Target ids and memory to the vectors that the projection reads; it begins as the encoder does."""

    def __init__(self, vocab: int, pad_id: int, n_position: int, scale_emb: bool, n_layers: int, **sizes):
        super().__init__()
        self.d_model, self.scale_emb = sizes["d_model"], scale_emb
        self.trg_word_emb = nn.Embedding(vocab, self.d_model, padding_idx=pad_id)
        self.position_enc = PositionalEncoding(self.d_model, n_position)
        self.dropout = nn.Dropout(sizes["dropout"])
        self.layer_stack = nn.ModuleList(DecoderLayer(**sizes) for _ in range(n_layers))
        self.layer_norm = nn.LayerNorm(self.d_model, eps=EPSILON)

    def forward(
        self,
        target: Tensor,
        target_visible: Tensor,
        memory: Tensor,
        source_visible: Tensor,
        return_attns: bool = False,
    ) -> tuple:
        """(vectors [B, T, D],), and with `return_attns` lists of weights [B, H, T, T] and [B, H, T, S]."""
        x = self.trg_word_emb(target)
        if self.scale_emb:
            x = x * self.d_model**0.5
        x = self.layer_norm(self.dropout(self.position_enc(x)))
        all_self, all_cross = [], []
        for layer in self.layer_stack:
            x, self_weights, cross_weights = layer(x, memory, target_visible, source_visible)
            all_self.append(self_weights)
            all_cross.append(cross_weights)
        return (x, all_self, all_cross) if return_attns else (x,)


class Transformer(nn.Module):
    """The document's network.

    `scale_emb_or_prj` is emb (embeddings times the root of d_model), prj (logits over it) or none, and counts
    only with `trg_emb_prj_weight_sharing`. Tied matrices keep their names in the state dict, the target
    embedding's values and, where vocabularies differ, its shape.
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
    ):
        super().__init__()
        assert scale_emb_or_prj in ("emb", "prj", "none"), scale_emb_or_prj
        assert d_model == d_word_vec, (d_model, d_word_vec)
        self.src_pad_idx, self.trg_pad_idx, self.d_model = src_pad_idx, trg_pad_idx, d_model
        self.scale_prj = trg_emb_prj_weight_sharing and scale_emb_or_prj == "prj"
        sizes = dict(d_model=d_model, d_inner=d_inner, n_head=n_head, d_k=d_k, d_v=d_v, dropout=dropout)
        stack = dict(n_position=n_position, n_layers=n_layers, **sizes)
        stack["scale_emb"] = trg_emb_prj_weight_sharing and scale_emb_or_prj == "emb"
        self.encoder = Encoder(n_src_vocab, src_pad_idx, **stack)
        self.decoder = Decoder(n_trg_vocab, trg_pad_idx, **stack)
        self.trg_word_prj = nn.Linear(d_model, n_trg_vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:  # embeddings too, and their rows of padding
                nn.init.xavier_uniform_(parameter)
        if trg_emb_prj_weight_sharing:
            self.trg_word_prj.weight = self.decoder.trg_word_emb.weight
        if emb_src_trg_weight_sharing:
            self.encoder.src_word_emb.weight = self.decoder.trg_word_emb.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits [B * T, V] from ids [B, S] and [B, T]."""
        source_visible = get_pad_mask(source, self.src_pad_idx)
        target_visible = get_pad_mask(target, self.trg_pad_idx) & get_subsequent_mask(target)
        (memory,) = self.encoder(source, source_visible)
        (x,) = self.decoder(target, target_visible, memory, source_visible)
        logits = self.trg_word_prj(x)
        if self.scale_prj:
            logits = logits * self.d_model**-0.5
        return logits.flatten(0, 1)
