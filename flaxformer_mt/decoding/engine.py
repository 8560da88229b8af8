"""The search engine: from the token ids of sentences to hypotheses of token ids.

Row 12 of the data path. Contains the search inputs of each sentence (length limits, prefixes, required
phrases, seeds), and the second search of sentences whose translations exceed the default capacity.
scheduler.py assigns sentences to rows; compiled_programs.py contains the programs.
"""

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flaxformer_mt.config import ModelConfig, SearchConfig
from flaxformer_mt.decoding.compiled_programs import SearchPrograms
from flaxformer_mt.decoding.ensemble_members import Sources
from flaxformer_mt.decoding.line_candidates import Candidates
from flaxformer_mt.decoding.memory_backoff import TokenBudget
from flaxformer_mt.decoding.scheduler import Scheduler
from flaxformer_mt.decoding.sizes import (
    LengthRule,
    SizeRule,
    SmallSize,
    group_by_need,
    plan_small_input,
    round_up,
    sizes_in_advance,
)
from flaxformer_mt.decoding.small_inputs import SmallInputs
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.parallel import SplitParameters
from flaxformer_mt.search import (
    NO_TOKEN,
    OVER_CAPACITY,
    WORD_START,
    Lines,
    SearchResult,
    Symbols,
    search_width,
)
from flaxformer_mt.vocab.shortlist import Shortlist

# Number of blocks of sources in batch_tokens. Sources are sorted by length: smaller blocks have less padding,
# but the device encodes fewer tokens at a time.
_BLOCKS = 16


@dataclass(frozen=True)
class Sentence:
    """A source and the constraints on its translation; all ids are without bos."""

    # Token ids of the source; the last one is eos.
    source: np.ndarray
    # Prefix of the translation, without eos.
    prefix: tuple[int, ...] = ()
    # Required phrases of the translation, without eos.
    required: tuple[tuple[int, ...], ...] = ()
    # Minimum number of tokens of the translation, with eos; the search options may require more.
    least: int = 1
    # Whether the token after the prefix begins a word or ends the translation.
    prefix_ends_word: bool = False
    # Sampling: distinguishes the random numbers of equal sources, for example the number of the line.
    stream: tuple[int, ...] = ()

    @property
    def shortest(self) -> int:
        """The minimum number of tokens, with eos, of a translation that satisfies the constraints."""
        return max(self.least, self.fixed)

    @property
    def fixed(self) -> int:
        """The number of tokens of the prefix and the required phrases, with eos."""
        return len(self.prefix) + sum(map(len, self.required)) + 1


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
        small_inputs: bool = False,
        shortlist: Shortlist | None = None,
        target_lengths: tuple[float, float] | None = None,
        warn: Callable[[str], None] = warn_user,
    ) -> None:
        """Builds the networks.

        Args:
          models: config of one model, or of each member of an ensemble.
          symbols: special symbols of the target vocabulary.
          sizes: number of entries of the source and the target vocabulary.
          longest_source: maximum source length in tokens, with eos.
          spread: whether each local device searches a part of the sentences, in batches of
            options.batch_tokens each, or the mesh over which parameters are split; they come from
            `place_parameters`.
          small_inputs: whether few sentences are searched by programs of few sizes, which are kept on disk.
          shortlist: restricts the tokens of each translation to candidates for its source, of which only
            the most probable are used: at most 16 for each source token, besides those of all sentences.
          target_lengths: ratio and offset of the length that few translations exceed, which bounds the room
            for them, and what beam search expects of an unfinished hypothesis, unless options.length_bound is
            limit.
          warn: receives one warning, when the device first runs out of memory with options.batch_tokens.
        """
        self.options = options
        self._symbols = symbols
        self._source_pad_id = source_pad_id
        self.budget = TokenBudget(options.batch_tokens, warn=warn)
        self._configs = tuple(dataclasses.replace(model, scan_layers=False) for model in models)
        self.lengths = LengthRule(
            options.max_length_ratio,
            options.max_length_offset,
            longest_source,
            _longest_target(self._configs, longest_source),
            target_lengths if options.length_bound == "learned" else None,
        )
        self.shortlist = shortlist
        self._candidates = None
        if shortlist is not None:
            self._candidates = Candidates(shortlist, symbols, sizes[1], longest_source=longest_source)
        self.programs = SearchPrograms(
            self._configs,
            options,
            symbols,
            sizes=sizes,
            spread=spread,
            shortlists=None if self._candidates is None else self._candidates.shortlists,
        )
        self._small = SmallInputs(self.programs) if small_inputs else None

    def warm_up(self, params: Sequence[Any], *, n_best: int = 1) -> int:
        """Loads, or compiles and keeps, the programs of all small inputs; returns their number."""
        if self._small is None:
            return 0
        width = search_width(self.options, n_best)
        sizes = sizes_in_advance(SizeRule(self.lengths, width, self.budget.tokens))
        # A sentence for each device: what a program needs only at its first step is loaded now as well.
        sources = self.lay_out([Sentence(np.full(1, self._source_pad_id, np.int32))] * self.programs.parts)
        for size in sizes:
            for _ in self._small.search(tuple(params), sources, size, n_best=n_best):
                pass
        return len(sizes)

    def search_all(
        self, sentences: Sequence[Sentence], *, n_best: int, params: Sequence[Any]
    ) -> Iterator[tuple[int, SearchResult]]:
        """Yields each sentence's index and hypotheses [N, ...], the longest sources roughly first.

        If the device runs out of memory, this call and all later ones use smaller batches.

        Args:
          params: the parameters of each model.

        Raises:
          UserError: the device runs out of memory with the smallest batch.
        """

        def search(indices: Sequence[int], batch_tokens: int) -> Iterator[tuple[int, SearchResult]]:
            chosen = [sentences[index] for index in indices]
            return self._search_twice(chosen, n_best, tuple(params), batch_tokens)

        yield from self.budget.run_all(search, len(sentences))

    def _search_twice(
        self, sentences: Sequence[Sentence], n_best: int, params: tuple[Any, ...], batch_tokens: int
    ) -> Iterator[tuple[int, SearchResult]]:
        """Searches with the default capacity, then with full capacity the sentences that exceed it."""
        width = search_width(self.options, n_best)
        exceeding = []
        sizes = SizeRule(self.lengths, width, batch_tokens)
        for index, result in self._search_once(sentences, n_best, params, sizes):
            if result.lengths[0] == OVER_CAPACITY:
                exceeding.append(index)
            else:
                yield index, result
        repeated = [sentences[index] for index in exceeding]
        full = SizeRule(self.lengths, width, batch_tokens, full=True)
        for position, result in self._search_once(repeated, n_best, params, full):
            yield exceeding[position], result

    def _search_once(
        self, sentences: Sequence[Sentence], n_best: int, params: tuple[Any, ...], sizes: SizeRule
    ) -> Iterator[tuple[int, SearchResult]]:
        """Searches once; the lengths of sentences that exceed the capacity are OVER_CAPACITY."""
        if calls := self._plan_small_input(sentences, sizes):
            return self._search_small_input(sentences, calls, n_best, params)
        return self._search(sentences, n_best, params, sizes)

    def _search(
        self, sentences: Sequence[Sentence], n_best: int, params: tuple[Any, ...], sizes: SizeRule
    ) -> Iterator[tuple[int, SearchResult]]:
        """Searches any number of sentences, with or without constraints, by continuous batching."""
        if not sentences:
            return
        lengths = [len(sentence.source) for sentence in sentences]
        needed = [max(sentence.shortest, self._min_length(sentence)) for sentence in sentences]
        fixed = [sentence.fixed for sentence in sentences]
        for group in group_by_need(lengths, needed, fixed, sizes, parts=self.programs.parts):
            scheduler = Scheduler(
                self.programs,
                params,
                self.lay_out([sentences[index] for index in group.indices]),
                lengths=[lengths[index] for index in group.indices],
                needed=group.needed,
                sizes=sizes,
                block_tokens=sizes.batch_tokens // _BLOCKS,
                n_best=n_best,
            )
            for position, result in scheduler.run():
                yield group.indices[position], result

    def _plan_small_input(
        self, sentences: Sequence[Sentence], sizes: SizeRule
    ) -> list[tuple[list[int], SmallSize]]:
        """Returns the program calls of a small input; [] if it is not small, or has constraints."""
        if self._small is None or not sentences:
            return []
        for one in sentences:
            limit = self.lengths.limit(len(one.source))
            if one.prefix or one.prefix_ends_word or one.required or one.shortest > limit:
                return []
        lengths = [len(sentence.source) for sentence in sentences]
        return plan_small_input(lengths, sizes, parts=self.programs.parts)

    def _search_small_input(
        self,
        sentences: Sequence[Sentence],
        calls: Sequence[tuple[list[int], SmallSize]],
        n_best: int,
        params: tuple[Any, ...],
    ) -> Iterator[tuple[int, SearchResult]]:
        assert self._small is not None
        for indices, size in calls:
            sources = self.lay_out([sentences[index] for index in indices])
            for number, result in self._small.search(params, sources, size, n_best=n_best):
                yield indices[number], result

    @property
    def longest_target(self) -> int | None:
        """The maximum number of target tokens for which all models have positions; None: unlimited."""
        return self.lengths.longest_target

    def check(self, sentence: Sentence, name: str) -> None:
        """Raises UserError if no translation can satisfy the constraints; the message begins with `name`."""
        if self._candidates is not None:
            self._candidates.check(sentence.source, sentence.required, name)
        if self.longest_target is not None and sentence.shortest > self.longest_target:
            raise UserError(
                f"{name} has {sentence.shortest - 1} tokens of prefix and required phrases, but the model "
                f"has positions for {self.longest_target}, end symbol included; shorten them"
            )
        if both := set(self._symbols.never) & set(itertools.chain(*sentence.required)):
            raise UserError(
                f"{name} requires a phrase with the suppressed token {min(both)}; change the phrase, "
                "or allow the token"
            )

    def lay_out(self, sentences: Sequence[Sentence]) -> Sources:
        """Returns arrays with one row per sentence, and a last row for padding."""
        # Attention needs at least one position, also in the padding row.
        lengths = np.array([*(len(sentence.source) for sentence in sentences), 1])
        ids = np.full((len(lengths), lengths.max()), self._source_pad_id, np.int32)
        mask = np.arange(lengths.max()) < lengths[:, None]
        for row, sentence in enumerate(sentences):
            ids[row, : lengths[row]] = sentence.source
        return Sources(ids, mask, self._make_lines(sentences))

    def _make_lines(self, sentences: Sequence[Sentence]) -> Lines:
        """Returns the search inputs of each row; a field that no sentence uses is None and not compiled."""
        options, rows = self.options, len(sentences) + 1
        limits = np.zeros(rows, np.int32)  # the padding row keeps 0 and is therefore not searched
        for row, sentence in enumerate(sentences):
            limits[row] = self.lengths.limit(len(sentence.source), sentence.shortest)
        lines = Lines(max_lengths=limits)
        if self.lengths.learned is not None and options.method == "beam":
            likely = np.zeros(rows, np.int32)
            for row, sentence in enumerate(sentences):
                needed = max(sentence.shortest, self._min_length(sentence))
                likely[row] = self.lengths.likely(len(sentence.source), needed)
            lines = lines._replace(likely_lengths=likely)
        if self._candidates is not None:
            inputs = [(sentence.source, sentence.required) for sentence in sentences]
            lines = lines._replace(shortlist=self._candidates.lay_out(inputs))
        least = [max(sentence.least, self._min_length(sentence)) for sentence in sentences]
        if any(number > 1 for number in least):
            lines = lines._replace(min_lengths=np.array([*least, 0], np.int32))
        if options.method == "sample":
            seeds = np.zeros(rows, np.uint32)
            for row, sentence in enumerate(sentences):  # a function of the sentence, not of its row
                seed = zlib.crc32(np.asarray(sentence.stream, np.int64).tobytes(), options.seed)
                seeds[row] = zlib.crc32(np.asarray(sentence.source, np.int32).tobytes(), seed)
            lines = lines._replace(seeds=seeds)
        prefix_lengths = (len(sentence.prefix) + sentence.prefix_ends_word for sentence in sentences)
        if longest := max(prefix_lengths, default=0):
            # At least one position is left for the token after a prefix.
            width = min(round_up(longest), (self.longest_target or longest * 2) - 1)
            prefixes = np.full((rows, width), NO_TOKEN, np.int32)
            for row, sentence in enumerate(sentences):
                prefixes[row, : len(sentence.prefix)] = sentence.prefix
                if sentence.prefix_ends_word and len(sentence.prefix) < width:
                    prefixes[row, len(sentence.prefix)] = WORD_START
            lines = lines._replace(prefixes=prefixes)
        if phrases := [phrase for sentence in sentences for phrase in sentence.required]:
            max_count = max(len(sentence.required) for sentence in sentences)
            shape = (rows, round_up(max_count), round_up(max(map(len, phrases))))
            required = np.full(shape, NO_TOKEN, np.int32)
            for row, sentence in enumerate(sentences):
                for number, phrase in enumerate(sentence.required):
                    required[row, number, : len(phrase)] = phrase
            lines = lines._replace(required=required)
        return lines

    def _min_length(self, sentence: Sentence) -> int:
        """Returns the number of tokens that the search options require of a translation."""
        ratio, offset = self.options.min_length_ratio, self.options.min_length_offset
        return int(ratio * len(sentence.source) + offset)


def _longest_target(configs: Sequence[ModelConfig], longest_source: int) -> int | None:
    limits = []
    for config in configs:
        if config.longest_input is not None:
            shared = config.architecture == "decoder_only"  # source and target share the positions
            limits.append(max(1, config.longest_input - longest_source * shared))
    return min(limits, default=None)
