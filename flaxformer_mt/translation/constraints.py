"""What text asks of a search: pieces that must not occur, beginnings and phrases that must.

Owns the way from such text to ids, and what is said when it cannot be. Knows nothing of networks or of how a
search does as it is told.
"""

import difflib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.decoding.engine import Sentence
from flaxformer_mt.errors import UserError
from flaxformer_mt.search import Symbols
from flaxformer_mt.vocab import Vocab


class Demands(NamedTuple):
    """What is asked of the lines of one call; None: nothing of the kind."""

    n_best: int = 1
    # What each line's translation starts with; "" for nothing.
    prefixes: Sequence[str] | None = None
    # The phrases that each line's translation contains.
    required: Sequence[Sequence[str]] | None = None

    def check(self, search: SearchConfig, num_lines: int, first_line: int) -> None:
        """Raises UserError if there is not one demand for each line, or the search cannot meet it."""
        for what, given in (("prefixes", self.prefixes), ("lists of required phrases", self.required)):
            if given is not None and len(given) != num_lines:
                before = first_line - 1
                raise UserError(
                    f"there are {before + len(given)} {what} for {before + num_lines} lines; give one for "
                    "each line, an empty one where there is nothing to ask"
                )
        if self.required is not None and (search.method != "beam" or search.diversity_groups > 1):
            raise UserError(
                f"required phrases need plain beam search, but search.method is {search.method} with "
                f"search.diversity_groups {search.diversity_groups}; set them to beam and 1"
            )

    def phrases(self, index: int) -> list[str]:
        """The required phrases of a line that have words."""
        return [phrase for phrase in self.required[index] if phrase.strip()] if self.required else []

    def make_sentence(self, source: np.ndarray, index: int, *, vocab: Vocab, first_line: int) -> Sentence:
        """A line's source ids with its demands as ids of the target vocabulary.

        Raises:
          UserError: a phrase has no ids; the line is named, counted from `first_line`.
        """
        prefix, phrases = self.prefixes[index] if self.prefixes else "", self.phrases(index)
        if not prefix.strip() and not phrases:
            return Sentence(source)
        tokenized = [tuple(tokens[:-1].tolist()) for tokens in vocab.tokenize_all([prefix, *phrases])]
        for phrase, tokens in zip(phrases, tokenized[1:], strict=True):
            if not tokens:
                raise UserError(
                    f"line {first_line + index} requires {phrase!r}, which has no tokens; drop it"
                )
        return Sentence(source, tokenized[0], tuple(tokenized[1:]))


def make_symbols(vocab: Vocab, search: SearchConfig) -> Symbols:
    """The symbols of a search, with what search.suppress and allow_unknown rule out.

    Raises:
      UserError: search.suppress names what is not in the vocabulary, or the end symbol.
    """
    never = {_find_token(vocab, name) for name in search.suppress}
    if vocab.eos_id in never:
        raise UserError(
            f"search.suppress has the end symbol (id {vocab.eos_id}), without which no translation ends; "
            "leave it out, or raise search.min_length_offset"
        )
    if not search.allow_unknown and vocab.unk_id >= 0:
        never.add(vocab.unk_id)
    return Symbols(vocab.pad_id, vocab.bos_id, vocab.eos_id, tuple(sorted(never)))


def _find_token(vocab: Vocab, name: str) -> int:
    """The id of a piece, or of an id that is written out; a piece goes first."""
    pieces = vocab.pieces(range(vocab.size))
    if name in pieces:
        return pieces.index(name)
    if name.isascii() and name.isdigit() and int(name) < vocab.size:
        return int(name)
    near = difflib.get_close_matches(name, pieces, n=1)
    hint = f"did you mean {near[0]}?" if near else f"give a piece of it, or an id below {vocab.size}"
    raise UserError(f"search.suppress has {name!r}, which is not in the target vocabulary; {hint}")
