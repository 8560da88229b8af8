"""`show --target`: compiles a training step for accelerators that need not be present, and describes it."""

import contextlib
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh

from flaxformer_mt.commands.compiled_text import count_kernels, read_collectives, read_cycles
from flaxformer_mt.commands.show import longest_batch, show
from flaxformer_mt.commands.target_devices import Target, find_devices, usable_memory
from flaxformer_mt.commands.terminal_tables import Parts
from flaxformer_mt.config import Config
from flaxformer_mt.data.batch_array import BatchArray
from flaxformer_mt.errors import UserError, first_line, install_command
from flaxformer_mt.evaluation.tables import make_table, write_text
from flaxformer_mt.flops import padded_work, peak_flops, training_flops
from flaxformer_mt.kernels.attention_kernels import explain_attention
from flaxformer_mt.parallel import Parallel, make_parallel
from flaxformer_mt.parallel.mesh import with_shardings
from flaxformer_mt.training.optimizers import make_hyperparameters
from flaxformer_mt.training.setup import compile_train_step
from flaxformer_mt.training.state import TrainState, init_state, init_training_params, make_training_model

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Compiled(NamedTuple):
    """A compiled program (XLA executable), which a step runs `times` times.

    needed: bytes of device memory, including arguments, results, and arrays that the step keeps for other
    programs. text: the program; empty if the compiler rejected it for lack of memory.
    """

    needed: int
    text: str
    times: int = 1


def show_for_target(config: Config, run_dir: Path | None, target: Target) -> dict[str, Any]:
    """Return the result of `show`, with an entry `target` that describes a step compiled for the target."""
    jax.config.update("jax_platforms", "cpu")  # the devices at hand, if there are any, are not needed
    result = show(config, run_dir, device_kind=target.accelerator.device_kind)
    sizes = (result["vocabulary"]["source_size"], result["vocabulary"]["target_size"])
    return result | {"target": describe_update(config, target, sizes=sizes)}


def describe_update(config: Config, target: Target, *, sizes: tuple[int, int]) -> dict[str, Any]:
    """Compile a training step for the longest batch, and describe it as JSON values.

    `sizes`: source and target vocabulary. `estimate` is None if a program exceeds the device memory.
    """
    parallel = make_parallel(config, devices=find_devices(target))
    rows, source, length = longest_batch(config).shape
    kernel, reason = explain_attention(
        config.model,
        target.accelerator.platform,
        lengths=(source, length),
        tensor=parallel.layout.tensor,
    )
    with _name_failure(target):
        programs = compile_update(config, parallel, sizes)
    needed, memory = max(program.needed for program in programs), usable_memory(target)
    collectives: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for program in programs:
        for kind, counts in read_collectives(program.text, program.times).items():
            collectives[kind].update(counts)
    estimate = None
    if all(program.text for program in programs):
        devices = parallel.layout.device_count
        estimate = estimate_update(config, target, programs, devices=devices, target_size=sizes[1])
    return {
        "name": target.name,
        "layout": parallel.layout.describe(),
        "batch": {"rows": rows, "source_length": source, "target_length": length},
        "memory_gib": round(memory / 2**30, 2),
        "peak_gib": round(needed / 2**30, 2),
        "fits": needed <= memory,
        "attention": {"kernel": kernel, "reason": reason},
        "collectives": {kind: dict(counts) for kind, counts in collectives.items()},
        "estimate": estimate,
    }


def compile_update(config: Config, parallel: Parallel, sizes: tuple[int, int]) -> list[Compiled]:
    """Compile a training step for the longest batch: one program, or three with gradient accumulation.

    Rows are added to the batch until the devices can divide them equally.
    """
    model, _ = make_training_model(config, parallel, sizes=sizes)
    step = compile_train_step(model, config, parallel)

    def make_state() -> TrainState:
        return init_state(init_training_params(model, config, config.seed), config.optim)

    state = parallel.place_shapes(jax.eval_shape(make_state))
    numbers = parallel.place_shapes(make_hyperparameters(config))
    rows = parallel.put_shapes(_pad_rows(longest_batch(config), parallel.layout.row_parts))
    inputs = step.arguments_of(state, numbers, rows)
    if step.update is None:
        return [_compile(parallel, step.by_shape, inputs)]
    shapes = jax.eval_shape(step.by_shape.jitted, *inputs)
    sums = with_shardings(shapes, parallel.partial_shardings(shapes))
    times, state_bytes = config.optim.accumulation, _bytes_on_device(state)
    # Beside the parameters, which it reads: the rest of the state, and the sum of the batches before.
    held = state_bytes - _bytes_on_device(state.params) + _bytes_on_device(sums)
    return [
        _compile(parallel, step.by_shape, inputs, times=times, held=held),
        _compile(parallel, step.add, (sums, sums), times=times - 1, held=state_bytes),
        _compile(parallel, step.update, (state, numbers, sums)),
    ]


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


def _compile(
    parallel: Parallel, program: Any, inputs: Sequence[Any], *, times: int = 1, held: int = 0
) -> Compiled:
    """Compile a program of a step, which keeps `held` bytes on each device for other programs."""
    # Pallas asks for which GPU it lowers kernels; JAX 0.12 and newer ask the mesh.
    device = parallel.mesh.abstract_mesh.abstract_device
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        lowered = program.lower(*inputs)
    try:
        with _without_messages_of_xla():
            compiled = _compile_lowered(lowered)
    except jax.errors.JaxRuntimeError as error:
        needed = find_needed_memory(str(error))
        if needed is None:
            raise
        return Compiled(needed + held, "", times)
    peak = int(compiled.memory_analysis().peak_memory_in_bytes)
    return Compiled(peak + held, compiled.as_text(), times)


def _compile_lowered(lowered: Any) -> Any:
    """Compile; without Triton GEMMs if their tile sizes cannot be chosen without a GPU (XLA of JAX 0.10)."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "output tile sizes" not in str(error):
            raise
        return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})


@contextlib.contextmanager
def _without_messages_of_xla() -> Iterator[None]:
    """Discard messages of compilers on standard error; only the errors that JAX raises matter to users."""
    saved = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def find_needed_memory(message: str) -> int | None:
    """Return the bytes named in a compiler's out-of-memory error (`Used 20.49G of ...`), or None."""
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
def _name_failure(target: Target) -> Iterator[None]:
    """Raise UserError with one line for errors of the compiler, and of JAX if cuDNN is missing."""
    try:
        yield
    except RuntimeError as error:
        misses_cudnn = "cudnn" in str(error).lower()
        if not misses_cudnn and not isinstance(error, jax.errors.JaxRuntimeError):
            raise
        remedy = f"; cuDNN comes with the extra cuda13: {install_command(extra='cuda13')}"
        remedy += "; or set model.attention=plain"
        raise UserError(
            f"--target={target.name}: the step does not compile ({first_line(error)})"
            f"{remedy if misses_cudnn else ''}"
        ) from error


def estimate_update(
    config: Config, target: Target, programs: Sequence[Compiled], *, devices: int, target_size: int
) -> dict[str, Any]:
    """Describe the cost of a step's programs; `computing_milliseconds` assumes the devices' peak rate."""
    rows, source, length = longest_batch(config).shape
    flops = training_flops(config.model, padded_work(rows, source, length), target_size=target_size)
    flops *= config.optim.accumulation
    peak = peak_flops(config, target.accelerator.device_kind)
    cycles = sum(read_cycles(program.text) * program.times for program in programs)
    kernels = None
    if target.accelerator.platform == "cuda":
        kernels = sum(count_kernels(program.text) * program.times for program in programs)
    return {
        "computing_milliseconds": peak and round(1e3 * flops / devices / peak, 3),
        "million_cycles": round(cycles / 1e6, 1),
        "kernels": kernels,
    }


def summarize_target(target: Mapping[str, Any]) -> str:
    batch, attention, estimate = target["batch"], target["attention"], target["estimate"]
    fits = "fits into" if target["fits"] else "does NOT fit into"
    parts: Parts = [
        f"Compiled for, not run: {target['name']}, {target['layout']}",
        f"A step of {batch['rows']} rows of {batch['source_length']} source and "
        f"{batch['target_length']} target tokens {fits} the {target['memory_gib']} GiB of a device: "
        f"{target['peak_gib']} GiB at its peak",
        f"Attention: {attention['kernel']} ({attention['reason']})",
    ]
    columns = {"collective": "{kind}", "number": "{count:,}", "bytes": "{bytes:,}"}
    rows = [{"kind": kind, **one} for kind, one in target["collectives"].items()]
    caption = "Collectives of a step, on each device:"
    parts.append(make_table(columns, rows, caption) if rows else f"{caption} none")
    if estimate is None:
        return write_text([*parts, "Cost: not known; the compiler has refused the step"])
    if estimate["computing_milliseconds"] is not None:
        parts.append(f"Operations of a step at the peak rate: {estimate['computing_milliseconds']:.1f} ms")
    if estimate["kernels"] is not None:
        parts.append(f"Kernels of a step: {estimate['kernels']:,}")
    if estimate["million_cycles"]:
        cycles = f"{estimate['million_cycles']:,.1f} million"
        parts.append(f"Cycles that the compiler expects, without Pallas kernels: {cycles}")
    return write_text(parts)
