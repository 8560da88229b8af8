"""Which source token each target token looked at: from attention weights to pairs of pieces or of words.

Owns how pieces belong to the words of a text, and the pairs' order and spelling (Pharaoh's `i-j`, counted
from 0, source first). Pure functions of arrays and strings: knows no network.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from flaxformer_mt.shapes import Array

# SentencePiece's visible space.
_SPACE = "\u2581"

# Pairs of a source and a target position.
Alignment = tuple[tuple[int, int], ...]


def align_pieces(weights: Array) -> Alignment:
    """The source piece that each target piece looked at most, from weights [T, S] without end symbols.

    Weights [[.1 .9] [.8 .2]] give (1, 0), (0, 1): target piece 0 looked at source piece 1.
    """
    if not all(weights.shape):
        return ()
    return tuple((int(i), j) for j, i in enumerate(np.asarray(weights).argmax(axis=1)))


def align_words(weights: Array, source_words: Sequence[int], target_words: Sequence[int]) -> Alignment:
    """The source word that each target word looked at most, in the order of target words.

    What falls on a word is the sum over its pieces; what a target word looks at is the mean over its pieces.

    Args:
      weights: [T, S], without end symbols.
      source_words: the word of each source piece, as `find_words` gives it; likewise target_words.
    """
    if not all(weights.shape):
        return ()
    on_words = np.zeros((max(source_words) + 1, len(target_words)))
    np.add.at(on_words, np.asarray(source_words), np.asarray(weights, np.float64).T)
    # The sum over a target word's pieces has the same maximum as their mean.
    by_words = np.zeros((max(target_words) + 1, len(on_words)))
    np.add.at(by_words, np.asarray(target_words), on_words.T)
    return tuple((int(by_words[j].argmax()), j) for j in sorted(set(target_words)))


def format_pharaoh(alignment: Iterable[tuple[int, int]]) -> str:
    """Pairs as the field writes them, in the order of target, then source: ((1, 0), (0, 1)) is "1-0 0-1"."""
    return " ".join(f"{i}-{j}" for i, j in sorted(alignment, key=lambda pair: (pair[1], pair[0])))


def find_words(pieces: Sequence[str], text: str, cut: Callable[[list[str]], list[list[str]]]) -> list[int]:
    """The word of `text`, as white space separates them, that each of its pieces belongs to.

    Pieces [_the _dog s _bark] of "the dogs bark" are of words 0 1 1 2 (_ for the visible space).

    Normalisation may split a word ("½" is "1/2") or leave nothing of one. Where the counts differ, each word
    of the text is cut by itself to see what becomes of it. Where even that does not add up, as with a space
    that the vocabulary takes for a letter, only U+0020 separates; at worst the last word takes the rest.

    Args:
      cut: the pieces of each of some words.
    """
    numbers, total = _number_words(pieces)
    words = text.split()
    if not words or total == len(words):
        return numbers
    for some in (words, list(filter(None, text.split(" ")))):
        becoming = [_number_words(own)[1] for own in cut(some)]
        if sum(becoming) == total:
            owner = np.repeat(np.arange(len(some)), becoming)
            return [int(owner[number]) for number in numbers]
    return [min(number, len(words) - 1) for number in numbers]


def _number_words(pieces: Sequence[str]) -> tuple[list[int], int]:
    """The number of the word that each piece starts in, and how many words there are."""
    numbers: list[int] = []
    last, after_space = -1, True
    for piece in pieces:
        started = None
        for character in piece:
            if character == _SPACE:
                after_space = True
                continue
            last, after_space = last + after_space, False
            started = last if started is None else started
        numbers.append(last + 1 if started is None else started)  # a space is of the word that follows
    return [max(0, min(number, last)) for number in numbers], last + 1
