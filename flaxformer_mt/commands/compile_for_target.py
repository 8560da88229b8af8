"""Accelerators that are not at hand: names such as `v5e:2x2`, `h100:8`; and compiling for them."""

import contextlib
import dataclasses
import difflib
import importlib.util
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from flaxformer_mt.commands.compiled_text import (
    Kernel,
    Traffic,
    read_calls,
    read_collectives,
    read_cycles,
    read_kernels,
)
from flaxformer_mt.commands.show import longest_batch
from flaxformer_mt.config import Config
from flaxformer_mt.config.checks import candidate_search, search_width
from flaxformer_mt.data.batch_array import BatchArray
from flaxformer_mt.decoding.compiled_programs import SearchPrograms
from flaxformer_mt.decoding.sentences import SentenceArrays
from flaxformer_mt.decoding.sizes import MOST_TOKENS, StateSizes, make_length_rule
from flaxformer_mt.errors import UserError, first_line, install_command
from flaxformer_mt.model import init_params, make_model
from flaxformer_mt.parallel import Parallel, make_parallel
from flaxformer_mt.search import Symbols
from flaxformer_mt.training.optimizers import make_hyperparameters
from flaxformer_mt.training.setup import compile_train_step
from flaxformer_mt.training.state import TrainState, choose_scan, init_state, init_training_params


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
    "b200": Accelerator("cuda", "NVIDIA B200", 191_514_411_008, 900e9, 7_672_320e6),
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
        return ACCELERATORS[self.kind]

    @property
    def chips(self) -> int:
        return self.groups * math.prod(map(int, self.shape.split("x")))

    @property
    def name(self) -> str:
        """The name that `parse_target` reads: `v5e:2x2`, and `v5e:2x2:2` for two slices."""
        return f"{self.kind}:{self.shape}" + (f":{self.groups}" if self.groups > 1 else "")


def parse_target(name: str) -> Target:
    """Read the name of a target: KIND, KIND:SHAPE or KIND:SHAPE:SLICES (GPUs: KIND:GPUS:HOSTS).

    A kind alone is one chip.
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
    "b200": (148, 128, 233_472, 232_448, 132_644_864, 1.965, "major: 10"),
}


def describe_gpu(kind: str) -> str:
    """Return the GPU as a text of XLA's message GpuTargetConfigProto, by which its compiler knows it."""
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
    "cuda": (
        ("jax_cuda13_plugin", "jax_cuda12_plugin"),
        "JAX's CUDA compiler (jax-cuda13-plugin)",
        "cuda13",
    ),
}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program, or how much memory it would need if the compiler refused it.

    peak: bytes of one device at the program's peak, with its arguments and results. accessed: bytes that it
    reads and writes; None if it was refused. calls: of kernels from outside XLA in its text, by name.
    kernels: of a GPU. cycles: those that the compiler of a TPU expects. loops: those whose iterations are
    unknown, which count once. times: how often an update runs it. held: bytes of one device that the update
    keeps meanwhile for other programs.
    """

    name: str
    peak: int
    seconds: float
    accessed: int | None = None
    collectives: Mapping[str, Traffic] = dataclasses.field(default_factory=dict)
    calls: Mapping[str, int] = dataclasses.field(default_factory=dict)
    kernels: Sequence[Kernel] = ()
    cycles: int = 0
    loops: int = 0
    times: int = 1
    held: int = 0

    @property
    def needed(self) -> int:
        """Bytes of one device that must be free for the program to run."""
        return self.peak + self.held


def find_devices(target: Target) -> list[jax.Device]:
    """Describe the devices of a target to JAX, by their compiler."""
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
        if target.kind == "v4":
            options |= {"chip_config_name": "megacore", "chips_per_host_bounds": (2, 2, 1)}
        elif target.chips == target.groups:
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


class TargetCompiler:
    """Compiles the programs of configs for the devices of one target."""

    def __init__(self, target: Target, *, sizes: tuple[int, int]) -> None:
        """`sizes` are the numbers of entries of the source and of the target vocabulary."""
        self.target = target
        self.sizes = sizes
        self._devices = find_devices(target)

    @property
    def device_kind(self) -> str:
        return self._devices[0].device_kind

    def parallel(self, config: Config) -> Parallel:
        """Return the backend and the layout that the config selects on these devices."""
        return make_parallel(config, devices=self._devices)

    def compile_update(self, config: Config) -> list[Compiled]:
        """Compile one update for the longest batch; with gradient accumulation, its three programs.

        Rows are added to the batch until the devices divide them.
        """
        parallel = self.parallel(config)
        model = self._make_model(config, gathers_twice=parallel.layout.gathers_twice)
        step = compile_train_step(model, config, parallel)

        def make_state() -> TrainState:
            return init_state(init_training_params(model, config, config.seed), config.optim)

        state, numbers = (
            _with_shardings(shapes, parallel.shardings(shapes))
            for shapes in (jax.eval_shape(make_state), make_hyperparameters(config))
        )
        rows = parallel.put_shapes(_pad_rows(longest_batch(config), parallel.layout.row_parts))
        inputs = step.arguments_of(state, numbers, rows)
        if not step.of_sums:
            return [self._compile("update", step.by_shape, inputs)]
        add, update = step.of_sums
        shapes = jax.eval_shape(step.by_shape.jitted, *inputs)
        sums = _with_shardings(shapes, parallel.partial_shardings(shapes))
        times, state_bytes = config.optim.accumulation, _bytes_on_device(state)
        # Beside the parameters, which it reads: the rest of the state, and the sum of the batches before.
        held = state_bytes - _bytes_on_device(state.params) + _bytes_on_device(sums)
        return [
            self._compile("gradient of a batch", step.by_shape, inputs, times=times, held=held),
            self._compile("sum of two gradients", add, (sums, sums), times=times - 1, held=state_bytes),
            self._compile("update", update, (state, numbers, sums)),
        ]

    def compile_search(self, config: Config) -> tuple[dict[str, Compiled], dict[str, int]]:
        """Compile the programs that search sentences with the longest sources on one device; return their
        sizes too.

        `prefill` reads sources, `generate` lets them enter free rows and decodes
        (decoding/compiled_programs.py). A device searches lines of its own with all parameters, in the
        batches of `search.batch_tokens`.
        """
        config = config.replace({"model.scan_layers": False})
        model, search, special = self._make_model(config), candidate_search(config.search), config.vocab
        longest = config.data.max_source_length if config.data.source_language else 1
        lengths = make_length_rule(search, [config.model], longest)
        width = max(1, search_width(search, 1))
        size = StateSizes(lengths, width, search.batch_tokens or MOST_TOKENS).many()[-1]
        arrays = SentenceArrays(search, lengths, source_pad_id=special.pad_id)
        sources = arrays.lay_out([()], arrays.find_form([]), rows=size.rows, source_length=size.source_length)
        mesh = Mesh(np.asarray(self._devices[:1]), ("data",))
        one_device = NamedSharding(mesh, PartitionSpec())
        compiled: dict[str, Compiled] = {}

        def compile_one(program: Any, arguments: Any) -> None:
            inputs = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=one_device), arguments
            )
            name = program.__name__
            compiled[name] = self._compile(name, program, inputs)

        programs = SearchPrograms(
            [config.model],
            search,
            Symbols(special.pad_id, special.bos_id, special.eos_id),
            sizes=self.sizes,
            spread=False,
            platform=self.target.accelerator.platform,
            compile_program=compile_one,
        )
        params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
        programs.find((params,), size, sources, n_best=1).wait()
        del compiled["empty"]
        shape = {
            "rows": size.rows,
            "beams": width,
            "source_length": size.source_length,
            "capacity": size.capacity,
        }
        return compiled, shape

    def _make_model(self, config: Config, *, gathers_twice: bool = False) -> Any:
        source_size, target_size = self.sizes
        platform = self.target.accelerator.platform
        network, _ = choose_scan(
            config, platform=platform, device_kind=self.device_kind, devices=self.target.chips
        )
        return make_model(
            network,
            source_size=source_size,
            target_size=target_size,
            platform=platform,
            gathers_twice=gathers_twice,
        )

    def _compile(
        self, name: str, jitted: Any, inputs: Sequence[Any], *, times: int = 1, held: int = 0
    ) -> Compiled:
        start = time.monotonic()
        with _as_default_device(self._devices[0]):
            lowered = jitted.lower(*inputs)
        try:
            with _without_messages_of_xla():
                compiled = _compile_lowered(lowered)
        except jax.errors.JaxRuntimeError as error:
            needed = find_needed_memory(str(error))
            if needed is None:
                raise UserError(
                    f"--target={self.target.name}: the {name} does not compile ({first_line(error)})"
                    f"{_missing_library(str(error))}"
                ) from error
            return Compiled(name, needed, time.monotonic() - start, times=times, held=held)
        text = compiled.as_text()
        collectives, loops = read_collectives(text)
        return Compiled(
            name,
            int(compiled.memory_analysis().peak_memory_in_bytes),
            time.monotonic() - start,
            int((compiled.cost_analysis() or {}).get("bytes accessed", 0)),  # of CUDA, None
            collectives,
            Counter(read_calls(text)),
            read_kernels(text) if self.target.accelerator.platform == "cuda" else (),
            read_cycles(text),
            loops,
            times,
            held,
        )


@contextlib.contextmanager
def _as_default_device(device: Any) -> Iterator[None]:
    """Let Pallas know for which GPU it lowers kernels; JAX 0.12 and newer ask the mesh."""
    mesh = Mesh(np.asarray([device]), ("data",)).abstract_mesh
    if getattr(mesh, "abstract_device", None) is None:
        yield
        return
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=mesh.abstract_device)):
        yield


def _compile_lowered(lowered: Any) -> Any:
    """Compile; without Triton's products where it needs a GPU to choose their tiles (XLA of JAX 0.10)."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "output tile sizes" not in str(error):
            raise
        return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})


def find_needed_memory(message: str) -> int | None:
    """Read how many bytes a program needs from the error of a compiler that refuses it for lack of memory.

    None for other errors. `Used 20.49G of 15.75G hbm` is 20.49 GiB.
    """
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    for pattern in (
        r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm",
        r"\(([\d.]+)([KMGT]?)\) exceeds available",
    ):
        if found := re.search(pattern, message):
            return int(float(found.group(1)) * _UNITS[found.group(2)])
    return None


@contextlib.contextmanager
def name_missing_library(target: Target) -> Iterator[None]:
    """Name cuDNN as missing where JAX does not find it while it traces attention."""
    try:
        yield
    except RuntimeError as error:
        remedy = _missing_library(str(error))
        if not remedy or isinstance(error, jax.errors.JaxRuntimeError):
            raise
        raise UserError(
            f"--target={target.name}: attention on these devices is cuDNN's, which is not installed "
            f"({first_line(error)}){remedy}"
        ) from error


def _missing_library(message: str) -> str:
    if "cudnn" not in message.lower():
        return ""
    return (
        f"; cuDNN comes with the extra cuda13: {install_command(extra='cuda13')}; or set model.attention=xla"
    )


@contextlib.contextmanager
def _without_messages_of_xla() -> Iterator[None]:
    """Discard what compilers write to standard error, where only errors that JAX raises concern a user."""
    saved = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _with_shardings(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )


def _pad_rows(batch: BatchArray, parts: int) -> BatchArray:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((-(-leaf.shape[0] // parts) * parts, *leaf.shape[1:]), leaf.dtype),
        batch,
    )


def _bytes_on_device(tree: Any) -> int:
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
