"""Format eole: imports a Transformer trained with eole from the folder that eole saves.

    config.json               under `model`: options of the embeddings, the encoder and the decoder
    vocab.json                the subwords of both sides, and the special symbols
    model.00.safetensors      the arrays, in one file or several
    *.model                   SentencePiece models, if SentencePiece segments the text

Layers are pre-norm. Sources have no end symbol, so `model.source_end` is False.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.convert.formats import (
    CONFIG_NAME,
    Format,
    ImportOverrides,
    Weights,
    read_config_json,
    refuse_overrides,
)
from flaxformer_mt.convert.name_table import Constant, read_names
from flaxformer_mt.convert.network_fields import TYING, Field, read_network
from flaxformer_mt.convert.sentencepiece_file import Specials
from flaxformer_mt.convert.stored_tensors import attributes_of, open_safetensors
from flaxformer_mt.convert.toolkits import toolkit_model as toolkit
from flaxformer_mt.errors import UserError

_NAME = "eole"
_VOCAB_NAME = "vocab.json"
_SYMBOLS = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<blank>", "bos_token": "<s>"}

# activation_fn -> model.activation.
_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu-tanh": "gelu_tanh",
    "silu": "silu",
    "gated-silu": "swiglu",
    "gated-gelu-tanh": "geglu_tanh",
}
_FIELDS = (
    Field("num_encoder_layers", "encoder.layers"),
    Field("num_decoder_layers", "decoder.layers"),
    Field("model_dim", "(encoder|decoder).hidden_size", default=512),
    Field("num_heads", "(encoder|decoder).heads", default=8),
    Field("ffn_dim", "(encoder|decoder).transformer_ff", default=2048),
    Field("activation", "(encoder|decoder).mlp_activation_fn", _ACTIVATIONS, default="relu"),
    Field("norm_epsilon", "(encoder|decoder).norm_eps", default=1e-5),
    *toolkit.OPENNMT_FIELDS,
    Field("attention_bias", "(encoder|decoder).add_qkvbias", default=False),
    Field("ffn_bias", "(encoder|decoder).add_ffnbias", default=False),
    Field("output_bias", "generator_bias", default=True),
    Field("tying", "share_embeddings & share_decoder_embeddings", TYING, default=False),
)
# Options of networks that this package does not support: of both stacks, and of the rest.
_STACK_OTHERS: dict[str, tuple[Any, ...]] = {
    "encoder_type": ("transformer",),
    "decoder_type": ("transformer",),
    "encoder_layer_style": ("standard",),
    "layer_norm": ("standard", "standardFP32"),
    "final_encoder_layer_norm": (True,),
    **dict.fromkeys(("ffn_layernorm", "parallel_residual", "q_gating", "coverage_attn"), (False,)),
    **dict.fromkeys(("query_norm", "key_norm", "value_norm"), (False,)),
    **dict.fromkeys(("num_experts", "relative_positions_buckets", "sliding_window"), (0,)),
    **dict.fromkeys(("attn_scaling", "head_dim", "layer_types", "global_head_dim"), ()),
}
_OTHERS: dict[str, tuple[Any, ...]] = {
    "embedding_type": ("standard",),
    "generator_function": ("softmax",),
    **dict.fromkeys(("normalize", "embedding_layer_norm", "add_estimator", "left_pad"), (False,)),
}


def _read(path: Path, overrides: ImportOverrides) -> Weights:
    refuse_overrides(overrides, path)
    folder = path if path.is_dir() else path.parent
    config = folder / CONFIG_NAME
    network = _read_network(read_config_json(folder).get("model"), config)
    lists = _read_lists(read_config_json(folder, _VOCAB_NAME), folder / _VOCAB_NAME)
    vocabs = toolkit.read_vocabs(folder, lists, toolkit.Languages())
    files = sorted(folder.glob("model.[0-9][0-9].safetensors"))
    if not files:
        raise UserError(f"{folder} has no file model.00.safetensors; give the folder that eole has saved")
    gated = network.activation in ("swiglu", "geglu_tanh")
    rules = [
        *read_names(_NAMES),
        *read_names(_GATED_NAMES if gated else _PLAIN_NAMES),
        *_make_constants(network),
    ]
    return toolkit.make_weights(network, vocabs, open_safetensors(files), rules, path=files[0], what=_NAME)


# ---- options ----


def _read_network(model: Any, config: Path) -> ModelConfig:
    if not isinstance(model, dict):
        raise UserError(f"{config} has no entry model; give the folder that eole has saved")
    options = _present(model) | _present(attributes_of(model.get("embeddings")))
    others = dict(_OTHERS)
    for side in ("encoder", "decoder"):
        if not isinstance(model.get(side), dict):
            raise UserError(
                f"{config}: model.{side} is {str(model.get(side))[:40]}; it must be a Transformer"
            )
        stack = _present(model) | _present(model[side])
        bias = stack.get("add_qkvbias", False)
        supported = {
            "heads_kv": (stack.get("heads", 8),),
            "add_final_linear_bias": (bias,),
            "add_key_bias": (bias,),
        }
        options |= {f"{side}.{name}": value for name, value in stack.items()}
        others |= {f"{side}.{name}": values for name, values in (_STACK_OTHERS | supported).items()}
    width = options.get("encoder.hidden_size", 512)
    others |= dict.fromkeys(("word_vec_size", "src_word_vec_size", "tgt_word_vec_size"), (width,))
    return read_network(_FIELDS, options, config, others=others)


def _present(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are set; -1 means that an option is not set."""
    return {name: value for name, value in options.items() if value is not None and value != -1}


# ---- arrays ----


_NAMES = """
(source|target)_embedding                               (src|tgt)_emb.embeddings
output                                                  generator
output_bias                                             generator.bias
(encoder|decoder)/layers_{n}/self_attention/(query|key|value|output)  (encoder|decoder).transformer_layers.{n}.self_attn.(linear_query|linear_keys|linear_values|final_linear)
decoder/layers_{n}/cross_attention/(query|key|value|output)           decoder.transformer_layers.{n}.context_attn.(linear_query|linear_keys|linear_values|final_linear)
(encoder|decoder)/layers_{n}/self_attention_residual/norm             (encoder|decoder).transformer_layers.{n}.input_layernorm
decoder/layers_{n}/cross_attention_residual/norm                      decoder.transformer_layers.{n}.precontext_layernorm
(encoder|decoder)/layers_{n}/feedforward_residual/norm                (encoder|decoder).transformer_layers.{n}.post_attention_layernorm
(encoder|decoder)/final_norm                            (encoder|decoder).layer_norm
"""  # noqa: E501
_PLAIN_NAMES = """
(encoder|decoder)/layers_{n}/feedforward/(input|output) (encoder|decoder).transformer_layers.{n}.mlp.(gate_up|down)_proj
"""  # noqa: E501
_GATED_NAMES = """
(encoder|decoder)/layers_{n}/feedforward/(gate|input|output) (encoder|decoder).transformer_layers.{n}.mlp.(gate_up|up|down)_proj
"""  # noqa: E501


def _make_constants(network: ModelConfig) -> list[Constant]:
    factors = (f"decoder.transformer_layers.{n}.layer_scalar" for n in range(network.num_decoder_layers))
    return [
        *toolkit.position_constants(network, ("src_emb.pe.pe", "tgt_emb.pe.pe"), axis=1),
        *(Constant(name, np.ones(1, np.float32), optional=True) for name in factors),
    ]


# ---- vocabulary ----


def _read_lists(vocab: Mapping[str, Any], path: Path) -> list[toolkit.PieceList]:
    if not vocab:
        raise UserError(f"{path} does not exist or is empty; give the folder that eole has saved")
    stored = vocab.get("specials")
    symbols = _SYMBOLS | (stored if isinstance(stored, dict) else {})
    unk, eos, pad, bos = (str(symbols[name]) for name in _SYMBOLS)
    start = str(vocab.get("decoder_start_token") or bos)
    lists = []
    for side in ("src", "tgt"):
        names = vocab.get(side)
        if not isinstance(names, list) or not names or not all(isinstance(one, str) for one in names):
            raise UserError(f"{path}: {side} must be a list of pieces; give the folder that eole has saved")
        lists.append(toolkit.make_opennmt_list(names, Specials(unk, eos, pad, start), bos))
    return lists


FORMAT = Format(_NAME, read=_read)
