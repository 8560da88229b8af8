"""What a pair has beside its text: each property is an entry of COLUMNS, from its file to the device.

`read` opens the values of a data set. Where they depend on the pieces of the text, `take` and the function of
`make_tokenizer` make numbers of them for a token store, whose key has the `key`. `open` finds the values of
the pairs of a store, and `lay_out` makes the arrays of a batch, the field `name` of `Batch` on the device.
"""

import abc
import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from flaxformer_mt.config import DataConfig
from flaxformer_mt.corpus.pairs import Pairs, RawSplit, WordLinks
from flaxformer_mt.corpus.tfds_cache import cache_dir
from flaxformer_mt.corpus.word_alignment import load_links
from flaxformer_mt.unicode_text import split_words
from flaxformer_mt.vocab import Vocab, Vocabs
from flaxformer_mt.vocab.model_file import SPACE
from flaxformer_mt.vocab.words_of_pieces import SPACE_BYTES, number_pieces


class Side(NamedTuple):
    """One language: `tokens[offsets[i]:offsets[i + 1]]` are the `lengths[i]` token ids of sentence i."""

    tokens: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray

    def take(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of these sentences, one after the other, and how many each has."""
        lengths = self.lengths[examples]
        starts = self.offsets[examples] - (np.cumsum(lengths) - lengths)
        return self.tokens[np.arange(lengths.sum()) + np.repeat(starts, lengths)], lengths


EMPTY = Side(np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros(0, np.int32))


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
        self.sets, self._splits = tuple(sets), splits

    @classmethod
    @abc.abstractmethod
    def read(cls, split: RawSplit, file: Path | None, config: DataConfig) -> Any:
        """The values of all rows of a training set; None if it has none."""

    @property
    def key(self) -> str:
        """Changes whenever what a store has of it does; "": the store has nothing."""
        return ""

    def take(self, parts: np.ndarray, rows: np.ndarray) -> Any:
        """For the tokenizer, the values of pairs, by the numbers of their data sets and their rows there."""
        return ()

    @staticmethod
    def make_tokenizer(vocabs: Vocabs) -> Any:
        """In a worker: a function that makes numbers, and how many each pair has, of texts, token ids, values
        and numbers of tokens that come before the ids of the sources [N].
        """
        return None

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
    _links: Side

    @classmethod
    def of_no_pairs(cls) -> "Links":
        column = cls((), ())
        column._links = EMPTY
        return column

    @classmethod
    def read(cls, split: RawSplit, file: Path | None, config: DataConfig) -> WordLinks | None:
        may_drop = config.clean.unequal_lines == "drop"
        return load_links(file, split, may_drop=may_drop, cache=cache_dir(config)) if file else None

    @property
    def key(self) -> str:
        return ",".join(links.identity if links else "none" for links in self.sets)

    def take(self, parts: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
        """The word alignment [K, 2] of each pair; no points where a set has none."""
        # Tags are words before those of the text.
        tags = ((" ".join(split.tags), split.target_tag) for split in self._splits)
        shifts = [np.array([len(split_words(tag)) for tag in both], np.int32) for both in tags]

        def read(part: int, row: int) -> np.ndarray:
            if (links := self.sets[part]) is None:
                return np.zeros((0, 2), np.int32)
            return links.points[links.offsets[row] : links.offsets[row + 1]] + shifts[part]

        return list(map(read, parts.tolist(), rows.tolist()))

    @staticmethod
    def make_tokenizer(vocabs: Vocabs) -> "PieceLinker":
        return PieceLinker(vocabs)

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


class PieceLinker:
    """Turns the word alignments of pairs into links between their pieces."""

    def __init__(self, vocabs: Vocabs) -> None:
        self._vocabs = (vocabs.source, vocabs.target)
        self._tables = [_tabulate(vocab) for vocab in self._vocabs]

    def __call__(
        self,
        texts: Sequence[Sequence[str]],
        ids: Sequence[list[np.ndarray]],
        alignments: Sequence[np.ndarray],
        before: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The links of a chunk of pairs, one after the other, and how many of them each pair has."""
        sides = [
            _number_words(texts[side], ids[side], self._vocabs[side], self._tables[side]) for side in (0, 1)
        ]
        counts = np.fromiter(map(len, alignments), np.int64, len(alignments))
        owners = np.repeat(np.arange(len(alignments)), counts)
        points, owners = link_pieces(np.concatenate(alignments), owners, sides)
        points[:, 0] += before[owners]
        # Pairs of more pieces are far above any maximum length of training.
        fits = (points < 1 << 16).all(axis=1)
        points, owners = points[fits], owners[fits]
        return (points[:, 0] << 16 | points[:, 1]), np.bincount(owners, minlength=len(alignments))


def _tabulate(vocab: Vocab) -> tuple[np.ndarray, np.ndarray]:
    pieces = vocab.pieces(range(vocab.size))
    begins = np.array([piece.startswith(SPACE) for piece in pieces])
    unclear = np.array([SPACE in piece[1:] or piece in (SPACE, SPACE_BYTES[0]) for piece in pieces])
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
