"""The pmap backend: whole parameters on every device, each with its part of a batch, and one sum over all.

Owns the axis that sums run over. The programs see the rows of one device.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from flaxformer_mt.parallel.backend import Parallel, put_rows

_AXIS = "devices"


class _SumOverDevices:
    """The `reduce` of a program that sees a part of the batch."""

    def __call__(self, tree: Any) -> Any:
        return jax.lax.psum(tree, _AXIS)

    @property
    def shard(self) -> jax.Array:
        """Which part that is."""
        return jax.lax.axis_index(_AXIS)


class PmapParallel(Parallel):
    """Replicated data parallelism, the least communication there is where parameters fit on one device."""

    def sharding_of(self, path: str, shape: tuple[int, ...]) -> NamedSharding:
        """Whole on every device."""
        return self.replicated

    def put(self, batch: Any) -> Any:
        """Rows [B, ...] as [devices, B / devices, ...]."""
        rows = functools.partial(
            put_rows,
            sharding=NamedSharding(self.mesh, PartitionSpec("data")),
            parts=self.layout.row_parts,
            share=self.row_share,
            stacked=True,
        )
        return jax.tree.map(rows, batch)

    def compile(
        self, function: Callable[..., Any], *, batch: int | None = None, donate: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        """By pmap over the batch; what all devices hold alike goes in and comes out once."""
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
        """Nothing to say: they are whole."""
        return []
