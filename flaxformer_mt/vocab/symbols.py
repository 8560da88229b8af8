"""User-defined symbols: strings that a vocabulary never splits, as the tag of back-translated sources."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab.model_file import SPACE


class Segmenter(Protocol):
    """A vocabulary that turns text into pieces."""

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, with eos."""

    def pieces(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """Return the pieces of ids."""


def is_one_piece(vocab: Segmenter, symbol: str) -> bool:
    """Tell whether a vocabulary keeps a symbol whole; the space before it may be a piece of its own."""
    pieces = vocab.pieces(vocab.tokenize(symbol)[:-1])
    return [piece.removeprefix(SPACE) for piece in pieces if piece != SPACE] == [symbol]


def check_symbols(vocab: Segmenter, symbols: Sequence[str], *, name: str) -> None:
    """Raise UserError if the given model `name` splits one of the symbols of the config."""
    if missing := [symbol for symbol in symbols if not is_one_piece(vocab, symbol)]:
        raise UserError(
            f"vocab.symbols has {missing[0]}, but {name} splits it into several pieces; leave it out, or "
            f"train the model with --user_defined_symbols={','.join(symbols)}"
        )


def check_tags(vocab: Segmenter, parts: Iterable[Mapping[str, Any]]) -> None:
    """Raise UserError if the vocabulary of the sources splits the tag of a made data set.

    Args:
      parts: the report on each data set, which has its `tag` if its sources begin with one.
    """
    for part in parts:
        tag = part.get("tag", "")
        if tag and not is_one_piece(vocab, tag):
            raise UserError(
                f"the sources of {part['name']} begin with the tag {tag}, which the vocabulary splits into "
                f"several pieces; train a vocabulary with --config.vocab.symbols={tag}, or make the pairs "
                "anew with --tag= for none"
            )
