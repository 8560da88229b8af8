"""The pmap backend: replicated parameters, one part of each batch per device, and one sum over all devices.

Programs see the rows of one device.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from flaxformer_mt.parallel.backend import Parallel, put_rows

_AXIS = "devices"


class _SumOverDevices:
    """The `reduce` argument of a program that sees one part of a batch."""

    def __call__(self, tree: Any) -> Any:
        return jax.lax.psum(tree, _AXIS)

    @property
    def shard(self) -> jax.Array:
        """Index of this device's part."""
        return jax.lax.axis_index(_AXIS)


class _Pmapped:
    """A function under pmap, built for each number of arguments."""

    def __init__(self, build: Callable[[int], Any]) -> None:
        self._build = functools.cache(build)

    def __call__(self, *arguments: Any) -> Any:
        return self._build(len(arguments))(*arguments)

    def lower(self, *shapes: Any) -> jax.stages.Lowered:
        """Lower for arguments of these shapes, as the method of this name of `jax.jit` does."""
        # pmap decides the shardings by itself, over a mesh of its own.
        plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
        return self._build(len(shapes)).lower(*plain)


class PmapParallel(Parallel):
    """Replicated data parallelism: the least communication if the parameters fit on one device."""

    def sharding_of(self, path: str, shape: tuple[int, ...]) -> NamedSharding:
        """Return the replicated sharding."""
        return self.replicated

    def put(self, batch: Any) -> Any:
        """Split rows [B, ...] into [devices, B / devices, ...]."""
        rows = functools.partial(
            put_rows,
            sharding=NamedSharding(self.mesh, PartitionSpec("data")),
            parts=self.layout.row_parts,
            share=self.row_share,
            stacked=True,
        )
        return jax.tree.map(rows, batch)

    def put_shapes(self, batch: Any) -> Any:
        """Return [devices, rows / devices, ...] split over data."""
        parts, rows = self.layout.row_parts, NamedSharding(self.mesh, PartitionSpec("data"))

        def stack(x: Any) -> Any:
            shape = (parts, x.shape[0] // parts, *x.shape[1:])
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=rows)

        return jax.tree.map(stack, batch)

    def compile(
        self, function: Callable[..., Any], *, batch: int | None = None, donate: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        """Compile with pmap over the batch; all other arguments and the results are replicated."""
        if batch is None:
            return jax.jit(function, donate_argnums=donate, out_shardings=self.replicated)
        reduced = functools.partial(function, reduce=_SumOverDevices())

        def build(count: int) -> Any:
            return jax.pmap(
                reduced,
                axis_name=_AXIS,
                in_axes=tuple(0 if number == batch else None for number in range(count)),
                out_axes=None,
                donate_argnums=donate,
                devices=None if jax.process_count() > 1 else list(self.mesh.devices.flat),
            )

        return _Pmapped(build)

    def describe_parameters(self, params: Any) -> list[str]:
        """Return no lines, since parameters are replicated."""
        return []
