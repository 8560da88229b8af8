"""Names of devices, their memory, and the compilation cache on disk."""

import os
from collections.abc import Iterable
from pathlib import Path

import jax

from flaxformer_mt.errors import UserError
from flaxformer_mt.processor import core_count, processor_name, slow_bfloat16_reason

# Bytes of memory of a device, in place of what the device reports; CPUs report nothing.
_MEMORY_VARIABLE = "FLAXFORMER_MT_DEVICE_MEMORY"


def find_devices() -> list[jax.Device]:
    """Return the devices of all processes: whoever asks for JAX's first device asks here.

    Raises:
      UserError: JAX finds none, as where JAX_PLATFORMS names a platform that is not here.
    """
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # an assertion: JAX_PLATFORMS names none that is here
        reason = str(error) or f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
        raise UserError(
            f"JAX finds no devices ({reason}); unset JAX_PLATFORMS, or install the extra for your accelerator"
        ) from error


def default_device_kind() -> str:
    """Return the name of JAX's default device."""
    return find_devices()[0].device_kind


def default_platform() -> str:
    """Return the platform of JAX's default device: cpu, gpu or tpu."""
    return find_devices()[0].platform


def describe_devices(devices: Iterable[jax.Device], process_count: int = 1) -> str:
    """Return `8 x NVIDIA H200` or `AMD EPYC (2 cores)`, with `of 2 processes` if there are several."""
    devices = list(devices)
    several = f" of {process_count} processes" if process_count > 1 else ""
    if devices[0].platform != "cpu":
        return f"{len(devices)} x {devices[0].device_kind}{several}"
    simulated = f", {len(devices)} simulated devices{several}" if len(devices) > 1 else ""
    return f"{processor_name()} ({core_count()} cores{simulated})"


def device_memory(device: jax.Device) -> tuple[int, int] | None:
    """Return the bytes of memory of a device that JAX may use and those in use, or None if it does not tell.

    Raises:
      UserError: FLAXFORMER_MT_DEVICE_MEMORY is no number of bytes.
    """
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
    """Return the dtype in which a trained model is run unless the user names one: that of its training.

    On a CPU that multiplies bfloat16 no faster than float32 it is float32.
    """
    return "float32" if default_platform() == "cpu" and slow_bfloat16_reason() else trained


def enable_compilation_cache(directory: Path) -> None:
    """Keep compiled programs on disk, so that the same command starts faster the next time.

    A directory set through JAX's own variable, JAX_COMPILATION_CACHE_DIR, takes precedence. Without write
    access to the directory, programs are compiled anew each time.
    """
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if not os.access(directory, os.W_OK):  # JAX would warn about each program
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
