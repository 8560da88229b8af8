"""Conversion between training states and the trees of a checkpoint, which has one subtree per layer.

Checkpoints do not depend on model.scan_layers, which stacks the layers of a program, so that a run may be
resumed with either setting.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.model.lora import FACTORS, has_factors, without_factors
from flaxformer_mt.parallel import Parallel
from flaxformer_mt.parallel.processes import decide_once, work_in_all
from flaxformer_mt.parameter_trees import Leaves, flatten_tree, nest_leaves, place_leaf, unflatten_like
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.runs.run_directory import IMPORTED_STEP
from flaxformer_mt.training.resume_position import TrainProgress
from flaxformer_mt.training.state import TrainState

# In a path, the stack of all layers, and a single layer.
_STACK = re.compile(r"(?:^|(?<=/))layers/")
_LAYER = re.compile(r"(?:^|(?<=/))layers_(\d+)/")

# Shape of what an optimizer keeps in place of an array that it does not need.
_NOTHING = (1,)


def to_trees(state: TrainState) -> dict[str, Any]:
    """Return a state as the named trees of a checkpoint; without a moving average, `ema_params` is absent.

    Stacked layers are split into single layers on the host, since a device would hold them twice.
    """
    return {name: nest_leaves(split_stacks(flatten_tree(tree))) for name, tree in _name_trees(state).items()}


def load_state(
    checkpoints: Checkpoints, parallel: Parallel, make_state: Callable[[], TrainState]
) -> tuple[TrainState, TrainProgress]:
    """Return the newest checkpoint's state, on the devices of `parallel`, or an initial state if none exists.

    The checkpoint may have been saved with any device layout. Process 0 chooses the checkpoint for all
    processes; if one process cannot read it, all processes raise UserError.
    """
    step = decide_once(checkpoints.newest_undamaged)
    if step is None:
        return make_state(), TrainProgress()
    return work_in_all(
        lambda: _restore_state(checkpoints, parallel, make_state, step),
        what=f"read checkpoint {step}, from which process 0 resumes training",
    )


def _restore_state(
    checkpoints: Checkpoints, parallel: Parallel, make_state: Callable[[], TrainState], step: int
) -> tuple[TrainState, TrainProgress]:
    if step == IMPORTED_STEP:  # an imported model has parameters only
        state = make_state()
        targets = {"params": without_factors(state.params)}
        params = restore_trees(checkpoints, IMPORTED_STEP, targets)[0]["params"]
        params |= {FACTORS: state.params[FACTORS]} if has_factors(state.params) else {}
        ema_params = None if state.ema_params is None else jax.tree.map(jnp.copy, params)
        return dataclasses.replace(state, params=params, ema_params=ema_params), TrainProgress()
    target = parallel.place_shapes(jax.eval_shape(make_state))
    trees, progress = restore_trees(checkpoints, step, _name_trees(target))
    counters = trees.pop("counters")
    return TrainState(**({"ema_params": None} | trees | counters)), TrainProgress.from_dict(progress)


def restore_trees(
    checkpoints: Checkpoints, step: int, targets: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read trees as `Checkpoints.restore` does; layers are stacked or split as in `targets`."""
    wanted = {name: flatten_tree(tree) for name, tree in targets.items()}
    stored = checkpoints.read_specs(step)
    rearrange = {
        name: split_stacks if _is_stacked(stored[name]) else join_stacks
        for name, leaves in wanted.items()
        if name in stored and _is_stacked(stored[name]) != _is_stacked(leaves)
    }
    # A tree of other layers is read on the host, and its arrays are placed after they have been arranged.
    likes = dict(wanted)
    for name, function in rearrange.items():
        inverse = split_stacks if function is join_stacks else join_stacks
        likes[name] = {path: np.empty(x.shape, x.dtype) for path, x in inverse(wanted[name]).items()}
    trees, progress = checkpoints.restore(step, {name: nest_leaves(leaves) for name, leaves in likes.items()})
    found = {name: flatten_tree(tree) for name, tree in trees.items()}
    for name, function in rearrange.items():
        arranged = function(found[name])
        found[name] = {path: place_leaf(leaf, wanted[name][path]) for path, leaf in arranged.items()}
    return {name: unflatten_like(targets[name], leaves) for name, leaves in found.items()}, progress


def _name_trees(state: TrainState) -> dict[str, Any]:
    fields: dict[str, Any] = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    if state.ema_params is None:
        del fields["ema_params"]
    counters = {name: fields.pop(name) for name in ("step", "skipped", "skipped_in_a_row")}
    return fields | {"counters": counters}


def _is_stacked(paths: Mapping[str, Any]) -> bool:
    return any(_STACK.search(path) for path in paths)


def split_stacks(leaves: Leaves) -> Leaves:
    """Split the arrays of stacked layers into one array per layer; leaves are arrays or shapes by path.

    {"encoder/layers/scale": [[1, 2], [3, 4]]} becomes {"encoder/layers_0/scale": [1, 2],
    "encoder/layers_1/scale": [3, 4]}. A placeholder of shape (1,), which an optimizer keeps where it needs no
    array, is copied to each layer.
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
    """Return the last name of a path, such as encoder of 1/0/mu/encoder/; all trees have the same stacks."""
    return start.rstrip("/").rpartition("/")[2]


def _take_layers(leaf: Any, count: int) -> list[Any]:
    if leaf.shape == _NOTHING:
        return [leaf] * count
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)] * count
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return list(jax.jit(lambda x: [x[number] for number in range(count)])(leaf))
    return list(np.asarray(leaf))


def join_stacks(leaves: Leaves) -> Leaves:
    """Invert `split_stacks`: stack the arrays of all layers `layers_N` along a new first axis."""
    layers: dict[str, dict[int, Any]] = {}
    joined: Leaves = {}
    for path, leaf in leaves.items():
        if found := _LAYER.search(path):
            name = f"{path[: found.start()]}layers/{path[found.end() :]}"
            layers.setdefault(name, {})[int(found[1])] = leaf
        else:
            joined[path] = leaf
    for path, own in layers.items():
        joined[path] = _join_layers([own[number] for number in range(len(own))])
    return joined


def _join_layers(leaves: list[Any]) -> Any:
    first = leaves[0]
    if first.shape == _NOTHING:
        return first
    if isinstance(first, np.ndarray):
        return np.stack(leaves)
    return jax.ShapeDtypeStruct((len(leaves), *first.shape), first.dtype)
