"""Compiles the update and a decoding step of a config for devices that are not at hand.

Uses the compilers in libtpu (TPUs) and in JAX's CUDA plugin, which need no device: they get a description of
it. Nothing is computed, and no array is allocated.
"""

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxformer_mt.commands.show import longest_batch
from flaxformer_mt.commands.targets.collectives import Traffic, read_collectives
from flaxformer_mt.commands.targets.target_names import Target, describe_gpu
from flaxformer_mt.config import Config
from flaxformer_mt.config.checks import search_width
from flaxformer_mt.data.batch_array import to_array
from flaxformer_mt.decoding.sizes import StateSizes, make_length_rule
from flaxformer_mt.errors import UserError, install_command
from flaxformer_mt.model import init_params, make_model
from flaxformer_mt.parallel import Parallel, make_parallel
from flaxformer_mt.shapes import Batch
from flaxformer_mt.training.hyperparameters import make_hyperparameters
from flaxformer_mt.training.setup import compile_train_step
from flaxformer_mt.training.state import TrainState, choose_scan, init_state, init_training_params

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
        "gpu",
    ),
}
_KERNELS = re.compile(r'custom_call_target="([^"]*)"')
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program, or how much memory it would need if the compiler refused it.

    peak: bytes of one device at the program's peak, with its arguments and results. accessed: bytes that it
    reads and writes; None if it was refused. kernels: calls of kernels from outside XLA in its text, by name.
    loops: those whose iterations are unknown, which count once. times: how often an update runs it. held:
    bytes of one device that the update keeps meanwhile for other programs.
    """

    name: str
    peak: int
    seconds: float
    accessed: int | None = None
    collectives: Mapping[str, Traffic] = dataclasses.field(default_factory=dict)
    kernels: Mapping[str, int] = dataclasses.field(default_factory=dict)
    loops: int = 0
    times: int = 1
    held: int = 0

    @property
    def needed(self) -> int:
        """Bytes of one device that must be free for the program to run."""
        return self.peak + self.held


def find_devices(target: Target) -> list[jax.Device]:
    """Describe the devices of a target to JAX.

    Raises:
      UserError: the compiler for them is not installed, or refuses the target.
    """
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
            f"({_first_line(error)}); install its newest version: "
            f"{install_command(extra=extra)} --upgrade"
        ) from error


class TargetCompiler:
    """Compiles the programs of configs for the devices of one target."""

    def __init__(self, target: Target, *, sizes: tuple[int, int]) -> None:
        """Describe the devices.

        Args:
          sizes: number of entries of the source and of the target vocabulary.

        Raises:
          UserError: see `find_devices`.
        """
        self.target = target
        self.sizes = sizes
        self._devices = find_devices(target)

    @property
    def device_kind(self) -> str:
        """The name of these devices in JAX."""
        return self._devices[0].device_kind

    def parallel(self, config: Config) -> Parallel:
        """Return the backend and the layout that the config selects on these devices.

        Raises:
          UserError: a layout that does not fit them.
        """
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
        padded, special = _pad_rows(longest_batch(config), parallel.layout.row_parts), config.vocab
        rows = parallel.put_shapes(to_array(padded, pad_id=special.pad_id, bos_id=special.bos_id))
        inputs = step.arguments_of(state, numbers, rows)
        if not step.of_sums:
            return [self._compile("update", step.by_shape, inputs)]
        add, update = step.of_sums
        shapes = jax.eval_shape(step.by_shape, *inputs)
        sums = _with_shardings(shapes, parallel.partial_shardings(shapes))
        times, state_bytes = config.optim.accumulation, _bytes_on_device(state)
        # Beside the parameters, which it reads: the rest of the state, and the sum of the batches before.
        held = state_bytes - _bytes_on_device(state.params) + _bytes_on_device(sums)
        return [
            self._compile("gradient of a batch", step.by_shape, inputs, times=times, held=held),
            self._compile("sum of two gradients", add, (sums, sums), times=times - 1, held=state_bytes),
            self._compile("update", update, (state, numbers, sums)),
        ]

    def compile_decoding_step(self, config: Config) -> tuple[Compiled, dict[str, int]]:
        """Compile one step of decoding the longest sources on one device, and return its sizes too.

        A device searches lines of its own with all parameters, in the batches of `search.batch_tokens`.
        """
        config = config.replace({"model.scan_layers": False})
        model = self._make_model(config)
        data, search = config.data, config.search
        longest = data.max_source_length if data.source_language else 1
        lengths = make_length_rule(search, [config.model], longest)
        width = max(1, search_width(search, 1))
        size = StateSizes(lengths, width, search.batch_tokens).many()[-1]
        mesh = Mesh(np.asarray(self._devices[:1]), ("data",))
        one_device = NamedSharding(mesh, PartitionSpec())

        def start(key: Any) -> Any:
            params = init_params(model, key)
            ids = jnp.zeros((size.rows, size.source_length), jnp.int32)
            cache = model.apply(
                {"params": params}, ids, ids == 0, width, size.capacity, method="start_decoding"
            )
            cache = cache._replace(start_steps=jnp.zeros(size.rows, jnp.int32))
            return params, jnp.zeros((size.rows, width), jnp.int32), cache

        def step(params: Any, tokens: Any, cache: Any) -> Any:
            return model.apply({"params": params}, tokens, cache, method="decode_step")

        inputs = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one_device),
            jax.eval_shape(start, jax.random.key(0)),
        )
        jitted = jax.jit(step, donate_argnums=(2,))
        shape = {
            "rows": size.rows,
            "beams": width,
            "source_length": size.source_length,
            "capacity": size.capacity,
        }
        return self._compile("decoding step", jitted, inputs), shape

    def _make_model(self, config: Config, *, gathers_twice: bool = False) -> Any:
        source_size, target_size = self.sizes
        return make_model(
            choose_scan(config),
            source_size=source_size,
            target_size=target_size,
            platform=self.target.accelerator.platform,
            gathers_twice=gathers_twice,
        )

    def _compile(
        self, name: str, jitted: Any, inputs: Sequence[Any], *, times: int = 1, held: int = 0
    ) -> Compiled:
        start = time.monotonic()
        lowered = jitted.lower(*inputs)
        try:
            with _without_messages_of_xla():
                compiled = _compile_lowered(lowered)
        except jax.errors.JaxRuntimeError as error:
            needed = find_needed_memory(str(error))
            if needed is None:
                raise UserError(
                    f"--target={self.target.name}: the {name} does not compile ({_first_line(error)})"
                    f"{_missing_library(str(error))}"
                ) from error
            return Compiled(name, needed, time.monotonic() - start, times=times, held=held)
        text = compiled.as_text()
        collectives, loops = read_collectives(text)
        return Compiled(
            name,
            int(compiled.memory_analysis().peak_memory_in_bytes),
            time.monotonic() - start,
            int(compiled.cost_analysis().get("bytes accessed", 0)),
            collectives,
            Counter(re.findall(r'"kernel_name":\s*"([^"]*)"', text) or _KERNELS.findall(text)),
            loops,
            times,
            held,
        )


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
    """Name cuDNN as missing where JAX does not find it while it traces attention.

    Raises:
      UserError: cuDNN is not installed, and the programs are to call it.
    """
    try:
        yield
    except RuntimeError as error:
        remedy = _missing_library(str(error))
        if not remedy or isinstance(error, jax.errors.JaxRuntimeError):
            raise
        raise UserError(
            f"--target={target.name}: attention on these devices is cuDNN's, which is not installed "
            f"({_first_line(error)}){remedy}"
        ) from error


def _missing_library(message: str) -> str:
    if "cudnn" not in message.lower():
        return ""
    return f"; cuDNN comes with the extra gpu: {install_command(extra='gpu')}; or set model.attention=xla"


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


def _pad_rows(batch: Batch, parts: int) -> Batch:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((-(-leaf.shape[0] // parts) * parts, *leaf.shape[1:]), leaf.dtype),
        batch,
    )


def _bytes_on_device(tree: Any) -> int:
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]
