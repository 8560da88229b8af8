"""Alignments from attention: the source piece or word that each target piece or word attends to most.

Pairs are Pharaoh's `i-j`, counted from 0, source first.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from flaxformer_mt.shapes import Array

# Factor of the weights of marks in `weigh_down_marks`.
_LITTLE = 1e-3
# Pairs of a source position and a target position.
Alignment = tuple[tuple[int, int], ...]


def align_pieces(weights: Array) -> Alignment:
    """Align each target piece with the source piece of the largest weight.

    Weights [[.1 .9] [.8 .2]] give (1, 0), (0, 1): target piece 0 attends most to source piece 1.

    Args:
      weights: attention weights [T, S], without eos.
    """
    if not all(weights.shape):
        return ()
    return tuple((int(i), j) for j, i in enumerate(np.asarray(weights).argmax(axis=1)))


def weigh_down_marks(
    weights: Array, source: tuple[Sequence[str], Sequence[int]], target: tuple[Sequence[str], Sequence[int]]
) -> np.ndarray:
    """Return the weights with little left of those of punctuation marks that are a part of a longer word.

    In "sleeps?" the mark attends to that of the source, which may be a part of another word.

    Args:
      weights: attention weights [T, S], without eos.
      source, target: the pieces, and the index of the word of each piece.
    """
    factors = []
    for pieces, words in (target, source):
        bare = np.array([not any(map(str.isalnum, piece)) for piece in pieces], bool)
        has_letters = set(np.asarray(words, np.int64)[~bare].tolist())
        longer = np.array([word in has_letters for word in words], bool)
        factors.append(np.where(bare & longer, _LITTLE, 1.0))
    return np.asarray(weights, np.float64) * factors[0][:, None] * factors[1]


def align_words(
    weights: Array, source_words: Sequence[int], target_words: Sequence[int], *, cover: bool = False
) -> Alignment:
    """Align each target word with the source word of the largest weight, in the order of target words.

    The weight of a source word is the sum over its pieces; the weight for a target word is the mean over its
    pieces. With `cover`, each source word that no target word is aligned with is aligned with the target word
    of the largest weight.

    Args:
      weights: attention weights [T, S], without eos.
      source_words: index of the word of each source piece, as `vocab.words.find_words` returns it.
      target_words: index of the word of each target piece.
    """
    if not all(weights.shape):
        return ()
    source_sums = np.zeros((max(source_words) + 1, len(target_words)))
    np.add.at(source_sums, np.asarray(source_words), np.asarray(weights, np.float64).T)
    # The sum over a target word's pieces has the same maximum as their mean.
    word_sums = np.zeros((max(target_words) + 1, len(source_sums)))
    np.add.at(word_sums, np.asarray(target_words), source_sums.T)
    pairs = [(int(np.argmax(word_sums[j])), j) for j in sorted(set(target_words))]
    if cover:
        missing = sorted(set(source_words) - {i for i, _ in pairs})
        pairs = sorted(
            [*pairs, *((i, int(np.argmax(word_sums[:, i]))) for i in missing)], key=lambda p: p[::-1]
        )
    return tuple(pairs)


def format_pharaoh(alignment: Iterable[tuple[int, int]]) -> str:
    """Format pairs, sorted by target position, then by source position: ((1, 0), (0, 1)) gives "1-0 0-1"."""
    return " ".join(f"{i}-{j}" for i, j in sorted(alignment, key=lambda pair: (pair[1], pair[0])))
