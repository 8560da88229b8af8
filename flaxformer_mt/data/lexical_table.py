"""Lexical translation probabilities of pieces, learned from a token store: the source of a shortlist.

Contains IBM model 1 (Brown et al. 1993): expectation maximization over the alignments of pieces. Memory is
bounded: the pairs are read in chunks, and rare combinations of pieces are given up if there are too many.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.data.token_store import Side, TokenStore
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import Vocabs
from flaxformer_mt.vocab.shortlist import Shortlist

# Combinations of a source and a target piece of one pair that are processed at a time.
_CHUNK_LINKS = 1 << 21

# Maximum number of different combinations in memory; above it, those that have occurred least are given up.
_MAX_LINKS = 30_000_000

# Maximum number of pairs; of more, evenly spaced ones are read.
_MAX_PAIRS = 500_000

# Passes of expectation maximization, after one that starts from equal probabilities.
_PASSES = 4


class LexicalTable(NamedTuple):
    """Probabilities of target pieces given source pieces, sorted by source and target id."""

    sources: np.ndarray
    targets: np.ndarray
    probabilities: np.ndarray


class _Links(NamedTuple):
    """All combinations of a source and a target piece of each pair, one after another."""

    # source id * target size + target id.
    keys: np.ndarray
    # Index of the target token within the chunk.
    tokens: np.ndarray


def learn_lexical_table(store: TokenStore, *, target_size: int) -> LexicalTable:
    """Estimates p(target piece | source piece) by IBM model 1, eos included.

    Of more than half a million pairs, as many evenly spaced ones are used.
    """
    pairs = np.unique(np.linspace(0, len(store) - 1, min(len(store), _MAX_PAIRS)).astype(np.int64))
    keys = _find_keys(store, pairs, target_size)
    weights = np.ones(len(keys))
    for _ in range(1 + _PASSES):
        sums = np.zeros(len(keys))
        for links in _read_links(store, pairs, target_size):
            places = np.searchsorted(keys, links.keys)
            known = keys[np.minimum(places, len(keys) - 1)] == links.keys
            places, tokens = places[known], links.tokens[known]
            shares = weights[places]
            totals = np.bincount(tokens, shares)
            np.divide(shares, totals[tokens], out=shares)
            sums += np.bincount(places, shares, minlength=len(keys))
        sources = keys // target_size
        weights = sums / np.bincount(sources, sums)[sources]
    return LexicalTable(keys // target_size, keys % target_size, weights)


def _find_keys(store: TokenStore, pairs: np.ndarray, target_size: int) -> np.ndarray:
    """Returns the keys of all links, sorted; without the rarest if they are too many."""
    keys, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for links in _read_links(store, pairs, target_size):
        new, new_counts = np.unique(links.keys, return_counts=True)
        both = np.concatenate([keys, new])
        keys, places = np.unique(both, return_inverse=True)
        counts = np.bincount(places, np.concatenate([counts, new_counts])).astype(np.int64)
        least = 1
        while len(keys) > _MAX_LINKS:
            kept = counts > least
            keys, counts, least = keys[kept], counts[kept], least + 1
    return keys


def _read_links(store: TokenStore, pairs: np.ndarray, target_size: int) -> Iterator[_Links]:
    sizes = store.source_lengths[pairs].astype(np.int64) * store.target_lengths[pairs]
    chunks = np.cumsum(sizes) // _CHUNK_LINKS
    for chosen in np.split(pairs, np.flatnonzero(np.diff(chunks)) + 1):
        yield _link(store.source, store.target, chosen, target_size)


def _link(source: Side, target: Side, pairs: np.ndarray, target_size: int) -> _Links:
    source_lengths, target_lengths = (side.lengths[pairs].astype(np.int64) for side in (source, target))
    sizes = source_lengths * target_lengths
    owner = np.repeat(np.arange(len(pairs)), sizes)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    row, column = number // target_lengths[owner], number % target_lengths[owner]
    first_token = np.cumsum(target_lengths) - target_lengths
    source_ids = source.tokens[source.offsets[pairs][owner] + row].astype(np.int64)
    target_ids = target.tokens[target.offsets[pairs][owner] + column]
    return _Links(source_ids * target_size + target_ids, first_token[owner] + column)


def make_shortlist(store: TokenStore, vocabs: Vocabs, *, candidates: int, common: int) -> Shortlist:
    """Makes a shortlist: the most probable translations of each source piece, and the most frequent pieces.

    Each source piece is a candidate itself, if it is a piece of the target vocabulary: names are copied.

    Args:
      candidates: maximum number of translations of a source piece.
      common: number of the most frequent target pieces, which are candidates for all sentences.
    """
    size = vocabs.target.size
    counts = np.bincount(store.target.tokens, minlength=size)
    frequent = np.argsort(-counts, kind="stable")[:common]
    table = learn_lexical_table(store, target_size=size)
    order = np.lexsort((-table.probabilities, table.sources))
    sources, targets = table.sources[order], table.targets[order]
    starts = np.searchsorted(sources, np.arange(vocabs.source.size + 1))
    same = _equal_pieces(vocabs)
    rules: dict[tuple[int, ...], np.ndarray] = {}
    for piece in range(vocabs.source.size):
        some = [same[piece]] if piece in same else []
        some += targets[starts[piece] : min(starts[piece] + candidates, starts[piece + 1])].tolist()
        if some:
            rules[(piece,)] = np.array([*dict.fromkeys(some)], np.int32)
    return Shortlist(rules, frequent[counts[frequent] > 0], vocabs)


def _equal_pieces(vocabs: Vocabs) -> dict[int, int]:
    """Returns the target id of each source piece that both vocabularies have."""
    names = {name: number for number, name in enumerate(vocabs.target.pieces(range(vocabs.target.size)))}
    sources = enumerate(vocabs.source.pieces(range(vocabs.source.size)))
    return {number: names[name] for number, name in sources if name in names}


class ShortlistRequest(NamedTuple):
    """A shortlist to make: its file, and the sizes that `make_shortlist` takes."""

    file: Path
    candidates: int = 50
    common: int = 200


def write_shortlist(request: ShortlistRequest, store: TokenStore, vocabs: Vocabs) -> dict[str, Any]:
    """Makes a shortlist and writes it to a file; returns its facts as JSON values.

    Raises:
      UserError: there are no sources, or a number is negative.
    """
    path, candidates, common = request
    for name, number in (("candidates", candidates), ("common", common)):
        if number < 0:
            raise UserError(f"--shortlist_{name}={number} is negative; give 0 or more")
    if not store.source_lengths.any():
        raise UserError(
            f"--shortlist={path}: a language model has no source, so its data has no translations of pieces; "
            "leave --shortlist out"
        )
    make_shortlist(store, vocabs, candidates=candidates, common=common).write(path)
    return {"file": str(path), "candidates": candidates, "common": common}
