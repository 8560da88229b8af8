"""Format joeynmt: a Transformer that Joey NMT has trained, from its model directory; import only.

config.yaml                        options, languages, special symbols
best.ckpt (or latest.ckpt)         under `model_state`: the arrays
src_vocab.txt, trg_vocab.txt       a piece a line, in the order of ids
*.model                            if SentencePiece segments the text
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.convert.foreign_files import read_text
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
from flaxformer_mt.convert.toolkits.pickled_checkpoint import attributes_of, load_checkpoint, take_tensors
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.model.positions import sinusoidal_table

_NAME = "joeynmt"
_FILES = ("best.ckpt", "latest.ckpt", "*.ckpt")
# Rows of the stored table of positions.
_POSITIONS = 5000
_SIDES = {"src": "encoder", "trg": "decoder"}

_ACTIVATIONS: dict[str, Any] = {"relu": "relu", "gelu": "gelu", "swish": "silu"}
_NUMBERS: dict[str, tuple[type, float, float]] = {
    "num_layers": toolkit.COUNT,
    **dict.fromkeys(("num_heads", "hidden_size"), toolkit.WIDTH),
    "ff_size": toolkit.FFN_WIDTH,
    **dict.fromkeys(("dropout", "emb_dropout"), toolkit.RATE),
}
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "type": ("transformer",),
    "layer_norm": ("pre", "post"),
    "activation": tuple(_ACTIVATIONS),
    "alpha": (1,),
    "scale": (True, False),
}
_EQUAL = ("num_heads", "hidden_size", "ff_size", "layer_norm", "activation", "dropout", "scale")


def _read(path: Path, overrides: ImportOverrides) -> Weights:
    folder = path if path.is_dir() else path.parent
    refuse_overrides(overrides, folder)
    config_file = folder / "config.yaml"
    config = toolkit.read_yaml(config_file)
    file = toolkit.find_file(path, _FILES, what="a model of Joey NMT")
    state = take_tensors(load_checkpoint(file).get("model_state"), file, what="model_state")
    sides = _read_sides(config.get("model"), state, config_file)
    data = attributes_of(config.get("data"))
    languages = toolkit.languages_of(
        attributes_of(data.get(side)).get("lang") or data.get(side) for side in _SIDES
    )
    _warn_of_text(data, folder)
    lists = [_read_list(folder / f"{side}_vocab.txt", data.get("special_symbols")) for side in _SIDES]
    vocabs = toolkit.read_vocabs(folder, lists, languages)
    network = _make_network(sides, config["model"])
    return toolkit.make_weights(
        network,
        vocabs,
        as_arrays(state),
        _make_rules(network),
        path=file,
        what=_NAME,
        tied=toolkit.tied_names(network, _TABLES),
        languages=languages,
    )


# ---- options ----


def _read_sides(model: Any, state: Mapping[str, Any], file: Path) -> dict[str, dict[str, Any]]:
    if not isinstance(model, dict):
        raise UserError(f"{file} has no section model; give the model_dir of Joey NMT")
    flags = dict.fromkeys(("tied_embeddings", "tied_softmax"), (True, False))
    toolkit.check_options(model, file, supported=flags)
    sides = {}
    for side in ("encoder", "decoder"):
        options = model.get(side)
        if not isinstance(options, dict):
            raise UserError(f"{file} has no section model.{side}; give the model_dir of Joey NMT")
        embeddings = attributes_of(options.get("embeddings"))
        options = {"activation": "relu", "dropout": 0.0, "scale": embeddings.get("scale", False)} | options
        options["emb_dropout"] = embeddings.get("dropout", options["dropout"])
        if options.get("layer_norm") is None and f"{side}.layer_norm.weight" in state:
            options["layer_norm"] = "pre"  # of version 1, which has no other
        width = {"embedding_dim": embeddings.get("embedding_dim")}
        required = ("num_layers", "num_heads", "hidden_size", "ff_size", "layer_norm")
        toolkit.check_options(options, file, required=required, numbers=_NUMBERS, supported=_SUPPORTED)
        toolkit.check_options(width, file, supported={"embedding_dim": (options["hidden_size"],)})
        sides[side] = options
    merged = {f"{side}.{name}": options.get(name) for side, options in sides.items() for name in _EQUAL}
    pairs = [(f"encoder.{name}", f"decoder.{name}") for name in _EQUAL]
    toolkit.check_options(merged, file, equal=pairs)
    return sides


def _make_network(sides: Mapping[str, Mapping[str, Any]], model: Mapping[str, Any]) -> ModelConfig:
    encoder, decoder = sides["encoder"], sides["decoder"]
    return ModelConfig(
        num_encoder_layers=encoder["num_layers"],
        num_decoder_layers=decoder["num_layers"],
        model_dim=encoder["hidden_size"],
        num_heads=encoder["num_heads"],
        ffn_dim=encoder["ff_size"],
        activation=_ACTIVATIONS[encoder["activation"]],
        norm_position=encoder["layer_norm"],
        norm_epsilon=1e-6,
        max_positions=_POSITIONS,
        embedding_scale=bool(encoder["scale"]),
        tying=find_tying(embeddings=model.get("tied_embeddings"), output=model.get("tied_softmax")),
        dropout_rate=float(encoder["dropout"]),
        embedding_dropout_rate=float(encoder["emb_dropout"]),
    )


def _warn_of_text(data: Mapping[str, Any], folder: Path) -> None:
    lost = []
    for side in _SIDES:
        section = attributes_of(data.get(side))
        tokenizer = attributes_of(section.get("tokenizer_cfg"))
        if section.get("lowercase"):
            lost.append(f"data.{side}.lowercase is True")
        if (pretokenizer := tokenizer.get("pretokenizer", "none")) not in (None, "none"):
            lost.append(f"data.{side}.tokenizer_cfg.pretokenizer is {str(pretokenizer)[:20]}")
    if lost:
        warn_user(
            f"{folder}: {', '.join(lost)}, which this package does not do: give it text that is lowercased "
            "and tokenized as for Joey NMT"
        )


# ---- arrays ----


_TABLES = TableNames("src_embed.lut.weight", "trg_embed.lut.weight", "decoder.output_layer.weight")
_FEEDFORWARD = ("feed_forward", "feed_forward.layer_norm")
_STACKS = {
    "encoder": toolkit.StackNames(
        "layers", {"self_attention": ("src_src_att", "layer_norm"), "feedforward": _FEEDFORWARD}
    ),
    "decoder": toolkit.StackNames(
        "layers",
        {
            "self_attention": ("trg_trg_att", "x_layer_norm"),
            "cross_attention": ("src_trg_att", "dec_layer_norm"),
            "feedforward": _FEEDFORWARD,
        },
    ),
}


def _make_rules(network: ModelConfig) -> list[Rule | Constant]:
    attention = attention_rules(("q_layer", "k_layer", "v_layer"), "output_layer")
    feedforward = feedforward_rules({"input": "pwff_layer.0", "output": "pwff_layer.3"})
    positions = sinusoidal_table(_POSITIONS, network.model_dim)[None]
    return [
        *embedding_rules(network, _TABLES),
        *toolkit.stack_rules(_STACKS, attention=attention, feedforward=feedforward),
        *toolkit.table_constants(positions, ("encoder.pe.pe", "decoder.pe.pe")),
    ]


# ---- vocabulary ----


def _read_list(path: Path, symbols: Any) -> toolkit.PieceList:
    text = read_text(path, remedy="copy it from the model_dir of Joey NMT")
    names = text.removesuffix("\n").split("\n")
    spellings = symbols if isinstance(symbols, dict) else {}
    if spellings.get("lang_tags") or spellings.get("sep_token"):
        raise UserError(
            f"{path}: data.special_symbols has lang_tags or sep_token; models of several languages or with "
            "prompts are not imported"
        )
    unk, eos, pad, bos = (
        str(spellings.get(f"{name}_token") or usual)
        for name, usual in (("unk", "<unk>"), ("eos", "</s>"), ("pad", "<pad>"), ("bos", "<s>"))
    )
    return toolkit.PieceList(names, Specials(unk, eos, pad, bos))


FORMAT = Format.read_only(_NAME, _read)
