"""The mesh backend: jit over the axes data, fsdp and tensor, for any model that fits the devices together.

Owns where arrays lie. XLA derives the communication from it; the programs see whole arrays.
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
    """Batches split over data and fsdp, parameters over fsdp and tensor; on one device it is plain jit."""

    def sharding_of(self, path: str, shape: tuple[int, ...]) -> NamedSharding:
        """By the rules of `rules`."""
        return NamedSharding(self.mesh, spec_of(path, shape, self._sizes))

    def put(self, batch: Any) -> Any:
        """Rows over data and fsdp; a row is whole on all devices along tensor."""
        rows = functools.partial(
            put_rows,
            sharding=NamedSharding(self.mesh, _ROWS),
            parts=self.layout.row_parts,
            share=self.row_share,
            stacked=False,
        )
        return jax.tree.map(rows, batch)

    def compile(
        self, function: Callable[..., Any], *, batch: int | None = None, donate: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        """By jit; results are laid as their paths say, so that a state stays where it was born."""

        @functools.wraps(function)
        def laid(*arguments: Any) -> Any:
            results = function(*arguments)
            return jax.lax.with_sharding_constraint(results, self.shardings(results))

        return jax.jit(laid, donate_argnums=donate)

    def describe_parameters(self, params: Any) -> list[str]:
        """The table of rules, if there is more than one device."""
        shapes = {path: np.shape(leaf) for path, leaf in flatten_tree(params).items()}
        placements = place_parameters(shapes, self._sizes)
        return describe_placements(placements, self._sizes) if self.device_count > 1 else []
