"""Alignments from attention: the source piece or word that each target piece or word attends to most.

Contains the assignment of pieces to the words of a text, and the order and format of the pairs (Pharaoh's
`i-j`, counted from 0, source first). Pure functions of arrays and strings.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from flaxformer_mt.shapes import Array

# SentencePiece's symbol for a space, U+2581.
_SPACE = "\u2581"

# Pairs of a source position and a target position.
Alignment = tuple[tuple[int, int], ...]


def align_pieces(weights: Array) -> Alignment:
    """Aligns each target piece with the source piece of the largest weight.

    Weights [[.1 .9] [.8 .2]] give (1, 0), (0, 1): target piece 0 attends most to source piece 1.

    Args:
      weights: attention weights [T, S], without eos.
    """
    if not all(weights.shape):
        return ()
    return tuple((int(i), j) for j, i in enumerate(np.asarray(weights).argmax(axis=1)))


def align_words(weights: Array, source_words: Sequence[int], target_words: Sequence[int]) -> Alignment:
    """Aligns each target word with the source word of the largest weight, in the order of target words.

    The weight of a source word is the sum over its pieces; the weight for a target word is the mean over its
    pieces.

    Args:
      weights: attention weights [T, S], without eos.
      source_words: index of the word of each source piece, as `find_words` returns it.
      target_words: index of the word of each target piece.
    """
    if not all(weights.shape):
        return ()
    source_sums = np.zeros((max(source_words) + 1, len(target_words)))
    np.add.at(source_sums, np.asarray(source_words), np.asarray(weights, np.float64).T)
    # The sum over a target word's pieces has the same maximum as their mean.
    word_sums = np.zeros((max(target_words) + 1, len(source_sums)))
    np.add.at(word_sums, np.asarray(target_words), source_sums.T)
    return tuple((int(word_sums[j].argmax()), j) for j in sorted(set(target_words)))


def format_pharaoh(alignment: Iterable[tuple[int, int]]) -> str:
    """Formats pairs, sorted by target position, then by source position: ((1, 0), (0, 1)) gives "1-0 0-1"."""
    return " ".join(f"{i}-{j}" for i, j in sorted(alignment, key=lambda pair: (pair[1], pair[0])))


def find_words(pieces: Sequence[str], text: str, cut: Callable[[list[str]], list[list[str]]]) -> list[int]:
    """Returns, for each piece of a text, the index of its word; white space separates the words.

    Pieces [_the _dog s _bark] of "the dogs bark" belong to words 0 1 1 2 (_ stands for SentencePiece's
    space).

    Normalization may split a word ("½" becomes "1/2") or delete it. If the pieces therefore form another
    number of words than the text, each word of the text is tokenized alone to count the words that it
    becomes. If these counts do not add up either, for example because the vocabulary treats a space such as
    U+00A0 as a letter, only U+0020 separates words. As a last resort, all surplus words of the pieces are
    assigned to the last word of the text.

    Args:
      cut: returns the pieces of each word of a list.
    """
    numbers, total = _number_words(pieces)
    words = text.split()
    if not words or total == len(words):
        return numbers
    for text_words in (words, list(filter(None, text.split(" ")))):
        counts = [_number_words(word_pieces)[1] for word_pieces in cut(text_words)]
        if sum(counts) == total:
            text_word = np.repeat(np.arange(len(text_words)), counts)
            return [int(text_word[number]) for number in numbers]
    return [min(number, len(words) - 1) for number in numbers]


def _number_words(pieces: Sequence[str]) -> tuple[list[int], int]:
    """Returns the index of the word in which each piece starts, and the number of words."""
    numbers: list[int] = []
    last, after_space = -1, True
    for piece in pieces:
        first_word = None
        for character in piece:
            if character == _SPACE:
                after_space = True
                continue
            last, after_space = last + after_space, False
            first_word = last if first_word is None else first_word
        # A piece that is only a space belongs to the word after it.
        numbers.append(last + 1 if first_word is None else first_word)
    return [max(0, min(number, last)) for number in numbers], last + 1
