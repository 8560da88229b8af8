"""Format opennmt-py: a Transformer that OpenNMT-py has trained, from its checkpoint; import only.

    NAME_step_N.pt             `model` and `generator`: the arrays; `vocab`: the pieces; `opt`: options
    NAME_step_N.safetensors    the arrays of all, where they are not in the checkpoint
    *.model                    if SentencePiece segments the text

Layers are pre-norm. Sources have no end symbol, which `model.source_end` says. Reads the checkpoints of
versions 1 to 3, whose vocabularies are lists, or objects of torchtext with lists in them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn import functional

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.convert.formats import Format, ImportOverrides, Weights, find_tying, refuse_overrides
from flaxformer_mt.convert.name_table import (
    Constant,
    Rule,
    TableNames,
    attention_rules,
    embedding_rules,
    feedforward_rules,
)
from flaxformer_mt.convert.sentencepiece_file import Specials
from flaxformer_mt.convert.stored_tensors import as_arrays
from flaxformer_mt.convert.toolkits import toolkit_model as toolkit
from flaxformer_mt.convert.toolkits.pickled_checkpoint import (
    Record,
    attributes_of,
    load_checkpoint,
    take_tensors,
)
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.positions import sinusoidal_half_table, sinusoidal_table

_NAME = "opennmt-py"
# Rows of the stored table of positions.
_POSITIONS = 5000
_UNK, _PAD, _BOS, _EOS = "<unk>", "<blank>", "<s>", "</s>"
_FILLER = "averyunlikelytoken"

_DEFAULTS: dict[str, Any] = {
    "pos_ffn_activation_fn": "relu",
    "position_encoding_type": "SinusoidalInterleaved",
    "norm_eps": 1e-6,
    "dropout": 0.1,
    "share_embeddings": False,
    "share_decoder_embeddings": False,
}
_ACTIVATIONS: dict[str, Any] = {"relu": "relu", "gelu": "gelu", "silu": "swiglu"}
_POSITION_TYPES: dict[str, Any] = {
    "SinusoidalInterleaved": "sinusoidal",
    "SinusoidalConcat": "sinusoidal_halves",
}
_REQUIRED = ("enc_layers", "dec_layers", "heads", "transformer_ff", "enc_hid_size")
_NUMBERS: dict[str, tuple[type, float, float]] = {
    **dict.fromkeys(("enc_layers", "dec_layers"), toolkit.COUNT),
    **dict.fromkeys(("heads", "enc_hid_size", "dec_hid_size"), toolkit.WIDTH),
    "transformer_ff": toolkit.FFN_WIDTH,
    "norm_eps": toolkit.EPSILON,
}
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("text",),
    "model_task": ("seq2seq",),
    "encoder_type": ("transformer",),
    "decoder_type": ("transformer",),
    "self_attn_type": ("scaled-dot", "scaled-dot-flash"),
    "pos_ffn_activation_fn": tuple(_ACTIVATIONS),
    "position_encoding": (True,),
    "position_encoding_type": tuple(_POSITION_TYPES),
    "layer_norm": ("standard",),
    "generator_function": ("softmax",),
    **dict.fromkeys(("share_embeddings", "share_decoder_embeddings"), (True, False)),
    **dict.fromkeys(("copy_attn", "parallel_residual", "multiquery", "lora_embedding"), (False,)),
    **dict.fromkeys(("max_relative_positions", "relative_positions_buckets", "num_experts"), (0,)),
    **dict.fromkeys(("n_src_feats", "sliding_window"), (0,)),
    **dict.fromkeys(("lora_layers", "quant_layers"), ([],)),
}
_EQUAL = [
    ("enc_hid_size", "dec_hid_size"),
    ("src_word_vec_size", "enc_hid_size"),
    ("tgt_word_vec_size", "dec_hid_size"),
]


def _read(path: Path, overrides: ImportOverrides) -> Weights:
    folder = path if path.is_dir() else path.parent
    refuse_overrides(overrides, folder)
    if path.suffix == ".safetensors":
        path = path.with_suffix(".pt")
    file = toolkit.find_file(path, ("*.pt",), what="an OpenNMT-py model")
    checkpoint = load_checkpoint(file)
    options = _read_options(checkpoint, file)
    tensors = dict(_rename_old(_read_tensors(checkpoint, file)))
    source, target, start = _read_lists(checkpoint.get("vocab"), file)
    if _EOS not in source and _TABLES.source in tensors:
        # Of versions 1 and 2, which have no symbols in a vocabulary of sources alone. No network reads it.
        table = tensors[_TABLES.source]
        source, tensors[_TABLES.source] = [*source, _EOS], functional.pad(table, (0, 0, 0, 1))
    languages = toolkit.Languages()
    lists = [_make_list(names, start, file) for names in (source, target)]
    vocabs = toolkit.read_vocabs(folder, lists, languages)
    network = _make_network(options, tensors)
    return toolkit.make_weights(
        network,
        vocabs,
        as_arrays(tensors),
        _make_rules(network),
        path=file,
        what=_NAME,
        tied=toolkit.tied_names(network, _TABLES),
        languages=languages,
    )


# ---- options ----


def _read_options(checkpoint: Mapping[str, Any], file: Path) -> dict[str, Any]:
    stored = attributes_of(checkpoint.get("opt"))
    if not stored:
        raise UserError(f"{file} has no options under opt; give a checkpoint of onmt_train")
    options = _DEFAULTS | {name: value for name, value in stored.items() if value is not None}
    width = options.get("rnn_size") or options.get("hidden_size")  # of versions 1 and 2
    for name in ("enc_hid_size", "dec_hid_size"):
        if not options.get(name) or (options[name] == -1 and width):
            options[name] = width
    for name, other in (("src_word_vec_size", "enc_hid_size"), ("tgt_word_vec_size", "dec_hid_size")):
        options.setdefault(name, options[other])
    for name in ("dropout", "attention_dropout"):  # one number for each stage of training
        if isinstance(options.get(name), list):
            options[name] = options[name][-1] if options[name] else None
    toolkit.check_options(
        options,
        file,
        required=_REQUIRED,
        numbers=_NUMBERS | dict.fromkeys(("dropout", "attention_dropout"), (float, 0, 0.999)),
        supported=_SUPPORTED,
        equal=_EQUAL,
    )
    return options


def _make_network(options: Mapping[str, Any], tensors: Mapping[str, Any]) -> ModelConfig:
    first = "encoder.transformer.0."
    dropout, attention = options["dropout"], options.get("attention_dropout")
    return ModelConfig(
        num_encoder_layers=options["enc_layers"],
        num_decoder_layers=options["dec_layers"],
        model_dim=options["enc_hid_size"],
        num_heads=options["heads"],
        ffn_dim=options["transformer_ff"],
        activation=_ACTIVATIONS[options["pos_ffn_activation_fn"]],
        norm_epsilon=float(options["norm_eps"]),
        positions=_POSITION_TYPES[options["position_encoding_type"]],
        max_positions=_POSITIONS,
        attention_bias=f"{first}self_attn.linear_query.bias" in tensors,
        ffn_bias=f"{first}feed_forward.w_1.bias" in tensors,
        output_bias="generator.bias" in tensors,
        source_end=False,
        tying=find_tying(embeddings=options["share_embeddings"], output=options["share_decoder_embeddings"]),
        dropout_rate=float(dropout or 0),
        attention_dropout_rate=None if attention is None else float(attention),
    )


# ---- arrays ----


def _read_tensors(checkpoint: Mapping[str, Any], file: Path) -> dict[str, torch.Tensor]:
    """Return the arrays of both parts of a checkpoint, or those of the file of safetensors beside it."""
    if "model" in checkpoint:
        generator = take_tensors(checkpoint.get("generator"), file, what="generator")
        tensors = take_tensors(checkpoint["model"], file, what="model")
        return tensors | {f"generator.{name}": tensor for name, tensor in generator.items()}
    beside = file.with_suffix(".safetensors")
    try:
        return take_tensors(load_file(beside), beside, what="the file")
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file} has no arrays, and {beside} cannot be read: {error}; copy both files"
        ) from error


def _rename_old(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the arrays under the names of version 3."""
    for name, tensor in tensors.items():
        before, _, end = name.rpartition(".")
        if end in ("a_2", "b_2") and ".layer_norm" in name:
            yield f"{before}.{'weight' if end == 'a_2' else 'bias'}", tensor
        else:
            yield name.replace("generator.0.", "generator."), tensor


_TABLES = TableNames(
    "encoder.embeddings.make_embedding.emb_luts.0.weight",
    "decoder.embeddings.make_embedding.emb_luts.0.weight",
    "generator.weight",
)
_POSITION_TABLES = [f"{side}.embeddings.make_embedding.pe.pe" for side in ("encoder", "decoder")]
_FEEDFORWARD = ("feed_forward", "feed_forward.layer_norm")
_STACKS = {
    "encoder": toolkit.StackNames(
        "transformer", {"self_attention": ("self_attn", "layer_norm"), "feedforward": _FEEDFORWARD}
    ),
    "decoder": toolkit.StackNames(
        "transformer_layers",
        {
            "self_attention": ("self_attn", "layer_norm_1"),
            "cross_attention": ("context_attn", "layer_norm_2"),
            "feedforward": _FEEDFORWARD,
        },
    ),
}


def _make_rules(network: ModelConfig) -> list[Rule | Constant]:
    attention = attention_rules(("linear_query", "linear_keys", "linear_values"), "final_linear")
    inputs = {"gate": "w_1", "input": "w_3"} if network.activation == "swiglu" else {"input": "w_1"}
    make_table = sinusoidal_table if network.positions == "sinusoidal" else sinusoidal_half_table
    positions = make_table(_POSITIONS, network.model_dim)[:, None]
    return [
        *embedding_rules(network, _TABLES),
        Rule("output_bias", "generator.bias"),
        *toolkit.stack_rules(
            _STACKS, attention=attention, feedforward=feedforward_rules(inputs | {"output": "w_2"})
        ),
        *toolkit.table_constants(positions, _POSITION_TABLES),
    ]


# ---- vocabulary ----


def _read_lists(vocab: Any, file: Path) -> tuple[list[str], list[str], str]:
    """Return the pieces of both sides, and the piece that targets begin with."""
    sides: list[Any] = [None, None]
    start = _BOS
    if isinstance(vocab, dict):
        sides = [vocab.get("src"), vocab.get("tgt")]
        start = str(vocab.get("decoder_start_token") or _BOS)
        if vocab.get("src_feats"):
            raise UserError(f"{file}: vocab has src_feats; models with source features are not imported")
    elif isinstance(vocab, list):  # of version 0
        sides = [one[1] if isinstance(one, tuple | list) and len(one) == 2 else one for one in vocab[:2]]
    lists = [_find_list(side) for side in sides]
    if len(lists) != 2 or not all(lists):
        raise UserError(f"{file} has no lists of pieces under vocab; give a checkpoint of onmt_train")
    return lists[0], lists[1], start


def _find_list(side: Any) -> list[str]:
    if isinstance(side, Record):
        attributes = vars(side)
        fields = attributes.get("fields")
        if isinstance(fields, list) and len(fields) == 1 and isinstance(fields[0], tuple):
            return _find_list(fields[0][-1])
        return _find_list(attributes.get("vocab") if "vocab" in attributes else attributes.get("itos"))
    return list(side) if isinstance(side, list) and all(isinstance(piece, str) for piece in side) else []


def _make_list(names: list[str], start: str, file: Path) -> toolkit.PieceList:
    for symbol in (_UNK, _PAD, _EOS):
        if symbol not in names:
            raise UserError(f"{file}: the vocabulary lacks {symbol}; give a checkpoint of onmt_train")
    bos = start if start in names else next((one for one in (_BOS, _PAD) if one in names), None)
    unused = {name for name in names if name.startswith(_FILLER)} | ({_BOS} & set(names))
    return toolkit.PieceList(names, Specials(_UNK, _EOS, _PAD, None if bos == _PAD else bos), unused)


FORMAT = Format.read_only(_NAME, _read)
