"""The scheduler of continuous batching: the order of sentences, their rows, and the sizes of search states.

Row 12 of the data path. Contains the bookkeeping on the host. search/continuous_batching.py assigns lines to
rows on the device, compiled_programs.py contains the programs, and sizes.py the rules for sizes.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxformer_mt.decoding.compiled_programs import SearchPrograms
from flaxformer_mt.decoding.ensemble_members import Sources
from flaxformer_mt.decoding.sizes import (
    CANDIDATES_PER_TOKEN,
    SHORTEST,
    SizeRule,
    choose_size,
    deal,
    round_down,
    round_up,
)
from flaxformer_mt.search import NO_LINE, QueueResult, SearchResult, Size, State
from flaxformer_mt.shapes import Array

# Length of a queue as a multiple of the rows. A shorter queue needs the host more often; a longer queue takes
# more memory for waiting lines, and its results arrive later.
_FILLS = 2

# The number of rows divided by the number of free rows that are refilled together: each refill takes time,
# and so do steps with free rows.
_REFILL_SHARE = 24


def rows_to_refill(rows: int, *, at_once: bool) -> int:
    """Returns how many free rows a queue refills together; all of them, if all its lines start at once."""
    return rows if at_once else max(1, rows // _REFILL_SHARE)


class _Queue(NamedTuple):
    """The sentences of one program call, and its results; lists have one entry per part."""

    # Indices of the sentences in the queue.
    lines: list[list[int]]
    # Number of lines in the queue that the program is compiled for.
    num_lines: int
    # Row -> index of the sentence that was active there before the call.
    before: list[dict[int, int]]
    # Row -> index of the sentence that is active there after the call.
    after: list[dict[int, int]]
    results: SearchResult


class Scheduler:
    """Schedules the search of many sentences, from those that need most capacity to those that need least.

    A sentence starts when a row becomes free, and each program call continues with the sentences that are
    still active after the previous call, so that rows run empty only once, at the end. When the longer
    sentences are done, shorter sentences are searched in smaller states with more rows.
    """

    def __init__(
        self,
        programs: SearchPrograms,
        params: tuple[Any, ...],
        sources: Sources,
        *,
        lengths: Sequence[int],
        needed: Sequence[int],
        sizes: SizeRule,
        block_tokens: int,
        n_best: int,
    ) -> None:
        """Sorts the sentences; `run` searches them.

        Args:
          sources: one row per sentence, and a last row for padding.
          lengths: lengths of the sources.
          needed: minimum number of tokens of each sentence's translation.
          sizes: the rule for the sizes of states.
          block_tokens: number of tokens of sources and prefixes that a device reads at a time.
        """
        self._programs = programs
        self._params = params
        self._sources = sources
        self._lengths = lengths
        self._needed = needed
        self._sizes = sizes
        self._block_tokens = block_tokens
        prefixes = sources.lines.prefixes  # read together with the sources
        self._prefix_tokens = 0 if prefixes is None else prefixes.shape[1]
        self._n_best = n_best
        self._waiting = deque(sorted(range(len(lengths)), key=self._need, reverse=True))
        self._layout = programs.find_layout(params, sources, n_best=n_best)
        self._state: State | None = None
        self._size: Size | None = None
        self._busy: list[dict[int, int]] = [{} for _ in range(programs.parts)]
        self._longest_prefix = 0  # number of tokens of the longest active hypothesis
        self._halved = False

    def run(self) -> Iterator[tuple[int, SearchResult]]:
        """Yields each sentence's index and its hypotheses [N, ...] as they are found."""
        results: Iterator[tuple[int, SearchResult]] = iter(())
        while self._waiting or any(self._busy):
            size = self._choose_size()
            lines, result, num_lines = self._search(size)
            # The device computes this queue while the host processes the results of the previous one.
            yield from results
            results = _unpack_results(self._update_rows(lines, result, num_lines))
        yield from results

    def _need(self, index: int) -> tuple[int, int]:
        """Returns the capacity that a sentence needs, and its length: the order of the sentences.

        A capacity grows with the length, so without constraints this is the order of lengths.
        """
        sizes, length = self._sizes, self._lengths[index]
        return sizes.lengths.capacity(length, self._needed[index], full=sizes.full), length

    def _choose_size(self) -> Size:
        """Returns the size of the state for the next program call."""
        parts, busy = self._programs.parts, max(map(len, self._busy))
        active = [index for rows in self._busy for index in rows.values()]
        if not self._waiting:
            assert self._size is not None
            size = choose_size(self._size, self._size, busy=busy, waiting=0)
            self._halved |= size.rows < self._size.rows
            return size
        rows = self._size_for([*active, self._waiting[0]]).rows
        num_next = min(len(self._waiting), _FILLS * rows * parts)
        preferred = self._size_for([*active, *(self._waiting[number] for number in range(num_next))])
        if self._size is not None and preferred.capacity <= self._longest_prefix:
            preferred = self._size  # the active hypotheses are too long to move to a smaller capacity
        return choose_size(preferred, self._size, busy=busy, waiting=-(-len(self._waiting) // parts))

    def _size_for(self, indices: Sequence[int]) -> Size:
        """Returns the size of a state in which these sentences are searched together."""
        if self._sizes.full:
            indices = range(len(self._lengths))
        longest = max(self._lengths[index] for index in indices)
        return self._sizes.size(longest, max(self._needed[index] for index in indices))

    def _search(self, size: Size) -> tuple[list[list[int]], QueueResult, int]:
        """Starts the next program call.

        Returns the queue of each part, the (asynchronous) result, and the number of lines of the program.
        """
        programs, parts = self._programs, self._programs.parts
        at_once = self._size is None and len(self._waiting) <= size.rows * parts
        num_lines = size.rows if at_once else _FILLS * size.rows
        chosen = [self._waiting.popleft() for _ in range(min(len(self._waiting), num_lines * parts))]
        lines = [[chosen[number] for number in numbers] for numbers in deal(len(chosen), parts)]
        state = self._resize_state(size)
        if chosen:
            waiting = programs.begin(
                self._params,
                self._layout,
                self._blocks(lines, num_lines, size),
                rows=num_lines,
                source_length=size.source_length,
                n_best=self._n_best,
            )
        else:
            num_lines = 1
            waiting = programs.empty(self._layout, Size(num_lines, size.source_length, 1))
        refill = rows_to_refill(size.rows, at_once=at_once)
        final_free_rows = refill
        if not self._waiting:
            # If all lines start at once, there are few, and a program for half the rows is not worth
            # compiling.
            final_free_rows = size.rows if at_once or self._halved else size.rows - size.rows // 2
        result = programs.search(
            self._params,
            self._layout,
            state,
            waiting,
            counts=[len(part_lines) for part_lines in lines],
            final_free_rows=final_free_rows,
            refill=refill,
            n_best=self._n_best,
        )
        self._state, self._size = result.state, size
        return lines, result, num_lines

    def _resize_state(self, size: Size) -> State:
        """Returns the state in a new size, with its active sentences in the first rows."""
        state, self._state = self._state, None  # keeps no reference to the old state
        if state is None:
            return self._programs.empty(self._layout, size)
        if size == self._size:
            return state
        rows = np.full((self._programs.parts, size.rows), -1)
        for part, busy in enumerate(self._busy):
            rows[part, : len(busy)] = list(busy)
        self._busy = [dict(enumerate(busy.values())) for busy in self._busy]
        return self._programs.move(self._layout, state, rows, size)

    def _blocks(self, lines: list[list[int]], num_lines: int, size: Size) -> Iterator[tuple[int, Sources]]:
        """Yields blocks of the lines of all parts: the first row of each block, and its sources.

        All blocks of one length have the same number of rows, so that few programs are compiled. The last
        block therefore repeats rows of the block before if fewer rows remain.
        """

        def fit(first: int) -> tuple[int, int]:
            length = max(self._lengths[index] for indices in lines for index in indices[first:])
            length = min(round_up(max(length, SHORTEST)), size.source_length)
            return length, min(
                round_down(max(1, self._block_tokens // (length + self._prefix_tokens))), num_lines
            )

        first, end = 0, max(map(len, lines))
        while first < end:
            length, rows = fit(first)
            if first + rows > num_lines:
                length, rows = fit(num_lines - rows)
                first = min(first, num_lines - rows)
            chosen = [indices[first : first + rows] for indices in lines]
            yield first, gather_sources(self._sources, chosen, rows=rows, length=length)
            first += rows

    def _update_rows(self, lines: list[list[int]], result: QueueResult, num_lines: int) -> _Queue:
        """Waits for the program, and records which sentence is still active in which row."""
        parts = self._programs.parts
        owners = np.asarray(result.owners).reshape(parts, -1)
        before, after = self._busy, []
        for part in range(parts):
            active = {}
            for row in np.flatnonzero(owners[part] != NO_LINE).tolist():
                owner = int(owners[part, row])
                active[row] = lines[part][owner] if owner < num_lines else before[part][owner - num_lines]
            after.append(active)
        prefix_lengths = np.asarray(result.prefix_lengths)[owners.ravel() != NO_LINE]
        self._busy, self._longest_prefix = after, int(prefix_lengths.max(initial=0))
        return _Queue(lines, num_lines, before, after, result.results)


def gather_sources(sources: Sources, lines: Sequence[Sequence[int]], *, rows: int, length: int) -> Sources:
    """Returns the sources of all parts' lines, part after part; each part has `rows` rows of `length` tokens.

    Args:
      sources: one row per line, and a last row for padding.
      lines: indices of the lines of each part.
    """
    padding_row = len(sources.ids) - 1
    chosen = np.full((len(lines), rows), padding_row)
    for part, indices in enumerate(lines):
        chosen[part, : len(indices)] = indices
    gathered = jax.tree.map(lambda leaf: np.asarray(leaf)[chosen.ravel()], sources)
    return fit_sources(gathered, length, pad_id=int(sources.ids[padding_row, 0]))


def fit_sources(sources: Sources, length: int, *, pad_id: int) -> Sources:
    """Returns sources with `length` positions, and with as many candidates of shortlists as they may have."""

    def fit(leaf: Array, size: int, blank: int = 0) -> np.ndarray:
        missing = [(0, 0), (0, max(0, size - leaf.shape[1]))]
        return np.pad(np.asarray(leaf)[:, :size], missing, constant_values=blank)

    lines = sources.lines
    if lines.shortlist is not None:
        lines = lines._replace(shortlist=fit(lines.shortlist, CANDIDATES_PER_TOKEN * length))
    return Sources(fit(sources.ids, length, pad_id), fit(sources.mask, length), lines)


def _unpack_results(queue: _Queue) -> Iterator[tuple[int, SearchResult]]:
    """Yields the index and the result of each sentence that is done."""
    results = jax.tree.map(np.asarray, queue.results)
    part_rows = len(results.lengths) // len(queue.lines)
    for part, lines in enumerate(queue.lines):
        active = set(queue.after[part].values())
        rows = [*enumerate(lines)]
        rows += [(queue.num_lines + row, index) for row, index in queue.before[part].items()]
        for row, index in rows:
            if index not in active:
                yield index, jax.tree.map(lambda leaf, at=part * part_rows + row: leaf[at], results)
