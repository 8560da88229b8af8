"""Finds the word of a text to which each subword belongs."""

from collections.abc import Callable, Sequence

import numpy as np

from flaxformer_mt.unicode_text import split_words
from flaxformer_mt.vocab.model_file import SPACE
from flaxformer_mt.vocab.sentencepiece_vocab import Vocab

# The byte subwords of a space: a vocabulary of words may have no other subword for the space before a word.
SPACE_BYTES = [f"<0x{byte:02X}>" for byte in SPACE.encode()]


def number_pieces(vocab: Vocab, ids: np.ndarray, text: str) -> list[int]:
    """Return the word index of each subword of a text; `ids` are the subwords, without eos."""

    def cut(words: list[str]) -> list[list[str]]:
        return [vocab.pieces(tokens[:-1]) for tokens in vocab.tokenize_all(words)]

    return find_words(vocab.pieces(ids), text, cut)


def find_words(pieces: Sequence[str], text: str, cut: Callable[[list[str]], list[list[str]]]) -> list[int]:
    """Return the word index of each subword of a text; `cut` tokenizes each word of a list into subwords.

    The subwords [_the _dog s _bark] of "the dogs bark" belong to words 0 1 1 2 (_ is SentencePiece's space).

    Normalization may split a word ("½" becomes "1/2", and U+00A0 a space) or delete it, so that the subwords
    form more or fewer words than the text. Then each word of the text is tokenized separately to count the
    words that it becomes. If these counts do not add up either, all surplus words are assigned to the last
    word of the text.
    """
    numbers, total = _number_words(pieces)
    words = split_words(text)
    if not words or total == len(words) == len(text.split()):
        return numbers
    counts = [_number_words(word_pieces)[1] for word_pieces in cut(words)]
    if sum(counts) == total:
        text_word = np.repeat(np.arange(len(words)), counts)
        return [int(text_word[number]) for number in numbers]
    return [min(number, len(words) - 1) for number in numbers]


def _number_words(pieces: Sequence[str]) -> tuple[list[int], int]:
    """Return the index of the word in which each subword starts, and the number of words."""
    numbers: list[int] = []
    last, after_space = -1, True
    pieces = list(pieces)
    for start in range(len(pieces) if SPACE_BYTES[0] in pieces else 0):
        if pieces[start : start + len(SPACE_BYTES)] == SPACE_BYTES:
            pieces[start : start + len(SPACE_BYTES)] = [SPACE] * len(SPACE_BYTES)
    for piece in pieces:
        first_word = None
        for index, part in enumerate(piece.split(SPACE)):
            after_space = after_space or index > 0
            if part:
                last, after_space = last + after_space, False
                first_word = last if first_word is None else first_word
        # A subword that is only a space belongs to the next word.
        numbers.append(last + 1 if first_word is None else first_word)
    return [max(0, min(number, last)) for number in numbers], last + 1
