"""Sharding inside a traced program, where models and kernels name the axes of arrays by letters: "BTD".

The mesh comes from JAX's context (`jax.sharding.get_abstract_mesh`). In training, `Parallel.over_rows` splits
the rows of a batch, and parameters over fsdp, so a program sees only its own rows and its own part of each
parameter. XLA splits arrays over the other axes of the mesh. Without a mesh, as on one device, all functions
do nothing.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from flaxformer_mt.shapes import Array

# Letter of an axis -> mesh axis over which XLA splits it. Only the mesh of a search with split parameters
# (`SplitParameters`) has an axis `width`: it sends activations in place of parameters.
_MESH_AXES = {"D": "width", "H": "tensor", "F": "tensor", "V": "tensor"}

# Mesh axis over which a program has parts of parameters, along their axis D.
_GATHERED = "fsdp"


def constrain(x: Array, letters: str) -> Array:
    """Constrain the sharding of an activation by the letters of its axes, as in constrain(x, "BTD")."""
    return jax.lax.with_sharding_constraint(x, _make_spec(x.shape, letters)) if is_split() else x


def is_split() -> bool:
    return bool(_split_axes())


def gather(parameter: Array, letters: str) -> Array:
    """Gather a parameter if the program has only a part of it along axis D; `letters` name its axes.

    In the backward pass, the gradient is summed over the devices, and each device receives its part of it.
    """
    if not is_gathered(letters):
        return parameter
    axis = letters.index("D")

    def gather_part(part: Array) -> Array:
        return jax.lax.all_gather(part, _GATHERED, axis=axis, tiled=True)

    # By map_parts, since XLA would gather the axes that it splits itself as well.
    return map_parts(gather_part, (parameter, letters), result=(parameter.shape, letters))


def gather_after(earlier: tuple[Array, str], parameter: Array, letters: str) -> Array:
    """Gather a parameter as `gather` does, but only after the array of `earlier` has been computed.

    `earlier` is an array with its letters. To force this order, a term that is always 0 is added, which
    depends on the array: XLA's CPU compiler removes barriers, and would reuse the copy that was gathered for
    the forward pass. If the array has NaN, so does the term, but then the step is skipped anyway.
    """
    if not is_gathered(letters):
        return parameter

    def tie(part: Array, computed: Array) -> Array:
        return part + jnp.minimum(jnp.abs(computed.ravel()[:1]), 0).sum().astype(part.dtype)

    return gather(map_parts(tie, (parameter, letters), earlier, result=(parameter.shape, letters)), letters)


def sum_to_parts(gradient: Array, letters: str) -> Array:
    """Sum the gradient of a gathered parameter over the devices; each device receives its part of the sum."""
    if not is_gathered(letters):
        return gradient
    axis = letters.index("D")

    def sum_part(part: Array) -> Array:
        return jax.lax.psum_scatter(part, _GATHERED, scatter_dimension=axis, tiled=True)

    return map_parts(sum_part, (gradient, letters), result=(gradient.shape, letters))


def is_gathered(letters: str) -> bool:
    """Return whether the program has only a part of each parameter whose axes have these letters."""
    mesh = jax.sharding.get_abstract_mesh()
    return "D" in letters and _GATHERED in mesh.manual_axes and mesh.shape[_GATHERED] > 1


def map_parts(
    function: Callable[..., Array], *inputs: tuple[Array, str], result: tuple[tuple[int, ...], str]
) -> Array:
    """Apply a function on each device to the device's part of each input, for kernels that XLA cannot split.

    Each input is an array with the letters of its axes; `result` is the shape and the letters of the result.
    """
    arrays = [array for array, _ in inputs]
    if not is_split():
        return function(*arrays)
    specs = tuple(_make_spec(array.shape, letters) for array, letters in inputs)
    mapped = jax.shard_map(
        function,
        in_specs=specs,
        out_specs=_make_spec(*result),
        axis_names=set(_split_axes()),
        check_vma=False,
    )
    return mapped(*arrays)


def _split_axes() -> dict[str, int]:
    mesh = jax.sharding.get_abstract_mesh()
    return {axis: mesh.shape[axis] for axis in mesh.auto_axes if mesh.shape[axis] > 1}


def _make_spec(shape: tuple[int, ...], letters: str) -> PartitionSpec:
    """Make the PartitionSpec of an array; a dimension that its mesh axis does not divide is not split."""
    if len(letters) != len(shape):
        raise ValueError(f"{letters} names {len(letters)} dimensions, but the array has the shape {shape}")
    sizes = _split_axes()
    axes = (_MESH_AXES.get(letter, "") for letter in letters)
    return PartitionSpec(
        *(
            axis if size % sizes.get(axis, math.inf) == 0 else None
            for axis, size in zip(axes, shape, strict=True)
        )
    )


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
RULES += (*_FACTOR_RULES, (r"lora/scale", ()))

_PATTERNS = tuple((re.compile(rf"(?:^|/)(?:{pattern})$"), axes) for pattern, axes in RULES)


class Placement(NamedTuple):
    """The sharding of a parameter, and the pattern of the rule that it matches."""

    pattern: str
    shape: tuple[int, ...]
    spec: PartitionSpec


def spec_of(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> PartitionSpec:
    """Return the PartitionSpec of the array at a path; an array that matches no rule is replicated.

    A dimension that its mesh axis does not divide is not split. An array with fewer dimensions than its rule
    is replicated, such as the factors of a matrix in Adafactor's state.

    With `sizes` {"fsdp": 2, "tensor": 4}, `layers_0/feedforward/input/kernel` [6, 8] is split over ("fsdp",
    "tensor"), and `step` [] is replicated.
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
    """Return the index of the dimension along which the array at a path is split over fsdp; None: not split.

    It is 1 for `layers_0/feedforward/output/kernel` [F, D], and 2 for the same of stacked layers, [L, F, D].
    """
    axes = next((axes for pattern, axes in _PATTERNS if pattern.search(path)), ())
    if "fsdp" not in axes or dimensions < len(axes):
        return None
    return dimensions - len(axes) + axes.index("fsdp")


def choose_placements(
    shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]
) -> dict[str, Placement]:
    """Return the placement of each parameter, by path; raise ValueError unless each path matches one rule."""
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
    """Return a log line per rule and shape: the number of arrays, their sharding, and one path as example."""
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
