"""Segmentation of source lines: lines are split into parts, whose translations are joined.

The parts are sentences, and the parts of those that are too long. Contains pure functions of strings (the
boundaries at which a text may be split: after sentences, after clauses, between words, and as a last resort
within a word), followed by the conversion of lines to the ids that a model reads.
"""

import functools
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from flaxformer_mt.config.directions import LANGUAGE_CODE
from flaxformer_mt.corpus.sentence_split import CLOSING, split_sentences
from flaxformer_mt.errors import UserError
from flaxformer_mt.text_io.lines import format_line_numbers
from flaxformer_mt.vocab import Vocab
from flaxformer_mt.writing_systems import is_blank

# Treatment of lines that are too long: split into parts, or cut after the maximum number of tokens.
LongLines = Literal["split", "cut"]

# Treatment of lines of several sentences: each sentence is translated apart, or the line as a whole; auto:
# apart, unless the model was trained on such lines.
SplitSentences = Literal["auto", "always", "never"]

# A model of whose training lines at least this share has several sentences translates such lines whole.
_TRAINED_ON_SEVERAL = 0.1

_CLAUSE_MARKS = ",;:\u060c\u061b\u2013\u2014\u1363\u1364"
_WIDE_CLAUSE_MARKS = "\u3001\uff0c\uff1b\uff1a"

# Matches only from the first mark of a run and does not backtrack into it (++, *+): from every mark of a run,
# a search for the white space after it would take quadratic time.
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


def splits_sentences(option: SplitSentences, *, several: float | None) -> bool:
    """Returns whether a model translates the sentences of a line apart.

    Args:
      several: share of the lines that it was trained on that have several sentences. None: unknown; nearly
        all models are trained on single sentences, and lose what follows the first one.
    """
    return option == "always" or (option == "auto" and (several or 0.0) < _TRAINED_ON_SEVERAL)


def split_text(text: str, fits: Fits, *, language: str = "") -> list[str]:
    """Splits a text into parts that fit; the concatenation of the parts is the text.

    A text that fits is one part. A longer text is split after every sentence, because models are trained on
    sentences. A sentence that is still too long is split into as few parts as possible after its clauses, a
    clause likewise between words, and a word between characters. A single character is a part even if it is
    too long. With at most three words in a part, "a b. c d, e f" gives "a b. ", "c d, " and "e f".

    Args:
      fits: returns whether a text, without white space at its ends, is short enough.
      language: of the text, see `split_sentences`.
    """
    if fits(text.strip()):
        return [text]
    return [part for one in split_sentences(text, language=language) for part in _split(one, 0, fits)]


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
    return _split_after(text, _CLAUSE_END)


def _split_words(text: str) -> list[str]:
    return _split_after(text, _WORD_END)


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


def _split_after(text: str, end: re.Pattern[str]) -> list[str]:
    """Splits a text after every match of `end`."""
    ends = [match.end() for match in end.finditer(text)]
    return [text[start:stop] for start, stop in itertools.pairwise([0, *ends, len(text)]) if start < stop]


# From coarse to fine; the concatenation of the units that each returns is the text.
_SPLITTERS: tuple[Callable[[str], list[str]], ...] = (_split_clauses, _split_words, _split_clusters, list)


def join_translations(translations: Sequence[str], spaces: Sequence[str]) -> tuple[str, list[int]]:
    """Joins the translations of a text's parts; returns also the index of each one's first character.

    Between two of them is the white space of the text as it is, line breaks included; but where it is a
    single space or none, there is a space, and none beside Chinese or Japanese. ["A b.", "", "C d."] gives
    "A b. C d.", and ["你好。", "再见。"] gives "你好。再见。".

    Args:
      spaces: the white space before each part in the text.
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


class Part(NamedTuple):
    """A part of a text, including the white space at its ends, and the index of its first character."""

    start: int
    text: str


class SourcePart(NamedTuple):
    """A sentence to translate: a part of the line with index `line`, and its ids, which end in eos."""

    line: int
    part: Part
    ids: np.ndarray
    # Whether `ids` contain only the beginning of the part.
    cut: bool = False
    # The line's language tags, which `ids` begin with although they are not in `part`, and their pieces.
    tag: str = ""
    tag_pieces: int = 0
    # Number of pieces that `ids` begin with although the line does not have them: tags of given languages.
    added_pieces: int = 0
    # Whether the part before is of the same line or sentence, which was too long for one part.
    continues: bool = False

    @property
    def text(self) -> str:
        """The text of `ids` without added tags: the part with the line's own tags."""
        return self.tag + self.part.text

    @property
    def tag_words(self) -> int:
        """The number of words of the tags; without a space, the last tag belongs to the word after it."""
        return len(self.tag.split()) - (self.tag != "" and not self.tag[-1].isspace())


class _Unit(NamedTuple):
    """A line after its tags, or a part of it, with what it needs to be read."""

    line: int
    # Where `text` begins in the line.
    start: int
    text: str
    # What is put before the text: added tags and those at the line's start; and their tokens, with eos.
    added: str
    tag: str
    num_tags: int
    # Tokens of the added tags.
    added_pieces: int
    continues: bool = False

    def divide(self, texts: Sequence[str], *, continues: bool) -> "list[_Unit]":
        """Returns a unit for each of consecutive texts; `continues`: of those after the first."""
        starts = itertools.accumulate(map(len, texts), initial=self.start)
        return [
            self._replace(start=start, text=text, continues=continues and start > self.start)
            for start, text in zip(starts, texts, strict=False)
        ]


def read_sources(
    lines: Sequence[str],
    *,
    vocab: Vocab,
    longest: int,
    long_lines: LongLines,
    sentences: bool = False,
    language: str = "",
    tags: Sequence[str] | None = None,
) -> list[SourcePart]:
    """Returns the parts of lines in order: none of a blank line, several of a split line, one of any other.

    All parts of a line begin with its tags, those that are put before it and those at its start.

    Args:
      longest: maximum number of tokens of a part, with eos.
      long_lines: split: what is longer is split into several parts; cut: only its beginning is kept.
      sentences: whether each sentence is a part, or only the whole line.
      language: of the lines, see `split_sentences`.
      tags: language tags to put before all parts of each line, each followed by a space and one piece of the
        vocabulary, as in ">>fr<< "; None: none.
    """
    count = functools.cache(lambda tags: len(vocab.tokenize(tags)))
    units: list[_Unit] = []
    for index, line in enumerate(lines):
        added, tag = "" if tags is None else tags[index], find_language_tags(line)
        if added + tag and count(added + tag) >= longest:  # no room for text after the tags
            added = tag = ""
        added_pieces = count(added) - 1 if added else 0
        whole = _Unit(index, len(tag), line[len(tag) :], added, tag, count(added + tag), added_pieces)
        texts = split_sentences(whole.text, language=language) if sentences else [whole.text]
        units += whole.divide(texts, continues=False)
    parts: list[SourcePart] = []
    for unit, ids in _tokenize(units, vocab):
        smaller = [(unit, ids)]
        if len(ids) > longest and long_lines == "split":
            fits = _make_test(unit, vocab, longest)
            texts = split_text(unit.text, fits, language=language)
            smaller = _tokenize(unit.divide(texts, continues=True), vocab)
        parts += [_make_part(one, own_ids, vocab, longest) for one, own_ids in smaller]
    firsts = {part.line: number for number, part in reversed([*enumerate(parts)]) if part.tag}
    for line, number in firsts.items():  # the first part contains the tags themselves
        first = parts[number]
        text = lines[line][: first.part.start] + first.part.text
        parts[number] = first._replace(part=Part(0, text), tag="", tag_pieces=0)
    return parts


def _tokenize(units: Sequence[_Unit], vocab: Vocab) -> list[tuple[_Unit, np.ndarray]]:
    """Returns the units that are not blank with their ids; normalization may empty a text."""
    units = [unit for unit in units if not is_blank(unit.text)]
    all_ids = vocab.tokenize_all([unit.added + unit.tag + unit.text.strip() for unit in units])
    return [(unit, ids) for unit, ids in zip(units, all_ids, strict=True) if len(ids) > unit.num_tags]


def _make_test(unit: _Unit, vocab: Vocab, longest: int) -> Fits:
    return lambda text: len(vocab.tokenize(unit.added + unit.tag + text)) <= longest


def _make_part(unit: _Unit, ids: np.ndarray, vocab: Vocab, longest: int) -> SourcePart:
    cut = len(ids) > longest
    return SourcePart(
        unit.line,
        Part(unit.start, unit.text),
        np.append(ids[: longest - 1], vocab.eos_id) if cut else ids,
        cut,
        unit.tag,
        unit.num_tags - 1 - unit.added_pieces,
        unit.added_pieces,
        unit.continues,
    )


def find_language_tags(line: str) -> str:
    """Returns the language tags that a line starts with, with the white space around them; "" if none.

    ">>fr<< der Hund" gives ">>fr<< ", and "<2de>a dog" gives "<2de>". A line of tags alone has none.
    """
    match = _LANGUAGE_TAGS.match(line)
    return match[0] if match and match.end() < len(line) else ""


def check_lines(lines: Sequence[str], *, first_line: int) -> None:
    """Raises UserError for lines that are one string, or are not all strings; counts from `first_line`."""
    if isinstance(lines, str):
        raise UserError("translate takes a list of lines, but got one string; put the string in a list")
    for number, line in enumerate(lines, start=first_line):
        if not isinstance(line, str):
            raise UserError(f"line {number} is {type(line).__name__}, not str; decode bytes to str first")


def warn_of_long_lines(parts: Sequence[SourcePart], *, first_line: int, longest: int) -> list[str]:
    """Returns warnings that name the lines that were too long, counted from `first_line`."""
    split = sorted({first_line + part.line for part in parts if part.continues})
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
