"""The pmap backend: replicated parameters, one part of each batch per device, and one sum over all devices.

Programs see the rows of one device.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from flaxformer_mt.parallel.backend import Parallel, PartOfBatch, put_rows

_AXIS = "data"


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
            sharding=NamedSharding(self.mesh, PartitionSpec(_AXIS)),
            parts=self.layout.row_parts,
            share=self.row_share,
            stacked=True,
        )
        return jax.tree.map(rows, batch)

    def put_shapes(self, batch: Any) -> Any:
        """Return [devices, rows / devices, ...] split over data."""
        parts, rows = self.layout.row_parts, NamedSharding(self.mesh, PartitionSpec(_AXIS))

        def stack(x: Any) -> Any:
            shape = (parts, x.shape[0] // parts, *x.shape[1:])
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=rows)

        return jax.tree.map(stack, batch)

    def compile(
        self,
        function: Callable[..., Any],
        *,
        batch: int | None = None,
        donate: tuple[int, ...] = (),
        partial: bool = False,
    ) -> Callable[..., Any]:
        """Compile with shard_map over the batch; other arguments, and whole results, are replicated."""
        split, whole = PartitionSpec(_AXIS), PartitionSpec()
        results = split if partial else whole
        if batch is None:
            whole_results = NamedSharding(self.mesh, results)
            return jax.jit(
                function,
                donate_argnums=donate,
                out_shardings=whole_results,
                compiler_options=self.compiler_options,
            )

        def on_device(*arguments: Any) -> Any:
            own = jax.tree.map(lambda x: x[0], arguments[batch])
            reduce = PartOfBatch(jax.lax.axis_index(_AXIS)) if partial else _SumOverDevices()
            found = function(*arguments[:batch], own, *arguments[batch + 1 :], reduce=reduce)
            return jax.tree.map(lambda x: x[None], found) if partial else found

        def on_all(*arguments: Any) -> Any:
            specs = tuple(split if number == batch else whole for number in range(len(arguments)))
            return jax.shard_map(
                on_device, mesh=self.mesh, in_specs=specs, out_specs=results, check_vma=False
            )(*arguments)

        return jax.jit(on_all, donate_argnums=donate, compiler_options=self.compiler_options)

    def describe_parameters(self, params: Any) -> list[str]:
        """Return no lines, since parameters are replicated."""
        return []
