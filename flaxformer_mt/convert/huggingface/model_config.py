"""Converts between a config of this package and config.json of Marian and Pegasus models."""

import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flaxformer_mt.config import Config, DataConfig, ModelConfig, VocabConfig
from flaxformer_mt.config.schema import Normalization
from flaxformer_mt.convert.foreign_files import check_fields, stored_bytes
from flaxformer_mt.convert.formats import CONFIG_NAME, fit_vocabulary, read_config_json
from flaxformer_mt.convert.huggingface.generation_options import read_search, special_ids
from flaxformer_mt.convert.huggingface.tokenizer_files import read_tokenizer_config, read_tokenizer_settings
from flaxformer_mt.convert.network_fields import Bounds, Field, Fields, any_value, read_network, write_options
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import Vocabs

# activation_function -> model.activation; exports use the first of several names.
_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "swish": "silu",
}
# The network's fields that BART-like models share, with the defaults of transformers 5.
BART_FIELDS = (
    Field("max_positions", "max_position_embeddings", default=1024),
    Field("model_dim", "d_model", default=1024),
    Field("num_encoder_layers", "encoder_layers", default=12),
    Field("num_decoder_layers", "decoder_layers", default=12),
    Field("num_heads", "(encoder|decoder)_attention_heads", default=16),
    Field("ffn_dim", "(encoder|decoder)_ffn_dim", default=4096),
    Field("activation", "activation_function", _ACTIVATIONS, default="gelu"),
    Field("embedding_scale", "scale_embedding", default=False),
    Field("dropout_rate", "dropout", default=0.1),
    Field("attention_dropout_rate", "attention_dropout", default=0.0),
    Field("ffn_dropout_rate", "activation_dropout", default=0.0),
    Field("padding_mask", values=("source", "both")),
    *any_value("output_bias"),
)
# Types and bounds of the ids in config.json.
ID_BOUNDS: dict[str, Bounds] = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size"), (int, 1, 1 << 24)),
    **dict.fromkeys(("decoder_start_token_id", "pad_token_id", "bos_token_id"), (int, 0, 1 << 24)),
}
# Maximum sentence length in the config of an imported model, in tokens; OPUS-MT models have 512 positions.
LONGEST = 512

_REQUIRED = ("vocab_size", "decoder_start_token_id", "pad_token_id", "eos_token_id")


def find_problems(fields: Mapping[str, Any], size: int, folder: Path, width: int) -> list[str]:
    """List the reasons why a model cannot be imported: quantization, ids >= `size`, or files too small."""
    problems = []
    if fields.get("quantization_config") is not None:
        problems.append(
            f"quantization_config is {str(fields['quantization_config'])[:80]}; save the model without it in "
            "float32: quantized models are not read"
        )
    problems += [
        f"{name} is {str(fields[name])[:40]}; it must be an id below the {size} entries of the vocabulary"
        for name in ("decoder_start_token_id", "pad_token_id", "eos_token_id")
        if type(fields[name]) is not int or not 0 <= fields[name] < size
    ]
    # The files have at least one byte per parameter.
    rows, stored = max(size, fields["vocab_size"]), stored_bytes(folder)
    if rows * width > stored:
        problems.append(
            f"vocab_size {rows} and d_model {width} make at least {rows * width} parameters, but the files "
            f"have {stored} bytes"
        )
    return problems


def make_data_config(most: int | None, **others: Any) -> DataConfig:
    """Return the section `data` of a config for a model with at most `most` positions (None: no limit)."""
    longest, defaults = min(most or LONGEST, LONGEST), DataConfig()
    return DataConfig(
        max_source_length=longest,
        max_target_length=longest,
        batch_tokens=max(defaults.batch_tokens, longest * defaults.row_multiple),
        **others,
    )


def num_positions(config: Config) -> int:
    """Return the length of position tables: 512, or more for longer inputs, up to model.max_positions."""
    longest = config.model.longest_input or LONGEST
    return min(longest, max(LONGEST, config.data.max_source_length, longest_target(config)))


def longest_target(config: Config) -> int:
    """Return the length limit of a translation of the longest source, in tokens including eos."""
    search = config.search
    limit = int(search.max_length_ratio * config.data.max_source_length + search.max_length_offset)
    return max(1, min(limit, config.model.longest_input or limit))


def make_model_fields(fields: Fields, config: Config, vocabs: Vocabs) -> dict[str, Any]:
    return {
        "is_encoder_decoder": True,
        "dtype": "float32",
        "vocab_size": vocabs.source.size,
        "decoder_vocab_size": vocabs.target.size,
        **write_options(fields, config.model),
        "max_position_embeddings": num_positions(config),
        **special_ids(vocabs.target),
        # By default, the classes force every translation to end in token 0 or 1.
        "forced_eos_token_id": None,
    }


def read_model_fields(fields: Fields, folder: Path) -> tuple[dict[str, Any], ModelConfig]:
    """Read config.json; return its content and the network that it describes."""
    stored = read_config_json(folder)
    path = folder / CONFIG_NAME
    if missing := [name for name in _REQUIRED if stored.get(name) is None]:
        raise UserError(f"{path} lacks {', '.join(missing)}; give the folder of a complete model")
    check_fields(stored, ID_BOUNDS, path)
    network = read_network(fields, stored, path)
    size = stored.get("decoder_vocab_size") or stored["vocab_size"]
    problems = find_problems(stored, size, folder, network.model_dim)
    if stored["decoder_start_token_id"] == stored["eos_token_id"]:
        problems.append("decoder_start_token_id equals eos_token_id; the search needs two symbols")
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    return stored, network


def make_config(folder: Path, fields: dict[str, Any], network: ModelConfig, vocabs: Vocabs) -> Config:
    tokenizer_config, data = read_tokenizer_config(folder), DataConfig()
    config = Config(
        data=make_data_config(
            network.max_positions,
            source_language=tokenizer_config.get("source_lang") or data.source_language,
            target_language=tokenizer_config.get("target_lang") or data.target_language,
        ),
        vocab=_make_vocab_config(folder),
        model=network,
        search=read_search(folder, fields, vocabs.target),
    )
    return fit_vocabulary(config, vocabs)


def _make_vocab_config(folder: Path) -> VocabConfig:
    settings = {side: read_tokenizer_settings(folder, side) for side in ("source", "target")}
    known = typing.get_args(Normalization)
    # Rules with an unknown name are assumed to be close to the usual rules.
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
