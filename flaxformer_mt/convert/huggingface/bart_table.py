"""Names of the arrays of BART and its descendants (mBART, M2M100, Marian, Pegasus) in transformers.

Contains the rules; which of them apply follows from the config of the model.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from flaxformer_mt.config import Config, ModelConfig
from flaxformer_mt.convert.array_layouts import (
    CONVOLUTION_TO_LINEAR,
    FLAT,
    HEADS_IN,
    HEADS_OUT,
    ROW,
    SAME,
    TRANSPOSED,
    Layout,
)
from flaxformer_mt.convert.name_table import TABLE_TOLERANCE, Constant, Rule, Table, rules_for
from flaxformer_mt.convert.sinusoid_halves import half_split, half_split_order
from flaxformer_mt.model.positions import sinusoidal_half_table, sinusoidal_table

_BIAS = "final_logits_bias"
# Stack -> Flax name of an attention sublayer -> its name in transformers.
_ATTENTIONS = {
    "encoder": {"self_attention": "self_attn"},
    "decoder": {"self_attention": "self_attn", "cross_attention": "encoder_attn"},
}


def make_bart_table(config: Config, shapes: Any, *, what: str, positions: int, final_norm: bool) -> Table:
    """Make the table of all arrays of a class.

    Args:
      shapes: of the Flax parameters, by path.
      what: the name of the format, for messages.
      positions: rows of the tables of positions, with those before the first position.
      final_norm: whether both stacks of the class end in a norm.
    """
    model = config.model
    names = _Layouts(model)
    rules: list[Rule | Constant] = [*_embedding_rules(model)]
    for side, attentions in _ATTENTIONS.items():
        flax, foreign = f"{side}/layers_{{n}}/", f"model.{side}.layers.{{n}}."
        rules += _position_rules(model, side, positions)
        pairs = [(flax + name, foreign + other) for name, other in attentions.items()]
        rules += rules_for(pairs, names.attention())
        rules += rules_for([(flax + "feedforward", foreign[:-1])], names.feedforward())
        norms = [(f"{name}_residual/norm", f"{other}_layer_norm") for name, other in attentions.items()]
        norms += [("feedforward_residual/norm", "final_layer_norm")]
        rules += rules_for([(flax + name, foreign + other) for name, other in norms], names.norm())
        rules += rules_for([(f"{side}/final_norm", f"model.{side}.layer_norm")], names.norm())
        rules += rules_for([(f"{side}/embedding_norm", f"model.{side}.layernorm_embedding")], names.norm())
    rules += [Rule("output_kernel", "lm_head.weight", names.width(TRANSPOSED, 0))]
    rules += [Rule("output_bias", _BIAS, ROW), *_constants(model, shapes, final_norm)]
    return Table(shapes, rules, what=what)


class _Layouts:
    """The layouts of a model's arrays: with permuted widths where the class has sines before cosines."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model

    def width(self, layout: Layout, axis: int) -> Layout:
        """Return a layout whose `axis` is the width of the model."""
        return half_split(layout, axis) if self._model.positions == "sinusoidal" else layout

    def attention(self) -> list[Rule]:
        """Return the rules of an attention sublayer, by the ends of the names."""
        return [
            Rule("/query/kernel", ".q_proj.weight", self.width(HEADS_IN, 0)),
            Rule("/query/bias", ".q_proj.bias", FLAT),
            Rule("/key/kernel", ".k_proj.weight", self.width(HEADS_IN, 0)),
            Rule("/key/bias", ".k_proj.bias", FLAT),
            Rule("/value/kernel", ".v_proj.weight", self.width(HEADS_IN, 0)),
            Rule("/value/bias", ".v_proj.bias", FLAT),
            Rule("/output/kernel", ".out_proj.weight", self.width(HEADS_OUT, 2)),
            Rule("/output/bias", ".out_proj.bias", self.width(SAME, 0)),
        ]

    def norm(self) -> list[Rule]:
        """Return the rules of a layer norm, by the ends of the names."""
        width = self.width(SAME, 0)
        return [Rule("/scale", ".weight", width), Rule("/bias", ".bias", width)]

    def feedforward(self) -> list[Rule]:
        """Return the rules of a feed-forward sublayer, by the ends of the names."""
        convolution = self._model.ffn_layer == "convolution"
        dense, axis = (CONVOLUTION_TO_LINEAR, 1) if convolution else (TRANSPOSED, 0)
        return [
            Rule("/input/kernel", ".fc1.weight", self.width(dense, axis)),
            Rule("/input/bias", ".fc1.bias"),
            Rule("/output/kernel", ".fc2.weight", self.width(dense, axis + 1)),
            Rule("/output/bias", ".fc2.bias", self.width(SAME, 0)),
        ]


def _position_rules(model: ModelConfig, side: str, positions: int) -> Iterable[Rule | Constant]:
    foreign = f"model.{side}.embed_positions.weight"
    if model.positions == "learned":
        yield Rule(f"{side}/positions/embedding", foreign)
    elif model.positions == "sinusoidal_halves":
        # Files of earlier versions of transformers have the table, of which row 1 is that of padding.
        table = sinusoidal_half_table(positions, model.model_dim)
        table[1] = 0
        yield Constant(f"{foreign}s", table, True, tolerance=TABLE_TOLERANCE)
    else:
        order = half_split_order(model.model_dim)
        table = np.ascontiguousarray(sinusoidal_table(positions, model.model_dim)[:, order])
        yield Constant(foreign, table, True, tolerance=TABLE_TOLERANCE)


def _embedding_rules(model: ModelConfig) -> list[Rule]:
    """Return the rules of embeddings, and of the output matrix if it is one of them."""
    shared = model.tying in ("all", "embeddings")
    source, target = ("shared_embedding",) * 2 if shared else ("source_embedding", "target_embedding")
    names = [("model.encoder.embed_tokens", source), ("model.decoder.embed_tokens", target)]
    names = [("model.shared", "shared_embedding")] + names if shared else names
    names += [("lm_head", target)] if model.tying in ("all", "target_output") else []
    rows = _Layouts(model).width(SAME, 1)
    return [Rule(f"{flax}/embedding", f"{foreign}.weight", rows) for foreign, flax in names]


def has_output_bias(tensors: Mapping[str, Any]) -> bool:
    """Return whether the output has a bias that is not zero everywhere."""
    return _BIAS in tensors and bool(np.any(np.asarray(tensors[_BIAS])))


def tied_names(model: ModelConfig) -> list[str]:
    """Return the names of one tied array, that under which files store it first; [] if nothing is tied."""
    rules = [rule for rule in _embedding_rules(model) if rule.ours != "source_embedding/embedding"]
    return [rule.theirs for rule in rules] if len(rules) > 1 else []


def _constants(model: ModelConfig, shapes: Any, final_norm: bool) -> Iterable[Constant]:
    """Return arrays that the class has and the Flax model lacks: biases of 0 and scales of 1."""
    width, inner = np.zeros(model.model_dim, np.float32), np.zeros(model.ffn_dim, np.float32)
    if not model.output_bias and model.positions != "sinusoidal_halves":  # M2M100 has none
        table = "target_embedding" if "target_embedding/embedding" in shapes else "shared_embedding"
        size = shapes[f"{table}/embedding"][0]
        yield Constant(_BIAS, np.zeros((1, size), np.float32), optional=True)
    for side, layers in (("encoder", model.num_encoder_layers), ("decoder", model.num_decoder_layers)):
        attentions = list(_ATTENTIONS[side].values())
        norms = [f"layers.{n}.{name}_layer_norm" for n in range(layers) for name in (*attentions, "final")]
        norms += ["layer_norm"] if final_norm else []
        for name in norms if not model.norm_affine else []:
            yield Constant(f"model.{side}.{name}.weight", width + 1)
            yield Constant(f"model.{side}.{name}.bias", width)
        for prefix in (f"model.{side}.layers.{n}." for n in range(layers)):
            for name in attentions if not model.attention_bias else []:
                for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    yield Constant(f"{prefix}{name}.{part}.bias", width)
            if not model.ffn_bias:
                yield Constant(f"{prefix}fc1.bias", inner)
                yield Constant(f"{prefix}fc2.bias", width)
