"""The compiled programs of a search with neural models: three for each size of the search state.

`empty` makes a state of free rows, `prefill` reads sources and prefixes, and `generate` moves the sentences
that were read into free rows and decodes them. Programs are compiled in threads; `Slots` decides when each
runs.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.config import ModelConfig, SearchConfig
from flaxformer_mt.decoding.ensemble_members import Members, Sources, make_models
from flaxformer_mt.decoding.state_sizes import CANDIDATES_PER_TOKEN, check_memory
from flaxformer_mt.parallel import SplitParameters, compile_by_rows, default_platform, local_device_count
from flaxformer_mt.parallel.compilation import keep_json, lower_kept
from flaxformer_mt.parallel.rows_per_device import split_rows
from flaxformer_mt.processor import core_count
from flaxformer_mt.search import (
    Leaf,
    Lines,
    QueueResult,
    Search,
    SearchResult,
    Shortlists,
    Size,
    State,
    StateLayout,
    Symbols,
    align_prefixes,
    begin_lines,
    begin_prefixed_lines,
    empty_rows,
    find_layout,
    pack,
    search_queue,
    search_width,
    take_first_step,
)
from flaxformer_mt.shapes import Array
from flaxformer_mt.tracking.progress_display import announce_if_slow

if TYPE_CHECKING:
    from flaxformer_mt.model import Model

# The leaves of a packed state, in the order of its tree.
Leaves = tuple[Array, ...]

# Number of free rows that are refilled together, as a share of the rows: each refill takes time, and so do
# steps with free rows. On accelerators a refill takes more than half the time of a step whatever its rows.
_REFILL_SHARE, _ACCELERATOR_REFILL_SHARE = 24, 5


class StatePrograms:
    """The programs for search states of one size; each call waits until its program is compiled."""

    def __init__(self, parts: int, **programs: "Future[Callable[..., Any]]") -> None:
        self._parts, self._programs = parts, programs

    def wait(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds` for the compiler; return False if it is still running."""
        if seconds is not None:
            return not wait(self._programs.values(), seconds).not_done
        with announce_if_slow("compiling the search (once per size; kept for later)"):
            return not wait(self._programs.values()).not_done

    def empty(self) -> Leaves:
        return self._programs["empty"].result()((), np.ones(self._parts, np.int32))

    def prefill(self, params: tuple[Any, ...], sources: Sources) -> Leaves:
        """Run the models on sources; return the result, which `generate` takes as `waiting`."""
        self.wait()
        return self._programs["prefill"].result()(params, *sources)

    def generate(
        self,
        params: tuple[Any, ...],
        state: Leaves,
        waiting: Leaves,
        *,
        counts: Sequence[int],
        final_free_rows: Sequence[int],
        max_steps: int,
    ) -> QueueResult:
        """Run `search_queue` on each device; `counts`: the number of waiting sentences of each device.

        The state is donated, except in programs that are stored on disk.
        """
        scalars = [
            np.broadcast_to(np.asarray(value, np.int32), self._parts)
            for value in (counts, final_free_rows, max_steps)
        ]
        owners, *found = self._programs["generate"].result()(params, state, waiting, *scalars)
        return QueueResult(tuple(found[: len(state)]), owners, SearchResult(*found[len(state) :]))


class SearchPrograms:
    """The programs of a search with one model or an ensemble; rows are divided equally among devices."""

    def __init__(
        self,
        configs: Sequence[ModelConfig],
        options: SearchConfig,
        symbols: Symbols,
        *,
        sizes: tuple[int, int],
        spread: bool | SplitParameters,
        shortlists: Shortlists | None = None,
        **jit_options: Any,
    ) -> None:
        """See `SearchEngine`. Programs with `jit_options`, which go to `jax.jit`, are not stored on disk."""
        self._options, self._symbols, self._shortlists = options, symbols, shortlists
        self._configs, self._sizes = configs, sizes
        self._split = spread if isinstance(spread, SplitParameters) else None
        self.parts = local_device_count() if spread and self._split is None else 1
        self.jit_options = jit_options
        # What all programs depend on, apart from their arguments and sizes.
        self._facts = [configs, options, symbols, sizes, shortlists and shortlists.common.tolist()]
        self._found: dict[Any, StatePrograms] = {}
        self._layouts: dict[Any, tuple[StateLayout, StateLayout]] = {}
        self._lock = threading.Lock()

    @functools.cached_property
    def _models(self) -> list["Model"]:
        return make_models(self._configs, self._sizes)

    def find(
        self, params: tuple[Any, ...], size: Size, example: Sources, *, n_best: int, keep: bool = False
    ) -> StatePrograms:
        """Return the programs for a state size; if they are new, threads start to compile them.

        `params` must already have their final sharding. `keep`: whether to store the programs on disk.
        """
        leaves = jax.tree.leaves(params)
        key = (
            *(size, n_best, jax.tree.structure(example)),
            *(np.shape(leaf) for leaf in jax.tree.leaves(example)),
            *((np.shape(leaf), leaf.dtype, getattr(leaf, "sharding", None)) for leaf in leaves),
        )
        if key not in self._found:
            self._found[key] = self._compile(params, size, example, n_best, keep=keep)
        return self._found[key]

    def _compile(
        self, params: tuple[Any, ...], size: Size, example: Sources, n_best: int, *, keep: bool
    ) -> StatePrograms:
        check_memory(size, search_width(self._options, n_best), self._configs, self._sizes[1])
        devices = jax.local_devices()[: self.parts]
        places = {getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(params)}
        keep &= self._split is None and not self.jit_options
        keep &= all(place is not None and place.device_set == set(devices) for place in places)
        line: Lines = jax.tree.map(lambda leaf: np.zeros((1, *np.shape(leaf)[1:]), leaf.dtype), example.lines)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), params)
        layouts = functools.partial(self._find_layouts, shapes, line, n_best)
        facts = [self._facts, n_best, *map(_describe, (line, shapes))]

        def make_states() -> tuple[Any, ...]:
            """Return the shapes of a state and of waiting sentences, cached on disk if `keep`."""

            def find() -> list[Any]:
                return [layout.leaves for layout in layouts()]

            found = keep_json("layout", facts, find) if keep else find()
            sizes = size, size._replace(rows=len(example.ids) // self.parts)
            return tuple(
                tuple(self._place(Leaf(*leaf), one) for leaf in leaves)
                for leaves, one in zip(found, sizes, strict=True)
            )

        limits = [np.ones(self.parts, np.int32)] * 3
        start = functools.partial(self._start, facts=[*facts, size] if keep else None, devices=devices)
        empty, prefill, generate = self._make_functions(layouts, size, n_best)
        return StatePrograms(
            self.parts,
            empty=start(empty, lambda: ((), limits[0])),
            prefill=start(prefill, lambda: (params, *example)),
            generate=start(generate, lambda: (params, *make_states(), *limits), donate=(1,)),
        )

    def _make_functions(
        self, layouts: Callable[[], tuple[StateLayout, StateLayout]], size: Size, n_best: int
    ) -> tuple[Callable[..., Leaves], ...]:
        """Return the functions that the three programs compute."""
        share = _REFILL_SHARE if default_platform() == "cpu" else _ACCELERATOR_REFILL_SHARE

        def empty(_: Any, rows: Array) -> Leaves:
            return (*jax.tree.leaves(empty_rows(layouts()[0], size)),)

        def prefill(params: tuple[Any, ...], ids: Array, mask: Array, lines: Lines) -> Leaves:
            return (*jax.tree.leaves(self._read(params, Sources(ids, mask, lines), n_best)),)

        def generate(params: tuple[Any, ...], state: Leaves, waiting: Leaves, *limits: Array) -> Leaves:
            own, others = layouts()
            count, final_free_rows, max_steps = (limit[0] for limit in limits)
            found = search_queue(
                self._make_task(params, size.capacity, n_best)[0],
                own,
                jax.tree.unflatten(own.structure, state),
                jax.tree.unflatten(others.structure, waiting),
                count,
                final_free_rows,
                refill=max(1, size.rows // share),
                max_steps=max_steps,
            )
            return (found.owners, *jax.tree.leaves(found.state), *jax.tree.leaves(found.results))

        return empty, prefill, generate

    def _start(
        self,
        function: Callable[..., Any],
        make_arguments: Callable[[], tuple[Any, ...]],
        *,
        donate: tuple[int, ...] = (),
        facts: list[Any] | None,
        devices: Sequence[jax.Device],
    ) -> "Future[Callable[..., Any]]":
        """Start to compile a function, or to load its program stored under `facts` (None: do not store)."""

        def compile_one() -> Callable[..., Any]:
            arguments = make_arguments()
            if facts is None:
                return self._jit(function, donate=donate).lower(*arguments).compile()
            program = self._jit(function, donate=())
            return lower_kept(program, arguments, [*facts, function.__name__], devices)()

        return _compilers().submit(compile_one)

    def _jit(self, function: Callable[..., Any], *, donate: tuple[int, ...]) -> Any:
        if self._split is not None:
            return self._split.compile(function, donate=donate, **self.jit_options)
        if self.parts > 1:
            return compile_by_rows(function, donate=donate, **self.jit_options)
        return jax.jit(function, donate_argnums=donate, **self.jit_options)

    def _place(self, leaf: Leaf, size: Size) -> jax.ShapeDtypeStruct:
        """Return the shape and sharding of a leaf with the rows of all parts."""
        sharding = None
        if self._split is not None:
            sharding = self._split.whole
        elif self.parts > 1:
            sharding = split_rows()
        shape = leaf.fit(size._replace(rows=size.rows * self.parts))
        return jax.ShapeDtypeStruct(shape, jnp.dtype(leaf.dtype), sharding=sharding)

    def _find_layouts(self, params: Any, line: Lines, n_best: int) -> tuple[StateLayout, StateLayout]:
        """Return the layouts of states and of waiting sentences, from the shapes of `params` and `line`."""
        key = str((n_best, *map(_describe, (line, params))))

        def take_sources(length: int) -> Sources:
            mask, own = jnp.ones((1, length), bool), line
            if own.shortlist is not None:
                own = own._replace(shortlist=np.zeros((1, CANDIDATES_PER_TOKEN * length), np.int32))
            return Sources(jnp.zeros(mask.shape, jnp.int32), mask, own)

        def start(source_length: int, capacity: int, params: tuple[Any, ...]) -> State:
            sources = take_sources(source_length)
            task, members = self._make_task(params, capacity, n_best)
            cache = members.encode(sources, task.width, capacity)
            cache = cache._replace(start_steps=jnp.zeros(1, jnp.int32))
            return pack(task.start(cache, members.add_source_mask(sources), clip=False))

        def wait(source_length: int, capacity: int, params: tuple[Any, ...]) -> State:
            return self._read(params, take_sources(source_length), n_best)

        with self._lock:
            if key not in self._layouts:
                pad_id = self._symbols.pad_id
                self._layouts[key] = (
                    find_layout(start, params, pad_id=pad_id),
                    find_layout(wait, params, pad_id=pad_id),
                )
            return self._layouts[key]

    # ---- traced functions of one part ----

    def _read(self, params: tuple[Any, ...], given: Sources, n_best: int) -> State:
        """Return the packed state of waiting sentences, after their prefixes and a first step."""
        task, members = self._make_task(params, 1, n_best)
        sources, prefixes = members.add_source_mask(given), given.lines.prefixes
        if prefixes is None:
            return take_first_step(task, begin_lines(task, members.encode(given, 1, 1), sources))
        capacity = prefixes.shape[1] + 1
        symbols = {"bos_id": self._symbols.bos_id, "pad_id": self._symbols.pad_id}
        _, tokens, starts = align_prefixes(prefixes, **symbols)
        cache = members.encode(given, 1, capacity)._replace(start_steps=starts)
        logits, cache = members.read_prefix(tokens, cache)
        attention = members.attention(cache) if members.covers else None
        task = replace(task, max_length=capacity)
        state = begin_prefixed_lines(task, members.keep_last_attention(cache), sources, logits, attention)
        return take_first_step(task, state)

    def _make_task(self, params: tuple[Any, ...], capacity: int, n_best: int) -> tuple[Search, Members]:
        shortlists = self._shortlists
        common = None if shortlists is None else shortlists.common
        members = Members(self._models, params, self._configs, self._options, common=common)
        symbols, options = self._symbols, self._options
        steps = members.next_logits, members.attention
        return Search(steps[0], options, symbols, capacity, n_best, steps[1], shortlists), members


@functools.cache
def _compilers() -> ThreadPoolExecutor:
    """Return the pool of compiler threads: one per core, because XLA compiles a program on one core."""
    return ThreadPoolExecutor(core_count(), thread_name_prefix="compile")


def _describe(tree: Any) -> list[Any]:
    return [str(jax.tree.structure(tree)), *((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(tree))]
