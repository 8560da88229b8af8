"""Compiles the training step and the validation loss for all batch shapes before they are needed.

Otherwise, the devices would wait whenever a new batch shape is compiled.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

import jax

from flaxformer_mt.config import Config
from flaxformer_mt.data.batch_array import BatchArray
from flaxformer_mt.data.buckets import Shape
from flaxformer_mt.errors import UserError, first_line
from flaxformer_mt.parallel import Parallel
from flaxformer_mt.parallel.compilation import lower_kept
from flaxformer_mt.processor import core_count

# Seconds between two messages on how many shapes are compiled.
_MESSAGE_EVERY = 10.0


class DiskCache(NamedTuple):
    """The arguments with which `lower_kept` caches the programs of a function on disk.

    results: a function of the program's arguments that makes a tree with the structure of the results.
    """

    dependencies: Any
    devices: Sequence[jax.Device]
    results: Callable[..., Any]


class ProgramsByShape:
    """A function with one compiled program per batch shape, compiled ahead or when the shape first occurs."""

    def __init__(self, jitted: Any, *, batch: int, on_disk: DiskCache | None = None) -> None:
        """Wrap a result of `jax.jit` whose argument number `batch` is a batch; nothing is compiled yet."""
        self.jitted, self._batch, self._on_disk = jitted, batch, on_disk
        self._programs: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        key = _key(arguments[self._batch])
        if key not in self._programs:
            self._programs[key] = self.start(*arguments)()
        return self._programs[key](*arguments)

    def __len__(self) -> int:
        return len(self._programs)

    def __contains__(self, batch: Any) -> bool:
        return _key(batch) in self._programs

    def lower(self, *arguments: Any) -> Any:
        """Trace the program; only shapes, dtypes and shardings of the arguments are used."""
        return self.jitted.lower(*arguments)

    def start(self, *arguments: Any) -> Callable[[], Callable[..., Any]]:
        """Load the program for the shapes of `arguments` from disk, or trace it.

        Returns a function that compiles the program, if necessary, and may be called in any thread.
        """
        shapes = shapes_of(arguments)
        if self._on_disk is None:
            return self.lower(*shapes).compile
        dependencies, devices, results = self._on_disk
        # Accelerators lack memory for a second state; one check shows whether a CPU can load copies.
        check = devices[0].platform == "cpu" and not self._programs
        return lower_kept(self.jitted, shapes, dependencies, devices, results=results(*shapes), check=check)

    def compile_all(
        self,
        every: Iterable[tuple[Any, ...]],
        finish: Callable[[Any, Future[Any]], Any] = lambda batch, future: future.result(),
    ) -> None:
        """Compile the programs for several tuples of arguments, in as many threads as there are cores.

        The programs are traced one after the other, since tracing holds Python's global lock, and in the same
        order in all processes. `finish` gets a batch and the finished future of its program, and returns the
        program.
        """
        distinct = {_key(arguments[self._batch]): arguments for arguments in every}
        threads = ThreadPoolExecutor(core_count(), thread_name_prefix="compile")
        try:
            futures = {threads.submit(self.start(*each)): key for key, each in distinct.items()}
            for future in as_completed(futures):
                key = futures[future]
                self._programs[key] = finish(distinct[key][self._batch], future)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def shapes_of(tree: Any) -> Any:
    """Replace each JAX array of a tree by a ShapeDtypeStruct with its shape, dtype and sharding."""

    def describe(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding, weak_type=x.weak_type)

    return jax.tree.map(describe, tree)


def _key(batch: Any) -> Any:
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple(leaf.shape for leaf in leaves)


def compiles_ahead(config: Config, platform: str) -> bool:
    """Return whether programs are compiled before they are needed; `auto` means yes, except on CPUs."""
    wanted = config.train.compile_ahead
    return wanted == "all" or wanted == "auto" and platform != "cpu"


def find_shapes(config: Config, epochs: Iterable[dict[str, Any]], *, updates: int) -> list[Shape]:
    """Return the batch shapes that the remaining steps will use, sorted by decreasing work.

    `epochs` has the `plan_summary` of one epoch per stage; `updates` is the number of steps that are left.
    """
    shapes = set()
    for batches in epochs:
        drawn = updates * config.optim.accumulation / max(1, batches["batches"])
        for shape in batches["shapes"]:
            if shape["batches"] and shape["batches"] * drawn >= 1:
                shapes.add(Shape(shape["rows"], shape["source"], shape["target"]))
    return sorted(shapes, key=lambda shape: -shape.work)


def compile_ahead(
    programs: ProgramsByShape,
    every: Iterable[tuple[Any, ...]],
    *,
    config: Config,
    parallel: Parallel,
    say: Callable[[str], object],
) -> None:
    """Compile the programs for all arguments in `every`, or load them from the cache on disk.

    `say` receives a progress message at most every 10 seconds. Raises UserError if the training step for a
    batch shape does not fit into the memory of the devices; CPUs report no memory and are not checked.
    """
    arguments = list(every)
    compiled: list[Shape] = []
    shown = time.monotonic()

    def finish(batch: BatchArray, future: Future[Any]) -> Any:
        nonlocal shown
        try:
            program = future.result()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise UserError(_describe_excess(batch.shape, config, parallel, first_line(error))) from error
        # At its peak, with its arguments.
        needed = int(getattr(program.memory_analysis(), "peak_memory_in_bytes", 0) or 0)
        memory = parallel.memory_limit()
        if memory is not None and needed > memory:
            reason = f"it needs {needed / 2**30:.2f} GiB of {memory / 2**30:.2f} GiB"
            raise UserError(_describe_excess(batch.shape, config, parallel, reason))
        compiled.append(batch.shape)
        if time.monotonic() - shown > _MESSAGE_EVERY:
            shown = time.monotonic()
            say(f"compiled {len(compiled)} of {len(arguments)} batch shapes")
        return program

    programs.compile_all(arguments, finish)


def _describe_excess(shape: Shape, config: Config, parallel: Parallel, reason: str) -> str:
    lengths = f"{shape.source} source and {shape.target}" if shape.source else f"{shape.target}"
    return (
        f"the step for batches of {shape.rows} rows of {lengths} target tokens does not fit into the "
        f"memory of {parallel.device_kind} ({reason}); lower data.batch_tokens "
        f"({config.data.batch_tokens}), or set model.remat=dots or full, or train.loss_chunk_tokens=6144"
    )


# Numbers of source and target tokens, by the shape of the batch with padding.
UnpaddedSizes = Mapping[Shape, tuple[int, int]]

# Padding is removed only from shapes with at least this share of it: removing it, and restoring it for
# attention, costs about as much as computing with this share.
_LEAST_PADDING = 0.05


def find_unpadded_sizes(
    config: Config, parallel: Parallel, plans: Iterable[Sequence[Mapping[str, Any]]]
) -> UnpaddedSizes:
    """Return array sizes with little padding for each batch shape whose padding is worth removing.

    The result is {} unless the only device is a CPU and no token of the model reads padding. `plans` has, for
    each stage of training, the list `shapes` of a `plan_summary`.
    """
    model = config.model
    reads_padding = model.padding_mask == "none" or model.decoder_self_attention == "ssru"
    if model.architecture != "encoder_decoder" or reads_padding or config.data.batching == "pack":
        return {}
    if not model.source_end:  # the end symbols of sources are masked in their padded rows
        return {}
    if parallel.platform != "cpu" or parallel.device_count > 1:
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
    """Return the entry of `sizes` for a batch's shape; None if it is absent or too small for the tokens."""
    room = sizes.get(batch.shape)
    if room is None or any(side.mask.sum() > most for side, most in zip(batch.sides, room, strict=True)):
        return None
    return room
