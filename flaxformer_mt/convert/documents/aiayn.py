"""Format aiayn: the class of document 003, and the file model.chkpt of attention-is-all-you-need-pytorch.

The project's translate script builds the class from a few settings and then applies `trg_word_prj` itself,
without the scale that `forward` applies. So an exported file stores the projection on its own, with all
scales multiplied into the matrices: without a shared projection the class ignores its scales, and both ways
of computing logits give this model's.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flaxformer_mt.config import Config, ModelConfig
from flaxformer_mt.convert import formats
from flaxformer_mt.convert.foreign_files import check_network, check_tensors
from flaxformer_mt.convert.formats import ImportOverrides, Outputs, Weights
from flaxformer_mt.convert.name_table import (
    NORM,
    RESIDUAL_NORM,
    TABLE_TOLERANCE,
    Constant,
    Rule,
    Shapes,
    TableNames,
    Tensors,
    attention_rules,
    embedding_rules,
    feedforward_rules,
    linear_layout,
    rules_for,
)
from flaxformer_mt.convert.torch.state_dicts import (
    POST_NORM,
    StateDictFormat,
    load_safely,
    save_tensors,
    tensor_of,
    to_arrays,
)
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.positions import sinusoidal_table
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import Vocabs

CHECKPOINT_NAME = "model.chkpt"
TABLES = ("encoder.position_enc.pos_table", "decoder.position_enc.pos_table")
_EMBEDDINGS = ("encoder.src_word_emb.weight", "decoder.trg_word_emb.weight")
_PROJECTION = "trg_word_prj.weight"
# The size of the tables in the class that the translate script builds.
_SCRIPT_POSITIONS = 200
# Options of the training script -> arguments of the class; others have the same name in both.
_OPTIONS = {
    "src_vocab_size": "n_src_vocab",
    "trg_vocab_size": "n_trg_vocab",
    "d_inner_hid": "d_inner",
    "proj_share_weight": "trg_emb_prj_weight_sharing",
    "embs_share_weight": "emb_src_trg_weight_sharing",
}
_SAME = (
    *("src_pad_idx", "trg_pad_idx", "d_word_vec", "d_model", "n_layers", "n_head", "d_k", "d_v"),
    *("dropout", "scale_emb_or_prj"),
)


def is_checkpoint(path: Path) -> bool:
    return path.suffix == ".chkpt" and path.is_file()


def write_checkpoint(tensors: Tensors, arguments: dict[str, Any], path: Path) -> None:
    table = sinusoidal_table(_SCRIPT_POSITIONS, arguments["d_model"])[None]
    state = dict(tensors) | dict.fromkeys(TABLES, table)
    if arguments["trg_emb_prj_weight_sharing"]:
        root = np.float32(np.sqrt(arguments["d_model"]))
        if arguments["scale_emb_or_prj"] == "emb":
            scaled = {id(state[name]): state[name] * root for name in _EMBEDDINGS}
            state |= {name: scaled[id(state[name])] for name in _EMBEDDINGS}
        elif arguments["scale_emb_or_prj"] == "prj":
            state[_PROJECTION] = state[_PROJECTION] / root
        arguments = arguments | {"trg_emb_prj_weight_sharing": False, "scale_emb_or_prj": "none"}
    save_tensors(state, path)
    # The project counts epochs, this package steps; config.json has the step.
    options = {name: arguments[name] for name in _SAME} | {
        option: arguments[name] for option, name in _OPTIONS.items()
    }
    checkpoint = {
        "epoch": 0,
        "settings": argparse.Namespace(**options),
        "model": torch.load(path, weights_only=True),
    }
    torch.save(checkpoint, path)


def read_checkpoint(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Read the tensors and the settings of a file; of code, it can contain only the name of the namespace."""
    checkpoint = load_safely(path, what="a checkpoint", classes=[argparse.Namespace])
    state = checkpoint.get("model") if isinstance(checkpoint, dict) else None
    settings = checkpoint.get("settings") if isinstance(checkpoint, dict) else None
    if not isinstance(state, dict) or not isinstance(settings, argparse.Namespace):
        raise UserError(f"{path} is not a checkpoint of that project: it must have `model` and `settings`")
    if not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        raise UserError(f"{path} is not a checkpoint of that project: `model` must contain named tensors")
    check_tensors(state, path)
    return to_arrays(state), vars(settings)


def make_model_config(
    base: ModelConfig, settings: dict[str, Any], tensors: Tensors, path: Path
) -> ModelConfig:
    """Return the model of a file: sizes and switches of its settings, number of positions of its tables."""

    def setting(name: str, kind: type, default: Any = None) -> Any:
        value = settings.get(name, default)
        if type(value) is not kind:  # True is an int
            plain = value is None or isinstance(value, str | float | bool)
            shown = repr(value)[:80] if plain else f"a {type(value).__name__}"
            raise UserError(f"{path}: settings have {name} {shown}; it must be of type {kind.__name__}")
        return value

    shares = setting("proj_share_weight", bool, False)
    # Versions of the project without this option scale the embeddings of no model, and every projection.
    scale = setting("scale_emb_or_prj", str, "prj") if shares else "none"
    tables = [tensors[name] for name in TABLES if name in tensors and tensors[name].ndim == 3]
    width, inner, layers, heads = (
        setting(name, int) for name in ("d_model", "d_inner_hid", "n_layers", "n_head")
    )
    return dataclasses.replace(
        base,
        architecture="encoder_decoder",
        num_encoder_layers=layers,
        num_decoder_layers=layers,
        model_dim=width,
        num_heads=heads,
        key_dim=setting("d_k", int),
        value_dim=setting("d_v", int),
        ffn_dim=inner,
        activation="relu",
        norm_position="post",
        norm="layer",
        norm_epsilon=1e-6,
        norm_affine=True,
        final_norm=None,
        embedding_norm=True,
        positions="sinusoidal",
        first_position=0,
        max_positions=tables[0].shape[1] if tables else _SCRIPT_POSITIONS,
        embedding_scale=scale == "emb",
        logit_scale=scale == "prj",
        embedding_bias=False,
        tying=formats.find_tying(embeddings=setting("embs_share_weight", bool, False), output=shares),
        padding_mask="both",
        attention_bias=False,
        ffn_bias=True,
        output_bias=False,
        dropout_rate=setting("dropout", float, 0.1),
    )


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
        source = (_EncoderLayer, "src_word_emb", n_src_vocab, src_pad_idx)
        target = (_DecoderLayer, "trg_word_emb", n_trg_vocab, trg_pad_idx)
        self.encoder = _Stack(*source, n_position, embedding_scale, n_layers, sizes)
        self.decoder = _Stack(*target, n_position, embedding_scale, n_layers, sizes)
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


class _Stack(nn.Module):
    def __init__(
        self,
        layer: type[nn.Module],
        embedding: str,
        vocabulary: int,
        pad: int,
        n_position: int,
        scale: float,
        n_layers: int,
        sizes: tuple,
    ) -> None:
        super().__init__()
        width, dropout = sizes[0], sizes[-1]
        self.embedding, self.scale = embedding, scale
        self.add_module(embedding, nn.Embedding(vocabulary, width, padding_idx=pad))
        self.position_enc = _Positions(width, n_position)
        self.layer_stack = nn.ModuleList([layer(*sizes) for _ in range(n_layers)])
        self.layer_norm = nn.LayerNorm(width, eps=_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, *memory_and_masks: Tensor) -> Tensor:
        x = self.position_enc(getattr(self, self.embedding)(ids) * self.scale)
        x = self.layer_norm(self.dropout(x))
        for layer in self.layer_stack:
            x = layer(x, *memory_and_masks)
        return x


_ALLOWED = POST_NORM | {
    "model.norm_epsilon": (1e-6,),
    "model.embedding_norm": (True,),
    "model.first_position": (0,),
    "model.padding_mask": ("both", "source"),
    "model.attention_bias": (False,),
}
_ATTENTION = [*attention_rules(("w_qs", "w_ks", "w_vs"), "fc"), *RESIDUAL_NORM]


def _problems(config: Config) -> Iterator[str]:
    yield from formats.unsupported_fields(config, _ALLOWED)
    model = config.model
    if model.num_encoder_layers != model.num_decoder_layers:
        yield (
            f"model.num_encoder_layers is {model.num_encoder_layers} and model.num_decoder_layers is "
            f"{model.num_decoder_layers}; they must be equal"
        )
    if model.embedding_scale and model.logit_scale:
        yield "model.embedding_scale and model.logit_scale are both True; at most one of the two may be"
    for name in ("embedding_scale", "logit_scale"):
        if getattr(model, name) and not _shares_projection(model):
            yield (
                f"model.{name} is True with model.tying {model.tying}; supported: False, as this system "
                "scales only with a tied projection (model.tying target_output or all)"
            )


def _shares_projection(model: ModelConfig) -> bool:
    return model.tying in ("target_output", "all")


def _rules(config: Config, shapes: Shapes) -> list[Rule | Constant]:
    model = config.model
    feedforward = feedforward_rules({"input": "w_1", "output": "w_2"}, linear_layout(model)) + RESIDUAL_NORM
    layers = [
        ("encoder/layers_{n}/", "encoder.layer_stack.{n}."),
        ("decoder/layers_{n}/", "decoder.layer_stack.{n}."),
    ]
    source, target, output = embedding_rules(model, TableNames(*_EMBEDDINGS, _PROJECTION))
    table = sinusoidal_table(_positions(model), model.model_dim)[None]
    return [
        source,
        target,
        *(Constant(name, table, tolerance=TABLE_TOLERANCE) for name in TABLES),
        *rules_for(
            [(f"{side}/embedding_norm", f"{side}.layer_norm") for side in ("encoder", "decoder")], NORM
        ),
        *rules_for([(flax + "self_attention", foreign + "slf_attn") for flax, foreign in layers], _ATTENTION),
        *rules_for(
            [(flax + "cross_attention", foreign + "enc_attn") for flax, foreign in layers], _ATTENTION
        ),
        *rules_for([(flax + "feedforward", foreign + "pos_ffn") for flax, foreign in layers], feedforward),
        output,
    ]


def _positions(model: ModelConfig) -> int:
    rows = model.longest_input
    assert rows is not None, "sinusoidal positions are a table of finite length"
    return rows


def _arguments(config: Config, vocabs: Vocabs) -> dict[str, Any]:
    model = config.model
    size = model.model_dim // model.num_heads
    return {
        "n_src_vocab": vocabs.source.size,
        "n_trg_vocab": vocabs.target.size,
        "src_pad_idx": vocabs.source.pad_id,
        "trg_pad_idx": vocabs.target.pad_id,
        "d_word_vec": model.model_dim,
        "d_model": model.model_dim,
        "d_inner": model.ffn_dim,
        "n_layers": model.num_encoder_layers,
        "n_head": model.num_heads,
        "d_k": model.key_dim or size,
        "d_v": model.value_dim or size,
        "dropout": model.dropout_rate,
        "n_position": _positions(model),
        "trg_emb_prj_weight_sharing": _shares_projection(model),
        "emb_src_trg_weight_sharing": model.tying in ("embeddings", "all"),
        "scale_emb_or_prj": "emb" if model.embedding_scale else "prj" if model.logit_scale else "none",
    }


def _run(module: torch.nn.Module, batch: Batch, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    target = tensor_of(batch.target_in)
    return module(tensor_of(batch.source), target).unflatten(0, tuple(target.shape))


def _write_checkpoint(weights: Weights, tensors: Tensors, folder: Path) -> None:
    arguments = _arguments(weights.config, weights.vocabs)
    write_checkpoint(tensors, arguments, folder / CHECKPOINT_NAME)


def _read(path: Path, overrides: ImportOverrides) -> Weights:
    if not is_checkpoint(path):
        return STATE_DICT.read(path, overrides)
    tensors, config, vocabs = _load_checkpoint(path, overrides)
    return STATE_DICT.weights_of(tensors, config, vocabs, origin=str(path))


def _open(path: Path, overrides: ImportOverrides | None = None) -> Outputs:
    overrides = overrides or ImportOverrides()
    if not is_checkpoint(path):
        return STATE_DICT.open(path, overrides)
    tensors, config, vocabs = _load_checkpoint(path, overrides)
    return STATE_DICT.outputs_of(tensors, _arguments(config, vocabs))


def _load_checkpoint(path: Path, overrides: ImportOverrides) -> tuple[Tensors, Config, Vocabs]:
    """Return the file's tensors, with the given config or that of the folder and the file's model."""
    tensors, settings = read_checkpoint(path)
    vocabs = formats.find_vocabs(path.parent, overrides)
    config = overrides.config
    if config is None:
        known = formats.OUR_KEY in formats.read_config_json(path.parent)
        base = (
            formats.find_config(path.parent, overrides) if known else formats.fit_vocabulary(Config(), vocabs)
        )
        config = dataclasses.replace(base, model=make_model_config(base.model, settings, tensors, path))
    check_network(config, path.parent)
    STATE_DICT.check_config(config)
    return tensors, config, vocabs


STATE_DICT = StateDictFormat(
    name="aiayn",
    problems=lambda config: list(_problems(config)),
    rules=_rules,
    arguments=_arguments,
    make_module=AiaynTransformer,
    run=_run,
    write_more=_write_checkpoint,
)
FORMAT = dataclasses.replace(STATE_DICT.make_format(), read=_read, open=_open)
