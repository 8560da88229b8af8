"""Selects the trained parameters: all, all except optim.freeze, or the parameters of optim.lora.

Gradients, their sums and the optimizer state contain only the trained parameters. The patterns of the config
are matched against parameter paths.
"""

import collections
import fnmatch
from collections.abc import Sequence
from typing import Any

from flaxformer_mt.config import LoraConfig, OptimConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.lora import FACTORS, is_matrix, is_table, matrix_sizes
from flaxformer_mt.parameter_trees import flatten_tree, nest_leaves, unflatten_like


def is_frozen(path: str, patterns: Sequence[str]) -> bool:
    """Return whether one of the patterns matches the path of a parameter, or a parent of this path.

    `encoder` and `*/layers_0/*` both match `encoder/layers_0/norm/scale`.
    """
    return any(fnmatch.fnmatchcase(path, wanted) for one in patterns for wanted in (one, f"{one}/*"))


def is_trained(path: str, optim: OptimConfig) -> bool:
    """Return whether a parameter is trained; with optim.lora: only factors and matches of `also_train`."""
    if optim.lora.rank:
        is_factor = path.startswith(f"{FACTORS}/") and path.endswith(("/down", "/up"))
        return is_factor or is_frozen(path, optim.lora.also_train)
    return not is_frozen(path, optim.freeze)


def select_trained(tree: Any, optim: OptimConfig) -> Any:
    """Return, as nested dicts, the trained (not frozen) part of a tree that has the parameters' paths."""
    if not (optim.freeze or optim.lora.rank):
        return tree
    return nest_leaves({path: leaf for path, leaf in flatten_tree(tree).items() if is_trained(path, optim)})


def replace_trained(params: Any, trained: Any, optim: OptimConfig) -> Any:
    """Return all parameters: the trained ones from `trained`, the frozen ones from `params`."""
    if not (optim.freeze or optim.lora.rank):
        return trained
    return unflatten_like(params, flatten_tree(params) | flatten_tree(trained))


def rank_at(path: str, lora: LoraConfig) -> int:
    return lora.embedding_rank if lora.embedding_rank and is_table(path) else lora.rank


def find_targets(params: Any, lora: LoraConfig) -> list[str]:
    """Return the paths of the matrices that optim.lora adapts; `params` has arrays or shapes."""
    return [path for path in flatten_tree(params) if is_matrix(path) and is_frozen(path, lora.targets)]


def check_patterns(params: Any, optim: OptimConfig) -> None:
    """Raise UserError if optim.freeze or optim.lora does not fit `params`, a tree of arrays or shapes."""
    paths = list(flatten_tree(params))
    if optim.lora.rank:
        _check_lora(params, optim.lora)
        return
    _check_matches("optim.freeze", optim.freeze, paths)
    if optim.freeze and all(is_frozen(path, optim.freeze) for path in paths):
        raise UserError(
            f"optim.freeze {','.join(optim.freeze)} matches all {len(paths)} parameters, and none is left to "
            "train; leave some of them out"
        )


def _check_matches(name: str, patterns: Sequence[str], paths: Sequence[str], what: str = "parameter") -> None:
    for pattern in patterns:
        if not any(is_frozen(path, [pattern]) for path in paths):
            raise UserError(
                f"{name} has {pattern!r}, which matches no {what}; those of the model are named like "
                f"{', '.join(_examples(paths))}; * stands for any characters"
            )


def _check_lora(params: Any, lora: LoraConfig) -> None:
    leaves = flatten_tree(params)
    matrices = {path: matrix_sizes(path, leaf.shape) for path, leaf in leaves.items() if is_matrix(path)}
    if not lora.targets:
        raise UserError("optim.lora.targets is empty; name the matrices to adapt, as in */kernel")
    _check_matches("optim.lora.targets", lora.targets, list(matrices), "matrix")
    _check_matches("optim.lora.also_train", lora.also_train, list(leaves))
    targets = find_targets(params, lora)
    if both := [path for path in targets if is_frozen(path, lora.also_train)]:
        raise UserError(
            f"optim.lora.targets and optim.lora.also_train both match {len(both)} matrices, such as "
            f"{both[0]}; adapt a matrix or train all of it"
        )
    for path in sorted(targets, key=lambda path: min(matrices[path])):
        rank, (inputs, outputs) = rank_at(path, lora), matrices[path]
        if rank > min(inputs, outputs):
            own = lora.embedding_rank and is_table(path)
            raise UserError(
                f"optim.lora.{'embedding_rank' if own else 'rank'} is {rank}, but {path} is a matrix of "
                f"{inputs} x {outputs}; give at most {min(inputs, outputs)}, or leave it out of "
                "optim.lora.targets"
            )
    if lora.embedding_rank and not any(map(is_table, targets)):
        raise UserError(
            f"optim.lora.embedding_rank is {lora.embedding_rank}, but optim.lora.targets "
            f"{','.join(lora.targets)} match no table of embeddings; add */embedding"
        )


def describe_frozen(params: Any, optim: OptimConfig) -> str:
    """Return a log message that says how many parameters are trained; "" if none is frozen."""
    sizes = {path: leaf.size for path, leaf in flatten_tree(params).items()}
    trained = sum(size for path, size in sizes.items() if is_trained(path, optim))
    if trained == sum(sizes.values()):
        return ""
    total = sum(sizes.values())
    text = f"{trained:,} of {total:,} parameters ({trained / total:.1%}) are trained; the others are frozen"
    if not optim.lora.rank:
        return text
    ranks = [
        rank_at(path.removeprefix("lora/").removesuffix("/down"), optim.lora)
        for path in sizes
        if path.endswith("/down")
    ]
    changes = [f"{count} of rank {rank}" for rank, count in sorted(collections.Counter(ranks).items())]
    return f"{text}; changes of matrices: {', '.join(changes)}"


def _examples(paths: Sequence[str]) -> list[str]:
    first: dict[str, str] = {}
    for path in paths:
        first.setdefault(path.partition("/")[0], path)
    return list(first.values())
