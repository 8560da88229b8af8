"""Training states as the trees of a checkpoint, which has one subtree a layer.

A program may stack its layers (model.scan_layers): its run resumes without, and the reverse.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.curriculum import Position
from flaxformer_mt.parameter_trees import Leaves, flatten_tree, nest_leaves, place_leaf, unflatten_like
from flaxformer_mt.runs.checkpoint_index import rank_scores
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.training.state import TrainState

# In a path, the stack of all layers, and a single layer.
_STACK = re.compile(r"(?:^|(?<=/))layers/")
_LAYER = re.compile(r"(?:^|(?<=/))layers_(\d+)/")

# Shape of what an optimizer keeps in place of an array that it does not need.
_NOTHING = (1,)


def to_trees(state: TrainState) -> dict[str, Any]:
    """Return a state as the named trees of a checkpoint; `ema_params` only if there is a moving average.

    Stacked layers become single ones, on the host: a device would hold them twice.
    """
    return {name: nest_leaves(split_stacks(flatten_tree(tree))) for name, tree in _name_trees(state).items()}


def restore_state(
    checkpoints: Checkpoints, step: int, target: TrainState
) -> tuple[TrainState, dict[str, Any]]:
    """Read a state, and the progress beside it, from a checkpoint with stacked or with single layers."""
    trees, progress = restore_trees(checkpoints, step, _name_trees(target))
    counters = trees.pop("counters")
    return TrainState(**({"ema_params": None} | trees | counters)), progress


def restore_trees(
    checkpoints: Checkpoints, step: int, targets: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read trees as `Checkpoints.restore` does, whether their layers are stacked there or in `targets`."""
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


def join_stacks(leaves: Leaves) -> Leaves:
    """Invert `split_stacks`: give the layers `layers_N` of each stack arrays with a leading axis."""
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


# Keys of progress.json written by version 0.1 -> today's fields.
_RENAMED = {"without_gain": "evaluations_since_best"}


@dataclass
class TrainProgress:
    """The position in the data, the clock, and the scores of a run.

    `epoch`, `index` and the fields of the stage name the next batch, see `Position`. `metrics` are those of
    the evaluation at `step`, if there was one. `log` is what the next line of the training log has
    accumulated so far. `interim` marks a checkpoint that was saved only because training was asked to stop.
    `texts` are those that were read, see `Pairs.name_texts`; earlier versions did not record them.
    """

    step: int = 0
    epoch: int = 0
    index: int = 0
    stage: int = 0
    stage_epoch: int = 0
    stage_batches: int = 0
    train_seconds: float = 0.0
    target_tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    best_value: float | None = None
    best_step: int | None = None
    best_loss: float | None = None
    evaluations_since_best: int = 0
    log: dict[str, Any] = field(default_factory=dict)
    interim: bool = False
    texts: dict[str, str] = field(default_factory=dict)

    @property
    def position(self) -> Position:
        """The next batch."""
        return Position(self.epoch, self.index, self.stage, self.stage_epoch, self.stage_batches)

    def advance(self, position: Position) -> None:
        """Record one update; `position` is the next batch."""
        self.step += 1
        self.epoch, self.index, self.stage, self.stage_epoch, self.stage_batches = position
        self.metrics = {}

    def record_evaluation(self, metrics: dict[str, float], *, best_metric: str) -> bool:
        """Record an evaluation; return True if it is the best so far."""
        self.metrics = dict(metrics)
        rank = rank_scores(metrics, best_metric)
        best = rank_scores({"loss": self.best_loss, best_metric: self.best_value}, best_metric)
        # A non-finite value is never the best: no later value would compare as better.
        if rank is not None and (best is None or rank > best):
            self.best_value, self.best_loss = metrics[best_metric], metrics.get("loss")
            self.best_step, self.evaluations_since_best = self.step, 0
            return True
        self.evaluations_since_best += 1
        return False

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainProgress":
        """Return the inverse of `to_dict`; read checkpoints of version 0.1 too."""
        return cls(**{_RENAMED.get(name, name): value for name, value in values.items()})


def has_ended(data: DataConfig, progress: TrainProgress) -> bool:
    """Return whether the last of the stages has ended, which ends training; False without stages."""
    return 0 < len(data.stages) <= progress.stage
