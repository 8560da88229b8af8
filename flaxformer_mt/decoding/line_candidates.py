"""The shortlists of sentences as arrays: candidates of each sentence besides those of all sentences.

Row 12 of the data path. vocab/shortlist.py contains the rules that find them.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from flaxformer_mt.decoding.sizes import CANDIDATES_PER_TOKEN, SHORTEST
from flaxformer_mt.errors import UserError
from flaxformer_mt.search import Shortlists, Symbols
from flaxformer_mt.vocab.shortlist import Shortlist

# A source, and the required phrases of its translation.
Input = tuple[np.ndarray, Sequence[Sequence[int]]]


class Candidates:
    """Lays out the candidates of sentences, without tokens that are never chosen.

    shortlists: the candidates of all sentences, as the search takes them.
    """

    def __init__(self, shortlist: Shortlist, symbols: Symbols, size: int, *, longest_source: int) -> None:
        """Stores the rules; `size` is that of the target vocabulary."""
        self._shortlist = shortlist
        self._longest_source = longest_source
        banned = {token for token in symbols.banned if token < size}
        common = [token for token in shortlist.common.tolist() if token not in {*banned, symbols.eos_id}]
        self.shortlists = Shortlists(np.array([symbols.eos_id, *common], np.int32), size)
        # Tokens that a sentence's own candidates do not contain.
        self._left_out = np.zeros(size, bool)
        self._left_out[[*banned, *self.shortlists.common]] = True

    def lay_out(self, inputs: Sequence[Input]) -> list[np.ndarray]:
        """Return the candidates of each sentence, most probable first: ids plus 1; 0 is for padding."""
        rows = []
        for source, required in inputs:
            found = self._shortlist.find(source)
            if required:
                found = np.concatenate([*map(np.array, required), found])
            found = found[~self._left_out[found]]
            _, first = np.unique(found, return_index=True)
            rows.append(found[np.sort(first)][: self._room(source)] + 1)
        return rows

    def check(self, source: np.ndarray, required: Sequence[Sequence[int]], name: str) -> None:
        """Raises UserError if the required phrases have more different tokens than a shortlist."""
        different, room = len(set(itertools.chain(*required))), self._room(source)
        if different > room:
            raise UserError(
                f"{name} requires phrases of {different} different tokens, but the shortlist of its source "
                f"has room for {room}; shorten the phrases, or translate without --shortlist"
            )

    def _room(self, source: np.ndarray) -> int:
        return CANDIDATES_PER_TOKEN * min(max(len(source), SHORTEST), self._longest_source)
