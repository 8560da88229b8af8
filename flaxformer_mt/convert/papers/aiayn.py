"""Format aiayn: the class of the project attention-is-all-you-need-pytorch, and its file model.chkpt.

The project's translate script makes the class from a few settings and then applies `trg_word_prj` itself,
without the scale that `forward` applies. Therefore an export stores the projection separately and multiplies
all scales into the matrices. Without a shared projection, the class ignores its scales, so the script and
`forward` compute the same logits.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flaxformer_mt.config import Config, ModelConfig
from flaxformer_mt.convert import formats
from flaxformer_mt.convert.formats import ImportOverrides, Weights
from flaxformer_mt.convert.name_table import TABLE_TOLERANCE, Constant, Rule, Tensors, read_names
from flaxformer_mt.convert.network_fields import TYING, Field, any_value, read_network, write_options
from flaxformer_mt.convert.papers import post_norm
from flaxformer_mt.convert.papers.post_norm import State, attend, linear
from flaxformer_mt.convert.stored_tensors import as_arrays, attributes_of, load_checkpoint, take_tensors
from flaxformer_mt.convert.torch.state_dicts import (
    Loaded,
    StateDictFormat,
    save_tensors,
    save_value,
    tensor_of,
)
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.positions import sinusoidal_table
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import Vocabs

CHECKPOINT_NAME = "model.chkpt"
TABLES = ("encoder.position_enc.pos_table", "decoder.position_enc.pos_table")
_EMBEDDINGS = ("encoder.src_word_emb.weight", "decoder.trg_word_emb.weight")
_PROJECTION = "trg_word_prj.weight"
# The number of positions in the class that the translate script makes.
_SCRIPT_POSITIONS = 200
# Options of the training script -> arguments of the class; other names are the same in both.
_OPTIONS = {
    "src_vocab_size": "n_src_vocab",
    "trg_vocab_size": "n_trg_vocab",
    "d_inner_hid": "d_inner",
    "proj_share_weight": "trg_emb_prj_weight_sharing",
    "embs_share_weight": "emb_src_trg_weight_sharing",
}
_FIELDS = (
    *post_norm.FIELDS,
    Field("model_dim", "(d_word_vec|d_model)"),
    Field("ffn_dim", "d_inner"),
    Field("num_encoder_layers", "n_layers"),
    Field("num_heads", "n_head"),
    Field("key_dim", "d_k"),
    Field("value_dim", "d_v"),
    Field("dropout_rate", "dropout", default=0.1),
    Field("max_positions", "n_position"),
    Field(
        "tying",
        "trg_emb_prj_weight_sharing & emb_src_trg_weight_sharing",
        {(output, embeddings): tying for (embeddings, output), tying in TYING.items()},
        default=False,
    ),
    Field("norm_epsilon", values=1e-6),
    Field("embedding_norm", values=True),
    Field("padding_mask", values=("both", "source")),
    Field("attention_bias", values=False),
    *any_value("embedding_scale", "logit_scale"),
)
# scale_emb_or_prj -> whether embeddings are multiplied, and logits divided, by the square root of the width.
_SCALES = {"emb": (True, False), "prj": (False, True), "none": (False, False)}
# Fields that a checkpoint does not contain.
_OF_TRAINING = (
    *("ffn_layer", "embedding_dropout_rate", "attention_dropout_rate", "ffn_dropout_rate", "initializer"),
    *("attention", "dtype", "remat", "scan_layers", "alignment"),
)
_SAME = (
    *("src_pad_idx", "trg_pad_idx", "d_word_vec", "d_model", "n_layers", "n_head", "d_k", "d_v"),
    *("dropout", "scale_emb_or_prj"),
)


def _write_checkpoint(weights: Weights, tensors: Tensors, folder: Path) -> None:
    arguments, path = _arguments(weights.config, weights.vocabs), folder / CHECKPOINT_NAME
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
    # The project counts epochs, this package counts steps; config.json has the step.
    options = {name: arguments[name] for name in _SAME} | {
        option: arguments[name] for option, name in _OPTIONS.items()
    }
    checkpoint = {
        "epoch": 0,
        "settings": argparse.Namespace(**options),
        "model": torch.load(path, weights_only=True),
    }
    save_value(checkpoint, path)


def _read_checkpoint(path: Path) -> tuple[Tensors, dict[str, Any]]:
    checkpoint = load_checkpoint(path)
    settings = attributes_of(checkpoint.get("settings"))
    if "model" not in checkpoint or not settings:
        raise UserError(f"{path} is not a checkpoint of that project: it must have `model` and `settings`")
    state = take_tensors(checkpoint["model"], path, what="model")
    return {name: np.asarray(array) for name, array in as_arrays(state).items()}, settings


def _make_model_config(
    base: ModelConfig, settings: dict[str, Any], tensors: Tensors, path: Path
) -> ModelConfig:
    """Return the ModelConfig that the settings and position tables of a file describe."""
    tables = [tensors[name] for name in TABLES if name in tensors and tensors[name].ndim == 3]
    options = {_OPTIONS.get(name, name): value for name, value in settings.items()}
    options["n_position"] = tables[0].shape[1] if tables else _SCRIPT_POSITIONS
    options.setdefault("d_word_vec", options.get("d_model"))
    network = read_network(_FIELDS, options, path)
    # Versions of the project without this option scale every shared projection, and never the embeddings.
    scale = settings.get("scale_emb_or_prj", "prj") if _shares_projection(network) else "none"
    if not isinstance(scale, str) or scale not in _SCALES:
        raise UserError(f"{path}: scale_emb_or_prj is {str(scale)[:80]!r}; supported: {', '.join(_SCALES)}")
    changes: dict[str, Any] = {name: getattr(base, name) for name in _OF_TRAINING}
    changes |= zip(("embedding_scale", "logit_scale"), _SCALES[scale], strict=True)
    return dataclasses.replace(network, num_decoder_layers=network.num_encoder_layers, **changes)


def _find_more_problems(config: Config) -> Iterator[str]:
    model = config.model
    yield from post_norm.find_unequal_stacks(model)
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


_NAMES = """
encoder/embedding_norm                                                encoder.layer_norm
decoder/embedding_norm                                                decoder.layer_norm
encoder/layers_{n}/self_attention/(query|key|value|output)            encoder.layer_stack.{n}.slf_attn.(w_qs|w_ks|w_vs|fc)
encoder/layers_{n}/self_attention_residual/norm                       encoder.layer_stack.{n}.slf_attn.layer_norm
decoder/layers_{n}/self_attention/(query|key|value|output)            decoder.layer_stack.{n}.slf_attn.(w_qs|w_ks|w_vs|fc)
decoder/layers_{n}/self_attention_residual/norm                       decoder.layer_stack.{n}.slf_attn.layer_norm
decoder/layers_{n}/cross_attention/(query|key|value|output)           decoder.layer_stack.{n}.enc_attn.(w_qs|w_ks|w_vs|fc)
decoder/layers_{n}/cross_attention_residual/norm                      decoder.layer_stack.{n}.enc_attn.layer_norm
encoder/layers_{n}/feedforward/(input|output)                         encoder.layer_stack.{n}.pos_ffn.w_(1|2)
encoder/layers_{n}/feedforward_residual/norm                          encoder.layer_stack.{n}.pos_ffn.layer_norm
decoder/layers_{n}/feedforward/(input|output)                         decoder.layer_stack.{n}.pos_ffn.w_(1|2)
decoder/layers_{n}/feedforward_residual/norm                          decoder.layer_stack.{n}.pos_ffn.layer_norm
output                                                                trg_word_prj
"""  # noqa: E501


def _rules(config: Config) -> list[Rule | Constant]:
    table = sinusoidal_table(config.model.longest_input or 0, config.model.model_dim)[None]
    return [
        *read_names("(source|target)_embedding (encoder.src|decoder.trg)_word_emb"),
        *(Constant(name, table, tolerance=TABLE_TOLERANCE) for name in TABLES),
        *read_names(_NAMES),
    ]


def _arguments(config: Config, vocabs: Vocabs) -> dict[str, Any]:
    model = config.model
    scales = (model.embedding_scale, model.logit_scale)
    return {
        "n_src_vocab": vocabs.source.size,
        "n_trg_vocab": vocabs.target.size,
        "src_pad_idx": vocabs.source.pad_id,
        "trg_pad_idx": vocabs.target.pad_id,
        **write_options(_FIELDS, model),
        "scale_emb_or_prj": next(name for name, values in _SCALES.items() if values == scales),
    }


def _run(state: State, arguments: dict[str, Any], batch: Batch) -> Tensor:
    source, target = tensor_of(batch.source), tensor_of(batch.target_in)
    root = arguments["d_model"] ** 0.5
    scale = arguments["scale_emb_or_prj"] if arguments["trg_emb_prj_weight_sharing"] else "none"

    def norm(name: str, x: Tensor) -> Tensor:
        return post_norm.norm(state, f"{name}.layer_norm", x, 1e-6)

    def embed(stack: str, name: str, ids: Tensor) -> Tensor:
        x = state[f"{stack}.{name}.weight"][ids] * (root if scale == "emb" else 1)
        return norm(stack, x + state[f"{stack}.position_enc.pos_table"][:, : ids.shape[1]])

    def attention(name: str, x: Tensor, memory: Tensor, blocked: Tensor) -> Tensor:
        query, key, value = (
            linear(state, f"{name}.w_{part}s", y) for part, y in (("q", x), ("k", memory), ("v", memory))
        )
        mixed = attend(query, key, value, blocked, heads=arguments["n_head"])
        return norm(name, linear(state, f"{name}.fc", mixed) + x)

    def feedforward(name: str, x: Tensor) -> Tensor:
        return norm(name, linear(state, f"{name}.w_2", linear(state, f"{name}.w_1", x).relu()) + x)

    source_blocked = (source == arguments["src_pad_idx"])[:, None, None]
    target_blocked = (target == arguments["trg_pad_idx"])[:, None, None] | post_norm.is_future(target)
    x, y = embed("encoder", "src_word_emb", source), embed("decoder", "trg_word_emb", target)
    count = arguments["n_layers"]
    encoder = [f"encoder.layer_stack.{{n}}.{name}" for name in ("slf_attn", "pos_ffn")]
    decoder = [f"decoder.layer_stack.{{n}}.{name}" for name in ("slf_attn", "enc_attn", "pos_ffn")]
    layers = post_norm.Layers((count, *encoder), (count, *decoder), attention, feedforward)
    output = layers.run(x, y, source_blocked, target_blocked)
    return linear(state, "trg_word_prj", output / root if scale == "prj" else output)


def _load_checkpoint(path: Path, overrides: ImportOverrides) -> Loaded | None:
    """Load model.chkpt: return its tensors, config and vocabularies; None if `path` is another file.

    Without a config in `overrides`, the config consists of the folder's config, if any, and the network that
    the file describes.
    """
    if path.suffix != ".chkpt" or not path.is_file():
        return None
    tensors, settings = _read_checkpoint(path)
    vocabs = formats.find_vocabs(path.parent, overrides)
    config = overrides.config
    if config is None:
        known = formats.OUR_KEY in formats.read_config_json(path.parent)
        base = (
            formats.find_config(path.parent, overrides) if known else formats.fit_vocabulary(Config(), vocabs)
        )
        config = dataclasses.replace(base, model=_make_model_config(base.model, settings, tensors, path))
    return tensors, config, vocabs


STATE_DICT = StateDictFormat(
    "aiayn",
    _FIELDS,
    _rules,
    _arguments,
    _run,
    find_more_problems=_find_more_problems,
    write_more=_write_checkpoint,
    load_other=_load_checkpoint,
)
FORMAT = STATE_DICT.make_format()
