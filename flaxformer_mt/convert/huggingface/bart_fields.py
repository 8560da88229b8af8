"""Fields of config.json that BART and all its descendants share: defaults, bounds, checks, and the network.

Contains what Marian and Pegasus (model_config.py) and BART, mBART and M2M100 (pretrained_config.py) have in
common.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flaxformer_mt.config import DataConfig
from flaxformer_mt.convert.foreign_limits import stored_bytes

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


def find_network_problems(fields: Mapping[str, Any]) -> list[str]:
    """List what a model of this package cannot express of the fields of a network, one line each."""
    problems = [
        f"{one} is {fields[one]} and {other} is {fields[other]}; they must be equal"
        for one, other in (
            ("encoder_attention_heads", "decoder_attention_heads"),
            ("encoder_ffn_dim", "decoder_ffn_dim"),
        )
        if fields[one] != fields[other]
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
    """List the quantization of a model, if it has one: no quantized model is read."""
    if fields.get("quantization_config") is None:
        return []
    shown = str(fields["quantization_config"])[:80]
    return [
        f"quantization_config is {shown}; save the model without it in float32: quantized models are not read"
    ]


def find_oversize(folder: Path, *, vocab_size: int, width: int, layers: int, inner: int) -> list[str]:
    """List sizes that the files of a folder cannot hold, at one byte for each number.

    Args:
      width: of the model. layers: of both stacks. inner: width of their feed-forward layers.
    """
    least, size = max(vocab_size, layers * inner) * width, stored_bytes(folder)
    if least <= size:
        return []
    return [
        f"vocab_size {vocab_size}, d_model {width}, {layers} layers and a feed-forward width of {inner} make "
        f"at least {least} parameters, but the files have {size} bytes"
    ]


def network_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `ModelConfig` that the fields of any of these classes give."""
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
