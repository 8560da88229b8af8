"""Sharding of parameters on a mesh, by rules from path patterns to axes.

Each parameter matches one rule. The axes of a rule belong to the last dimensions of an array, so that layers
stacked along a first dimension (model.scan_layers) and convolutions follow the same rules. A rule applies to
every array whose path ends like a parameter's, so that gradients, optimizer states and moving averages are
sharded like their parameters.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

# For each dimension, the axis over which it is split, or None.
Axes = tuple[str | None, ...]

# Pattern of the end of a path -> axes of the last dimensions. Matrices are split over fsdp along the model
# width and over tensor along heads, feed-forward width or vocabulary; vectors of the model width are
# replicated, since they are small.
RULES: tuple[tuple[str, Axes], ...] = (
    (r"(shared|source|target|token)_embedding/embedding", ("tensor", "fsdp")),  # [V, D]
    (r"(shared|source|target|token)_embedding/bias", (None,)),  # [D]
    (r"positions/embedding", (None, "fsdp")),  # [positions, D]
    (r"relative_positions/embedding", (None, "tensor")),  # [buckets, H]
    (r"positions/bias", (None,)),  # [D]
    (r"(self|cross)_attention/(query|key|value)/kernel", ("fsdp", "tensor", None)),  # [D, H, K]
    (r"(self|cross)_attention/(query|key|value)/bias", ("tensor", None)),  # [H, K]
    (r"(self|cross)_attention/output/kernel", ("tensor", None, "fsdp")),  # [H, E, D]
    (r"(self|cross)_attention/output/bias", (None,)),  # [D]
    (r"recurrence/(input|forget)/kernel", ("fsdp", "tensor")),  # [D, D]
    (r"recurrence/forget/bias", ("tensor",)),  # [D]
    (r"feedforward/(input|gate)/kernel", ("fsdp", "tensor")),  # [D, F]
    (r"feedforward/(input|gate)/bias", ("tensor",)),  # [F]
    (r"feedforward/output/kernel", ("tensor", "fsdp")),  # [F, D]
    (r"feedforward/output/bias", (None,)),  # [D]
    (r"(final_|embedding_)?norm/(scale|bias)", (None,)),  # [D]
    (r"output_kernel", ("fsdp", "tensor")),  # [D, V]
    (r"output_bias", ("tensor",)),  # [V]
)

# Patterns of matrices -> axes of the factors of their changes (optim.lora): down is split as the matrix is
# along its inputs, up as it is along its outputs; the rank is not split.
_FACTOR_RULES = tuple(
    rule
    for pattern, axes in RULES
    if pattern.endswith(("kernel", "embedding"))
    for rule in (
        (rf"{pattern}/down", (axes[0], None)),  # [I, R]
        (rf"{pattern}/up", (None, next(filter(None, axes[1:]), None))),  # [R, O]
    )
)
# The rows of chosen tokens (optim.lora.tokens) are split along the width, as tables are.
_ROW_RULES = tuple(
    rule
    for pattern in (r"(shared|source|target|token)_embedding/embedding", r"output_kernel")
    for rule in ((rf"{pattern}/rows", (None, "fsdp")), (rf"{pattern}/ids", (None,)))  # [N, D], [N]
)
RULES += (*_FACTOR_RULES, *_ROW_RULES, (r"lora/scale", ()))

_PATTERNS = tuple((re.compile(rf"(?:^|/)(?:{pattern})$"), axes) for pattern, axes in RULES)


class Placement(NamedTuple):
    """The rule that a parameter matches, and the sharding that results."""

    pattern: str
    shape: tuple[int, ...]
    spec: PartitionSpec


def spec_of(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> PartitionSpec:
    """Return the PartitionSpec of the array at a path; an array that matches no rule is replicated.

    A dimension that is not divisible by its axis is not split. An array with fewer dimensions than its rule
    is replicated (for example the factors that Adafactor keeps of a matrix).

    With {"fsdp": 2, "tensor": 4}, `layers_0/feedforward/input/kernel` [6, 8] is split ("fsdp", "tensor"), and
    `step` [] is replicated.
    """
    axes = next((axes for pattern, axes in _PATTERNS if pattern.search(path)), ())
    if len(shape) < len(axes):
        return PartitionSpec()
    aligned = (None,) * (len(shape) - len(axes)) + axes
    kept = [
        axis if axis and sizes[axis] > 1 and size % sizes[axis] == 0 else None
        for axis, size in zip(aligned, shape, strict=True)
    ]
    while kept and kept[-1] is None:
        kept.pop()
    return PartitionSpec(*kept)


def fsdp_axis(path: str, dimensions: int) -> int | None:
    """Return the dimension of the array at a path that is split over fsdp; None if none is.

    `layers_0/feedforward/output/kernel` [F, D] has 1, and [L, F, D] of stacked layers 2.
    """
    axes = next((axes for pattern, axes in _PATTERNS if pattern.search(path)), ())
    if "fsdp" not in axes or dimensions < len(axes):
        return None
    return dimensions - len(axes) + axes.index("fsdp")


def place_parameters(shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]) -> dict[str, Placement]:
    """Return the placement of each parameter, by path.

    Raises:
      ValueError: a path matches no rule or several rules, because a parameter was renamed without its rule.
    """
    placements = {}
    for path, shape in shapes.items():
        matching = [
            rule[0] for rule, (pattern, _) in zip(RULES, _PATTERNS, strict=True) if pattern.search(path)
        ]
        if len(matching) != 1:
            raise ValueError(f"the parameter {path} matches {len(matching)} sharding rules: {matching}")
        placements[path] = Placement(matching[0], shape, spec_of(path, shape, sizes))
    return placements


def describe_placements(placements: Mapping[str, Placement], sizes: Mapping[str, int]) -> list[str]:
    """Return the table for the log, one line each: rule, number of parameters, shape, axes and one path."""
    rows: dict[tuple[Any, ...], tuple[int, str]] = {}
    for path, placement in placements.items():
        key = (placement.pattern, tuple(placement.spec), placement.shape)
        count = rows[key][0] + 1 if key in rows else 1
        rows[key] = (count, path)
    width = max((len(pattern) for pattern, _, _ in rows), default=0)
    lines = []
    for (pattern, spec, shape), (count, path) in rows.items():
        split = [f"{axis} {sizes[axis]}" if axis else "-" for axis in spec]
        sharding = ", ".join(split + ["-"] * (len(shape) - len(split))) if split else "whole on every device"
        lines.append(f"  {pattern:<{width}}  {count:>4} x {list(shape)}: {sharding} (as {path})")
    return lines
