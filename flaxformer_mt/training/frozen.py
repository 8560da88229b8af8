"""Frozen parameters: those whose paths match a pattern of optim.freeze, which training leaves as they are."""

import fnmatch
from collections.abc import Sequence
from typing import Any

import jax

from flaxformer_mt.errors import UserError
from flaxformer_mt.trees import flatten_tree, unflatten_like


def is_frozen(path: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches the path of a parameter, or the beginning of its path.

    `encoder` and `*/layers_0/*` both match `encoder/layers_0/norm/scale`.
    """
    return any(fnmatch.fnmatchcase(path, wanted) for one in patterns for wanted in (one, f"{one}/*"))


def label_parameters(params: Any, patterns: Sequence[str]) -> Any:
    """Returns the tree with "frozen" or "trained" in place of each parameter."""
    labels = {path: "frozen" if is_frozen(path, patterns) else "trained" for path in flatten_tree(params)}
    return unflatten_like(params, labels)


def stop_frozen_gradients(params: Any, patterns: Sequence[str]) -> Any:
    """Returns the parameters; gradients with respect to the frozen ones are 0 and cost nothing."""
    if not patterns:
        return params
    leaves = {
        path: jax.lax.stop_gradient(leaf) if is_frozen(path, patterns) else leaf
        for path, leaf in flatten_tree(params).items()
    }
    return unflatten_like(params, leaves)


def check_patterns(params: Any, patterns: Sequence[str]) -> None:
    """Checks optim.freeze against the parameters, arrays or shapes.

    Raises:
      UserError: a pattern matches no parameter, or nothing is left to train.
    """
    paths = list(flatten_tree(params))
    for pattern in patterns:
        if not any(is_frozen(path, [pattern]) for path in paths):
            raise UserError(
                f"optim.freeze has {pattern!r}, which matches no parameter; parameters are named like "
                f"{', '.join(_examples(paths))}; * stands for any characters"
            )
    if patterns and all(is_frozen(path, patterns) for path in paths):
        raise UserError(
            f"optim.freeze {','.join(patterns)} matches all {len(paths)} parameters, and none is left to "
            "train; leave some of them out"
        )


def describe_frozen(params: Any, patterns: Sequence[str]) -> str:
    """Returns how many of the parameters are trained, for the log; "" if none is frozen."""
    sizes = {path: leaf.size for path, leaf in flatten_tree(params).items()}
    trained = sum(size for path, size in sizes.items() if not is_frozen(path, patterns))
    share = trained / sum(sizes.values())
    return f"{trained:,} parameters ({share:.1%}) are trained; the others are frozen" if patterns else ""


def _examples(paths: Sequence[str]) -> list[str]:
    """The first parameter below each name of the top level."""
    first: dict[str, str] = {}
    for path in paths:
        first.setdefault(path.partition("/")[0], path)
    return list(first.values())
