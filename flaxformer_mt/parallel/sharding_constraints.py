"""Sharding inside a traced program, by the letters of axes: all that models and kernels say about devices.

The mesh is the one in JAX's context (`jax.sharding.get_abstract_mesh`). Training splits the rows of a batch,
and parameters over fsdp, by `Parallel.over_rows`: a program sees its own rows and its own part of each
parameter. The other axes of the mesh are left to XLA. Without a mesh, as on one device, all functions do
nothing.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from flaxformer_mt.shapes import Array

# Letter of an axis -> mesh axis over which XLA splits it. Only the mesh of a search with split parameters
# (split_parameters.py) has an axis `width`: it sends activations in place of parameters.
_MESH_AXES = {"D": "width", "H": "tensor", "F": "tensor", "V": "tensor"}

# Mesh axis over which a program has parts of parameters, along their axis D.
_GATHERED = "fsdp"


def constrain(x: Array, letters: str) -> Array:
    """Pin the sharding of an activation by the letters of its axes, as in constrain(x, "BTD")."""
    return jax.lax.with_sharding_constraint(x, _make_spec(x.shape, letters)) if is_split() else x


def is_split() -> bool:
    """Tell whether XLA splits the program that is being traced over devices."""
    return bool(_split_axes())


def gather(parameter: Array, letters: str) -> Array:
    """Gather a parameter of which the program has a part along D, by the letters of its axes.

    The gradient is summed over the devices, and each receives its part of the sum.
    """
    if not is_gathered(letters):
        return parameter
    axis = letters.index("D")

    def gather_part(part: Array) -> Array:
        return jax.lax.all_gather(part, _GATHERED, axis=axis, tiled=True)

    # By map_parts, since XLA would gather the axes that it splits itself as well.
    return map_parts(gather_part, (parameter, letters), result=(parameter.shape, letters))


def gather_after(earlier: tuple[Array, str], parameter: Array, letters: str) -> Array:
    """Gather a parameter as `gather` does, but not before an array, with its letters, has been computed.

    XLA's CPU compiler removes barriers before it decides on the order of a program, and would use the copy
    that was gathered for the forward pass. It cannot know that the minimum is always 0 (or NaN, where the
    update is not finite anyway, and is skipped).
    """
    if not is_gathered(letters):
        return parameter

    def tie(part: Array, computed: Array) -> Array:
        return part + jnp.minimum(jnp.abs(computed.ravel()[:1]), 0).sum().astype(part.dtype)

    return gather(map_parts(tie, (parameter, letters), earlier, result=(parameter.shape, letters)), letters)


def sum_to_parts(gradient: Array, letters: str) -> Array:
    """Sum the gradient of a gathered parameter over the devices, each of which receives its own part."""
    if not is_gathered(letters):
        return gradient
    axis = letters.index("D")

    def sum_part(part: Array) -> Array:
        return jax.lax.psum_scatter(part, _GATHERED, scatter_dimension=axis, tiled=True)

    return map_parts(sum_part, (gradient, letters), result=(gradient.shape, letters))


def is_gathered(letters: str) -> bool:
    """Tell whether the program has only parts of parameters with these letters."""
    mesh = jax.sharding.get_abstract_mesh()
    return "D" in letters and _GATHERED in mesh.manual_axes and mesh.shape[_GATHERED] > 1


def map_parts(
    function: Callable[..., Array], *inputs: tuple[Array, str], result: tuple[tuple[int, ...], str]
) -> Array:
    """Apply a function to the part of each input that a device holds: for kernels that XLA cannot split.

    Args:
      inputs: arrays with the letters of their axes.
      result: the shape of the result, and the letters of its axes.
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
    """Return sizes of the mesh axes that are left to XLA."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis: mesh.shape[axis] for axis in mesh.auto_axes if mesh.shape[axis] > 1}


def _make_spec(shape: tuple[int, ...], letters: str) -> PartitionSpec:
    """Make the spec of an array; a dimension that is not divisible by its mesh axis is not split.

    Raises:
      ValueError: the letters are not as many as the dimensions.
    """
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
