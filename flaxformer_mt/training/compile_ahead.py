"""Compile the programs of all batch shapes before they are needed, several at a time.

Without it, each shape is compiled when it first occurs, and the devices wait meanwhile. Contains the update,
before training, and the loss of the validation set, before the first evaluation.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import jax

from flaxformer_mt.config import Config
from flaxformer_mt.cpu import core_count
from flaxformer_mt.data.batch_array import BatchArray
from flaxformer_mt.data.buckets import Shape
from flaxformer_mt.errors import UserError
from flaxformer_mt.parallel import Parallel

# Seconds between two messages on how many shapes are compiled.
_MESSAGE_EVERY = 10.0


class ProgramsByShape:
    """A program for each shape of a batch: compiled ahead, or by jit when the shape first occurs."""

    def __init__(self, jitted: Callable[..., Any], *, batch: int) -> None:
        """Compile nothing.

        Args:
          jitted: a result of `jax.jit`.
          batch: the index of its argument that is a `BatchArray`.
        """
        self._jitted, self._batch = jitted, batch
        self._programs: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Run the program for the shape of the batch."""
        return self._programs.setdefault(_key(arguments[self._batch]), self._jitted)(*arguments)

    def __len__(self) -> int:
        """Return the number of shapes for which there is a program."""
        return len(self._programs)

    def __contains__(self, batch: BatchArray) -> bool:
        """Tell whether there is a program for batches of this shape."""
        return _key(batch) in self._programs

    def lower(self, *arguments: Any) -> Any:
        """Trace the program for arguments of which only shapes, dtypes and shardings are read."""
        return self._jitted.lower(*arguments)  # type: ignore[attr-defined]

    def add(self, batch: BatchArray, program: Callable[..., Any]) -> None:
        """Keep the compiled program for batches of this shape."""
        self._programs[_key(batch)] = program


def _key(batch: Any) -> Any:
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple(leaf.shape for leaf in leaves)


def compiles_ahead(config: Config, platform: str) -> bool:
    """Tell whether programs are compiled before they are needed: with `auto`, on all devices but CPUs."""
    wanted = config.train.compile_ahead
    return wanted == "all" or wanted == "auto" and platform != "cpu"


def compile_together(jitted: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Compile a result of `jax.jit` for each of several arguments, in as many threads as there are cores.

    Args:
      arguments: of which only shapes, dtypes and shardings are read; at least one.
    """
    with ThreadPoolExecutor(min(len(arguments), core_count()), thread_name_prefix="compile") as threads:
        # Tracing holds Python's lock, compiling does not.
        found = [threads.submit(jitted.lower(*one).compile) for one in arguments]  # type: ignore[attr-defined]
        return [future.result() for future in found]


def find_shapes(config: Config, batches: dict[str, Any], *, updates: int) -> tuple[Shape, ...]:
    """Return the batch shapes that the remaining updates will use, the one with the most work first.

    Args:
      batches: the summary of an epoch (`plan_summary`).
      updates: the number of updates that are left.
    """
    drawn = updates * config.optim.accumulation / max(1, batches["batches"])
    found = [shape for shape in batches["shapes"] if shape["batches"] and shape["batches"] * drawn >= 1]
    shapes = [Shape(shape["rows"], shape["source"], shape["target"]) for shape in found]
    return tuple(sorted(shapes, key=lambda shape: -shape.work))


def compile_ahead(
    programs: ProgramsByShape,
    shapes: Sequence[Shape],
    arguments_of: Callable[[Shape], tuple[BatchArray, tuple[Any, ...]]],
    *,
    config: Config,
    parallel: Parallel,
    say: Callable[[str], object],
) -> None:
    """Compile the programs of these shapes; they come from JAX's cache on disk where it has them.

    Tracing holds Python's lock, so shapes are traced one after the other, in the same order in all processes;
    XLA compiles them beside that, in as many threads as there are cores.

    Args:
      arguments_of: the batch of a shape and all arguments of its program, without data.
      say: receives a line now and then on how far it is.

    Raises:
      UserError: a shape for which the program needs more memory than the devices have.
    """
    waiting: dict[Future[Any], tuple[Shape, BatchArray]] = {}
    shown = time.monotonic()

    def collect(done: set[Future[Any]]) -> None:
        nonlocal shown
        for future in done:
            shape, batch = waiting.pop(future)
            with _name_shape(shape, config, parallel):
                compiled = future.result()
            _check_memory(compiled, shape, config, parallel)
            programs.add(batch, compiled)
            counts.append(shape)
        if done and time.monotonic() - shown > _MESSAGE_EVERY:
            shown = time.monotonic()
            say(f"compiled {len(counts)} of {len(shapes)} batch shapes")

    counts: list[Shape] = []
    threads = ThreadPoolExecutor(min(len(shapes), core_count()), thread_name_prefix="compile")
    try:
        for shape in shapes:
            batch, arguments = arguments_of(shape)
            waiting[threads.submit(programs.lower(*arguments).compile)] = (shape, batch)
            collect({future for future in waiting if future.done()})
        while waiting:
            collect(wait(waiting, return_when=FIRST_COMPLETED).done)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _name_shape(shape: Shape, config: Config, parallel: Parallel) -> Iterator[None]:
    """Name the shape in the error of a compiler that finds too little memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).strip().partition("\n")[0][:200]
        raise UserError(_describe_excess(shape, config, parallel, reason)) from error


def _check_memory(compiled: Any, shape: Shape, config: Config, parallel: Parallel) -> None:
    """Compare the peak of a program, with its arguments, with that of the devices; CPUs report none."""
    memory, found = parallel.memory_limit(), compiled.memory_analysis()
    needed = int(getattr(found, "peak_memory_in_bytes", 0) or 0)
    if memory is not None and needed > memory:
        reason = f"it needs {needed / 2**30:.2f} GiB of {memory / 2**30:.2f} GiB"
        raise UserError(_describe_excess(shape, config, parallel, reason))


def _describe_excess(shape: Shape, config: Config, parallel: Parallel, reason: str) -> str:
    lengths = f"{shape.source} source and {shape.target}" if shape.source else f"{shape.target}"
    return (
        f"the update for batches of {shape.rows} rows of {lengths} target tokens does not fit into the "
        f"memory of {parallel.device_kind} ({reason}); lower data.batch_tokens "
        f"({config.data.batch_tokens}), or set model.remat=dots or full, or train.loss_chunk_tokens=6144"
    )


# Numbers of source and target tokens, by the shape of the batch with padding.
UnpaddedSizes = Mapping[Shape, tuple[int, int]]

# Padding is removed only from shapes with at least this share of it: to take tokens out and to put them back
# for attention costs about as much as so much padding.
_LEAST_PADDING = 0.05


def find_unpadded_sizes(
    config: Config, parallel: Parallel, plans: Iterable[Sequence[Mapping[str, Any]]]
) -> UnpaddedSizes:
    """Return the sizes of all shapes whose padding is worth removing; {}: batches keep their padding.

    Padding is removed on a CPU that is a single device, from models in which no token reads it.

    Args:
      plans: the shapes of an epoch, as `plan_summary` describes them, for each stage of training.
    """
    model = config.model
    reads_padding = model.padding_mask == "none" or model.decoder_self_attention == "ssru"
    if model.architecture != "encoder_decoder" or reads_padding or config.data.batching == "pack":
        return {}
    if not model.source_end:  # the end symbols of sources are masked in their padded rows
        return {}
    if config.train.unpad == "none" or parallel.platform != "cpu" or parallel.device_count > 1:
        return {}
    found: dict[Shape, tuple[int, int]] = {}
    for shape_facts in (facts for plan in plans for facts in plan if facts["batches"]):
        shape = Shape(shape_facts["rows"], shape_facts["source"], shape_facts["target"])
        slots = shape.rows * shape.source, shape.rows * shape.target
        before = found.get(shape, (0, 0))
        sizes = [
            max(held, min(-(-tokens // length) * length, of))
            for tokens, of, held, length in zip(
                shape_facts["likely_tokens"], slots, before, (shape.source, shape.target), strict=True
            )
        ]
        found[shape] = (sizes[0], sizes[1])
    return {
        shape: sizes
        for shape, sizes in found.items()
        if sum(sizes) <= (1 - _LEAST_PADDING) * shape.rows * (shape.source + shape.target)
    }


def fitting_sizes(batch: BatchArray, sizes: UnpaddedSizes) -> tuple[int, int] | None:
    """Return the sizes of a batch without padding; None if it keeps its padding, or has too many tokens."""
    room = sizes.get(batch.shape)
    if room is None or any(side.mask.sum() > most for side, most in zip(batch.sides, room, strict=True)):
        return None
    return room
