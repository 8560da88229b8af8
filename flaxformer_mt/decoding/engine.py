"""From sentences of ids to hypotheses of ids.

Row 12 of the data path. Owns the lengths that a search may reach, what is asked of each sentence, and how
many are searched at a time. Knows nothing of text, of files, or of how a network or a search works.
"""

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flaxformer_mt.config import ModelConfig, SearchConfig
from flaxformer_mt.decoding.compiled_programs import SearchPrograms, Sources
from flaxformer_mt.decoding.scheduler import Flow
from flaxformer_mt.decoding.memory_backoff import TokenBudget
from flaxformer_mt.decoding.sizes import LengthRule, SizeRule, round_up
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.search import (
    NO_TOKEN,
    OVER_CAPACITY,
    Lines,
    SearchResult,
    Symbols,
    search_width,
)

# So many blocks of sources hold the tokens of a batch. They are sorted: the smaller a block, the less of it
# is padding, and the less there is to do at a time.
_BLOCKS = 16


@dataclass(frozen=True)
class Sentence:
    """A source, and what its translation has to be like; all ids without bos."""

    # Ends in eos.
    source: np.ndarray
    # What the translation starts with, without eos.
    prefix: tuple[int, ...] = ()
    # What it contains, without eos.
    required: tuple[tuple[int, ...], ...] = ()
    # How many tokens it has at least, with eos, whatever the options say.
    least: int = 1

    @property
    def shortest(self) -> int:
        """How many tokens a translation needs that does as it is told, with eos."""
        return max(self.least, len(self.prefix) + sum(map(len, self.required)) + 1)


class SearchEngine:
    """Searches translations of sentences with one model, or with several of one vocabulary.

    Compiles a program once for each size; other parameters of the same shapes need no compilation.
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
        spread: bool = False,
        warn: Callable[[str], None] = warn_user,
    ) -> None:
        """Makes the networks.

        Args:
          models: one, or the members of an ensemble.
          symbols: of the target vocabulary.
          sizes: of the source and the target vocabulary.
          longest_source: in tokens, with eos; none is longer.
          spread: every local device searches a part of each batch, as large as if it were alone; parameters
            come from `replicate_locally`.
          warn: is told once that the device has too little memory for options.batch_tokens.
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
        )
        self.programs = SearchPrograms(self._configs, options, symbols, sizes=sizes, spread=spread)

    def search_all(
        self, sentences: Sequence[Sentence], *, n_best: int, params: Sequence[Any]
    ) -> Iterator[tuple[int, SearchResult]]:
        """Each sentence's index and its hypotheses [N, ...], roughly from the longest source to the shortest.

        When the device runs out of memory, this call and all that follow use smaller batches.

        Args:
          params: of each model.

        Raises:
          UserError: the device has no memory for the smallest of batches.
        """

        def search(indices: Sequence[int], batch_tokens: int) -> Iterator[tuple[int, SearchResult]]:
            chosen = [sentences[index] for index in indices]
            return self._search_twice(chosen, n_best, tuple(params), batch_tokens)

        yield from self.budget.run_all(search, len(sentences))

    def _search_twice(
        self, sentences: Sequence[Sentence], n_best: int, params: tuple[Any, ...], batch_tokens: int
    ) -> Iterator[tuple[int, SearchResult]]:
        """Searches with the default capacity, then again with full capacity what did not fit into it."""
        width = search_width(self.options, n_best)
        again = []
        for index, found in self._search(sentences, n_best, params, SizeRule(self.lengths, width, batch_tokens)):
            if found.lengths[0] == OVER_CAPACITY:
                again.append(index)
            else:
                yield index, found
        rest = [sentences[index] for index in again]
        full = SizeRule(self.lengths, width, batch_tokens, full=True)
        for place, found in self._search(rest, n_best, params, full):
            yield again[place], found

    def _search(
        self, sentences: Sequence[Sentence], n_best: int, params: tuple[Any, ...], sizes: SizeRule
    ) -> Iterator[tuple[int, SearchResult]]:
        """Searches once; sentences that need more than the capacity have the length OVER_CAPACITY."""
        if not sentences:
            return
        flow = Flow(
            self.programs,
            params,
            self._lay_out(sentences),
            lengths=[len(sentence.source) for sentence in sentences],
            needed=[sentence.shortest for sentence in sentences],
            sizes=sizes,
            block_tokens=sizes.batch_tokens // _BLOCKS,
            n_best=n_best,
        )
        yield from flow.run()

    @property
    def longest_target(self) -> int | None:
        """The most tokens that every model has positions for; None: no bound."""
        return self.lengths.longest_target

    def check(self, sentence: Sentence, name: str) -> None:
        """Raises UserError if a sentence asks for what its translation cannot have; `name` is its own."""
        if self.longest_target is not None and sentence.shortest > self.longest_target:
            raise UserError(
                f"{name} has {sentence.shortest - 1} tokens of prefix and required phrases, but the model "
                f"has positions for {self.longest_target}, end symbol included; ask for less"
            )
        if suppressed := set(self._symbols.never) & set(itertools.chain(*sentence.required)):
            raise UserError(
                f"{name} requires a phrase with the suppressed token {min(suppressed)}; leave out the one or "
                "the other"
            )

    def _lay_out(self, sentences: Sequence[Sentence]) -> Sources:
        """Everything about the sentences, a row each, and one more row without a sentence."""
        lengths = np.array([len(sentence.source) for sentence in sentences])
        ids = np.full((len(sentences) + 1, lengths.max()), self._source_pad_id, np.int32)
        lasts = np.append(lengths, 1)  # where there is no sentence, there must be something to attend to
        mask = np.arange(lengths.max()) < lasts[:, None]
        for row, sentence in enumerate(sentences):
            ids[row, : lengths[row]] = sentence.source
        return Sources(ids, mask, self._make_lines(sentences))

    def _make_lines(self, sentences: Sequence[Sentence]) -> Lines:
        """What is asked of each row; what no sentence asks for is not in the compiled program."""
        options, rows = self.options, len(sentences) + 1
        limits = np.zeros(rows, np.int32)  # the last row stays at 0: it is not searched
        for row, sentence in enumerate(sentences):
            limits[row] = self.lengths.limit(len(sentence.source), sentence.shortest)
        lines = Lines(max_lengths=limits)
        ratio, offset = options.min_length_ratio, options.min_length_offset
        if ratio or offset or any(sentence.least > 1 for sentence in sentences):
            least = np.zeros(rows, np.int32)
            for row, sentence in enumerate(sentences):
                least[row] = max(sentence.least, int(ratio * len(sentence.source) + offset))
            lines = lines._replace(min_lengths=least)
        if options.method == "sample":
            seeds = np.zeros(rows, np.uint32)
            for row, sentence in enumerate(sentences):  # of the sentence, not of its place in the file
                seeds[row] = zlib.crc32(np.asarray(sentence.source, np.int32).tobytes(), options.seed)
            lines = lines._replace(seeds=seeds)
        if longest := max(len(sentence.prefix) for sentence in sentences):
            prefixes = np.full((rows, round_up(longest)), NO_TOKEN, np.int32)
            for row, sentence in enumerate(sentences):
                prefixes[row, : len(sentence.prefix)] = sentence.prefix
            lines = lines._replace(prefixes=prefixes)
        if phrases := [phrase for sentence in sentences for phrase in sentence.required]:
            most = max(len(sentence.required) for sentence in sentences)
            shape = (rows, round_up(most), round_up(max(map(len, phrases))))
            required = np.full(shape, NO_TOKEN, np.int32)
            for row, sentence in enumerate(sentences):
                for number, phrase in enumerate(sentence.required):
                    required[row, number, : len(phrase)] = phrase
            lines = lines._replace(required=required)
        return lines


def _longest_target(configs: Sequence[ModelConfig], longest_source: int) -> int | None:
    longest = []
    for config in configs:
        if config.longest_input is not None:
            shared = config.architecture == "decoder_only"  # source and target share the positions
            longest.append(max(1, config.longest_input - longest_source * shared))
    return min(longest, default=None)
