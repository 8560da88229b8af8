"""Parameters of 8-bit integers: dynamic quantisation for translation (products of them: kernels/int8.py).

A quantised matrix has its scales as a sibling:

    .../kernel int8 [*inputs, *outputs]    .../kernel_scale float32 [*outputs]

The table of the output layer is also looked up and gathered from, so it stays, and the root of the tree gets
`output_int8` [V, D] and `output_scale` [V]. Embeddings, norms and biases are not quantised, nor are the
columns of shortlists. Parameters that devices split are not quantised.
"""

from typing import Any

import numpy as np

from flaxformer_mt.kernels.int8 import quantize_matrix
from flaxformer_mt.model.lora import matrix_axes
from flaxformer_mt.trees import flatten_tree, nest_leaves

# Where the output layer's table can be, the first that is there: of its own, tied, or one for all.
_TABLES = (
    "output_kernel",
    "target_embedding/embedding",
    "shared_embedding/embedding",
    "token_embedding/embedding",
)


def quantize_params(params: Any) -> Any:
    """Quantise all projections and the output layer of a model's parameters, with one subtree per layer.

    Args:
      params: nested dicts of float arrays, numpy's or JAX's; what is quantised becomes numpy's.
    """
    leaves = flatten_tree(params)
    quantized = dict(leaves)
    for path, leaf in leaves.items():
        if path.endswith("/kernel"):
            inputs, _ = matrix_axes(path, leaf.shape)
            quantized[path], quantized[f"{path}_scale"] = quantize_matrix(leaf, range(len(inputs)))
    table = next(path for path in _TABLES if path in leaves)
    rows = np.asarray(leaves[table]).T if table == "output_kernel" else leaves[table]
    quantized["output_int8"], quantized["output_scale"] = quantize_matrix(rows, [1])
    return nest_leaves(quantized)
