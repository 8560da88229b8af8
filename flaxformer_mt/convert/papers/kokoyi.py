"""Format kokoyi: the PyTorch class in benchmarks/originals/kokoyi.py, whose inputs are embedded tokens.

Matrices are [in, out], except in the feed-forward layers. `hidden_dim` is the width of each head and of the
feed-forward layers. The only mask is causal, so padding is treated like any token.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flaxformer_mt.config import Config
from flaxformer_mt.convert.name_table import FLAT_ROWS, HEAD_STACKED, SAME, Constant, Rule, read_names
from flaxformer_mt.convert.network_fields import Field, value_of, write_options
from flaxformer_mt.convert.papers import post_norm
from flaxformer_mt.convert.papers.post_norm import State, attend, linear, norm
from flaxformer_mt.convert.torch.state_dicts import STATE_NAME, StateDictFormat, tensor_of
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import Vocabs

EMBEDDINGS_NAME = "embeddings.pt"
_SOURCE, _TARGET = "src_embedding", "tgt_embedding"
_FIELDS = (
    *post_norm.FIELDS,
    Field("num_encoder_layers", "L"),
    Field("num_heads", "num_heads"),
    Field("model_dim", "embed_dim"),
    Field("ffn_dim", "hidden_dim"),
    Field("embedding_scale", values=False),
    Field("tying", values="none"),
    Field("attention_bias", values=False),
    Field("padding_mask", values="none"),
)
_MATRICES = """
(source|target)_embedding/embedding                                (src|tgt)_embedding
encoder/layers_{n}/self_attention/(query|key|value|output)/kernel  EncLayers.{n}.attn.W(q|k|v|o)
decoder/layers_{n}/self_attention/(query|key|value|output)/kernel  DecLayers.{n}.mask_attn.W(q|k|v|o)
decoder/layers_{n}/cross_attention/(query|key|value|output)/kernel DecLayers.{n}.attn.W(q|k|v|o)
"""
_LAYERS = """
encoder/layers_{n}/feedforward/(input|output)                      EncLayers.{n}.ffn.Linears.(0|1)
decoder/layers_{n}/feedforward/(input|output)                      DecLayers.{n}.ffn.Linears.(0|1)
encoder/layers_{n}/(self_attention|feedforward)_residual/norm      EncLayers.{n}.norm(1|2)
decoder/layers_{n}/(self_attention|cross_attention|feedforward)_residual/norm  DecLayers.{n}.norm(1|2|3)
"""


def _find_more_problems(config: Config) -> Iterator[str]:
    model = config.model
    yield from post_norm.find_unequal_stacks(model)
    key_dim, value_dim = value_of(model, "key_dim"), value_of(model, "value_dim")
    if not key_dim == value_dim == model.ffn_dim:
        yield (
            f"model.key_dim is {key_dim}, model.value_dim is {value_dim} and model.ffn_dim is "
            f"{model.ffn_dim}; they must be equal: the class has one size for all three, hidden_dim"
        )


def _rules(config: Config) -> list[Rule | Constant]:
    layouts = {"(query|key|value)/kernel": HEAD_STACKED, "output/kernel": FLAT_ROWS, "": SAME}
    return [
        *read_names(_MATRICES, layouts=layouts),
        *read_names(_LAYERS),
        *read_names("output_kernel W", layouts=layouts),
    ]


def _arguments(config: Config, vocabs: Vocabs) -> dict[str, Any]:
    return write_options(_FIELDS, config.model) | {"out_dim": vocabs.target.size}


def _run(state: State, arguments: dict[str, Any], batch: Batch) -> Tensor:
    def embed(table: str, ids: Tensor) -> Tensor:
        column = np.arange(arguments["embed_dim"])
        angles = np.arange(ids.shape[1])[:, None] / 10000.0 ** (2 * (column // 2) / len(column))
        positions = np.where(column % 2, np.cos(angles), np.sin(angles))
        return state[table][ids] + torch.from_numpy(positions.astype(np.float32))

    def attention(name: str, x: Tensor, memory: Tensor, blocked: Tensor) -> Tensor:
        # [H, D, K] -> [D, HK].
        matrices = (state[f"{name}.W{part}"].transpose(0, 1).flatten(1) for part in "qkv")
        query, key, value = (y @ matrix for y, matrix in zip((x, memory, memory), matrices, strict=True))
        mixed = attend(query, key, value, blocked, heads=arguments["num_heads"]) @ state[f"{name}.Wo"]
        first = "attn" if name.startswith("Enc") else "mask_attn"
        layer, _, sublayer = name.rpartition(".")
        return norm(state, f"{layer}.norm{1 if sublayer == first else 2}", x + mixed)

    def feedforward(layer: str, x: Tensor) -> Tensor:
        inner = linear(state, f"{layer}.ffn.Linears.0", x).relu()
        last = 2 if layer.startswith("Enc") else 3
        return norm(state, f"{layer}.norm{last}", x + linear(state, f"{layer}.ffn.Linears.1", inner))

    source, target = tensor_of(batch.source), tensor_of(batch.target_in)
    layers = post_norm.Layers(
        (arguments["L"], "EncLayers.{n}.attn", "EncLayers.{n}"),
        (arguments["L"], "DecLayers.{n}.mask_attn", "DecLayers.{n}.attn", "DecLayers.{n}"),
        attention,
        feedforward,
    )
    unblocked = torch.zeros(1, dtype=torch.bool)
    x, y = embed(_SOURCE, source), embed(_TARGET, target)
    return layers.run(x, y, unblocked, post_norm.is_future(target)) @ state["W"]


STATE_DICT = StateDictFormat(
    "kokoyi",
    _FIELDS,
    _rules,
    _arguments,
    _run,
    find_more_problems=_find_more_problems,
    file_of=lambda name: EMBEDDINGS_NAME if name in (_SOURCE, _TARGET) else STATE_NAME,
)
FORMAT = STATE_DICT.make_format()
