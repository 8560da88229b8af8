"""Documents: consecutive lines of text; a model may read preceding lines as context (data.context)."""

import collections
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.config import DataConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.unicode_text import is_blank
from flaxformer_mt.vocab import Vocab
from flaxformer_mt.vocab.symbols import is_one_piece

# The subword that ends each context line.
SEPARATOR = "<sep>"


class Context(NamedTuple):
    """Maximum number of context lines, and maximum tokens of a source together with these lines and eos."""

    lines: int
    longest: int

    @classmethod
    def of(cls, data: DataConfig) -> "Context | None":
        return cls(data.context, data.max_source_length) if data.context else None

    def choose(self, own: int, before: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Return the nearest lines of `before` that fit in front of a source with `own` tokens."""
        first, room = len(before), self.longest - own
        while first > max(0, len(before) - self.lines) and len(before[first - 1]) <= room:
            first -= 1
            room -= len(before[first])
        return before[first:]


def tokenize_before(vocab: Vocab, texts: Sequence[str], **options: Any) -> list[np.ndarray]:
    """Return the token ids of context lines, which end in the separator instead of eos."""
    separator = np.int32(find_separator(vocab))
    return [np.append(ids[:-1], separator) for ids in (vocab.tokenize_all(texts, **options) if texts else ())]


def find_separator(vocab: Vocab) -> int:
    if not is_one_piece(vocab, SEPARATOR):
        raise UserError(
            f"the vocabulary has no piece {SEPARATOR}, which data.context puts between lines: make a new "
            "vocabulary (leave out vocab.source_model; with --init, give --new_vocab), or set data.context=0"
        )
    return vocab.tokenize(SEPARATOR)[-2]


def check_context(data: DataConfig, what: str) -> None:
    """Raise UserError if the model reads no context; `what` names the option that needs context."""
    if not data.context:
        raise UserError(
            f"{what} has no effect on this model, which reads each line alone (data.context is 0); leave it "
            "out, or train a model with data.context=1"
        )


class Documents:
    """Iterates over lines; `before` are the preceding lines of the same document, in order.

    A document ends at a blank line, and where the document id changes.
    """

    def __init__(self, lines: Iterable[str], size: int, ids: Iterable[Hashable] | None = None) -> None:
        """Keep up to `size` preceding lines; `ids`, if any, has one document id per line."""
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
