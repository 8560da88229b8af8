"""Devices: finding them, sharding arrays over them, and compiling functions for them.

Training uses `Parallel`; search uses `compile_by_rows` or, if parameters are split over devices,
`SplitParameters`. Models and kernels shard arrays with the functions of `sharding`, whose `RULES` identify
parameters by path.
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
    """Return the mesh that the config selects, over `devices` (default: all processes' training devices)."""
    devices = training_devices() if devices is None else devices
    platform = devices[0].platform
    layout = choose_layout(
        config, device_count=len(devices), process_count=jax.process_count(), platform=platform
    )
    return Parallel(layout, devices[: layout.device_count], default_compiler_options(platform))
