"""Segmentation of source lines: long lines are split into parts, whose translations are joined.

Contains pure functions of strings, for the boundaries at which a text may be split: after sentences (see
corpus/sentence_split.py), after clauses, between words, and as a last resort within a word. Then lines,
whole or in parts, become the ids that a model reads.
"""

import collections
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from flaxformer_mt.config.directions import LANGUAGE_CODE
from flaxformer_mt.corpus.sentence_split import CLOSING, split_after, split_sentences
from flaxformer_mt.errors import UserError
from flaxformer_mt.text_io.lines import format_line_numbers
from flaxformer_mt.vocab import Vocab

# Treatment of lines that are too long: split into parts, or cut after the maximum number of tokens.
LongLines = Literal["split", "cut"]

# Whether each sentence of a line is translated by itself; auto: as the model was trained.
SplitSentences = Literal["auto", "always", "never"]

# A model with at most this share of training lines with several sentences was trained on single sentences.
_MAX_SEVERAL = 0.05

_CLAUSE_MARKS = ",;:\u060c\u061b\u2013\u2014\u1363\u1364"
_WIDE_CLAUSE_MARKS = "\u3001\uff0c\uff1b\uff1a"
# As `SENTENCE_END`, the pattern matches only from the first mark of a run.
_CLAUSE_END = re.compile(
    rf"(?:(?<![{_CLAUSE_MARKS}])[{_CLAUSE_MARKS}]++[{CLOSING}]*+\s+"
    rf"|[{_WIDE_CLAUSE_MARKS}]++[{CLOSING}]*+\s*)"
)
_WORD_END = re.compile(r"\s+")

# Language tags at the start of a line, which select the languages of a multilingual model: >>fr<<,
# >>cmn_Hans<<, <2de>, <from:en>, with the white space around them.
_LANGUAGE_TAGS = re.compile(rf"\s*(?:(?:>>{LANGUAGE_CODE}<<|<2{LANGUAGE_CODE}>|<from:{LANGUAGE_CODE}>)\s*)+")

# Initial number of units in the search for the number of units that fit into one part.
_FIRST_GUESS = 4

# Returns whether a text is short enough for one part.
Fits = Callable[[str], bool]


class Part(NamedTuple):
    """A part of a text, including the white space at its ends, and the index of its first character."""

    start: int
    text: str


def split_text(text: str, fits: Fits, *, sentences: bool = False) -> list[Part]:
    """Splits a text into parts that fit; the concatenation of the parts is the text.

    A text that fits is one part, unless each sentence is to be one (`sentences`). A longer text is split
    after every sentence, because models are trained on sentences. A sentence that is still too long is split
    into as few parts as possible after its clauses, a clause likewise between words, and a word between
    characters. A single character is a part even if it is too long. With at most three words in a part, "a b.
    c d, e f" gives "a b. ", "c d, " and "e f".

    Args:
      fits: returns whether a text, without white space at its ends, is short enough.
    """
    if not sentences and fits(text.strip()):
        texts = [text]
    else:
        texts = [part for sentence in split_sentences(text) for part in _split(sentence, 0, fits)]
    starts = itertools.accumulate(map(len, texts), initial=0)
    return [Part(start, part) for start, part in zip(starts, texts, strict=False)]


def _split(text: str, level: int, fits: Fits) -> Iterator[str]:
    """Yields the parts of a text that is split by the functions `_SPLITTERS[level:]`."""
    if level == len(_SPLITTERS) or fits(text.strip()):
        yield text
        return
    units, first = _SPLITTERS[level](text), 0
    while first < len(units):
        count = _count_fitting(units, first, fits)
        if count:
            yield "".join(units[first : first + count])
        else:
            yield from _split(units[first], level + 1, fits)
        first += max(count, 1)


def _count_fitting(units: Sequence[str], first: int, fits: Fits) -> int:
    """Returns how many units, starting with `first`, fit into one part, by doubling and then by bisection.

    The result was tested itself, so it is correct even if a longer text has fewer tokens than a shorter one.
    """

    def fit_together(count: int) -> bool:
        return fits("".join(units[first : first + count]).strip())

    most = len(units) - first
    low, high = 0, min(_FIRST_GUESS, most)
    while fit_together(high):
        low = high
        if high == most:
            return most
        high = min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit_together(middle) else (low, middle)
    return low


def _split_clauses(text: str) -> list[str]:
    return split_after(text, _CLAUSE_END)


def _split_words(text: str) -> list[str]:
    return split_after(text, _WORD_END)


def _split_clusters(text: str) -> list[str]:
    """Splits a text into visible characters: a letter with its accents, an emoji with all joined emoji."""
    starts = [
        index
        for index, character in enumerate(text)
        if not index or not (_extends(character) or text[index - 1] == "\u200d")
    ]
    return [text[start:end] for start, end in itertools.pairwise([*starts, len(text)])]


def _extends(character: str) -> bool:
    """Returns whether a character extends the one before: a mark, joiner, variation or skin-tone selector."""
    return (
        unicodedata.category(character).startswith("M")
        or character == "\u200d"
        or "\U0001f3fb" <= character <= "\U0001f3ff"
    )


# From coarse to fine; the concatenation of the units that each returns is the text.
_SPLITTERS: tuple[Callable[[str], list[str]], ...] = (_split_clauses, _split_words, _split_clusters, list)


def join_translations(translations: Sequence[str], sources: Sequence[str] = ()) -> str:
    """Joins the translations of a text's parts with spaces, but without a space beside Chinese or Japanese.

    ["A b.", "", "C d."] gives "A b. C d.", and ["你好。", "再见。"] gives "你好。再见。".

    Args:
      sources: the parts; the white space after each of them takes the place of the space. Empty: one space.
    """
    joined, gap = "", " "
    gaps = [source[len(source.rstrip()) :] for source in sources] or [" "] * len(translations)
    for text, after in zip(map(str.strip, translations), gaps, strict=True):
        if text:
            joined += (gap if separator_before(text, joined) else "") + text
        gap = after or " "
    return joined


def separator_before(text: str, before: str) -> str:
    """Returns what `join_translations` puts between two nonempty translations: a space or nothing."""
    return " " if before and not (is_unspaced(before[-1]) or is_unspaced(text[0])) else ""


def is_unspaced(character: str) -> bool:
    """Returns whether a character is Chinese or Japanese, punctuation included: written without spaces."""
    return any(first <= ord(character) <= last for first, last in _UNSPACED)


# Unicode blocks: CJK punctuation and kana, bopomofo, ideographs with their extensions, full-width forms.
_UNSPACED = (
    (0x2E80, 0x312F),
    (0x3190, 0x9FFF),
    (0xF900, 0xFAFF),
    (0xFF00, 0xFFEF),
    (0x1B000, 0x1B16F),
    (0x20000, 0x3FFFF),
)


class SourcePart(NamedTuple):
    """A sentence to translate: a part of the line with index `line`, and its ids, which end in eos."""

    line: int
    part: Part
    ids: np.ndarray
    # Whether `ids` contain only the beginning of the part.
    cut: bool = False
    # Whether the line, or with sentences for parts one of its sentences, was too long to be one part.
    long: bool = False
    # The line's language tags, which `ids` begin with although they are not in `part`, and their pieces.
    tag: str = ""
    tag_pieces: int = 0
    # Number of pieces that `ids` begin with although the line does not have them: tags of given languages.
    added_pieces: int = 0

    @property
    def text(self) -> str:
        """The text of `ids` without added tags: the part with the line's own tags."""
        return self.tag + self.part.text

    @property
    def tag_words(self) -> int:
        """The number of words of the tags; without a space, the last tag belongs to the word after it."""
        return len(self.tag.split()) - (self.tag != "" and not self.tag[-1].isspace())


def read_sources(
    lines: Sequence[str],
    *,
    vocab: Vocab,
    longest: int,
    long_lines: LongLines,
    sentences: bool = False,
    tags: Sequence[str] | None = None,
) -> list[SourcePart]:
    """Returns the parts of lines in order: none of a blank line, several of a split line, one of any other.

    Args:
      longest: maximum number of tokens of a part, with eos.
      long_lines: split: a longer part is split into several ones; cut: only its beginning is kept.
      sentences: whether each sentence of a line is a part.
      tags: language tags to put before all parts of each line, each followed by a space and one piece of the
        vocabulary, as in ">>fr<< "; None: none.
    """
    tags = [""] * len(lines) if tags is None else tags
    nonblank = [index for index, line in enumerate(lines) if line.strip()]
    parts: list[SourcePart] = []
    texts = [tags[index] + lines[index] for index in nonblank]
    for index, ids in zip(nonblank, vocab.tokenize_all(texts), strict=True):
        added = len(tags[index].split())
        too_long = len(ids) > longest and long_lines == "split"
        if too_long or sentences and len(split_sentences(lines[index])) > 1:
            options = {"sentences": sentences, "cut": long_lines == "cut"}
            parts += _split_line(index, lines[index], vocab, longest, tags[index], **options)
        elif len(ids) > 1 + added:  # a line that normalization empties has eos alone, and is blank too
            parts.append(_make_part(index, Part(0, lines[index]), ids, vocab, longest, added))
    return parts


def choose_splitting(choice: SplitSentences, several_sentences: float | None) -> bool:
    """Returns whether sentences are translated by themselves.

    Args:
      several_sentences: the share of training lines with more than one sentence. None: it is unknown, and
        auto leaves lines whole.
    """
    if choice == "auto":
        return several_sentences is not None and several_sentences <= _MAX_SEVERAL
    return choice == "always"


def find_language_tags(line: str) -> str:
    """Returns the language tags that a line starts with, with the white space around them; "" if none.

    ">>fr<< der Hund" gives ">>fr<< ", and "<2de>a dog" gives "<2de>". A line of tags alone has none.
    """
    match = _LANGUAGE_TAGS.match(line)
    return match[0] if match and match.end() < len(line) else ""


def _split_line(
    index: int, line: str, vocab: Vocab, longest: int, added: str, *, sentences: bool, cut: bool
) -> list[SourcePart]:
    """Splits a line; its parts begin with `added`, and repeat the language tags at the line's start."""
    tag = find_language_tags(line)
    tag_tokens = len(vocab.tokenize(added + tag))
    if tag_tokens >= longest:  # no room for text after the tags
        added, tag, tag_tokens = "", "", 1
    added_pieces = len(vocab.tokenize(added)) - 1 if added else 0

    def fits(text: str) -> bool:
        return cut or len(vocab.tokenize(added + tag + text)) <= longest

    split = split_text(line[len(tag) :], fits, sentences=sentences)
    long = not sentences or len(split) > len(split_sentences(line[len(tag) :]))
    parts = [Part(len(tag) + start, text) for start, text in split]
    all_ids = vocab.tokenize_all([added + tag + part.text.strip() for part in parts])
    found: list[SourcePart] = []
    for part, ids in zip(parts, all_ids, strict=True):
        if len(ids) > tag_tokens:  # not blank
            source = _make_part(index, part, ids, vocab, longest, added_pieces)._replace(long=long)
            if tag and found:
                source = source._replace(tag=tag, tag_pieces=tag_tokens - 1 - added_pieces)
            elif tag:  # the first part contains the tags themselves
                source = source._replace(part=Part(0, line[: part.start] + part.text))
            found.append(source)
    return found


def _make_part(index: int, part: Part, ids: np.ndarray, vocab: Vocab, longest: int, added: int) -> SourcePart:
    cut = len(ids) > longest
    kept = np.append(ids[: longest - 1], vocab.eos_id) if cut else ids
    return SourcePart(index, part, kept, cut, added_pieces=added)


def check_lines(lines: Sequence[str], *, first_line: int) -> None:
    """Raises UserError for lines that are one string, or are not all strings; counts from `first_line`."""
    if isinstance(lines, str):
        raise UserError("translate takes a list of lines, but got one string; put the string in a list")
    for number, line in enumerate(lines, start=first_line):
        if not isinstance(line, str):
            raise UserError(f"line {number} is {type(line).__name__}, not str; decode bytes to str first")


def warn_of_long_lines(parts: Sequence[SourcePart], *, first_line: int, longest: int) -> list[str]:
    """Returns warnings that name the lines that were split or cut, counted from `first_line`."""
    counts = collections.Counter(first_line + part.line for part in parts if part.long)
    split = [number for number, count in counts.items() if count > 1]
    cut = sorted({first_line + part.line for part in parts if part.cut})
    messages = []
    if split:
        messages.append(
            f"{format_line_numbers(split)}: longer than data.max_source_length {longest} tokens, so "
            "translated in parts, which are joined again"
        )
    if cut:
        messages.append(
            f"{format_line_numbers(cut)}: longer than data.max_source_length {longest} tokens, so only the "
            "beginning was translated; split long lines into sentences"
        )
    return messages
