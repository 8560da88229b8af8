"""The compiled programs of a search with networks: sentences are read, searched in rows, and moved on.

Row 12 of the data path. Owns how models and search meet. Knows nothing of what is searched when, of text or
of files.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.config import ModelConfig, SearchConfig
from flaxformer_mt.model import make_model
from flaxformer_mt.model.scanned_layers import unstack_layers
from flaxformer_mt.parallel import compile_by_rows, default_platform, local_device_count
from flaxformer_mt.search import (
    Layout,
    Lines,
    NextLogits,
    Search,
    Searched,
    Size,
    State,
    Symbols,
    append_rows,
    begin_lines,
    empty_rows,
    ensemble,
    ensemble_caches,
    find_layout,
    move_rows,
    search_queue,
    shares_first_step,
    take_first_step,
    widen_rows,
)
from flaxformer_mt.shapes import Array, Cache


class Sources(NamedTuple):
    """What is translated, a row a sentence, and what is asked of it."""

    ids: Array  # [M, S]
    mask: Array  # [M, S]
    lines: Lines


class SearchPrograms:
    """One model's search, or that of several of one vocabulary, in programs over rows of sentences.

    All take and give arrays that begin with the axis of rows, of which each local device has a part where
    there are several. A program is compiled once for each size.
    """

    def __init__(
        self,
        configs: Sequence[ModelConfig],
        options: SearchConfig,
        symbols: Symbols,
        *,
        sizes: tuple[int, int],
        spread: bool,
    ) -> None:
        """Makes the networks.

        Args:
          configs: one, or the members of an ensemble.
          sizes: of the source and the target vocabulary.
          spread: every local device searches a part of the rows; parameters come from `place_locally`.
        """
        self._options = options
        self._symbols = symbols
        self.parts = local_device_count() if spread else 1
        self._configs = configs
        self._models = [make_model(c, source_size=sizes[0], target_size=sizes[1], platform=default_platform()) for c in configs]
        self._layouts: dict[Any, Layout] = {}
        self._shares_first_step = shares_first_step(options)
        self.compile()

    def compile(self, **options: Any) -> None:
        """Compiles anew when next called, with options of `jax.jit`, as compiler_options={...}."""

        def make(function: Callable[..., Any], *static: str, donate: tuple[int, ...] = ()) -> Any:
            if self.parts > 1:
                return compile_by_rows(function, static_argnames=static, donate=donate, **options)
            return jax.jit(function, static_argnames=static, donate_argnums=donate, **options)

        self._read = make(self._read_rows, "n_best")
        self._widen = make(_widen_rows, "layout", "rows", "source_length")
        self._append = make(_append_rows, "layout", donate=(1,))
        self._begin = make(self._begin_rows, "n_best", donate=(1,))
        self._search = make(self._search_rows, "layout", "n_best", "refill", donate=(1,))
        self._move = make(_move_rows, "layout", "source_length", "room")
        self._empty = make(_empty_rows, "layout", "size")

    def find_layout(self, params: tuple[Any, ...], sources: Sources, *, n_best: int) -> Layout:
        """The layout of the states of sources, whose lines have all arrays as they will have them."""
        one = jax.tree.map(lambda leaf: np.asarray(leaf)[:1], sources.lines)
        key = n_best, jax.tree.structure(one), tuple(leaf.shape for leaf in jax.tree.leaves(one))
        if key not in self._layouts:

            def start(source_length: int, room: int) -> State:
                mask = jnp.ones((1, source_length), bool)
                some = Sources(jnp.zeros(mask.shape, jnp.int32), mask, one)
                task, members = self._make_task(params, room, n_best)
                cache = members.encode(some.ids, mask, task.width, room)
                cache = cache._replace(begun=jnp.zeros(1, jnp.int32))
                return task.start(cache, members.complete(some), clip=False)

            self._layouts[key] = find_layout(start, pad_id=self._symbols.pad_id)
        return self._layouts[key]

    def begin(
        self,
        params: tuple[Any, ...],
        layout: Layout,
        blocks: Iterable[tuple[int, Sources]],
        *,
        rows: int,
        source_length: int,
        n_best: int,
    ) -> State:
        """The packed state of sources before they are searched, a part's in the first of its rows.

        Args:
          blocks: of each the first row, of those of a part, and the sources, as long as the longest of them.
          rows: of each part.
        """
        waiting: Any = None
        for first, block in blocks:
            own = self._read(params, *block, n_best=n_best)
            if block.ids.shape == (rows * self.parts, source_length):
                waiting = own
            elif waiting is None:
                waiting = self._widen((), own, layout=layout, rows=rows, source_length=source_length)
            else:
                waiting = self._append((), waiting, own, np.full(self.parts, first, np.int32), layout=layout)
        return self._begin(params, waiting, n_best=n_best) if self._shares_first_step else waiting

    def empty(self, layout: Layout, size: Size) -> State:
        """A packed state of size.rows free rows a part."""
        return self._empty((), np.zeros(self.parts), layout=layout, size=size)

    def move(self, layout: Layout, state: State, rows: np.ndarray, size: Size) -> State:
        """`move_rows` of each part; rows [parts, size.rows] count those of the part alone."""
        lengths = {"source_length": size.source_length, "room": size.room}
        return self._move((), state, rows.ravel().astype(np.int32), layout=layout, **lengths)

    def search(
        self,
        params: tuple[Any, ...],
        layout: Layout,
        state: State,
        lines: State,
        *,
        counts: Sequence[int],
        leave: int,
        refill: int,
        n_best: int,
    ) -> Searched:
        """`search_queue` of each part; the state is used up. counts: of lines, for each part."""
        numbers = np.asarray(counts, np.int32), np.full(self.parts, leave, np.int32)
        return self._search(params, state, lines, *numbers, layout=layout, n_best=n_best, refill=refill)

    # ---- traced, of one part ----

    def _read_rows(
        self, params: tuple[Any, ...], ids: Array, mask: Array, lines: Lines, *, n_best: int
    ) -> State:
        task, members = self._make_task(params, 1, n_best)
        cache = members.encode(ids, mask, 1 if self._shares_first_step else task.width, 1)
        return begin_lines(task, cache, members.complete(Sources(ids, mask, lines)))

    def _begin_rows(self, params: tuple[Any, ...], state: State, *, n_best: int) -> State:
        return take_first_step(self._make_task(params, 1, n_best)[0], state)

    def _search_rows(
        self,
        params: tuple[Any, ...],
        state: State,
        lines: State,
        counts: Array,
        leave: Array,
        *,
        layout: Layout,
        n_best: int,
        refill: int,
    ) -> Searched:
        task, _ = self._make_task(params, state.tokens.shape[2], n_best)
        return search_queue(task, layout, state, lines, counts[0], leave[0], refill=refill)

    def _make_task(self, params: tuple[Any, ...], room: int, n_best: int) -> tuple[Search, "_Members"]:
        members = _Members(self._models, params, self._configs, self._options)
        symbols, options = self._symbols, self._options
        return Search(members.next_logits, options, symbols, room, n_best, members.attention), members


class _Members:
    """Networks with their parameters, while a program is traced."""

    def __init__(
        self,
        models: Sequence[Any],
        params: tuple[Any, ...],
        configs: Sequence[ModelConfig],
        options: SearchConfig,
    ) -> None:
        self._models = models
        self._variables = [{"params": unstack_layers(own)} for own in params]
        self._covers = options.method == "beam" and options.coverage_penalty > 0
        several = len(models) > 1
        parts = [
            _watch_attention(model, own, options.coverage_layer % config.num_decoder_layers)
            if self._covers
            else _next_logits(model, own)
            for model, own, config in zip(models, self._variables, configs, strict=True)
        ]
        self.next_logits: NextLogits = ensemble(parts, mean=options.ensemble_mean) if several else parts[0]
        self.attention = _mean_attention if several else _attention

    def encode(self, ids: Array, mask: Array, beams: int, room: int) -> Cache:
        """The cache before the first token, with that many beams and room for so many tokens."""
        caches = []
        for model, own in zip(self._models, self._variables, strict=True):
            cache = model.apply(own, ids, mask, beams, room, method="start_decoding")
            if self._covers:
                nothing = jnp.zeros((ids.shape[0], beams, ids.shape[1]), jnp.float32)
                cache = cache._replace(per_beam={"model": cache.per_beam, "attention": nothing})
            caches.append(cache)
        return ensemble_caches(caches) if len(caches) > 1 else caches[0]

    def complete(self, sources: Sources) -> Lines:
        """What is known of the sources' lines, with what a coverage penalty needs."""
        return sources.lines._replace(source_mask=sources.mask) if self._covers else sources.lines


def _move_rows(nothing: Any, state: State, rows: Array, **sizes: Any) -> State:
    return move_rows(sizes.pop("layout"), state, rows, **sizes)


def _widen_rows(nothing: Any, block: State, **sizes: Any) -> State:
    return widen_rows(sizes.pop("layout"), block, **sizes)


def _append_rows(nothing: Any, state: State, block: State, first: Array, *, layout: Layout) -> State:
    return append_rows(layout, state, block, first[0])


def _empty_rows(nothing: Any, anything: Array, *, layout: Layout, size: Size) -> State:
    return empty_rows(layout, size)


def _next_logits(model: Any, variables: Any) -> NextLogits:
    def next_logits(tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        return model.apply(variables, tokens, cache, method="decode_step")

    return next_logits


def _watch_attention(model: Any, variables: Any, layer: int) -> NextLogits:
    """The same, keeping the weights [B, W, S] of a layer's cross-attention, mean over heads, in the cache."""

    def next_logits(tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        inner = cache._replace(per_beam=cache.per_beam["model"])
        (logits, after), kept = model.apply(
            variables, tokens, inner, method="decode_step", mutable=["intermediates"]
        )
        block = kept["intermediates"]["decoder"][f"layers_{layer}"]
        (weights,) = block["cross_attention"]["attention_weights"]  # [B, H, W, S]
        per_beam = {"model": after.per_beam, "attention": weights.mean(axis=1)}
        return logits, after._replace(per_beam=per_beam)

    return next_logits


def _attention(cache: Cache) -> Array:
    return cache.per_beam["attention"]


def _mean_attention(cache: Cache) -> Array:
    return jnp.stack([member["attention"] for member in cache.per_beam]).mean(axis=0)
