"""The search of sentences that arrive while others are searched, as a server needs it.

Contains the lanes of sentences whose states have one size, and the rows of a lane, which the host refills
after every few steps. scheduler.py does the same for sentences that are all known at the beginning.
"""

import collections
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxformer_mt.decoding.engine import SearchEngine, Sentence
from flaxformer_mt.decoding.scheduler import gather_sources
from flaxformer_mt.decoding.sizes import round_down_finely, round_up_finely
from flaxformer_mt.errors import UserError
from flaxformer_mt.search import (
    NO_LINE,
    QueueResult,
    SearchResult,
    Size,
    State,
    search_width,
)

# Maximum source lengths of the lanes; a last lane has the longest sources that the model was trained for.
_LENGTHS = (32, 128)

# Numbers of rows of all devices together: for one sentence, for a few, for many.
_ROWS = (1, 8, 64)

# Number of decoding steps after which waiting sentences may join.
_STEPS = 8

# A lane takes fewer rows after this many program calls for which fewer would have been enough.
_PATIENCE = 16

# A lane whose state has made this many steps takes no sentence until it is empty: then steps count from 0.
_MAX_STEPS = 2**30


# Stands for the sentences of a call without any.
_DUMMY = Sentence(np.zeros(1, np.int32))

# The name of a sentence, and its hypotheses [N, ...], or why there are none.
Found = tuple[Hashable, SearchResult | Exception]


class Key(NamedTuple):
    """What the sentences of a lane have in common."""

    n_best: int
    source_length: int
    # Tokens that a hypothesis may have: enough for all that the limits allow, so that no search is repeated.
    capacity: int


class LiveSearch:
    """Searches sentences that are submitted at any time; `advance` makes the next few decoding steps.

    A sentence joins the search of those that have begun before, and its result is the same as if it were
    searched alone. The methods must be called by one thread.
    """

    def __init__(self, engine: SearchEngine, params: tuple[Any, ...]) -> None:
        """Starts without sentences; `params` are those of each model of the engine."""
        self._engine = engine
        self._params = params
        self._lanes: dict[Key, _Lane] = {}
        self._turn: collections.deque[Key] = collections.deque()
        self._entries: dict[Hashable, tuple[Key, Sentence]] = {}

    @property
    def num_active(self) -> int:
        """Number of sentences in rows of the device; may be asked by any thread."""
        return sum(lane.num_busy for lane in list(self._lanes.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def submit(self, name: Hashable, sentence: Sentence, *, n_best: int) -> None:
        """Adds a sentence; `name` identifies it in the results."""
        assert name not in self._entries
        self._enter(name, sentence, self._find_lane(sentence, n_best))

    def cancel(self, name: Hashable) -> None:
        """Removes a sentence, if it is not done yet."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._lanes[entry[0]].drop(name)

    def advance(self) -> Iterator[Found]:
        """Makes a few decoding steps of one lane; yields the names and results of sentences that are done.

        Lanes with sentences take turns. If the device fails, the result of the lane's sentences is the error.
        """
        while self._turn:
            key = self._turn.popleft()
            if len(self._lanes[key]):
                self._turn.append(key)
                yield from self._advance(key)
                return

    def warm_up(self, n_best: Iterable[int]) -> None:
        """Compiles the programs for sentences of all lengths, in all numbers of rows.

        The small programs that move active sentences to fewer rows are compiled when they are first needed.
        """
        for number in n_best:
            for length in self.lengths():
                key = self._find_lane(Sentence(np.zeros(length, np.int32)), number)
                self._lane(key).warm_up(self._most_rows(key))

    def lengths(self) -> list[int]:
        """Returns the maximum source lengths of the lanes."""
        longest = self._engine.lengths.longest_source
        return [length for length in _LENGTHS if 2 * length <= longest] + [longest]

    def _find_lane(self, sentence: Sentence, n_best: int) -> Key:
        source_length = min(one for one in self.lengths() if one >= len(sentence.source))
        limit = self._engine.lengths.limit(source_length, sentence.shortest)
        longest = self._engine.longest_target or limit
        return Key(n_best, source_length, min(round_up_finely(limit), longest))

    def _enter(self, name: Hashable, sentence: Sentence, key: Key) -> None:
        lane = self._lane(key)
        if key not in self._turn:
            self._turn.append(key)
        self._entries[name] = key, sentence
        lane.waiting[name] = sentence

    def _lane(self, key: Key) -> "_Lane":
        if key not in self._lanes:
            self._lanes[key] = _Lane(self._engine, self._params, key)
        return self._lanes[key]

    def _most_rows(self, key: Key) -> int:
        """Returns the largest number of rows of a device that search.batch_tokens allow."""
        tokens = key.source_length + search_width(self._engine.options, key.n_best) * key.capacity
        return round_down_finely(max(1, self._engine.budget.tokens // tokens))

    def _advance(self, key: Key) -> Iterator[Found]:
        lane = self._lanes[key]
        try:
            found = list(lane.advance(self._most_rows(key)))
        except (jax.errors.JaxRuntimeError, UserError) as error:
            yield from self._recover(key, error)
            return
        for name, result in found:
            del self._entries[name]
            yield name, result

    def _recover(self, key: Key, error: Exception) -> Iterator[Found]:
        """After an error, when the state is lost: begins anew if memory was short, or gives the lane up."""
        lane = self._lanes[key]
        lane.reset()
        lane.waiting = {name: sentence for name, (own, sentence) in self._entries.items() if own == key}
        try:
            if isinstance(error, jax.errors.JaxRuntimeError) and self._engine.budget.halve_after(error):
                return
        except UserError as smallest:
            error = smallest
        for name in lane.waiting:
            del self._entries[name]
            yield name, error
        lane.waiting = {}


class _Lane:
    """Sentences of one length in the rows of one state."""

    def __init__(self, engine: SearchEngine, params: tuple[Any, ...], key: Key) -> None:
        self._engine, self._programs, self._params, self._key = engine, engine.programs, params, key
        self.waiting: dict[Hashable, Sentence] = {}
        self._layout: Any = None
        self._state: State | None = None
        self._size = Size(0, key.source_length, key.capacity)
        # Per device, row -> name of the sentence.
        self._busy: list[dict[int, Hashable]] = [{} for _ in range(self._programs.parts)]
        self._steps = 0
        self._calls_with_room = 0
        self._dropped = False
        self._nothing: dict[int, State] = {}

    def __len__(self) -> int:
        return len(self.waiting) + self.num_busy

    @property
    def num_busy(self) -> int:
        return sum(map(len, self._busy))

    def drop(self, name: Hashable) -> None:
        """Removes a sentence; its row becomes free before the next call."""
        self.waiting.pop(name, None)
        for rows in self._busy:
            for row in [row for row, other in rows.items() if other == name]:
                del rows[row]
                self._dropped = True

    def reset(self) -> None:
        """Forgets the state and the sentences in its rows."""
        self._busy = [{} for _ in self._busy]
        self._state = None
        self._size = self._size._replace(rows=0)
        self._steps, self._calls_with_room, self._dropped = 0, 0, False

    def advance(self, most: int) -> Iterator[tuple[Hashable, SearchResult]]:
        """Makes a few steps with at most `most` rows on a device; yields what is done then."""
        self._fit_rows(most)
        if not len(self):
            return
        lines = self._take_lines()
        new = self._begin(lines) if any(lines) else self._no_lines()
        num_lines = self._num_lines
        result = self._search(new, [len(part) for part in lines], self._rows_to_free(lines))
        self._steps += _STEPS
        names = [list(part) for part in lines]
        owners = np.asarray(result.owners).reshape(len(names), -1)
        finished = []
        for part, busy in enumerate(self._busy):
            after = {}
            for row in np.flatnonzero(owners[part] != NO_LINE).tolist():
                owner = int(owners[part, row])
                after[row] = names[part][owner] if owner < num_lines else busy[owner - num_lines]
            active, first = set(after.values()), part * (num_lines + self._size.rows)
            places = [*enumerate(names[part]), *((num_lines + row, name) for row, name in busy.items())]
            finished += [(first + place, name) for place, name in places if name not in active]
            self._busy[part] = after
        if not finished:
            return
        results = jax.tree.map(np.asarray, result.results)
        for place, name in finished:
            yield name, jax.tree.map(lambda leaf, at=place: leaf[at].copy(), results)

    def warm_up(self, most: int) -> None:
        """Compiles the programs for all numbers of rows up to `most` on a device."""
        assert not len(self), "the programs of a lane are compiled before it has sentences"
        ladder = self._ladder(most)
        for rows in ladder:
            self._size = size = self._size._replace(rows=rows)
            self._search(self._no_lines(), [0] * len(self._busy), [0] * len(self._busy))
            for more in ladder[ladder.index(rows) :]:  # as many: after a cancellation
                self._size, self._state = size, self._programs.empty(self._layout, size)
                self._move(more)
            self.reset()

    def _ladder(self, most: int) -> list[int]:
        """Returns the numbers of rows that a device may have."""
        return sorted({min(most, max(1, rows // len(self._busy))) for rows in _ROWS})

    @property
    def _num_lines(self) -> int:
        """Number of sentences that may join a device at a time: all or half of its rows."""
        return self._size.rows if self._size.rows <= 8 else self._size.rows // 2

    def _fit_rows(self, most: int) -> None:
        """Chooses the number of rows for the sentences at hand, and frees the rows of removed sentences."""
        if not self.num_busy:
            self.reset()
        waiting = 0 if self._steps > _MAX_STEPS else len(self.waiting)
        needed = max(*map(len, self._busy), -(-(self.num_busy + waiting) // len(self._busy)), 1)
        ladder = self._ladder(most)
        rows = next((rows for rows in ladder if rows >= needed), ladder[-1])
        rows = max(rows, max(map(len, self._busy)))  # never fewer than the active sentences
        self._calls_with_room = self._calls_with_room + 1 if rows < self._size.rows else 0
        if self._state is None or not len(self):
            self._size = self._size._replace(rows=rows)
        elif rows > self._size.rows or self._calls_with_room > _PATIENCE:
            self._move(rows)
        elif self._dropped:
            self._move(self._size.rows)
        self._dropped = False

    def _move(self, rows: int) -> None:
        """Moves the active sentences to the first rows of a state with this many rows on each device."""
        size = self._size._replace(rows=rows)
        old_rows = np.full((self._programs.parts, rows), -1)
        for part, busy in enumerate(self._busy):
            old_rows[part, : len(busy)] = list(busy)
        state, self._state = self._state, None
        assert state is not None, "only sentences that are active are moved"
        self._state = self._programs.move(self._layout, state, old_rows, size)
        self._busy = [dict(enumerate(busy.values())) for busy in self._busy]
        self._size, self._calls_with_room = size, 0

    def _take_lines(self) -> list[dict[Hashable, Sentence]]:
        """Takes waiting sentences for the free rows of each device, the device with the fewest first."""
        lines: list[dict[Hashable, Sentence]] = [{} for _ in self._busy]
        used = [len(busy) for busy in self._busy]
        while self.waiting and self._steps <= _MAX_STEPS:
            part = min(range(len(used)), key=used.__getitem__)
            if used[part] >= self._size.rows or len(lines[part]) >= self._num_lines:
                break
            name = next(iter(self.waiting))
            lines[part][name] = self.waiting.pop(name)
            used[part] += 1
        return lines

    def _rows_to_free(self, lines: list[dict[Hashable, Sentence]]) -> list[int]:
        """Returns how many rows of each device are free when the call ends before its last step."""
        rows, freed = self._size.rows, max(1, self._size.rows // 8)
        used = [len(busy) + len(new) for busy, new in zip(self._busy, lines, strict=True)]
        return [min(rows, rows - count + freed) if count else 0 for count in used]

    def _search(self, lines: State, counts: list[int], final_free_rows: list[int]) -> QueueResult:
        """Makes a few steps, or fewer if rows become free before."""
        assert self._state is not None, "a state is made for the first sentences"
        result = self._programs.search(
            self._params,
            self._layout,
            self._state,
            lines,
            counts=counts,
            final_free_rows=final_free_rows,
            refill=self._num_lines,
            n_best=self._key.n_best,
            max_steps=_STEPS,
        )
        self._state = result.state
        return result

    def _begin(self, lines: list[dict[Hashable, Sentence]]) -> State:
        """Encodes new sentences; returns their packed state."""
        sentences = [sentence for part in lines for sentence in part.values()]
        sources = self._engine.lay_out(sentences)
        numbers = iter(range(len(sentences)))
        indices = [[next(numbers) for _ in part] for part in lines]
        length = self._key.source_length
        block = gather_sources(sources, indices, rows=self._num_lines, length=length)
        if self._layout is None:
            self._layout = self._programs.find_layout(self._params, sources, n_best=self._key.n_best)
        if self._state is None:
            self._state = self._programs.empty(self._layout, self._size)
        return self._programs.begin(
            self._params,
            self._layout,
            [(0, block)],
            rows=self._num_lines,
            source_length=length,
            n_best=self._key.n_best,
        )

    def _no_lines(self) -> State:
        """Returns a packed state for a call in which no sentence joins; its contents do not matter."""
        if self._num_lines not in self._nothing:
            self._nothing[self._num_lines] = self._begin([{None: _DUMMY}, *({} for _ in self._busy[1:])])
        return self._nothing[self._num_lines]
