"""Format fairseq: a Transformer that fairseq has trained, from its checkpoint and dictionaries; import only.

    model.pt (or checkpoint_best.pt)    `model`: the arrays; `args`, or `cfg` with `model` and `task`: options
    dict.LANGUAGE.txt                   a piece and its count a line; <s>, <pad>, </s>, <unk> come before them
    sentencepiece.bpe.model             or another .model, if SentencePiece segments the text

Decoders start with </s>. Sinusoidal positions are sines before cosines, counted from 2, as in M2M100.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.convert.foreign_files import read_text
from flaxformer_mt.convert.formats import Format, ImportOverrides, Weights, refuse_overrides
from flaxformer_mt.convert.name_table import (
    NORM,
    Rule,
    TableNames,
    attention_rules,
    embedding_rules,
    feedforward_rules,
    rules_for,
)
from flaxformer_mt.convert.sentencepiece_file import Specials
from flaxformer_mt.convert.stored_tensors import as_arrays
from flaxformer_mt.convert.toolkits import toolkit_model as toolkit
from flaxformer_mt.convert.toolkits.pickled_checkpoint import attributes_of, load_checkpoint, take_tensors
from flaxformer_mt.errors import UserError

_NAME = "fairseq"
_FILES = ("model.pt", "checkpoint_best.pt", "checkpoint_last.pt", "*.pt")
_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
_PAD = 1

# Values of options that an old checkpoint may lack.
_DEFAULTS: dict[str, Any] = {
    "activation_fn": "relu",
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "max_source_positions": 1024,
    "max_target_positions": 1024,
    "encoder_normalize_before": False,
    "decoder_normalize_before": False,
    "encoder_learned_pos": False,
    "decoder_learned_pos": False,
    "share_all_embeddings": False,
    "share_decoder_input_output_embed": False,
    "layernorm_embedding": False,
    "no_scale_embedding": False,
}
_ACTIVATIONS: dict[str, Any] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "swish": "silu",
}
_REQUIRED = [
    f"{side}_{name}"
    for name in ("embed_dim", "layers", "ffn_embed_dim", "attention_heads")
    for side in ("encoder", "decoder")
]
_NUMBERS: dict[str, tuple[type, float, float]] = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), toolkit.COUNT),
    **dict.fromkeys(("encoder_embed_dim", "decoder_embed_dim"), toolkit.WIDTH),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), toolkit.WIDTH),
    **dict.fromkeys(("encoder_ffn_embed_dim", "decoder_ffn_embed_dim"), toolkit.FFN_WIDTH),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), toolkit.LENGTH),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "relu_dropout"), toolkit.RATE),
}
_FLAGS = [name for name, value in _DEFAULTS.items() if isinstance(value, bool)]
_OFF = (
    *("adaptive_input", "char_inputs", "character_embeddings", "cross_self_attention"),
    *("merge_src_tgt_embed", "no_cross_attention", "no_decoder_final_norm"),
    *("no_token_positional_embeddings", "scale_attn", "scale_fc", "scale_heads", "scale_resids"),
    "tie_adaptive_weights",
)
_NOUGHT = ("base_layers", "quant_noise_pq", "quant_noise_scalar")
# Options that are None unless the network has something that this package lacks.
_ABSENT = (
    "adaptive_softmax_cutoff",
    *(
        f"{side}_{name}"
        for side in ("encoder", "decoder")
        for name in ("layers_to_keep", "xformers_att_config")
    ),
)
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "activation_fn": tuple(_ACTIVATIONS),
    "task": ("translation",),
    **dict.fromkeys(_FLAGS, (True, False)),
    **dict.fromkeys(_OFF, (False,)),
    **dict.fromkeys(_NOUGHT, (0,)),
    **dict.fromkeys(_ABSENT, ("",)),
}
_ALIKE = ("embed_dim", "ffn_embed_dim", "attention_heads", "normalize_before", "learned_pos")
_EQUAL = [
    *((f"encoder_{name}", f"decoder_{name}") for name in _ALIKE),
    ("decoder_embed_dim", "decoder_input_dim"),
    ("decoder_embed_dim", "decoder_output_dim"),
]
# Numbers of the norms of a layer in the first checkpoints -> their names.
_OLD_NORMS = {
    "encoder": ("self_attn_layer_norm", "final_layer_norm"),
    "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
}
# Ends of names that are no parameters: the version of the layout, and tables that fairseq computes.
_NO_PARAMETERS = (".version", ".embed_positions._float_tensor", ".embed_positions.weights")


def _read(path: Path, overrides: ImportOverrides) -> Weights:
    folder = path if path.is_dir() else path.parent
    refuse_overrides(overrides, folder)
    file = toolkit.find_file(path, _FILES, what="a fairseq model")
    checkpoint = load_checkpoint(file)
    options = _read_options(checkpoint, file)
    state = take_tensors(checkpoint.get("model"), file, what="model")
    tensors = _rename_old(state)
    final_norm = _has_final_norm(state, options, file)
    languages = toolkit.languages_of(options.get(name) for name in ("source_lang", "target_lang"))
    lists = [_read_dictionary(folder, language) for language in languages]
    vocabs = toolkit.read_vocabs(folder, lists, languages)
    network = _make_network(options, final_norm=final_norm)
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
    config = attributes_of(checkpoint.get("cfg"))
    stored = attributes_of(checkpoint.get("args")) or attributes_of(config.get("model"))
    if not stored:
        raise UserError(f"{file} has no options under args or cfg.model; give a checkpoint of fairseq-train")
    task = attributes_of(config.get("task"))
    stored |= {"task": stored.get("task") or task.get("_name")}
    stored |= {name: task[name] for name in ("source_lang", "target_lang") if task.get(name)}
    for side in ("encoder", "decoder", "quant_noise"):  # of configs in groups
        stored |= {f"{side}_{name}": value for name, value in attributes_of(stored.get(side)).items()}
    options = _DEFAULTS | {name: value for name, value in stored.items() if value is not None}
    for name in ("decoder_input_dim", "decoder_output_dim"):
        options.setdefault(name, options.get("decoder_embed_dim"))
    equal = list(_EQUAL)
    if options["encoder_learned_pos"]:  # one table size
        equal.append(("max_source_positions", "max_target_positions"))
    toolkit.check_options(
        options, file, required=_REQUIRED, numbers=_NUMBERS, supported=_SUPPORTED, equal=equal
    )
    return options


def _make_network(options: Mapping[str, Any], *, final_norm: bool) -> ModelConfig:
    pre_norm, learned = bool(options["encoder_normalize_before"]), bool(options["encoder_learned_pos"])
    tying: Any = "target_output" if options["share_decoder_input_output_embed"] else "none"
    return ModelConfig(
        num_encoder_layers=options["encoder_layers"],
        num_decoder_layers=options["decoder_layers"],
        model_dim=options["encoder_embed_dim"],
        num_heads=options["encoder_attention_heads"],
        ffn_dim=options["encoder_ffn_embed_dim"],
        activation=_ACTIVATIONS[options["activation_fn"]],
        norm_position="pre" if pre_norm else "post",
        final_norm=final_norm,
        embedding_norm=bool(options["layernorm_embedding"]),
        positions="learned" if learned else "sinusoidal_halves",
        first_position=_PAD + 1,
        max_positions=max(options["max_source_positions"], options["max_target_positions"]),
        embedding_scale=not options["no_scale_embedding"],
        tying="all" if options["share_all_embeddings"] else tying,
        dropout_rate=float(options["dropout"]),
        attention_dropout_rate=float(options["attention_dropout"]),
        ffn_dropout_rate=float(options["activation_dropout"] or options.get("relu_dropout") or 0),
    )


# ---- arrays ----


_TABLES = TableNames(
    "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "decoder.output_projection.weight"
)
_STACKS = toolkit.alike_stacks(
    "layers",
    self_attention=("self_attn", "self_attn_layer_norm"),
    cross_attention=("encoder_attn", "encoder_attn_layer_norm"),
    feedforward=("", "final_layer_norm"),
)


def _make_rules(network: ModelConfig) -> list[Rule]:
    attention = attention_rules(("q_proj", "k_proj", "v_proj"), "out_proj")
    rules = embedding_rules(network, _TABLES)
    rules += toolkit.stack_rules(
        _STACKS, attention=attention, feedforward=feedforward_rules({"input": "fc1", "output": "fc2"})
    )
    for stack in _STACKS:
        rules += rules_for([(f"{stack}/embedding_norm", f"{stack}.layernorm_embedding")], NORM)
        rules.append(Rule(f"{stack}/positions/embedding", f"{stack}.embed_positions.weight"))
    return rules


def _rename_old(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the arrays of a checkpoint under the names of newer ones, without what is no parameter."""
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
        # Queries, keys and values in one array.
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


def _has_final_norm(state: Mapping[str, torch.Tensor], options: Mapping[str, Any], file: Path) -> bool:
    """Return whether both stacks end in a norm: in pre-norm models, but for those of the first versions."""
    if not options["encoder_normalize_before"]:
        return False
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
        if piece in places:  # later lines take the name, and the earlier entry keeps its id
            pieces[places[piece]] = f"<overwritten {places[piece]}>"
        places[piece] = len(pieces)
        pieces.append(piece)
    unused = {"<s>", *(piece for piece in pieces if piece.startswith(("madeupword", "<overwritten ")))}
    bos, pad, eos, unk = _SPECIALS
    return toolkit.PieceList(pieces, Specials(unk, eos, pad, bos=eos), unused)


FORMAT = Format.read_only(_NAME, _read)
