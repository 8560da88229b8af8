"""Tables that translate the fields of ModelConfig to the options of a foreign format and back.

    Field("num_encoder_layers", "enc_layers")
    Field("activation", "act_fn", {"relu": "relu", "swish": "silu"})
    Field("norm_position", values="pre")

From such a table, this module makes a ModelConfig from foreign options, makes foreign options from a
ModelConfig, and lists the reasons why a format cannot express a ModelConfig. A field that is not in the table
must have the default of ModelConfig, except for sizes and similar fields, which may have any value.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from flaxformer_mt.config import Config, ModelConfig
from flaxformer_mt.convert.foreign_files import check_fields
from flaxformer_mt.convert.name_table import expand_groups
from flaxformer_mt.errors import UserError

# Type, minimum and maximum of a number.
Bounds = tuple[type, float, float]
LENGTH: Bounds = (int, 1, 1 << 20)
RATE: Bounds = (float, 0, 0.999)
# Field -> bounds of the foreign option for the field.
_BOUNDS: dict[str, Bounds] = {
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), (int, 1, 1000)),
    **dict.fromkeys(("model_dim", "num_heads", "key_dim", "value_dim"), (int, 1, 1 << 16)),
    "ffn_dim": (int, 1, 1 << 20),
    "max_positions": LENGTH,
    "norm_epsilon": (float, 0, 1),
    "relative_buckets": (int, 4, 1 << 16),
    "relative_distance": (int, 2, 1_000_000),
    **dict.fromkeys(("dropout_rate", "embedding_dropout_rate"), RATE),
    **dict.fromkeys(("attention_dropout_rate", "ffn_dropout_rate"), RATE),
}
# Boolean fields.
_FLAGS = [field.name for field in dataclasses.fields(ModelConfig) if isinstance(field.default, bool)]

NOT = {True: False, False: True}
# Whether both sides share embeddings, and whether the output matrix is the target's embedding -> model.tying.
TYING = {
    (True, True): "all",
    (True, False): "embeddings",
    (False, True): "target_output",
    (False, False): "none",
}

# Fields that may have any value in every format: sizes, and fields that do not change the outputs of a model.
_FREE = (
    *("num_encoder_layers", "num_decoder_layers", "model_dim", "num_heads", "ffn_dim", "ffn_layer"),
    *("max_positions", "relative_buckets", "relative_distance", "alignment", "initializer", "attention"),
    *("dropout_rate", "embedding_dropout_rate", "attention_dropout_rate", "ffn_dropout_rate"),
    *("dtype", "remat", "scan_layers"),
)
_SHOWN = 60
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Field(NamedTuple):
    """A field of ModelConfig in a foreign format.

    ours: name of the field.
    theirs: name of the foreign option. (encoder|decoder)_layers stands for two options that must be equal,
      `a & b` for two options whose values form a tuple, and "" for no option.
    values: mapping from foreign values to values of the field; or the supported values, which are the same in
      both systems (with no option, imported models get the first value); None: any value.
    default: value of an absent option; Ellipsis: the option is required.
    """

    ours: str
    theirs: str = ""
    values: Any = None
    default: Any = ...

    @property
    def bounds(self) -> Bounds | None:
        return _BOUNDS.get(self.ours)

    @property
    def supported(self) -> tuple[Any, ...] | None:
        if isinstance(self.values, Mapping):
            return tuple(dict.fromkeys(self.values.values()))
        return self.values if self.values is None or isinstance(self.values, tuple) else (self.values,)


Fields = Sequence[Field]


def any_value(*names: str) -> list[Field]:
    return [Field(name) for name in names]


# All other current fields. A field that is added later is unsupported until a format lists it.
EVERY_FIELD = any_value(
    *("architecture", "decoder_self_attention", "key_dim", "value_dim", "activation", "norm_position"),
    *("norm", "norm_epsilon", "norm_affine", "final_norm", "embedding_norm", "positions"),
    *("first_position", "embedding_scale", "attention_scale", "logit_scale", "embedding_bias", "tying"),
    *("padding_mask", "source_end", "attention_bias", "ffn_bias", "output_bias"),
)


def value_of(model: ModelConfig, name: str) -> Any:
    """Return the value of a field; None is replaced by the value in effect, such as the head size."""
    value = getattr(model, name)
    if value is None and name in ("key_dim", "value_dim"):
        return model.model_dim // model.num_heads
    if value is None and name == "final_norm":
        return model.norm_position == "pre"
    if value is None and name.endswith("dropout_rate"):
        return model.dropout_rate
    return model.longest_input if value is None and name == "max_positions" else value


def find_problems(fields: Fields, config: Config) -> list[str]:
    """List the values that a format does not support: `model.norm_position is pre; supported: post`."""
    model, listed = config.model, {field.ours: field.supported for field in fields}
    problems = []
    for name in (field.name for field in dataclasses.fields(model)):
        supported = (
            listed[name] if name in listed else None if name in _FREE else _neutral_values(model, name)
        )
        value = getattr(model, name)
        if supported is not None and value not in supported and value_of(model, name) not in supported:
            shown = ", ".join(map(str, supported))
            problems.append(f"model.{name} is {value}; supported: {shown}")
    return problems


def _neutral_values(model: ModelConfig, name: str) -> tuple[Any, ...]:
    if name in ("key_dim", "value_dim"):
        size, rest = divmod(model.model_dim, model.num_heads)
        return (None,) if rest else (None, size)
    if name == "final_norm":
        return (None, model.norm_position == "pre")
    return (next(field.default for field in dataclasses.fields(model) if field.name == name),)


def write_options(fields: Fields, model: ModelConfig) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for field in fields:
        value = value_of(model, field.ours)
        if isinstance(field.values, Mapping):
            value = next(theirs for theirs, ours in field.values.items() if ours == value)
        for names in expand_groups(field.theirs) if field.theirs else ():
            parts = names.split(" & ")
            options |= zip(parts, value if len(parts) > 1 else (value,), strict=True)
    return options


def read_network(
    fields: Fields,
    options: Mapping[str, Any],
    path: Path,
    *,
    others: Mapping[str, tuple[Any, ...]] = _NOTHING,
    numbers: Mapping[str, Bounds] = _NOTHING,
    equal: Iterable[Sequence[str]] = (),
) -> ModelConfig:
    """Return the ModelConfig that foreign options describe; raise UserError if it is not supported.

    others: foreign options without a field in ModelConfig -> supported values; None is always supported.
    numbers: bounds of further foreign options.
    equal: groups of further foreign options that must be equal.
    """
    names = [(field, expand_groups(field.theirs) if field.theirs else []) for field in fields]
    stored = {
        name: default if options.get(name) is None else options[name]
        for field, groups in names
        for group in groups
        for name, default in ((part, field.default) for part in group.split(" & "))
    }
    if missing := [name for name, value in stored.items() if value is ...]:
        raise UserError(f"{path} lacks {', '.join(missing)}; give the file of a complete Transformer model")
    check_fields(
        dict(options) | stored,
        {name: field.bounds for field, groups in names if field.bounds for name in groups} | dict(numbers),
        path,
    )
    network, problems = _translate(names, stored)
    values = {**options, **stored}
    equal = [*(groups for _, groups in names if len(groups) > 1), *equal]
    problems += [
        f"{first} is {values.get(first)} and {name} is {values.get(name)}; they must be equal"
        for first, *rest in equal
        for name in rest
        if values.get(first) != values.get(name)
    ]
    problems += [
        _explain(name, options[name], neutral)
        for name, neutral in others.items()
        if options.get(name) is not None and not any(_is_same(options[name], value) for value in neutral)
    ]
    if problems:
        lines = "\n".join(f"{path}: {problem}" for problem in problems)
        raise UserError(f"{lines}\nother models are not imported: train one with the supported values")
    return ModelConfig(**network)


def _translate(
    names: Sequence[tuple[Field, Sequence[str]]], stored: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Translate foreign options to values of ModelConfig; also return the problems of unsupported options."""
    problems: list[str] = []
    network: dict[str, Any] = {}
    for field, groups in names:
        values = [_join(stored, group) for group in groups]
        if not groups:
            network |= {field.ours: field.supported[0]} if field.supported else {}
        elif field.values is None and field.ours not in _FLAGS:
            number = field.bounds is not None and field.bounds[0] is float and values[0] is not None
            network[field.ours] = float(values[0]) if number else values[0]
        elif (found := _find(supported := field.values or (True, False), values[0])) is ...:
            problems.append(_explain(groups[0], values[0], supported))
        else:
            network[field.ours] = found
    return network, problems


def _join(stored: Mapping[str, Any], group: str) -> Any:
    parts = [stored[name] for name in group.split(" & ")]
    return tuple(parts) if len(parts) > 1 else parts[0]


def _find(values: Any, value: Any) -> Any:
    """Return the value of ModelConfig for a foreign value; Ellipsis if the foreign value is not supported."""
    pairs = values.items() if isinstance(values, Mapping) else zip(values, values, strict=True)
    return next((ours for theirs, ours in pairs if _is_same(theirs, value)), ...)


def _is_same(first: Any, second: Any) -> bool:
    """Return whether two values are equal; 1 equals 1.0, but not True."""
    if isinstance(first, tuple) and isinstance(second, tuple):
        return all(map(_is_same, first, second))
    return isinstance(first, bool) == isinstance(second, bool) and first == second


def _explain(name: str, value: Any, supported: Iterable[Any]) -> str:
    return f"{name} is {str(value)[:_SHOWN]!r}; supported: {', '.join(map(repr, supported))}"
