"""Names of targets: `v5e:2x2`, `v5e:16x16:2`, `h100:8`; and the accelerators that they may name.

A pure table: needs neither JAX nor an accelerator.
"""

import difflib
import math
import re
from dataclasses import dataclass
from typing import Literal

from flaxformer_mt.errors import UserError


@dataclass(frozen=True)
class Accelerator:
    """A kind of accelerator.

    device_kind: the name of a device in JAX, which `flops.peak_flops` knows. memory: bytes of a device that
    programs can use. interconnect: bytes a second that a device sends to others of its slice or host.
    """

    platform: Literal["tpu", "cuda"]
    device_kind: str
    memory: int
    interconnect: float
    # Bytes a second from and to the memory of a device.
    bandwidth: float
    # The slices of TPUs that Google Cloud offers.
    slices: tuple[str, ...] = ()


def _gib(number: float) -> int:
    return int(number * 2**30)


_FLAT_SLICES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = tuple("1x1x1 2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16".split())

# Memory of TPUs as their compiler states it when a program needs more. Memory of GPUs as CUDA reports it; JAX
# reserves a share of it (`memory_share`). Rates of the interconnect (one direction) and of the memory as the
# data sheets have them.
ACCELERATORS = {
    "v4": Accelerator("tpu", "TPU v4", _gib(30.75), 300e9, 1228e9, _CUBES[1:]),
    "v5e": Accelerator("tpu", "TPU v5 lite", _gib(15.75), 200e9, 819e9, _FLAT_SLICES),
    "v5p": Accelerator("tpu", "TPU v5", _gib(95.73), 600e9, 2765e9, _CUBES),
    "v6e": Accelerator("tpu", "TPU v6 lite", _gib(31.24), 400e9, 1640e9, _FLAT_SLICES),
    "a100": Accelerator("cuda", "NVIDIA A100-SXM4-80GB", 85_100_068_864, 300e9, 2_039_040e6),
    "h100": Accelerator("cuda", "NVIDIA H100 80GB HBM3", 84_942_979_072, 450e9, 3_352_320e6),
    "h200": Accelerator("cuda", "NVIDIA H200", 151_397_597_184, 450e9, 4800e9),
}


@dataclass(frozen=True)
class Target:
    """Devices to compile for: `groups` equal slices of TPUs, or hosts of GPUs.

    shape: of a slice, such as "2x2"; of GPUs, their number on a host.
    """

    kind: str
    shape: str
    groups: int = 1

    @property
    def accelerator(self) -> Accelerator:
        """The kind of the devices."""
        return ACCELERATORS[self.kind]

    @property
    def chips(self) -> int:
        """Number of chips in all slices or hosts."""
        return self.groups * math.prod(map(int, self.shape.split("x")))

    @property
    def name(self) -> str:
        """The name that `parse_target` reads: `v5e:2x2`, and `v5e:2x2:2` for two slices."""
        return f"{self.kind}:{self.shape}" + (f":{self.groups}" if self.groups > 1 else "")


def parse_target(name: str) -> Target:
    """Read the name of a target: KIND, KIND:SHAPE or KIND:SHAPE:SLICES (GPUs: KIND:GPUS:HOSTS).

    A kind alone is one chip.

    Raises:
      UserError: an unknown kind or shape; the message names the nearest known target.
    """
    kind, *rest = name.strip().lower().split(":")
    if kind not in ACCELERATORS:
        near = difflib.get_close_matches(kind, ACCELERATORS, n=1, cutoff=0.4)
        hint = f"; did you mean {':'.join([near[0], *rest])}?" if near else ""
        raise UserError(
            f"--target={name}: unknown accelerator {kind!r}{hint} (known: {', '.join(ACCELERATORS)})"
        )
    if len(rest) > 2 or (len(rest) == 2 and not re.fullmatch(r"[1-9]\d{0,3}", rest[1])):
        raise UserError(
            f"--target={name} is not KIND:SHAPE or KIND:SHAPE:NUMBER, with the number of slices or hosts; "
            f"give for example --target={_example(kind)} or --target={_example(kind)}:2"
        )
    groups = int(rest[1]) if len(rest) == 2 else 1
    return Target(kind, _read_shape(name, kind, rest[0] if rest else ""), groups)


def _example(kind: str) -> str:
    slices = ACCELERATORS[kind].slices
    return f"{kind}:{slices[1]}" if slices else f"{kind}:8"


def _read_shape(name: str, kind: str, shape: str) -> str:
    slices = ACCELERATORS[kind].slices
    if not slices:
        if not re.fullmatch(r"[1-9]\d{0,3}|", shape):
            raise UserError(
                f"--target={name}: {shape!r} is no number of GPUs; give for example --target={kind}:8"
            )
        return shape or "1"
    shape = shape or slices[0]
    if shape not in slices:
        raise UserError(
            f"--target={name}: {kind} has no slice {shape}; the nearest is "
            f"--target={kind}:{_nearest_slice(shape, slices)} (slices: {', '.join(slices)})"
        )
    return shape


def _nearest_slice(shape: str, slices: tuple[str, ...]) -> str:
    """Return the slice with the number of chips nearest to that of a shape such as 3x3, 2x2x1 or 16."""
    if not re.fullmatch(r"\d{1,6}(x\d{1,6})*", shape):
        return slices[1]

    def chips(text: str) -> int:
        return math.prod(map(int, text.split("x")))

    return min(slices, key=lambda known: abs(math.log(chips(known) / max(1, chips(shape)))))


# Lines of XLA's description of a GPU; numbers that all of these GPUs share are in the text itself.
_GPU_CORES = {
    # cores, FPUs of a core, shared memory of a core and of a block, L2 cache, GHz, capability
    "a100": (108, 64, 167_936, 166_912, 41_943_040, 1.41, "major: 8"),
    "h100": (132, 128, 233_472, 232_448, 52_428_800, 1.98, "major: 9"),
    "h200": (132, 128, 233_472, 232_448, 52_428_800, 1.98, "major: 9"),
}


def describe_gpu(kind: str) -> str:
    """Return the GPU as a text of XLA's message GpuTargetConfigProto, by which its compiler knows it."""
    cores, fpus, shared, shared_optin, cache, clock, capability = _GPU_CORES[kind]
    device = ACCELERATORS[kind]
    features = "ACCELERATED_FEATURES" if capability == "major: 9" else "NONE"
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
