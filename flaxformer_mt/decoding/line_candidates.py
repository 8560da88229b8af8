"""The candidates of a sentence's shortlist, by the rules of vocab/shortlist.py."""

import itertools
from collections.abc import Sequence

import numpy as np

from flaxformer_mt.decoding.sizes import CANDIDATES_PER_TOKEN
from flaxformer_mt.errors import UserError
from flaxformer_mt.search import Shortlists, Symbols
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
