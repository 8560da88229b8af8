"""The search engine of one model or ensemble: its programs, state sizes, length limits and memory budget.

Sources and hypotheses are token ids. `scheduler.py` decides which sentences are searched when; each size of
state has three programs (`compiled_programs.py`).
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxformer_mt.config import ModelConfig, SearchConfig
from flaxformer_mt.decoding.compiled_programs import Leaves, SearchPrograms, StatePrograms
from flaxformer_mt.decoding.ensemble_members import Sources
from flaxformer_mt.decoding.search_inputs import Candidates, Form, Sentence, SentenceArrays
from flaxformer_mt.decoding.state_sizes import StateSizes, choose_batch_tokens, make_length_rule
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.parallel import SplitParameters, default_platform
from flaxformer_mt.processor import core_count
from flaxformer_mt.search import NO_LINE, UNLIMITED, SearchResult, Size, Symbols, search_width
from flaxformer_mt.vocab.shortlist import Shortlist

# Sentences that are read together, as a multiple of the slots for many: then devices wait for each other.
_FILLS = 2
# Programs of a size: free slots, read sources, decode.
_PROGRAMS = 3
# Seconds that a thread waits for other threads before it looks for other work.
PATIENCE = 0.01
# A state that has made this many steps takes no sentence until it is empty: then steps count from 0.
_MAX_STEPS = 2**30
# Occurs in XLA's message about a failed allocation on every backend.
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
# A batch of fewer tokens has one short sentence, so halving has no effect.
_MIN_TOKENS = 8


class TokenBudget:
    """The number of tokens per batch: at first as requested, then halved whenever device memory runs out."""

    def __init__(self, tokens: int, *, warn: Callable[[str], None]) -> None:
        self.tokens, self._requested, self._warn = tokens, tokens, warn

    def halve_after(self, error: Exception) -> bool:
        """Return whether the error is a lack of device memory; if it is, halve the number of tokens.

        Raises UserError if the smallest batch did not fit. Warns at the first halving.
        """
        message = str(error)
        if not isinstance(error, jax.errors.JaxRuntimeError) or _OUT_OF_MEMORY not in message:
            return False
        if self.tokens // 2 < _MIN_TOKENS:
            raise UserError(
                f"the device has too little memory for a batch of {self.tokens} tokens "
                f"({message.strip()[:200]}); free device memory, or use a smaller beam"
            )
        if self.tokens == self._requested:
            self._warn(
                f"the device has too little memory for batches of {self.tokens} tokens; continuing with "
                f"smaller batches. Give --batch_tokens={self.tokens // 2} or less next time"
            )
        self.tokens //= 2
        return True


class Call(NamedTuple):
    """A call of `generate`: its outputs and, for each part of the rows, the sentences that entered."""

    entered: list[list[Hashable]]
    owners: Any
    results: SearchResult
    # Whether its steps are limited, so that sentences may enter afterwards.
    is_limited: bool
    # Whether no sentences follow: sentences that are still in slots afterwards move to a larger size.
    is_last: bool


class Slots:
    """The sentences in one state's slots; `finish` takes the calls that `start` returned, in order."""

    def __init__(
        self,
        find_programs: Callable[[], StatePrograms],
        params: tuple[Any, ...],
        size: Size,
        lay_out: Callable[[Sequence[Sequence[Sentence]]], Sources],
        *,
        parts: int,
        lines: int,
    ) -> None:
        """`find_programs` is called when needed; `lay_out` takes up to `lines` sentences of each part."""
        self.waiting: dict[Hashable, Sentence] = {}
        self._find_programs, self._params, self._size, self._lay_out = find_programs, params, size, lay_out
        self._lines = lines
        self._state: Leaves | None = None
        self._entered: Leaves | None = None  # the last sentences that were read
        self._busy: list[dict[int, Hashable]] = [{} for _ in range(parts)]  # slot -> name, of each part
        self._steps = 0
        self.calls: collections.deque[Call] = collections.deque()

    @functools.cached_property
    def programs(self) -> StatePrograms:
        """The programs of the state; if they are new, threads start to compile them."""
        return self._find_programs()

    def __len__(self) -> int:
        entered = sum(len(own) for call in self.calls for own in call.entered)
        return len(self.waiting) + self.num_busy + entered

    @property
    def num_busy(self) -> int:
        """The number of sentences in slots, as of the last call of `finish`."""
        return sum(map(len, self._busy))

    @property
    def num_free(self) -> int:
        """The number of slots left once all waiting sentences have entered; negative if there are too few."""
        return self._size.rows * len(self._busy) - len(self)

    @property
    def is_full(self) -> bool:
        """Whether enough sentences wait to fill one call."""
        return len(self.waiting) >= self._lines * len(self._busy)

    def take_left(self) -> list[Hashable]:
        left = [name for busy in self._busy for name in busy.values()]
        self._busy, self._state = [{} for _ in self._busy], None
        return left

    def start(self, max_steps: int = UNLIMITED, *, leave: int = 0, more: bool = False) -> Call:
        """Let waiting sentences enter slots; then start at most `max_steps` steps, which run asynchronously.

        Without a limit, sentences also enter slots that become free during the call. Once no sentence waits,
        the call may end with `leave` slots per part still occupied. `more`: whether further sentences follow;
        the last sentences may then stay unfinished.
        """
        unlimited, rows, parts = max_steps == UNLIMITED, self._size.rows, len(self._busy)
        if not self.calls and not self.num_busy and self._steps > _MAX_STEPS:
            self._state, self._steps = None, 0
        entered = self._deal(unlimited)
        sentences = [[self.waiting.pop(name) for name in own] for own in entered]
        if any(entered):
            self._entered = self.programs.prefill(self._params, self._lay_out(sentences))
        assert self._entered is not None, "a state that has no sentences is not searched"
        freed, is_last = max(1, rows // 16), unlimited and not (self.waiting or more)
        if unlimited:
            final_free_rows = [rows - leave if is_last else freed] * parts
        else:  # those of a part that are used up come back soon
            used = [len(busy) + len(own) for busy, own in zip(self._busy, entered, strict=True)]
            final_free_rows = [min(rows, rows - count + freed) if count else 0 for count in used]
        found = self.programs.generate(
            self._params,
            self.programs.empty() if self._state is None else self._state,
            self._entered,
            counts=[len(own) for own in entered],
            final_free_rows=final_free_rows,
            max_steps=max_steps,
        )
        self._state = found.state
        self._steps += 0 if unlimited else max_steps
        call = Call(entered, found.owners, found.results, not unlimited, is_last)
        self.calls.append(call)
        return call

    def _deal(self, unlimited: bool) -> list[list[Hashable]]:
        """Return the names of the waiting sentences that enter each part."""
        parts = len(self._busy)
        names = list(self.waiting) if self._steps <= _MAX_STEPS else []
        if unlimited:  # in turn: sentences next to each other take equally long
            names = names[: self._lines * parts]
            return [names[part::parts] for part in range(parts)]
        # The first sentence of each line before all second ones: a long text holds up no others.
        names.sort(key=lambda name: self.waiting[name].stream[1:])
        entered: list[list[Hashable]] = [[] for _ in range(parts)]
        used = list(map(len, self._busy))
        for name in names:
            part = used.index(min(used))
            if used[part] >= self._size.rows:
                break
            entered[part].append(name)
            used[part] += 1
        return entered

    def finish(self, call: Call) -> list[tuple[Hashable, SearchResult]]:
        """Wait for the steps of the oldest call; return the finished sentences with their results."""
        assert self.calls.popleft() is call
        rows, parts = self._size.rows, len(call.entered)
        owners = np.asarray(call.owners).reshape(parts, rows)
        before, self._busy = self._busy, []
        done: list[tuple[int, Hashable]] = []
        for part in range(parts):
            # Place in the results -> name: of sentences that entered, and of those in slots before.
            places = dict(enumerate(call.entered[part]))
            places |= {self._lines + row: name for row, name in before[part].items()}
            active = {
                row: places.pop(owner) for row, owner in enumerate(owners[part].tolist()) if owner != NO_LINE
            }
            first = (self._lines + rows) * part
            done += [(first + place, name) for place, name in places.items()]
            self._busy.append(active)
        if not done:
            return []
        found: list[Any] = [None if leaf is None else np.asarray(leaf) for leaf in call.results]
        take = functools.partial(_take_row, found)
        return [(name, take(place)) for place, name in done]


def _take_row(leaves: list[Any], place: int) -> SearchResult:
    """Return the results of one sentence as array views."""
    row: list[Any] = [None if leaf is None else leaf[place] for leaf in leaves]
    return SearchResult(*row)


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Options of the computation: devices, storage of programs, shortlist and expected lengths."""

    # Whether each local device searches a part of the sentences, in batches of search.batch_tokens; or the
    # mesh over which parameters from `place_parameters` are split.
    spread: bool | SplitParameters = False
    # Whether to store the programs for a few sentences on disk.
    keep_programs: bool = False
    # Restricts the tokens of each translation to the most probable candidates for its source: at most 16 per
    # source token, in addition to the candidates that all sentences share.
    shortlist: Shortlist | None = None
    # Ratio and offset of a length that few translations exceed. Unless search.length_bound is limit, this
    # length bounds the capacity of states, and the lengths at which beam search expects better hypotheses.
    target_lengths: tuple[float, float] | None = None
    # XLA options for all programs, which are then not stored on disk.
    compiler_options: dict[str, Any] | None = None


class SearchEngine:
    """Searches with one model or an ensemble; compiles its programs once per state size."""

    def __init__(
        self,
        models: Sequence[ModelConfig],
        options: SearchConfig,
        symbols: Symbols,
        *,
        sizes: tuple[int, int],
        source_pad_id: int,
        longest_source: int,
        computing: EngineOptions = EngineOptions(),
        warn: Callable[[str], None] = warn_user,
    ) -> None:
        """`sizes`: entries of the source and target vocabulary. `longest_source`: in tokens, with eos."""
        self.options, self.shortlist, self._symbols = options, computing.shortlist, symbols
        self._keep_programs = computing.keep_programs
        self.budget = TokenBudget(choose_batch_tokens(options, models, sizes[1]), warn=warn)
        configs = tuple(dataclasses.replace(model, scan_layers=False) for model in models)
        self.lengths = make_length_rule(options, configs, longest_source, computing.target_lengths)
        self._candidates = None
        if computing.shortlist is not None:
            self._candidates = Candidates(
                computing.shortlist, symbols, sizes[1], longest_source=longest_source
            )
        self.arrays = SentenceArrays(
            options, self.lengths, source_pad_id=source_pad_id, candidates=self._candidates
        )
        self.programs = SearchPrograms(
            configs,
            options,
            symbols,
            sizes=sizes,
            spread=computing.spread,
            shortlists=None if self._candidates is None else self._candidates.shortlists,
            **({"compiler_options": computing.compiler_options} if computing.compiler_options else {}),
        )

    def sizes(self, n_best: int) -> StateSizes:
        """Return the current sizes of states, which shrink when the device runs out of memory."""
        width = search_width(self.options, n_best)
        is_cpu = default_platform() == "cpu"
        return StateSizes(self.lengths, width, self.budget.tokens, self.programs.parts, single=is_cpu)

    def make_slots(self, params: tuple[Any, ...], size: Size, form: Form, *, n_best: int) -> Slots:
        parts, sizes = self.programs.parts, self.sizes(n_best)
        is_few = size in (*sizes.one(), *sizes.few())
        lines = size.rows if is_few else _FILLS * size.rows
        lay_out = functools.partial(
            self.arrays.lay_out, form=form, rows=lines, source_length=size.source_length
        )
        find_programs = functools.partial(
            self.programs.find,
            params,
            size,
            lay_out([()] * parts),
            n_best=n_best,
            keep=self._keep_programs and is_few,
        )
        return Slots(find_programs, params, size, lay_out, parts=parts, lines=lines)

    def warm_up(self, params: Sequence[Any], *, n_best: int = 1) -> Iterator[int]:
        """Load or compile the programs of each size, and run them once on a sentence without constraints.

        Yields the number of programs of each size when they are ready, and 0 at intervals while it waits.
        """
        sizes = self.sizes(n_best)
        sentence = Sentence(np.zeros(1, np.int32), prefix=(0,) * self._symbols.num_free)
        form = self.arrays.find_form([sentence])
        params = tuple(params)

        def make_all() -> Iterator[Slots]:
            for size in dict.fromkeys([*sizes.one(), *sizes.few(), *sizes.many()]):
                slots = self.make_slots(params, size, form, n_best=n_best)
                slots.waiting.update((part, sentence) for part in range(self.programs.parts))
                _ = slots.programs  # compiled from now on
                yield slots

        # As many sizes at a time as there are cores for: programs of a sentence that comes are next in turn.
        made = make_all()
        every = collections.deque(itertools.islice(made, max(1, core_count() // _PROGRAMS)))
        while every:
            slots = every.popleft()
            while not slots.programs.wait(PATIENCE):
                yield 0
            slots.finish(slots.start())
            yield _PROGRAMS
            every.extend(itertools.islice(made, 1))

    def check(self, sentence: Sentence, name: str) -> None:
        """Raise UserError if no translation can satisfy the constraints; the message begins with `name`."""
        if self._candidates is not None:
            self._candidates.check(sentence.source, sentence.required, name)
        longest = self.lengths.longest_target
        if longest is not None and sentence.shortest > longest:
            raise UserError(
                f"{name} has {sentence.shortest - 1} tokens of prefix and required phrases, but the model "
                f"has positions for {longest}, end symbol included; shorten them"
            )
        if both := set(self._symbols.never) & set(itertools.chain(*sentence.required)):
            raise UserError(
                f"{name} requires a phrase with the suppressed token {min(both)}; change the phrase, "
                "or allow the token"
            )
