"""Format decoder-only: state dict of document 002, the decoder-only language model.

Contains the table of names and layouts, the models that the format supports, and the conversion of a sentence
pair to one row of that class. The PyTorch class is in decoder_only_module.py.
"""

from typing import Any

import numpy as np
import torch

from flaxformer_mt.config import Config, ModelConfig
from flaxformer_mt.convert.array_layouts import CONVOLUTION_TO_LINEAR, HEADS_OUT, TRANSPOSED
from flaxformer_mt.convert.documents.decoder_only_module import TransformerDecoder
from flaxformer_mt.convert.format_interface import unsupported_fields
from flaxformer_mt.convert.name_table import Constant, Rule, Shapes, rules_for
from flaxformer_mt.convert.torch.state_dicts import StateDictFormat, tensor_of
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import Vocabs

# model.positions -> the argument `positions` of the class.
_POSITIONS = {"one_vector": "as_written", "learned": "one_hot"}

_ALLOWED: dict[str, tuple[Any, ...]] = {
    "model.architecture": ("decoder_only",),
    "model.activation": ("gelu",),
    "model.norm_position": ("post",),
    "model.norm": ("layer",),
    "model.norm_epsilon": (0,),
    "model.norm_affine": (False,),
    "model.final_norm": (None, False),
    "model.embedding_norm": (False,),
    "model.positions": tuple(_POSITIONS),
    "model.first_position": (0,),
    "model.embedding_scale": (False,),
    "model.logit_scale": (False,),
    "model.embedding_bias": (True,),
    "model.tying": ("none",),
    "model.attention_bias": (True,),
    "model.ffn_bias": (True,),
    "model.output_bias": (True,),
}


def _problems(config: Config) -> list[str]:
    problems = unsupported_fields(config, _ALLOWED)
    if config.model.padding_mask == "none" and config.data.source_language:
        # The settings both and source need no mask in the class: its rows have no padding before the target,
        # and causal attention hides padding after the target from every real token.
        problems.append(
            "model.padding_mask is none; supported with a source: source, both. Rows of the class have no "
            "padding, but with none the Flax model attends to the padding between source and target"
        )
    return problems


def _rules(config: Config, shapes: Shapes) -> list[Rule | Constant]:
    kernel = CONVOLUTION_TO_LINEAR if config.model.ffn_layer == "convolution" else TRANSPOSED
    block = [
        *_head_rules("query", "wq"),
        *_head_rules("key", "wk"),
        *_head_rules("value", "wv"),
        Rule("self_attention/output/kernel", "attention.w.weight", HEADS_OUT),
        Rule("self_attention/output/bias", "attention.w.bias"),
        Rule("feedforward/input/kernel", "ffl1.w.weight", kernel),
        Rule("feedforward/input/bias", "ffl1.w.bias"),
        Rule("feedforward/output/kernel", "ffl2.w.weight", kernel),
        Rule("feedforward/output/bias", "ffl2.w.bias"),
    ]
    return [
        Rule("token_embedding/embedding", "embedding.embedding.weight", TRANSPOSED),
        Rule("token_embedding/bias", "embedding.embedding.bias"),
        Rule("decoder/positions/embedding", "position.embedding.weight", TRANSPOSED),
        Rule("decoder/positions/bias", "position.embedding.bias"),
        *rules_for([("decoder/layers_{n}/", "blocks.{n}.")], block),
        Rule("output_kernel", "w.weight", TRANSPOSED),
        Rule("output_bias", "w.bias"),
    ]


def _head_rules(flax: str, foreign: str) -> list[Rule]:
    path, name = f"self_attention/{flax}", "attention.heads.{h}." + foreign
    return [
        Rule(f"{path}/kernel", f"{name}.weight", TRANSPOSED, head_axis=1),
        Rule(f"{path}/bias", f"{name}.bias", head_axis=0),
    ]


def _arguments(config: Config, vocabs: Vocabs) -> dict[str, Any]:
    model = config.model
    size = model.model_dim // model.num_heads
    return {
        "vocab_size": vocabs.target.size,
        "embedding_size": model.model_dim,
        "window_size": _position_rows(model) - 1,
        "d_k": model.key_dim or size,
        "d_v": model.value_dim or size,
        "n_heads": model.num_heads,
        "hidden": model.ffn_dim,
        "n_blocks": model.num_decoder_layers,
        "dropout": model.dropout_rate,
        "positions": _POSITIONS[model.positions],
    }


def _position_rows(model: ModelConfig) -> int:
    """Return rows of the position table; one_vector has the table too, although its inputs are unbounded."""
    return model.max_positions or 512


def _run(module: torch.nn.Module, batch: Batch, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    assert isinstance(module, TransformerDecoder)
    if batch.source.shape[1] == 0:
        return module.all_logits(tensor_of(batch.target_in))
    rows = []
    for index, length in enumerate(np.asarray(batch.target_mask).sum(axis=1)):
        source = np.asarray(batch.source[index])[np.asarray(batch.source_mask[index])]
        row = np.concatenate([source, np.asarray(batch.target_in[index])[:length]])
        # No padding between source and target: no real token of the Flax model attends to it.
        rows.append(module.all_logits(tensor_of(row)[None])[0, len(source) :])
    return _pad(rows, batch.target_in.shape[1])


def _pad(rows: list[torch.Tensor], length: int) -> torch.Tensor:
    """Stack rows [t, V] of t <= T tokens to [B, T, V], with zeros after the last real token."""
    padded = rows[0].new_zeros(len(rows), length, rows[0].shape[-1])
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


STATE_DICT = StateDictFormat(
    name="decoder-only",
    problems=_problems,
    rules=_rules,
    arguments=_arguments,
    make_module=TransformerDecoder,
    run=_run,
)
FORMAT = STATE_DICT.make_format()
