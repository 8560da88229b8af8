"""Lines of source text as sentences that a model can read: ids, of a whole line or of its parts.

Owns what becomes of a line that is too long, and of one without words. Knows nothing of search or of
translations.
"""

import collections
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from flaxformer_mt.text_io.lines import name_lines
from flaxformer_mt.translation.segmentation import Part, split_text
from flaxformer_mt.vocab import Vocab

LongLines = Literal["split", "cut"]


class SourcePart(NamedTuple):
    """A sentence to translate: the part of the line at `line`, and its ids, ending in eos."""

    line: int
    part: Part
    ids: np.ndarray
    # Only the beginning of the part is in `ids`.
    cut: bool = False


def read_sources(
    lines: Sequence[str], *, vocab: Vocab, longest: int, long_lines: LongLines
) -> list[SourcePart]:
    """The parts of lines, in order: one of each, several of a line that is split, none of one without words.

    Args:
      longest: in tokens, with eos.
      long_lines: whether a longer line is split into parts that are not, or only its beginning kept.
    """
    worded = [index for index, line in enumerate(lines) if line.strip()]
    parts: list[SourcePart] = []
    for index, ids in zip(worded, vocab.tokenize_all([lines[index] for index in worded]), strict=True):
        if len(ids) > longest and long_lines == "split":
            parts += _split(index, lines[index], vocab, longest)
        elif len(ids) > 1:  # a line of nothing but what normalisation removes is blank too: it is eos alone
            parts.append(_fit(index, Part(0, lines[index]), ids, vocab, longest))
    return parts


def _split(index: int, line: str, vocab: Vocab, longest: int) -> list[SourcePart]:
    found = split_text(line, lambda text: len(vocab.tokenize_all([text])[0]) <= longest)
    all_ids = vocab.tokenize_all([part.text.strip() for part in found])
    return [
        _fit(index, part, ids, vocab, longest)
        for part, ids in zip(found, all_ids, strict=True)
        if len(ids) > 1
    ]


def _fit(index: int, part: Part, ids: np.ndarray, vocab: Vocab, longest: int) -> SourcePart:
    if len(ids) <= longest:
        return SourcePart(index, part, ids)
    return SourcePart(index, part, np.append(ids[: longest - 1], vocab.eos_id), cut=True)


def warn_of_long_lines(parts: Sequence[SourcePart], *, first_line: int, longest: int) -> list[str]:
    """What is to be said of lines that were split or cut; lines are numbered from `first_line`."""
    counts = collections.Counter(first_line + part.line for part in parts)
    several = [number for number, count in counts.items() if count > 1]
    cut = sorted({first_line + part.line for part in parts if part.cut})
    messages = []
    if several:
        messages.append(
            f"{name_lines(several)}: longer than data.max_source_length {longest} tokens, so translated in "
            "parts, which are joined again"
        )
    if cut:
        messages.append(
            f"{name_lines(cut)}: longer than data.max_source_length {longest} tokens, so only the beginning "
            "was translated; split long lines into sentences"
        )
    return messages
