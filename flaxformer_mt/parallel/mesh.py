"""The mesh backend: jit over the axes data, fsdp and tensor, for models up to the memory of all devices.

Contains the shardings of arrays. XLA derives the communication from them; programs see whole arrays.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flaxformer_mt.parallel.backend import Parallel, put_rows
from flaxformer_mt.parallel.sharding_rules import describe_placements, place_parameters, spec_of
from flaxformer_mt.trees import flatten_tree

_ROWS = PartitionSpec(("data", "fsdp"))


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
        self, function: Callable[..., Any], *, batch: int | None = None, donate: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        """Compile with jit; results are sharded by their paths, so that a state keeps its sharding."""

        @functools.wraps(function)
        def sharded(*arguments: Any) -> Any:
            results = function(*arguments)
            return jax.lax.with_sharding_constraint(results, self.shardings(results))

        return jax.jit(sharded, donate_argnums=donate)

    def describe_parameters(self, params: Any) -> list[str]:
        """Return the table of sharding rules if there are several devices, else no lines."""
        shapes = {path: np.shape(leaf) for path, leaf in flatten_tree(params).items()}
        placements = place_parameters(shapes, self._sizes)
        return describe_placements(placements, self._sizes) if self.device_count > 1 else []
