"""What both backends are to their users.

Owns the interface, and what it takes to bring host arrays to devices of several processes and back. Knows
neither how parameters are split nor how programs are compiled.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxformer_mt.parallel.device_layout import Layout
from flaxformer_mt.parallel.devices import describe_devices
from flaxformer_mt.trees import flatten_tree, gather_leaf, unflatten_like

T = TypeVar("T")


class Parallel(ABC):
    """Devices that share the work: brings arrays to them and back, and compiles programs for them.

    Arrays on the devices have the shapes of the whole; only batches are in a form of the backend's own. With
    several processes, all of them make the same calls in the same order.
    """

    def __init__(self, layout: Layout, devices: Sequence[jax.Device]) -> None:
        self.layout = layout
        shape = (layout.data, layout.fsdp, layout.tensor)
        self.mesh = Mesh(np.asarray(devices).reshape(shape), ("data", "fsdp", "tensor"))
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self._sizes = dict(self.mesh.shape)

    @property
    def row_share(self) -> tuple[int, ...]:
        """Which of `layout.row_parts` equal parts of a batch's rows this process holds, in order.

        Two processes of two devices each, data 4: (0, 1) on the first and (2, 3) on the second.
        """
        blocks = self.mesh.devices.reshape(self.layout.row_parts, -1)
        mine = jax.process_index()
        return tuple(
            part for part, row in enumerate(blocks) if any(device.process_index == mine for device in row)
        )

    @property
    def row_factor(self) -> int:
        """How many times the rows of this process a whole batch has."""
        return self.layout.row_parts // len(self.row_share)

    @property
    def counts_rows(self) -> bool:
        """Whether this process is the first that holds its rows, so that counting them counts them once."""
        blocks = self.mesh.devices.reshape(self.layout.row_parts, -1)
        return all(
            min(device.process_index for device in blocks[part]) == jax.process_index()
            for part in self.row_share
        )

    @abstractmethod
    def sharding_of(self, path: str, shape: tuple[int, ...]) -> NamedSharding:
        """Where an array of a parameter, a state or a result lives, by its path in the tree."""

    @abstractmethod
    def put(self, batch: Any) -> Any:
        """Splits a batch by rows over the devices; of several processes each gives its `row_share` alone."""

    @abstractmethod
    def compile(
        self, function: Callable[..., Any], *, batch: int | None = None, donate: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        """The function compiled for the devices.

        Args:
          function: with a batch, it takes the keyword `reduce`, which adds a tree up over the parts of the
            batch, and whose `shard` is the number of the part at hand, or None where the program sees all.
          batch: which positional argument is a batch from `put`.
          donate: positional arguments that give their memory to results.
        """

    @abstractmethod
    def describe_parameters(self, params: Any) -> list[str]:
        """Lines for the log on how parameters (arrays or shapes) are split; none where they are whole."""

    def shardings(self, tree: Any) -> Any:
        """`sharding_of` for every leaf of a tree of arrays or shapes, as a tree of the same structure."""
        leaves = flatten_tree(tree)
        return unflatten_like(
            tree, {path: self.sharding_of(path, np.shape(leaf)) for path, leaf in leaves.items()}
        )

    def init(self, function: Callable[[], T]) -> T:
        """What `function` makes, born where it will live; its numbers do not depend on the devices."""
        return jax.jit(function, out_shardings=self.shardings(jax.eval_shape(function)))()

    def place(self, tree: Any) -> Any:
        """Puts host arrays of a parameter tree or a state where they live."""
        return jax.tree.map(_place, tree, self.shardings(tree))

    def fetch(self, tree: Any) -> Any:
        """The values as numpy arrays on the host, whole; waits for them."""
        leaves = jax.tree.leaves(tree)
        for leaf in leaves:
            if isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
                leaf.copy_to_host_async()
        return jax.tree.map(lambda leaf: np.asarray(gather_leaf(leaf)), tree)

    @property
    def device_kind(self) -> str:
        """What JAX calls these devices: `NVIDIA H200`, `TPU v5 lite`, `cpu`."""
        return self.mesh.devices.flat[0].device_kind

    @property
    def device_count(self) -> int:
        """How many devices share the work, those of other processes too."""
        return self.mesh.size

    def memory(self) -> int | None:
        """Most bytes that any of this process's devices has had in use; None where none tells, as on CPUs."""
        statistics = [device.memory_stats() or {} for device in self.mesh.local_devices]
        peaks = [found["peak_bytes_in_use"] for found in statistics if "peak_bytes_in_use" in found]
        return max(peaks, default=None)

    def describe(self) -> str:
        """For the log: `8 x NVIDIA H200`, or `AMD EPYC (2 cores)`."""
        return describe_devices(self.mesh.devices.flat, jax.process_count())


def _place(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if jax.process_count() == 1:
        return jax.device_put(leaf, sharding)
    host = np.asarray(gather_leaf(leaf))
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def put_rows(
    array: np.ndarray, sharding: NamedSharding, *, parts: int, share: tuple[int, ...], stacked: bool
) -> jax.Array:
    """A batch's array on the devices, from the rows that this process holds.

    Args:
      array: [rows, ...], of which `share` says which parts of the whole batch they are.
      sharding: of the whole, along its first axis.
      parts: into how many parts the rows of the whole are split.
      stacked: the whole is [parts, rows / parts, ...] instead of [rows, ...].
    """
    height = array.shape[0] // len(share)
    if stacked:
        array = array.reshape(len(share), height, *array.shape[1:])
    if len(share) == parts:
        return jax.device_put(array, sharding)
    unit = 1 if stacked else height
    whole = (parts * unit, *array.shape[1:])

    def part_of(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        place = share.index((index[0].start or 0) // unit) * unit
        return array[place : place + unit]

    return jax.make_array_from_callback(whole, sharding, part_of)
