"""A translation: its text and what the search thought of it; and those of a line's parts as one.

Owns what is added up, and how, when a long line was translated in parts. Knows nothing of networks, of search
or of files.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flaxformer_mt.translation.alignment import Alignment
from flaxformer_mt.translation.segmentation import Part, join_translations


@dataclass(frozen=True)
class Translation:
    """One line's translation, and what the search thought of it."""

    text: str
    # Log-probability over the length penalty, less the coverage penalty, by which hypotheses are ranked.
    score: float
    log_prob: float
    # Of the target vocabulary; they end in eos unless the length limit cut them off.
    tokens: tuple[int, ...]
    # The source was longer than data.max_source_length, and only its beginning was translated.
    truncated: bool = False
    # It contains every phrase that the line requires; without any, it does.
    satisfied: bool = True
    # The next best hypotheses, best first.
    alternatives: tuple["Translation", ...] = ()
    # Of each token, where asked for; they add up to log_prob.
    token_log_probs: tuple[float, ...] | None = None
    # Pairs of source and target words (or pieces), where asked for, in the order of the target.
    alignment: Alignment | None = None
    # How many parts a line that is too long was translated in: then tokens are those of all parts, each with
    # its eos, and scores are added up.
    parts: int = 1

    @property
    def n_best(self) -> tuple["Translation", ...]:
        """This translation and its alternatives, best first."""
        return (self, *self.alternatives)


# Of a line without words, and of one for which the model gave no numbers.
EMPTY = Translation(text="", score=0.0, log_prob=0.0, tokens=())
FAILED = Translation(text="", score=-math.inf, log_prob=-math.inf, tokens=())


class TranslatedPart(NamedTuple):
    """A part of a line, how many pieces it has without eos, and its translations."""

    part: Part
    num_pieces: int
    translation: Translation


def combine_parts(
    line: str, parts: Sequence[TranslatedPart], *, n_best: int, words: bool, eos_id: int
) -> Translation:
    """A line's translation from those of its parts, in order.

    Log-probabilities and scores are added up. The n_best are the best sums: with scores -1 and -3 of one
    part, -2 and -2.5 of another, the best is -1 - 2 and the next -1 - 2.5.

    Args:
      words: whether alignments count words (of the line, of its translation) or pieces, without end symbols.
    """
    chosen: list[tuple[Translation, ...]] = [()]
    for part in parts:
        longer = [(*some, one) for some in chosen for one in part.translation.n_best]
        chosen = heapq.nlargest(n_best, longer, key=lambda some: sum(one.score for one in some))
    best, *others = [_add_up(line, parts, some, words=words, eos_id=eos_id) for some in chosen]
    return dataclasses.replace(best, alternatives=tuple(others))


def _add_up(
    line: str, parts: Sequence[TranslatedPart], chosen: Sequence[Translation], *, words: bool, eos_id: int
) -> Translation:
    each = [one.token_log_probs for one in chosen]
    aligned = all(one.alignment is not None for one in chosen)
    return Translation(
        text=join_translations([one.text for one in chosen]),
        score=sum(one.score for one in chosen),
        log_prob=sum(one.log_prob for one in chosen),
        tokens=tuple(itertools.chain.from_iterable(one.tokens for one in chosen)),
        truncated=any(one.truncated for one in chosen),
        satisfied=all(one.satisfied for one in chosen),
        token_log_probs=None if None in each else tuple(itertools.chain.from_iterable(filter(None, each))),
        alignment=(_shift_words(line, parts, chosen) if words else _shift_pieces(parts, chosen, eos_id))
        if aligned
        else None,
        parts=len(parts),
    )


def _shift_words(line: str, parts: Sequence[TranslatedPart], chosen: Sequence[Translation]) -> Alignment:
    """The parts' alignments of words, each behind the words of the line and of its translation before it."""
    pairs: list[tuple[int, int]] = []
    text = ""
    for part, one in zip(parts, chosen, strict=True):
        read = _words_before(line, part.part.start + _leading_space(part.part.text))
        text = join_translations([text, one.text])
        written = _words_before(text, len(text) - len(one.text.strip()))
        pairs += [(i + read, j + written) for i, j in one.alignment or ()]
    return tuple(pairs)


def _shift_pieces(parts: Sequence[TranslatedPart], chosen: Sequence[Translation], eos_id: int) -> Alignment:
    """The same of pieces."""
    pairs: list[tuple[int, int]] = []
    read = written = 0
    for part, one in zip(parts, chosen, strict=True):
        pairs += [(i + read, j + written) for i, j in one.alignment or ()]
        read += part.num_pieces
        written += len(one.tokens) - one.tokens.count(eos_id)
    return tuple(pairs)


def _leading_space(text: str) -> int:
    return len(text) - len(text.lstrip())


def _words_before(text: str, start: int) -> int:
    """The number of the word that a character is of: in "ab cd", of "d" 1, of "a" 0."""
    before = text[:start]
    inside = bool(before) and not before[-1].isspace()
    return len(before.split()) - inside
