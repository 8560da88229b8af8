"""Format joeynmt: imports a Transformer trained with Joey NMT from its model directory.

config.yaml                        options, languages, special symbols
best.ckpt (or latest.ckpt)         under `model_state`: the arrays
src_vocab.txt, trg_vocab.txt       one subword per line, in the order of ids
*.model                            SentencePiece models, if SentencePiece segments the text
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flaxformer_mt.convert.foreign_files import read_text
from flaxformer_mt.convert.formats import Format, ImportOverrides, Weights, refuse_overrides
from flaxformer_mt.convert.name_table import read_names
from flaxformer_mt.convert.network_fields import TYING, Field, read_network
from flaxformer_mt.convert.sentencepiece_file import Specials
from flaxformer_mt.convert.stored_tensors import as_arrays, attributes_of, load_checkpoint, take_tensors
from flaxformer_mt.convert.toolkits import toolkit_model as toolkit
from flaxformer_mt.errors import UserError, warn_user

_NAME = "joeynmt"
_FILES = ("best.ckpt", "latest.ckpt", "*.ckpt")
_SIDES = {"src": "encoder", "trg": "decoder"}

_FIELDS = (
    Field("num_encoder_layers", "encoder.num_layers"),
    Field("num_decoder_layers", "decoder.num_layers"),
    Field("num_heads", "(encoder|decoder).num_heads"),
    Field("model_dim", "(encoder|decoder).(hidden_size|embeddings.embedding_dim)"),
    Field("ffn_dim", "(encoder|decoder).ff_size"),
    Field("norm_position", "(encoder|decoder).layer_norm", {"pre": "pre", "post": "post"}),
    Field("norm_epsilon", values=1e-6),
    Field("max_positions", values=toolkit.POSITIONS),
    Field(
        "activation",
        "(encoder|decoder).activation",
        {"relu": "relu", "gelu": "gelu", "swish": "silu"},
        default="relu",
    ),
    Field("embedding_scale", "(encoder|decoder).embeddings.scale", default=False),
    Field("dropout_rate", "(encoder|decoder).dropout", default=0.0),
    Field("embedding_dropout_rate", "encoder.embeddings.dropout"),
    Field("tying", "tied_embeddings & tied_softmax", TYING, default=False),
)
_OTHERS = {
    f"{side}.{name}": (value,)
    for side in ("encoder", "decoder")
    for name, value in (("type", "transformer"), ("alpha", 1))
}


def _read(path: Path, overrides: ImportOverrides) -> Weights:
    refuse_overrides(overrides, path)
    folder = path if path.is_dir() else path.parent
    config_file = folder / "config.yaml"
    config = toolkit.read_yaml(config_file)
    file = toolkit.find_file(path, _FILES, what="a model of Joey NMT")
    state = take_tensors(load_checkpoint(file).get("model_state"), file, what="model_state")
    options = _read_options(config.get("model"), state, config_file)
    network = read_network(_FIELDS, options, config_file, others=_OTHERS)
    data = attributes_of(config.get("data"))
    languages = toolkit.languages_of(
        attributes_of(data.get(side)).get("lang") or data.get(side) for side in _SIDES
    )
    _warn_of_text(data, folder)
    lists = [_read_list(folder / f"{side}_vocab.txt", data.get("special_symbols")) for side in _SIDES]
    vocabs = toolkit.read_vocabs(folder, lists, languages)
    tables = toolkit.position_constants(network, ("encoder.pe.pe", "decoder.pe.pe"), axis=0)
    return toolkit.make_weights(
        network,
        vocabs,
        as_arrays(state),
        [*read_names(_NAMES), *tables],
        path=file,
        what=_NAME,
        languages=languages,
    )


# ---- options ----


def _read_options(model: Any, state: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the options with names such as encoder.num_layers, and with defaults for missing options."""
    if not isinstance(model, dict):
        raise UserError(f"{file} has no section model; give the model_dir of Joey NMT")
    options = {name: value for name, value in model.items() if not isinstance(value, dict)}
    for side in ("encoder", "decoder"):
        stack = model.get(side)
        if not isinstance(stack, dict):
            raise UserError(f"{file} has no section model.{side}; give the model_dir of Joey NMT")
        embeddings = attributes_of(stack.get("embeddings"))
        defaults = {"scale": stack.get("scale", False), "embedding_dim": stack.get("hidden_size")}
        defaults["dropout"] = stack.get("dropout", 0.0)
        if stack.get("layer_norm") is None and f"{side}.layer_norm.weight" in state:
            stack = stack | {"layer_norm": "pre"}  # version 1 only has this
        options |= {f"{side}.{name}": value for name, value in stack.items()}
        options |= {f"{side}.embeddings.{name}": value for name, value in (defaults | embeddings).items()}
    return options


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


_NAMES = """
(source|target)_embedding                                   (src|trg)_embed.lut
output                                                      decoder.output_layer
(encoder|decoder)/layers_{n}/self_attention/(query|key|value|output)  (encoder.layers.{n}.src_src|decoder.layers.{n}.trg_trg)_att.(q|k|v|output)_layer
(encoder|decoder)/layers_{n}/self_attention_residual/norm   (encoder.layers.{n}.|decoder.layers.{n}.x_)layer_norm
decoder/layers_{n}/cross_attention/(query|key|value|output) decoder.layers.{n}.src_trg_att.(q|k|v|output)_layer
decoder/layers_{n}/cross_attention_residual/norm            decoder.layers.{n}.dec_layer_norm
(encoder|decoder)/layers_{n}/feedforward/(input|output)     (encoder|decoder).layers.{n}.feed_forward.pwff_layer.(0|3)
(encoder|decoder)/layers_{n}/feedforward_residual/norm      (encoder|decoder).layers.{n}.feed_forward.layer_norm
(encoder|decoder)/final_norm                                (encoder|decoder).layer_norm
"""  # noqa: E501


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


FORMAT = Format(_NAME, read=_read)
