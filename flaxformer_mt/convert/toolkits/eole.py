"""Format eole: a Transformer that eole has trained, from the folder that it saves; import only.

    config.json               under `model`: options of the embeddings, the encoder and the decoder
    vocab.json                the pieces of both sides, and the special symbols
    model.00.safetensors      the arrays, in one file or several
    *.model                   if SentencePiece segments the text

Layers are pre-norm. Sources have no end symbol, which `model.source_end` says.
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
    find_tying,
    read_config_json,
    refuse_overrides,
)
from flaxformer_mt.convert.name_table import (
    Constant,
    Rule,
    TableNames,
    attention_rules,
    embedding_rules,
    feedforward_rules,
)
from flaxformer_mt.convert.sentencepiece_file import Specials
from flaxformer_mt.convert.stored_tensors import open_safetensors
from flaxformer_mt.convert.toolkits import toolkit_model as toolkit
from flaxformer_mt.convert.toolkits.pickled_checkpoint import attributes_of
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.positions import sinusoidal_half_table, sinusoidal_table

_NAME = "eole"
_VOCAB_NAME = "vocab.json"
# Rows of the stored table of positions.
_POSITIONS = 5000
_SYMBOLS = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<blank>", "bos_token": "<s>"}
_FILLER = "averyunlikelytoken"

_ACTIVATIONS: dict[str, Any] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu-tanh": "gelu_tanh",
    "silu": "silu",
    "gated-silu": "swiglu",
    "gated-gelu-tanh": "geglu_tanh",
}
_POSITION_TYPES: dict[str, Any] = {
    "SinusoidalInterleaved": "sinusoidal",
    "SinusoidalConcat": "sinusoidal_halves",
}
# Options of both stacks with their defaults; the network has one value for both.
_STACK_DEFAULTS: dict[str, Any] = {
    "heads": 8,
    "hidden_size": 512,
    "transformer_ff": 2048,
    "mlp_activation_fn": "relu",
    "norm_eps": 1e-5,
    "add_qkvbias": False,
    "add_ffnbias": False,
}
_STACK_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "encoder_type": ("transformer",),
    "decoder_type": ("transformer",),
    "encoder_layer_style": ("standard",),
    "layer_norm": ("standard", "standardFP32"),
    "mlp_activation_fn": tuple(_ACTIVATIONS),
    "final_encoder_layer_norm": (True,),
    **dict.fromkeys(("add_qkvbias", "add_ffnbias"), (True, False)),
    **dict.fromkeys(("ffn_layernorm", "parallel_residual", "q_gating", "coverage_attn"), (False,)),
    **dict.fromkeys(("query_norm", "key_norm", "value_norm"), (False,)),
    **dict.fromkeys(("num_experts", "relative_positions_buckets", "sliding_window"), (0,)),
}
# Options that are None unless the network has something that this package lacks.
_STACK_ABSENT = ("attn_scaling", "head_dim", "layer_types", "global_head_dim")
_EMBEDDING_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "embedding_type": ("standard",),
    "position_encoding_type": tuple(_POSITION_TYPES),
    **dict.fromkeys(("normalize", "embedding_layer_norm"), (False,)),
}
_MODEL_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "generator_function": ("softmax",),
    **dict.fromkeys(("generator_bias", "share_embeddings", "share_decoder_embeddings"), (True, False)),
    **dict.fromkeys(("add_estimator", "left_pad"), (False,)),
}


def _read(path: Path, overrides: ImportOverrides) -> Weights:
    folder = path if path.is_dir() else path.parent
    refuse_overrides(overrides, folder)
    config = folder / CONFIG_NAME
    options = _read_options(read_config_json(folder).get("model"), config)
    lists = _read_lists(read_config_json(folder, _VOCAB_NAME), folder / _VOCAB_NAME)
    network = _make_network(options)
    vocabs = toolkit.read_vocabs(folder, lists, toolkit.Languages())
    files = sorted(folder.glob("model.[0-9][0-9].safetensors"))
    if not files:
        raise UserError(f"{folder} has no file model.00.safetensors; give the folder that eole has saved")
    return toolkit.make_weights(
        network,
        vocabs,
        open_safetensors(files),
        _make_rules(network),
        path=files[0],
        what=_NAME,
        tied=toolkit.tied_names(network, _TABLES),
    )


# ---- options ----


def _read_options(model: Any, config: Path) -> dict[str, Any]:
    if not isinstance(model, dict):
        raise UserError(f"{config} has no entry model; give the folder that eole has saved")
    stacks = {}
    for side in ("encoder", "decoder"):
        if not isinstance(model.get(side), dict):
            raise UserError(
                f"{config}: model.{side} is {str(model.get(side))[:40]}; it must be a Transformer"
            )
        stack = _STACK_DEFAULTS | _present(model) | _present(model[side])
        stack.setdefault("add_final_linear_bias", stack["add_qkvbias"])
        numbers: dict[str, tuple[type, float, float]] = {
            "layers": toolkit.COUNT,
            **dict.fromkeys(("heads", "hidden_size", "heads_kv"), toolkit.WIDTH),
            "transformer_ff": toolkit.FFN_WIDTH,
            "norm_eps": toolkit.EPSILON,
        }
        supported = _STACK_SUPPORTED | dict.fromkeys(_STACK_ABSENT, ()) | {"heads_kv": (stack["heads"],)}
        supported |= {name: (stack["add_qkvbias"],) for name in ("add_final_linear_bias", "add_key_bias")}
        toolkit.check_options(stack, config, required=["layers"], numbers=numbers, supported=supported)
        stacks[side] = stack
    merged = {f"{side}.{name}": stack[name] for side, stack in stacks.items() for name in _STACK_DEFAULTS}
    pairs = [(f"encoder.{name}", f"decoder.{name}") for name in _STACK_DEFAULTS]
    toolkit.check_options(merged, config, equal=pairs)
    embeddings = attributes_of(model.get("embeddings"))
    embeddings = {"position_encoding_type": "SinusoidalInterleaved"} | _present(embeddings)
    width = stacks["encoder"]["hidden_size"]
    widths = dict.fromkeys(("word_vec_size", "src_word_vec_size", "tgt_word_vec_size"), (width,))
    toolkit.check_options(embeddings, config, supported=_EMBEDDING_SUPPORTED | widths)
    toolkit.check_options(model, config, supported=_MODEL_SUPPORTED)
    return {
        **stacks["encoder"],
        "encoder_layers": stacks["encoder"]["layers"],
        "decoder_layers": stacks["decoder"]["layers"],
        "positions": embeddings["position_encoding_type"],
        "generator_bias": model.get("generator_bias", True),
        "share_embeddings": model.get("share_embeddings", False),
        "share_decoder_embeddings": model.get("share_decoder_embeddings", False),
    }


def _present(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are set; -1 stands for none at the model's level."""
    return {name: value for name, value in options.items() if value is not None and value != -1}


def _make_network(options: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(
        num_encoder_layers=options["encoder_layers"],
        num_decoder_layers=options["decoder_layers"],
        model_dim=options["hidden_size"],
        num_heads=options["heads"],
        ffn_dim=options["transformer_ff"],
        activation=_ACTIVATIONS[options["mlp_activation_fn"]],
        norm_epsilon=float(options["norm_eps"]),
        positions=_POSITION_TYPES[options["positions"]],
        max_positions=_POSITIONS,
        attention_bias=bool(options["add_qkvbias"]),
        ffn_bias=bool(options["add_ffnbias"]),
        output_bias=bool(options["generator_bias"]),
        source_end=False,
        tying=find_tying(embeddings=options["share_embeddings"], output=options["share_decoder_embeddings"]),
    )


# ---- arrays ----


_TABLES = TableNames("src_emb.embeddings.weight", "tgt_emb.embeddings.weight", "generator.weight")
_STACKS = toolkit.alike_stacks(
    "transformer_layers",
    self_attention=("self_attn", "input_layernorm"),
    cross_attention=("context_attn", "precontext_layernorm"),
    feedforward=("mlp", "post_attention_layernorm"),
)


def _make_rules(network: ModelConfig) -> list[Rule | Constant]:
    attention = attention_rules(("linear_query", "linear_keys", "linear_values"), "final_linear")
    inputs = {"input": "gate_up_proj"}
    if network.activation in ("swiglu", "geglu_tanh"):
        inputs = {"gate": "gate_up_proj", "input": "up_proj"}
    make_table = sinusoidal_table if network.positions == "sinusoidal" else sinusoidal_half_table
    positions = make_table(_POSITIONS, network.model_dim)[:, None]
    factors = (f"decoder.transformer_layers.{n}.layer_scalar" for n in range(network.num_decoder_layers))
    return [
        *embedding_rules(network, _TABLES),
        Rule("output_bias", "generator.bias"),
        *toolkit.stack_rules(
            _STACKS, attention=attention, feedforward=feedforward_rules(inputs | {"output": "down_proj"})
        ),
        *toolkit.table_constants(positions, ("src_emb.pe.pe", "tgt_emb.pe.pe")),
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
        unused = {name for name in names if name.startswith(_FILLER)} | ({bos} & set(names))
        lists.append(toolkit.PieceList(names, Specials(unk, eos, pad, start), unused))
    return lists


FORMAT = Format.read_only(_NAME, _read)
