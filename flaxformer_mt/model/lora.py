"""Low-rank adaptation (LoRA, Hu et al. 2022): the change of a matrix is the product of two narrow factors.

An adapted model has the parameters of the base model, under the same paths, and a tree `lora` with the
factors for each adapted matrix, whose path is PATH:

    lora/scale []   lora/PATH/down [I, R]   lora/PATH/up [R, O]   (stacked layers: [L, I, R] and [L, R, O])

The network uses matrix + scale * down @ up. R is the rank; I and O are the numbers of inputs and outputs of
the matrix: an attention output [H, E, D] has I = H * E and O = D.
"""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.model.scanned_layers import STACKED
from flaxformer_mt.parameter_trees import flatten_tree, nest_leaves
from flaxformer_mt.shapes import Array

# Name of the tree of factors, beside the parts of the network.
FACTORS = "lora"

_SCALE = f"{FACTORS}/scale"
_MATRICES = ("kernel", "embedding", "output_kernel")

# Tables with a vector for each token: embeddings [V, D], and the matrix [D, V] of an output layer of its own.
_TABLES = ("_embedding/embedding", "output_kernel")


def is_matrix(path: str) -> bool:
    return not path.startswith(f"{FACTORS}/") and path.rpartition("/")[2] in _MATRICES


def is_table(path: str) -> bool:
    return is_matrix(path) and path.endswith(_TABLES)


def matrix_axes(path: str, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes of a matrix's input axes and of its output axes; for stacked layers, of one layer."""
    names = path.split("/")
    own = tuple(shape)[STACKED in names :]
    # Of three axes, the first two are inputs in an attention's output [H, E, D] and a convolution [1, D, F].
    inputs = 2 if len(own) == 3 and ("output" in names or "feedforward" in names) else 1
    return own[:inputs], own[inputs:]


def matrix_sizes(path: str, shape: Sequence[int]) -> tuple[int, int]:
    inputs, outputs = matrix_axes(path, shape)
    return math.prod(inputs), math.prod(outputs)


def add_factors(
    params: Any,
    paths: Iterable[str],
    *,
    rank: int,
    alpha: float,
    key: Array,
    embedding_rank: int = 0,
) -> Any:
    """Add LoRA factors, which at first leave the output unchanged, for the matrices at these paths.

    `down` is uniform in [-1 / sqrt(I), 1 / sqrt(I)], and `up` is 0; the scale is alpha / rank. The factors of
    a matrix depend neither on the stacking of layers nor on which other matrices are adapted. Tables with one
    vector per token have rank `embedding_rank`, if it is not 0.
    """
    leaves = flatten_tree(params)
    leaves[_SCALE] = jnp.asarray(alpha / rank, jnp.float32)
    for path in paths:
        inputs, outputs = matrix_sizes(path, leaves[path].shape)
        own_rank = embedding_rank if embedding_rank and is_table(path) else rank

        def draw(name: str, inputs: int = inputs, rank: int = own_rank) -> Array:
            own = jax.random.fold_in(key, zlib.crc32(name.encode()))
            bound = 1 / math.sqrt(inputs)
            return jax.random.uniform(own, (inputs, rank), jnp.float32, -bound, bound)

        up = jnp.zeros((own_rank, outputs), jnp.float32)
        down = None
        if STACKED in path.split("/"):
            count = leaves[path].shape[0]
            names = [path.replace(f"{STACKED}/", f"{STACKED}_{number}/", 1) for number in range(count)]
            down, up = jnp.stack(list(map(draw, names))), jnp.zeros((count, own_rank, outputs), jnp.float32)
        leaves[f"{FACTORS}/{path}/down"] = draw(path) if down is None else down
        leaves[f"{FACTORS}/{path}/up"] = up
    return nest_leaves(leaves)


def has_factors(params: Any) -> bool:
    return FACTORS in params


def without_factors(params: Any) -> Any:
    return {name: node for name, node in params.items() if name != FACTORS}


def merge_factors(params: Any) -> Any:
    """Return the network's parameters, with the LoRA changes added to the matrices; see `merge_leaves`."""
    return nest_leaves(merge_leaves(flatten_tree(params))) if has_factors(params) else params


def merge_leaves(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Add the LoRA changes to the adapted matrices; return the parameters of the network, by path.

    JAX arrays stay JAX arrays, and numpy arrays stay numpy arrays; without factors, all stay unchanged.
    """
    merged = {path: leaf for path, leaf in leaves.items() if not path.startswith(f"{FACTORS}/")}
    for name, leaf in leaves.items():
        path, _, kind = name.removeprefix(f"{FACTORS}/").rpartition("/")
        if not name.startswith(f"{FACTORS}/") or kind != "down":
            continue
        up, scale, matrix = leaves[f"{FACTORS}/{path}/up"], leaves[_SCALE], merged[path]
        if isinstance(leaf, np.ndarray):
            change = np.matmul(leaf, up)
        else:
            change = jnp.matmul(leaf, up, precision="highest")
        merged[path] = matrix + (scale * change).reshape(matrix.shape)
    return merged
