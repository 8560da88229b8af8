"""Translations with their scores, and the combination of the translations of a line's parts.

Contains the sums of scores and the offsets of alignments of a line that was translated in parts.
"""

import bisect
import dataclasses
import heapq
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flaxformer_mt.text_io.lines import format_line_numbers
from flaxformer_mt.translation.alignment import Alignment
from flaxformer_mt.translation.segmentation import Part, join_translations


@dataclass(frozen=True)
class Translation:
    """The translation of one line, with its scores and its alternatives."""

    text: str
    # Log-probability divided by the length penalty, less the coverage penalty; hypotheses are ranked by it.
    # With search.method=mbr, the expected utility from 0 to 100.
    # NaN for a blank line, which is not searched.
    score: float
    log_prob: float
    # Ids of the target vocabulary; the last one is eos unless the length limit was reached.
    tokens: tuple[int, ...]
    # Whether only the beginning was translated, because the source exceeds data.max_source_length.
    truncated: bool = False
    # Whether the translation contains every phrase that the line requires; True without such phrases.
    satisfied: bool = True
    # The other hypotheses, best first.
    alternatives: tuple["Translation", ...] = ()
    # Log-probability of each token, if requested; they add up to log_prob.
    token_log_probs: tuple[float, ...] | None = None
    # Pairs of source and target words (or pieces), if requested, in the order of the target.
    alignment: Alignment | None = None
    # Number of parts in which the line was translated. For several parts, tokens are those of all parts, each
    # with its eos, and scores are sums over parts.
    parts: int = 1
    # Attention weights [target piece][source piece] without eos, if requested, of a line that was translated
    # as one part.
    attention: tuple[tuple[float, ...], ...] | None = None

    @property
    def n_best(self) -> tuple["Translation", ...]:
        """This translation and its alternatives, best first."""
        return (self, *self.alternatives)


# Translations of a line without words, and of a line for which the model's scores are NaN.
EMPTY = Translation(text="", score=math.nan, log_prob=0.0, tokens=())
FAILED = Translation(text="", score=-math.inf, log_prob=-math.inf, tokens=())


def check_phrases(translation: Translation, phrases: Sequence[str]) -> Translation:
    """Marks whether a translation, and each of its alternatives, contains all phrases."""
    return dataclasses.replace(
        translation,
        satisfied=all(phrase.strip() in translation.text for phrase in phrases),
        alternatives=tuple(check_phrases(other, phrases) for other in translation.alternatives),
    )


def drop_repeated(translation: Translation) -> Translation:
    """Returns a translation with those of its alternatives whose text is none before: the best of each text.

    Two hypotheses are of one text if it has two segmentations, each with a score of its own.
    """
    first = {one.text: one for one in reversed(translation.n_best)}
    others = tuple(one for one in translation.alternatives if one is first[one.text])
    return dataclasses.replace(translation, alternatives=others)


def warn_of_failures(numbers: Sequence[int]) -> list[str]:
    """Returns a warning that names the lines without a translation, if there are any."""
    if not numbers:
        return []
    return [
        f"{format_line_numbers(sorted(set(numbers)))}: the model's scores are not numbers (NaN), so the "
        "translation is empty; try an earlier checkpoint"
    ]


# Characters that some program treats as the end of a line, without line feeds, which no line of a file has.
_ODD_LINE_ENDS = re.compile("\r(?!\n)|[\v\f\x1c-\x1e\x85\u2028\u2029]")


class TranslatedPart(NamedTuple):
    """A part of a line, its number of pieces without eos, and its translation."""

    part: Part
    num_pieces: int
    translation: Translation
    # Numbers of words and pieces of the line's language tag, which was put before this part; they count in
    # num_pieces and in the alignment of the translation.
    tag_words: int = 0
    tag_pieces: int = 0
    # Whether it continues the sentence of the part before.
    continues: bool = False


# All characters that some program treats as the end of a line, replaced by spaces: a translation is one line.
_LINE_ENDS = dict.fromkeys(map(ord, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"), " ")


def one_line(text: str) -> str:
    """Returns a text without ends of lines."""
    return text.translate(_LINE_ENDS)


def combine_parts(
    line: str, parts: Sequence[TranslatedPart], *, n_best: int, words: bool, eos_id: int
) -> Translation:
    """Returns the translation of a line, given those of its parts in order.

    Log-probabilities and scores are sums over parts. The n_best hypotheses are the combinations with the
    highest sums: with scores -1 and -3 for one part, -2 and -2.5 for another, the best score is -1 - 2 and
    the second best -1 - 2.5.

    Args:
      words: whether alignments are between words (of the line and of its translation) or pieces without eos.
    """
    # Sums of scores with the last of the chosen hypotheses, linked to those before it: of a line of thousands
    # of parts, a tuple for each combination would take quadratic time.
    combinations: list[tuple[float, _Chosen | None]] = [(0.0, None)]
    for part in parts:
        longer = [
            (score + one.score, _Chosen(one, chosen))
            for score, chosen in combinations
            for one in part.translation.n_best
        ]
        combinations = heapq.nlargest(n_best, longer, key=lambda combination: combination[0])
    best, *others = [
        _add_up(line, parts, _unlink(chosen), words=words, eos_id=eos_id) for _, chosen in combinations
    ]
    return dataclasses.replace(best, alternatives=tuple(others))


class _Chosen(NamedTuple):
    """The hypothesis chosen for one part, and those chosen for the parts before."""

    hypothesis: Translation
    before: "_Chosen | None"


def _unlink(chosen: _Chosen | None) -> list[Translation]:
    hypotheses = []
    while chosen is not None:
        hypotheses.append(chosen.hypothesis)
        chosen = chosen.before
    return hypotheses[::-1]


def _add_up(
    line: str, parts: Sequence[TranslatedPart], chosen: Sequence[Translation], *, words: bool, eos_id: int
) -> Translation:
    log_probs = [one.token_log_probs for one in chosen]
    aligned = all(one.alignment is not None for one in chosen)
    source_starts = [part.part.start + _leading_space(part.part.text) for part in parts]
    spaces = [
        " " if part.continues else _space_before(line, start)
        for part, start in zip(parts, source_starts, strict=True)
    ]
    text, starts = join_translations([one.text for one in chosen], spaces)
    return Translation(
        text=text,
        score=sum(one.score for one in chosen),
        log_prob=sum(one.log_prob for one in chosen),
        tokens=tuple(itertools.chain.from_iterable(one.tokens for one in chosen)),
        truncated=any(one.truncated for one in chosen),
        satisfied=all(one.satisfied for one in chosen),
        token_log_probs=None
        if None in log_probs
        else tuple(itertools.chain.from_iterable(filter(None, log_probs))),
        alignment=(
            _shift_words((line, source_starts), (text, starts), parts, chosen)
            if words
            else _shift_pieces(parts, chosen, eos_id)
        )
        if aligned
        else None,
        parts=len(parts),
    )


def _shift_words(
    source: tuple[str, Sequence[int]],
    target: tuple[str, Sequence[int]],
    parts: Sequence[TranslatedPart],
    chosen: Sequence[Translation],
) -> Alignment:
    """Returns the word alignments of all parts, offset by the words of line and translation before each.

    Args:
      source, target: the line and its translation, with the start of each part.
    """
    pairs: list[tuple[int, int]] = []
    offsets = zip(_word_indices(*source), _word_indices(*target), strict=True)
    for (source_offset, target_offset), part, one in zip(offsets, parts, chosen, strict=True):
        pairs += [
            (_shift_source(i, source_offset, part.tag_words), j + target_offset)
            for i, j in one.alignment or ()
        ]
    return tuple(pairs)


def _shift_pieces(parts: Sequence[TranslatedPart], chosen: Sequence[Translation], eos_id: int) -> Alignment:
    """Returns the piece alignments of all parts, offset by the pieces before each part."""
    pairs: list[tuple[int, int]] = []
    source_offset = target_offset = 0
    for part, one in zip(parts, chosen, strict=True):
        pairs += [
            (_shift_source(i, source_offset, part.tag_pieces), j + target_offset)
            for i, j in one.alignment or ()
        ]
        source_offset += part.num_pieces - part.tag_pieces
        target_offset += len(one.tokens) - one.tokens.count(eos_id)
    return tuple(pairs)


def _shift_source(index: int, offset: int, tag_size: int) -> int:
    """Returns the index in the line of a word or piece of a part that begins with a repeated tag."""
    return index if index < tag_size else index - tag_size + offset


def _space_before(text: str, start: int) -> str:
    """Returns the white space that ends before a position, with spaces for odd characters that end lines."""
    first = start
    while first and text[first - 1].isspace():
        first -= 1
    return _ODD_LINE_ENDS.sub(" ", text[first:start])


def _leading_space(text: str) -> int:
    return len(text) - len(text.lstrip())


def _word_indices(text: str, starts: Sequence[int]) -> list[int]:
    """Returns the index of the word of the character at each start: in "ab cd", 0 for "a" and 1 for "d"."""
    word_starts = [match.start() for match in re.finditer(r"\S+", text)]
    return [max(0, bisect.bisect_right(word_starts, start) - 1) for start in starts]
