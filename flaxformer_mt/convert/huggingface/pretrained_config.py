"""From the config.json of a pretrained model to a config: BART, mBART, M2M100 (NLLB), T5 and mT5.

Contains the fields of both families, their defaults and what of them this package has.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flaxformer_mt.config import Config, DataConfig, ModelConfig, SearchConfig, VocabConfig
from flaxformer_mt.convert.foreign_limits import check_fields, stored_bytes
from flaxformer_mt.convert.format_interface import CONFIG_NAME
from flaxformer_mt.convert.huggingface.model_config import FROM_TRANSFORMERS
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import Vocab

# The longest sentences of an imported model's config, in tokens.
_LONGEST = 512
# Rows of a table of positions before the first one in use.
_OFFSET = 2

_BART_DEFAULTS: dict[str, Any] = {
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
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "tie_word_embeddings": True,
}
_T5_DEFAULTS: dict[str, Any] = {
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_decoder_layers": None,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
_DEFAULTS = {
    "bart": _BART_DEFAULTS,
    "mbart": _BART_DEFAULTS,
    "m2m_100": _BART_DEFAULTS
    | {"activation_function": "relu", "attention_dropout": 0.1, "scale_embedding": True},
    "t5": _T5_DEFAULTS,
    "mt5": _T5_DEFAULTS | {"d_ff": 1024, "num_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu"},
}
MODEL_TYPES = tuple(_DEFAULTS)
_T5_TYPES = ("t5", "mt5")

# Field -> whether it is a whole number, its smallest and its largest accepted value.
_NUMBERS: dict[str, tuple[type, float, float]] = {
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers"), (int, 1, 1000)),
    **dict.fromkeys(
        ("encoder_attention_heads", "decoder_attention_heads", "num_heads", "d_model", "d_kv"),
        (int, 1, 1 << 16),
    ),
    **dict.fromkeys(
        ("encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "max_position_embeddings"), (int, 1, 1 << 20)
    ),
    "relative_attention_num_buckets": (int, 4, 1 << 16),
    "relative_attention_max_distance": (int, 2, 1_000_000),
    "vocab_size": (int, 1, 1 << 24),
    **dict.fromkeys(("decoder_start_token_id", "pad_token_id", "bos_token_id"), (int, 0, 1 << 24)),
    **dict.fromkeys(
        ("dropout", "attention_dropout", "activation_dropout", "dropout_rate"), (float, 0, 0.999)
    ),
    "layer_norm_epsilon": (float, 0, 1),
}
# feed_forward_proj -> model.activation.
_T5_ACTIVATIONS: dict[str, Any] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "silu": "silu",
    "gated-gelu": "geglu_tanh",
    "gated-gelu_new": "geglu_tanh",
    "gated-silu": "swiglu",
}


class Facts(NamedTuple):
    """The fields of config.json, with the defaults of absent ones, and the sort of the model."""

    model_type: str
    fields: dict[str, Any]

    @property
    def is_t5(self) -> bool:
        """Whether the arrays are those of T5, not of BART."""
        return self.model_type in _T5_TYPES


def read_facts(folder: Path, stored: Mapping[str, Any]) -> Facts:
    """Read the fields of a config.json, and check those that this package cannot express.

    Raises:
      UserError: an unknown type of model, or one line for each field of an unsupported value.
    """
    path = folder / CONFIG_NAME
    model_type = stored.get("model_type")
    if model_type not in _DEFAULTS:
        raise UserError(
            f"{path}: model_type is {str(model_type)[:40]}; --format=hf reads {', '.join(MODEL_TYPES)}, "
            "marian and pegasus: give the folder of such a model"
        )
    fields = _DEFAULTS[model_type] | {name: value for name, value in stored.items() if value is not None}
    fields.setdefault("num_decoder_layers", None)
    if "vocab_size" not in stored:
        raise UserError(f"{path} lacks vocab_size; give the folder of a complete model")
    check_fields(fields, _NUMBERS, path)
    facts = Facts(model_type, fields)
    problems = _find_problems(facts) + _find_claims(facts, folder)
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    return facts


def _find_problems(facts: Facts) -> list[str]:
    fields, problems = facts.fields, []
    if fields.get("quantization_config") is not None:
        problems.append(
            f"quantization_config is {str(fields['quantization_config'])[:80]}; save the model without "
            "quantization"
        )
    for name, value in (("is_encoder_decoder", True), ("is_decoder", False)):
        if fields.get(name, value) is not value:
            problems.append(f"{name} is {str(fields[name])[:40]}; only encoder-decoder models are read")
    for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id"):
        if type(fields[name]) is not int or not 0 <= fields[name] < fields["vocab_size"]:
            problems.append(
                f"{name} is {str(fields[name])[:40]}; it must be an id below vocab_size "
                f"{fields['vocab_size']}"
            )
    if facts.is_t5:
        if str(fields["feed_forward_proj"]) not in _T5_ACTIVATIONS:
            problems.append(
                f"feed_forward_proj is {str(fields['feed_forward_proj'])[:40]}; supported: "
                f"{', '.join(_T5_ACTIVATIONS)}"
            )
        return problems
    for one, other in (
        ("encoder_attention_heads", "decoder_attention_heads"),
        ("encoder_ffn_dim", "decoder_ffn_dim"),
    ):
        if fields[one] != fields[other]:
            problems.append(f"{one} is {fields[one]} and {other} is {fields[other]}; they must be equal")
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


def _find_claims(facts: Facts, folder: Path) -> list[str]:
    """Sizes that the files cannot hold, at one byte for each number."""
    fields = facts.fields
    if facts.is_t5:
        layers = fields["num_layers"] + (fields["num_decoder_layers"] or fields["num_layers"])
        inner = fields["d_ff"]
    else:
        layers, inner = fields["encoder_layers"] + fields["decoder_layers"], fields["encoder_ffn_dim"]
    least, size = max(fields["vocab_size"], layers * inner) * fields["d_model"], stored_bytes(folder)
    if least <= size:
        return []
    return [
        f"vocab_size {fields['vocab_size']}, d_model {fields['d_model']}, {layers} layers and a feed-forward "
        f"width of {inner} make at least {least} parameters, but the files have {size} bytes"
    ]


def make_model_config(facts: Facts, *, tied: bool, output_bias: bool) -> ModelConfig:
    """Return the network of a model.

    Args:
      tied: whether the output matrix is the embedding.
      output_bias: whether the output has a bias that is not zero.
    """
    fields = facts.fields
    shared: dict[str, Any] = {"tying": "all" if tied else "embeddings", "model_dim": fields["d_model"]}
    if facts.is_t5:
        return ModelConfig(
            **shared,
            num_encoder_layers=fields["num_layers"],
            num_decoder_layers=fields["num_decoder_layers"] or fields["num_layers"],
            num_heads=fields["num_heads"],
            key_dim=fields["d_kv"],
            value_dim=fields["d_kv"],
            ffn_dim=fields["d_ff"],
            activation=_T5_ACTIVATIONS[fields["feed_forward_proj"]],
            norm="rms",
            norm_epsilon=float(fields["layer_norm_epsilon"]),
            positions="relative",
            relative_buckets=fields["relative_attention_num_buckets"],
            relative_distance=fields["relative_attention_max_distance"],
            embedding_scale=False,
            attention_scale=False,
            logit_scale=_scales_output(facts),
            attention_bias=False,
            ffn_bias=False,
            dropout_rate=float(fields["dropout_rate"]),
        )
    positions: Any = "sinusoidal_halves" if facts.model_type == "m2m_100" else "learned"
    return ModelConfig(
        **shared,
        num_encoder_layers=fields["encoder_layers"],
        num_decoder_layers=fields["decoder_layers"],
        num_heads=fields["encoder_attention_heads"],
        ffn_dim=fields["encoder_ffn_dim"],
        activation=FROM_TRANSFORMERS[fields["activation_function"]],
        norm_position="post" if facts.model_type == "bart" else "pre",
        embedding_norm=facts.model_type != "m2m_100",
        positions=positions,
        first_position=_OFFSET,
        max_positions=fields["max_position_embeddings"],
        embedding_scale=bool(fields["scale_embedding"]),
        output_bias=output_bias,
        dropout_rate=float(fields["dropout"]),
        attention_dropout_rate=float(fields["attention_dropout"]),
        ffn_dropout_rate=float(fields["activation_dropout"]),
    )


def _scales_output(facts: Facts) -> bool:
    """Whether the output is divided by sqrt(d_model): in the first T5 models, which tie the output matrix."""
    if facts.model_type == "mt5":
        return False
    tied = facts.fields.get("tie_word_embeddings", True) is not False
    return bool(facts.fields.get("scale_decoder_outputs", tied))


def make_pretrained_config(
    facts: Facts, model: ModelConfig, vocab: Vocab, search: SearchConfig, data: Mapping[str, Any]
) -> Config:
    """Return the config of an imported model: network, vocabulary and search, defaults elsewhere.

    Args:
      data: fields of the section `data`: the languages, and the style of their tags.
    """
    longest = min(model.longest_input or _LONGEST, _LONGEST)
    defaults = DataConfig()
    return Config(
        data=DataConfig(
            max_source_length=longest,
            max_target_length=longest,
            batch_tokens=max(defaults.batch_tokens, longest * defaults.row_multiple),
            **data,
        ),
        vocab=VocabConfig(
            kind="pretrained",
            size=vocab.size,
            pad_id=vocab.pad_id,
            bos_id=vocab.bos_id,
            eos_id=vocab.eos_id,
            unk_id=vocab.unk_id,
        ),
        model=model,
        search=search,
    )
