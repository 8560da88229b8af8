"""Overlap of training and held-out data: pairs and sources of a split that also occur in the training set.

A model may have memorised such sentences, so that their scores say little about new text.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from flaxformer_mt.corpus.cleaning import mix_hashes, occur_in
from flaxformer_mt.corpus.pairs import Pairs

_EMPTY = np.frombuffer(hashlib.blake2b(digest_size=8).digest(), "<u8")[0]


def find_overlap(train: Pairs, held_out: Mapping[str, Pairs]) -> dict[str, dict[str, int]]:
    """Count the pairs and the sources of each split that also occur in the training set, by their hashes.

    Without a source language, the sentences are counted as pairs, and `sources` is 0.

    Returns:
      For each split {"of": number of its pairs, "pairs": ..., "sources": ...}.
    """
    wanted = {name: _gather(pairs.read_hashes()) for name, pairs in held_out.items()}
    known = [np.sort(np.concatenate(both)) for both in zip(*wanted.values(), strict=True)]
    found = {name: [np.zeros(len(one), bool) for one in both] for name, both in wanted.items()}
    for part in train.read_hashes():
        for which, values in enumerate(_gather([part]) if known else ()):
            present = values[occur_in(values, known[which])]
            for name, both in wanted.items():
                found[name][which] |= np.isin(both[which], present)
    return {
        name: {
            "of": len(pairs),
            "pairs": int(found[name][0].sum()),
            "sources": int(found[name][1].sum()),
        }
        for name, pairs in held_out.items()
    }


def _gather(parts: Iterable[tuple[tuple[str, ...], np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of the pairs, and of the sources that are not empty; tags belong to a source."""
    mixed, sources = [], []
    for tags, hashes in parts:
        tagged = np.uint64(sum(_hash(tag) for tag in tags) % (1 << 64))
        mixed.append(mix_hashes(hashes) + tagged)
        sources.append(hashes[:, 0][hashes[:, 0] != _EMPTY] + tagged)
    return np.concatenate(mixed), np.concatenate(sources)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def describe_overlap(overlap: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a warning for each split with pairs that also occur in the training set."""
    return [
        f"{found['pairs']:,} of the {found['of']:,} pairs of the {name} set "
        f"({found['pairs'] / found['of']:.1%}) also occur in the training set, so their scores show what the "
        "model remembers; remove them from one of the sets"
        for name, found in overlap.items()
        if found["pairs"]
    ]
