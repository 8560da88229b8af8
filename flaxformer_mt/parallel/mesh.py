"""`Parallel`: a mesh of devices with the axes data, fsdp and tensor, its arrays, and its programs.

The rows of a batch are split over data and fsdp: each device runs the same program on its own rows
(`Parallel.over_rows`), and the results are added up once. Parameters are replicated (backend pmap) or split
over fsdp and tensor. XLA splits matrix products over tensor.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxformer_mt.config import Config, ParallelConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.parallel.devices import (
    DeviceLayout,
    choose_layout,
    describe_devices,
    device_memory,
    find_devices,
)
from flaxformer_mt.parallel.processes import any_process, exchange, process_count
from flaxformer_mt.parallel.rows_per_device import replicate_locally
from flaxformer_mt.parallel.sharding import choose_placements, describe_placements, fsdp_axis, spec_of
from flaxformer_mt.parameter_trees import digest_leaves, flatten_tree, gather_leaf, unflatten_like

T = TypeVar("T")

# Mesh axes over which rows are split, and the spec of a batch.
_ROW_AXES = ("data", "fsdp")
_ROWS = PartitionSpec(_ROW_AXES)

# Of a parameter: [L, H, E, D] of stacked layers.
_MAX_DIMENSIONS = 4


class Parallel:
    """A mesh of devices: transfers arrays to and from the devices, and compiles programs for them.

    Arrays on the devices have global shapes. With several processes, all processes must make the same calls
    in the same order.
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
        """The parts of a batch that this process holds, as indices below `layout.row_parts`.

        With two processes of two devices each and data 4, it is (0, 1) in process 0 and (2, 3) in process 1.
        """
        return tuple(n for n, holders in enumerate(self._row_holders()) if jax.process_index() in holders)

    @property
    def row_factor(self) -> int:
        """The number of rows in the whole batch, divided by the number of rows in this process."""
        return self.layout.row_parts // len(self.row_share)

    @property
    def counts_rows(self) -> bool:
        """Whether this process counts its rows; among processes with the same rows, only the first does."""
        return all(min(self._row_holders()[part]) == jax.process_index() for part in self.row_share)

    def _row_holders(self) -> list[set[int]]:
        parts = self.mesh.devices.reshape(self.layout.row_parts, -1)
        return [{device.process_index for device in devices} for devices in parts]

    def sharding_of(self, path: str, shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding of an array (of parameters, a state or results) with this path and shape."""
        return NamedSharding(self.mesh, spec_of(path, shape, self._sizes))

    def put(self, batch: Any) -> Any:
        """Split a batch by rows over the devices; each process must pass only the rows of its `row_share`."""
        return jax.tree.map(self._put_rows, batch)

    def _put_rows(self, array: np.ndarray) -> jax.Array:
        """Transfer an array [rows, ...] of a batch; `array` has only the rows of this process."""
        sharding, share = NamedSharding(self.mesh, _ROWS), self.row_share
        if len(share) == self.layout.row_parts:
            return jax.device_put(array, sharding)
        part = array.shape[0] // len(share)
        whole = (self.layout.row_parts * part, *array.shape[1:])

        def rows_of(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            place = share.index((index[0].start or 0) // part) * part
            return array[place : place + part]

        return jax.make_array_from_callback(whole, sharding, rows_of)

    def put_shapes(self, batch: Any) -> Any:
        rows = NamedSharding(self.mesh, _ROWS)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch)

    def compile(
        self, function: Callable[..., Any], *, donate: tuple[int, ...] = (), partial: bool = False
    ) -> Callable[..., Any]:
        """Compile a function for the devices; its results are sharded by `sharding_of`.

        `donate` has the indices of arguments whose memory the results may reuse. With `partial`, the results
        are partial sums of a function from `over_rows`.
        """

        def sharded(*arguments: Any) -> Any:
            results = function(*arguments)
            shardings = self.partial_shardings(results) if partial else self.shardings(results)
            return jax.lax.with_sharding_constraint(results, shardings)

        return jax.jit(sharded, donate_argnums=donate, compiler_options=self.compiler_options)

    def over_rows(
        self, function: Callable[..., Any], *, batch: int, partial: bool = False
    ) -> Callable[..., Any]:
        """Return a function of global arrays that runs `function` on each device and adds up the results.

        On each device, `function` is called with the device's rows of the batch, with its part of each
        parameter that is split over fsdp (`sharding.gather` makes it whole), and with the keyword argument
        `part`, the index of its rows (None: a single device has all rows). Gradients of split parameters are
        split in the same way; all other results are sums over all rows.

        Args:
          batch: the index of the argument that is a batch; the others are parameters or equal for all rows.
          partial: whether to leave the sum over the axis data to `sum_parts`; if data exceeds 1, the results
            then have an additional first axis, data.
        """
        if self.device_count == 1:
            return lambda *arguments: function(*arguments, part=None)
        summed = [axis for axis in _ROW_AXES if self._sizes[axis] > 1 and not (partial and axis == "data")]
        stacked = partial and self.layout.data > 1
        structures: list[Any] = []

        def on_device(*arguments: Any) -> tuple[dict[str, Any], ...]:
            results = function(*arguments, part=jax.lax.axis_index(_ROW_AXES))
            structures.append(jax.tree.structure(results))
            groups: tuple[dict[str, Any], ...] = tuple({} for _ in range(1 + _MAX_DIMENSIONS))
            for path, leaf in flatten_tree(results).items():
                axis = self._fsdp_axis(path, leaf.ndim)
                groups[0 if axis is None else 1 + axis][path] = leaf
            # One collective for all leaves with the same axes.
            parts = [axis for axis in summed if axis != "fsdp"]
            groups = tuple(_sum_over(parts if n else summed, group) for n, group in enumerate(groups))
            return jax.tree.map(lambda x: x[None], groups) if stacked else groups

        def on_all(*arguments: Any) -> Any:
            specs = tuple(
                _ROWS if index == batch else self._parameter_specs(argument)
                for index, argument in enumerate(arguments)
            )
            lead = ("data",) if stacked else ()
            results = (
                PartitionSpec(*lead),
                *(PartitionSpec(*lead, *(None,) * n, "fsdp") for n in range(_MAX_DIMENSIONS)),
            )
            groups = jax.shard_map(
                on_device,
                mesh=self.mesh,
                in_specs=specs,
                out_specs=results,
                # Pallas kernels for TPUs allow no axis that is left to XLA, even if it has one device.
                axis_names=set(self.mesh.axis_names if self.layout.tensor == 1 else _ROW_AXES),
                check_vma=False,
            )(*arguments)
            leaves = {path: leaf for group in groups for path, leaf in group.items()}
            tree = jax.tree.unflatten(structures[-1], range(structures[-1].num_leaves))
            return unflatten_like(tree, leaves)

        return on_all

    def _fsdp_axis(self, path: str, dimensions: int) -> int | None:
        return fsdp_axis(path, dimensions) if self._sizes["fsdp"] > 1 else None

    def _parameter_specs(self, tree: Any) -> Any:
        def spec(path: str, leaf: Any) -> PartitionSpec:
            axis = self._fsdp_axis(path, np.ndim(leaf))
            return PartitionSpec() if axis is None else PartitionSpec(*(None,) * axis, "fsdp")

        return unflatten_like(tree, {path: spec(path, leaf) for path, leaf in flatten_tree(tree).items()})

    def sum_parts(self, tree: Any) -> Any:
        """Add up the partial sums from a program compiled with `partial`; call this in another program."""
        return jax.tree.map(lambda x: x.sum(0), tree) if self.layout.data > 1 else tree

    def describe_parameters(self, params: Any) -> list[str]:
        """Return log lines about the split of parameters (arrays or shapes); [] if these are replicated."""
        if self.layout.backend == "pmap" or self.device_count == 1:
            return []
        shapes = {path: np.shape(leaf) for path, leaf in flatten_tree(params).items()}
        return describe_placements(choose_placements(shapes, self._sizes), self._sizes)

    def shardings(self, tree: Any) -> Any:
        """Return the sharding of each leaf (an array or a shape) as a tree; see `sharding_of`."""
        leaves = flatten_tree(tree)
        return unflatten_like(
            tree, {path: self.sharding_of(path, np.shape(leaf)) for path, leaf in leaves.items()}
        )

    def place_shapes(self, shapes: Any) -> Any:
        """Add shardings to a tree with the shapes of parameters or of a state."""
        return with_shardings(shapes, self.shardings(shapes))

    def partial_shardings(self, tree: Any) -> Any:
        """Return the shardings of partial sums [data, ...]: as in `shardings`, with data as first axis."""
        leaves = flatten_tree(tree)
        if self.layout.data == 1:
            return self.shardings(tree)
        specs = {path: self.sharding_of(path, np.shape(leaf)[1:]).spec for path, leaf in leaves.items()}
        return unflatten_like(
            tree,
            {path: NamedSharding(self.mesh, PartitionSpec("data", *spec)) for path, spec in specs.items()},
        )

    def init(self, function: Callable[..., T], *arguments: Any, donate: tuple[int, ...] = ()) -> T:
        """Call a function; its results are created sharded, and their values do not depend on the devices."""
        shapes = jax.eval_shape(function, *arguments)
        return jax.jit(function, out_shardings=self.shardings(shapes), donate_argnums=donate)(*arguments)

    def place(self, tree: Any) -> Any:
        return jax.tree.map(place_host_array, tree, self.shardings(tree))

    def fetch(self, tree: Any) -> Any:
        """Wait until the arrays of a tree are computed, and return them as whole numpy arrays on the host."""
        leaves = jax.tree.leaves(tree)
        for leaf in leaves:
            if isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
                leaf.copy_to_host_async()
        return jax.tree.map(lambda leaf: np.asarray(gather_leaf(leaf)), tree)

    @property
    def device_kind(self) -> str:
        return self.mesh.devices.flat[0].device_kind

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    @property
    def device_count(self) -> int:
        return self.mesh.size

    def memory(self) -> int | None:
        """Return the highest peak memory, in bytes, of this process's devices; None: unknown, as on CPUs."""
        statistics = [device.memory_stats() or {} for device in self.mesh.local_devices]
        peaks = [found["peak_bytes_in_use"] for found in statistics if "peak_bytes_in_use" in found]
        return max(peaks, default=None)

    def memory_limit(self) -> int | None:
        """Return how many bytes a program may use on each device of this process; None: unknown."""
        found = [device_memory(device) for device in self.mesh.local_devices]
        return min((memory[0] for memory in found if memory is not None), default=None)

    def describe(self) -> str:
        return describe_devices(self.mesh.devices.flat, jax.process_count())


def with_shardings(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def place_host_array(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Transfer a host array, which each process must have whole, to the devices of all processes."""
    if jax.process_count() == 1:
        return jax.device_put(leaf, sharding)
    host = np.asarray(gather_leaf(leaf))
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _sum_over(axes: Sequence[str], group: dict[str, Any]) -> dict[str, Any]:
    return jax.lax.psum(group, tuple(axes)) if axes and group else group


class SplitParameters:
    """A mesh over which the parameters of a model are split for search.

    All devices compute all rows together. Activations are split like the parameters, so that programs send
    activations between devices, but never parameters. All processes must make the same calls with the same
    arrays.
    """

    def __init__(self, parallel: Parallel) -> None:
        """Make a mesh for search from the devices of a training mesh."""
        devices = parallel.mesh.devices
        # Programs find the axis of parameters under another name: they split activations along it as well.
        self._mesh = Mesh(devices.reshape(-1, *devices.shape[1:]), ("data", "width", "tensor"))

    @property
    def whole(self) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec())

    def sharding_of(self, path: str, shape: tuple[int, ...]) -> NamedSharding:
        sizes = {"fsdp": self._mesh.shape["width"], **self._mesh.shape}
        names = ("width" if axis == "fsdp" else axis for axis in spec_of(path, shape, sizes))
        return NamedSharding(self._mesh, PartitionSpec(*names))

    def place(self, params: Any) -> Any:
        leaves = flatten_tree(params)
        shardings = {path: self.sharding_of(path, np.shape(leaf)) for path, leaf in leaves.items()}
        if any(isinstance(leaf, jax.Array) for leaf in leaves.values()):
            return jax.jit(lambda tree: tree, out_shardings=unflatten_like(params, shardings))(params)
        return unflatten_like(
            params, {path: place_host_array(leaf, shardings[path]) for path, leaf in leaves.items()}
        )

    def digest(self, params: Any) -> str:
        """Return a digest of the arrays of all processes (all must call this); "" with one process."""
        if process_count() == 1:
            return ""
        return b" ".join(exchange(digest_leaves(params).encode())).decode()

    def compile(
        self,
        function: Callable[..., Any],
        *,
        static_argnames: tuple[str, ...] = (),
        donate: tuple[int, ...] = (),
        **options: Any,
    ) -> Callable[..., Any]:
        """Compile as `compile_by_rows` does, but for this mesh, with arrays and results replicated."""

        def on_mesh(params: Any, *arrays: Any, **static: Any) -> Any:
            with jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
                results = function(params, *arrays, **static)
            return jax.lax.with_sharding_constraint(results, self.whole)

        return jax.jit(on_mesh, static_argnames=static_argnames, donate_argnums=donate, **options)


def place_parameters(params: Any, spread: bool | SplitParameters) -> Any:
    """Put parameters on devices: split over a mesh, on all local devices (True), or on the first (False)."""
    if isinstance(spread, SplitParameters):
        return spread.place(params)
    return replicate_locally(params) if spread else jax.device_put(params)


def split_as_trained(parallel: Parallel, parameter_bytes: int) -> SplitParameters | None:
    """Return a search mesh with the training layout; None if parameters fit on each device or are not split.

    All processes must call this.
    """
    layout = parallel.layout
    if layout.fsdp * layout.tensor == 1:
        return None
    return None if _fits_on_each_device(parameter_bytes) else SplitParameters(parallel)


def split_for_search(config: Config, parameter_bytes: int) -> SplitParameters | None:
    """Return a search mesh over all devices; None if the parameters fit on each device.

    If the config's layout splits parameters and fits the devices, it is used; otherwise parameters are split
    over fsdp. All processes must call this.
    """
    if jax.device_count() == 1 or _fits_on_each_device(parameter_bytes):
        return None
    counts = {"device_count": jax.device_count(), "process_count": jax.process_count()}
    try:
        layout = choose_layout(config, **counts)
    except UserError:
        layout = None
    if layout is None or layout.fsdp * layout.tensor == 1:
        width, count = config.model.model_dim, jax.device_count()
        fsdp = max(n for n in range(1, count + 1) if count % n == 0 and width % n == 0)
        config = dataclasses.replace(config, parallel=ParallelConfig(backend="mesh", fsdp=fsdp))
        layout = choose_layout(config, **counts)
    return SplitParameters(Parallel(layout, find_devices()[: layout.device_count]))


def _fits_on_each_device(parameter_bytes: int) -> bool:
    """Return whether each device of all processes has free memory for twice the size of the parameters."""
    known = filter(None, map(device_memory, jax.local_devices()))
    return not any_process(any(2 * parameter_bytes > total - used for total, used in known))
