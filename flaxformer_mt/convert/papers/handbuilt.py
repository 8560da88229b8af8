"""Format handbuilt: the state dict and the computation of benchmarks/originals/handbuilt.py."""

from typing import Any

from torch import Tensor

from flaxformer_mt.config import Config
from flaxformer_mt.convert.name_table import (
    CONVOLUTION_BOTH,
    LINEAR_LAYERS,
    TABLE_TOLERANCE,
    Constant,
    Rule,
    read_names,
)
from flaxformer_mt.convert.network_fields import Field, write_options
from flaxformer_mt.convert.papers import post_norm
from flaxformer_mt.convert.papers.post_norm import State, attend, linear, norm
from flaxformer_mt.convert.torch.state_dicts import StateDictFormat, tensor_of
from flaxformer_mt.model.positions import sinusoidal_table
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import Vocabs

_FIELDS = (
    *post_norm.FIELDS,
    Field("model_dim", "d_embedding"),
    Field("num_heads", "n_heads"),
    Field("key_dim", "d_k"),
    Field("value_dim", "d_v"),
    Field("ffn_dim", "d_ff"),
    Field("num_encoder_layers", "encoder_n_layers"),
    Field("num_decoder_layers", "decoder_n_layers"),
    Field("ffn_layer", "ffn", {"conv": "convolution", "fc": "dense"}),
    Field("first_position", values=1),
    Field("embedding_scale", values=False),
    Field("tying", values="none"),
    Field("padding_mask", values=("both", "source")),
)
_TABLES = """
(source|target)_embedding    (encoder.src|decoder.tgt)_emb
"""
_LAYERS = """
encoder/layers_{n}/self_attention/(query|key|value|output)  encoder.layers.{n}.enc_self_attn.(W_Q|W_K|W_V|linear)
encoder/layers_{n}/self_attention_residual/norm             encoder.layers.{n}.enc_self_attn.layer_norm
decoder/layers_{n}/self_attention/(query|key|value|output)  decoder.layers.{n}.dec_self_attn.(W_Q|W_K|W_V|linear)
decoder/layers_{n}/self_attention_residual/norm             decoder.layers.{n}.dec_self_attn.layer_norm
decoder/layers_{n}/cross_attention/(query|key|value|output) decoder.layers.{n}.dec_enc_attn.(W_Q|W_K|W_V|linear)
decoder/layers_{n}/cross_attention_residual/norm            decoder.layers.{n}.dec_enc_attn.layer_norm
encoder/layers_{n}/feedforward/(input|output)               encoder.layers.{n}.pos_ffn.KIND(1|2)
encoder/layers_{n}/feedforward_residual/norm                encoder.layers.{n}.pos_ffn.layer_norm
decoder/layers_{n}/feedforward/(input|output)               decoder.layers.{n}.pos_ffn.KIND(1|2)
decoder/layers_{n}/feedforward_residual/norm                decoder.layers.{n}.pos_ffn.layer_norm
output                                                      projection
"""  # noqa: E501


def _rules(config: Config) -> list[Rule | Constant]:
    kind, width = _kind(config), config.model.model_dim
    lengths = {"encoder": config.data.max_source_length, "decoder": config.data.max_target_length}
    tables = [
        Constant(f"{stack}.pos_emb.weight", sinusoidal_table(length + 1, width), tolerance=TABLE_TOLERANCE)
        for stack, length in lengths.items()
    ]
    layouts = {"feedforward/(input|output)/kernel": CONVOLUTION_BOTH} if kind == "conv" else {}
    layers = read_names(_LAYERS.replace("KIND", kind), layouts=layouts | LINEAR_LAYERS)
    return [*read_names(_TABLES), *tables, *layers]


def _kind(config: Config) -> str:
    return "conv" if config.model.ffn_layer == "convolution" else "fc"


def _arguments(config: Config, vocabs: Vocabs) -> dict[str, Any]:
    return {
        "src_vocab": vocabs.source.size,
        "tgt_vocab": vocabs.target.size,
        "src_len": config.data.max_source_length,
        "tgt_len": config.data.max_target_length,
        **write_options(_FIELDS, config.model),
        "src_pad": vocabs.source.pad_id,
        "tgt_pad": vocabs.target.pad_id,
    }


def _run(state: State, arguments: dict[str, Any], batch: Batch) -> Tensor:
    source, target = tensor_of(batch.source), tensor_of(batch.target_in)

    def embed(stack: str, name: str, ids: Tensor) -> Tensor:
        positions = state[f"{stack}.pos_emb.weight"][1 : ids.shape[1] + 1]
        return state[f"{stack}.{name}.weight"][ids] + positions

    def attention(name: str, x: Tensor, memory: Tensor, blocked: Tensor) -> Tensor:
        query, key, value = (
            linear(state, f"{name}.W_{part}", y) for part, y in (("Q", x), ("K", memory), ("V", memory))
        )
        mixed = linear(
            state, f"{name}.linear", attend(query, key, value, blocked, heads=arguments["n_heads"])
        )
        return norm(state, f"{name}.layer_norm", mixed + x)

    def feedforward(name: str, x: Tensor) -> Tensor:
        inner = linear(state, f"{name}.{arguments['ffn']}1", x).relu()
        return norm(state, f"{name}.layer_norm", linear(state, f"{name}.{arguments['ffn']}2", inner) + x)

    source_blocked = (source == arguments["src_pad"])[:, None, None]
    target_blocked = (target == arguments["tgt_pad"])[:, None, None] | post_norm.is_future(target)
    x, y = embed("encoder", "src_emb", source), embed("decoder", "tgt_emb", target)
    names = [f"decoder.layers.{{n}}.{name}" for name in ("dec_self_attn", "dec_enc_attn", "pos_ffn")]
    layers = post_norm.Layers(
        (arguments["encoder_n_layers"], "encoder.layers.{n}.enc_self_attn", "encoder.layers.{n}.pos_ffn"),
        (arguments["decoder_n_layers"], *names),
        attention,
        feedforward,
    )
    return linear(state, "projection", layers.run(x, y, source_blocked, target_blocked))


STATE_DICT = StateDictFormat("handbuilt", _FIELDS, _rules, _arguments, _run)
FORMAT = STATE_DICT.make_format()
