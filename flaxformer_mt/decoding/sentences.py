"""Sentences as inputs of a search: what constrains each translation, and the arrays that programs take."""

import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.decoding.ensemble_members import Sources
from flaxformer_mt.decoding.sizes import CANDIDATES_PER_TOKEN, LengthRule, round_up_coarsely
from flaxformer_mt.errors import UserError
from flaxformer_mt.search import NO_TOKEN, WORD_START, Lines, Shortlists, Symbols
from flaxformer_mt.vocab.shortlist import Shortlist

# The candidates of a shorter source are as many as those of a source of this length.
_SHORTEST = 8


class Candidates:
    """Finds the candidates of sentences, without tokens that are never chosen.

    shortlists: the candidates of all sentences, as the search takes them.
    """

    def __init__(self, shortlist: Shortlist, symbols: Symbols, size: int, *, longest_source: int) -> None:
        """Store the rules; `size` is that of the target vocabulary."""
        self._shortlist = shortlist
        self._longest_source = longest_source
        banned = {token for token in symbols.banned if token < size}
        common = [token for token in shortlist.common.tolist() if token not in {*banned, symbols.eos_id}]
        self.shortlists = Shortlists(np.array([symbols.eos_id, *common], np.int32), size)
        # Tokens that a sentence's own candidates do not contain.
        self._left_out = np.zeros(size, bool)
        self._left_out[[*banned, *self.shortlists.common]] = True

    def find(self, source: np.ndarray, required: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the candidates of a sentence, most probable first: ids plus 1; 0 is for padding."""
        found = self._shortlist.find(source)
        if required:
            found = np.concatenate([*map(np.array, required), found])
        found = found[~self._left_out[found]]
        _, first = np.unique(found, return_index=True)
        return found[np.sort(first)][: self._room(source)] + 1

    def check(self, source: np.ndarray, required: Sequence[Sequence[int]], name: str) -> None:
        """Raise UserError if the required phrases have more different tokens than a shortlist."""
        different, room = len(set(itertools.chain(*required))), self._room(source)
        if different > room:
            raise UserError(
                f"{name} requires phrases of {different} different tokens, but the shortlist of its source "
                f"has room for {room}; shorten the phrases, or translate without --shortlist"
            )

    def _room(self, source: np.ndarray) -> int:
        return CANDIDATES_PER_TOKEN * min(max(len(source), _SHORTEST), self._longest_source)


@dataclass(frozen=True)
class Sentence:
    """A source and the constraints on its translation; all ids are without bos.

    source: token ids, the last one is eos. prefix: of the translation, without eos. required: phrases of the
    translation, without eos. least: the minimum number of tokens of the translation, with eos; the search
    options may require more. prefix_ends_word: whether the token after the prefix begins a word or ends the
    translation. stream: distinguishes the random numbers of equal sources, such as the number of the line.
    """

    source: np.ndarray
    prefix: tuple[int, ...] = ()
    required: tuple[tuple[int, ...], ...] = ()
    least: int = 1
    prefix_ends_word: bool = False
    stream: tuple[int, ...] = ()

    @property
    def shortest(self) -> int:
        """The minimum number of tokens, with eos, of a translation that satisfies the constraints."""
        return max(self.least, len(self.prefix) + sum(map(len, self.required)) + 1)


class Form(NamedTuple):
    """What the programs for some sentences have inputs for: the sizes of their constraints; 0: none.

    prefix: number of tokens. phrases, phrase: number of required phrases, and of tokens of each. minimum:
    whether translations have a minimum length.
    """

    prefix: int = 0
    phrases: int = 0
    phrase: int = 0
    minimum: bool = False


class SentenceArrays:
    """Lays out sentences as the arrays of programs, for one set of search options."""

    def __init__(
        self,
        options: SearchConfig,
        lengths: LengthRule,
        *,
        source_pad_id: int,
        candidates: Candidates | None = None,
    ) -> None:
        """Store what all sentences have in common; `candidates` are those of shortlists."""
        self._options, self._lengths = options, lengths
        self._pad_id, self._candidates = source_pad_id, candidates

    def needed(self, sentence: Sentence) -> int:
        """Return the minimum number of tokens of a translation, by its constraints and the options."""
        return max(sentence.shortest, self._min_length(sentence))

    def find_form(self, sentences: Sequence[Sentence]) -> Form:
        """Return the form with inputs for the constraints of all sentences, rounded up so that it recurs."""
        prefix = max((len(one.prefix) + one.prefix_ends_word for one in sentences), default=0)
        if prefix:  # at least one position is left for the token after a prefix
            prefix = min(round_up_coarsely(prefix), (self._lengths.longest_target or prefix * 2) - 1)
        phrases = [phrase for one in sentences for phrase in one.required]
        most = max((len(one.required) for one in sentences), default=0)
        minimum = any(max(one.least, self._min_length(one)) > 1 for one in sentences)
        if not phrases:
            return Form(prefix, minimum=minimum)
        return Form(prefix, round_up_coarsely(most), round_up_coarsely(max(map(len, phrases))), minimum)

    def lay_out(
        self, sentences: Sequence[Sequence[Sentence]], form: Form, *, rows: int, source_length: int
    ) -> Sources:
        """Return the arrays of the sentences of all parts, part after part, with `rows` rows each.

        Rows without a sentence have a limit of 0, which is not searched, and one position to attend to.
        """
        placed = [
            (part * rows + row, one) for part, own in enumerate(sentences) for row, one in enumerate(own)
        ]

        def fill(
            find: Callable[[Sentence], Any], *shape: int, blank: int = 0, dtype: Any = np.int32
        ) -> np.ndarray:
            """Return an array of `shape` for each row: what `find` returns for its sentence, then blanks."""
            filled = np.full((rows * len(sentences), *shape), blank, dtype)
            for row, one in placed:
                found = find(one)
                if shape:
                    filled[row, : len(found)] = found
                else:
                    filled[row] = found
            return filled

        limits, options, candidates = self._lengths, self._options, self._candidates
        lines = Lines(max_lengths=fill(lambda one: limits.limit(len(one.source), one.shortest)))
        if limits.learned is not None and options.method == "beam":
            likely = fill(lambda one: limits.likely(len(one.source), self.needed(one)))
            lines = lines._replace(likely_lengths=likely)
        if options.method == "sample":
            lines = lines._replace(seeds=fill(self._find_seed, dtype=np.uint32))
        if form.minimum:
            least = fill(lambda one: max(one.least, self._min_length(one)))
            lines = lines._replace(min_lengths=least)
        if form.prefix:
            prefixes = fill(
                lambda one: [*one.prefix, *[WORD_START] * one.prefix_ends_word][: form.prefix],
                form.prefix,
                blank=NO_TOKEN,
            )
            lines = lines._replace(prefixes=prefixes)
        if form.phrases:
            required = fill(
                lambda one: _pad_phrases(one, form.phrase), form.phrases, form.phrase, blank=NO_TOKEN
            )
            lines = lines._replace(required=required)
        if candidates is not None:
            room = CANDIDATES_PER_TOKEN * source_length
            listed = fill(lambda one: candidates.find(one.source, one.required), room)
            lines = lines._replace(shortlist=listed)
        lengths = np.maximum(1, fill(lambda one: len(one.source)))
        mask = np.arange(source_length) < lengths[:, None]
        return Sources(fill(lambda one: one.source, source_length, blank=self._pad_id), mask, lines)

    def _find_seed(self, sentence: Sentence) -> int:
        """Return a seed that is a function of the sentence, not of its row."""
        seed = zlib.crc32(np.asarray(sentence.stream, np.int64).tobytes(), self._options.seed)
        return zlib.crc32(np.asarray(sentence.source, np.int32).tobytes(), seed)

    def _min_length(self, sentence: Sentence) -> int:
        """Return the number of tokens that the search options require of a translation."""
        ratio, offset = self._options.min_length_ratio, self._options.min_length_offset
        return int(ratio * len(sentence.source) + offset)


def _pad_phrases(sentence: Sentence, length: int) -> np.ndarray:
    padding = [NO_TOKEN] * length
    return np.reshape([[*phrase, *padding][:length] for phrase in sentence.required], (-1, length))
