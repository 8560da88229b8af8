"""Validation and test pairs that are held out from a training set, chosen by digests of their sentences.

Which pairs these are depends on the text and not on a seed, so that most stay the same when text is added.
Pairs that share a sentence with one of them, apart from case, spaces and punctuation, are in no set.
"""

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flaxformer_mt.corpus.cached_arrays import read_arrays, write_arrays
from flaxformer_mt.corpus.cached_json import digest
from flaxformer_mt.corpus.pairs import RawSplit
from flaxformer_mt.errors import UserError

_CHUNK = 4096
# Part of the cache key: raise it when digests change.
_FORMAT = 1
# White space and punctuation: of ASCII, Latin 1, General Punctuation, CJK, and full-width forms.
_MARKS = re.compile("[\\s!-/:-@\\[-`{-~¡-¿‐-⁞\u3000-\u303f！-／：-＠［-｀｛-･]+")


class HeldOut(NamedTuple):
    """Rows of each data set: those to train on, and those that are held out for validation and test.

    aside: for each data set, the number of rows in none of the three, because they share a sentence with one
    that is held out.
    """

    train: list[np.ndarray]
    valid: list[np.ndarray]
    test: list[np.ndarray]
    aside: list[int]


def digest_sentence(text: bytes) -> int:
    """Returns 64 bits that are the same for sentences that differ in case, spaces and punctuation alone."""
    plain = text.decode("utf-8", errors="replace").casefold()
    bare = _MARKS.sub("", plain) or plain
    return int.from_bytes(hashlib.blake2b(bare.encode(), digest_size=8).digest(), "big")


def load_or_digest(split: RawSplit, folder: Path) -> np.ndarray:
    """Returns the digests of both sides of all rows, uint64 [2, N]; kept in `folder` for the same text.

    Without a source, both are those of the target.
    """
    name = digest([_FORMAT, split.identity, split.languages])
    if (found := read_arrays(folder, name)) is not None:
        return found[0]["digests"]
    keys = np.zeros((2, len(split)), np.uint64)
    for row, pair in enumerate(itertools.chain.from_iterable(split.read_blocks(_CHUNK))):
        keys[:, row] = [digest_sentence(side) for side in (pair if split.has_source else pair[1:] * 2)]
    write_arrays(folder, name, {"digests": keys})
    return keys


def hold_out(
    splits: Sequence[RawSplit],
    kept: Sequence[np.ndarray | None],
    sizes: Mapping[str, int],
    *,
    folder: Path,
) -> HeldOut:
    """Chooses the rows that are held out from the first data set of each direction, and those to train on.

    Args:
      splits: the training splits of the data sets.
      kept: rows of each that cleaning has kept (None: all).
      sizes: numbers of pairs of `valid` and `test` of each direction; 0: none.

    Raises:
      UserError: a data set has less than twice as many different sentences.
    """
    keys = [load_or_digest(split, folder) for split in splits]
    rows = [
        np.arange(len(split)) if chosen is None else np.asarray(chosen)
        for split, chosen in zip(splits, kept, strict=True)
    ]
    seen: set[tuple[str, str]] = set()
    banned: dict[str, list[np.ndarray]] = {}
    held: dict[str, list[np.ndarray]] = {"valid": [], "test": []}
    for split, own_rows, own_keys in zip(splits, rows, keys, strict=True):
        chosen = {name: own_rows[:0] for name in held}
        if split.languages not in seen:
            # A set read in both directions has the same pairs held out in each.
            by_target = split.has_source and split.languages[0] > split.languages[1]
            sides = own_keys[::-1] if by_target else own_keys
            places = _choose(sides[:, own_rows], sizes, split.name)
            chosen = {name: own_rows[numbers] for name, numbers in places.items()}
        seen.add(split.languages)
        for name, numbers in chosen.items():
            held[name].append(numbers)
            for side, language in enumerate(split.languages):
                banned.setdefault(language, []).append(own_keys[side, numbers])
    shared = {language: np.unique(np.concatenate(found)) for language, found in banned.items()}
    train = []
    for split, own_rows, own_keys in zip(splits, rows, keys, strict=True):
        found = zip(split.languages, own_keys[:, own_rows], strict=True)
        is_shared = np.any([np.isin(own, shared[language]) for language, own in found], axis=0)
        train.append(own_rows[~is_shared])
    aside = [
        len(own_rows) - sum(map(len, parts))
        for own_rows, *parts in zip(rows, train, held["valid"], held["test"], strict=True)
    ]
    return HeldOut(train, held["valid"], held["test"], aside)


def _choose(keys: np.ndarray, sizes: Mapping[str, int], name: str) -> dict[str, np.ndarray]:
    """Returns the positions of the pairs with the smallest digests: one pair of each sentence, ascending.

    Test pairs share no sentence with validation pairs.

    Args:
      keys: digests of both sides, uint64 [2, N]; those of the first decide.
    """
    _, first = np.unique(keys[0], return_index=True)
    wanted = sizes["valid"] + sizes["test"]
    if 2 * wanted > len(first):
        raise UserError(
            f"data.valid_pairs {sizes['valid']} and data.test_pairs {sizes['test']} are more than half of "
            f"the {len(first)} different sentences of {name}; lower them to {len(first) // 4} each or less"
        )
    valid, rest = first[: sizes["valid"]], first[sizes["valid"] :]
    free = rest[~np.isin(keys[1, rest], keys[1, valid])]
    return {"valid": np.sort(valid), "test": np.sort(free[: sizes["test"]])}
