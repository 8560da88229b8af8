"""Sentences as inputs of a search: what constrains each translation, and the arrays that programs take.

Row 12 of the data path.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.decoding.ensemble_members import Sources
from flaxformer_mt.decoding.line_candidates import Candidates
from flaxformer_mt.decoding.sizes import CANDIDATES_PER_TOKEN, LengthRule, round_up_coarsely
from flaxformer_mt.search import NO_TOKEN, WORD_START, Lines


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
        return max(self.least, self.fixed)

    @property
    def fixed(self) -> int:
        """The number of tokens of the prefix and the required phrases, with eos."""
        return len(self.prefix) + sum(map(len, self.required)) + 1


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
        total = rows * len(sentences)
        placed = [
            (part * rows + row, one) for part, own in enumerate(sentences) for row, one in enumerate(own)
        ]
        ids = np.full((total, source_length), self._pad_id, np.int32)
        lengths = np.ones(total, np.int32)
        for row, one in placed:
            ids[row, : len(one.source)] = one.source
            lengths[row] = len(one.source)
        mask = np.arange(source_length) < lengths[:, None]
        lines = Lines(max_lengths=np.zeros(total, np.int32))
        for row, one in placed:
            lines.max_lengths[row] = self._lengths.limit(len(one.source), one.shortest)
        if self._lengths.learned is not None and self._options.method == "beam":
            likely = np.zeros(total, np.int32)
            for row, one in placed:
                likely[row] = self._lengths.likely(len(one.source), self.needed(one))
            lines = lines._replace(likely_lengths=likely)
        if self._options.method == "sample":
            lines = lines._replace(seeds=self._draw_seeds(total, placed))
        if form.minimum:
            least = np.zeros(total, np.int32)
            for row, one in placed:
                least[row] = max(one.least, self._min_length(one))
            lines = lines._replace(min_lengths=least)
        if self._candidates is not None:
            found = self._candidates.lay_out([(one.source, one.required) for _, one in placed])
            listed = np.zeros((total, CANDIDATES_PER_TOKEN * source_length), np.int32)
            for (row, _), own in zip(placed, found, strict=True):
                listed[row, : len(own)] = own
            lines = lines._replace(shortlist=listed)
        return Sources(ids, mask, _add_constraints(lines, placed, form))

    def _draw_seeds(self, total: int, placed: list[tuple[int, Sentence]]) -> np.ndarray:
        """Return the seed of each row: a function of its sentence, not of the row."""
        seeds = np.zeros(total, np.uint32)
        for row, one in placed:
            seed = zlib.crc32(np.asarray(one.stream, np.int64).tobytes(), self._options.seed)
            seeds[row] = zlib.crc32(np.asarray(one.source, np.int32).tobytes(), seed)
        return seeds

    def _min_length(self, sentence: Sentence) -> int:
        """Return the number of tokens that the search options require of a translation."""
        ratio, offset = self._options.min_length_ratio, self._options.min_length_offset
        return int(ratio * len(sentence.source) + offset)


def _add_constraints(lines: Lines, placed: list[tuple[int, Sentence]], form: Form) -> Lines:
    total = len(np.asarray(lines.max_lengths))
    if form.prefix:
        prefixes = np.full((total, form.prefix), NO_TOKEN, np.int32)
        for row, one in placed:
            prefixes[row, : len(one.prefix)] = one.prefix
            if one.prefix_ends_word and len(one.prefix) < form.prefix:
                prefixes[row, len(one.prefix)] = WORD_START
        lines = lines._replace(prefixes=prefixes)
    if form.phrases:
        required = np.full((total, form.phrases, form.phrase), NO_TOKEN, np.int32)
        for row, one in placed:
            for number, phrase in enumerate(one.required):
                required[row, number, : len(phrase)] = phrase
        lines = lines._replace(required=required)
    return lines
