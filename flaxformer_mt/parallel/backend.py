"""The interface of both backends, and transfers of arrays between hosts and devices.

The backends decide how parameters are split and how programs are compiled.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxformer_mt.parallel.device_layout import DeviceLayout
from flaxformer_mt.parallel.devices import describe_devices, device_memory
from flaxformer_mt.trees import flatten_tree, gather_leaf, unflatten_like

T = TypeVar("T")


class Parallel(ABC):
    """Devices that share the work: transfers arrays to and from them, and compiles programs for them.

    Arrays on the devices have their global shapes; only batches have a form that depends on the backend. With
    several processes, all processes make the same calls in the same order.
    """

    def __init__(
        self,
        layout: DeviceLayout,
        devices: Sequence[jax.Device],
        compiler_options: Mapping[str, str | bool] = MappingProxyType({}),
    ) -> None:
        self.layout = layout
        # Options of XLA for the programs that `compile` makes.
        self.compiler_options = dict(compiler_options)
        shape = (layout.data, layout.fsdp, layout.tensor)
        self.mesh = Mesh(np.asarray(devices).reshape(shape), ("data", "fsdp", "tensor"))
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self._sizes = dict(self.mesh.shape)

    @property
    def row_share(self) -> tuple[int, ...]:
        """Indices of the parts of a batch's rows that this process holds, of `layout.row_parts` equal parts.

        Two processes of two devices each, data 4: (0, 1) on the first and (2, 3) on the second.
        """
        blocks = self.mesh.devices.reshape(self.layout.row_parts, -1)
        own_index = jax.process_index()
        return tuple(
            part
            for part, row in enumerate(blocks)
            if any(device.process_index == own_index for device in row)
        )

    @property
    def row_factor(self) -> int:
        """Ratio of the rows of a whole batch to the rows of this process."""
        return self.layout.row_parts // len(self.row_share)

    @property
    def counts_rows(self) -> bool:
        """Whether this process is the first that holds its rows: each row is counted by one process only."""
        blocks = self.mesh.devices.reshape(self.layout.row_parts, -1)
        return all(
            min(device.process_index for device in blocks[part]) == jax.process_index()
            for part in self.row_share
        )

    @abstractmethod
    def sharding_of(self, path: str, shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding of an array of a parameter, a state or a result, by its path in the tree."""

    @abstractmethod
    def put(self, batch: Any) -> Any:
        """Split a batch by rows over the devices; of several processes, each passes its `row_share` only."""

    @abstractmethod
    def put_shapes(self, batch: Any) -> Any:
        """Return the shapes and shardings of the result of `put` for a batch of these shapes."""

    @abstractmethod
    def compile(
        self,
        function: Callable[..., Any],
        *,
        batch: int | None = None,
        donate: tuple[int, ...] = (),
        partial: bool = False,
    ) -> Callable[..., Any]:
        """Compile a function for the devices.

        Args:
          function: with a batch, it takes the keyword argument `reduce`, which sums a tree over the parts of
            the batch. `reduce.shard` is the index of the current part, or None where the program sees the
            whole batch.
          batch: index of the positional argument that is a batch from `put`.
          donate: indices of the positional arguments whose memory the results may reuse.
          partial: the results are partial sums, one for each index of the axis data: [data, ...] if data is
            above 1. With a batch, the sums over these parts are left to `sum_parts`; without one, arguments
            and results are partial sums.
        """

    def sum_parts(self, tree: Any) -> Any:
        """Add up the partial sums of a program that is compiled with `partial`; called in another program."""
        return jax.tree.map(lambda x: x.sum(0), tree) if self.layout.data > 1 else tree

    @abstractmethod
    def describe_parameters(self, params: Any) -> list[str]:
        """Return lines for the log on how parameters (arrays or shapes) are split; none if replicated."""

    def shardings(self, tree: Any) -> Any:
        """Return `sharding_of` for every leaf of a tree of arrays or shapes, as a tree of equal structure."""
        leaves = flatten_tree(tree)
        return unflatten_like(
            tree, {path: self.sharding_of(path, np.shape(leaf)) for path, leaf in leaves.items()}
        )

    def partial_shardings(self, tree: Any) -> Any:
        """Return the shardings of partial sums: those of `shardings` after an axis split over data."""
        leaves = flatten_tree(tree)
        if self.layout.data == 1:
            return self.shardings(tree)
        specs = {path: self.sharding_of(path, np.shape(leaf)[1:]).spec for path, leaf in leaves.items()}
        return unflatten_like(
            tree,
            {path: NamedSharding(self.mesh, PartitionSpec("data", *spec)) for path, spec in specs.items()},
        )

    def init(self, function: Callable[[], T]) -> T:
        """Compute `function()` directly into its sharding; the values do not depend on the devices."""
        return jax.jit(function, out_shardings=self.shardings(jax.eval_shape(function)))()

    def place(self, tree: Any) -> Any:
        """Transfer host arrays of a parameter tree or a state to the devices, each with its sharding."""
        return jax.tree.map(_place, tree, self.shardings(tree))

    def fetch(self, tree: Any) -> Any:
        """Return the values as whole numpy arrays on the host; blocks until they are computed."""
        leaves = jax.tree.leaves(tree)
        for leaf in leaves:
            if isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
                leaf.copy_to_host_async()
        return jax.tree.map(lambda leaf: np.asarray(gather_leaf(leaf)), tree)

    @property
    def device_kind(self) -> str:
        """The name of these devices in JAX: `NVIDIA H200`, `TPU v5 lite`, `cpu`."""
        return self.mesh.devices.flat[0].device_kind

    @property
    def platform(self) -> str:
        """The platform of these devices: cpu, gpu or tpu."""
        return self.mesh.devices.flat[0].platform

    @property
    def device_count(self) -> int:
        """Number of devices that share the work, including those of other processes."""
        return self.mesh.size

    def memory(self) -> int | None:
        """Return the peak memory in bytes of any device of this process; None if unavailable, as on CPUs."""
        statistics = [device.memory_stats() or {} for device in self.mesh.local_devices]
        peaks = [found["peak_bytes_in_use"] for found in statistics if "peak_bytes_in_use" in found]
        return max(peaks, default=None)

    def memory_limit(self) -> int | None:
        """Return the bytes that a program may use on every device of this process; None if unavailable."""
        found = [device_memory(device) for device in self.mesh.local_devices]
        return min((memory[0] for memory in found if memory is not None), default=None)

    def describe(self) -> str:
        """Return a description for the log: `8 x NVIDIA H200`, or `AMD EPYC (2 cores)`."""
        return describe_devices(self.mesh.devices.flat, jax.process_count())


class PartOfBatch:
    """The `reduce` argument of a program that sees one part of a batch and returns the sums of this part."""

    def __init__(self, shard: Any) -> None:
        # The index of the part.
        self.shard = shard

    def __call__(self, tree: Any) -> Any:
        """Return the tree."""
        return tree


def _place(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if jax.process_count() == 1:
        return jax.device_put(leaf, sharding)
    host = np.asarray(gather_leaf(leaf))
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def put_rows(
    array: np.ndarray, sharding: NamedSharding, *, parts: int, share: tuple[int, ...], stacked: bool
) -> jax.Array:
    """Transfer an array of a batch to the devices, from the rows that this process holds.

    Args:
      array: [rows, ...], the rows of this process.
      sharding: of the whole batch, along its first axis.
      parts: number of parts into which the rows of the whole batch are split.
      share: indices of the parts that `array` consists of.
      stacked: the whole batch is [parts, rows / parts, ...] instead of [rows, ...].
    """
    part_rows = array.shape[0] // len(share)
    if stacked:
        array = array.reshape(len(share), part_rows, *array.shape[1:])
    if len(share) == parts:
        return jax.device_put(array, sharding)
    unit = 1 if stacked else part_rows
    whole = (parts * unit, *array.shape[1:])

    def part_of(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        place = share.index((index[0].start or 0) // unit) * unit
        return array[place : place + unit]

    return jax.make_array_from_callback(whole, sharding, part_of)
