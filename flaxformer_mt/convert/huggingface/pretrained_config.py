"""Reads config.json and the tokenizer of pretrained models: BART, mBART, M2M100 (NLLB), T5 and mT5."""

import importlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.config.tag_styles import BOTH_SIDES, TagStyle, find_language, looks_like_tag
from flaxformer_mt.convert.foreign_files import check_fields, read_bytes
from flaxformer_mt.convert.formats import CONFIG_NAME
from flaxformer_mt.convert.huggingface import model_config
from flaxformer_mt.convert.huggingface.tokenizer_files import SETTINGS, read_tokenizer_config
from flaxformer_mt.convert.network_fields import Field, any_value, read_network
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import PretrainedMetadata, PretrainedVocab
from flaxformer_mt.vocab.pretrained_tokenizers import (
    SENTENCEPIECE_NAMES,
    TOKENIZER_JSON,
    Kind,
    make_segmenter,
)

# Number of unused rows at the start of a position table.
_OFFSET = 2

# Defaults for config.json: ids, and fields whose default differs between families.
_BART_IDS = {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
_T5_IDS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "bart": _BART_IDS,
    "mbart": _BART_IDS,
    "m2m_100": _BART_IDS | {"activation_function": "relu", "attention_dropout": 0.1, "scale_embedding": True},
    "t5": _T5_IDS,
    "mt5": _T5_IDS | {"d_ff": 1024, "num_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu"},
}
_T5_TYPES = ("t5", "mt5")
_TYING = Field("tying", values=("all", "embeddings"))
T5_FIELDS = (
    _TYING,
    Field("model_dim", "d_model", default=512),
    Field("num_encoder_layers", "num_layers", default=6),
    Field("num_decoder_layers", "num_decoder_layers"),
    Field("num_heads", "num_heads", default=8),
    Field("key_dim", "d_kv", default=64),
    Field("value_dim", "d_kv", default=64),
    Field("ffn_dim", "d_ff", default=2048),
    Field(
        "activation",
        "feed_forward_proj",
        {
            "relu": "relu",
            "gelu": "gelu",
            "gelu_new": "gelu_tanh",
            "silu": "silu",
            "gated-gelu": "geglu_tanh",
            "gated-gelu_new": "geglu_tanh",
            "gated-silu": "swiglu",
        },
        default="relu",
    ),
    Field("norm", values="rms"),
    Field("norm_epsilon", "layer_norm_epsilon", default=1e-6),
    Field("positions", values="relative"),
    Field("relative_buckets", "relative_attention_num_buckets", default=32),
    Field("relative_distance", "relative_attention_max_distance", default=128),
    Field("embedding_scale", values=False),
    Field("attention_scale", values=False),
    Field("attention_bias", values=False),
    Field("ffn_bias", values=False),
    Field("padding_mask", values=("source", "both")),
    Field("dropout_rate", "dropout_rate", default=0.1),
    *any_value("logit_scale"),
)
# Of several supported values, `make_model_config` chooses one by the content of the files.
BART_FIELDS = (
    *model_config.BART_FIELDS,
    _TYING,
    Field("positions", values=("learned", "sinusoidal_halves")),
    Field("first_position", values=_OFFSET),
    *any_value("norm_position", "embedding_norm", "final_norm"),
)

# The files that a run keeps, if they exist.
_KEPT = (
    *(TOKENIZER_JSON, SETTINGS, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("config.json", "generation_config.json", *SENTENCEPIECE_NAMES),
)


class Family(NamedTuple):
    """The kind of a pretrained model, the fields of its config.json, and the network that they describe."""

    model_type: str
    fields: dict[str, Any]
    network: ModelConfig

    @property
    def is_t5(self) -> bool:
        return self.model_type in _T5_TYPES


def read_family(folder: Path, stored: Mapping[str, Any]) -> Family:
    path = folder / CONFIG_NAME
    model_type = str(stored.get("model_type"))
    if model_type not in _FAMILY_DEFAULTS:
        raise UserError(
            f"{path}: model_type is {model_type[:40]}; --format=hf reads {', '.join(_FAMILY_DEFAULTS)}, "
            "marian and pegasus: give the folder of such a model"
        )
    fields = _FAMILY_DEFAULTS[model_type] | {
        name: value for name, value in stored.items() if value is not None
    }
    if "vocab_size" not in stored:
        raise UserError(f"{path} lacks vocab_size; give the folder of a complete model")
    if model_type in _T5_TYPES:
        fields.setdefault("num_decoder_layers", fields.get("num_layers", 6))
    check_fields(fields, model_config.ID_BOUNDS, path)
    network = read_network(T5_FIELDS if model_type in _T5_TYPES else BART_FIELDS, fields, path)
    problems = model_config.find_problems(fields, fields["vocab_size"], folder, network.model_dim)
    problems += [
        f"{name} is {str(fields[name])[:40]}; only encoder-decoder models are read"
        for name, value in (("is_encoder_decoder", True), ("is_decoder", False))
        if fields.get(name, value) is not value
    ]
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    return Family(model_type, fields, network)


def make_model_config(family: Family, *, tied: bool, output_bias: bool) -> ModelConfig:
    tying: Literal["all", "embeddings"] = "all" if tied else "embeddings"
    if family.is_t5:
        return replace(family.network, tying=tying, logit_scale=_scales_output(family))
    return replace(
        family.network,
        tying=tying,
        norm_position="post" if family.model_type == "bart" else "pre",
        embedding_norm=family.model_type != "m2m_100",
        positions="sinusoidal_halves" if family.model_type == "m2m_100" else "learned",
        output_bias=output_bias,
    )


def _scales_output(family: Family) -> bool:
    """Return whether logits are divided by sqrt(d_model), as in the first T5 models."""
    if family.model_type == "mt5":
        return False
    tied = family.fields.get("tie_word_embeddings", True) is not False
    return bool(family.fields.get("scale_decoder_outputs", tied))


def read_vocab(folder: Path, family: Family) -> tuple[PretrainedVocab, dict[str, Any]]:
    """Read the vocabulary of a folder; also return the fields of the section `data` that depend on it."""
    files = {
        name: read_bytes(folder / name, remedy="copy or download it again")
        for name in _KEPT
        if (folder / name).is_file()
    }
    settings = read_tokenizer_config(folder)
    tokenizer = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
    if tokenizer == "MBartTokenizer":
        raise UserError(
            f"{folder / SETTINGS}: tokenizer_class is MBartTokenizer, which puts languages after sentences, "
            "as mBART-25 does; give an mBART-50 model"
        )
    kind = _choose_kind(family, files, tokenizer, folder)
    pieces = make_segmenter(kind, files, name=str(folder)).pieces
    style, tags = _find_tags(family, kind, pieces, settings)
    fields = family.fields
    ids = {piece: number for number, piece in enumerate(pieces)}
    vocab_metadata = PretrainedMetadata(
        kind=kind,
        size=fields["vocab_size"],
        pad_id=fields["pad_token_id"],
        bos_id=fields["decoder_start_token_id"],
        eos_id=fields["eos_token_id"],
        unk_id=ids.get("<unk>", fields["pad_token_id"]),
        first_ids=(ids["<s>"],) if family.model_type == "bart" and "<s>" in ids else (),
        tags=tags,
        target_tags=style in BOTH_SIDES,
        family=family.model_type,
    )
    vocab = PretrainedVocab(vocab_metadata, files, name=str(folder))
    if ids.get("</s>", vocab.eos_id) != vocab.eos_id:
        raise UserError(
            f"{folder / 'config.json'} says eos_token_id {vocab.eos_id}, but the vocabulary has </s> at "
            f"{ids['</s>']}; the files belong to different models"
        )
    return vocab, _make_data_fields(style, settings)


def _choose_kind(family: Family, files: Mapping[str, bytes], tokenizer: str, folder: Path) -> Kind:
    if tokenizer == "ByT5Tokenizer":
        return "bytes"
    if TOKENIZER_JSON in files:
        return "json"
    if family.model_type == "m2m_100" and "vocab.json" in files:
        return "m2m_100"
    if any(name in files for name in SENTENCEPIECE_NAMES):
        return "sentencepiece" if family.is_t5 else "fairseq"
    raise UserError(
        f"{folder} has no {TOKENIZER_JSON} and no {' or '.join(SENTENCEPIECE_NAMES[:2])}; copy or download "
        "the files of the model's tokenizer"
    )


def _find_tags(
    family: Family, kind: Kind, pieces: list[str], settings: Mapping[str, Any]
) -> tuple[TagStyle, dict[str, int]]:
    """Return the style of the model's language tags, and the ids of the tags by name."""
    if family.is_t5:
        return _find_t5_tags(family, pieces)
    if family.model_type == "bart":
        return "opus", {}
    style: TagStyle = "mbart_50"
    if family.model_type == "m2m_100":
        is_m2m_100 = kind == "m2m_100" or bool(_find_pieces(pieces, "m2m_100"))
        style = "m2m_100" if is_m2m_100 else "nllb"
    if kind == "json":
        return style, _find_pieces(pieces, style)
    # Without tokenizer.json, the class of the tokenizer puts the tags after all subwords.
    codes = list_codes(style, settings)
    return style, {code: len(pieces) + number for number, code in enumerate(codes)}


def _find_t5_tags(family: Family, pieces: list[str]) -> tuple[TagStyle, dict[str, int]]:
    if tags := _find_pieces(pieces, "madlad"):
        return "madlad", tags
    tasks = family.fields.get("task_specific_params")
    has_tasks = isinstance(tasks, dict) and any(str(task).startswith("translation") for task in tasks)
    return ("t5" if has_tasks else "opus"), {}


def _find_pieces(pieces: list[str], style: TagStyle) -> dict[str, int]:
    return {piece: number for number, piece in enumerate(pieces) if looks_like_tag(style, piece)}


def list_codes(style: str, settings: Mapping[str, Any]) -> list[str]:
    family = {"mbart_50": "mbart50"}.get(style, style)
    module = importlib.import_module(f"transformers.models.{family}.tokenization_{family}")
    codes = module.FAIRSEQ_LANGUAGE_CODES
    if style != "m2m_100":
        return list(codes)
    name = settings.get("language_codes", "m2m100")
    if not isinstance(name, str) or name not in codes:
        raise UserError(f"{SETTINGS}: language_codes is {str(name)[:40]}; known: {', '.join(codes)}")
    return [f"__{code}__" for code in codes[name]]


def _make_data_fields(style: TagStyle, settings: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"tag_style": style}
    for name, ours in (("src_lang", "source_language"), ("tgt_lang", "target_language")):
        code = settings.get(name)
        if isinstance(code, str) and code and settings.get("tgt_lang"):
            fields[ours] = find_language(style, code.strip("_"))
    if fields.get("source_language") == fields.get("target_language"):
        fields = {"tag_style": style}
    return fields


def write_vocab(vocab: PretrainedVocab, folder: Path, changes: Mapping[str, dict[str, Any]]) -> None:
    """Write the files of a tokenizer; `changes` are new values of fields in its JSON files, by file name."""
    for name, content in vocab.files.items():
        if name in changes:
            stored = json.loads(content)
            if any(stored.get(field) != value for field, value in changes[name].items()):
                content = (json.dumps(stored | changes[name], indent=2) + "\n").encode()
        (folder / name).write_bytes(content)
