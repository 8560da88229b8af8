"""Word alignments as links between pieces, in a token store and in batches.

Each piece of a source word is linked to each piece of an aligned target word. A batch holds the links as bits
[B, T, S / 8]; the loss gives the linked source pieces of a target piece equal shares.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flaxformer_mt.unicode_text import split_words
from flaxformer_mt.vocab import Vocab, Vocabs
from flaxformer_mt.vocab.model_file import SPACE
from flaxformer_mt.vocab.words import number_pieces

# Positions are stored in 16 bits. Pairs of more pieces are far above any maximum length of training.
_MOST = 1 << 16


class PieceLinks(NamedTuple):
    """Pair i has `points[offsets[i]:offsets[i + 1]]`: source and target positions, uint16 [N, 2]."""

    points: np.ndarray
    offsets: np.ndarray


def open_piece_links(folder: Path) -> PieceLinks:
    points, offsets = (
        np.load(folder / f"links.{name}.npy", mmap_mode="r").view(np.ndarray)
        for name in ("points", "offsets")
    )
    return PieceLinks(points.reshape(-1, 2), offsets)


class ChunkLinks(NamedTuple):
    """The links of a chunk of pairs, uint16 [N, 2], and how many of them each pair has."""

    points: np.ndarray
    counts: np.ndarray


class PieceLinker:
    """Turns the word alignments of pairs into links between their pieces."""

    def __init__(self, vocabs: Vocabs) -> None:
        self._vocabs = (vocabs.source, vocabs.target)
        self._tables = [_tabulate(vocab) for vocab in self._vocabs]

    def link(
        self,
        texts: Sequence[Sequence[str]],
        ids: Sequence[list[np.ndarray]],
        alignments: Sequence[np.ndarray],
    ) -> ChunkLinks:
        sides = [
            _number_words(texts[side], ids[side], self._vocabs[side], self._tables[side]) for side in (0, 1)
        ]
        counts = np.fromiter(map(len, alignments), np.int64, len(alignments))
        owners = np.repeat(np.arange(len(alignments)), counts)
        points, owners = link_pieces(np.concatenate(alignments), owners, sides)
        fits = (points < _MOST).all(axis=1)
        points, owners = points[fits], owners[fits]
        return ChunkLinks(points.astype(np.uint16), np.bincount(owners, minlength=len(alignments)))


def _tabulate(vocab: Vocab) -> tuple[np.ndarray, np.ndarray]:
    pieces = vocab.pieces(range(vocab.size))
    begins = np.array([piece.startswith(SPACE) for piece in pieces])
    unclear = np.array([SPACE in piece[1:] or piece == SPACE for piece in pieces])
    return begins, unclear


def _number_words(
    texts: Sequence[str], ids: list[np.ndarray], vocab: Vocab, tables: tuple[np.ndarray, np.ndarray]
) -> list[np.ndarray]:
    """Index of the word of each piece, without eos, of each text."""
    begins, unclear = tables
    numbers = []
    for text, tokens in zip(texts, ids, strict=True):
        pieces = tokens[:-1]
        starts = begins[pieces]
        starts[:1] = True
        count = len(split_words(text))
        if int(starts.sum()) == count == len(text.split()) and not unclear[pieces].any():
            numbers.append(np.cumsum(starts) - 1)
        else:
            numbers.append(np.array(number_pieces(vocab, pieces, text), np.int64))
    return numbers


def link_pieces(
    points: np.ndarray, owners: np.ndarray, sides: Sequence[list[np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """Link each piece of a source word to each piece of the aligned target word, for many pairs at once.

    Source words of pieces [0 0 1] and target words [0 1 1] with the points (0, 0) and (1, 1) give (0, 0),
    (1, 0), (2, 1), (2, 2). `owners` is the index of the pair of each point [K, 2]; `sides` have the word of
    each piece of each pair. Returns positions of pieces [N, 2], and the index of the pair of each [N].
    """
    firsts, counts = [], []
    for side, numbers in enumerate(sides):
        sizes = [int(words.max(initial=-1)) + 1 for words in numbers]
        offsets = np.cumsum([0, *sizes])
        lengths = np.fromiter(map(len, numbers), np.int64, len(numbers))
        words = np.concatenate([np.zeros(0, np.int64), *numbers]) + np.repeat(offsets[:-1], lengths)
        local = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        count = np.bincount(words, minlength=offsets[-1] + 1)
        first = np.zeros(len(count), np.int64)
        first[words[::-1]] = local[::-1]  # of several pieces of a word, the first is written last
        # A word after the last that has pieces was normalised away.
        inside = points[:, side] < np.array([*sizes, 0])[owners]
        linked = np.where(inside, offsets[owners] + points[:, side], len(count) - 1)
        firsts.append(first[linked])
        counts.append(np.where(inside, count[linked], 0))
    total = counts[0] * counts[1]
    number = np.arange(total.sum()) - np.repeat(np.cumsum(total) - total, total)
    width = np.repeat(counts[0], total)
    source = np.repeat(firsts[0], total) + number % np.maximum(width, 1)
    target = np.repeat(firsts[1], total) + number // np.maximum(width, 1)
    return np.stack([source, target], axis=1), np.repeat(owners, total)


def lay_out_links(
    links: PieceLinks,
    examples: np.ndarray,
    rows: np.ndarray,
    starts: tuple[np.ndarray, np.ndarray],
    shape: tuple[int, int, int],
) -> np.ndarray:
    """Links of a batch (B, T, S) as bits, uint8 [B, T, ceil(S / 8)]: source s is bit s % 8 of byte s // 8.

    `starts` are the columns of the first source and of the first target piece of each pair.
    """
    begins, counts = links.offsets[examples], links.offsets[examples + 1] - links.offsets[examples]
    index = np.arange(counts.sum()) + np.repeat(begins - (np.cumsum(counts) - counts), counts)
    points = links.points[index].astype(np.int64)
    dense = np.zeros(shape, bool)
    source, target = (points[:, side] + np.repeat(starts[side], counts) for side in (0, 1))
    dense[np.repeat(rows, counts), target, source] = True
    return np.packbits(dense, axis=2, bitorder="little")
