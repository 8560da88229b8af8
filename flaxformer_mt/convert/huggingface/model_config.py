"""Converts between a config and the config.json of Marian and Pegasus.

Contains the names of the fields; generation_options.py has the settings of `generate`.
"""

import typing
from pathlib import Path
from typing import Any, Literal

from flaxformer_mt.config import Config, DataConfig, ModelConfig, VocabConfig
from flaxformer_mt.config.schema import Normalization
from flaxformer_mt.convert.foreign_limits import check_fields
from flaxformer_mt.convert.format_interface import CONFIG_NAME, fit_vocabulary, read_config_json
from flaxformer_mt.convert.huggingface import bart_fields
from flaxformer_mt.convert.huggingface.generation_options import read_search, special_ids
from flaxformer_mt.convert.huggingface.tokenizer_files import read_tokenizer_config, read_tokenizer_settings
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import Vocabs

# model.activation -> activation_function.
_TO_TRANSFORMERS = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "silu": "silu"}
ACTIVATIONS = tuple(_TO_TRANSFORMERS)
# Default values of absent fields, and for numbers the type and the bounds, as in bart_fields.py.
_DEFAULTS: dict[str, Any] = bart_fields.DEFAULTS | {
    "decoder_vocab_size": None,
    "share_encoder_decoder_embeddings": True,
}
_NUMBERS: dict[str, tuple[type, float, float]] = {
    **bart_fields.BOUNDS,
    "decoder_vocab_size": bart_fields.BOUNDS["vocab_size"],
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), (float, 0, 1)),
}
_REQUIRED = ("vocab_size", "decoder_start_token_id", "pad_token_id", "eos_token_id")
# tying -> share_encoder_decoder_embeddings, tie_word_embeddings.
_TYING = {
    "all": (True, True),
    "embeddings": (True, False),
    "target_output": (False, True),
    "none": (False, False),
}


def num_positions(config: Config) -> int:
    """Return rows of the position tables: at least 512, more for longer inputs, at most
    model.max_positions.
    """
    longest = config.model.longest_input or bart_fields.LONGEST
    return min(longest, max(bart_fields.LONGEST, config.data.max_source_length, longest_target(config)))


def longest_target(config: Config) -> int:
    """Return the length limit of the translation of the longest source, in tokens with the end symbol."""
    search = config.search
    limit = int(search.max_length_ratio * config.data.max_source_length + search.max_length_offset)
    return max(1, min(limit, config.model.longest_input or limit))


def make_model_fields(config: Config, vocabs: Vocabs) -> dict[str, Any]:
    """Return the fields of config.json that both model classes have."""
    model = config.model
    share, tie = _TYING[model.tying]
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
    """Read config.json and add the defaults of missing fields.

    Raises:
      UserError: a model that this package cannot express; the message has the fields, their values and the
        supported ones.
    """
    stored = read_config_json(folder)
    path = folder / CONFIG_NAME
    if missing := [name for name in _REQUIRED if stored.get(name) is None]:
        raise UserError(f"{path} lacks {', '.join(missing)}; give the folder of a complete model")
    facts = stored | {name: value for name, value in _DEFAULTS.items() if stored.get(name) is None}
    check_fields(facts, _NUMBERS, path)
    problems = bart_fields.find_quantization(facts) + bart_fields.find_network_problems(facts)
    if not isinstance(facts["eos_token_id"], int):
        problems.append(f"eos_token_id is {facts['eos_token_id']}; it must be a single id")
    sizes = facts["vocab_size"], facts["decoder_vocab_size"] or facts["vocab_size"]
    problems += [
        f"{name} is {facts[name]}, but the target vocabulary has {sizes[1]} entries"
        for name in ("decoder_start_token_id", "pad_token_id")
        if facts[name] >= sizes[1]
    ]
    problems += bart_fields.find_oversize(
        folder,
        vocab_size=max(sizes),
        width=facts["d_model"],
        layers=facts["encoder_layers"] + facts["decoder_layers"],
        inner=facts["encoder_ffn_dim"],
    )
    if facts["decoder_start_token_id"] == facts["eos_token_id"]:
        problems.append("decoder_start_token_id equals eos_token_id; the search needs two symbols")
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    return facts


def make_config(
    folder: Path,
    facts: dict[str, Any],
    vocabs: Vocabs,
    *,
    norm_position: Literal["pre", "post"],
    output_bias: bool,
) -> Config:
    """Return a config for a model of another system: network, vocabulary and search, defaults elsewhere.

    Args:
      facts: result of `read_model_fields`.
      output_bias: whether the output has a bias that is not zero.
    """
    tying: Any = {flags: name for name, flags in _TYING.items()}[
        bool(facts["share_encoder_decoder_embeddings"]), bool(facts["tie_word_embeddings"])
    ]
    tokenizer_config, data = read_tokenizer_config(folder), DataConfig()
    config = Config(
        data=bart_fields.make_data_config(
            facts["max_position_embeddings"],
            source_language=tokenizer_config.get("source_lang") or data.source_language,
            target_language=tokenizer_config.get("target_lang") or data.target_language,
        ),
        vocab=_make_vocab_config(folder),
        model=ModelConfig(
            **bart_fields.network_fields(facts),
            norm_position=norm_position,
            tying=tying,
            output_bias=output_bias,
        ),
        search=read_search(folder, facts, vocabs.target),
    )
    return fit_vocabulary(config, vocabs)


def _make_vocab_config(folder: Path) -> VocabConfig:
    """Return settings for training a similar vocabulary."""
    settings = {side: read_tokenizer_settings(folder, side) for side in ("source", "target")}
    known = typing.get_args(Normalization)
    # Rules under another name are closest to the usual ones.
    names: Any = {
        side: one.normalization if one.normalization in known else "nmt_nfkc"
        for side, one in settings.items()
    }
    kind: Any = settings["target"].kind
    return VocabConfig(
        kind=kind,
        byte_fallback=settings["target"].byte_fallback,
        normalization=names["source"],
        target_normalization=names["target"],
    )
