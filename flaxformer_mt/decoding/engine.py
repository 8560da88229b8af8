"""From sentences of ids to hypotheses of ids.

Row 12 of the data path. Owns the lengths that a search may reach, what is asked of each sentence, and how
many are searched at a time. Knows nothing of text, of files, or of how a network or a search works.
"""

import dataclasses
import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flaxformer_mt.config import ModelConfig, SearchConfig
from flaxformer_mt.decoding.compiled_programs import SearchPrograms, Sources
from flaxformer_mt.decoding.scheduler import Flow
from flaxformer_mt.decoding.sizes import (
    SHORTEST,
    round_down_finely,
    round_up,
    round_up_coarsely,
    round_up_finely,
)
from flaxformer_mt.errors import UserError
from flaxformer_mt.search import (
    NO_TOKEN,
    OUTGROWN,
    Lines,
    SearchResult,
    Size,
    Symbols,
    search_width,
)

# So many blocks of sources hold the tokens of a batch. They are sorted: the smaller a block, the less of it
# is padding, and the less there is to do at a time.
_BLOCKS = 16

# Limits are for the worst case. At first there is room for this share of one, or for a few tokens more than
# the source has, and so for more rows at a time; the few lines that need more are searched again with all.
_USUAL_SHARE, _USUAL_EXTRA = 0.6, 8


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


class SentenceSearch:
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
    ) -> None:
        """Makes the networks.

        Args:
          models: one, or the members of an ensemble.
          symbols: of the target vocabulary.
          sizes: of the source and the target vocabulary.
          longest_source: in tokens, with eos; none is longer.
          spread: every local device searches a part of each batch, as large as if it were alone; parameters
            come from `place_locally`.
        """
        self.options = options
        self._symbols = symbols
        self._source_pad_id = source_pad_id
        self._longest_source = longest_source
        self._configs = tuple(dataclasses.replace(model, scan_layers=False) for model in models)
        self.programs = SearchPrograms(self._configs, options, symbols, sizes=sizes, spread=spread)

    def search_all(
        self, sentences: Sequence[Sentence], *, n_best: int, params: Sequence[Any]
    ) -> Iterator[tuple[int, SearchResult]]:
        """Each sentence's index and its hypotheses [N, ...], roughly from the longest source to the shortest.

        Args:
          params: of each model.
        """
        again = []
        for index, found in self._search(sentences, n_best, tuple(params), whole=False):
            if found.lengths[0] == OUTGROWN:
                again.append(index)
            else:
                yield index, found
        rest = [sentences[index] for index in again]
        for place, found in self._search(rest, n_best, tuple(params), whole=True):
            yield again[place], found

    def _search(
        self, sentences: Sequence[Sentence], n_best: int, params: tuple[Any, ...], *, whole: bool
    ) -> Iterator[tuple[int, SearchResult]]:
        """`search_all`, with OUTGROWN lengths for what needs more than the usual room."""
        if not sentences:
            return

        def size_of(indices: Sequence[int]) -> Size:
            # What outgrows the usual room is little, and differs from window to window: it gets one size.
            some = sentences if whole else [sentences[index] for index in indices]
            return self.size_of(some, n_best, whole=whole)

        flow = Flow(
            self.programs,
            params,
            self._lay_out(sentences),
            lengths=[len(sentence.source) for sentence in sentences],
            size_of=size_of,
            block_tokens=self.options.batch_tokens // _BLOCKS,
            n_best=n_best,
        )
        yield from flow.run()

    def size_of(self, sentences: Sequence[Sentence], n_best: int, *, whole: bool = False) -> Size:
        """What state some sentences are searched in, with as many rows a device as batch_tokens hold.

        Args:
          whole: there is to be room for all tokens that a translation may have, not for the usual number.
        """
        longest = max(len(sentence.source) for sentence in sentences)
        source_length = round_up(max(longest, SHORTEST))
        room = self._room_of(longest, whole=whole)
        if whole:  # sources of different lengths have one size where they have the same room
            source_length = max(round_up_coarsely(max(longest, SHORTEST)), room // 2)
        source_length = min(source_length, self._longest_source)
        beam_tokens = search_width(self.options, n_best) * room
        rows = round_down_finely(max(1, self.options.batch_tokens // (source_length + beam_tokens)))
        needed = max(sentence.shortest for sentence in sentences)
        return Size(rows, source_length, self._room_of(longest, needed, whole=whole))

    def limit_of(self, source_length: int, needed: int = 0) -> int:
        """The longest translation of a source, both counted with eos, where it `needed` is no more."""
        limit = int(self.options.max_length_ratio * source_length + self.options.max_length_offset)
        limit = max(1, needed, limit)
        return limit if self.longest_target is None else min(limit, self.longest_target)

    def _room_of(self, source_length: int, needed: int = 0, *, whole: bool) -> int:
        """For how many tokens of a translation there is room, mostly a number of the ladder."""
        limit = self.limit_of(source_length, needed)
        usual = max(needed, int(_USUAL_SHARE * limit), source_length + _USUAL_EXTRA)
        room = limit if whole else min(limit, usual)
        room = (round_up_coarsely if whole else round_up_finely)(room)
        return room if self.longest_target is None else min(room, self.longest_target)

    @property
    def longest_target(self) -> int | None:
        """The most tokens that every model has positions for; None: no bound."""
        longest = []
        for config in self._configs:
            if config.longest_input is not None:
                shared = config.architecture == "decoder_only"  # source and target share the positions
                longest.append(max(1, config.longest_input - self._longest_source * shared))
        return min(longest, default=None)

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
            limits[row] = self.limit_of(len(sentence.source), sentence.shortest)
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
