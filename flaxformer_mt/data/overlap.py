"""Overlap of training and held-out data: pairs and sources of a split that also occur in the training set.

A model may have memorised such sentences, so that their scores say little about new text.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flaxformer_mt.corpus.cached_json import read_cached, write_cached
from flaxformer_mt.corpus.pairs import Pair, Pairs


def find_overlap(train: Pairs, held_out: Mapping[str, Pairs], folder: Path) -> dict[str, dict[str, int]]:
    """Counts the pairs and the sources of each split that also occur in the training set.

    Without a source language, the sentences are counted as pairs, and `sources` is 0. The result is stored in
    `folder` while the text is unchanged.

    Returns:
      For each split {"of": number of its pairs, "pairs": ..., "sources": ...}.
    """
    prints = [train.fingerprint, *(f"{name} {pairs.fingerprint}" for name, pairs in held_out.items())]
    path = folder / f"{hashlib.blake2b(json.dumps(prints).encode(), digest_size=16).hexdigest()}.json"
    if (stored := read_cached(path)) is not None:
        return stored
    wanted = {_digest_pair(pair) for pairs in held_out.values() for pair in pairs}
    wanted_sources = {pair.source for pairs in held_out.values() for pair in pairs} - {""}
    found: set[bytes] = set()
    found_sources: set[str] = set()
    for pair in train:
        if pair.source in wanted_sources:
            found_sources.add(pair.source)
        if (digest := _digest_pair(pair)) in wanted:
            found.add(digest)
    result = {
        name: {
            "of": len(pairs),
            "pairs": sum(_digest_pair(pair) in found for pair in pairs),
            "sources": sum(pair.source in found_sources for pair in pairs),
        }
        for name, pairs in held_out.items()
    }
    write_cached(path, result)
    return result


def describe_overlap(overlap: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A warning for each split with pairs that also occur in the training set."""
    return [
        f"{found['pairs']:,} of the {found['of']:,} pairs of the {name} set "
        f"({found['pairs'] / found['of']:.1%}) also occur in the training set, so their scores show what the "
        "model remembers; remove them from one of the sets"
        for name, found in overlap.items()
        if found["pairs"]
    ]


def _digest_pair(pair: Pair) -> bytes:
    # The length of the source tells ("a", "bc") from ("ab", "c").
    text = f"{len(pair.source)} {pair.source}{pair.target}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
