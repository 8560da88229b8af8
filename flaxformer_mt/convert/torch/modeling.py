"""A Transformer for translation in a single file that only needs PyTorch.

Contains the network, loads the folder that `export` wrote, and translates with greedy search.

    model = Transformer.load("folder")
    logits = model(source, target_in)                # ids [B, S] and [B, T] -> [B, T, V]
    ids = model.greedy(source, max_length=50)        # [B, at most 50], each row ends in eos, then padding
    python modeling.py < text > translations         # with the package sentencepiece
    python modeling.py --ids < ids > ids             # without it: lines of ids that end in eos

Names in model.safetensors, all float32; matrices are [out, in], as in torch.nn.Linear:

    target_embedding.weight                    [V, D]; .bias [D] is optional
    source_embedding.weight                    likewise, unless tied to the target's; not in decoder_only
    output.weight, output.bias                 [V, D] unless tied to the target embedding; [V], optional
    STACK.positions.weight                     [P, D], learned positions only; .bias [D] is optional
    STACK.embedding_norm, STACK.final_norm     .weight and .bias [D]; both norms are optional
    STACK.layers.N.self_attention              .{query,key,value,output}.{weight,bias}; heads are contiguous
    decoder.layers.N.cross_attention           likewise; not in decoder_only
    decoder.layers.N.recurrence                .{input,forget}.weight, .forget.bias; not with self_attention
    STACK.layers.N.feedforward                 .{input,gate,output}.{weight,bias}; gate: swiglu only
    STACK.layers.N.SUBLAYER_norm               .{weight,bias}: self_attention_norm, feedforward_norm, ...

STACK is encoder or decoder. `Transformer.ties` maps each tied name, which the file omits, to its stored name.
"""

import importlib
import json
import math
import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# Characters that some programs read as a line end; every program must read a translation as one line.
_LINE_ENDS = dict.fromkeys(map(ord, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"), " ") | {0xFFFD: None}
_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}


class Transformer(nn.Module):
    """Encoder and decoder, or one causal stack that reads source and target as one sequence (decoder_only).

    model: section "model" of config.json. sizes: sizes of the vocabularies "source" and "target".
    special_ids: ids of "pad", "bos" and "eos" in the target vocabulary; the source has the same padding id.
    """

    config: dict[str, Any]  # training config; set by `load`

    def __init__(self, model: dict[str, Any], sizes: dict[str, int], special_ids: dict[str, int]) -> None:
        super().__init__()
        self.facts = m = _set_defaults(model)
        self.special = SimpleNamespace(**special_ids)
        self.target_embedding = _Table(sizes["target"], m.model_dim, m.embedding_bias)
        self.ties: dict[str, str] = {}
        if not m.decoder_only:
            tied = m.tying in ("all", "embeddings")
            table = self.target_embedding if tied else _Table(sizes["source"], m.model_dim, m.embedding_bias)
            self.source_embedding = table
            self.encoder = _Stack(m, m.num_encoder_layers, has_cross=False)
            names = table.state_dict() if tied else ()
            self.ties = {f"source_embedding.{n}": f"target_embedding.{n}" for n in names}
        self.decoder = _Stack(m, m.num_decoder_layers, has_cross=not m.decoder_only)
        self.output = nn.Linear(m.model_dim, sizes["target"], bias=m.output_bias)
        if m.tying in ("all", "target_output") or m.decoder_only and m.tying != "none":
            self.output.weight = self.target_embedding.weight
            self.ties["output.weight"] = "target_embedding.weight"

    @classmethod
    def load(cls, folder: str | Path) -> "Transformer":
        """Load the model of a folder in eval mode; missing, unexpected or mis-shaped tensors are errors."""
        facts = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        config = facts["flaxformer_mt"]["config"]
        module = cls(config["model"], facts["sizes"], facts["special_ids"])
        tensors = read_safetensors(Path(folder) / "model.safetensors")
        tensors |= {name: tensors[stored] for name, stored in module.ties.items() if stored in tensors}
        module.load_state_dict(tensors, strict=True)
        module.config = config
        return module.eval()

    def forward(
        self, source: Tensor, target_in: Tensor, source_mask: Any = None, target_mask: Any = None
    ) -> Tensor:
        """Return next-token logits [B, T, V] for source ids [B, S] and target ids [B, T].

        Target ids start with bos. Masks are True at tokens, False at padding; the default masks padding ids.
        """
        source_mask = source != self.special.pad if source_mask is None else source_mask
        target_mask = target_in != self.special.pad if target_mask is None else target_mask
        if self.facts.padding_mask != "both":
            target_mask = torch.ones_like(target_mask)
        if not self.facts.decoder_only:
            memory = self.encode(source, source_mask)
            return self._logits(self._decode(target_in, _indices(target_in), target_mask, memory, None))
        positions = _indices(torch.cat([source, target_in], dim=1))
        if self.facts.padding_mask == "none":
            source_mask = torch.ones_like(source_mask)
        else:  # positions skip the padding between source and target
            after = source_mask.sum(1, keepdim=True) + _indices(target_in)
            positions = torch.cat([_indices(source).expand(source.shape), after], dim=1)
        ids, is_token = torch.cat([source, target_in], dim=1), torch.cat([source_mask, target_mask], dim=1)
        return self._logits(self._decode(ids, positions, is_token, None, None)[:, source.shape[1] :])

    def encode(self, source: Tensor, source_mask: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the encoder output [B, S, D] for source ids [B, S], and its attention mask or None."""
        self._check_length(source.shape[1])
        if not self.facts.source_end:  # the last token of a row is masked, unless it is the only one
            ends = source_mask & ~functional.pad(source_mask[:, 1:], (0, 1))
            source_mask = source_mask & ~(ends & (torch.arange(source.shape[1], device=source.device) > 0))
        mask = None if self.facts.padding_mask == "none" else source_mask[:, None, None, :]
        return self.encoder(self.source_embedding(source), _indices(source), mask, None, None), mask

    @torch.no_grad()
    def greedy(self, source: Tensor, source_mask: Any = None, max_length: int | Tensor = 100) -> Tensor:
        """Translate by greedy search: return ids [B, T] without bos; each row ends in eos, then padding.

        max_length limits the length including eos: one number, or one per source [B].
        """
        pad, bos = self.special.pad, self.special.bos
        limits = torch.as_tensor(max_length, device=source.device).expand(len(source))
        max_steps = int(limits.max()) if len(source) else 0
        is_token = source != pad if source_mask is None else source_mask
        caches: list[dict] = [{} for _ in self.decoder.layers]
        memory, offset = None, torch.zeros(1, 1, dtype=torch.long, device=source.device)
        if self.facts.decoder_only:
            is_token = torch.ones_like(is_token) if self.facts.padding_mask == "none" else is_token
            self._decode(source, _indices(source), is_token, None, caches)
            offset = is_token.sum(1, keepdim=True)
        else:
            memory, is_token = self.encode(source, is_token), is_token[:, :0]
        self._check_length(is_token.shape[1] + max_steps)
        last = torch.full((len(source), 1), bos, device=source.device)
        tokens, done = [last[:, :0]], limits <= 0
        for index in range(max_steps):
            is_token = functional.pad(is_token, (0, 1), value=True)
            logits = self._logits(self._decode(last, offset + index, is_token, memory, caches))[:, -1]
            logits[:, [pad, bos]] = -math.inf
            last = logits.argmax(-1).masked_fill(done, pad)[:, None]
            tokens.append(last)
            done = done | (last[:, 0] == self.special.eos) | (index + 1 >= limits)
            if bool(done.all()):
                break
        return torch.cat(tokens, dim=1)

    def _decode(self, ids: Tensor, positions: Tensor, is_token: Tensor, memory: Any, caches: Any) -> Tensor:
        """Return the decoder output [B, Q, D] for ids [B, Q]; is_token [B, M] covers the cache and ids."""
        queries, keys = ids.shape[1], is_token.shape[1]
        self._check_length(keys)
        causal = torch.ones(queries, keys, dtype=torch.bool, device=ids.device).tril(keys - queries)
        mask = causal & is_token[:, None, None, :]
        return self.decoder(self.target_embedding(ids), positions, mask, memory, caches)

    def _logits(self, x: Tensor) -> Tensor:
        return self.output(x * self.facts.model_dim**-0.5 if self.facts.logit_scale else x)

    def _check_length(self, length: int) -> None:
        if length > self.facts.length_limit:
            raise ValueError(f"{length} tokens exceed the {self.facts.length_limit} positions of this model")


def _set_defaults(model: dict[str, Any]) -> SimpleNamespace:
    """Return the section "model" of config.json, with None replaced by defaults."""
    rates = {n: model["dropout_rate"] for n in model if n.endswith("dropout_rate") and model[n] is None}
    m = SimpleNamespace(**model | rates)
    m.decoder_only = m.architecture == "decoder_only"
    m.recurrent = model.get("decoder_self_attention") == "ssru"  # older configs have no such field,
    m.source_end = model.get("source_end", True)  # nor this one
    m.key_dim = m.key_dim or m.model_dim // m.num_heads
    m.value_dim = m.value_dim or m.model_dim // m.num_heads
    m.final_norm = m.norm_position == "pre" if m.final_norm is None else m.final_norm
    rows = m.max_positions or (5000 if m.positions == "sinusoidal" else 512)
    m.length_limit = rows if m.positions in ("sinusoidal", "learned") else math.inf
    m.rows = rows + m.first_position
    return m


class _Table(nn.Embedding):
    """An embedding table [N, D] with an optional bias [D]."""

    bias: nn.Parameter | None

    def __init__(self, rows: int, width: int, bias: bool) -> None:
        super().__init__(rows, width)
        nn.init.normal_(self.weight, std=width**-0.5)
        self.register_parameter("bias", nn.Parameter(torch.zeros(width)) if bias else None)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + (0 if self.bias is None else self.bias)

    def one_vector(self) -> Tensor:
        """Return the sum [D] of all rows, each multiplied by its index."""
        total = torch.arange(len(self.weight)).to(self.weight) @ self.weight
        return total + (0 if self.bias is None else self.bias)


class _Stack(nn.Module):
    """Adds positions to embeddings and applies the layers, with optional norms before and after them."""

    sinusoids: Tensor

    def __init__(self, m: SimpleNamespace, num_layers: int, *, has_cross: bool) -> None:
        super().__init__()
        self.facts = m
        if m.positions in ("learned", "one_vector"):
            self.positions = _Table(m.rows, m.model_dim, m.embedding_bias)
        elif m.positions == "sinusoidal":
            self.register_buffer("sinusoids", _sinusoids(m.rows, m.model_dim), persistent=False)
        self.dropout = nn.Dropout(m.embedding_dropout_rate)
        self.embedding_norm = _norm(m) if m.embedding_norm else nn.Identity()
        self.layers = nn.ModuleList(_Layer(m, has_cross) for _ in range(num_layers))
        self.final_norm = _norm(m) if m.final_norm else nn.Identity()

    def forward(self, x: Tensor, positions: Tensor, mask: Any, memory: Any, caches: Any) -> Tensor:
        """Map x [B, T, D] at positions [B, T] or [1, T] to [B, T, D]."""
        m, angles = self.facts, None
        x = x * m.model_dim**0.5 if m.embedding_scale else x
        positions = positions + m.first_position
        if m.positions == "sinusoidal":
            x = x + self.sinusoids[positions]
        elif m.positions == "learned":
            x = x + self.positions(positions)
        elif m.positions == "one_vector":
            x = x + self.positions.one_vector()
        else:
            rates = 10000.0 ** (torch.arange(0, -m.key_dim, -2, dtype=torch.float64) / m.key_dim)
            angles = positions[:, None, :, None].float() * rates.to(positions.device, torch.float32)
        x = self.embedding_norm(self.dropout(x))
        for layer, cache in zip(self.layers, caches or [{} for _ in self.layers], strict=True):
            x = layer(x, mask, angles, memory, cache)
        return self.final_norm(x)


class _Layer(nn.Module):
    """Self-attention, optional cross-attention and feed-forward sublayers with residual connections."""

    def __init__(self, m: SimpleNamespace, has_cross: bool) -> None:
        super().__init__()
        self.pre_norm = m.norm_position == "pre"
        self.recurrent = has_cross and m.recurrent
        if self.recurrent:
            maps = {n: nn.Linear(m.model_dim, m.model_dim, bias=n == "forget") for n in ("input", "forget")}
            self.recurrence, self.recurrence_norm = nn.ModuleDict(maps), _norm(m)
        else:
            self.self_attention, self.self_attention_norm = _Attention(m), _norm(m)
        if has_cross:
            self.cross_attention, self.cross_attention_norm = _Attention(m), _norm(m)
        self.feedforward, self.feedforward_norm = _FeedForward(m), _norm(m)
        self.dropout = nn.Dropout(m.dropout_rate)

    def forward(self, x: Tensor, mask: Any, angles: Any, memory: Any, cache: dict) -> Tensor:
        def attend_self(y: Tensor) -> Tensor:
            new = self.self_attention.project(y, angles)
            old = cache.get("self")
            cache["self"] = new if old is None else tuple(map(lambda *p: torch.cat(p, dim=2), old, new))
            return self.self_attention(y, *cache["self"], mask, angles)

        def recur(y: Tensor) -> Tensor:  # SSRU: ReLU of c_t = f_t * c_{t-1} + (1 - f_t) * input(y_t)
            forget = self.recurrence["forget"](y).sigmoid()
            states = [cache.get("state", torch.zeros_like(y[:, 0]))]
            for f, new in zip(forget.unbind(1), self.recurrence["input"](y).unbind(1), strict=True):
                states.append(f * states[-1] + (1 - f) * new)
            cache["state"] = states[-1]
            return functional.relu(torch.stack(states[1:], dim=1))

        def attend_memory(y: Tensor) -> Tensor:
            if "memory" not in cache:
                cache["memory"] = self.cross_attention.project(memory[0])
            return self.cross_attention(y, *cache["memory"], memory[1])

        norm = self.recurrence_norm if self.recurrent else self.self_attention_norm
        x = self._residual(x, recur if self.recurrent else attend_self, norm)
        if memory is not None:
            x = self._residual(x, attend_memory, self.cross_attention_norm)
        return self._residual(x, self.feedforward, self.feedforward_norm)

    def _residual(self, x: Tensor, sublayer: Callable[[Tensor], Tensor], norm: nn.Module) -> Tensor:
        if self.pre_norm:
            return x + self.dropout(sublayer(norm(x)))
        return norm(x + self.dropout(sublayer(x)))


class _Attention(nn.Module):
    def __init__(self, m: SimpleNamespace) -> None:
        super().__init__()
        self.heads, bias = m.num_heads, m.attention_bias
        sizes = (m.num_heads * size for size in (m.key_dim, m.key_dim, m.value_dim))
        self.query, self.key, self.value = (nn.Linear(m.model_dim, size, bias=bias) for size in sizes)
        self.output = nn.Linear(m.num_heads * m.value_dim, m.model_dim, bias=bias)
        self.dropout = nn.Dropout(m.attention_dropout_rate)

    def project(self, memory: Tensor, angles: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return keys [B, H, M, K] and values [B, H, M, E] for the attended sequence `memory` [B, M, D]."""
        return _rotate(self._heads(self.key(memory)), angles), self._heads(self.value(memory))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, mask: Any, angles: Any = None) -> Tensor:
        query = _rotate(self._heads(self.query(x)), angles)
        scores = query * query.shape[-1] ** -0.5 @ keys.transpose(-1, -2)
        if mask is not None:  # finite, so that a fully masked query gets equal weights, not NaN
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        mixed = self.dropout(scores.softmax(-1)) @ values
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class _FeedForward(nn.Module):
    def __init__(self, m: SimpleNamespace) -> None:
        super().__init__()
        self.activation = m.activation
        self.input = nn.Linear(m.model_dim, m.ffn_dim, bias=m.ffn_bias)
        gated = m.activation == "swiglu"
        self.gate = nn.Linear(m.model_dim, m.ffn_dim, bias=m.ffn_bias) if gated else None
        self.output = nn.Linear(m.ffn_dim, m.model_dim, bias=m.ffn_bias)
        self.dropout = nn.Dropout(m.ffn_dropout_rate)

    def forward(self, x: Tensor) -> Tensor:
        y = self.input(x)
        y = _ACTIVATIONS[self.activation](y) if self.gate is None else y * functional.silu(self.gate(x))
        return self.output(self.dropout(y))


def _norm(m: SimpleNamespace) -> nn.Module:
    kind = nn.RMSNorm if m.norm == "rms" else nn.LayerNorm
    return kind(m.model_dim, eps=m.norm_epsilon, elementwise_affine=m.norm_affine)


def _indices(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device)[None]


def _sinusoids(rows: int, width: int) -> Tensor:
    rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :width].float()


def _rotate(vectors: Tensor, angles: Tensor | None) -> Tensor:
    """Rotate elements i and i + K / 2 of each vector [B, H, T, K] as a pair."""
    if angles is None:
        return vectors
    first, second = vectors.chunk(2, dim=-1)
    sin, cos = angles.sin(), angles.cos()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file by name.

    The file has 8 bytes with the length of the header, a JSON header, and the data.
    """
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            shape, where = entry["shape"], start + entry["data_offsets"][0]
            flat = torch.frombuffer(data, dtype=_TYPES[entry["dtype"]], count=math.prod(shape), offset=where)
            tensors[name] = flat.reshape(shape)
    return tensors


def main(arguments: list[str]) -> None:
    """Translate standard input (text, or ids with --ids) line by line; `greedy` on batches is faster."""
    if arguments not in ([], ["--ids"]):
        sys.exit("usage: python modeling.py [--ids] < INPUT > OUTPUT")
    folder, as_ids = Path(__file__).resolve().parent, bool(arguments)
    processors, joint = [], (folder / "vocab" / "joint.model").is_file()
    for name in () if as_ids else ("joint", "joint") if joint else ("source", "target"):
        try:
            package = importlib.import_module("sentencepiece")
        except ImportError:
            sys.exit("error: text needs the package sentencepiece; install it, or use --ids with ids")
        processors.append(package.SentencePieceProcessor(model_file=str(folder / "vocab" / f"{name}.model")))
    model = Transformer.load(folder)
    data, search, length_limit = model.config["data"], model.config["search"], model.facts.length_limit
    bound = length_limit - data["max_source_length"] if model.facts.decoder_only else length_limit
    if not data["source_language"]:
        sys.exit("error: this model is a language model, which cannot translate")
    for line in (line.decode("utf-8").removesuffix("\n") for line in sys.stdin.buffer):
        ids = [int(number) for number in line.split()] if as_ids else processors[0].encode(line, add_eos=True)
        ids = [*ids[:-1][: data["max_source_length"] - 1], *ids[-1:]]
        limit = max(1, min(bound, int(search["max_length_ratio"] * len(ids) + search["max_length_offset"])))
        found: list[int] = []
        if len(ids) > 1 and line.strip():
            found = model.greedy(torch.tensor([ids]), max_length=limit)[0].tolist()
        text = " ".join(map(str, found)) if as_ids else processors[1].decode(found)
        text = text.removeprefix("\u2581").replace("\u2581", " ").translate(_LINE_ENDS)
        sys.stdout.buffer.write(f"{text}\n".encode())
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
