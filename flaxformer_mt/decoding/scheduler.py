"""A flow of sentences through the programs of a search: who waits, who is searched, in states of which size.

Row 12 of the data path. Owns the order and the bookkeeping on the host. Knows nothing of text, of files, or
of how a network or a search works.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxformer_mt.decoding.compiled_programs import SearchPrograms, Sources
from flaxformer_mt.decoding.sizes import SHORTEST, SizeRule, choose_size, deal, round_down, round_up
from flaxformer_mt.search import NO_LINE, QueueResult, SearchResult, Size, State

# A queue is so many times what is searched at a time. The shorter, the more often the host has to look after
# it; the longer, the more memory what waits takes, and the later its results are there.
_FILLS = 2

# A part of the rows that are searched at a time, as many as are filled again together: filling takes time,
# and so do rows that are free.
_REFILL_SHARE = 24


class _Queue(NamedTuple):
    """What a program searched, a list for each part: sentences by their index."""

    lines: list[list[int]]
    # How many lines the program takes.
    num_lines: int
    # Sentences that were searched before, by their rows.
    before: list[dict[int, int]]
    # Those that still are.
    after: list[dict[int, int]]
    results: SearchResult


class Flow:
    """One search of many sentences, from the longest source to the shortest.

    Sentences begin as rows become free, and each program goes on with what the one before it left, so that
    rows run empty only once, at the end. Shorter sentences are searched in smaller states with more rows, as
    soon as the longer ones are done.
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
        """Nothing is searched yet.

        Args:
          sources: a row a sentence, and one more that is none.
          lengths: of the sources.
          needed: of each sentence, the tokens that its translation has at least.
          sizes: the sizes of states for such lengths.
          block_tokens: how many tokens of sources a device reads at a time.
        """
        self._programs = programs
        self._params = params
        self._sources = sources
        self._lengths = lengths
        self._needed = needed
        self._sizes = sizes
        self._block_tokens = block_tokens
        self._n_best = n_best
        self._waiting = deque(sorted(range(len(lengths)), key=lambda index: -lengths[index]))
        self._layout = programs.find_layout(params, sources, n_best=n_best)
        self._state: State | None = None
        self._size: Size | None = None
        self._busy: list[dict[int, int]] = [{} for _ in range(programs.parts)]
        self._oldest = 0  # how many tokens the longest prefix has
        self._halved = False

    def run(self) -> Iterator[tuple[int, SearchResult]]:
        """Each sentence's index and its hypotheses [N, ...], as they are found."""
        read: Iterator[tuple[int, SearchResult]] = iter(())
        while self._waiting or any(self._busy):
            size = self._choose_size()
            lines, searched, num_lines = self._search(size)
            # The device works on this queue while the host reads the one before.
            yield from read
            read = _read(self._settle(lines, searched, num_lines))
        yield from read

    def _choose_size(self) -> Size:
        """How large the next program's state is."""
        parts, busy = self._programs.parts, max(map(len, self._busy))
        searched = [index for rows in self._busy for index in rows.values()]
        if not self._waiting:
            assert self._size is not None
            size = choose_size(self._size, self._size, busy=busy, waiting=0)
            self._halved |= size.rows < self._size.rows
            return size
        rows = self._size_for([*searched, self._waiting[0]]).rows
        following = min(len(self._waiting), _FILLS * rows * parts)
        own = self._size_for([*searched, *(self._waiting[place] for place in range(following))])
        if self._size is not None and own.room <= self._oldest:
            own = self._size  # what has grown so long has to be finished where it is
        return choose_size(own, self._size, busy=busy, waiting=-(-len(self._waiting) // parts))

    def _size_for(self, indices: Sequence[int]) -> Size:
        """The size of a state in which these sentences are searched together."""
        if self._sizes.full:
            indices = range(len(self._lengths))
        longest = max(self._lengths[index] for index in indices)
        return self._sizes.size(longest, max(self._needed[index] for index in indices))

    def _search(self, size: Size) -> tuple[list[list[int]], QueueResult, int]:
        """Starts the next program; gives each part's lines, what there will be, and how many it takes."""
        programs, parts = self._programs, self._programs.parts
        at_once = self._size is None and len(self._waiting) <= size.rows * parts
        num_lines = size.rows if at_once else _FILLS * size.rows
        chosen = [self._waiting.popleft() for _ in range(min(len(self._waiting), num_lines * parts))]
        lines = [[chosen[place] for place in places] for places in deal(len(chosen), parts)]
        state = self._make_room(size)
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
        refill = size.rows if at_once else max(1, size.rows // _REFILL_SHARE)
        final_free_rows = refill
        if not self._waiting:
            # Lines that are searched all at once are few: to compile a program for half of them does not pay.
            final_free_rows = size.rows if at_once or self._halved else size.rows - size.rows // 2
        searched = programs.search(
            self._params,
            self._layout,
            state,
            waiting,
            counts=[len(some) for some in lines],
            final_free_rows=final_free_rows,
            refill=refill,
            n_best=self._n_best,
        )
        self._state, self._size = searched.state, size
        return lines, searched, num_lines

    def _make_room(self, size: Size) -> State:
        """Takes the state, and gives it its next size, the sentences in it in its first rows."""
        state, self._state = self._state, None  # what is moved is not kept
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
        """The lines of all parts, some of each at a time, as long as the longest of those.

        Blocks of one length have as many rows, so that few programs are compiled; what is missing to the last
        one is read again.
        """

        def fit(first: int) -> tuple[int, int]:
            length = max(self._lengths[some[first]] for some in lines if len(some) > first)
            length = min(round_up(max(length, SHORTEST)), size.source_length)
            return length, min(round_down(max(1, self._block_tokens // length)), num_lines)

        first, most = 0, max(map(len, lines))
        while first < most:
            length, rows = fit(first)
            if first + rows > num_lines:
                length, rows = fit(num_lines - rows)
                first = min(first, num_lines - rows)
            yield first, self._gather([some[first : first + rows] for some in lines], rows, length)
            first += rows

    def _gather(self, lines: list[list[int]], num_lines: int, length: int) -> Sources:
        """The sources of all parts' lines, one part after the other, each filled up with what is no line."""
        nobody = len(self._lengths)
        rows = np.full((len(lines), num_lines), nobody)
        for part, some in enumerate(lines):
            rows[part, : len(some)] = some
        gathered = jax.tree.map(lambda leaf: np.asarray(leaf)[rows.ravel()], self._sources)
        missing = [(0, 0), (0, max(0, length - gathered.ids.shape[1]))]
        padding = self._sources.ids[nobody, 0]
        ids = np.pad(gathered.ids[:, :length], missing, constant_values=padding)
        return gathered._replace(ids=ids, mask=np.pad(gathered.mask[:, :length], missing))

    def _settle(self, lines: list[list[int]], searched: QueueResult, num_lines: int) -> _Queue:
        """Waits for the program, and notes who is still searched where."""
        parts = self._programs.parts
        owners = np.asarray(searched.owners).reshape(parts, -1)
        before, after = self._busy, []
        for part in range(parts):
            own = {}
            for row in np.flatnonzero(owners[part] != NO_LINE).tolist():
                owner = int(owners[part, row])
                own[row] = lines[part][owner] if owner < num_lines else before[part][owner - num_lines]
            after.append(own)
        ages = np.asarray(searched.ages)[owners.ravel() != NO_LINE]
        self._busy, self._oldest = after, int(ages.max(initial=0))
        return _Queue(lines, num_lines, before, after, searched.results)


def _read(queue: _Queue) -> Iterator[tuple[int, SearchResult]]:
    """The results of the sentences that are done."""
    host = jax.tree.map(np.asarray, queue.results)
    most = len(host.lengths) // len(queue.lines)
    for part, lines in enumerate(queue.lines):
        still = set(queue.after[part].values())
        places = [*enumerate(lines)]
        places += [(queue.num_lines + row, index) for row, index in queue.before[part].items()]
        for place, index in places:
            if index not in still:
                yield index, jax.tree.map(lambda leaf, at=part * most + place: leaf[at], host)
