"""Sentences that arrive one by one: each enters a running search, and leaves it when it is done."""

import collections
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import jax

from flaxformer_mt.decoding.engine import SearchEngine
from flaxformer_mt.decoding.sentences import Form, Sentence
from flaxformer_mt.decoding.slots import Slots
from flaxformer_mt.errors import UserError
from flaxformer_mt.search import OVER_CAPACITY, SearchResult, Size

# Number of decoding steps after which waiting sentences may enter.
_STEPS = 8

# The name of a sentence, and its hypotheses [N, ...], or why there are none.
Found = tuple[Hashable, SearchResult | Exception]


class _Key(NamedTuple):
    """What the sentences of some slots have in common."""

    size: Size
    form: Form
    n_best: int


class LiveSearch:
    """Searches sentences that are submitted at any time; `advance` makes the next few decoding steps.

    A sentence enters the search of those that have begun before, and its result is the same as if it were
    searched alone. The methods must be called by one thread.
    """

    def __init__(self, engine: SearchEngine, params: tuple[Any, ...]) -> None:
        """Start without sentences; `params` are those of each model of the engine."""
        self._engine, self._params = engine, params
        self._slots: dict[_Key, Slots] = {}
        self._turn: collections.deque[_Key] = collections.deque()
        self._sentences: dict[Hashable, Sentence] = {}
        self._keys: dict[Hashable, _Key] = {}  # those of all sentences

    @property
    def num_active(self) -> int:
        """Number of sentences in slots of the device; may be asked by any thread."""
        return sum(slots.num_busy for slots in list(self._slots.values()))

    def __len__(self) -> int:
        return len(self._sentences)

    def submit(self, name: Hashable, sentence: Sentence, *, n_best: int) -> None:
        """Add a sentence; `name` identifies it in the results."""
        assert name not in self._sentences
        self._sentences[name] = sentence
        self._enter(name, n_best)

    def cancel(self, name: Hashable) -> None:
        """Remove a sentence, if it is not done yet; one that has a slot keeps it until its search ends."""
        if self._sentences.pop(name, None) is not None:
            self._slots[self._keys.pop(name)].waiting.pop(name, None)

    def advance(self) -> Iterator[Found]:
        """Make a few decoding steps in some slots; yield the names and results of sentences that are done.

        Slots with sentences take turns. If the device fails, the result of their sentences is the error.
        """
        while self._turn:
            key = self._turn.popleft()
            if len(self._slots[key]):
                self._turn.append(key)
                yield from self._advance(key)
                return

    def _enter(self, name: Hashable, n_best: int, *, again: bool = False) -> None:
        """Let a sentence wait for a slot: among a few sentences, or among many where all slots are taken."""
        sentence = self._sentences[name]
        sizes, arrays = self._engine.sizes(n_best), self._engine.arrays
        form, need = arrays.find_form([sentence]), (len(sentence.source), arrays.needed(sentence))
        key = _Key(sizes.choose_few(*need), form, n_best)
        if not again and not self._find(key).num_free:
            key = _Key(sizes.choose(*need), form, n_best)
        self._find(key).waiting[name] = sentence
        self._keys[name] = key
        if key not in self._turn:
            self._turn.append(key)

    def _find(self, key: _Key) -> Slots:
        if key not in self._slots:
            self._slots[key] = self._engine.make_slots(self._params, key.size, key.form, n_best=key.n_best)
        return self._slots[key]

    def _advance(self, key: _Key) -> Iterator[Found]:
        slots = self._slots[key]
        try:
            found = list(slots.finish(slots.start(_STEPS)))
        except (jax.errors.JaxRuntimeError, UserError) as error:
            yield from self._recover(key, error)
            return
        for name, result in found:
            if name not in self._sentences:  # cancelled
                continue
            if result.lengths[0] == OVER_CAPACITY:
                self._enter(name, key.n_best, again=True)
                continue
            del self._sentences[name], self._keys[name]
            yield name, result

    def _recover(self, key: _Key, error: Exception) -> Iterator[Found]:
        """After an error, which loses the state: begin anew if memory was short, or give its sentences up."""
        del self._slots[key]
        names = [name for name, own in self._keys.items() if own == key]
        self._turn = collections.deque(other for other in self._turn if other != key)
        try:
            if isinstance(error, jax.errors.JaxRuntimeError) and self._engine.budget.halve_after(error):
                for name in names:
                    self._enter(name, key.n_best)
                return
        except UserError as smallest:
            error = smallest
        for name in names:
            del self._sentences[name], self._keys[name]
            yield name, error
