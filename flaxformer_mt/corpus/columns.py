"""What pairs have beside their text, from the files to the arrays of a batch: weights, word alignments."""

import abc
import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from flaxformer_mt.config import DataConfig
from flaxformer_mt.corpus.pairs import Pairs, RawSplit, Side, WordLinks
from flaxformer_mt.corpus.tfds_cache import cache_dir
from flaxformer_mt.corpus.word_alignment import load_links
from flaxformer_mt.unicode_text import split_words
from flaxformer_mt.vocab import Vocabs
from flaxformer_mt.vocab.words_of_pieces import number_pieces

NO_SENTENCES = Side(np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros(0, np.int32))


class Places(NamedTuple):
    """The row and the column of each token of one side of a batch.

    lengths, firsts: number of tokens of each sentence, and index of its first token among all.
    """

    rows: np.ndarray
    columns: np.ndarray
    lengths: np.ndarray
    firsts: np.ndarray


class Layout(NamedTuple):
    """The pairs of a batch of `shape` (B, S, T): their numbers and rows, and the places of their tokens."""

    examples: np.ndarray
    rows: np.ndarray
    source: Places
    target: Places
    shape: tuple[int, int, int]


class Column(abc.ABC):
    """A property of pairs: `sets` has the values of all rows of each data set; None: this one has none.

    name: the field of `Batch` that has it. option: the field of `DataConfig` with the files, if any.
    """

    name: ClassVar[str]
    option: ClassVar[str] = ""

    def __init__(self, sets: Sequence[Any], splits: Sequence[RawSplit]) -> None:
        self.sets = tuple(sets)

    @classmethod
    @abc.abstractmethod
    def read(cls, split: RawSplit, file: Path | None, config: DataConfig) -> Any:
        """The values of all rows of a training set; None if it has none."""

    @abc.abstractmethod
    def open(self, pairs: Pairs, sides: Mapping[str, Side]) -> Self:
        """A copy with the values of the pairs of a store, whose arrays are `sides`."""

    @abc.abstractmethod
    def lay_out(self, batch: Layout) -> np.ndarray:
        """The array of a batch, [B, ...]."""


class Weights(Column):
    """Weights of the pairs in the loss: the weight of its pair of each target token, float32 [B, T]."""

    name = "target_weights"
    values: np.ndarray

    @classmethod
    def read(cls, split: RawSplit, file: Path | None, config: DataConfig) -> np.ndarray | None:
        return split.weights

    def open(self, pairs: Pairs, sides: Mapping[str, Side]) -> Self:
        opened, start = copy.copy(self), 0
        opened.values = np.ones(len(pairs), np.float32)
        for weights, kept, part in zip(self.sets, pairs.kept, pairs.parts, strict=True):
            if weights is not None:
                opened.values[start : start + part.size] = weights if kept is None else weights[kept]
            start += part.size
        return opened

    def lay_out(self, batch: Layout) -> np.ndarray:
        array = np.zeros((batch.shape[0], batch.shape[2]), np.float32)
        weights = np.repeat(self.values[batch.examples], batch.target.lengths)
        array[batch.target.rows, batch.target.columns] = weights
        return array


class Links(Column):
    """Word alignments, as links between pieces: bits s % 8 of uint8 [B, T, s // 8].

    Each piece of a source word is linked to each piece of an aligned target word; the loss gives the linked
    source pieces of a target piece equal shares. A link of a store is source << 16 | target position.
    """

    name, option = "alignment", "alignments"
    sets: tuple[WordLinks | None, ...]
    _links = NO_SENTENCES

    def __init__(self, sets: Sequence[WordLinks | None], splits: Sequence[RawSplit]) -> None:
        super().__init__(sets, splits)
        # Tags are words before those of the text.
        tags = ((" ".join(split.tags), split.target_tag) for split in splits)
        self._shifts = [np.array([len(split_words(tag)) for tag in both], np.int32) for both in tags]

    @classmethod
    def read(cls, split: RawSplit, file: Path | None, config: DataConfig) -> WordLinks | None:
        may_drop = config.clean.unequal_lines == "drop"
        return load_links(file, split, may_drop=may_drop, cache=cache_dir(config)) if file else None

    @property
    def key(self) -> str:
        """Changes whenever the links of a store do."""
        return ",".join(links.identity if links else "none" for links in self.sets)

    def take(self, parts: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
        """The word alignment [K, 2] of pairs, by their data sets and rows; no points where a set has none."""

        def read(part: int, row: int) -> np.ndarray:
            if (links := self.sets[part]) is None:
                return np.zeros((0, 2), np.int32)
            return links.points[links.offsets[row] : links.offsets[row + 1]] + self._shifts[part]

        return list(map(read, parts.tolist(), rows.tolist()))

    def open(self, pairs: Pairs, sides: Mapping[str, Side]) -> Self:
        opened = copy.copy(self)
        opened._links = sides[self.name]
        return opened

    def lay_out(self, batch: Layout) -> np.ndarray:
        links, counts = self._links.take(batch.examples)
        rows, source_length, length = batch.shape
        dense = np.zeros((rows, length, source_length), bool)
        source, target = (
            numbers + np.repeat(side.columns[side.firsts], counts)
            for side, numbers in ((batch.source, links >> 16), (batch.target, links & 0xFFFF))
        )
        dense[np.repeat(batch.rows, counts), target, source] = True
        return np.packbits(dense, axis=2, bitorder="little")


def link_chunk(
    vocabs: Vocabs,
    texts: Sequence[Sequence[str]],
    ids: Sequence[list[np.ndarray]],
    alignments: Sequence[np.ndarray],
    before: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The links between pieces of a chunk of pairs, one after the other, and how many of them each pair has.

    `before` are the numbers of tokens that come before the ids of the sources [N].
    """
    sides = [
        [
            np.array(number_pieces(vocab, tokens[:-1], text), np.int64)
            for tokens, text in zip(*side, strict=True)
        ]
        for vocab, *side in zip((vocabs.source, vocabs.target), ids, texts, strict=True)
    ]
    counts = np.fromiter(map(len, alignments), np.int64, len(alignments))
    owners = np.repeat(np.arange(len(alignments)), counts)
    points, owners = link_pieces(np.concatenate(alignments), owners, sides)
    points[:, 0] += before[owners]
    # Pairs of more pieces are far above any maximum length of training.
    fits = (points < 1 << 16).all(axis=1)
    points, owners = points[fits], owners[fits]
    return (points[:, 0] << 16 | points[:, 1]), np.bincount(owners, minlength=len(alignments))


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
        # A word after the last that has pieces was normalized away.
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


COLUMNS: tuple[type[Column], ...] = (Weights, Links)


def read_columns(
    splits: Sequence[RawSplit], config: DataConfig, find_files: Callable[..., Sequence[Path | None]]
) -> dict[str, Column]:
    """The properties that at least one of the training sets has."""
    columns = {}
    for column in COLUMNS:
        files = find_files(config, getattr(config, column.option, ()))
        sets = [column.read(split, file, config) for split, file in zip(splits, files, strict=True)]
        if any(values is not None for values in sets):
            columns[column.name] = column(sets, splits)
    return columns
