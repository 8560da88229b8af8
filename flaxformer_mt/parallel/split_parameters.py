"""Search with parameters that stay split over a mesh: for models that are too large for one device.

Contains the decision whether a model is too large, and the compilation of programs that use all devices for
each row. independent_rows.py is for all other models: each device has all parameters, and rows of its own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxformer_mt.config import Config, ParallelConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.parallel.device_layout import choose_layout
from flaxformer_mt.parallel.devices import device_memory, find_devices
from flaxformer_mt.parallel.independent_rows import replicate_locally
from flaxformer_mt.parallel.mesh import Parallel, place_host_array
from flaxformer_mt.parallel.processes import any_process, exchange, process_count
from flaxformer_mt.parallel.sharding_rules import spec_of
from flaxformer_mt.trees import digest_leaves, flatten_tree, unflatten_like


class SplitParameters:
    """A mesh over which the parameters of a model are split, and programs that use them.

    All devices compute all rows together. Activations are split as the parameters are: along the model width
    over fsdp, along heads, feed-forward width and vocabulary over tensor. So programs send activations
    between devices, and never parameters. With several processes, all of them make the same calls with the
    same arrays.
    """

    def __init__(self, parallel: Parallel) -> None:
        """Name the axes of a training's mesh as search splits over them."""
        devices = parallel.mesh.devices
        # Programs find the axis of parameters under another name: they split activations along it as well.
        self._mesh = Mesh(devices.reshape(-1, *devices.shape[1:]), ("data", "width", "tensor"))

    @property
    def whole(self) -> NamedSharding:
        """The sharding of arrays that are whole on every device."""
        return NamedSharding(self._mesh, PartitionSpec())

    def sharding_of(self, path: str, shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding of a parameter, by its path."""
        sizes = {"fsdp": self._mesh.shape["width"], **self._mesh.shape}
        names = ("width" if axis == "fsdp" else axis for axis in spec_of(path, shape, sizes))
        return NamedSharding(self._mesh, PartitionSpec(*names))

    def place(self, params: Any) -> Any:
        """Split the parameters of a model: host arrays, or arrays on the devices of the mesh."""
        leaves = flatten_tree(params)
        shardings = {path: self.sharding_of(path, np.shape(leaf)) for path, leaf in leaves.items()}
        if any(isinstance(leaf, jax.Array) for leaf in leaves.values()):
            return jax.jit(lambda tree: tree, out_shardings=unflatten_like(params, shardings))(params)
        return unflatten_like(
            params, {path: place_host_array(leaf, shardings[path]) for path, leaf in leaves.items()}
        )

    def digest(self, params: Any) -> str:
        """Return a digest of arrays that several processes hold, all of which call it; "" if there is one."""
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
        """Compile function(params, *arrays, **static); arrays and results are whole on every device.

        Args:
          static_argnames: names of the arguments in `static`, which are compile-time constants.
          donate: indices of the arguments whose memory the results may reuse; params is number 0.
          options: further options of `jax.jit`.
        """

        def on_mesh(params: Any, *arrays: Any, **static: Any) -> Any:
            with jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
                results = function(params, *arrays, **static)
            return jax.lax.with_sharding_constraint(results, self.whole)

        return jax.jit(on_mesh, static_argnames=static_argnames, donate_argnums=donate, **options)


def place_parameters(params: Any, spread: bool | SplitParameters) -> Any:
    """Put parameters where programs expect them: split, whole on every local device, or on the first one."""
    if isinstance(spread, SplitParameters):
        return spread.place(params)
    return replicate_locally(params) if spread else jax.device_put(params)


def split_as_trained(parallel: Parallel, parameter_bytes: int) -> SplitParameters | None:
    """Return the mesh of a training for a search in between, or None if each device has room for the model.

    With several processes, all of them call it together.
    """
    layout = parallel.layout
    if layout.fsdp * layout.tensor == 1:
        return None
    return None if _fits_on_each_device(parameter_bytes) else SplitParameters(parallel)


def split_for_search(config: Config, parameter_bytes: int) -> SplitParameters | None:
    """Return a mesh of all devices for a search, or None if each device has room for the parameters.

    The layout is that of the config if it splits parameters and fits the devices, or else fsdp. With several
    processes, all of them call it together.
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
    """Return whether each device of all processes has memory for the parameters, and as much for the rest."""
    free = [_free_memory(device) for device in jax.local_devices()]
    return not any_process(any(memory is not None and 2 * parameter_bytes > memory for memory in free))


def _free_memory(device: jax.Device) -> int | None:
    """Return the bytes of memory that a device has left, or None if it does not tell."""
    found = device_memory(device)
    return None if found is None else found[0] - found[1]
