"""The search engine: from the token ids of sentences to hypotheses of token ids.

Row 12 of the data path. Sentences go to states of a few sizes (sizes.py), whose slots they enter and leave
(slots.py); each size has three programs (compiled_programs.py). What exceeds the likely length of a
translation is searched again in a state with more room.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from flaxformer_mt.config import ModelConfig, SearchConfig
from flaxformer_mt.cpu import core_count
from flaxformer_mt.decoding.compiled_programs import SearchPrograms
from flaxformer_mt.decoding.memory_backoff import TokenBudget
from flaxformer_mt.decoding.sentences import Candidates, Form, Sentence, SentenceArrays
from flaxformer_mt.decoding.sizes import StateSizes, make_length_rule
from flaxformer_mt.decoding.slots import Slots
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.parallel import SplitParameters
from flaxformer_mt.search import OVER_CAPACITY, SearchResult, Size, Symbols, search_width
from flaxformer_mt.vocab.shortlist import Shortlist

# Sentences that are read together, as a multiple of the slots for many: then devices wait for each other.
_FILLS = 2
# Programs of a size: free slots, read sources, decode.
_PROGRAMS = 3


# The last sentences of a size, in this share of its slots, begin again in a larger size: steps for them alone
# would take longer.
_LEFT_SHARE = 4


class SearchEngine:
    """Searches translations of sentences with one model, or with an ensemble that shares a vocabulary.

    Compiles each program once for each size; other parameters of the same shapes need no new compilation.
    """

    def __init__(
        self,
        models: Sequence[ModelConfig],
        options: SearchConfig,
        symbols: Symbols,
        *,
        sizes: tuple[int, int],
        source_pad_id: int,
        longest_source: int,
        spread: bool | SplitParameters = False,
        keep_programs: bool = False,
        shortlist: Shortlist | None = None,
        target_lengths: tuple[float, float] | None = None,
        warn: Callable[[str], None] = warn_user,
        **jit_options: Any,
    ) -> None:
        """Store the configuration; networks are built when a program is traced.

        Args:
          models: config of one model, or of each member of an ensemble.
          symbols: special symbols of the target vocabulary.
          sizes: number of entries of the source and the target vocabulary.
          longest_source: maximum source length in tokens, with eos.
          spread: whether each local device searches a part of the sentences, in batches of
            options.batch_tokens each, or the mesh over which parameters are split; they come from
            `place_parameters`.
          keep_programs: whether the programs for a few sentences are kept on disk.
          shortlist: restricts the tokens of each translation to candidates for its source, of which only
            the most probable are used: at most 16 for each source token, besides those of all sentences.
          target_lengths: ratio and offset of the length that few translations exceed, which bounds the room
            for them, and what beam search expects of an unfinished hypothesis, unless options.length_bound is
            limit.
          warn: receives one warning, when the device first runs out of memory with options.batch_tokens.
          jit_options: of `jax.jit`, for all programs.
        """
        self.options = options
        self._symbols = symbols
        self._keep_programs = keep_programs
        self.budget = TokenBudget(options.batch_tokens, warn=warn)
        configs = tuple(dataclasses.replace(model, scan_layers=False) for model in models)
        self.lengths = make_length_rule(options, configs, longest_source, target_lengths)
        self.shortlist = shortlist
        self._candidates = None
        if shortlist is not None:
            self._candidates = Candidates(shortlist, symbols, sizes[1], longest_source=longest_source)
        self.arrays = SentenceArrays(
            options, self.lengths, source_pad_id=source_pad_id, candidates=self._candidates
        )
        self.programs = SearchPrograms(
            configs,
            options,
            symbols,
            sizes=sizes,
            spread=spread,
            shortlists=None if self._candidates is None else self._candidates.shortlists,
            **jit_options,
        )

    def sizes(self, n_best: int, *, batch_tokens: int | None = None) -> StateSizes:
        """Return the sizes of states, as far as the memory of the device has turned out to allow."""
        width = search_width(self.options, n_best)
        return StateSizes(self.lengths, width, batch_tokens or self.budget.tokens, self.programs.parts)

    def make_slots(self, params: tuple[Any, ...], size: Size, form: Form, *, n_best: int) -> Slots:
        """Return empty slots of a size; programs that are new are compiled in threads from now on."""
        parts, is_few = self.programs.parts, size in self.sizes(n_best).few()
        lines = size.rows if is_few else _FILLS * size.rows
        lay_out = functools.partial(
            self.arrays.lay_out, form=form, rows=lines, source_length=size.source_length
        )
        programs = self.programs.find(
            params, size, lay_out([()] * parts), n_best=n_best, keep=self._keep_programs and is_few
        )
        return Slots(programs, params, size, lay_out, parts=parts, lines=lines)

    def warm_up(self, params: Sequence[Any], *, n_best: int = 1) -> int:
        """Load or compile the programs of all sizes, for sentences without constraints; return how many."""
        return sum(self.warm_up_each(params, n_best=n_best))

    def warm_up_each(self, params: Sequence[Any], *, n_best: int = 1) -> Iterator[int]:
        """Load or compile the programs of all sizes; yield their number as soon as those of a size are ready.

        Each size searches a sentence: what a program needs only at its first step is loaded now as well.
        """
        sizes = self.sizes(n_best)
        sentence = Sentence(np.zeros(1, np.int32), prefix=(0,) * self._symbols.num_free)
        form = self.arrays.find_form([sentence])
        made = (
            self.make_slots(tuple(params), size, form, n_best=n_best)
            for size in dict.fromkeys([*sizes.few(), *sizes.many()])
        )
        # As many sizes at a time as there are cores for: programs of a sentence that comes are next in turn.
        slots = collections.deque(itertools.islice(made, max(1, core_count() // _PROGRAMS)))
        while slots:
            each = slots.popleft()
            each.waiting = dict.fromkeys(range(self.programs.parts), sentence)
            collections.deque(each.run(), maxlen=0)
            yield _PROGRAMS
            slots.extend(itertools.islice(made, 1))

    def search_all(
        self, sentences: Sequence[Sentence], *, n_best: int, params: Sequence[Any]
    ) -> Iterator[tuple[int, SearchResult]]:
        """Yield each sentence's index and hypotheses [N, ...], the shortest sources roughly first.

        If the device runs out of memory, this call and all later ones use smaller batches.

        Args:
          params: the parameters of each model.

        Raises:
          UserError: the device runs out of memory with the smallest batch.
        """

        def search(indices: Sequence[int], batch_tokens: int) -> Iterator[tuple[int, SearchResult]]:
            sizes = self.sizes(n_best, batch_tokens=batch_tokens)
            return self._search([sentences[index] for index in indices], sizes, n_best, tuple(params))

        yield from self.budget.run_all(search, len(sentences))

    def _search(
        self, sentences: Sequence[Sentence], sizes: StateSizes, n_best: int, params: tuple[Any, ...]
    ) -> Iterator[tuple[int, SearchResult]]:
        form = self.arrays.find_form(sentences)
        needs = [(len(sentence.source), self.arrays.needed(sentence)) for sentence in sentences]
        slots: dict[Size, Slots] = {}

        def find(size: Size) -> Slots:
            if size not in slots:
                slots[size] = self.make_slots(params, size, form, n_best=n_best)
            return slots[size]

        # The smallest first: what exceeds them joins the sentences of larger ones.
        for size, numbers in sorted(sizes.assign(needs).items(), key=lambda item: item[0].capacity):
            numbers.sort(key=lambda number: needs[number], reverse=True)
            find(size).waiting.update((number, sentences[number]) for number in numbers)
        while slots:
            size = min(slots, key=lambda size: size.capacity)
            own, again = slots.pop(size), []
            for name, result in own.run(leave=size.rows // _LEFT_SHARE if slots else 0):
                if result.lengths[0] == OVER_CAPACITY:
                    again.append(cast(int, name))
                else:
                    yield cast(int, name), result
            for number in (*again, *cast(list[int], own.left)):
                find(sizes.choose_again(*needs[number], others=slots)).waiting[number] = sentences[number]

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
