"""Format opennmt-py: imports a Transformer trained with OpenNMT-py from its checkpoint.

    NAME_step_N.pt             `model` and `generator`: the arrays; `vocab`: the subwords; `opt`: options
    NAME_step_N.safetensors    all arrays, if they are not in the checkpoint
    *.model                    SentencePiece models, if SentencePiece segments the text

Layers are pre-norm. Sources have no end symbol, so `model.source_end` is False. Reads checkpoints of versions
1 to 3, whose vocabularies are lists, or objects of torchtext that contain lists.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn import functional

from flaxformer_mt.convert.formats import Format, ImportOverrides, Weights, refuse_overrides
from flaxformer_mt.convert.name_table import expand_groups, read_names
from flaxformer_mt.convert.network_fields import TYING, Field, read_network
from flaxformer_mt.convert.sentencepiece_file import Specials
from flaxformer_mt.convert.stored_tensors import (
    Record,
    as_arrays,
    attributes_of,
    load_checkpoint,
    take_tensors,
)
from flaxformer_mt.convert.toolkits import toolkit_model as toolkit
from flaxformer_mt.errors import UserError

_NAME = "opennmt-py"
_UNK, _PAD, _BOS, _EOS = "<unk>", "<blank>", "<s>", "</s>"

_FIELDS = (
    Field("num_encoder_layers", "enc_layers"),
    Field("num_decoder_layers", "dec_layers"),
    Field("model_dim", "(enc_hid|dec_hid|src_word_vec|tgt_word_vec)_size"),
    Field("num_heads", "heads"),
    Field("ffn_dim", "transformer_ff"),
    Field(
        "activation",
        "pos_ffn_activation_fn",
        {"relu": "relu", "gelu": "gelu", "silu": "swiglu"},
        default="relu",
    ),
    Field("norm_epsilon", "norm_eps", default=1e-6),
    *toolkit.OPENNMT_FIELDS,
    Field("tying", "share_embeddings & share_decoder_embeddings", TYING, default=False),
    Field("dropout_rate", "dropout", default=0.1),
    Field("attention_dropout_rate", "attention_dropout", default=None),
)
# Options of networks that this package does not support.
_OTHERS: dict[str, tuple[Any, ...]] = {
    "model_type": ("text",),
    "model_task": ("seq2seq",),
    "encoder_type": ("transformer",),
    "decoder_type": ("transformer",),
    "self_attn_type": ("scaled-dot", "scaled-dot-flash"),
    "position_encoding": (True,),
    "layer_norm": ("standard",),
    "generator_function": ("softmax",),
    **dict.fromkeys(("copy_attn", "parallel_residual", "multiquery", "lora_embedding"), (False,)),
    **dict.fromkeys(("max_relative_positions", "relative_positions_buckets", "num_experts"), (0,)),
    **dict.fromkeys(("n_src_feats", "sliding_window"), (0,)),
    **dict.fromkeys(("lora_layers", "quant_layers"), ([],)),
}


def _read(path: Path, overrides: ImportOverrides) -> Weights:
    refuse_overrides(overrides, path)
    folder = path if path.is_dir() else path.parent
    if path.suffix == ".safetensors":
        path = path.with_suffix(".pt")
    file = toolkit.find_file(path, ("*.pt",), what="an OpenNMT-py model")
    checkpoint = load_checkpoint(file)
    options = _read_options(checkpoint, file)
    tensors = dict(_rename_old(_read_tensors(checkpoint, file)))
    source, target, start = _read_lists(checkpoint.get("vocab"), file)
    if _EOS not in source and _SOURCE_TABLE in tensors:
        # Versions 1 and 2 have no end symbol in a vocabulary that only sources use; its row is never read.
        table = tensors[_SOURCE_TABLE]
        source, tensors[_SOURCE_TABLE] = [*source, _EOS], functional.pad(table, (0, 0, 0, 1))
    lists = [_make_list(names, start, file) for names in (source, target)]
    vocabs = toolkit.read_vocabs(folder, lists, toolkit.Languages())
    first = "encoder.transformer.0."
    network = dataclasses.replace(
        read_network(_FIELDS, options, file, others=_OTHERS),
        attention_bias=f"{first}self_attn.linear_query.bias" in tensors,
        ffn_bias=f"{first}feed_forward.w_1.bias" in tensors,
        output_bias="generator.bias" in tensors,
    )
    rules = [
        *read_names(_GATED_NAMES if network.activation == "swiglu" else _PLAIN_NAMES),
        *read_names(_NAMES),
        *toolkit.position_constants(network, expand_groups(_TABLES), axis=1),
    ]
    return toolkit.make_weights(network, vocabs, as_arrays(tensors), rules, path=file, what=_NAME)


# ---- options ----


def _read_options(checkpoint: Mapping[str, Any], file: Path) -> dict[str, Any]:
    stored = attributes_of(checkpoint.get("opt"))
    if not stored:
        raise UserError(f"{file} has no options under opt; give a checkpoint of onmt_train")
    options = {name: value for name, value in stored.items() if value is not None}
    width = options.get("rnn_size") or options.get("hidden_size")  # in versions 1 and 2
    for name in ("enc_hid_size", "dec_hid_size"):
        if not options.get(name) or (options[name] == -1 and width):
            options[name] = width
    for name, other in (("src_word_vec_size", "enc_hid_size"), ("tgt_word_vec_size", "dec_hid_size")):
        options.setdefault(name, options[other])
    for name in ("dropout", "attention_dropout"):  # one number per stage of training
        if isinstance(options.get(name), list):
            options[name] = options[name][-1] if options[name] else None
    return options


# ---- arrays ----


def _read_tensors(checkpoint: Mapping[str, Any], file: Path) -> dict[str, torch.Tensor]:
    """Return the arrays under `model` and `generator`, or of the safetensors file next to the checkpoint."""
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
    """Yield the arrays with their names in version 3."""
    for name, tensor in tensors.items():
        before, _, end = name.rpartition(".")
        if end in ("a_2", "b_2") and ".layer_norm" in name:
            yield f"{before}.{'weight' if end == 'a_2' else 'bias'}", tensor
        else:
            yield name.replace("generator.0.", "generator."), tensor


_TABLES = "(encoder|decoder).embeddings.make_embedding.pe.pe"
_SOURCE_TABLE = "encoder.embeddings.make_embedding.emb_luts.0.weight"
_NAMES = """
(source|target)_embedding                                    (encoder|decoder).embeddings.make_embedding.emb_luts.0
output                                                       generator
output_bias                                                  generator.bias
encoder/layers_{n}/self_attention/(query|key|value|output)   encoder.transformer.{n}.self_attn.(linear_query|linear_keys|linear_values|final_linear)
encoder/layers_{n}/self_attention_residual/norm              encoder.transformer.{n}.layer_norm
decoder/layers_{n}/(self|cross)_attention/(query|key|value|output)  decoder.transformer_layers.{n}.(self|context)_attn.(linear_query|linear_keys|linear_values|final_linear)
decoder/layers_{n}/(self|cross)_attention_residual/norm      decoder.transformer_layers.{n}.layer_norm_(1|2)
(encoder|decoder)/layers_{n}/feedforward_residual/norm       (encoder.transformer|decoder.transformer_layers).{n}.feed_forward.layer_norm
(encoder|decoder)/final_norm                                 (encoder|decoder).layer_norm
"""  # noqa: E501
_PLAIN_NAMES = """
(encoder|decoder)/layers_{n}/feedforward/(input|output)      (encoder.transformer|decoder.transformer_layers).{n}.feed_forward.w_(1|2)
"""  # noqa: E501
_GATED_NAMES = """
(encoder|decoder)/layers_{n}/feedforward/(gate|output|input) (encoder.transformer|decoder.transformer_layers).{n}.feed_forward.w_(1|2|3)
"""  # noqa: E501


# ---- vocabulary ----


def _read_lists(vocab: Any, file: Path) -> tuple[list[str], list[str], str]:
    """Return the subwords of source and target, and the symbol that targets begin with."""
    sides: list[Any] = [None, None]
    start = _BOS
    if isinstance(vocab, dict):
        sides = [vocab.get("src"), vocab.get("tgt")]
        start = str(vocab.get("decoder_start_token") or _BOS)
        if vocab.get("src_feats"):
            raise UserError(f"{file}: vocab has src_feats; models with source features are not imported")
    elif isinstance(vocab, list):  # in version 0
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
    return toolkit.make_opennmt_list(names, Specials(_UNK, _EOS, _PAD, None if bos == _PAD else bos), _BOS)


FORMAT = Format(_NAME, read=_read)
