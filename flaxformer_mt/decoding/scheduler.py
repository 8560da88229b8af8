"""The scheduler of searches: decides when each sentence enters a search state, and which state runs next.

There are states of a few sizes (`state_sizes.py`). Sentences enter and leave the slots of a state; a slot is
a row, and `search/continuous_batching.py` assigns rows to sentences on the device. The result of a sentence
is the same as if it were searched alone.
"""

import collections
import functools
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from flaxformer_mt.decoding.search_engine import PATIENCE, Call, SearchEngine, Slots
from flaxformer_mt.decoding.search_inputs import Form, Sentence
from flaxformer_mt.errors import UserError
from flaxformer_mt.search import OVER_CAPACITY, UNLIMITED, SearchResult, Size

# Calls that are given to the device before the results of the first are read, so that it never waits.
_IN_FLIGHT = 2
# The last sentences of a size, in this share of its slots, begin again in a larger size: steps for them alone
# would take longer.
_LEFT_SHARE = 4

# The name of a sentence, and its hypotheses [N, ...], or why there are none.
Finished = tuple[Any, SearchResult | Exception]


class _Key(NamedTuple):
    """Identifies a search state: its size, the form of its inputs and the number of hypotheses."""

    size: Size
    form: Form
    n_best: int


class Scheduler:
    """Translates sentences, which may be submitted at any time; `step` runs the search and yields results.

    All methods must be called from one thread. Which sentences share a batch depends only on the order of
    these calls, not on time: the same calls give bitwise identical results.
    """

    def __init__(self, engine: SearchEngine, params: tuple[Any, ...]) -> None:
        """Start without sentences; `params` holds the parameters of each model of the engine."""
        self._engine, self._params = engine, params
        self._slots: dict[_Key, Slots] = {}
        self._turn: collections.deque[_Key] = collections.deque()
        # All unfinished sentences by name, with their numbers of hypotheses.
        self._sentences: dict[Hashable, tuple[Sentence, int]] = {}
        # Sentences that are not yet queued in a state, by form and number of hypotheses.
        self._unassigned: dict[tuple[Form, int], dict[Hashable, Sentence]] = {}
        # The state that each other sentence is queued or searched in.
        self._keys: dict[Hashable, _Key] = {}
        self._in_flight: collections.deque[tuple[_Key, Call]] = collections.deque()
        # Whether the last `_assign` was final; the state that the device works on, in case it fails.
        self._all_assigned = True
        self._current: _Key | None = None

    @property
    def num_active(self) -> int:
        """Number of sentences in slots on the device; any thread may read it."""
        return sum(slots.num_busy for slots in list(self._slots.values()))

    def __len__(self) -> int:
        return len(self._sentences)

    def submit(self, sentences: Mapping[Any, Sentence], *, n_best: int) -> None:
        """Add sentences by name, with inputs of one common `Form`; `step` yields their results by name."""
        form = self._engine.arrays.find_form(list(sentences.values()))
        self._sentences.update((name, (sentence, n_best)) for name, sentence in sentences.items())
        self._unassigned.setdefault((form, n_best), {}).update(sentences)

    def cancel(self, name: Hashable) -> None:
        """Remove an unfinished sentence; if it is in a slot, it occupies the slot until its search ends."""
        if self._sentences.pop(name, None) is not None:
            for waiting in self._unassigned.values():
                waiting.pop(name, None)
            if (key := self._keys.pop(name, None)) is not None:
                self._slots[key].waiting.pop(name, None)

    def compile(self) -> None:
        """Compile the programs for the submitted sentences, as if these were all; return when done."""
        self._assign(all_of_them=True)
        for programs in [slots.programs for slots in self._slots.values()]:
            programs.wait()

    def step(self, max_steps: int | None, *, more: bool = False) -> Iterator[Finished]:
        """Continue the search; yield the names and results of finished sentences.

        After `max_steps` steps, waiting sentences can enter. None: no sentences arrive during the search, so
        the device runs as long as it can without the host. `more`: whether `submit` will be called again;
        only states with enough sentences for a full call are then searched. If the device fails, the error is
        the result of all sentences that were being searched.
        """
        try:
            yield from self._search_all(more=more) if max_steps is None else self._search_some(max_steps)
        except (jax.errors.JaxRuntimeError, UserError) as error:
            yield from self._recover(error)

    @property
    def has_full_call(self) -> bool:
        """Whether `step(None, more=True)` may have work to do."""
        return bool(self._unassigned) or any(slots.is_full for slots in self._slots.values())

    # ---- sentences as they come, a few steps at a time ----

    def _search_some(self, max_steps: int) -> Iterator[Finished]:
        """Run steps in one state; states with sentences take turns as soon as their programs are compiled."""
        for (_, n_best), sentences in self._take_unassigned():
            for name, sentence in sentences.items():
                self._enter(name, sentence, n_best)
        self._turn = collections.deque(key for key in self._turn if len(self._slots[key]))
        # All of them are asked, so that all begin to compile.
        ready = [key for key in self._turn if self._slots[key].programs.wait(0)]
        if ready:
            self._turn.remove(ready[0])
            self._turn.append(ready[0])
            self._start(ready[0], max_steps)
            yield from self._finish_oldest()
        elif self._turn:
            self._slots[self._turn[0]].programs.wait(PATIENCE)

    def _enter(self, name: Hashable, sentence: Sentence, n_best: int, *, again: bool = False) -> None:
        """Queue a sentence in a state for a few sentences, or for many if the former has no free slot."""
        sizes, arrays = self._engine.sizes(n_best), self._engine.arrays
        form, need = arrays.find_form([sentence]), arrays.find_need(sentence)
        alone = len(self._sentences) == 1 and not again
        key = _Key(sizes.choose_few(*need, count=1 if alone else None), form, n_best)
        if not again and not self._find(key).num_free:
            key = _Key(sizes.choose(*need), form, n_best)
        self._wait(key, {name: sentence})

    # ---- many sentences at once ----

    def _search_all(self, *, more: bool) -> Iterator[Finished]:
        """Start calls until two are in flight, then finish the oldest; with `more`, leave one in flight."""
        self._assign(all_of_them=not more)
        for slots in (self._slots[key] for key in sorted(self._slots, key=_capacity)):
            if slots.is_full or (slots.waiting and not more):
                _ = slots.programs  # what is needed first is compiled first
        while len(self._in_flight) < _IN_FLIGHT and (key := self._choose(more=more)) is not None:
            larger = any(self._is_larger(other, key) and len(slots) for other, slots in self._slots.items())
            self._start(key, leave=key.size.rows // _LEFT_SHARE if larger else 0, more=more)
        if len(self._in_flight) == _IN_FLIGHT or (self._in_flight and not more):
            yield from self._finish_oldest()

    def _choose(self, *, more: bool) -> _Key | None:
        """Return the state whose call is next: the smallest, or with `more` the first with a full call."""
        keys = sorted((key for key, slots in self._slots.items() if len(slots)), key=_capacity)
        if not more and keys:
            slots = self._slots[keys[0]]
            if slots.waiting or (slots.num_busy and not slots.calls):
                return keys[0]
        return next((key for key in keys if self._slots[key].is_full), None)

    def _assign(self, *, all_of_them: bool) -> None:
        """Queue sentences in states, the longest first; sizes with few sentences use the states for a few.

        `all_of_them`: whether no more sentences follow, so that the number per size is final.
        """
        if not self._unassigned and (self._all_assigned or not all_of_them):
            return
        self._all_assigned, find_need = all_of_them, self._engine.arrays.find_need
        changed = set()
        for (form, n_best), sentences in self._take_unassigned():
            choose = functools.cache(self._engine.sizes(n_best).choose)
            assigned: dict[Size, dict[Hashable, Sentence]] = collections.defaultdict(dict)
            for name, sentence in sentences.items():
                assigned[choose(*find_need(sentence))][name] = sentence
            for size, own in assigned.items():
                changed.add(key := _Key(size, form, n_best))
                self._wait(key, own)
        changed |= self._join_sparse_sizes() if all_of_them else set()
        for key in changed & self._slots.keys():
            waiting = self._slots[key].waiting
            order = sorted(waiting.items(), key=lambda item: find_need(item[1]), reverse=True)
            self._slots[key].waiting = dict(order)

    def _join_sparse_sizes(self) -> set[_Key]:
        """Move sentences that do not fill the rows of their size; return the states that received them.

        A step also computes free rows. Larger sizes have fewer rows, and states for a few the fewest.
        """
        joined = set()
        for form, n_best in {(key.form, key.n_best) for key in self._slots}:
            sizes = self._engine.sizes(n_best)
            keys = [_Key(size, form, n_best) for size in sizes.many()]
            for key, larger in itertools.zip_longest(keys, keys[1:]):
                slots = self._slots.get(key)
                if slots is None or not slots.waiting or len(slots) > len(slots.waiting):
                    continue
                lengths = zip(*map(self._engine.arrays.find_need, slots.waiting.values()), strict=True)
                count, is_sparse = len(slots), slots.num_free > 0
                few = sizes.choose_few(*map(max, lengths), count=count)
                if sizes.fits_few(count, few) and not (is_sparse and larger in self._slots):
                    larger = key._replace(size=few)
                elif larger is None or not is_sparse:
                    continue
                joined.add(larger)
                self._forget([key])
                self._wait(larger, slots.waiting)
        return joined

    def _search_again(self, key: _Key, names: Iterable[Hashable]) -> None:
        """Restart sentences that exceeded the capacity, or are the last of their size, in a larger size."""
        sizes = self._engine.sizes(key.n_best)
        for name in names:
            if (sentence := self._find_sentence(name)) is not None:
                others = [other.size for other in self._slots if self._is_larger(other, key)]
                size = sizes.choose_again(*self._engine.arrays.find_need(sentence), others=others)
                self._wait(key._replace(size=size), {name: sentence})

    def _is_larger(self, other: _Key, key: _Key) -> bool:
        """Return whether sentences of the state `key` can restart in the state `other`."""
        return other[1:] == key[1:] and other.size != key.size and other.size.capacity >= key.size.capacity

    def _find_sentence(self, name: Hashable) -> Sentence | None:
        """Return a sentence by name; None if it was cancelled."""
        return self._sentences[name][0] if name in self._sentences else None

    def _take_unassigned(self) -> Iterable[tuple[tuple[Form, int], dict[Hashable, Sentence]]]:
        taken, self._unassigned = self._unassigned, {}
        return taken.items()

    # ---- states ----

    def _find(self, key: _Key) -> Slots:
        if key not in self._slots:
            self._current = key
            self._slots[key] = self._engine.make_slots(self._params, key.size, key.form, n_best=key.n_best)
        return self._slots[key]

    def _wait(self, key: _Key, sentences: Mapping[Hashable, Sentence]) -> None:
        self._keys.update(dict.fromkeys(sentences, key))
        self._find(key).waiting.update(sentences)
        if key not in self._turn:
            self._turn.append(key)

    def _start(self, key: _Key, max_steps: int = UNLIMITED, **how: Any) -> None:
        self._current = key
        self._in_flight.append((key, self._slots[key].start(max_steps, **how)))

    def _finish_oldest(self) -> Iterator[Finished]:
        key, call = self._in_flight.popleft()
        self._current, slots = key, self._slots[key]
        finished = slots.finish(call)
        again = [name for name, result in finished if result.lengths[0] == OVER_CAPACITY]
        if call.is_last and not slots.waiting and not slots.calls:
            again += slots.take_left()
            self._forget([key])  # so that its memory is free
        if call.is_limited:
            for name in again:
                if (sentence := self._find_sentence(name)) is not None:
                    self._enter(name, sentence, key.n_best, again=True)
        else:
            self._search_again(key, again)
        again_names = set(again)
        for name, result in finished:
            if name not in again_names and name in self._sentences:
                del self._sentences[name], self._keys[name]
                yield name, result

    def _recover(self, error: Exception) -> Iterator[Finished]:
        """Handle an error, which loses states: restart if memory was short, otherwise give up sentences."""
        lost = [name for name in self._sentences if self._keys.get(name, self._current) == self._current]
        try:
            if self._engine.budget.halve_after(error):
                self._forget(list(self._slots))
                sentences, self._keys, self._unassigned = self._sentences, {}, {}
                for n_best in {n_best for _, n_best in sentences.values()}:
                    own = {name: one for name, (one, number) in sentences.items() if number == n_best}
                    self.submit(own, n_best=n_best)
                return
        except UserError as smallest:
            error = smallest
        self._forget([self._current])
        for name in lost:
            del self._sentences[name]
            self._keys.pop(name, None)
            yield name, error

    def _forget(self, keys: Sequence[_Key | None]) -> None:
        """Drop states and their calls."""
        self._slots = {key: slots for key, slots in self._slots.items() if key not in keys}
        self._turn = collections.deque(key for key in self._turn if key not in keys)
        self._in_flight = collections.deque(pair for pair in self._in_flight if pair[0] not in keys)


def _capacity(key: _Key) -> int:
    return key.size.capacity
