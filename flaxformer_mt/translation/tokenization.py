"""The step that tokenizes segments, and splits or cuts segments that are too long for the model."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Literal

import numpy as np
import regex

from flaxformer_mt.corpus.sentence_split import CLOSING, split_sentences
from flaxformer_mt.errors import UserError
from flaxformer_mt.translation.segments import Segment, Step
from flaxformer_mt.unicode_text import is_blank
from flaxformer_mt.vocab import Vocab

# Treatment of lines that are too long: split into parts, or cut after the maximum number of tokens.
LongLines = Literal["split", "cut"]

_CLAUSE_MARKS = ",;:\u060c\u061b\u2013\u2014\u1363\u1364"
_WIDE_CLAUSE_MARKS = "\u3001\uff0c\uff1b\uff1a"

# Matches only from the first mark of a run and does not backtrack into it (++, *+): from every mark of a run,
# a search for the white space after it would take quadratic time.
_CLAUSE_END = re.compile(
    rf"(?:(?<![{_CLAUSE_MARKS}])[{_CLAUSE_MARKS}]++[{CLOSING}]*+\s+"
    rf"|[{_WIDE_CLAUSE_MARKS}]++[{CLOSING}]*+\s*)"
)

# A long sentence is divided after one of these: a clause, white space, a visible character (a letter with its
# accents, a joined emoji), a character.
_UNITS = (_CLAUSE_END, re.compile(r"\s+"), regex.compile(r"\X"), re.compile(".", re.DOTALL))

# Returns whether a text is short enough for one part.
Fits = Callable[[str], bool]


class Tokenization(Step):
    """Tokenizes segments, splits or cuts those that are too long, and drops those without words."""

    def __init__(self, vocab: Vocab, *, longest: int, long_lines: LongLines) -> None:
        """`longest`: maximum number of tokens of a part, with eos."""
        self._vocab, self._longest, self._long_lines = vocab, longest, long_lines

    def before(self, segments: list[Segment]) -> list[Segment]:
        parts: list[Segment] = []
        for segment in self._tokenize(segments):
            smaller = [segment]
            if len(segment.ids) > self._longest and self._long_lines == "split":
                if segment.request.phrases:
                    raise UserError(
                        f"line {segment.request.seed} has required phrases and {len(segment.ids)} tokens; "
                        f"the model translates at most {self._longest} (data.max_source_length) as a whole: "
                        "shorten the line, or leave out its phrases"
                    )
                fits = functools.partial(self._fits, segment)
                texts = split_text(segment.text, fits, language=segment.source_language)
                smaller = self._tokenize(segment.divide(texts, continues=True))
            parts += map(self._cut, smaller)
        return parts

    def _tokenize(self, segments: list[Segment]) -> list[Segment]:
        """Set the ids of segments; return those with words, as normalization may leave a text empty."""
        segments = [segment for segment in segments if not is_blank(segment.text)]
        all_ids = self._vocab.tokenize_all([segment.read(segment.text.strip()) for segment in segments])
        for segment, ids in zip(segments, all_ids, strict=True):
            segment.ids = ids
        return [segment for segment in segments if segment.num_pieces > segment.tag_pieces]

    def _fits(self, segment: Segment, text: str) -> bool:
        return len(self._vocab.tokenize(segment.read(text))) <= self._longest

    def _cut(self, segment: Segment) -> Segment:
        if len(segment.ids) <= self._longest:
            return segment
        ids = np.append(segment.ids[: self._longest - 1], self._vocab.eos_id)
        return dataclasses.replace(segment, ids=ids, is_cut=True)


def split_text(text: str, fits: Fits, *, language: str = "") -> list[str]:
    """Split a text into parts for which `fits` is true; the concatenation of the parts is the text.

    A text that fits is one part. A longer text is split after every sentence, because models are trained on
    sentences. A sentence that is still too long is halved until its parts fit: after the clause that ends
    nearest to the middle, else between words, else between characters. A single character is a part even if
    it does not fit. With at most three words in a part, "a b. c d, e f" gives "a b. ", "c d, " and "e f".
    `fits` is called with texts without leading or trailing white space.
    """
    if fits(text.strip()):
        return [text]
    return [part for sentence in split_sentences(text, language=language) for part in _halve(sentence, fits)]


def _halve(text: str, fits: Fits) -> list[str]:
    for unit in _UNITS if not fits(text.strip()) else ():
        if ends := [match.end() for match in unit.finditer(text) if match.end() < len(text)]:
            end = min(ends, key=lambda end: abs(2 * end - len(text)))
            return _halve(text[:end], fits) + _halve(text[end:], fits)
    return [text]
