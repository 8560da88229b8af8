"""The slots of one search state: which sentence is in which slot, on the side of the host.

A slot is a row of the state; search/continuous_batching.py assigns rows to sentences on the device.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxformer_mt.decoding.compiled_programs import Leaves, StatePrograms
from flaxformer_mt.decoding.ensemble_members import Sources
from flaxformer_mt.decoding.sentences import Sentence
from flaxformer_mt.search import NO_LINE, UNLIMITED, SearchResult, Size

# A state that has made this many steps takes no sentence until it is empty: then steps count from 0.
_MAX_STEPS = 2**30


class _Call(NamedTuple):
    """A call of `generate`: names of the sentences that entered each part, and those in its slots before."""

    entered: list[list[Hashable]]
    before: list[dict[int, Hashable]]
    owners: Any
    results: SearchResult


class Slots:
    """Sentences in the slots of one state; `start` and `finish` take them some steps further."""

    def __init__(
        self,
        programs: StatePrograms,
        params: tuple[Any, ...],
        size: Size,
        lay_out: Callable[[Sequence[Sequence[Sentence]]], Sources],
        *,
        parts: int,
        lines: int,
    ) -> None:
        """Start without sentences.

        Args:
          lay_out: returns the arrays of up to `lines` sentences of each part, which are read together.
        """
        self._lines = lines
        self.waiting: dict[Hashable, Sentence] = {}
        self._programs, self._params, self._size, self._lay_out = programs, params, size, lay_out
        self._state: Leaves | None = None
        self._entered: Leaves | None = None  # the last sentences that were read
        self._busy: list[dict[int, Hashable]] = [{} for _ in range(parts)]  # slot -> name, of each part
        self._steps = 0

    def __len__(self) -> int:
        return len(self.waiting) + self.num_busy

    @property
    def num_busy(self) -> int:
        """The number of sentences in slots."""
        return sum(map(len, self._busy))

    @property
    def num_free(self) -> int:
        """The number of slots that waiting sentences leave free."""
        return self._size.rows * len(self._busy) - len(self)

    def run(self, *, leave: int = 0) -> Iterator[tuple[Hashable, SearchResult]]:
        """Search all sentences but the last; yield the name and the hypotheses [N, ...] of each when done.

        Args:
          leave: number of slots of a part whose sentences may be left in the end, when the others have none.
        """
        done: Iterator[tuple[Hashable, SearchResult]] = iter(())
        while self.waiting or self.num_busy and not leave:
            call = self.start(UNLIMITED, leave=leave)
            yield from done  # while the device computes
            done = self.finish(call)
        yield from done

    @property
    def left(self) -> list[Hashable]:
        """The names of the sentences in slots."""
        return [name for busy in self._busy for name in busy.values()]

    def start(self, max_steps: int, *, leave: int = 0) -> _Call:
        """Let waiting sentences enter, and begin at most `max_steps` steps; the device computes on.

        With a limit of steps, sentences enter only slots that are free now; without one, as slots become
        free.
        """
        if not self.num_busy and self._steps > _MAX_STEPS:
            self._state, self._steps = None, 0
        unlimited, rows = max_steps == UNLIMITED, self._size.rows
        used, most = ([0] * len(self._busy), self._lines) if unlimited else (list(map(len, self._busy)), rows)
        entered: list[dict[Hashable, Sentence]] = [{} for _ in self._busy]
        while self.waiting and min(used) < most and self._steps <= _MAX_STEPS:
            part = used.index(min(used))  # in turn: sentences next to each other take equally long
            name = next(iter(self.waiting))
            entered[part][name] = self.waiting.pop(name)
            used[part] += 1
        if any(entered):
            sources = self._lay_out([list(own.values()) for own in entered])
            self._entered = self._programs.prefill(self._params, sources)
        assert self._entered is not None, "a state that has no sentences is not searched"
        freed = max(1, rows // 16)
        if unlimited:
            final_free_rows = [freed if self.waiting else rows - leave] * len(used)
        else:  # those of a part that are used up come back soon
            final_free_rows = [min(rows, rows - count + freed) if count else 0 for count in used]
        found = self._programs.generate(
            self._params,
            self._programs.empty() if self._state is None else self._state,
            self._entered,
            counts=[len(own) for own in entered],
            final_free_rows=final_free_rows,
            max_steps=max_steps,
        )
        self._state = found.state
        self._steps += 0 if unlimited else max_steps
        return _Call([list(own) for own in entered], self._busy, found.owners, found.results)

    def finish(self, call: _Call) -> Iterator[tuple[Hashable, SearchResult]]:
        """Wait for the steps; return an iterator over the sentences that are done."""
        rows, parts = self._size.rows, len(call.entered)
        owners = np.asarray(call.owners).reshape(parts, rows)
        self._busy, done = [], []
        for part in range(parts):
            # Place in the results -> name: of sentences that entered, and of those in slots before.
            places = dict(enumerate(call.entered[part]))
            places |= {self._lines + row: name for row, name in call.before[part].items()}
            active = {
                row: places[owner] for row, owner in enumerate(owners[part].tolist()) if owner != NO_LINE
            }
            left = set(active.values())
            first = (self._lines + rows) * part
            done += [(first + place, name) for place, name in places.items() if name not in left]
            self._busy.append(active)
        return _read(call.results, done)


def _read(results: SearchResult, done: list[tuple[int, Hashable]]) -> Iterator[tuple[Hashable, SearchResult]]:
    if done:
        found = jax.tree.map(np.asarray, results)
        for place, name in done:
            yield name, jax.tree.map(lambda leaf, at=place: leaf[at].copy(), found)
