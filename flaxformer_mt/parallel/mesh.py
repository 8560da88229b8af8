"""The mesh backend: jit over the axes data, fsdp and tensor, for models up to the memory of all devices.

Contains the shardings of arrays. XLA derives the communication from them; programs see whole arrays.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flaxformer_mt.parallel.backend import Parallel, PartOfBatch, put_rows
from flaxformer_mt.parallel.sharding_rules import (
    ACTIVATION_RULES,
    PARAMETER_LETTERS,
    activation_spec,
    describe_placements,
    place_parameters,
    spec_of,
)
from flaxformer_mt.shapes import Array, shard_activations
from flaxformer_mt.trees import flatten_tree

_ROW_AXES = ("data", "fsdp")
_ROWS = PartitionSpec(_ROW_AXES)


class _MeshActivations:
    """Pins the shardings of activations on a mesh, except over the axes `mapped`, which a vmap has taken."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        mapped: tuple[str, ...] = (),
        rules: Mapping[str, tuple[str, ...]] = ACTIVATION_RULES,
        gathers_again: bool = False,
    ) -> None:
        self._sizes, self._mapped, self._rules, self.gathers_again = sizes, mapped, rules, gathers_again
        splits_rows = "B" in rules
        self._row_axes = tuple(
            axis for axis in _ROW_AXES if splits_rows and sizes[axis] > 1 and axis not in mapped
        )
        self.row_parts = math.prod(sizes[axis] for axis in self._row_axes)

    def constrain(self, x: Array, axes: str) -> Array:
        """Pin the sharding that `ACTIVATION_RULES` give, by the mesh of the program that is being traced."""
        spec = activation_spec(axes, x.shape, self._sizes, mapped=self._mapped, rules=self._rules)
        return jax.lax.with_sharding_constraint(x, spec)

    def constrain_gradient(self, x: Array, axes: str) -> Array:
        """Pin the sharding that `PARAMETER_LETTERS` give: devices receive their part of a sum only."""
        spec = activation_spec(axes, x.shape, self._sizes, mapped=self._mapped, rules=PARAMETER_LETTERS)
        own = jax.lax.with_sharding_constraint(x, spec)
        # XLA sends a whole sum to all devices if it finds that several operations each read a slice of it,
        # as of the gradient of query, key and value.
        return own if self._sizes["fsdp"] == 1 else jax.lax.optimization_barrier(own)

    def gather_after(self, earlier: tuple[Array, str], x: Array, axes: str) -> Array:
        """Add to each device's part a zero that it computes from its part of `earlier`, and gather the sum.

        XLA's CPU compiler removes barriers before it decides on the order of a program, and would use the
        parameter that was gathered for the forward pass. It cannot know that the minimum is always 0 (or NaN,
        where the update is not finite anyway, and is skipped).
        """
        activation, letters = earlier
        letters = re.sub("[a-z]", "B", letters, count=1)

        def tie(own: Array, computed: Array) -> Array:
            return own + jnp.minimum(jnp.abs(computed.ravel()[:1]), 0).sum().astype(own.dtype)

        split = activation_spec(axes, x.shape, self._sizes, mapped=self._mapped, rules=PARAMETER_LETTERS)
        specs = split, activation_spec(letters, activation.shape, self._sizes, mapped=self._mapped)
        tied = jax.shard_map(tie, in_specs=specs, out_specs=split, check_vma=False)(x, activation)
        return self.constrain(tied, axes)

    def map_parts(self, function: Callable[..., Any], parts: Any, *shared: Any) -> Any:
        """Map over the parts, each of which stays on the devices that hold its rows."""
        in_axes = (0, *[None] * len(shared))
        with shard_activations(_MeshActivations(self._sizes, (*self._mapped, *self._row_axes))):
            return jax.vmap(function, in_axes=in_axes, spmd_axis_name=self._row_axes)(parts, *shared)

    def copy_to_parts(self, x: Array, axes: str) -> Array:
        """Gather x on the devices of each part; each receives its own part of the gradients' sum."""
        return _copy_to_parts(self, axes, x)

    def spread(self, x: Array, axes: str) -> Array:
        """Repeat a gathered x for each part of the rows."""
        copies = jnp.broadcast_to(self.constrain(x, axes), (self.row_parts, *x.shape))
        spec = activation_spec(axes, x.shape, self._sizes, mapped=self._mapped, rules=self._rules)
        return jax.lax.with_sharding_constraint(copies, PartitionSpec(self._row_axes, *spec))

    def local_shape(self, shape: tuple[int, ...], axes: str) -> tuple[int, ...]:
        """Divide the dimensions that `ACTIVATION_RULES` split by the number of their parts."""
        spec = activation_spec(axes, shape, self._sizes, mapped=self._mapped)
        # A spec names one mesh axis as a string, several as a tuple.
        names = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
        return tuple(
            size // math.prod(self._sizes[axis] for axis in split)
            for size, split in zip(shape, names, strict=True)
        )

    def map_devices(
        self,
        function: Callable[..., Array],
        inputs: Sequence[tuple[Array, str]],
        result: tuple[tuple[int, ...], str],
    ) -> Array:
        """Apply the function by shard_map on the mesh of the program that is being traced."""

        def spec(shape: tuple[int, ...], axes: str) -> PartitionSpec:
            return activation_spec(axes, shape, self._sizes, mapped=self._mapped)

        specs = tuple(spec(array.shape, axes) for array, axes in inputs)
        mapped = jax.shard_map(function, in_specs=specs, out_specs=spec(*result), check_vma=False)
        return mapped(*(array for array, _ in inputs))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _copy_to_parts(sharding: _MeshActivations, axes: str, x: Array) -> Array:
    return sharding.spread(x, axes)


def _copy_forward(sharding: _MeshActivations, axes: str, x: Array) -> tuple[Array, None]:
    return sharding.spread(x, axes), None


def _copy_backward(sharding: _MeshActivations, axes: str, saved: None, gradient: Array) -> tuple[Array]:
    # JAX's own rule would sum the gradient to the sharding of a gathered x, whole on every device.
    return (sharding.constrain_gradient(gradient.sum(0), axes),)


_copy_to_parts.defvjp(_copy_forward, _copy_backward)


class MeshParallel(Parallel):
    """Splits batches over data and fsdp, and parameters over fsdp and tensor; on one device, plain jit."""

    def sharding_of(self, path: str, shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding that the rules of `sharding_rules` give."""
        return NamedSharding(self.mesh, spec_of(path, shape, self._sizes))

    def put(self, batch: Any) -> Any:
        """Split rows over data and fsdp; each row is replicated along tensor."""
        rows = functools.partial(
            put_rows,
            sharding=NamedSharding(self.mesh, _ROWS),
            parts=self.layout.row_parts,
            share=self.row_share,
            stacked=False,
        )
        return jax.tree.map(rows, batch)

    def put_shapes(self, batch: Any) -> Any:
        """Return [rows, ...] split over data and fsdp."""
        rows = NamedSharding(self.mesh, _ROWS)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch)

    def compile(
        self,
        function: Callable[..., Any],
        *,
        batch: int | None = None,
        donate: tuple[int, ...] = (),
        partial: bool = False,
    ) -> Callable[..., Any]:
        """Compile with jit; results are sharded by their paths, so that a state keeps its sharding."""

        @functools.wraps(function)
        def sharded(*arguments: Any) -> Any:
            with self.pin_activations():
                if partial and batch is not None and self.layout.data > 1:
                    results = self._map_parts(function, arguments, batch)
                else:
                    results = function(*arguments)
            shardings = self.partial_shardings(results) if partial else self.shardings(results)
            return jax.lax.with_sharding_constraint(results, shardings)

        return jax.jit(sharded, donate_argnums=donate, compiler_options=self.compiler_options)

    def _map_parts(self, function: Callable[..., Any], arguments: tuple[Any, ...], batch: int) -> Any:
        """Apply a function to the rows of each index of the axis data: results [data, ...]."""
        count = self.layout.data

        def apply(part: Any, index: Array) -> Any:
            own = (*arguments[:batch], part, *arguments[batch + 1 :])
            return function(*own, reduce=PartOfBatch(index))

        parts = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), arguments[batch])
        with shard_activations(_MeshActivations(self._sizes, mapped=("data",))):
            return jax.vmap(apply, spmd_axis_name="data")(parts, jnp.arange(count))

    @contextlib.contextmanager
    def pin_activations(self, rules: Mapping[str, tuple[str, ...]] = ACTIVATION_RULES) -> Iterator[None]:
        """Pin activations by these rules while a program is traced; on one device nothing is pinned."""
        if self.device_count == 1:
            yield
            return
        again = self.layout.gathers_twice and rules is ACTIVATION_RULES
        # The mesh of the context distinguishes the traces of functions that are jitted already.
        with (
            jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh),
            shard_activations(_MeshActivations(self._sizes, rules=rules, gathers_again=again)),
        ):
            yield

    def describe_parameters(self, params: Any) -> list[str]:
        """Return the table of sharding rules if there are several devices, else no lines."""
        shapes = {path: np.shape(leaf) for path, leaf in flatten_tree(params).items()}
        placements = place_parameters(shapes, self._sizes)
        return describe_placements(placements, self._sizes) if self.device_count > 1 else []
