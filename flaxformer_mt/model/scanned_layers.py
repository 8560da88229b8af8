"""Conversion between the two layouts of a stack's parameters.

With `model.scan_layers`, all blocks of a stack share one tree `layers`, whose arrays have a leading axis L
(the number of blocks). Otherwise each block has its own tree `layers_N`.
"""

import operator
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.shapes import Array

# Name of the tree that holds all blocks of a stack.
STACKED = "layers"

_SINGLE = re.compile(r"layers_(\d+)")


def stack_layers(params: Any) -> Any:
    """Stack the blocks `layers_N` of each stack, in order; other parts of the tree stay unchanged.

        {"encoder": {"layers_0": {"scale": [1, 2]}, "layers_1": {"scale": [3, 4]}}}
        -> {"encoder": {"layers": {"scale": [[1, 2], [3, 4]]}}}

    Numpy arrays stay numpy arrays; JAX arrays, traced or not, are allowed too. Raises ValueError if blocks
    are not numbered from 0, or differ in structure or shape.
    """
    if not isinstance(params, dict):
        return params
    single = {int(found[1]): name for name in params if (found := _SINGLE.fullmatch(name))}
    others = {name: stack_layers(node) for name, node in params.items() if name not in single.values()}
    if not single:
        return others
    if sorted(single) != list(range(len(single))):
        raise ValueError(f"the blocks of a stack must be numbered 0 to {len(single) - 1}: {sorted(single)}")
    blocks = [params[single[number]] for number in range(len(single))]
    return others | {STACKED: jax.tree.map(lambda *leaves: _stack(leaves), *blocks)}


def unstack_layers(params: Any) -> Any:
    """Invert `stack_layers`: give each block its own tree `layers_N`."""
    if not isinstance(params, dict):
        return params
    others = {name: unstack_layers(node) for name, node in params.items() if name != STACKED}
    if STACKED not in params:
        return others
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(params[STACKED])}
    if len(sizes) != 1:
        raise ValueError(f"all arrays of stacked blocks must have the same leading axis, not {sizes}")
    blocks = (jax.tree.map(operator.itemgetter(number), params[STACKED]) for number in range(sizes.pop()))
    return others | {f"{STACKED}_{number}": block for number, block in enumerate(blocks)}


def _stack(leaves: Sequence[Array]) -> Array:
    return np.stack(leaves) if isinstance(leaves[0], np.ndarray) else jnp.stack(leaves)
