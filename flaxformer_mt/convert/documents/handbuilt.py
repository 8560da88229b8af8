"""Format handbuilt: the PyTorch class of document 000, with that system's computation and names."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flaxformer_mt.config import Config
from flaxformer_mt.convert.formats import unsupported_fields
from flaxformer_mt.convert.name_table import (
    CONVOLUTION_BOTH,
    RESIDUAL_NORM,
    SAME,
    TABLE_TOLERANCE,
    TRANSPOSED,
    Constant,
    Rule,
    Shapes,
    attention_rules,
    feedforward_rules,
    rules_for,
)
from flaxformer_mt.convert.torch.state_dicts import POST_NORM, StateDictFormat, tensor_of
from flaxformer_mt.model.positions import sinusoidal_table
from flaxformer_mt.vocab import Vocabs

_MASKED_SCORE = -1e9


class HandbuiltTransformer(nn.Module):
    """Encoder, decoder and projection; positions start at 1, in frozen tables of `*_len` + 1 rows."""

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
        src_pad: int = 0,
        tgt_pad: int = 0,
    ) -> None:
        super().__init__()
        sizes = (d_embedding, n_heads, d_k, d_v, d_ff, ffn)
        self.encoder = _Encoder(src_vocab, src_len, encoder_n_layers, sizes)
        self.decoder = _Decoder(tgt_vocab, tgt_len, decoder_n_layers, sizes)
        self.projection = nn.Linear(d_embedding, tgt_vocab, bias=False)
        self.src_pad, self.tgt_pad = src_pad, tgt_pad

    def forward(
        self, source: Tensor, target: Tensor
    ) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
        """Return logits [B, T, V], and lists of attention weights by layer: encoder, decoder, cross."""
        source_blocked = (source == self.src_pad)[:, None, None, :]
        length = target.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        target_blocked = (target == self.tgt_pad)[:, None, None, :] | future
        memory, encoder_weights = self.encoder(source, source_blocked)
        x, self_weights, cross_weights = self.decoder(target, memory, target_blocked, source_blocked)
        return self.projection(x), encoder_weights, self_weights, cross_weights


def _frozen_table(length: int, width: int) -> nn.Embedding:
    exponents = 2 * (np.arange(width) // 2) / width
    angles = np.arange(length + 1)[:, None] / np.power(10000.0, exponents)[None]
    angles[:, 0::2], angles[:, 1::2] = np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])
    return nn.Embedding.from_pretrained(torch.tensor(angles, dtype=torch.float32), freeze=True)


class _Attention(nn.Module):
    def __init__(self, d_embedding: int, n_heads: int, d_k: int, d_v: int) -> None:
        super().__init__()
        self.W_Q = nn.Linear(d_embedding, n_heads * d_k)
        self.W_K = nn.Linear(d_embedding, n_heads * d_k)
        self.W_V = nn.Linear(d_embedding, n_heads * d_v)
        self.linear = nn.Linear(n_heads * d_v, d_embedding)
        self.layer_norm = nn.LayerNorm(d_embedding)
        self.n_heads = n_heads

    def forward(self, x: Tensor, memory: Tensor, blocked: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value = (
            layer(y).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for layer, y in ((self.W_Q, x), (self.W_K, memory), (self.W_V, memory))
        )
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        weights = scores.masked_fill(blocked, _MASKED_SCORE).softmax(-1)
        mixed = (weights @ value).transpose(1, 2).flatten(2)
        return self.layer_norm(self.linear(mixed) + x), weights


class _FeedForward(nn.Module):
    def __init__(self, d_embedding: int, d_ff: int, ffn: str) -> None:
        super().__init__()
        self.is_convolution = ffn == "conv"
        if self.is_convolution:
            self.conv1 = nn.Conv1d(d_embedding, d_ff, 1)
            self.conv2 = nn.Conv1d(d_ff, d_embedding, 1)
        else:
            self.fc1 = nn.Linear(d_embedding, d_ff)
            self.fc2 = nn.Linear(d_ff, d_embedding)
        self.layer_norm = nn.LayerNorm(d_embedding)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_convolution:
            y = self.conv2(self.conv1(x.transpose(1, 2)).relu()).transpose(1, 2)
        else:
            y = self.fc2(self.fc1(x).relu())
        return self.layer_norm(y + x)


class _EncoderLayer(nn.Module):
    def __init__(self, d_embedding: int, n_heads: int, d_k: int, d_v: int, d_ff: int, ffn: str) -> None:
        super().__init__()
        self.enc_self_attn = _Attention(d_embedding, n_heads, d_k, d_v)
        self.pos_ffn = _FeedForward(d_embedding, d_ff, ffn)


class _DecoderLayer(nn.Module):
    def __init__(self, d_embedding: int, n_heads: int, d_k: int, d_v: int, d_ff: int, ffn: str) -> None:
        super().__init__()
        self.dec_self_attn = _Attention(d_embedding, n_heads, d_k, d_v)
        self.dec_enc_attn = _Attention(d_embedding, n_heads, d_k, d_v)
        self.pos_ffn = _FeedForward(d_embedding, d_ff, ffn)


class _Encoder(nn.Module):
    def __init__(self, vocabulary: int, length: int, n_layers: int, sizes: tuple) -> None:
        super().__init__()
        self.src_emb = nn.Embedding(vocabulary, sizes[0])
        self.pos_emb = _frozen_table(length, sizes[0])
        self.layers = nn.ModuleList([_EncoderLayer(*sizes) for _ in range(n_layers)])

    def forward(self, source: Tensor, blocked: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, all_weights = _embed(self.src_emb, self.pos_emb, source), []
        for layer in self.layers:
            x, weights = layer.enc_self_attn(x, x, blocked)
            x = layer.pos_ffn(x)
            all_weights.append(weights)
        return x, all_weights


class _Decoder(nn.Module):
    def __init__(self, vocabulary: int, length: int, n_layers: int, sizes: tuple) -> None:
        super().__init__()
        self.tgt_emb = nn.Embedding(vocabulary, sizes[0])
        self.pos_emb = _frozen_table(length, sizes[0])
        self.layers = nn.ModuleList([_DecoderLayer(*sizes) for _ in range(n_layers)])

    def forward(
        self, target: Tensor, memory: Tensor, blocked: Tensor, memory_blocked: Tensor
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        x, self_attention, cross_attention = _embed(self.tgt_emb, self.pos_emb, target), [], []
        for layer in self.layers:
            x, self_weights = layer.dec_self_attn(x, x, blocked)
            x, cross_weights = layer.dec_enc_attn(x, memory, memory_blocked)
            x = layer.pos_ffn(x)
            self_attention.append(self_weights)
            cross_attention.append(cross_weights)
        return x, self_attention, cross_attention


def _embed(embedding: nn.Embedding, position_table: nn.Embedding, ids: Tensor) -> Tensor:
    positions = torch.arange(1, ids.shape[1] + 1, device=ids.device)
    return embedding(ids) + position_table(positions)


_ALLOWED = POST_NORM | {
    "model.norm_epsilon": (1e-5,),
    "model.embedding_norm": (False,),
    "model.first_position": (1,),
    "model.embedding_scale": (False,),
    "model.logit_scale": (False,),
    "model.tying": ("none",),
    "model.padding_mask": ("both", "source"),
    "model.attention_bias": (True,),
}
_ATTENTION = [*attention_rules(("W_Q", "W_K", "W_V"), "linear"), *RESIDUAL_NORM]


def _rules(config: Config, shapes: Shapes) -> list[Rule | Constant]:
    kind, layout = ("conv", CONVOLUTION_BOTH) if _is_convolution(config) else ("fc", TRANSPOSED)
    names = {"input": f"{kind}1", "output": f"{kind}2"}
    feedforward = feedforward_rules(names, layout) + RESIDUAL_NORM
    encoder, decoder = "encoder/layers_{n}/", "decoder/layers_{n}/"
    attentions = [
        (encoder + "self_attention", "encoder.layers.{n}.enc_self_attn"),
        (decoder + "self_attention", "decoder.layers.{n}.dec_self_attn"),
        (decoder + "cross_attention", "decoder.layers.{n}.dec_enc_attn"),
    ]
    feedforwards = [
        (encoder + "feedforward", "encoder.layers.{n}.pos_ffn"),
        (decoder + "feedforward", "decoder.layers.{n}.pos_ffn"),
    ]
    width, data = config.model.model_dim, config.data
    return [
        Rule("source_embedding/embedding", "encoder.src_emb.weight", SAME),
        Rule("target_embedding/embedding", "decoder.tgt_emb.weight", SAME),
        _table("encoder.pos_emb.weight", data.max_source_length, width),
        _table("decoder.pos_emb.weight", data.max_target_length, width),
        *rules_for(attentions, _ATTENTION),
        *rules_for(feedforwards, feedforward),
        Rule("output_kernel", "projection.weight", TRANSPOSED),
    ]


def _table(name: str, length: int, width: int) -> Constant:
    return Constant(name, sinusoidal_table(length + 1, width), tolerance=TABLE_TOLERANCE)


def _is_convolution(config: Config) -> bool:
    return config.model.ffn_layer == "convolution"


def _arguments(config: Config, vocabs: Vocabs) -> dict[str, Any]:
    model, data = config.model, config.data
    size = model.model_dim // model.num_heads
    return {
        "src_vocab": vocabs.source.size,
        "tgt_vocab": vocabs.target.size,
        "src_len": data.max_source_length,
        "tgt_len": data.max_target_length,
        "d_embedding": model.model_dim,
        "n_heads": model.num_heads,
        "d_k": model.key_dim or size,
        "d_v": model.value_dim or size,
        "d_ff": model.ffn_dim,
        "encoder_n_layers": model.num_encoder_layers,
        "decoder_n_layers": model.num_decoder_layers,
        "ffn": "conv" if _is_convolution(config) else "fc",
        "src_pad": vocabs.source.pad_id,
        "tgt_pad": vocabs.target.pad_id,
    }


STATE_DICT = StateDictFormat(
    name="handbuilt",
    problems=lambda config: unsupported_fields(config, _ALLOWED),
    rules=_rules,
    arguments=_arguments,
    make_module=HandbuiltTransformer,
    run=lambda module, batch, tensors: module(tensor_of(batch.source), tensor_of(batch.target_in))[0],
)
FORMAT = STATE_DICT.make_format()
