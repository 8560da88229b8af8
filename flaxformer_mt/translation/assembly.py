"""Translations of lines from those of their parts: sums of scores, offsets of alignments, joined texts."""

import bisect
import dataclasses
import heapq
import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from flaxformer_mt.translation.annotation import Notes
from flaxformer_mt.translation.result import EMPTY, Translation, rank
from flaxformer_mt.translation.segmentation import SourcePart, join_translations
from flaxformer_mt.unicode_text import WORD
from flaxformer_mt.vocab import Vocab

# Characters that some program treats as the end of a line, without line feeds, which no line of a file has.
_ODD_LINE_ENDS = re.compile("\r(?!\n)|[\v\f\x1c-\x1e\x85\u2028\u2029]")


class FoundLine(NamedTuple):
    """A line with what was asked for; `translations` are those of its parts, by number, as they are found."""

    line: str
    n_best: int
    notes: Notes
    parts: list[SourcePart]
    translations: dict[int, Translation]

    def join(self, translations: Sequence[Translation], *, eos_id: int) -> Translation:
        """Return the translation of the line from those of its parts."""
        (joined,) = join_parts(
            [self.line], self.parts, translations, n_best=self.n_best, notes=self.notes, eos_id=eos_id
        )
        return joined

    def source_pieces(self, vocab: Vocab) -> list[str]:
        """Return the pieces of a line that was translated as one part, without eos and added tags."""
        if len(self.parts) > 1:
            return []
        return [piece for part in self.parts for piece in vocab.pieces(part.ids[part.added_pieces : -1])]


def join_parts(
    lines: Sequence[str],
    parts: Sequence[SourcePart],
    translations: Sequence[Translation],
    *,
    n_best: int,
    notes: Notes,
    eos_id: int,
) -> list[Translation]:
    """Join the translations of each line's parts; a line without parts has an empty translation."""
    empty = dataclasses.replace(
        EMPTY,
        token_log_probs=() if notes.token_log_probs else None,
        alignment=None if notes.alignments is None else (),
    )
    results = [empty] * len(lines)
    joining: dict[str, Any] = {"n_best": n_best, "words": notes.alignments != "pieces", "eos_id": eos_id}
    pairs = zip(parts, translations, strict=True)
    for line, group in itertools.groupby(pairs, key=lambda pair: pair[0].line):
        own, found = zip(*group, strict=True)
        whole = own[0].content == lines[line]
        joined = found[0] if whole else combine_parts(lines[line], own, found, **joining)
        cut = any(part.cut for part in own)
        results[line] = dataclasses.replace(joined, truncated=True) if cut else joined
    return results


def combine_parts(
    line: str,
    parts: Sequence[SourcePart],
    translations: Sequence[Translation],
    *,
    n_best: int,
    words: bool,
    eos_id: int,
) -> Translation:
    """Return the translation of a line, given those of its parts in order.

    Log-probabilities and scores are sums over parts. The n_best hypotheses are the combinations with the
    highest sums: with scores -1 and -3 for one part, -2 and -2.5 for another, the best score is -1 - 2 and
    the second best -1 - 2.5.

    Args:
      words: whether alignments are between words (of the line and of its translation) or pieces without eos.
    """
    # Sums of scores with the last of the chosen hypotheses, linked to those before it: of a line of thousands
    # of parts, a tuple for each combination would take quadratic time.
    combinations: list[tuple[float, _Chosen | None]] = [(0.0, None)]
    for translation in translations:
        longer = [
            (score + one.score, _Chosen(one, chosen))
            for score, chosen in combinations
            for one in translation.n_best
        ]
        combinations = heapq.nlargest(n_best, longer, key=lambda combination: combination[0])
    return rank(
        [_add_up(line, parts, _unlink(chosen), words=words, eos_id=eos_id) for _, chosen in combinations]
    )


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
    line: str, parts: Sequence[SourcePart], chosen: Sequence[Translation], *, words: bool, eos_id: int
) -> Translation:
    source_starts = [part.start + len(part.content) - len(part.content.lstrip()) for part in parts]
    spaces = [
        " " if part.continues else _space_before(line, start)
        for part, start in zip(parts, source_starts, strict=True)
    ]
    text, starts = join_translations([one.text for one in chosen], spaces)
    alignment = log_probs = None
    if all(one.token_log_probs is not None for one in chosen):
        log_probs = tuple(value for one in chosen for value in one.token_log_probs or ())
    if all(one.alignment is not None for one in chosen):
        # What is before each part: the number of words or pieces of the line and of its translation.
        if words:
            before = zip(_word_indices(line, source_starts), _word_indices(text, starts), strict=True)
            tag_sizes = [part.tag_words for part in parts]
        else:
            own = itertools.accumulate((part.num_pieces - part.tag_pieces for part in parts), initial=0)
            sizes = (len(one.tokens) - one.tokens.count(eos_id) for one in chosen)
            before = zip(own, itertools.accumulate(sizes, initial=0), strict=True)
            tag_sizes = [part.tag_pieces for part in parts]
        alignment = tuple(
            (_shift(i, source_offset, tag_size), j + target_offset)
            for one, (source_offset, target_offset), tag_size in zip(chosen, before, tag_sizes, strict=False)
            for i, j in one.alignment or ()
        )
    return Translation(
        text=text,
        score=sum(one.score for one in chosen),
        log_prob=sum(one.log_prob for one in chosen),
        tokens=tuple(token for one in chosen for token in one.tokens),
        truncated=any(one.truncated for one in chosen),
        satisfied=all(one.satisfied for one in chosen),
        token_log_probs=log_probs,
        alignment=alignment,
        parts=len(parts),
    )


def _shift(index: int, offset: int, tag_size: int) -> int:
    """Return the index in the line of a word or piece of a part that begins with a repeated tag."""
    return index if index < tag_size else index - tag_size + offset


def _space_before(text: str, start: int) -> str:
    """Return the white space that ends before a position, with spaces for odd characters that end lines."""
    before = text[:start]
    return _ODD_LINE_ENDS.sub(" ", before[len(before.rstrip()) :])


def _word_indices(text: str, starts: Sequence[int]) -> list[int]:
    """Return the index of the word of the character at each start: in "ab cd", 0 for "a" and 1 for "d"."""
    word_starts = [match.start() for match in WORD.finditer(text)]
    return [max(0, bisect.bisect_right(word_starts, start) - 1) for start in starts]
