"""Documents: lines that belong together, and what a model reads of them before each line (data.context)."""

import collections
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.config import DataConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.unicode_text import is_blank
from flaxformer_mt.vocab.symbols import Segmenter, is_one_piece

# The piece after each line that is read before another one.
SEPARATOR = "<sep>"


class Context(NamedTuple):
    """How many lines are read before a line, and whether the targets of these are read before its target.

    longest: maximum number of tokens of a source and of a target, with the lines before it and eos.
    """

    lines: int
    target: bool
    longest: tuple[int, int]

    @classmethod
    def of(cls, data: DataConfig) -> "Context | None":
        if not data.context:
            return None
        return cls(data.context, data.target_context, (data.max_source_length, data.max_target_length))

    def fit(self, own: Sequence[int], before: Sequence[Sequence[np.ndarray]]) -> int:
        """Return how many of the lines before a line fit, the nearest first, on all sides that have them.

        Args:
          own: number of tokens of the line, on each side.
          before: the ids of the lines before it on each side, the nearest last, as of `tokenize_before`.
        """
        room = [most - length for most, length in zip(self.longest, own, strict=False)]
        for number, lengths in enumerate(zip(*(map(len, side[::-1]) for side in before), strict=True)):
            room = [left - length for left, length in zip(room, lengths, strict=False)]
            if min(room) < 0:
                return number
        return len(before[0])


def tokenize_before(vocab: Any, texts: Sequence[str], **how: Any) -> list[np.ndarray]:
    """Return the ids of lines that are read before another one: they end in the separator, not in eos."""
    separator = np.int32(find_separator(vocab))
    return [np.append(ids[:-1], separator) for ids in (vocab.tokenize_all(texts, **how) if texts else ())]


def find_separator(vocab: Segmenter) -> int:
    if not is_one_piece(vocab, SEPARATOR):
        raise UserError(
            f"the vocabulary has no piece {SEPARATOR}, which data.context puts between lines: make a new "
            "vocabulary (leave out vocab.source_model; with --init, give --new_vocab), or set data.context=0"
        )
    return vocab.tokenize(SEPARATOR)[-2]


def check_context(data: DataConfig, what: str) -> None:
    """Raise UserError if a model reads each line alone; `what` asks for more."""
    if not data.context:
        raise UserError(
            f"{what} has no effect on this model, which reads each line alone (data.context is 0); leave it "
            "out, or train a model with data.context=1"
        )


class Documents:
    """Iterates over lines; `before` has the lines before the last one in its document, the nearest last.

    A document ends at a blank line, and where the id changes.
    """

    def __init__(self, lines: Iterable[str], size: int, ids: Iterable[Hashable] | None = None) -> None:
        """Keep up to `size` lines; `ids` has one for each line."""
        self._lines, self._ids = lines, itertools.repeat(None) if ids is None else ids
        self._counted, self._size = ids is not None, size
        self.before: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[str]:
        recent, last, ended = collections.deque[str](maxlen=self._size), None, object()
        ids, count = iter(self._ids), 0
        for count, line in enumerate(self._lines, start=1):
            own: Any = next(ids, ended)
            if own is ended:
                raise UserError(f"there are {count - 1} ids of documents for more lines; give one for each")
            if own != last or is_blank(line):
                recent.clear()
            self.before, last = tuple(recent), own
            yield line
            if not is_blank(line):
                recent.append(line)
        if self._counted and next(ids, ended) is not ended:
            raise UserError(f"there are more ids of documents than the {count} lines; give one for each")
