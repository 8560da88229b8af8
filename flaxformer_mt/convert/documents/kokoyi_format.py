"""Format kokoyi: state dict and embeddings of document 001, the kokoyi Transformer.

Contains the table of names and layouts, the models that the format supports, and embeddings.pt: the class
takes embedded tokens, so its state dict lacks the two embedding tables. The PyTorch class is in
kokoyi_module.py.
"""

from collections.abc import Iterator
from typing import Any

import torch

from flaxformer_mt.config import Config, ModelConfig
from flaxformer_mt.convert.array_layouts import CONVOLUTION_TO_LINEAR, FLAT_ROWS, HEAD_STACKED, TRANSPOSED
from flaxformer_mt.convert.documents.kokoyi_module import KokoyiTransformer
from flaxformer_mt.convert.format_interface import unsupported_fields
from flaxformer_mt.convert.name_table import Constant, Rule, Shapes, rules_for
from flaxformer_mt.convert.torch.state_dicts import STATE_NAME, StateDictFormat, tensor_of
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import Vocabs

EMBEDDINGS_NAME = "embeddings.pt"
_SOURCE, _TARGET = "src_embedding", "tgt_embedding"

_ALLOWED: dict[str, tuple[Any, ...]] = {
    "model.architecture": ("encoder_decoder",),
    "model.decoder_self_attention": ("attention",),
    "model.activation": ("relu",),
    "model.norm_position": ("post",),
    "model.norm": ("layer",),
    "model.norm_epsilon": (1e-5,),
    "model.norm_affine": (True,),
    "model.final_norm": (None, False),
    "model.embedding_norm": (False,),
    "model.positions": ("sinusoidal",),
    "model.first_position": (0,),
    "model.embedding_scale": (False,),
    "model.logit_scale": (False,),
    "model.embedding_bias": (False,),
    "model.tying": ("none",),
    "model.attention_bias": (False,),
    "model.ffn_bias": (True,),
    "model.output_bias": (False,),
}

_ATTENTION = [
    Rule("/query/kernel", ".Wq", HEAD_STACKED),
    Rule("/key/kernel", ".Wk", HEAD_STACKED),
    Rule("/value/kernel", ".Wv", HEAD_STACKED),
    Rule("/output/kernel", ".Wo", FLAT_ROWS),
]
_NORM = [Rule("_residual/norm/scale", ".weight"), Rule("_residual/norm/bias", ".bias")]


def _problems(config: Config) -> list[str]:
    return [*unsupported_fields(config, _ALLOWED), *_shape_problems(config.model)]


def _shape_problems(model: ModelConfig) -> Iterator[str]:
    if model.padding_mask != "none":
        yield (
            f"model.padding_mask is {model.padding_mask}; supported: none. The class does not mask padding, "
            "so its logits would depend on the padding of the batch, unlike those of the Flax model"
        )
    if model.num_encoder_layers != model.num_decoder_layers:
        yield (
            f"model.num_encoder_layers is {model.num_encoder_layers} and model.num_decoder_layers is "
            f"{model.num_decoder_layers}; they must be equal"
        )
    key_dim, value_dim = _head_sizes(model)
    if not key_dim == value_dim == model.ffn_dim:
        yield (
            f"model.key_dim is {key_dim}, model.value_dim is {value_dim} and model.ffn_dim is "
            f"{model.ffn_dim}; they must be equal: the class has one size for all three, hidden_dim"
        )


def _head_sizes(model: ModelConfig) -> tuple[int, int]:
    size = model.model_dim // model.num_heads
    return model.key_dim or size, model.value_dim or size


def _rules(config: Config, shapes: Shapes) -> list[Rule | Constant]:
    kernel = CONVOLUTION_TO_LINEAR if config.model.ffn_layer == "convolution" else TRANSPOSED
    feedforward = [
        Rule("/input/kernel", ".0.weight", kernel),
        Rule("/input/bias", ".0.bias"),
        Rule("/output/kernel", ".1.weight", kernel),
        Rule("/output/bias", ".1.bias"),
    ]
    encoder, decoder = "encoder/layers_{n}/", "decoder/layers_{n}/"
    attentions = [
        (encoder + "self_attention", "EncLayers.{n}.attn"),
        (decoder + "self_attention", "DecLayers.{n}.mask_attn"),
        (decoder + "cross_attention", "DecLayers.{n}.attn"),
    ]
    feedforwards = [
        (encoder + "feedforward", "EncLayers.{n}.ffn.Linears"),
        (decoder + "feedforward", "DecLayers.{n}.ffn.Linears"),
    ]
    norms = [
        (encoder + "self_attention", "EncLayers.{n}.norm1"),
        (encoder + "feedforward", "EncLayers.{n}.norm2"),
        (decoder + "self_attention", "DecLayers.{n}.norm1"),
        (decoder + "cross_attention", "DecLayers.{n}.norm2"),
        (decoder + "feedforward", "DecLayers.{n}.norm3"),
    ]
    return [
        Rule("source_embedding/embedding", _SOURCE),
        Rule("target_embedding/embedding", _TARGET),
        *rules_for(attentions, _ATTENTION),
        *rules_for(feedforwards, feedforward),
        *rules_for(norms, _NORM),
        Rule("output_kernel", "W"),
    ]


def _arguments(config: Config, vocabs: Vocabs) -> dict[str, Any]:
    model = config.model
    return {
        "L": model.num_encoder_layers,
        "num_heads": model.num_heads,
        "embed_dim": model.model_dim,
        "hidden_dim": model.ffn_dim,
        "out_dim": vocabs.target.size,
    }


def _run(module: torch.nn.Module, batch: Batch, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return module(tensors[_SOURCE][tensor_of(batch.source)], tensors[_TARGET][tensor_of(batch.target_in)])


def _file_of(name: str) -> str:
    return EMBEDDINGS_NAME if name in (_SOURCE, _TARGET) else STATE_NAME


STATE_DICT = StateDictFormat(
    name="kokoyi",
    problems=_problems,
    rules=_rules,
    arguments=_arguments,
    make_module=KokoyiTransformer,
    run=_run,
    file_of=_file_of,
)
FORMAT = STATE_DICT.make_format()
