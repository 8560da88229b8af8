"""The only door to devices: which there are, where arrays live, and how a pure function is compiled for them.

Every batch is split over the `data` axis of a mesh; parameters are on every device. Knows nothing of models.
"""

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxformer_mt.config import Config
from flaxformer_mt.errors import UserError


class Parallel:
    """Data parallelism by jit over a mesh: the same program on one device and on many.

    Raises:
      UserError: more devices are asked for than there are, or batches do not divide over them.
    """

    def __init__(self, config: Config) -> None:
        devices = jax.devices()
        count = config.parallel.data or len(devices)
        if count > len(devices):
            raise UserError(
                f"parallel.data asks for {count} devices, but there are {len(devices)} "
                f"({devices[0].platform}); set it to at most that, or to 0 for all"
            )
        rows = config.data.row_multiple
        if rows % count:
            raise UserError(
                f"batches have a multiple of data.row_multiple {rows} rows, which {count} devices cannot "
                f"share evenly; set data.row_multiple to {-(-rows // count) * count} or parallel.data to a "
                f"divisor of {rows}"
            )
        self.mesh = Mesh(np.asarray(devices[:count]), ("data",))
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.split = NamedSharding(self.mesh, PartitionSpec("data"))

    def place(self, tree: Any) -> Any:
        """Puts parameters or a state on every device."""
        return jax.device_put(tree, self.replicated)

    def put(self, batch: Any) -> Any:
        """Splits a batch of host arrays by rows over the devices."""
        return jax.device_put(batch, self.split)

    def compile(self, function: Callable[..., Any], *, donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        """The function compiled for the mesh; arguments numbered in `donate` give their memory to results."""
        return jax.jit(function, donate_argnums=donate, out_shardings=self.replicated)

    def fetch(self, tree: Any) -> Any:
        """The values as numpy arrays on the host; waits for them."""
        return jax.device_get(tree)

    def describe(self) -> str:
        """For the log: `8 x NVIDIA H200`, or `AMD EPYC (2 cores)`."""
        device = self.mesh.devices.flat[0]
        if device.platform != "cpu":
            return f"{self.mesh.size} x {device.device_kind}"
        simulated = f", {self.mesh.size} simulated devices" if self.mesh.size > 1 else ""
        return f"{_processor_name()} ({_core_count()} cores{simulated})"


def _core_count() -> int:
    """Cores that this process may use, where the system says."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().split("\n"):
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def enable_compilation_cache(directory: Path) -> None:
    """Keeps compiled programs on disk, so that the same command starts faster the next time.

    A directory that the user chose through JAX's own variable is left alone.
    """
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
