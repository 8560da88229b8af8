"""Names and memory of devices, device layouts, and JAX's compilation cache."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import jax

from flaxformer_mt.config import Config
from flaxformer_mt.config.files import is_private
from flaxformer_mt.errors import UserError
from flaxformer_mt.processor import core_count, processor_name, slow_bfloat16_reason

# Bytes of memory of a device, in place of what the device reports; CPUs report nothing.
_MEMORY_VARIABLE = "FLAXFORMER_MT_DEVICE_MEMORY"


def find_devices() -> list[jax.Device]:
    """Return the devices of all processes, as `jax.devices` does; raise UserError if JAX finds none."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # an assertion: JAX_PLATFORMS names none that is here
        reason = str(error) or f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
        raise UserError(
            f"JAX finds no devices ({reason}); unset JAX_PLATFORMS, or install the extra for your accelerator"
        ) from error


def default_device_kind() -> str:
    return find_devices()[0].device_kind


def default_platform() -> str:
    return find_devices()[0].platform


def describe_devices(devices: Iterable[jax.Device], process_count: int = 1) -> str:
    """Describe devices, as in `8 x NVIDIA H200 of 2 processes` or `AMD EPYC (2 cores)`."""
    devices = list(devices)
    several = f" of {process_count} processes" if process_count > 1 else ""
    if devices[0].platform != "cpu":
        return f"{len(devices)} x {devices[0].device_kind}{several}"
    simulated = f", {len(devices)} simulated devices{several}" if len(devices) > 1 else ""
    return f"{processor_name()} ({core_count()} cores{simulated})"


def device_memory(device: jax.Device) -> tuple[int, int] | None:
    """Return how many bytes of memory JAX may use on a device, and how many it uses now; None if unknown."""
    if _MEMORY_VARIABLE in os.environ:
        text = os.environ[_MEMORY_VARIABLE]
        if not text.isascii() or not text.isdigit():
            raise UserError(
                f"{_MEMORY_VARIABLE}={text}: give the bytes of memory of a device, such as 16000000000"
            )
        return int(text), 0
    found = device.memory_stats() or {}
    return (found["bytes_limit"], found.get("bytes_in_use", 0)) if "bytes_limit" in found else None


def choose_dtype(trained: str) -> str:
    """Return the default dtype to run a model in: `trained`, or float32 on a CPU with slow bfloat16."""
    return "float32" if default_platform() == "cpu" and slow_bfloat16_reason() else trained


def enable_compilation_cache(directory: Path) -> None:
    """Make JAX cache compiled programs in `directory`, so that the same command starts faster the next time.

    A directory in the environment variable JAX_COMPILATION_CACHE_DIR takes precedence. If this user cannot
    write to the directory, or other users can, nothing is cached.
    """
    if given := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        if "://" not in given and not is_private(Path(given)):
            jax.config.update("jax_compilation_cache_dir", None)
        return
    if not is_private(directory.parent) or not is_private(directory):
        return
    if not os.access(directory, os.W_OK):  # JAX would warn about each program
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


class DeviceLayout(NamedTuple):
    """Backend and axis lengths: a batch is split over data and fsdp, the parameters over fsdp and tensor.

    gathers_twice: whether matrices that are split over fsdp are gathered again in the backward pass.
    """

    backend: Literal["pmap", "mesh"]
    data: int
    fsdp: int
    tensor: int
    gathers_twice: bool = False

    @property
    def device_count(self) -> int:
        return self.data * self.fsdp * self.tensor

    @property
    def row_parts(self) -> int:
        return self.data * self.fsdp

    def describe(self) -> str:
        """Describe the layout: `pmap over 8 devices`, `mesh of data 2 x fsdp 2 x tensor 2`."""
        if self.device_count == 1:
            return "one device"
        if self.backend == "pmap":
            return f"pmap over {self.data} devices"
        return f"mesh of data {self.data} x fsdp {self.fsdp} x tensor {self.tensor}"


def choose_layout(
    config: Config, *, device_count: int, process_count: int = 1, platform: str = ""
) -> DeviceLayout:
    """Return the layout that the config selects; raise UserError if the axes do not fit devices or model.

    Backend auto is pmap for pure data parallelism over several devices, and mesh otherwise.
    """
    parallel = config.parallel
    data, fsdp, tensor = _fill_axes(config, device_count, process_count)
    if problems := list(_find_problems(config, fsdp, tensor)):
        raise UserError("\n".join(problems))
    plain = fsdp == tensor == 1 and data > 1
    backend = ("pmap" if plain else "mesh") if parallel.backend == "auto" else parallel.backend
    # Simulated devices share one memory, which would hold a gathered matrix once per device, and gather by
    # copying. Accelerators would send twice as much.
    return DeviceLayout(backend, data, fsdp, tensor, gathers_twice=fsdp > 1 and platform == "cpu")


def _fill_axes(config: Config, device_count: int, process_count: int) -> tuple[int, int, int]:
    parallel = config.parallel
    data, fsdp, tensor = parallel.data, parallel.fsdp, parallel.tensor
    axes = f"parallel.data {data or '0 (all remaining)'} x parallel.fsdp {fsdp} x parallel.tensor {tensor}"
    used, rest = data * fsdp * tensor, device_count // (fsdp * tensor)
    if used > device_count or (process_count > 1 and used not in (0, device_count)):
        shared = f", which {process_count} processes share" if process_count > 1 else ""
        raise UserError(
            f"{axes} = {used}, but there are {device_count} devices{shared}; set parallel.data={rest} (0: "
            "all that fsdp and tensor leave)"
        )
    if not data and device_count % (fsdp * tensor):
        raise UserError(
            f"{axes} does not divide the {device_count} available devices; set parallel.fsdp and "
            f"parallel.tensor so that their product is one of {_list_divisors(device_count)}"
        )
    return data or rest, fsdp, tensor


def _find_problems(config: Config, fsdp: int, tensor: int) -> Iterator[str]:
    parallel, model = config.parallel, config.model
    if parallel.backend == "pmap" and parallel.fsdp * parallel.tensor > 1:
        yield (
            f"parallel.backend pmap replicates parameters on every device, but parallel.fsdp is "
            f"{parallel.fsdp} and parallel.tensor {parallel.tensor}; set parallel.backend=mesh, or both to 1"
        )
    for name, size, axis, parts in (
        ("num_heads", model.num_heads, "tensor", tensor),
        ("ffn_dim", model.ffn_dim, "tensor", tensor),
        ("model_dim", model.model_dim, "fsdp", fsdp),
    ):
        if size % parts:
            yield (
                f"model.{name} {size} is not divisible by parallel.{axis} {parts}; set model.{name} to a "
                f"multiple of {parts}, or parallel.{axis} to one of {_list_divisors(size)}"
            )


def _list_divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
