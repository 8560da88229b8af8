"""Accelerators to compile for without having them: their names (`v5e:2x2`, `h100:8`) and descriptions."""

import difflib
import importlib.util
import math
import os
import re
from dataclasses import dataclass
from typing import Any, Literal

import jax

from flaxformer_mt.errors import UserError, first_line, install_command


@dataclass(frozen=True)
class Accelerator:
    """A kind of accelerator; `device_kind` is its name in JAX, which `flops.peak_flops` expects.

    memory: bytes that programs can use. bandwidth: bytes per second between device and memory. slices: shapes
    of TPU slices that Google Cloud offers.
    """

    platform: Literal["tpu", "cuda"]
    device_kind: str
    memory: int
    bandwidth: float
    slices: tuple[str, ...] = ()


_FLAT_SLICES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = tuple("1x1x1 2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16".split())

# Memory of TPUs as their compiler states it when a program needs more. Memory of GPUs as CUDA reports it; JAX
# reserves a share of it (`usable_memory`). The bandwidth is that of the data sheets.
ACCELERATORS = {
    "v5e": Accelerator("tpu", "TPU v5 lite", int(15.75 * 2**30), 819e9, _FLAT_SLICES),
    "v5p": Accelerator("tpu", "TPU v5", int(95.73 * 2**30), 2765e9, _CUBES),
    "v6e": Accelerator("tpu", "TPU v6 lite", int(31.24 * 2**30), 1640e9, _FLAT_SLICES),
    "a100": Accelerator("cuda", "NVIDIA A100-SXM4-80GB", 85_100_068_864, 2_039_040e6),
    "h100": Accelerator("cuda", "NVIDIA H100 80GB HBM3", 84_942_979_072, 3_352_320e6),
    "h200": Accelerator("cuda", "NVIDIA H200", 151_397_597_184, 4800e9),
    "b200": Accelerator("cuda", "NVIDIA B200", 191_514_411_008, 7_672_320e6),
}


@dataclass(frozen=True)
class Target:
    """Devices to compile for: `groups` TPU slices of `shape` "2x2", or hosts of `shape` "8" (GPUs each)."""

    kind: str
    shape: str
    groups: int = 1

    @property
    def accelerator(self) -> Accelerator:
        return ACCELERATORS[self.kind]

    @property
    def chips(self) -> int:
        return self.groups * math.prod(map(int, self.shape.split("x")))

    @property
    def name(self) -> str:
        """The name that `parse_target` parses, such as `v5e:2x2`, or `v5e:2x2:2` for two slices."""
        return f"{self.kind}:{self.shape}" + (f":{self.groups}" if self.groups > 1 else "")


def parse_target(name: str) -> Target:
    """Parse KIND (one chip), KIND:SHAPE or KIND:SHAPE:SLICES; for GPUs, KIND:GPUS or KIND:GPUS:HOSTS."""
    kind, *rest = name.strip().lower().split(":")
    if kind not in ACCELERATORS:
        near = difflib.get_close_matches(kind, ACCELERATORS, n=1, cutoff=0.4)
        hint = f"; did you mean {':'.join([near[0], *rest])}?" if near else ""
        raise UserError(
            f"--target={name}: unknown accelerator {kind!r}{hint} (known: {', '.join(ACCELERATORS)})"
        )
    slices = ACCELERATORS[kind].slices
    example = f"{kind}:{slices[1]}" if slices else f"{kind}:8"
    shape, groups = [*rest, "1"][:2] if rest else (slices[0] if slices else "1", "1")
    if len(rest) > 2 or not re.fullmatch(r"[1-9]\d{0,3}", groups):
        raise UserError(
            f"--target={name} is not KIND:SHAPE or KIND:SHAPE:NUMBER, with the number of slices or hosts; "
            f"give for example --target={example} or --target={example}:2"
        )
    if slices and shape not in slices:
        raise UserError(f"--target={name}: {kind} has no slice {shape}; its slices are {', '.join(slices)}")
    if not slices and not re.fullmatch(r"[1-9]\d{0,3}", shape):
        raise UserError(
            f"--target={name}: {shape!r} is no number of GPUs; give for example --target={example}"
        )
    return Target(kind, shape, int(groups))


# Lines of XLA's description of a GPU; numbers that all of these GPUs share are in the text itself.
_GPU_CORES = {
    # cores, FPUs of a core, shared memory of a core and of a block, L2 cache, GHz, capability
    "a100": (108, 64, 167_936, 166_912, 41_943_040, 1.41, "major: 8"),
    "h100": (132, 128, 233_472, 232_448, 52_428_800, 1.98, "major: 9"),
    "h200": (132, 128, 233_472, 232_448, 52_428_800, 1.98, "major: 9"),
    "b200": (148, 128, 233_472, 232_448, 132_644_864, 1.965, "major: 10"),
}


def describe_gpu(kind: str) -> str:
    """Return XLA's description of a GPU: a protobuf message GpuTargetConfigProto in text format."""
    cores, fpus, shared, shared_optin, cache, clock, capability = _GPU_CORES[kind]
    device = ACCELERATORS[kind]
    features = "NONE" if capability == "major: 8" else "ACCELERATED_FEATURES"
    return f"""
gpu_device_info {{
  name: "{device.device_kind}" device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ {capability} feature_extension: {features} }}
  core_count: {cores} fpus_per_core: {fpus} clock_rate_ghz: {clock}
  device_memory_size: {device.memory} memory_bandwidth: {device.bandwidth:.0f} l2_cache_size: {cache}
  shared_memory_per_core: {shared} shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared_optin}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{device.device_kind}"
"""


# libtpu otherwise asks the machine which TPU it has, and lets only one process load it at a time.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# Platform -> modules of which one is needed, what they are, and the extra that installs them.
_COMPILERS = {
    "tpu": (("libtpu",), "the TPU compiler (libtpu)", "tpu"),
    "cuda": (("jax_cuda13_plugin", "jax_cuda12_plugin"), "JAX's CUDA compiler (jax-cuda13-plugin)", "cuda13"),
}
# JAX reserves this share of a GPU's memory for itself unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
_GPU_MEMORY_SHARE = 0.75


def find_devices(target: Target) -> list[jax.Device]:
    """Return JAX devices that describe the target to the compiler; the hardware is not needed."""
    from jax.experimental import topologies

    platform = target.accelerator.platform
    modules, what, extra = _COMPILERS[platform]
    if not any(importlib.util.find_spec(module) for module in modules):
        raise UserError(
            f"--target={target.name} needs {what}, but not the device itself; install it with: "
            f"{install_command(extra=extra)}"
        )
    if platform == "tpu":
        for name, value in _TPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        options: dict[str, Any] = {"topology_name": f"{target.kind}:{target.shape}"}
        if target.groups > 1:
            options["num_slices"] = target.groups
        if target.chips == target.groups:
            # libtpu 0.0.42 takes a host for four chips, even where the whole slice is one.
            options["chips_per_host_bounds"] = (1, 1, 1)
    else:
        options = {
            "topology_name": target.kind,
            "topology": f"1x{target.groups}x{target.shape}",
            "target_config": describe_gpu(target.kind),
        }
    try:
        return list(topologies.get_topology_desc(platform=platform, **options).devices)
    except RuntimeError as error:
        raise UserError(
            f"--target={target.name}: the installed compiler does not know these devices "
            f"({first_line(error)}); install its newest version: "
            f"{install_command(extra=extra)} --upgrade"
        ) from error


def usable_memory(target: Target) -> int:
    """Return a device's usable bytes: all memory of a TPU, or the part of a GPU's that JAX reserves."""
    if target.accelerator.platform == "tpu":
        return target.accelerator.memory
    share = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", _GPU_MEMORY_SHARE)
    try:
        return int(target.accelerator.memory * float(share))
    except ValueError as error:
        raise UserError(
            f"XLA_PYTHON_CLIENT_MEM_FRACTION is {share!r}, but JAX reserves a share of the memory, such as "
            f"{_GPU_MEMORY_SHARE}; set it to a number, or not at all"
        ) from error
