"""Devices: which there are, how arrays are sharded over them, and how functions are compiled for them.

`Parallel` trains on a mesh, `compile_by_rows` and `SplitParameters` search, and `constrain` is what models
and kernels say about devices. Imports nothing of the models: `RULES` identify parameters by their paths.
"""

from collections.abc import Sequence

import jax

from flaxformer_mt.config import Config
from flaxformer_mt.parallel.compilation import (
    default_compiler_options,
)
from flaxformer_mt.parallel.devices import (
    DeviceLayout,
    choose_dtype,
    choose_layout,
    default_device_kind,
    default_platform,
    enable_compilation_cache,
)
from flaxformer_mt.parallel.mesh import (
    Parallel,
    SplitParameters,
    place_parameters,
    split_as_trained,
    split_for_search,
)
from flaxformer_mt.parallel.rows_per_device import (
    compile_by_rows,
    local_device_count,
    replicate_locally,
    replicated_shapes,
    training_devices,
    use_cpu_cores_as_devices,
)


def make_parallel(config: Config, *, devices: Sequence[jax.Device] | None = None) -> Parallel:
    """Return the mesh that the config selects, over the given devices or those of all processes."""
    devices = training_devices() if devices is None else devices
    platform = devices[0].platform
    layout = choose_layout(
        config, device_count=len(devices), process_count=jax.process_count(), platform=platform
    )
    return Parallel(layout, devices[: layout.device_count], default_compiler_options(platform))
