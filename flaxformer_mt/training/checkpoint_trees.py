"""Training states as the trees of a checkpoint, which has one subtree a layer.

A program may stack its layers (model.scan_layers): its run resumes without, and the reverse.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.training.state import TrainState
from flaxformer_mt.trees import Leaves, flatten_tree, nest_leaves, place_leaf, unflatten_like

# In a path, the stack of all layers, and a single layer.
_STACK = re.compile(r"(?:^|(?<=/))layers/")
_LAYER = re.compile(r"(?:^|(?<=/))layers_(\d+)/")

# Shape of what an optimizer keeps in place of an array that it does not need.
_NOTHING = (1,)


def to_trees(state: TrainState) -> dict[str, Any]:
    """Return a state as the named trees of a checkpoint; `ema_params` only if there is a moving average.

    Stacked layers become single ones, on the host: a device would hold them twice.
    """
    return {name: nest_leaves(split_stacks(leaves)) for name, leaves in _name_leaves(state).items()}


def restore_state(
    checkpoints: Checkpoints, step: int, target: TrainState
) -> tuple[TrainState, dict[str, Any]]:
    """Read a state, and the progress beside it, from a checkpoint with stacked or with single layers.

    Args:
      target: the shapes, dtypes and shardings of the state.

    Raises:
      UserError: see `Checkpoints.restore`.
    """
    wanted, stored = _name_leaves(target), checkpoints.read_specs(step)
    # A tree of other layers is read on the host, and its arrays are placed after they have been arranged.
    other = {
        name
        for name, leaves in wanted.items()
        if _is_stacked(leaves) != _is_stacked(stored.get(name, leaves))
    }
    likes: dict[str, Any] = {name: leaves for name, leaves in wanted.items() if name not in other}
    for name in other:
        shapes = _stack_shapes if _is_stacked(stored[name]) else split_stacks
        likes[name] = {path: np.empty(x.shape, x.dtype) for path, x in shapes(wanted[name]).items()}
    trees, progress = checkpoints.restore(step, {name: nest_leaves(leaves) for name, leaves in likes.items()})
    found = {name: flatten_tree(tree) for name, tree in trees.items()}
    for name in other:
        leaves = split_stacks(found[name]) if _is_stacked(found[name]) else _stack(found[name], wanted[name])
        found[name] = {path: place_leaf(leaf, wanted[name][path]) for path, leaf in leaves.items()}
    counters = found.pop("counters")
    fields = {name: unflatten_like(getattr(target, name), leaves) for name, leaves in found.items()}
    return TrainState(**({"ema_params": None} | fields | counters)), progress


def _name_leaves(state: TrainState) -> dict[str, Leaves]:
    fields: dict[str, Any] = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    if state.ema_params is None:
        del fields["ema_params"]
    counters = {name: fields.pop(name) for name in ("step", "skipped", "skipped_in_a_row")}
    return {name: flatten_tree(tree) for name, tree in fields.items()} | {"counters": counters}


def _is_stacked(paths: Mapping[str, Any]) -> bool:
    return any(_STACK.search(path) for path in paths)


def split_stacks(leaves: Leaves) -> Leaves:
    """Give each layer of a stack its own arrays, by path; leaves are arrays or their shapes.

    {"encoder/layers/scale": [[1, 2], [3, 4]]} becomes {"encoder/layers_0/scale": [1, 2],
    "encoder/layers_1/scale": [3, 4]}. What an optimizer keeps in place of an array is the same in each layer.
    """
    counts: dict[str, int] = {}
    for path, leaf in leaves.items():
        if found := _STACK.search(path):
            stack = _name_stack(path[: found.start()])
            counts[stack] = max(counts.get(stack, 0), leaf.shape[0])
    split: Leaves = {}
    for path, leaf in leaves.items():
        found = _STACK.search(path)
        if found is None:
            split[path] = leaf
            continue
        start, rest = path[: found.start()], path[found.end() :]
        for number, layer in enumerate(_take_layers(leaf, counts[_name_stack(start)])):
            split[f"{start}layers_{number}/{rest}"] = layer
    return split


def _name_stack(start: str) -> str:
    """Return encoder of 1/0/mu/encoder/: the stacks of all trees of an optimizer have as many layers."""
    return start.rstrip("/").rpartition("/")[2]


def _take_layers(leaf: Any, count: int) -> list[Any]:
    if leaf.shape == _NOTHING:
        return [leaf] * count
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)] * count
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return list(jax.jit(lambda x: [x[number] for number in range(count)])(leaf))
    return list(np.asarray(leaf))


def _stack(leaves: Leaves, wanted: Leaves) -> Leaves:
    """Stack the arrays of single layers into arrays of the wanted shapes."""
    layers: dict[str, dict[int, Any]] = {}
    stacked: Leaves = {}
    for path, leaf in leaves.items():
        if found := _LAYER.search(path):
            name = f"{path[: found.start()]}layers/{path[found.end() :]}"
            layers.setdefault(name, {})[int(found[1])] = leaf
        else:
            stacked[path] = leaf
    for path, own in layers.items():
        first = own[0]
        whole = [own[number] for number in range(len(own))]
        stacked[path] = first if first.shape == wanted[path].shape else np.stack(whole)
    return stacked


def _stack_shapes(leaves: Leaves) -> Leaves:
    """Return the shapes of stacks of single layers; see `split_stacks`."""
    counts: dict[str, int] = {}
    for path in leaves:
        if found := _LAYER.search(path):
            start = path[: found.start()]
            counts[start] = max(counts.get(start, 0), int(found[1]) + 1)
    stacked: Leaves = {}
    for path, leaf in leaves.items():
        found = _LAYER.search(path)
        if found is None:
            stacked[path] = leaf
            continue
        start, rest = path[: found.start()], path[found.end() :]
        shape = leaf.shape if leaf.shape == _NOTHING else (counts[start], *leaf.shape)
        stacked[f"{start}layers/{rest}"] = jax.ShapeDtypeStruct(shape, leaf.dtype)
    return stacked
