"""Programs with independent rows, such as translation: each local device computes its own rows.

The programs run on the devices of this process and do not communicate between devices, so that a loop ends on
each device as soon as the device's own rows are done.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from flaxformer_mt.parallel.devices import find_devices
from flaxformer_mt.parameter_trees import gather_leaf
from flaxformer_mt.processor import core_count

_AXIS = "rows"

# Maximum number of CPU cores that are made devices.
_MAX_CORES = 4


# Whether this process has made its CPU cores devices.
_split_cores = False


def training_devices() -> list[jax.Device]:
    """Return the devices for training: all devices, or one per process after `use_cpu_cores_as_devices`.

    Training thus gives the same results if a model was loaded before it, for example in a notebook.
    """
    devices = find_devices()
    if not _split_cores or devices[0].platform != "cpu":
        return devices
    processes = [device.process_index for device in devices]
    return [device for n, device in enumerate(devices) if device.process_index not in processes[:n]]


def use_cpu_cores_as_devices() -> None:
    """Make up to four CPU cores separate devices, so that each core runs its own loop.

    In short steps, cores that share a matrix product wait for each other; cores with separate rows do not.
    Call this before any computation: later, or if XLA_FLAGS or JAX_NUM_CPU_DEVICES set the number of devices,
    it has no effect. The maximum is four because each device has its own copy of the parameters.
    """
    option, flags = "jax_num_cpu_devices", os.environ.get("XLA_FLAGS", "")
    if getattr(jax.config, option) > 0 or "xla_force_host_platform_device_count" in flags:
        return
    global _split_cores
    with contextlib.suppress(RuntimeError):  # the devices are initialized already
        jax.config.update(option, min(core_count(), _MAX_CORES))
        _split_cores = True


def local_device_count() -> int:
    """Return the number of this process's devices; it must divide the number of rows in `compile_by_rows`."""
    return jax.local_device_count()


def _local_mesh() -> Mesh:
    return Mesh(np.asarray(jax.local_devices()), (_AXIS,))


def split_rows() -> NamedSharding:
    return NamedSharding(_local_mesh(), PartitionSpec(_AXIS))


def replicate_locally(tree: Any) -> Any:
    """Replicate arrays on all local devices, even if sharded over processes; all processes must call this."""
    replicated = _replicated()
    if jax.process_count() == 1:
        return jax.device_put(tree, replicated)
    return jax.tree.map(lambda leaf: jax.device_put(np.asarray(gather_leaf(leaf)), replicated), tree)


def replicated_shapes(tree: Any) -> Any:
    """Return the shapes and shardings that `replicate_locally` gives to arrays of these shapes."""
    place = _replicated()
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)


def _replicated() -> Sharding:
    if local_device_count() == 1 and jax.process_count() == 1:
        return SingleDeviceSharding(jax.local_devices()[0])
    return NamedSharding(_local_mesh(), PartitionSpec())


def compile_by_rows(
    function: Callable[..., Any],
    *,
    static_argnames: tuple[str, ...] = (),
    donate: tuple[int, ...] = (),
    **options: Any,
) -> Callable[..., Any]:
    """Compile function(params, *arrays, **static); the first axis of all arrays and results must be rows.

    Each local device runs the function on its part of the rows, with parameters from `replicate_locally`.
    `static_argnames` names the compile-time constants; `donate` has the indices of arguments whose memory the
    results may reuse (0: params); `options` are further options of `jax.jit`.
    """
    options |= {"static_argnames": static_argnames, "donate_argnums": donate}
    if local_device_count() == 1:
        return jax.jit(function, **options)
    mesh = _local_mesh()

    def by_rows(params: Any, *arrays: Any, **static: Any) -> Any:
        def part(params: Any, *arrays: Any) -> Any:
            return function(params, *arrays, **static)

        rows = PartitionSpec(_AXIS)
        specs = (PartitionSpec(), *([rows] * len(arrays)))
        return jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)(
            params, *arrays
        )

    return jax.jit(by_rows, **options)
