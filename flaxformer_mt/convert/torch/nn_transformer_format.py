"""Format torch-nn: state dict of a model that is built around torch.nn.Transformer.

Contains the table of names and layouts with PyTorch's fused projections, the models that the format supports,
and zeros for biases that PyTorch has and the model lacks. The PyTorch class is in nn_transformer_module.py.

torch.nn.Transformer has a single dropout rate. The separate rates of a config, which do not affect the
outputs of a trained model, are not exported.
"""

from typing import Any

import numpy as np
import torch

from flaxformer_mt.config import Config, ModelConfig
from flaxformer_mt.convert.array_layouts import CONVOLUTION_TO_LINEAR, FLAT, HEADS_IN, HEADS_OUT, TRANSPOSED
from flaxformer_mt.convert.format_interface import unsupported_fields
from flaxformer_mt.convert.name_table import Constant, Rule, Shapes, rules_for
from flaxformer_mt.convert.torch.nn_transformer_module import TransformerModel
from flaxformer_mt.convert.torch.state_dicts import StateDictFormat, tensor_of
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import Vocabs

_ALLOWED: dict[str, tuple[Any, ...]] = {
    "model.architecture": ("encoder_decoder",),
    "model.decoder_self_attention": ("attention",),
    "model.activation": ("relu", "gelu"),
    "model.norm": ("layer",),
    "model.norm_affine": (True,),
    "model.embedding_norm": (False,),
    "model.positions": ("sinusoidal", "learned"),
    "model.embedding_bias": (False,),
}

_PROJECTIONS = ("/query", "/key", "/value")
_ATTENTION = [
    Rule(tuple(f"{name}/kernel" for name in _PROJECTIONS), ".in_proj_weight", HEADS_IN),
    Rule(tuple(f"{name}/bias" for name in _PROJECTIONS), ".in_proj_bias", FLAT),
    Rule("/output/kernel", ".out_proj.weight", HEADS_OUT),
    Rule("/output/bias", ".out_proj.bias"),
]
_NORM = [Rule("/scale", ".weight"), Rule("/bias", ".bias")]
_STACKS = {
    "encoder": {"self_attention": "self_attn"},
    "decoder": {"self_attention": "self_attn", "cross_attention": "multihead_attn"},
}


def _problems(config: Config) -> list[str]:
    """Return reasons why the class cannot express the model; its heads all have the size d_model / nhead."""
    model = config.model
    size = model.model_dim / model.num_heads
    sizes = (None, int(size)) if size.is_integer() else (None,)
    return unsupported_fields(config, {**_ALLOWED, "model.key_dim": sizes, "model.value_dim": sizes})


def _rules(config: Config, shapes: Shapes) -> list[Rule | Constant]:
    model = config.model
    layout = CONVOLUTION_TO_LINEAR if model.ffn_layer == "convolution" else TRANSPOSED
    feedforward = [
        Rule("/input/kernel", ".linear1.weight", layout),
        Rule("/input/bias", ".linear1.bias"),
        Rule("/output/kernel", ".linear2.weight", layout),
        Rule("/output/bias", ".linear2.bias"),
    ]
    rules: list[Rule | Constant] = [*_embedding_rules(model)]
    for stack, attentions in _STACKS.items():
        foreign = f"transformer.{stack}"
        rules += rules_for([(f"{stack}/final_norm", f"{foreign}.norm")], _NORM)
        flax, foreign = f"{stack}/layers_{{n}}/", f"{foreign}.layers.{{n}}"
        rules += rules_for([(flax + a, f"{foreign}.{b}") for a, b in attentions.items()], _ATTENTION)
        rules += rules_for([(f"{flax}feedforward", foreign)], feedforward)
        sublayers = [*attentions, "feedforward"]
        norms = [(f"{flax}{name}_residual/norm", f"{foreign}.norm{i}") for i, name in enumerate(sublayers, 1)]
        rules += rules_for(norms, _NORM)
    return [*rules, *_zeros(model)]


def _embedding_rules(model: ModelConfig) -> list[Rule]:
    shared = model.tying in ("all", "embeddings")
    source, target = ("shared_embedding",) * 2 if shared else ("source_embedding", "target_embedding")
    rules = [
        Rule(f"{source}/embedding", "source_embedding.weight"),
        Rule(f"{target}/embedding", "target_embedding.weight"),
        Rule("encoder/positions/embedding", "source_positions.weight"),
        Rule("decoder/positions/embedding", "target_positions.weight"),
        Rule("output_bias", "output.bias"),
    ]
    if model.tying in ("all", "target_output"):
        return [*rules, Rule(f"{target}/embedding", "output.weight")]
    return [*rules, Rule("output_kernel", "output.weight", TRANSPOSED)]


def _zeros(model: ModelConfig) -> list[Constant]:
    """Return zeros for the biases that PyTorch's layers have and a model without biases lacks."""
    width, zeros = model.model_dim, []
    layers = {"encoder": model.num_encoder_layers, "decoder": model.num_decoder_layers}
    for stack, attentions in _STACKS.items():
        for number in range(layers[stack]):
            layer = f"transformer.{stack}.layers.{number}"
            if not model.attention_bias:
                for name in attentions.values():
                    zeros.append((f"{layer}.{name}.in_proj_bias", 3 * width))
                    zeros.append((f"{layer}.{name}.out_proj.bias", width))
            if not model.ffn_bias:
                zeros += [(f"{layer}.linear1.bias", model.ffn_dim), (f"{layer}.linear2.bias", width)]
    return [Constant(name, np.zeros(size, np.float32)) for name, size in zeros]


def _arguments(config: Config, vocabs: Vocabs) -> dict[str, Any]:
    model = config.model
    pre = model.norm_position == "pre"
    return {
        "source_size": vocabs.source.size,
        "target_size": vocabs.target.size,
        "d_model": model.model_dim,
        "nhead": model.num_heads,
        "num_encoder_layers": model.num_encoder_layers,
        "num_decoder_layers": model.num_decoder_layers,
        "dim_feedforward": model.ffn_dim,
        "dropout": model.dropout_rate,
        "activation": model.activation,
        "layer_norm_eps": model.norm_epsilon,
        "norm_first": pre,
        "final_norm": pre if model.final_norm is None else model.final_norm,
        "positions": model.positions,
        "first_position": model.first_position,
        "max_positions": model.longest_input,
        "embedding_scale": model.embedding_scale,
        "logit_scale": model.logit_scale,
        "output_bias": model.output_bias,
        "tying": model.tying,
        "padding_mask": model.padding_mask,
    }


def _run(module: torch.nn.Module, batch: Batch, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    masks = (torch.from_numpy(np.array(mask)) for mask in (batch.source_mask, batch.target_mask))
    return module(tensor_of(batch.source), tensor_of(batch.target_in), *masks)


STATE_DICT = StateDictFormat(
    name="torch-nn",
    problems=_problems,
    rules=_rules,
    arguments=_arguments,
    make_module=TransformerModel,
    run=_run,
)
FORMAT = STATE_DICT.make_format()
