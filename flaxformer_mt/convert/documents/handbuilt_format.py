"""Format handbuilt: state dict of document 000, the hand-built Transformer.

Contains the table of names and layouts, and the models that the format supports. The PyTorch class is in
handbuilt_module.py.
"""

from typing import Any

import torch

from flaxformer_mt.config import Config
from flaxformer_mt.convert.array_layouts import CONVOLUTION_BOTH, FLAT, HEADS_IN, HEADS_OUT, SAME, TRANSPOSED
from flaxformer_mt.convert.documents.handbuilt_module import HandbuiltTransformer
from flaxformer_mt.convert.format_interface import unsupported_fields
from flaxformer_mt.convert.name_table import TABLE_TOLERANCE, Constant, Rule, Shapes, rules_for
from flaxformer_mt.convert.torch.state_dicts import StateDictFormat, tensor_of
from flaxformer_mt.model.positions import sinusoidal_table
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import Vocabs

_ALLOWED: dict[str, tuple[Any, ...]] = {
    "model.architecture": ("encoder_decoder",),
    "model.decoder_self_attention": ("attention",),
    "model.norm_position": ("post",),
    "model.norm": ("layer",),
    "model.norm_epsilon": (1e-5,),
    "model.norm_affine": (True,),
    "model.final_norm": (None, False),
    "model.embedding_norm": (False,),
    "model.positions": ("sinusoidal",),
    "model.first_position": (1,),
    "model.embedding_scale": (False,),
    "model.logit_scale": (False,),
    "model.embedding_bias": (False,),
    "model.tying": ("none",),
    "model.padding_mask": ("both", "source"),
    "model.attention_bias": (True,),
    "model.ffn_bias": (True,),
    "model.output_bias": (False,),
    "model.activation": ("relu",),
}

_ATTENTION = [
    Rule("/query/kernel", ".W_Q.weight", HEADS_IN),
    Rule("/query/bias", ".W_Q.bias", FLAT),
    Rule("/key/kernel", ".W_K.weight", HEADS_IN),
    Rule("/key/bias", ".W_K.bias", FLAT),
    Rule("/value/kernel", ".W_V.weight", HEADS_IN),
    Rule("/value/bias", ".W_V.bias", FLAT),
    Rule("/output/kernel", ".linear.weight", HEADS_OUT),
    Rule("/output/bias", ".linear.bias"),
    Rule("_residual/norm/scale", ".layer_norm.weight"),
    Rule("_residual/norm/bias", ".layer_norm.bias"),
]


def _rules(config: Config, shapes: Shapes) -> list[Rule | Constant]:
    kind, layout = ("conv", CONVOLUTION_BOTH) if _is_convolution(config) else ("fc", TRANSPOSED)
    feedforward = [
        Rule("/input/kernel", f".{kind}1.weight", layout),
        Rule("/input/bias", f".{kind}1.bias"),
        Rule("/output/kernel", f".{kind}2.weight", layout),
        Rule("/output/bias", f".{kind}2.bias"),
        Rule("_residual/norm/scale", ".layer_norm.weight"),
        Rule("_residual/norm/bias", ".layer_norm.bias"),
    ]
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
    """Sinusoidal table of positions 1 to `length`; row 0 is stored but never read."""
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


def _run(module: torch.nn.Module, batch: Batch, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return module(tensor_of(batch.source), tensor_of(batch.target_in))[0]


STATE_DICT = StateDictFormat(
    name="handbuilt",
    problems=lambda config: unsupported_fields(config, _ALLOWED),
    rules=_rules,
    arguments=_arguments,
    make_module=HandbuiltTransformer,
    run=_run,
)
FORMAT = STATE_DICT.make_format()
