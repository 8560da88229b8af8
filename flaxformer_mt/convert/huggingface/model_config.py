"""Converts between a config and the config.json of Marian and Pegasus."""

import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from flaxformer_mt.config import Config, DataConfig, ModelConfig, VocabConfig
from flaxformer_mt.config.schema import Normalization
from flaxformer_mt.convert.foreign_files import check_fields, stored_bytes
from flaxformer_mt.convert.formats import CONFIG_NAME, TYING, find_tying, fit_vocabulary, read_config_json
from flaxformer_mt.convert.huggingface.generation_options import read_search, special_ids
from flaxformer_mt.convert.huggingface.tokenizer_files import read_tokenizer_config, read_tokenizer_settings
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import Vocabs

# Every known activation_function -> model.activation.
FROM_TRANSFORMERS: dict[str, Any] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
# Default values in transformers 5 of fields that config.json may omit.
DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 1024,
    "encoder_layers": 12,
    "encoder_ffn_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_layers": 12,
    "decoder_ffn_dim": 4096,
    "decoder_attention_heads": 16,
    "activation_function": "gelu",
    "d_model": 1024,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "scale_embedding": False,
    "tie_word_embeddings": True,
}
# Field -> whether it is a whole number, its smallest and its largest accepted value.
BOUNDS: dict[str, tuple[type, float, float]] = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), (int, 1, 1000)),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "d_model"), (int, 1, 1 << 16)),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "max_position_embeddings"), (int, 1, 1 << 20)),
    "vocab_size": (int, 1, 1 << 24),
    **dict.fromkeys(("decoder_start_token_id", "pad_token_id", "bos_token_id"), (int, 0, 1 << 24)),
}
# The longest sentences of an imported model's config, in tokens; OPUS-MT models have as many positions.
LONGEST = 512


# model.activation -> activation_function.
_TO_TRANSFORMERS = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "silu": "silu"}
ACTIVATIONS = tuple(_TO_TRANSFORMERS)
# Default values of absent fields, and for numbers the type and the bounds.
_DEFAULTS: dict[str, Any] = DEFAULTS | {"decoder_vocab_size": None, "share_encoder_decoder_embeddings": True}
_NUMBERS: dict[str, tuple[type, float, float]] = {
    **BOUNDS,
    "decoder_vocab_size": BOUNDS["vocab_size"],
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), (float, 0, 1)),
}
_REQUIRED = ("vocab_size", "decoder_start_token_id", "pad_token_id", "eos_token_id")


def find_network_problems(fields: Mapping[str, Any]) -> list[str]:
    problems = [
        f"{first} is {fields[first]} and {second} is {fields[second]}; they must be equal"
        for first, second in (
            ("encoder_attention_heads", "decoder_attention_heads"),
            ("encoder_ffn_dim", "decoder_ffn_dim"),
        )
        if fields[first] != fields[second]
    ]
    if fields["d_model"] % fields["encoder_attention_heads"]:
        problems.append(
            f"d_model {fields['d_model']} is not divisible by encoder_attention_heads "
            f"{fields['encoder_attention_heads']}"
        )
    if str(fields["activation_function"]) not in FROM_TRANSFORMERS:
        problems.append(
            f"activation_function is {str(fields['activation_function'])[:40]}; supported: "
            f"{', '.join(FROM_TRANSFORMERS)}"
        )
    return problems


def find_quantization(fields: Mapping[str, Any]) -> list[str]:
    if fields.get("quantization_config") is None:
        return []
    shown = str(fields["quantization_config"])[:80]
    return [
        f"quantization_config is {shown}; save the model without it in float32: quantized models are not read"
    ]


def find_oversize(folder: Path, *, vocab_size: int, width: int, layers: int, inner: int) -> list[str]:
    """List sizes that the files of a folder cannot hold, at one byte for each number."""
    least, size = max(vocab_size, layers * inner) * width, stored_bytes(folder)
    if least <= size:
        return []
    return [
        f"vocab_size {vocab_size}, d_model {width}, {layers} layers and a feed-forward width of {inner} make "
        f"at least {least} parameters, but the files have {size} bytes"
    ]


def network_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_encoder_layers": fields["encoder_layers"],
        "num_decoder_layers": fields["decoder_layers"],
        "model_dim": fields["d_model"],
        "num_heads": fields["encoder_attention_heads"],
        "ffn_dim": fields["encoder_ffn_dim"],
        "activation": FROM_TRANSFORMERS[fields["activation_function"]],
        "max_positions": fields["max_position_embeddings"],
        "embedding_scale": bool(fields["scale_embedding"]),
        "dropout_rate": float(fields["dropout"]),
        "attention_dropout_rate": float(fields["attention_dropout"]),
        "ffn_dropout_rate": float(fields["activation_dropout"]),
    }


def make_data_config(most: int | None, **others: Any) -> DataConfig:
    """Return the section `data` for a model that takes at most so many tokens (None: any number)."""
    longest, defaults = min(most or LONGEST, LONGEST), DataConfig()
    return DataConfig(
        max_source_length=longest,
        max_target_length=longest,
        batch_tokens=max(defaults.batch_tokens, longest * defaults.row_multiple),
        **others,
    )


def num_positions(config: Config) -> int:
    """Return rows of the position tables: 512, or more for longer inputs, at most model.max_positions."""
    longest = config.model.longest_input or LONGEST
    return min(longest, max(LONGEST, config.data.max_source_length, longest_target(config)))


def longest_target(config: Config) -> int:
    """Return the length limit of the translation of the longest source, in tokens with the end symbol."""
    search = config.search
    limit = int(search.max_length_ratio * config.data.max_source_length + search.max_length_offset)
    return max(1, min(limit, config.model.longest_input or limit))


def make_model_fields(config: Config, vocabs: Vocabs) -> dict[str, Any]:
    model = config.model
    share, tie = TYING[model.tying]
    attention, ffn = model.attention_dropout_rate, model.ffn_dropout_rate
    return {
        "is_encoder_decoder": True,
        "dtype": "float32",
        "vocab_size": vocabs.source.size,
        "decoder_vocab_size": vocabs.target.size,
        "share_encoder_decoder_embeddings": share,
        "tie_word_embeddings": tie,
        "max_position_embeddings": num_positions(config),
        "d_model": model.model_dim,
        "encoder_layers": model.num_encoder_layers,
        "decoder_layers": model.num_decoder_layers,
        "encoder_attention_heads": model.num_heads,
        "decoder_attention_heads": model.num_heads,
        "encoder_ffn_dim": model.ffn_dim,
        "decoder_ffn_dim": model.ffn_dim,
        "activation_function": _TO_TRANSFORMERS[model.activation],
        "scale_embedding": model.embedding_scale,
        "dropout": model.dropout_rate,
        "attention_dropout": model.dropout_rate if attention is None else attention,
        "activation_dropout": model.dropout_rate if ffn is None else ffn,
        **special_ids(vocabs.target),
        # The defaults of the classes would force every translation to end in token 0 or 1.
        "forced_eos_token_id": None,
    }


def read_model_fields(folder: Path) -> dict[str, Any]:
    stored = read_config_json(folder)
    path = folder / CONFIG_NAME
    if missing := [name for name in _REQUIRED if stored.get(name) is None]:
        raise UserError(f"{path} lacks {', '.join(missing)}; give the folder of a complete model")
    fields = stored | {name: value for name, value in _DEFAULTS.items() if stored.get(name) is None}
    check_fields(fields, _NUMBERS, path)
    problems = find_quantization(fields) + find_network_problems(fields)
    if not isinstance(fields["eos_token_id"], int):
        problems.append(f"eos_token_id is {fields['eos_token_id']}; it must be a single id")
    sizes = fields["vocab_size"], fields["decoder_vocab_size"] or fields["vocab_size"]
    problems += [
        f"{name} is {fields[name]}, but the target vocabulary has {sizes[1]} entries"
        for name in ("decoder_start_token_id", "pad_token_id")
        if fields[name] >= sizes[1]
    ]
    problems += find_oversize(
        folder,
        vocab_size=max(sizes),
        width=fields["d_model"],
        layers=fields["encoder_layers"] + fields["decoder_layers"],
        inner=fields["encoder_ffn_dim"],
    )
    if fields["decoder_start_token_id"] == fields["eos_token_id"]:
        problems.append("decoder_start_token_id equals eos_token_id; the search needs two symbols")
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    return fields


def make_config(
    folder: Path,
    fields: dict[str, Any],
    vocabs: Vocabs,
    *,
    norm_position: Literal["pre", "post"],
    output_bias: bool,
) -> Config:
    share, tie = fields["share_encoder_decoder_embeddings"], fields["tie_word_embeddings"]
    tokenizer_config, data = read_tokenizer_config(folder), DataConfig()
    config = Config(
        data=make_data_config(
            fields["max_position_embeddings"],
            source_language=tokenizer_config.get("source_lang") or data.source_language,
            target_language=tokenizer_config.get("target_lang") or data.target_language,
        ),
        vocab=_make_vocab_config(folder),
        model=ModelConfig(
            **network_fields(fields),
            norm_position=norm_position,
            tying=find_tying(embeddings=share, output=tie),
            output_bias=output_bias,
        ),
        search=read_search(folder, fields, vocabs.target),
    )
    return fit_vocabulary(config, vocabs)


def _make_vocab_config(folder: Path) -> VocabConfig:
    settings = {side: read_tokenizer_settings(folder, side) for side in ("source", "target")}
    known = typing.get_args(Normalization)
    # Rules under another name are closest to the usual ones.
    names: Any = {
        side: stored.normalization if stored.normalization in known else "nmt_nfkc"
        for side, stored in settings.items()
    }
    kind: Any = settings["target"].kind
    return VocabConfig(
        kind=kind,
        byte_fallback=settings["target"].byte_fallback,
        normalization=names["source"],
        target_normalization=names["target"],
    )
