"""Small inputs, such as a single sentence: one program of few sizes does the whole search.

Row 12 of the data path. These programs are kept on disk, so that a second process traces and compiles
nothing. scheduler.py searches all other inputs: longer ones, and those with prefixes or required phrases.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from flaxformer_mt.decoding.compiled_programs import SearchPrograms
from flaxformer_mt.decoding.ensemble_members import Sources
from flaxformer_mt.decoding.scheduler import fit_sources, rows_to_refill
from flaxformer_mt.decoding.sizes import SmallSize, deal
from flaxformer_mt.parallel import compile_by_rows
from flaxformer_mt.parallel.kept_programs import compile_kept
from flaxformer_mt.search import SearchResult

Program = Callable[..., dict[str, Any]]


class SmallInputs:
    """Searches the sentences of one program call, and compiles its program at the first call of a size."""

    def __init__(self, programs: SearchPrograms) -> None:
        self._programs = programs
        self._compiled: dict[Any, Program] = {}

    def search(
        self, params: tuple[Any, ...], sources: Sources, size: SmallSize, *, n_best: int
    ) -> Iterator[tuple[int, SearchResult]]:
        """Yields each sentence's number and hypotheses [N, ...], which may be over the capacity.

        Args:
          sources: one row per sentence, the longest first, and a last row for padding.
        """
        parts, num_sentences = self._programs.parts, len(sources.ids) - 1
        shares = deal(num_sentences, parts)
        rows = np.full((parts, size.lines), num_sentences)
        for part, indices in enumerate(shares):
            rows[part, : len(indices)] = indices
        gathered = jax.tree.map(lambda leaf: np.asarray(leaf)[rows.ravel()], sources)
        pad_id = int(sources.ids[num_sentences, 0])
        padded = fit_sources(gathered, size.size.source_length, pad_id=pad_id)
        arguments = (params, *padded)
        results = SearchResult(**jax.device_get(self._find(arguments, size, n_best)(*arguments)))
        for part, indices in enumerate(shares):
            for row, index in enumerate(indices):
                yield index, jax.tree.map(lambda leaf, at=part * size.lines + row: leaf[at], results)

    def _find(self, arguments: tuple[Any, ...], size: SmallSize, n_best: int) -> Program:
        params, _, _, lines = arguments
        leaves = jax.tree.leaves(params)
        places = {getattr(leaf, "sharding", None) for leaf in leaves}
        key = (
            *(size, n_best, jax.tree.structure(lines)),
            *(tuple((leaf.shape, leaf.dtype) for leaf in leaves), frozenset(places)),
        )
        if key not in self._compiled:
            self._compiled[key] = self._compile(arguments, size, n_best, places)
        return self._compiled[key]

    def _compile(self, arguments: tuple[Any, ...], size: SmallSize, n_best: int, places: set[Any]) -> Program:
        programs = self._programs
        refill = rows_to_refill(size.size.rows, at_once=size.lines == size.size.rows)
        static: dict[str, Any] = {"size": size.size, "refill": refill, "n_best": n_best}
        function = functools.partial(programs.search_small_input, **static)
        options = programs.compile_options
        program = compile_by_rows(function, **options) if programs.parts > 1 else jax.jit(function, **options)
        devices = jax.local_devices()[: programs.parts]
        owned = all(place is not None and place.device_set == set(devices) for place in places)
        if not owned or options:  # parameters that the caller has placed elsewhere
            return program
        return compile_kept(program, arguments, [programs.facts, size, n_best], devices)
