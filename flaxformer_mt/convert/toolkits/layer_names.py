"""The names of parameters in toolkits that are written in PyTorch, by what differs between them.

All have matrices and biases of linear layers, norms with weight and bias, and a table of embeddings for each
side, which the output layer may share.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.convert.array_layouts import FLAT, HEADS_IN, HEADS_OUT, TRANSPOSED
from flaxformer_mt.convert.name_table import TABLE_TOLERANCE, Constant, Rule, rules_for

_NORM = [Rule("/scale", ".weight"), Rule("/bias", ".bias")]


class TableNames(NamedTuple):
    """Names of the embeddings of both sides, and of the matrix of the output layer."""

    source: str
    target: str
    output: str


class StackNames(NamedTuple):
    """Names within a stack.

    layers: of the layers. sublayers: of each sublayer, and of its norm; "" where the parameters of a sublayer
    are directly in the layer.
    """

    layers: str
    sublayers: Mapping[str, tuple[str, str]]


def find_tying(*, embeddings: Any, output: Any) -> Any:
    """Return model.tying where both sides may share embeddings, and the output layer those of the target."""
    ways = {
        (False, False): "none",
        (False, True): "target_output",
        (True, False): "embeddings",
        (True, True): "all",
    }
    return ways[bool(embeddings), bool(output)]


def embedding_rules(network: ModelConfig, names: TableNames) -> list[Rule]:
    """Return the rules of the embeddings and of the output layer's matrix."""
    shared = network.tying in ("all", "embeddings")
    source, target = ("shared_embedding",) * 2 if shared else ("source_embedding", "target_embedding")
    output = (
        Rule(f"{target}/embedding", names.output)
        if network.tying in ("all", "target_output")
        else Rule("output_kernel", names.output, TRANSPOSED)
    )
    return [Rule(f"{source}/embedding", names.source), Rule(f"{target}/embedding", names.target), output]


def tied_names(network: ModelConfig, names: TableNames) -> list[str]:
    """Return the names that hold one array, of which a file may omit all but one."""
    tied = [names.source] if network.tying in ("all", "embeddings") else []
    tied += [names.target]
    tied += [names.output] if network.tying in ("all", "target_output") else []
    return tied if len(tied) > 1 else []


def attention_rules(projections: Sequence[str], output: str) -> list[Rule]:
    """Return the rules of an attention sublayer.

    Args:
      projections: names of the layers that compute queries, keys and values.
      output: the name of the layer after them.
    """
    pairs = list(zip(("query", "key", "value"), projections, strict=True))
    return [
        *(Rule(f"/{ours}/kernel", f".{theirs}.weight", HEADS_IN) for ours, theirs in pairs),
        *(Rule(f"/{ours}/bias", f".{theirs}.bias", FLAT) for ours, theirs in pairs),
        Rule("/output/kernel", f".{output}.weight", HEADS_OUT),
        Rule("/output/bias", f".{output}.bias"),
    ]


def feedforward_rules(names: Mapping[str, str]) -> list[Rule]:
    """Return the rules of a feed-forward sublayer; `names` are those of its layers input, output and gate."""
    return [
        rule
        for ours, theirs in names.items()
        for rule in (
            Rule(f"/{ours}/kernel", f".{theirs}.weight", TRANSPOSED),
            Rule(f"/{ours}/bias", f".{theirs}.bias"),
        )
    ]


def stack_rules(
    stacks: Mapping[str, StackNames], *, attention: Sequence[Rule], feedforward: Sequence[Rule]
) -> list[Rule]:
    """Return the rules of encoder and decoder, their layers and their norms."""
    rules = []
    for stack, (layers, sublayers) in stacks.items():
        ours, theirs = f"{stack}/layers_{{n}}/", f"{stack}.{layers}.{{n}}"
        for sublayer, (name, norm) in sublayers.items():
            place = f"{theirs}.{name}" if name else theirs
            own = feedforward if sublayer == "feedforward" else attention
            rules += rules_for([(ours + sublayer, place)], own)
            rules += norm_rules(f"{ours}{sublayer}_residual/norm", f"{theirs}.{norm}")
        rules += norm_rules(f"{stack}/final_norm", f"{stack}.layer_norm")
    return rules


def norm_rules(ours: str, theirs: str) -> list[Rule]:
    """Return the rules of one norm."""
    return rules_for([(ours, theirs)], _NORM)


def table_constants(table: np.ndarray, names: Iterable[str]) -> list[Constant]:
    """Return the tables of positions that a file may have, and that are computed here."""
    return [Constant(name, table, optional=True, tolerance=TABLE_TOLERANCE) for name in names]
