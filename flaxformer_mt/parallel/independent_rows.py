"""Programs whose rows have nothing to do with each other, as translations: each local device does some alone.

Owns the mesh of this process's devices. What runs here needs no other process and no other device, so a loop
ends on each device when its own rows are done.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxformer_mt.parallel.devices import core_count
from flaxformer_mt.trees import gather_leaf

_AXIS = "rows"

# Devices that the cores of a CPU are made into.
_MOST_CORES = 4


def use_cores_apart() -> None:
    """Makes each of the CPU's first four cores a device, so that each runs a loop of its own.

    Cores that share every product of a short step wait for each other; with parts of the rows they do not.
    Call it before anything is computed: later, or where XLA_FLAGS say how many devices there are, it changes
    nothing. Each device has parameters of its own, hence no more than four.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    with contextlib.suppress(RuntimeError):  # the devices are there already
        jax.config.update("jax_num_cpu_devices", min(core_count(), _MOST_CORES))


def local_device_count() -> int:
    """How many devices this process has; `compile_by_rows` wants a multiple of it for rows."""
    return jax.local_device_count()


def _local_mesh() -> Mesh:
    return Mesh(np.asarray(jax.local_devices()), (_AXIS,))


def place_locally(tree: Any) -> Any:
    """Arrays from anywhere, also split over a mesh of several processes, whole on every local device.

    With several processes all of them call it together.
    """
    if local_device_count() == 1 and jax.process_count() == 1:
        return jax.device_put(tree, jax.local_devices()[0])
    whole = NamedSharding(_local_mesh(), PartitionSpec())
    if jax.process_count() == 1:
        return jax.device_put(tree, whole)
    return jax.tree.map(lambda leaf: jax.device_put(np.asarray(gather_leaf(leaf)), whole), tree)


def compile_by_rows(
    function: Callable[..., Any],
    *,
    static_argnames: tuple[str, ...] = (),
    donate: tuple[int, ...] = (),
    **options: Any,
) -> Callable[..., Any]:
    """Compiles function(params, *arrays, **static), whose arrays and results all begin with the axis of rows.

    Each local device runs it on its part of the rows; parameters come from `place_locally`.

    Args:
      donate: which arguments' memory results may take, counted with params.
      options: more of `jax.jit`.
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
