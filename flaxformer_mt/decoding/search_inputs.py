"""Sentences as inputs of a search: the constraints on each translation, and the arrays for the programs."""

import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.decoding.ensemble_members import Sources
from flaxformer_mt.decoding.state_sizes import CANDIDATES_PER_TOKEN, LengthRule, round_up_coarsely
from flaxformer_mt.errors import UserError
from flaxformer_mt.search import NO_TOKEN, WORD_START, Lines, Shortlists, Symbols
from flaxformer_mt.vocab.shortlist import Shortlist

# The candidates of a shorter source are as many as those of a source of this length.
_SHORTEST = 8


class Candidates:
    """Selects the tokens that each translation may use; `shortlists`: those that all translations may use."""

    def __init__(self, shortlist: Shortlist, symbols: Symbols, size: int, *, longest_source: int) -> None:
        """`size`: number of entries of the target vocabulary."""
        self._shortlist = shortlist
        self._longest_source = longest_source
        banned = {token for token in symbols.banned if token < size}
        common = [token for token in shortlist.common.tolist() if token not in {*banned, symbols.eos_id}]
        self.shortlists = Shortlists(np.array([symbols.eos_id, *common], np.int32), size)
        # Tokens that a sentence's own candidates do not contain.
        self._left_out = np.zeros(size, bool)
        self._left_out[[*banned, *self.shortlists.common]] = True

    def find(self, source: np.ndarray, required: Sequence[Sequence[int]]) -> np.ndarray:
        """Return id + 1 (0 is padding) of a sentence's own candidates: first required, then likely ones."""
        found = self._shortlist.find(source)
        if required:
            found = np.concatenate([*map(np.array, required), found])
        found = found[~self._left_out[found]]
        _, first = np.unique(found, return_index=True)
        return found[np.sort(first)][: self._room(source)] + 1

    def check(self, source: np.ndarray, required: Sequence[Sequence[int]], name: str) -> None:
        """Raise UserError if the required phrases have more distinct tokens than a shortlist has entries."""
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

    source: token ids, ending in eos. prefix: the ids that the translation begins with, without eos. required:
    ids of phrases that the translation contains, without eos. least: the minimum number of tokens of the
    translation, with eos; the search options may require more. prefix_ends_word: whether the token after the
    prefix begins a word or ends the translation. stream: the number of the line, and of the part in the line;
    gives equal sources different samples.
    """

    source: np.ndarray
    prefix: tuple[int, ...] = ()
    required: tuple[tuple[int, ...], ...] = ()
    least: int = 1
    prefix_ends_word: bool = False
    stream: tuple[int, ...] = ()

    @functools.cached_property
    def shortest(self) -> int:
        """The minimum number of tokens, with eos, of a translation that satisfies the constraints."""
        return max(self.least, len(self.prefix) + sum(map(len, self.required)) + 1)


class Form(NamedTuple):
    """The maximum numbers of constraints in the inputs of a program; 0: none.

    prefix: number of tokens. phrases, phrase: number of required phrases, and number of tokens of each.
    minimum: whether translations have a minimum length.
    """

    prefix: int = 0
    phrases: int = 0
    phrase: int = 0
    minimum: bool = False


class SentenceArrays:
    """Converts sentences to the input arrays of programs, for one set of search options."""

    def __init__(
        self,
        options: SearchConfig,
        lengths: LengthRule,
        *,
        source_pad_id: int,
        candidates: Candidates | None = None,
    ) -> None:
        """Store what all sentences share; `candidates` is None without shortlists."""
        self._options, self._lengths = options, lengths
        self._pad_id, self._candidates = source_pad_id, candidates

    def find_need(self, sentence: Sentence) -> tuple[int, int]:
        """Return the source length and the minimum target length, which determine the size of the state."""
        length = len(sentence.source)
        return length, max(sentence.shortest, self._min_length(length))

    def find_form(self, sentences: Sequence[Sentence]) -> Form:
        """Return the form with room for all sentences' constraints, rounded up so that few forms exist."""
        prefix = max((len(one.prefix) + one.prefix_ends_word for one in sentences), default=0)
        if prefix:  # at least one position is left for the token after a prefix
            prefix = min(round_up_coarsely(prefix), (self._lengths.longest_target or prefix * 2) - 1)
        most = max((len(one.required) for one in sentences), default=0)
        minimum = any(max(one.least, self._min_length(len(one.source))) > 1 for one in sentences)
        form = Form(prefix, minimum=minimum)
        if not most:
            return form
        longest = max(len(phrase) for one in sentences for phrase in one.required)
        return form._replace(phrases=round_up_coarsely(most), phrase=round_up_coarsely(longest))

    def lay_out(
        self, sentences: Sequence[Sequence[Sentence]], form: Form, *, rows: int, source_length: int
    ) -> Sources:
        """Put each list of sentences into `rows` rows of the input arrays; unused rows have max_lengths 0."""
        total = rows * len(sentences)
        every = [one for own in sentences for one in own]
        places = np.concatenate([part * rows + np.arange(len(own)) for part, own in enumerate(sentences)])

        def fill(values: Iterable[Any], *shape: int, blank: int = 0, dtype: Any = np.int32) -> np.ndarray:
            """Return an array [total, *shape]: each sentence's value in its row, padded with `blank`."""
            filled = np.full((total, *shape), blank, dtype)
            if not shape:
                filled[places] = np.fromiter(values, dtype, len(every))
                return filled
            for row, value in zip(places, values, strict=True):
                filled[row, : len(value)] = value
            return filled

        ids = fill((one.source for one in every), source_length, blank=self._pad_id)
        mask = np.arange(source_length) < fill(len(one.source) for one in every)[:, None]
        mask[:, :1] = True
        limits, options, candidates = self._lengths, self._options, self._candidates
        limit, likely = functools.cache(limits.limit), functools.cache(limits.likely)
        lines = Lines(max_lengths=fill(limit(len(one.source), one.shortest) for one in every))
        if limits.learned is not None and options.method == "beam":
            lines = lines._replace(likely_lengths=fill(likely(*self.find_need(one)) for one in every))
        if options.method == "sample":
            lines = lines._replace(seeds=fill(map(self._find_seed, every), dtype=np.uint32))
        if form.minimum:
            least = fill(max(one.least, self._min_length(len(one.source))) for one in every)
            lines = lines._replace(min_lengths=least)
        if form.prefix:
            prefixes = ([*one.prefix, *[WORD_START] * one.prefix_ends_word][: form.prefix] for one in every)
            lines = lines._replace(prefixes=fill(prefixes, form.prefix, blank=NO_TOKEN))
        if form.phrases:
            required = (_pad_phrases(one, form.phrase) for one in every)
            lines = lines._replace(required=fill(required, form.phrases, form.phrase, blank=NO_TOKEN))
        if candidates is not None:
            listed = (candidates.find(one.source, one.required) for one in every)
            lines = lines._replace(shortlist=fill(listed, CANDIDATES_PER_TOKEN * source_length))
        return Sources(ids, mask, lines)

    def _find_seed(self, sentence: Sentence) -> int:
        """Return a hash of search.seed and the sentence, not of its row: different seeds share no sample."""
        known = json.dumps([self._options.seed, sentence.stream, sentence.source.tolist()])
        return int.from_bytes(hashlib.blake2b(known.encode(), digest_size=4).digest(), "big")

    def _min_length(self, source_length: int) -> int:
        """Return the minimum number of tokens that the search options require of a translation."""
        return int(self._options.min_length_ratio * source_length + self._options.min_length_offset)


def _pad_phrases(sentence: Sentence, length: int) -> np.ndarray:
    padding = [NO_TOKEN] * length
    return np.reshape([[*phrase, *padding][:length] for phrase in sentence.required], (-1, length))
