"""Constraints on translations: suppressed pieces, forced prefixes and required phrases.

Contains the conversion of constraints from text to ids, and the error messages for constraints that a search
does not support. The search that satisfies them is in search/.
"""

import collections
import dataclasses
import difflib
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.decoding.sentences import Sentence
from flaxformer_mt.errors import UserError
from flaxformer_mt.search import Symbols
from flaxformer_mt.translation.result import Translation, check_phrases
from flaxformer_mt.translation.segmentation import SourcePart
from flaxformer_mt.vocab import Vocab


class Constraints(NamedTuple):
    """The number of hypotheses and the constraints of one call; None: no constraint of this kind."""

    n_best: int = 1
    # The prefix of each line's translation; "": none.
    prefixes: Sequence[str] | None = None
    # The phrases that each line's translation contains.
    required: Sequence[Sequence[str]] | None = None
    # What every translation begins with as it is tokenized: the tag of its language, and a space.
    lead: str = ""

    def check(self, search: SearchConfig, num_lines: int, first_line: int) -> None:
        """Raises UserError unless each line has one constraint of each kind, and the search supports them."""
        for what, given in (("prefixes", self.prefixes), ("lists of required phrases", self.required)):
            if given is not None and len(given) != num_lines:
                before = first_line - 1
                raise UserError(
                    f"there are {before + len(given)} {what} for {before + num_lines} lines; give one for "
                    "each line, an empty one for a line without constraint"
                )
        if self.required is not None and (search.method != "beam" or search.diversity_groups > 1):
            raise UserError(
                f"required phrases need plain beam search, but search.method is {search.method} with "
                f"search.diversity_groups {search.diversity_groups}; set them to beam and 1"
            )

    def phrases(self, index: int) -> list[str]:
        """Returns the required phrases of a line, without blank ones."""
        return [phrase for phrase in self.required[index] if phrase.strip()] if self.required else []

    def make_sentence(self, source: np.ndarray, index: int, *, vocab: Vocab, first_line: int) -> Sentence:
        """Combines the source ids of a line with its constraints as ids of the target vocabulary.

        Raises:
          UserError: a phrase has no tokens; the message names the line, counted from `first_line`.
        """
        prefix, phrases = self.prefixes[index] if self.prefixes else "", self.phrases(index)
        if not prefix.strip() and not phrases and not vocab.num_forced:
            return Sentence(source)
        texts = [self.lead + prefix.rstrip(), *phrases]
        tokenized = [tuple(tokens[:-1].tolist()) for tokens in vocab.tokenize_all(texts)]
        if vocab.silent_ids:
            tokenized[1:] = [
                tuple(one for one in tokens if one not in vocab.silent_ids) for tokens in tokenized[1:]
            ]
        for phrase, tokens in zip(phrases, tokenized[1:], strict=True):
            if not tokens:
                raise UserError(
                    f"line {first_line + index} requires {phrase!r}, which has no tokens in the target "
                    "vocabulary; remove it"
                )
        ends_word = bool(tokenized[0]) and prefix[-1:].isspace()
        return Sentence(source, tokenized[0], tuple(tokenized[1:]), prefix_ends_word=ends_word)

    def make_sentences(self, parts: Sequence[SourcePart], *, vocab: Vocab, first_line: int) -> list[Sentence]:
        """Adds constraints to parts: a line's prefix to its first part, required phrases to an only part."""
        count = collections.Counter(part.line for part in parts)
        sentences: list[Sentence] = []
        for line, group in itertools.groupby(parts, key=lambda part: part.line):
            applicable = self if count[line] == 1 else self._replace(required=None)
            for number, part in enumerate(group):
                own = applicable if number == 0 else self._replace(prefixes=None, required=None)
                sentence = own.make_sentence(part.ids, line, vocab=vocab, first_line=first_line)
                sentences.append(dataclasses.replace(sentence, stream=(first_line + line, number)))
        return sentences


def mark_unsatisfied(
    results: Sequence[Translation], constraints: Constraints, part_lines: Sequence[int]
) -> tuple[list[Translation], list[int]]:
    """Marks translations, and their alternatives, that lack required phrases as not satisfied.

    Args:
      part_lines: the index of the line of each part. The search takes no phrases for a line in several parts
        (or in none, if it is blank), so that its translations are searched for them here.

    Returns:
      The translations, and the indices of the lines whose best translation lacks a phrase.
    """
    marked, count = list(results), collections.Counter(part_lines)
    for index, result in enumerate(results):
        phrases = constraints.phrases(index)
        if phrases and count[index] != 1:
            marked[index] = check_phrases(result, phrases)
    return marked, [index for index, result in enumerate(marked) if not result.satisfied]


def make_symbols(vocab: Vocab, search: SearchConfig) -> Symbols:
    """Returns the symbols of a search, with the ids that search.suppress and allow_unknown exclude.

    Raises:
      UserError: search.suppress contains eos, or a piece that is absent from the vocabulary.
    """
    suppressed = {_find_token(vocab, name) for name in search.suppress}
    if vocab.eos_id in suppressed:
        raise UserError(
            f"search.suppress contains the end symbol (id {vocab.eos_id}), which ends every translation; "
            "remove it, or raise search.min_length_offset for longer translations"
        )
    if not search.allow_unknown and vocab.unk_id >= 0:
        suppressed.add(vocab.unk_id)
    return Symbols(
        vocab.pad_id,
        vocab.bos_id,
        vocab.eos_id,
        tuple(sorted(suppressed)),
        _find_word_starts(vocab),
        vocab.num_forced,
    )


def _find_word_starts(vocab: Vocab) -> tuple[int, ...]:
    """Returns the ids of the pieces that begin a word, which contain the space before it."""
    pieces = vocab.pieces(range(vocab.size))
    return tuple(number for number, piece in enumerate(pieces) if piece.startswith("\u2581"))


def _find_token(vocab: Vocab, name: str) -> int:
    """Returns the id of a piece, or the id that `name` spells in digits; a piece takes precedence."""
    pieces = vocab.pieces(range(vocab.size))
    if name in pieces:
        return pieces.index(name)
    if name.isascii() and name.isdigit() and int(name) < vocab.size:
        return int(name)
    near = difflib.get_close_matches(name, pieces, n=1)
    hint = f"did you mean {near[0]}?" if near else f"give one of its pieces, or an id below {vocab.size}"
    raise UserError(f"search.suppress contains {name!r}, which is not in the target vocabulary; {hint}")
