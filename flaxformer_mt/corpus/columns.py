"""Additional properties of sentence pairs: weights and word alignments, from their files to batch arrays."""

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

    lengths: number of tokens of each sentence. firsts: index of the first token of each sentence in `rows`.
    """

    rows: np.ndarray
    columns: np.ndarray
    lengths: np.ndarray
    firsts: np.ndarray


class Layout(NamedTuple):
    """The pairs of a batch, of which several may share a row.

    examples: indices of the pairs in the tokenized data. rows: row of each pair in the batch. source, target:
    places of the pairs' tokens. shape: number of rows, source length and target length, (B, S, T).
    """

    examples: np.ndarray
    rows: np.ndarray
    source: Places
    target: Places
    shape: tuple[int, int, int]


class Column(abc.ABC):
    """An additional property of sentence pairs, such as a weight.

    sets: for each data set the values of all rows, or None if the set has no values. name: the field of
    `Batch` with the values. option: the field of `DataConfig` that names the files, if there are any.
    """

    name: ClassVar[str]
    option: ClassVar[str] = ""

    def __init__(self, sets: Sequence[Any], splits: Sequence[RawSplit]) -> None:
        self.sets = tuple(sets)

    @classmethod
    @abc.abstractmethod
    def read(cls, split: RawSplit, file: Path | None, config: DataConfig) -> Any:
        """Return the values of all rows of a training set; None if the set has no values."""

    @abc.abstractmethod
    def open(self, pairs: Pairs, sides: Mapping[str, Side]) -> Self:
        """Return a copy with the values of `pairs`; `sides` has tokenized data by name, as "alignment"."""

    @abc.abstractmethod
    def lay_out(self, batch: Layout) -> np.ndarray:
        """Return the values of a batch as an array [B, ...]."""


class Weights(Column):
    """Weights of pairs in the loss: float32 [B, T], in which each target token has the weight of its pair."""

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
    """Word alignments as links between subwords, in a bit mask uint8 [B, T, ceil(S / 8)].

    The link between target position t and source position s is bit s % 8 of byte s // 8 of row t. Each
    subword of a source word is linked to each subword of an aligned target word; the alignment loss gives the
    linked source subwords equal shares. In tokenized data, a link is source << 16 | target position.
    """

    name, option = "alignment", "alignments"
    sets: tuple[WordLinks | None, ...]
    _links = NO_SENTENCES

    def __init__(self, sets: Sequence[WordLinks | None], splits: Sequence[RawSplit]) -> None:
        super().__init__(sets, splits)
        # Tags are words that precede the text and shift its positions.
        tags = ((" ".join(split.tags), split.target_tag) for split in splits)
        self._shifts = [np.array([len(split_words(tag)) for tag in both], np.int32) for both in tags]

    @classmethod
    def read(cls, split: RawSplit, file: Path | None, config: DataConfig) -> WordLinks | None:
        may_drop = config.clean.unequal_lines == "drop"
        return load_links(file, split, may_drop=may_drop, cache=cache_dir(config)) if file else None

    @property
    def key(self) -> str:
        """A string that changes whenever the links do."""
        return ",".join(links.identity if links else "none" for links in self.sets)

    def take(self, parts: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
        """Return the alignment points [K, 2] of each pair, given its data set (`parts`) and its row."""

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
    """Return the links between the subwords of N pairs, concatenated, and the number of links of each pair.

    A link is source << 16 | target position. `before` [N] is the number of tokens that precede each source,
    such as the tokens of its context lines.
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
    # Links at positions from 65,536 on are dropped: no maximum length for training is near that.
    fits = (points < 1 << 16).all(axis=1)
    points, owners = points[fits], owners[fits]
    return (points[:, 0] << 16 | points[:, 1]), np.bincount(owners, minlength=len(alignments))


def link_pieces(
    points: np.ndarray, owners: np.ndarray, sides: Sequence[list[np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """Link each subword of a source word to each subword of the aligned target word, for many pairs at once.

    `points` [K, 2] are word alignments, and `owners` [K] the pairs that they belong to. `sides` have, for
    each pair, the word index of each subword. Returns the linked (source, target) subword positions [N, 2],
    and the pair of each link [N]. Example: the points (0, 0) and (1, 1) of a pair with the word indices
    [0 0 1] and [0 1 1] give the links (0, 0), (1, 0), (2, 1) and (2, 2).
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
        first[words[::-1]] = local[::-1]  # reversed, so that the first subword of a word is written last
        # Words after the last one with subwords were deleted by normalization.
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
    """Return, by name, the additional properties that at least one training set has."""
    columns = {}
    for column in COLUMNS:
        files = find_files(config, getattr(config, column.option, ()))
        sets = [column.read(split, file, config) for split, file in zip(splits, files, strict=True)]
        if any(values is not None for values in sets):
            columns[column.name] = column(sets, splits)
    return columns
