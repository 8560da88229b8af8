"""From the config.json of a pretrained model to a config: BART, mBART, M2M100 (NLLB), T5 and mT5.

Contains the fields of both families, their defaults and what of them this package has.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flaxformer_mt.config import Config, ModelConfig, SearchConfig, VocabConfig
from flaxformer_mt.convert.foreign_limits import check_fields
from flaxformer_mt.convert.format_interface import CONFIG_NAME
from flaxformer_mt.convert.huggingface import bart_fields
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import Vocab

# Rows of a table of positions before the first one in use.
_OFFSET = 2

_BART_DEFAULTS: dict[str, Any] = bart_fields.DEFAULTS | {
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
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
_T5_TYPES = ("t5", "mt5")

# Field -> whether it is a whole number, its smallest and its largest accepted value.
_NUMBERS: dict[str, tuple[type, float, float]] = {
    **bart_fields.BOUNDS,
    **dict.fromkeys(("num_layers", "num_decoder_layers"), (int, 1, 1000)),
    **dict.fromkeys(("num_heads", "d_kv"), (int, 1, 1 << 16)),
    "d_ff": (int, 1, 1 << 20),
    "relative_attention_num_buckets": (int, 4, 1 << 16),
    "relative_attention_max_distance": (int, 2, 1_000_000),
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
            f"{path}: model_type is {str(model_type)[:40]}; --format=hf reads {', '.join(_DEFAULTS)}, "
            "marian and pegasus: give the folder of such a model"
        )
    fields = _DEFAULTS[model_type] | {name: value for name, value in stored.items() if value is not None}
    fields.setdefault("num_decoder_layers", None)
    if "vocab_size" not in stored:
        raise UserError(f"{path} lacks vocab_size; give the folder of a complete model")
    check_fields(fields, _NUMBERS, path)
    facts = Facts(model_type, fields)
    problems = _find_problems(facts) + _find_oversize(facts, folder)
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    return facts


def _find_problems(facts: Facts) -> list[str]:
    fields = facts.fields
    problems = bart_fields.find_quantization(fields)
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
    return problems + bart_fields.find_network_problems(fields)


def _find_oversize(facts: Facts, folder: Path) -> list[str]:
    fields = facts.fields
    if facts.is_t5:
        layers = fields["num_layers"] + (fields["num_decoder_layers"] or fields["num_layers"])
        inner = fields["d_ff"]
    else:
        layers, inner = fields["encoder_layers"] + fields["decoder_layers"], fields["encoder_ffn_dim"]
    return bart_fields.find_oversize(
        folder, vocab_size=fields["vocab_size"], width=fields["d_model"], layers=layers, inner=inner
    )


def make_model_config(facts: Facts, *, tied: bool, output_bias: bool) -> ModelConfig:
    """Return the network of a model.

    Args:
      tied: whether the output matrix is the embedding.
      output_bias: whether the output has a bias that is not zero.
    """
    fields = facts.fields
    tying: Literal["all", "embeddings"] = "all" if tied else "embeddings"
    if facts.is_t5:
        return ModelConfig(
            tying=tying,
            model_dim=fields["d_model"],
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
        tying=tying,
        **bart_fields.network_fields(fields),
        norm_position="post" if facts.model_type == "bart" else "pre",
        embedding_norm=facts.model_type != "m2m_100",
        positions=positions,
        first_position=_OFFSET,
        output_bias=output_bias,
    )


def _scales_output(facts: Facts) -> bool:
    """Return whether the output is divided by sqrt(d_model): in the first T5 models, which tie the output
    matrix.
    """
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
    return Config(
        data=bart_fields.make_data_config(model.longest_input, **data),
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
