"""Joins the translations of the sentences and other parts of a line."""

import bisect
import dataclasses
import heapq
import itertools
import re
from collections.abc import Sequence
from typing import Any

from flaxformer_mt.translation.result import EMPTY, Translation, rank
from flaxformer_mt.translation.segments import Segment
from flaxformer_mt.unicode_text import WORD

# Characters that some program treats as the end of a line, without line feeds, which no line of a file has.
_ODD_LINE_ENDS = re.compile("\r(?!\n)|[\v\f\x1c-\x1e\x85\u2028\u2029]")

# Unicode blocks: CJK punctuation and kana, bopomofo, ideographs with their extensions, full-width forms.
_UNSPACED = re.compile(
    "[\u2e80-\u312f\u3190-\u9fff\uf900-\ufaff\uff00-\uffef\U0001b000-\U0001b16f\U00020000-\U0003ffff]"
)


def join_parts(line: Segment, *, eos_id: int) -> Translation:
    """Return the translation of a line, joined from its parts in order; it is empty if there are no parts.

    Log-probabilities and scores are summed over parts. The n_best hypotheses are the combinations with the
    highest sums: with scores -1 and -3 for one part, -2 and -2.5 for another, the best score is -1 - 2 and
    the second best -1 - 2.5.
    """
    if not line.parts:
        log_probs = () if line.annotations.token_log_probs else None
        alignment = None if line.annotations.alignments is None else ()
        satisfied = not line.request.phrases
        return dataclasses.replace(EMPTY, token_log_probs=log_probs, alignment=alignment, satisfied=satisfied)
    translations = [part.translation for part in line.parts if part.translation is not None]
    joined, first = translations[0], line.parts[0]
    if len(first.text) + len(first.tag) != len(line.line):
        # Sums of scores with the last of the hypotheses, linked to those before it: of a line of thousands of
        # parts, a tuple for each combination would take quadratic time.
        combinations: list[tuple[float, Any]] = [(0.0, None)]
        for translation in translations:
            longer = [
                (score + one.score, (one, before))
                for score, before in combinations
                for one in translation.n_best
            ]
            combinations = heapq.nlargest(line.request.n_best, longer, key=lambda sums: sums[0])
        joined = rank([_add_up(line, _unlink(last), eos_id) for _, last in combinations])
    is_cut = any(part.is_cut for part in line.parts)
    return dataclasses.replace(joined, truncated=True) if is_cut else joined


def _unlink(linked: Any) -> list[Translation]:
    """Return the hypotheses of a linked list of pairs (last hypothesis, list before it), first to last."""
    hypotheses = []
    while linked is not None:
        hypothesis, linked = linked
        hypotheses.append(hypothesis)
    return hypotheses[::-1]


def _add_up(line: Segment, hypotheses: Sequence[Translation], eos_id: int) -> Translation:
    """Return the translation of a line, joined from one hypothesis per part."""
    parts = line.parts
    source_starts = [part.start + len(part.text) - len(part.text.lstrip()) for part in parts]
    spaces = [
        " " if part.continues else _space_before(line.line, start)
        for part, start in zip(parts, source_starts, strict=True)
    ]
    text, starts = join_translations([one.text for one in hypotheses], spaces)
    alignment = log_probs = None
    if all(one.token_log_probs is not None for one in hypotheses):
        log_probs = tuple(value for one in hypotheses for value in one.token_log_probs or ())
    if all(one.alignment is not None for one in hypotheses):
        # What is before each part: the number of words or pieces of the line and of its translation.
        if line.annotations.alignments == "pieces":
            own = (part.num_pieces - part.tag_pieces for part in parts)
            sources = [*itertools.accumulate(own, initial=parts[0].tag_pieces)]
            sizes = (len(one.tokens) - one.tokens.count(eos_id) for one in hypotheses)
            targets = [*itertools.accumulate(sizes, initial=0)]
            tag_sizes = [part.tag_pieces for part in parts]
        else:
            sources, targets = _word_indices(line.line, source_starts), _word_indices(text, starts)
            tag_sizes = [part.tag_words for part in parts]
        alignment = tuple(
            (_shift(i, source, tag_size), j + target)
            for one, source, target, tag_size in zip(hypotheses, sources, targets, tag_sizes, strict=False)
            for i, j in one.alignment or ()
        )
    return Translation(
        text=text,
        score=sum(one.score for one in hypotheses),
        log_prob=sum(one.log_prob for one in hypotheses),
        tokens=tuple(token for one in hypotheses for token in one.tokens),
        truncated=any(one.truncated for one in hypotheses),
        satisfied=all(one.satisfied for one in hypotheses),
        token_log_probs=log_probs,
        alignment=alignment,
        parts=len(parts),
        sentence_starts=tuple(start for start, part in zip(starts, parts, strict=True) if not part.continues),
    )


def _shift(index: int, offset: int, tag_size: int) -> int:
    """Convert the index of a word or subword in a part, which begins with a copy of the tag, to the line."""
    return index if index < tag_size else index - tag_size + offset


def _space_before(text: str, start: int) -> str:
    """Return the white space before `start`; unusual line separators in it are replaced by spaces."""
    before = text[:start]
    return _ODD_LINE_ENDS.sub(" ", before[len(before.rstrip()) :])


def _word_indices(text: str, starts: Sequence[int]) -> list[int]:
    """Return the word index of the character at each start: in "ab cd", 0 for "a" and 1 for "d"."""
    word_starts = [match.start() for match in WORD.finditer(text)]
    return [max(0, bisect.bisect_right(word_starts, start) - 1) for start in starts]


def join_translations(translations: Sequence[str], spaces: Sequence[str]) -> tuple[str, list[int]]:
    """Join the translations of a text's parts; return the result, and where each translation starts in it.

    `spaces` is the white space before each part of the text. This white space is kept between translations,
    line breaks included; but if it is a single space or empty, it becomes one space, or none next to Chinese
    or Japanese. ["A b.", "", "C d."] gives "A b. C d.", and ["你好。", "再见。"] gives "你好。再见。".
    """
    joined: list[str] = []
    starts: list[int] = []
    length = 0
    for text, space in zip(map(str.strip, translations), spaces, strict=True):
        if text and joined:
            beside = is_unspaced(joined[-1][-1]) or is_unspaced(text[0])
            joined.append(space if space not in ("", " ") else "" if beside else " ")
            length += len(joined[-1])
        starts.append(length)
        if text:
            joined.append(text)
            length += len(text)
    return "".join(joined), starts


def is_unspaced(character: str) -> bool:
    """Return whether a character is Chinese or Japanese text or punctuation, written without spaces."""
    return _UNSPACED.match(character) is not None
