"""Format decoder-only: the PyTorch class in benchmarks/originals/decoder_only.py, without a padding mask."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from flaxformer_mt.config import Config
from flaxformer_mt.convert.name_table import Constant, Rule, make_rule, read_names
from flaxformer_mt.convert.network_fields import Field, write_options
from flaxformer_mt.convert.papers.post_norm import State, attend, is_future, linear
from flaxformer_mt.convert.torch.state_dicts import StateDictFormat, tensor_of
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import Vocabs

_FIELDS = (
    Field("architecture", values="decoder_only"),
    Field("key_dim", "d_k"),
    Field("value_dim", "d_v"),
    Field("num_heads", "n_heads"),
    Field("ffn_dim", "hidden"),
    Field("num_decoder_layers", "n_blocks"),
    Field("dropout_rate", "dropout"),
    # as_written adds the same vector to every token; one_hot adds the vector of the token's position.
    Field("positions", "positions", {"as_written": "one_vector", "one_hot": "learned"}),
    Field("activation", values="gelu"),
    Field("norm_position", values="post"),
    Field("norm_epsilon", values=0),
    Field("norm_affine", values=False),
    Field("embedding_scale", values=False),
    Field("embedding_bias", values=True),
    Field("tying", values="none"),
    Field("output_bias", values=True),
    Field("padding_mask", values=("source", "both", "none")),
)
_NAMES = """
decoder/layers_{n}/self_attention/(query|key|value)  blocks.{n}.attention.heads.{h}.w(q|k|v)
decoder/layers_{n}/self_attention/output             blocks.{n}.attention.w
decoder/layers_{n}/feedforward/(input|output)        blocks.{n}.ffl(1|2).w
output                                               w
output_bias                                          w.bias
"""


def _find_more_problems(config: Config) -> Iterator[str]:
    if config.model.padding_mask == "none" and config.data.source_language:
        # For the values both and source, the class needs no mask: its rows have no padding before the target,
        # and causal attention hides padding after the target from all other tokens.
        yield (
            "model.padding_mask is none; supported with a source: source, both. Rows of the class have no "
            "padding, but with none the Flax model attends to the padding between source and target"
        )


def _rules(config: Config) -> list[Rule | Constant]:
    # The maps of one-hot vectors are linear layers.
    tables = [("token_embedding", "embedding"), ("decoder/positions", "position")]
    return [
        *(
            rule
            for ours, theirs in tables
            for rule in (
                Rule(f"{ours}/embedding", f"{theirs}.embedding.weight", make_rule("kernel", "").layout),
                Rule(f"{ours}/bias", f"{theirs}.embedding.bias"),
            )
        ),
        *read_names(_NAMES),
    ]


def _arguments(config: Config, vocabs: Vocabs) -> dict[str, Any]:
    return {
        "vocab_size": vocabs.target.size,
        "embedding_size": config.model.model_dim,
        # Number of positions; one_vector has a table too, although its inputs are unbounded.
        "window_size": (config.model.max_positions or 512) - 1,
        **write_options(_FIELDS, config.model),
    }


def _run(state: State, arguments: dict[str, Any], batch: Batch) -> Tensor:
    if batch.source.shape[1] == 0:
        return _compute_logits(state, arguments, tensor_of(batch.target_in))
    rows = []
    for index, length in enumerate(np.asarray(batch.target_mask).sum(axis=1)):
        source = np.asarray(batch.source[index])[np.asarray(batch.source_mask[index])]
        row = np.concatenate([source, np.asarray(batch.target_in[index])[:length]])
        # No padding between source and target: in the Flax model, no other token attends to it.
        logits = _compute_logits(state, arguments, tensor_of(row)[None])[0, len(source) :]
        rows.append(functional.pad(logits, (0, 0, 0, batch.target_in.shape[1] - len(logits))))
    return torch.stack(rows)


def _compute_logits(state: State, arguments: dict[str, Any], ids: Tensor) -> Tensor:
    """Return next-token logits [B, T, V] for ids [B, T]."""

    def embed(name: str, indices: Tensor) -> Tensor:
        return state[f"{name}.embedding.weight"].T[indices] + state[f"{name}.embedding.bias"]

    def heads(block: str, part: str, x: Tensor) -> Tensor:
        names = (f"{block}.attention.heads.{head}.w{part}" for head in range(arguments["n_heads"]))
        return torch.cat([linear(state, name, x) for name in names], dim=-1)

    def normalize(x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / x.std(-1, correction=0, keepdim=True)

    x = embed("embedding", ids)
    if arguments["positions"] == "as_written":
        rows = torch.arange(arguments["window_size"] + 1, dtype=x.dtype)
        x = x + linear(state, "position.embedding", rows)
    else:
        x = x + embed("position", torch.arange(ids.shape[1]))
    for block in (f"blocks.{number}" for number in range(arguments["n_blocks"])):
        query, key, value = (heads(block, part, x) for part in "qkv")
        mixed = attend(query, key, value, is_future(ids), heads=arguments["n_heads"])
        x = normalize(x + linear(state, f"{block}.attention.w", mixed))
        inner = functional.gelu(linear(state, f"{block}.ffl1.w", x))
        x = normalize(x + linear(state, f"{block}.ffl2.w", inner))
    return linear(state, "w", x)


STATE_DICT = StateDictFormat(
    "decoder-only", _FIELDS, _rules, _arguments, _run, find_more_problems=_find_more_problems
)
FORMAT = STATE_DICT.make_format()
