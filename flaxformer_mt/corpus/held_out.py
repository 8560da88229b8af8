"""Validation and test pairs that are held out from a training set, chosen by digests of their sentences.

Which pairs these are depends on the text and not on a seed, so that most stay the same when text is added.
Pairs that share a sentence with one of them, apart from case, spaces and punctuation, are in no set.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from flaxformer_mt.corpus.cleaning import occur_in
from flaxformer_mt.corpus.pairs import RawSplit
from flaxformer_mt.errors import UserError


class HeldOut(NamedTuple):
    """Rows of each data set: those to train on, and those that are held out for validation and test.

    aside: for each data set, the number of rows in none of the three, because they share a sentence with one
    that is held out.
    """

    train: list[np.ndarray]
    valid: list[np.ndarray]
    test: list[np.ndarray]
    aside: list[int]


def hold_out(
    splits: Sequence[RawSplit],
    kept: Sequence[np.ndarray | None],
    keys: Sequence[np.ndarray],
    sizes: Mapping[str, int],
) -> HeldOut:
    """Choose the rows that are held out from the first data set of each direction, and those to train on.

    Args:
      splits: the training splits of the data sets.
      kept: rows of each that cleaning has kept (None: all).
      keys: digests of the sentences of all rows of each, uint64 [N, 2]; see `digest_sentence`.
      sizes: numbers of pairs of `valid` and `test` of each direction; 0: none.

    Raises:
      UserError: a data set has less than twice as many different sentences.
    """
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
            sides = own_keys[:, ::-1] if by_target else own_keys
            places = _choose(sides[own_rows], sizes, split.name)
            chosen = {name: own_rows[numbers] for name, numbers in places.items()}
        seen.add(split.languages)
        for name, numbers in chosen.items():
            held[name].append(numbers)
            for side, language in enumerate(split.languages):
                banned.setdefault(language, []).append(own_keys[numbers, side])
    shared = {language: np.unique(np.concatenate(found)) for language, found in banned.items()}
    train = []
    for split, own_rows, own_keys in zip(splits, rows, keys, strict=True):
        found = zip(split.languages, own_keys[own_rows].T, strict=True)
        is_shared = np.any([occur_in(own, shared[language]) for language, own in found], axis=0)
        train.append(own_rows[~is_shared])
    aside = [
        len(own_rows) - sum(map(len, parts))
        for own_rows, *parts in zip(rows, train, held["valid"], held["test"], strict=True)
    ]
    return HeldOut(train, held["valid"], held["test"], aside)


def _choose(keys: np.ndarray, sizes: Mapping[str, int], name: str) -> dict[str, np.ndarray]:
    """Return the positions of the pairs with the smallest digests: one pair of each sentence, ascending.

    Test pairs share no sentence with validation pairs.

    Args:
      keys: digests of both sides, uint64 [N, 2]; those of the first decide.
    """
    _, first = np.unique(keys[:, 0], return_index=True)
    wanted = sizes["valid"] + sizes["test"]
    if 2 * wanted > len(first):
        raise UserError(
            f"data.valid_pairs {sizes['valid']} and data.test_pairs {sizes['test']} are more than half of "
            f"the {len(first)} different sentences of {name}; lower them to {len(first) // 4} each or less"
        )
    valid, rest = first[: sizes["valid"]], first[sizes["valid"] :]
    free = rest[~np.isin(keys[rest, 1], keys[valid, 1])]
    return {"valid": np.sort(valid), "test": np.sort(free[: sizes["test"]])}
