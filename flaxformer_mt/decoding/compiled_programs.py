"""The compiled programs of a search with neural models: encode sources, search them in rows, move rows.

Row 12 of the data path. Connects models and search: provides the search with the models' logits, caches and
attention weights. scheduler.py determines which sentences are searched when.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.config import ModelConfig, SearchConfig
from flaxformer_mt.decoding.ensemble_members import Members, Sources
from flaxformer_mt.decoding.sizes import CANDIDATES_PER_TOKEN
from flaxformer_mt.parallel import SplitParameters, compile_by_rows, default_platform, local_device_count
from flaxformer_mt.search import (
    UNLIMITED,
    Lines,
    QueueResult,
    Search,
    Shortlists,
    Size,
    State,
    StateLayout,
    Symbols,
    align_prefixes,
    append_rows,
    begin_lines,
    begin_prefixed_lines,
    empty_rows,
    find_layout,
    move_rows,
    search_queue,
    shares_first_step,
    take_first_step,
    widen_rows,
)
from flaxformer_mt.shapes import Array

if TYPE_CHECKING:
    from flaxformer_mt.model import Model


class SearchPrograms:
    """The programs of a search with one model, or with an ensemble that shares a vocabulary.

    The first axis of all arrays is the rows; with several local devices, each device has an equal part of the
    rows. Each program is compiled once for each size.
    """

    def __init__(
        self,
        configs: Sequence[ModelConfig],
        options: SearchConfig,
        symbols: Symbols,
        *,
        sizes: tuple[int, int],
        spread: bool | SplitParameters,
        shortlists: Shortlists | None = None,
    ) -> None:
        """Builds the networks.

        Args:
          configs: of one model, or of the members of an ensemble.
          sizes: number of entries of the source and the target vocabulary.
          shortlists: if each line has a shortlist, what all of them have in common.
          spread: whether each local device searches a part of the rows, or the mesh over which parameters
            are split; they come from `place_parameters`.
        """
        self._options = options
        self._symbols = symbols
        self._split = spread if isinstance(spread, SplitParameters) else None
        self.parts = local_device_count() if spread and self._split is None else 1
        self._configs = configs
        self._sizes = sizes
        # What all programs depend on, apart from their arguments and sizes.
        self._shortlists = shortlists
        self.facts = [configs, options, symbols, sizes, shortlists and shortlists.common.tolist()]
        self.compile_options: dict[str, Any] = {}
        self._layouts: dict[Any, StateLayout] = {}
        self._shares_first_step = shares_first_step(options)
        self.compile()

    @functools.cached_property
    def _models(self) -> list["Model"]:
        from flaxformer_mt.model import make_model

        source_size, target_size = self._sizes
        sizes: Any = {"source_size": source_size, "target_size": target_size}
        return [make_model(config, **sizes, platform=default_platform()) for config in self._configs]

    def compile(self, **options: Any) -> None:
        """Discards compiled programs; the next calls compile with these options of `jax.jit`."""
        self.compile_options = options

        def make(function: Callable[..., Any], *static: str, donate: tuple[int, ...] = ()) -> Any:
            if self._split is not None:
                return self._split.compile(function, static_argnames=static, donate=donate, **options)
            if self.parts > 1:
                return compile_by_rows(function, static_argnames=static, donate=donate, **options)
            return jax.jit(function, static_argnames=static, donate_argnums=donate, **options)

        self._read = make(self._read_rows, "n_best")
        self._widen = make(_widen_rows, "layout", "rows", "source_length")
        self._append = make(_append_rows, "layout", donate=(1,))
        self._begin = make(self._begin_rows, "n_best", donate=(1,))
        self._search = make(self._search_rows, "layout", "n_best", "refill", donate=(1,))
        self._move = make(_move_rows, "layout", "source_length", "capacity")
        self._empty = make(_empty_rows, "layout", "size")

    def find_layout(self, params: tuple[Any, ...], sources: Sources, *, n_best: int) -> StateLayout:
        """Returns the layout of search states for sources whose lines have the fields and shapes of these."""
        lines = sources.lines
        if lines.shortlist is not None:  # its length is that of the sources
            lines = lines._replace(shortlist=lines.shortlist[:, :CANDIDATES_PER_TOKEN])
        first_line = jax.tree.map(lambda leaf: np.asarray(leaf)[:1], lines)
        key = (
            n_best,
            jax.tree.structure(first_line),
            tuple(leaf.shape for leaf in jax.tree.leaves(first_line)),
        )
        if key not in self._layouts:

            def start(source_length: int, capacity: int) -> State:
                mask = jnp.ones((1, source_length), bool)
                lines = first_line
                if lines.shortlist is not None:
                    listed = np.zeros((1, CANDIDATES_PER_TOKEN * source_length), np.int32)
                    lines = lines._replace(shortlist=listed)
                example = Sources(jnp.zeros(mask.shape, jnp.int32), mask, lines)
                task, members = self._make_task(params, capacity, n_best)
                cache = members.encode(example, task.width, capacity)
                cache = cache._replace(start_steps=jnp.zeros(1, jnp.int32))
                return task.start(cache, members.add_source_mask(example), clip=False)

            self._layouts[key] = find_layout(start, pad_id=self._symbols.pad_id)
        return self._layouts[key]

    def begin(
        self,
        params: tuple[Any, ...],
        layout: StateLayout,
        blocks: Iterable[tuple[int, Sources]],
        *,
        rows: int,
        source_length: int,
        n_best: int,
    ) -> State:
        """Encodes the sources of a queue; returns their packed state, each part's sources in its first rows.

        Args:
          blocks: for each block, the index of its first row within a part, and its sources, padded to the
            longest source of the block.
          rows: number of rows of each part.
        """
        waiting: Any = None
        for first, block in blocks:
            encoded = self._read(params, *block, n_best=n_best)
            if block.ids.shape == (rows * self.parts, source_length):
                waiting = encoded
            elif waiting is None:
                waiting = self._widen((), encoded, layout=layout, rows=rows, source_length=source_length)
            else:
                waiting = self._append(
                    (), waiting, encoded, np.full(self.parts, first, np.int32), layout=layout
                )
        return self._begin(params, waiting, n_best=n_best) if self._shares_first_step else waiting

    def empty(self, layout: StateLayout, size: Size) -> State:
        """Returns a packed state with size.rows free rows in each part."""
        return self._empty((), np.zeros(self.parts), layout=layout, size=size)

    def move(self, layout: StateLayout, state: State, rows: np.ndarray, size: Size) -> State:
        """Applies `move_rows` to each part; rows [parts, size.rows] are indices within the part."""
        lengths = {"source_length": size.source_length, "capacity": size.capacity}
        return self._move((), state, rows.ravel().astype(np.int32), layout=layout, **lengths)

    def search(
        self,
        params: tuple[Any, ...],
        layout: StateLayout,
        state: State,
        lines: State,
        *,
        counts: Sequence[int],
        final_free_rows: int | Sequence[int],
        refill: int,
        n_best: int,
        max_steps: int = UNLIMITED,
    ) -> QueueResult:
        """Applies `search_queue` to each part; `counts` are the lines of each part. The state is donated."""
        scalars = [
            np.broadcast_to(np.asarray(value, np.int32), self.parts)
            for value in (counts, final_free_rows, max_steps)
        ]
        return self._search(params, state, lines, *scalars, layout=layout, n_best=n_best, refill=refill)

    # ---- traced functions of one part ----

    def search_small_input(
        self,
        params: tuple[Any, ...],
        ids: Array,
        mask: Array,
        lines: Lines,
        *,
        size: Size,
        refill: int,
        n_best: int,
    ) -> dict[str, Array]:
        """Searches sources [M, S] without prefixes in one program; returns the fields of their results.

        Fewer rows than sources are refilled as in a queue; rows of padding come last, with a limit of 0.
        """
        sources = Sources(ids, mask, lines)
        task, members = self._make_task(params, size.capacity, n_best)
        if size.rows == len(ids):
            cache = members.encode(sources, task.width, size.capacity)
            found = task.finish(task.run(task.start(cache, members.add_source_mask(sources))))
        else:
            blank = jax.tree.map(lambda leaf: np.zeros((1, *leaf.shape[1:]), leaf.dtype), lines)
            layout = self.find_layout(params, sources._replace(lines=blank), n_best=n_best)
            waiting = self._read_rows(params, ids, mask, lines, n_best=n_best)
            if self._shares_first_step:
                waiting = self._begin_rows(params, waiting, n_best=n_best)
            counts = jnp.sum(lines.max_lengths > 0), jnp.asarray(size.rows)
            state = empty_rows(layout, size)
            found = search_queue(task, layout, state, waiting, *counts, refill=refill).results
            found = jax.tree.map(lambda leaf: leaf[: len(ids)], found)
        return {name: leaf for name, leaf in found._asdict().items() if leaf is not None}

    def _read_rows(
        self, params: tuple[Any, ...], ids: Array, mask: Array, lines: Lines, *, n_best: int
    ) -> State:
        task, members = self._make_task(params, 1, n_best)
        given = Sources(ids, mask, lines)
        sources = members.add_source_mask(given)
        if lines.prefixes is None:
            cache = members.encode(given, 1 if self._shares_first_step else task.width, 1)
            return begin_lines(task, cache, sources)
        capacity = lines.prefixes.shape[1] + 1
        symbols = {"bos_id": self._symbols.bos_id, "pad_id": self._symbols.pad_id}
        _, tokens, starts = align_prefixes(lines.prefixes, **symbols)
        cache = members.encode(given, 1, capacity)._replace(start_steps=starts)
        logits, cache = members.read_prefix(tokens, cache)
        attention = members.attention(cache) if members.covers else None
        task, _ = self._make_task(params, capacity, n_best)
        return begin_prefixed_lines(task, members.keep_last_attention(cache), sources, logits, attention)

    def _begin_rows(self, params: tuple[Any, ...], state: State, *, n_best: int) -> State:
        return take_first_step(self._make_task(params, state.tokens.shape[2], n_best)[0], state)

    def _search_rows(
        self,
        params: tuple[Any, ...],
        state: State,
        lines: State,
        counts: Array,
        final_free_rows: Array,
        max_steps: Array,
        *,
        layout: StateLayout,
        n_best: int,
        refill: int,
    ) -> QueueResult:
        task, _ = self._make_task(params, state.tokens.shape[2], n_best)
        limits = counts[0], final_free_rows[0]
        return search_queue(task, layout, state, lines, *limits, refill=refill, max_steps=max_steps[0])

    def _make_task(self, params: tuple[Any, ...], capacity: int, n_best: int) -> tuple[Search, Members]:
        shortlists = self._shortlists
        common = None if shortlists is None else shortlists.common
        members = Members(self._models, params, self._configs, self._options, common=common)
        symbols, options = self._symbols, self._options
        steps = members.next_logits, members.attention
        return Search(steps[0], options, symbols, capacity, n_best, steps[1], shortlists), members


# The functions below use no parameters, but `compile_by_rows` passes parameters as the first argument: ().


def _move_rows(params: Any, state: State, rows: Array, **sizes: Any) -> State:
    return move_rows(sizes.pop("layout"), state, rows, **sizes)


def _widen_rows(params: Any, block: State, **sizes: Any) -> State:
    return widen_rows(sizes.pop("layout"), block, **sizes)


def _append_rows(params: Any, state: State, block: State, first: Array, *, layout: StateLayout) -> State:
    return append_rows(layout, state, block, first[0])


def _empty_rows(params: Any, dummy_rows: Array, *, layout: StateLayout, size: Size) -> State:
    return empty_rows(layout, size)
