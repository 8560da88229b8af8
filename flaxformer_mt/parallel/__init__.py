"""Devices: which there are, how arrays are sharded over them, and how functions are compiled for them.

`Parallel` trains on a mesh with the axes data, fsdp and tensor: rows of a batch and parameters are split over
it. `compile_by_rows` and `SplitParameters` search. `constrain` is what models and kernels say
about devices. Imports nothing of the models (tests enforce this): `RULES` identify parameters by
their paths.
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
    """Return the mesh that the config selects, over the given devices or those of all processes.

    Raises:
      UserError: axes whose product is not the number of devices, or sizes that are not divisible by them.
    """
    devices = training_devices() if devices is None else devices
    layout = choose_layout(
        config, device_count=len(devices), process_count=jax.process_count(), platform=devices[0].platform
    )
    used = devices[: layout.device_count]
    platform = devices[0].platform
    return Parallel(layout, used, default_compiler_options(platform))
