"""PyTorch twins of the Transformers of other toolkits, with the names that these give to their arrays.

Written from the sources of fairseq (models/transformer, modules), OpenNMT-py and eole (encoders, decoders,
modules), Joey NMT (transformer_layers.py) and Marian (models/transformer.h, rnn/cells.h).
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, heads: int) -> Tensor:
    """Multi-head attention of projected queries [B, Q, D]; mask [B, 1 or Q, M] is True where attended."""

    def split(x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], heads, -1).transpose(1, 2)

    q, k, v = map(split, (query, key, value))
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def causal(length: int) -> Tensor:
    return torch.ones(1, length, length, dtype=torch.bool).tril()


def half_sinusoids(rows: int, width: int) -> Tensor:
    """Sines, then cosines, as tensor2tensor, fairseq and Marian compute them."""
    half = width // 2
    rates = torch.exp(torch.arange(half, dtype=torch.float64) * -(math.log(10000) / (half - 1)))
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * rates[None]
    return torch.cat([angles.sin(), angles.cos()], 1).float()


def interleaved_sinusoids(rows: int, width: int) -> Tensor:
    """Sines and cosines in turn, as OpenNMT-py and Joey NMT compute them."""
    table = torch.zeros(rows, width)
    rates = torch.exp(torch.arange(0, width, 2).float() * -(math.log(10000.0) / width))
    angles = torch.arange(rows).unsqueeze(1).float() * rates
    table[:, 0::2], table[:, 1::2] = angles.sin(), angles.cos()
    return table


def randomize(module: nn.Module, seed: int = 0) -> nn.Module:
    """Fill parameters with numbers that are not those they begin with; norms stay near the identity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, one in module.named_parameters():
            noise = torch.randn(one.shape, generator=generator)
            scale = 0.1 if one.ndim == 1 else one.shape[-1] ** -0.5
            one.copy_(noise * scale + (1.0 if one.ndim == 1 and "norm" in name and "weight" in name else 0.0))
    return module.eval()


class FairseqAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            setattr(self, name, nn.Linear(width, width))

    def forward(self, query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
        return self.out_proj(attend(self.q_proj(query), self.k_proj(key), self.v_proj(key), mask, self.heads))


class FairseqLayer(nn.Module):
    def __init__(self, args: Any, side: str):
        super().__init__()
        width, heads = args.encoder_embed_dim, args.encoder_attention_heads
        self.pre = args.encoder_normalize_before
        self.activation = args.activation_fn
        self.self_attn, self.self_attn_layer_norm = FairseqAttention(width, heads), nn.LayerNorm(width)
        self.cross = side == "decoder"
        if self.cross:
            self.encoder_attn = FairseqAttention(width, heads)
            self.encoder_attn_layer_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, args.encoder_ffn_embed_dim)
        self.fc2 = nn.Linear(args.encoder_ffn_embed_dim, width)
        self.final_layer_norm = nn.LayerNorm(width)

    def _activate(self, x: Tensor) -> Tensor:
        if self.activation == "gelu_accurate":
            a = math.sqrt(2 / math.pi)
            return 0.5 * x * (1 + torch.tanh(a * (x + 0.044715 * torch.pow(x, 3))))
        return {"relu": functional.relu, "gelu": functional.gelu}[self.activation](x)

    def forward(self, x: Tensor, mask: Tensor, memory: Any = None, memory_mask: Any = None) -> Tensor:
        def residual(x: Tensor, norm: nn.Module, sublayer: Any) -> Tensor:
            return x + sublayer(norm(x)) if self.pre else norm(x + sublayer(x))

        x = residual(x, self.self_attn_layer_norm, lambda y: self.self_attn(y, y, mask))
        if self.cross:
            attend_memory = lambda y: self.encoder_attn(y, memory, memory_mask)  # noqa: E731
            x = residual(x, self.encoder_attn_layer_norm, attend_memory)
        return residual(x, self.final_layer_norm, lambda y: self.fc2(self._activate(self.fc1(y))))


class FairseqStack(nn.Module):
    def __init__(self, args: Any, side: str, embed_tokens: nn.Embedding):
        super().__init__()
        width, rows = args.encoder_embed_dim, args.max_source_positions + 2
        self.register_buffer("version", torch.Tensor([3]))
        self.embed_tokens = embed_tokens
        self.scale = 1.0 if args.no_scale_embedding else math.sqrt(width)
        self.learned = args.encoder_learned_pos
        if self.learned:
            self.embed_positions = nn.Embedding(rows, width)
        else:
            self.embed_positions = nn.Module()
            self.embed_positions.register_buffer("_float_tensor", torch.zeros(1))
            self.table = half_sinusoids(rows, width)
            self.table[1] = 0
        if args.layernorm_embedding:
            self.layernorm_embedding = nn.LayerNorm(width)
        layers = args.encoder_layers if side == "encoder" else args.decoder_layers
        self.layers = nn.ModuleList(FairseqLayer(args, side) for _ in range(layers))
        if args.encoder_normalize_before:
            self.layer_norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor, mask: Tensor, *others: Tensor) -> Tensor:
        is_token = ids.ne(1).int()  # as fairseq's make_positions
        positions = torch.cumsum(is_token, 1) * is_token + 1
        table = self.embed_positions.weight if self.learned else self.table
        x = self.scale * self.embed_tokens(ids) + table[positions.long()]
        x = self.layernorm_embedding(x) if hasattr(self, "layernorm_embedding") else x
        for layer in self.layers:
            x = layer(x, mask, *others)
        return self.layer_norm(x) if hasattr(self, "layer_norm") else x


class Fairseq(nn.Module):
    def __init__(self, args: Any, source_size: int, target_size: int):
        super().__init__()
        width = args.encoder_embed_dim
        source = nn.Embedding(source_size, width)
        target = source if args.share_all_embeddings else nn.Embedding(target_size, width)
        self.encoder = FairseqStack(args, "encoder", source)
        self.decoder = FairseqStack(args, "decoder", target)
        self.decoder.output_projection = nn.Linear(width, target_size, bias=False)
        if args.share_decoder_input_output_embed:
            self.decoder.output_projection.weight = target.weight

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        source_mask = source.ne(1)[:, None]
        memory = self.encoder(source, source_mask)
        x = self.decoder(target_in, causal(target_in.shape[1]), memory, source_mask)
        return self.decoder.output_projection(x)


class OnmtAttention(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool):
        super().__init__()
        self.heads = heads
        for name in ("linear_keys", "linear_values", "linear_query", "final_linear"):
            setattr(self, name, nn.Linear(width, width, bias=bias))

    def forward(self, key: Tensor, query: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.linear_query(query), self.linear_keys(key), self.linear_values(key)
        return self.final_linear(attend(q, k, v, mask, self.heads))


class OnmtFeedForward(nn.Module):
    def __init__(self, opt: Any):
        super().__init__()
        width, inner, bias = opt.enc_hid_size, opt.transformer_ff, opt.add_ffnbias
        self.w_1, self.w_2 = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=bias)
        self.layer_norm = nn.LayerNorm(width, eps=opt.norm_eps)
        self.activation = {"relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu}[
            opt.pos_ffn_activation_fn
        ]
        if opt.pos_ffn_activation_fn == "silu":
            self.w_3 = nn.Linear(width, inner, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.layer_norm(x)
        inner = self.activation(self.w_1(normed))
        inner = inner * self.w_3(normed) if hasattr(self, "w_3") else inner
        return self.w_2(inner) + x


class OnmtEncoderLayer(nn.Module):
    def __init__(self, opt: Any):
        super().__init__()
        self.self_attn = OnmtAttention(opt.enc_hid_size, opt.heads, opt.add_qkvbias)
        self.feed_forward = OnmtFeedForward(opt)
        self.layer_norm = nn.LayerNorm(opt.enc_hid_size, eps=opt.norm_eps)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        normed = self.layer_norm(x)
        return self.feed_forward(self.self_attn(normed, normed, mask) + x)


class OnmtDecoderLayer(nn.Module):
    def __init__(self, opt: Any):
        super().__init__()
        width = opt.enc_hid_size
        self.self_attn = OnmtAttention(width, opt.heads, opt.add_qkvbias)
        self.feed_forward = OnmtFeedForward(opt)
        self.layer_norm_1 = nn.LayerNorm(width, eps=opt.norm_eps)
        self.context_attn = OnmtAttention(width, opt.heads, opt.add_qkvbias)
        self.layer_norm_2 = nn.LayerNorm(width, eps=opt.norm_eps)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        normed = self.layer_norm_1(x)
        query = self.self_attn(normed, normed, mask) + x
        context = self.context_attn(memory, self.layer_norm_2(query), memory_mask)
        return self.feed_forward(context + query)


class OnmtStack(nn.Module):
    def __init__(self, opt: Any, size: int, *, decoder: bool):
        super().__init__()
        width = opt.enc_hid_size
        self.embeddings = nn.Module()
        self.embeddings.make_embedding = nn.Module()
        self.embeddings.make_embedding.emb_luts = nn.ModuleList([nn.Embedding(size, width)])
        concat = opt.position_encoding_type == "SinusoidalConcat"
        table = half_sinusoids(5000, width) if concat else interleaved_sinusoids(5000, width)
        self.embeddings.make_embedding.pe = nn.Module()
        self.embeddings.make_embedding.pe.register_buffer("pe", table.unsqueeze(1))
        if decoder:
            self.transformer_layers = nn.ModuleList(OnmtDecoderLayer(opt) for _ in range(opt.dec_layers))
        else:
            self.transformer = nn.ModuleList(OnmtEncoderLayer(opt) for _ in range(opt.enc_layers))
        self.layer_norm = nn.LayerNorm(width, eps=opt.norm_eps)

    def forward(self, ids: Tensor, *others: Tensor) -> Tensor:
        parts = self.embeddings.make_embedding
        x = parts.emb_luts[0](ids)
        x = x * math.sqrt(x.shape[-1]) + parts.pe.pe[: ids.shape[1], 0]
        for layer in getattr(self, "transformer_layers", None) or self.transformer:
            x = layer(x, *others)
        return self.layer_norm(x)


class Onmt(nn.Module):
    """NMTModel of OpenNMT-py, with its generator. Sources have no end symbol."""

    def __init__(self, opt: Any, source_size: int, target_size: int):
        super().__init__()
        self.encoder = OnmtStack(opt, source_size, decoder=False)
        self.decoder = OnmtStack(opt, target_size, decoder=True)
        self.generator = nn.Linear(opt.enc_hid_size, target_size)
        own, other = (one.embeddings.make_embedding.emb_luts[0] for one in (self.decoder, self.encoder))
        if opt.share_embeddings:
            own.weight = other.weight
        if opt.share_decoder_embeddings:
            self.generator.weight = own.weight

    def forward(self, source: Tensor, lengths: Tensor, target_in: Tensor) -> Tensor:
        mask = (torch.arange(source.shape[1])[None] < lengths[:, None])[:, None]
        memory = self.encoder(source, mask)
        return self.generator(self.decoder(target_in, causal(target_in.shape[1]), memory, mask))


# OpenNMT-py's names of parts -> eole's; the two compute the same.
EOLE_NAMES = {
    ".embeddings.make_embedding.emb_luts.0.": ".embeddings.",
    ".embeddings.make_embedding.pe.": ".pe.",
    "encoder.transformer.": "encoder.transformer_layers.",
    ".feed_forward.layer_norm.": ".post_attention_layernorm.",
    ".feed_forward.w_1.": ".mlp.gate_up_proj.",
    ".feed_forward.w_2.": ".mlp.down_proj.",
    ".feed_forward.w_3.": ".mlp.up_proj.",
    ".layer_norm_1.": ".input_layernorm.",
    ".layer_norm_2.": ".precontext_layernorm.",
}


def as_eole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in state.items():
        for old, new in EOLE_NAMES.items():
            name = name.replace(old, new)
        if name.startswith("encoder.transformer_layers."):
            name = name.replace(".layer_norm.", ".input_layernorm.")
        for side, own in (("encoder", "src_emb"), ("decoder", "tgt_emb")):
            for part in (".embeddings.", ".pe."):
                name = name.replace(side + part, own + part)
        renamed[name] = tensor.contiguous()
    return renamed


class JoeyAttention(nn.Module):
    def __init__(self, heads: int, size: int):
        super().__init__()
        self.heads = heads
        for name in ("k_layer", "v_layer", "q_layer", "output_layer"):
            setattr(self, name, nn.Linear(size, size))

    def forward(self, keys: Tensor, query: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.q_layer(query), self.k_layer(keys), self.v_layer(keys)
        return self.output_layer(attend(q, k, v, mask, self.heads))


class JoeyFeedForward(nn.Module):
    def __init__(self, o: dict):
        super().__init__()
        size, inner = o["hidden_size"], o["ff_size"]
        activation = {"relu": nn.ReLU, "gelu": nn.GELU, "swish": nn.SiLU}[o["activation"]]
        self.layer_norm, self.pre = nn.LayerNorm(size, eps=1e-6), o["layer_norm"] == "pre"
        self.pwff_layer = nn.Sequential(
            nn.Linear(size, inner), activation(), nn.Dropout(0.1), nn.Linear(inner, size), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.pre:
            return self.pwff_layer(self.layer_norm(x)) + x
        return self.layer_norm(self.pwff_layer(x) + x)


class JoeyLayer(nn.Module):
    def __init__(self, o: dict, *, decoder: bool):
        super().__init__()
        size, self.pre, self.decoder = o["hidden_size"], o["layer_norm"] == "pre", decoder
        if decoder:
            self.trg_trg_att, self.src_trg_att = (JoeyAttention(o["num_heads"], size) for _ in range(2))
            self.x_layer_norm, self.dec_layer_norm = (nn.LayerNorm(size, eps=1e-6) for _ in range(2))
        else:
            self.layer_norm = nn.LayerNorm(size, eps=1e-6)
            self.src_src_att = JoeyAttention(o["num_heads"], size)
        self.feed_forward = JoeyFeedForward(o)

    def forward(self, x: Tensor, mask: Tensor, memory: Any = None, memory_mask: Any = None) -> Tensor:
        norm = self.x_layer_norm if self.decoder else self.layer_norm
        attention = self.trg_trg_att if self.decoder else self.src_src_att
        y = norm(x) if self.pre else x
        x = attention(y, y, mask) + x
        x = x if self.pre else norm(x)
        if self.decoder:
            y = self.dec_layer_norm(x) if self.pre else x
            x = self.src_trg_att(memory, y, memory_mask) + x
            x = x if self.pre else self.dec_layer_norm(x)
        return self.feed_forward(x)


class JoeyStack(nn.Module):
    def __init__(self, o: dict, *, decoder: bool):
        super().__init__()
        self.layers = nn.ModuleList(JoeyLayer(o, decoder=decoder) for _ in range(o["num_layers"]))
        self.pe = nn.Module()
        self.pe.register_buffer("pe", interleaved_sinusoids(5000, o["hidden_size"]).unsqueeze(0))
        self.layer_norm = nn.LayerNorm(o["hidden_size"], eps=1e-6) if o["layer_norm"] == "pre" else None

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        x = x + self.pe.pe[:, : x.shape[1]]
        for layer in self.layers:
            x = layer(x, *others)
        return x if self.layer_norm is None else self.layer_norm(x)


class Joey(nn.Module):
    def __init__(self, model: dict, source_size: int, target_size: int):
        super().__init__()
        size = model["encoder"]["hidden_size"]
        self.scale = math.sqrt(size) if model["encoder"]["embeddings"]["scale"] else 1.0
        self.src_embed, self.trg_embed = nn.Module(), nn.Module()
        self.src_embed.lut = nn.Embedding(source_size, size)
        if model["tied_embeddings"]:
            self.trg_embed = self.src_embed
        else:
            self.trg_embed.lut = nn.Embedding(target_size, size)
        self.encoder = JoeyStack(model["encoder"], decoder=False)
        self.decoder = JoeyStack(model["decoder"], decoder=True)
        self.decoder.output_layer = nn.Linear(size, target_size, bias=False)
        if model["tied_softmax"]:
            self.decoder.output_layer.weight = self.trg_embed.lut.weight

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        mask = source.ne(1)[:, None]
        memory = self.encoder(self.scale * self.src_embed.lut(source), mask)
        x = self.scale * self.trg_embed.lut(target_in)
        x = self.decoder(x, causal(target_in.shape[1]), memory, mask)
        return self.decoder.output_layer(x)


class Marian:
    """Transformer of Marian over its arrays; layers are functions of the options, as in transformer.h."""

    def __init__(self, options: dict, sizes: tuple[int, int], seed: int = 0):
        self.o, self.random = options, np.random.default_rng(seed)
        self.arrays: dict[str, np.ndarray] = {}
        width = options["dim-emb"]
        tied_all, tied_src, tied = (options[f"tied-embeddings{end}"] for end in ("-all", "-src", ""))
        self.shared = tied_all or tied_src
        for stack, size in zip(("encoder", "decoder"), sizes, strict=True):
            self.param("Wemb" if self.shared else f"{stack}_Wemb", (size, width))
        self.output = None if tied_all or tied else self.param("decoder_ff_logit_out_Wt", (sizes[1], width))
        self.param("decoder_ff_logit_out_b", (1, sizes[1]))
        self(np.zeros((1, 2), int), np.ones((1, 2), bool), np.zeros((1, 2), int))  # makes the others

    def param(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.arrays:
            noise = self.random.normal(size=shape) * (0.1 if shape[0] == 1 else shape[-1] ** -0.5)
            self.arrays[name] = (noise + ("ln_scale" in name)).astype(np.float32)
        return torch.from_numpy(self.arrays[name])

    def norm(self, x: Tensor, prefix: str, suffix: str = "") -> Tensor:
        width = x.shape[-1]
        scale = self.param(f"{prefix}_ln_scale{suffix}", (1, width))
        return functional.layer_norm(
            x, (width,), scale[0], self.param(f"{prefix}_ln_bias{suffix}", (1, width))[0], 1e-6
        )

    def before(self, x: Tensor, prefix: str) -> Tensor:
        return self.norm(x, prefix, "_pre") if "n" in self.o["transformer-preprocess"] else x

    def after(self, x: Tensor, before: Tensor, prefix: str) -> Tensor:
        for operation in self.o["transformer-postprocess"]:
            x = {"d": lambda: x, "a": lambda: x + before, "n": lambda: self.norm(x, prefix)}[operation]()  # noqa: B023
        return x

    def affine(self, x: Tensor, prefix: str, name: str, width: int) -> Tensor:
        weight = self.param(f"{prefix}_W{name}", (x.shape[-1], width))
        return x @ weight + self.param(f"{prefix}_b{name}", (1, width))

    def attention(self, prefix: str, x: Tensor, keys: Any, mask: Tensor) -> Tensor:
        width = x.shape[-1]
        y = self.before(x, f"{prefix}_Wo")
        keys = y if keys is None else keys
        q, k, v = (self.affine(z, prefix, name, width) for z, name in ((y, "q"), (keys, "k"), (keys, "v")))
        y = self.affine(attend(q, k, v, mask, self.o["transformer-heads"]), prefix, "o", width)
        return self.after(y, x, f"{prefix}_Wo")

    def ssru(self, prefix: str, x: Tensor) -> Tensor:
        y, width = self.before(x, prefix), x.shape[-1]
        new = y @ self.param(f"{prefix}_W", (width, width))
        forget = torch.sigmoid(self.affine(y, prefix, "f", width))
        cell, states = torch.zeros_like(new[:, 0]), []
        for step in range(x.shape[1]):
            cell = forget[:, step] * cell + (1 - forget[:, step]) * new[:, step]
            states.append(functional.relu(cell))
        return self.after(torch.stack(states, 1), x, f"{prefix}_ffn")

    def feedforward(self, prefix: str, x: Tensor) -> Tensor:
        y = self.affine(self.before(x, f"{prefix}_ffn"), prefix, "1", self.o["transformer-dim-ffn"])
        y = {"relu": functional.relu, "swish": functional.silu}[self.o["transformer-ffn-activation"]](y)
        return self.after(self.affine(y, prefix, "2", x.shape[-1]), x, f"{prefix}_ffn")

    def start(self, x: Tensor, stack: str) -> Tensor:
        x = math.sqrt(x.shape[-1]) * x + half_sinusoids(x.shape[1], x.shape[-1])
        emb = "n" in self.o["transformer-postprocess-emb"]
        return self.norm(x, f"{stack}_emb", "_pre") if emb else x

    def finish(self, x: Tensor, stack: str) -> Tensor:
        return self.norm(x, f"{stack}_top") if "n" in self.o["transformer-postprocess-top"] else x

    def __call__(self, source: Any, source_mask: Any, target_out: Any) -> Tensor:
        """Logits of every token of targets, the first one from a vector of zeros."""
        table = {
            stack: torch.from_numpy(self.arrays["Wemb" if self.shared else f"{stack}_Wemb"])
            for stack in ("encoder", "decoder")
        }
        mask = torch.from_numpy(np.asarray(source_mask))[:, None]
        x = self.start(table["encoder"][as_ids(source)], "encoder")
        for number in range(1, self.o["enc-depth"] + 1):
            x = self.attention(f"encoder_l{number}_self", x, None, mask)
            x = self.feedforward(f"encoder_l{number}_ffn", x)
        memory = self.finish(x, "encoder")
        embedded = table["decoder"][as_ids(target_out)]
        delayed = torch.cat([torch.zeros_like(embedded[:, :1]), embedded[:, :-1]], 1)
        x = self.start(delayed, "decoder")
        for number in range(1, self.o["dec-depth"] + 1):
            if self.o["transformer-decoder-autoreg"] == "rnn":
                x = self.ssru(f"decoder_l{number}_rnn", x)
            else:
                x = self.attention(f"decoder_l{number}_self", x, None, causal(x.shape[1]))
            x = self.attention(f"decoder_l{number}_context", x, memory, mask)
            x = self.feedforward(f"decoder_l{number}_ffn", x)
        x = self.finish(x, "decoder")
        output = table["decoder"] if self.output is None else self.output
        return x @ output.T + torch.from_numpy(self.arrays["decoder_ff_logit_out_b"])


def as_ids(array: Any) -> Tensor:
    return torch.from_numpy(np.asarray(array, np.int64))
