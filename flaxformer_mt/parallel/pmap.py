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
        compiled: dict[int, Callable[..., Any]] = {}

        def call(*arguments: Any) -> Any:
            if len(arguments) not in compiled:
                compiled[len(arguments)] = jax.pmap(
                    reduced,
                    axis_name=_AXIS,
                    in_axes=tuple(0 if number == batch else None for number in range(len(arguments))),
                    out_axes=None,
                    donate_argnums=donate,
                    devices=None if jax.process_count() > 1 else list(self.mesh.devices.flat),
                )
            return compiled[len(arguments)](*arguments)

        return call

    def describe_parameters(self, params: Any) -> list[str]:
        """Return no lines, since parameters are replicated."""
        return []
