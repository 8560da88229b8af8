"""Format aiayn: state dict and checkpoint of document 003, attention-is-all-you-need-pytorch.

Contains the table of names and layouts, and the models that the format supports. The PyTorch class is in
aiayn_module.py; aiayn_checkpoint.py has model.chkpt, the file of that project's own scripts.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from flaxformer_mt.config import Config, ModelConfig
from flaxformer_mt.convert.array_layouts import CONVOLUTION_TO_LINEAR, HEADS_IN, HEADS_OUT, TRANSPOSED
from flaxformer_mt.convert.documents.aiayn_checkpoint import (
    CHECKPOINT_NAME,
    TABLES,
    is_checkpoint,
    make_model_config,
    read_checkpoint,
    write_checkpoint,
)
from flaxformer_mt.convert.documents.aiayn_module import AiaynTransformer
from flaxformer_mt.convert.foreign_limits import check_network
from flaxformer_mt.convert.format_interface import (
    OUR_KEY,
    Given,
    Outputs,
    Weights,
    find_config,
    find_vocabs,
    fit_vocabulary,
    read_config_json,
    unsupported_fields,
)
from flaxformer_mt.convert.name_table import TABLE_TOLERANCE, Constant, Rule, Shapes, Tensors, rules_for
from flaxformer_mt.convert.torch.state_dicts import StateDictFormat, tensor_of
from flaxformer_mt.model.positions import sinusoidal_table
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import Vocabs

_ALLOWED: dict[str, tuple[Any, ...]] = {
    "model.architecture": ("encoder_decoder",),
    "model.decoder_self_attention": ("attention",),
    "model.activation": ("relu",),
    "model.norm_position": ("post",),
    "model.norm": ("layer",),
    "model.norm_epsilon": (1e-6,),
    "model.norm_affine": (True,),
    "model.final_norm": (None, False),
    "model.embedding_norm": (True,),
    "model.positions": ("sinusoidal",),
    "model.first_position": (0,),
    "model.embedding_bias": (False,),
    "model.padding_mask": ("both", "source"),
    "model.attention_bias": (False,),
    "model.ffn_bias": (True,),
    "model.output_bias": (False,),
}

_ATTENTION = [
    Rule("/query/kernel", ".w_qs.weight", HEADS_IN),
    Rule("/key/kernel", ".w_ks.weight", HEADS_IN),
    Rule("/value/kernel", ".w_vs.weight", HEADS_IN),
    Rule("/output/kernel", ".fc.weight", HEADS_OUT),
    Rule("_residual/norm/scale", ".layer_norm.weight"),
    Rule("_residual/norm/bias", ".layer_norm.bias"),
]
_EMBEDDING_NORM = [
    Rule("embedding_norm/scale", "layer_norm.weight"),
    Rule("embedding_norm/bias", "layer_norm.bias"),
]


def _problems(config: Config) -> list[str]:
    return [*unsupported_fields(config, _ALLOWED), *_shape_problems(config.model)]


def _shape_problems(model: ModelConfig) -> Iterator[str]:
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
    kernel = CONVOLUTION_TO_LINEAR if model.ffn_layer == "convolution" else TRANSPOSED
    feedforward = [
        Rule("/input/kernel", ".w_1.weight", kernel),
        Rule("/input/bias", ".w_1.bias"),
        Rule("/output/kernel", ".w_2.weight", kernel),
        Rule("/output/bias", ".w_2.bias"),
        Rule("_residual/norm/scale", ".layer_norm.weight"),
        Rule("_residual/norm/bias", ".layer_norm.bias"),
    ]
    layers = [
        ("encoder/layers_{n}/", "encoder.layer_stack.{n}."),
        ("decoder/layers_{n}/", "decoder.layer_stack.{n}."),
    ]
    source, target, output = _matrices(model)
    table = sinusoidal_table(_positions(model), model.model_dim)[None]
    return [
        Rule(source, "encoder.src_word_emb.weight"),
        Rule(target, "decoder.trg_word_emb.weight"),
        *(Constant(name, table, tolerance=TABLE_TOLERANCE) for name in TABLES),
        *rules_for([("encoder/", "encoder."), ("decoder/", "decoder.")], _EMBEDDING_NORM),
        *rules_for([(flax + "self_attention", foreign + "slf_attn") for flax, foreign in layers], _ATTENTION),
        *rules_for(
            [(flax + "cross_attention", foreign + "enc_attn") for flax, foreign in layers], _ATTENTION
        ),
        *rules_for([(flax + "feedforward", foreign + "pos_ffn") for flax, foreign in layers], feedforward),
        output,
    ]


def _matrices(model: ModelConfig) -> tuple[str, str, Rule]:
    """Flax paths of both embeddings, and the rule of the projection; tied matrices are one Flax parameter."""
    name = "trg_word_prj.weight"
    source, target = "source_embedding/embedding", "target_embedding/embedding"
    if model.tying in ("embeddings", "all"):
        source = target = "shared_embedding/embedding"
    if _shares_projection(model):
        return source, target, Rule(target, name)
    return source, target, Rule("output_kernel", name, TRANSPOSED)


def _positions(model: ModelConfig) -> int:
    rows = model.longest_input
    assert rows is not None, "sinusoidal positions are a table of finite length"
    return rows


def _scale(model: ModelConfig) -> str:
    if model.embedding_scale:
        return "emb"
    return "prj" if model.logit_scale else "none"


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
        "scale_emb_or_prj": _scale(model),
    }


def _run(module: torch.nn.Module, batch: Batch, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    target = tensor_of(batch.target_in)
    return module(tensor_of(batch.source), target).unflatten(0, tuple(target.shape))


def _write_checkpoint(weights: Weights, tensors: Tensors, folder: Path) -> None:
    arguments = _arguments(weights.config, weights.vocabs)
    write_checkpoint(tensors, arguments, folder / CHECKPOINT_NAME)


def _read(path: Path, given: Given) -> Weights:
    if not is_checkpoint(path):
        return STATE_DICT.read(path, given)
    tensors, config, vocabs = _load_checkpoint(path, given)
    return STATE_DICT.weights_of(tensors, config, vocabs, origin=str(path))


def _open(path: Path, given: Given | None = None) -> Outputs:
    given = given or Given()
    if not is_checkpoint(path):
        return STATE_DICT.open(path, given)
    tensors, config, vocabs = _load_checkpoint(path, given)
    return STATE_DICT.outputs_of(tensors, _arguments(config, vocabs))


def _load_checkpoint(path: Path, given: Given) -> tuple[Tensors, Config, Vocabs]:
    """Return the file's tensors; the config is the given one, or that of the folder with the model of the
    file.
    """
    tensors, settings = read_checkpoint(path)
    vocabs = find_vocabs(path.parent, given)
    config = given.config
    if config is None:
        known = OUR_KEY in read_config_json(path.parent)
        base = find_config(path.parent, given) if known else fit_vocabulary(Config(), vocabs)
        config = dataclasses.replace(base, model=make_model_config(base.model, settings, tensors, path))
    check_network(config, path.parent)
    STATE_DICT.check_config(config)
    return tensors, config, vocabs


STATE_DICT = StateDictFormat(
    name="aiayn",
    problems=_problems,
    rules=_rules,
    arguments=_arguments,
    make_module=AiaynTransformer,
    run=_run,
    write_more=_write_checkpoint,
)
FORMAT = dataclasses.replace(STATE_DICT.make_format(), read=_read, open=_open)
