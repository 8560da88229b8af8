"""Format fairseq: imports a Transformer trained with fairseq from its checkpoint and dictionaries.

    model.pt (or checkpoint_best.pt)    `model`: the arrays; `args`, or `cfg` with `model` and `task`: options
    dict.LANGUAGE.txt                   subword and count per line; <s>, <pad>, </s>, <unk> precede them
    sentencepiece.bpe.model             or another .model, if SentencePiece segments the text

Decoders start with </s>. Sinusoidal positions have all sines before all cosines and start at 2, as in M2M100.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.convert.foreign_files import read_text
from flaxformer_mt.convert.formats import Format, ImportOverrides, Weights, refuse_overrides
from flaxformer_mt.convert.name_table import expand_groups, read_names
from flaxformer_mt.convert.network_fields import LENGTH, NOT, RATE, Bounds, Field, read_network
from flaxformer_mt.convert.sentencepiece_file import Specials
from flaxformer_mt.convert.stored_tensors import as_arrays, attributes_of, load_checkpoint, take_tensors
from flaxformer_mt.convert.toolkits import toolkit_model as toolkit
from flaxformer_mt.errors import UserError

_NAME = "fairseq"
_FILES = ("model.pt", "checkpoint_best.pt", "checkpoint_last.pt", "*.pt")
_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
_PAD = 1

# Options of an old checkpoint may be absent.
_FIELDS = (
    Field("num_encoder_layers", "encoder_layers"),
    Field("num_decoder_layers", "decoder_layers"),
    Field("model_dim", "(encoder|decoder)_embed_dim"),
    Field("ffn_dim", "(encoder|decoder)_ffn_embed_dim"),
    Field("num_heads", "(encoder|decoder)_attention_heads"),
    Field(
        "activation",
        "activation_fn",
        {
            "relu": "relu",
            "gelu": "gelu",
            "gelu_accurate": "gelu_tanh",
            "gelu_fast": "gelu_tanh",
            "swish": "silu",
        },
        default="relu",
    ),
    Field("norm_position", "(encoder|decoder)_normalize_before", {True: "pre", False: "post"}, default=False),
    Field("embedding_norm", "layernorm_embedding", default=False),
    Field(
        "positions",
        "(encoder|decoder)_learned_pos",
        {True: "learned", False: "sinusoidal_halves"},
        default=False,
    ),
    Field("first_position", values=_PAD + 1),
    Field("embedding_scale", "no_scale_embedding", NOT, default=False),
    Field(
        "tying",
        "share_all_embeddings & share_decoder_input_output_embed",
        {(True, True): "all", (True, False): "all", (False, True): "target_output", (False, False): "none"},
        default=False,
    ),
    Field("dropout_rate", "dropout", default=0.1),
    Field("attention_dropout_rate", "attention_dropout", default=0.0),
    Field("ffn_dropout_rate", "activation_dropout", default=0.0),
)
_NUMBERS: dict[str, Bounds] = {
    **dict.fromkeys(("max_source_positions", "max_target_positions"), LENGTH),
    "relu_dropout": RATE,
}
_OFF = (
    *("adaptive_input", "char_inputs", "character_embeddings", "cross_self_attention"),
    *("merge_src_tgt_embed", "no_cross_attention", "no_decoder_final_norm"),
    *("no_token_positional_embeddings", "scale_attn", "scale_fc", "scale_heads", "scale_resids"),
    "tie_adaptive_weights",
)
_ABSENT = (
    "adaptive_softmax_cutoff",
    *expand_groups("(encoder|decoder)_(layers_to_keep|xformers_att_config)"),
)
# Options of networks that this package does not support.
_OTHERS: dict[str, tuple[Any, ...]] = {
    "task": ("translation",),
    **dict.fromkeys(_OFF, (False,)),
    **dict.fromkeys(("base_layers", "quant_noise_pq", "quant_noise_scalar"), (0,)),
    **dict.fromkeys(_ABSENT, ("",)),
}
# The names of a layer's norms, which are numbered in the first checkpoints.
_OLD_NORMS = {
    "encoder": ("self_attn_layer_norm", "final_layer_norm"),
    "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
}
# Suffixes of names that are not parameters: the version of the layout, and tables that fairseq computes.
_NO_PARAMETERS = (".version", ".embed_positions._float_tensor", ".embed_positions.weights")


def _read(path: Path, overrides: ImportOverrides) -> Weights:
    refuse_overrides(overrides, path)
    folder = path if path.is_dir() else path.parent
    file = toolkit.find_file(path, _FILES, what="a fairseq model")
    checkpoint = load_checkpoint(file)
    options = _read_options(checkpoint, file)
    state = take_tensors(checkpoint.get("model"), file, what="model")
    network = _read_network(options, state, file)
    languages = toolkit.languages_of(options.get(name) for name in ("source_lang", "target_lang"))
    lists = [_read_dictionary(folder, language) for language in languages]
    vocabs = toolkit.read_vocabs(folder, lists, languages)
    tensors, rules = as_arrays(_rename_old(state)), [*read_names(_NAMES), *read_names(STACK_NAMES)]
    return toolkit.make_weights(network, vocabs, tensors, rules, path=file, what=_NAME, languages=languages)


# ---- options ----


def _read_options(checkpoint: Mapping[str, Any], file: Path) -> dict[str, Any]:
    config = attributes_of(checkpoint.get("cfg"))
    stored = attributes_of(checkpoint.get("args")) or attributes_of(config.get("model"))
    if not stored:
        raise UserError(f"{file} has no options under args or cfg.model; give a checkpoint of fairseq-train")
    task = attributes_of(config.get("task"))
    stored |= {"task": stored.get("task") or task.get("_name")}
    stored |= {name: task[name] for name in ("source_lang", "target_lang") if task.get(name)}
    for side in ("encoder", "decoder", "quant_noise"):  # a config may group options
        stored |= {f"{side}_{name}": value for name, value in attributes_of(stored.get(side)).items()}
    positions = dict.fromkeys(("max_source_positions", "max_target_positions"), 1024)
    return positions | {name: value for name, value in stored.items() if value is not None}


def _read_network(options: dict[str, Any], state: Mapping[str, torch.Tensor], file: Path) -> ModelConfig:
    width = options.get("decoder_embed_dim")
    options = {"decoder_input_dim": width, "decoder_output_dim": width, **options}
    equal: list[tuple[str, ...]] = [("decoder_embed_dim", "decoder_input_dim", "decoder_output_dim")]
    if options.get("encoder_learned_pos"):  # both tables must have the same size
        equal.append(("max_source_positions", "max_target_positions"))
    network = read_network(_FIELDS, options, file, others=_OTHERS, numbers=_NUMBERS, equal=equal)
    return dataclasses.replace(
        network,
        final_norm=network.norm_position == "pre" and _has_final_norm(state, file),
        max_positions=max(options["max_source_positions"], options["max_target_positions"]),
        ffn_dropout_rate=network.ffn_dropout_rate or float(options.get("relu_dropout") or 0),
    )


# ---- arrays ----


# BART has the same names (huggingface/marian_pegasus.py).
STACK_NAMES = """
(encoder|decoder)/layers_{n}/self_attention/(query|key|value|output)    (encoder|decoder).layers.{n}.self_attn.(q|k|v|out)_proj
(encoder|decoder)/layers_{n}/cross_attention/(query|key|value|output)   (encoder|decoder).layers.{n}.encoder_attn.(q|k|v|out)_proj
(encoder|decoder)/layers_{n}/feedforward/(input|output)                 (encoder|decoder).layers.{n}.fc(1|2)
(encoder|decoder)/layers_{n}/(self_attention|cross_attention)_residual/norm  (encoder|decoder).layers.{n}.(self_attn|encoder_attn)_layer_norm
(encoder|decoder)/layers_{n}/feedforward_residual/norm                  (encoder|decoder).layers.{n}.final_layer_norm
(encoder|decoder)/(embedding_norm|final_norm)                           (encoder|decoder).(layernorm_embedding|layer_norm)
(encoder|decoder)/positions                                             (encoder|decoder).embed_positions
"""  # noqa: E501
_NAMES = """
(source|target)_embedding    (encoder|decoder).embed_tokens
output                       decoder.output_projection
"""


def _rename_old(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the parameters of a checkpoint, with old names replaced by the names of newer checkpoints."""
    return {
        name: tensor
        for old, stored in state.items()
        if not old.endswith(_NO_PARAMETERS)
        for name, tensor in _rename(old, stored)
    }


def _rename(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if name == "decoder.embed_out":
        yield "decoder.output_projection.weight", tensor
    elif ".in_proj_" in name and tensor.ndim and len(tensor) % 3 == 0:
        # One array for queries, keys and values.
        before, _, kind = name.partition("in_proj_")
        for projection, part in zip(("q", "k", "v"), tensor.chunk(3), strict=True):
            yield f"{before}{projection}_proj.{kind}", part
    elif ".layer_norms." in name:
        before, _, rest = name.partition("layer_norms.")
        number, _, kind = rest.partition(".")
        norms = _OLD_NORMS.get(name.partition(".")[0], ())
        known = number.isdecimal() and int(number) < len(norms)
        yield f"{before}{norms[int(number)]}.{kind}" if known else name, tensor
    else:
        yield name, tensor


def _has_final_norm(state: Mapping[str, torch.Tensor], file: Path) -> bool:
    """Return whether both stacks of a pre-norm model end in a norm, unlike in the first fairseq versions."""
    stored = "decoder.layer_norm.weight" in state
    version = state.get("decoder.version")
    number = 1.0 if version is None or version.numel() != 1 else float(version)
    if stored and number < 3:
        raise UserError(
            f"{file}: decoder.version is {number:g}, with which fairseq leaves out the last norms, "
            "but the file has them; load and save the model with a newer fairseq"
        )
    return stored


# ---- vocabulary ----


def _read_dictionary(folder: Path, language: str | None) -> toolkit.PieceList:
    names = [f"dict.{language}.txt"] * (language is not None) + ["dict.txt"]
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise UserError(
            f"{folder} has no {' and no '.join(names)}; copy the dictionaries from the folder of "
            "fairseq-preprocess"
        )
    pieces: list[str] = list(_SPECIALS)
    places = {name: number for number, name in enumerate(pieces)}
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line:
            continue
        piece, _, count = line.rstrip().removesuffix(" #fairseq:overwrite").rpartition(" ")
        if not piece or not count.isdecimal():
            raise UserError(f"line {number} of {path} is {line[:40]!r}; each line is a piece and its count")
        if piece in places and not line.rstrip().endswith(" #fairseq:overwrite"):
            raise UserError(
                f"line {number} of {path} repeats {piece!r:.40}; each piece needs an id of its own"
            )
        if piece in _SPECIALS:  # fairseq keeps the ids of its symbols; the line only takes up an id
            piece = f"<overwritten {len(pieces)}>"
        elif piece in places:  # the later line gets the name; the earlier entry keeps its id
            pieces[places[piece]] = f"<overwritten {places[piece]}>"
        places[piece] = len(pieces)
        pieces.append(piece)
    unused = {"<s>", *(piece for piece in pieces if piece.startswith(("madeupword", "<overwritten ")))}
    bos, pad, eos, unk = _SPECIALS
    return toolkit.PieceList(pieces, Specials(unk, eos, pad, bos=eos), unused)


FORMAT = Format(_NAME, read=_read)
