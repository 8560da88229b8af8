"""Segmentation of source lines: sentences, and the parts of those that are too long, as ids."""

import functools
import itertools
import re
from collections.abc import Callable, Container, Sequence
from typing import Literal, NamedTuple

import numpy as np
import regex

from flaxformer_mt.config.directions import LANGUAGE_CODE
from flaxformer_mt.corpus.sentence_split import CLOSING, split_sentences
from flaxformer_mt.errors import UserError
from flaxformer_mt.translation.letter_case import AS_IT_IS, LetterCase
from flaxformer_mt.unicode_text import BLANKS, is_blank, split_words
from flaxformer_mt.vocab import Vocab

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

# Language tags at the start of a line, which select the languages of a multilingual model: >>fr<<,
# >>cmn_Hans<<, <2de>, <from:en>, with the white space around them.
_TAG = f">>{LANGUAGE_CODE}<<|<2{LANGUAGE_CODE}>|<from:{LANGUAGE_CODE}>"
_LANGUAGE_TAGS = re.compile(rf"[{BLANKS}]*(?:(?:{_TAG})[{BLANKS}]*)+")

# What a sentence is divided after: clauses, words, visible characters (a letter with its accents, an emoji
# and what is joined to it), characters.
_UNITS = (_CLAUSE_END, re.compile(r"\s+"), regex.compile(r"\X"), re.compile(".", re.DOTALL))

# Returns whether a text is short enough for one part.
Fits = Callable[[str], bool]


def splits_sentences(option: SplitSentences, *, several: float | None) -> bool:
    """Return whether a model translates the sentences of a line apart.

    Args:
      several: share of the lines that it was trained on that have several sentences. None: unknown; nearly
        all models are trained on single sentences, and lose what follows the first one.
    """
    return option == "always" or (option == "auto" and (several or 0.0) < _TRAINED_ON_SEVERAL)


def split_text(text: str, fits: Fits, *, language: str = "") -> list[str]:
    """Split a text into parts that fit; the concatenation of the parts is the text.

    A text that fits is one part. A longer text is split after every sentence, because models are trained on
    sentences. A sentence that is still too long is halved until its parts fit: after the clause that ends
    nearest to its middle, else between words, else between characters. A single character is a part even if
    it is too long. With at most three words in a part, "a b. c d, e f" gives "a b. ", "c d, " and "e f".

    Args:
      fits: returns whether a text, without white space at its ends, is short enough.
      language: of the text, see `split_sentences`.
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


def join_translations(translations: Sequence[str], spaces: Sequence[str]) -> tuple[str, list[int]]:
    """Join the translations of a text's parts; return also the index of each one's first character.

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
    """Return whether a character is Chinese or Japanese, punctuation included: written without spaces."""
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
    """A sentence to translate: a part of the line with index `line`."""

    line: int
    # Index of its first character in the line, and its characters, with the white space at its ends.
    start: int
    content: str
    # What its ids begin with although it is not in `content`: tags of given languages, with the number of
    # their pieces, and the line's own tags.
    added: str = ""
    added_pieces: int = 0
    tag: str = ""
    tag_pieces: int = 0
    # Ids of all this; the last one is eos.
    ids: np.ndarray = np.zeros(0, np.int32)
    # Whether `ids` contain only the beginning of the part.
    cut: bool = False
    # Whether the part before is of the same line or sentence, which was too long for one part.
    continues: bool = False
    # The letter case of the sentence, if the model is given another one; see `LetterCase`.
    case: str = ""

    @property
    def text(self) -> str:
        """The text of `ids` without added tags: the part with the line's own tags."""
        return self.tag + self.content

    @property
    def num_pieces(self) -> int:
        """The number of pieces of the text."""
        return len(self.ids) - 1 - self.added_pieces

    @property
    def tag_words(self) -> int:
        """The number of words of the tags; without a space, the last tag belongs to the word after it."""
        return len(split_words(self.tag)) - (self.tag != "" and self.tag[-1] not in " \t\r\n")

    def divide(self, texts: Sequence[str], *, continues: bool) -> "list[SourcePart]":
        """Return a part for each of consecutive texts; `continues`: of those after the first."""
        starts = itertools.accumulate(map(len, texts), initial=self.start)
        return [
            self._replace(start=start, content=text, continues=continues and start > self.start)
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
    starts: Sequence[tuple[int, ...] | None] = (),
    letter_case: LetterCase = AS_IT_IS,
    unchanged: Container[int] = (),
) -> list[SourcePart]:
    """Return the parts of lines in order: none of a blank line, several of a split line, one of any other.

    All parts of a line begin with its tags, those that are put before it and those at its start.

    Args:
      longest: maximum number of tokens of a part, with eos.
      long_lines: split: what is longer is split into several parts; cut: only its beginning is kept.
      sentences: whether each sentence is a part, or only the whole line.
      language: of the lines, see `split_sentences`.
      tags: language tags to put before all parts of each line, each followed by a space and one piece of the
        vocabulary, as in ">>fr<< "; None: none.
      starts: where the sentences of each line start; None: they have to be found.
      letter_case: changes the letter case of sentences, but not in the lines with the indices `unchanged`.
    """
    count = functools.cache(lambda tags: len(vocab.tokenize(tags)) - 1)  # without eos
    units: list[SourcePart] = []
    for index, line in enumerate(lines):
        added = "" if tags is None else tags[index]
        tag = "" if added else find_language_tags(line)  # a tag that is not asked for is text
        if added + tag and count(added + tag) + 1 >= longest:  # no room for text after the tags
            added = tag = ""
        added_pieces, content = count(added) if added else 0, line[len(tag) :]
        tag_pieces = count(added + tag) - added_pieces
        whole = SourcePart(index, len(tag), content, added, added_pieces, tag, tag_pieces)
        texts = [content]
        if sentences and starts and (known := starts[index]) is not None:
            cuts = [0, *(start - len(tag) for start in known if start > len(tag)), len(content)]
            texts = [content[start:end] for start, end in itertools.pairwise(cuts)]
        elif sentences:
            texts = split_sentences(content, language=language)
        find = (lambda text: "") if index in unchanged else letter_case.find
        units += (one._replace(case=find(one.content)) for one in whole.divide(texts, continues=False))
    parts: list[SourcePart] = []
    for unit in _tokenize(units, vocab, letter_case):
        if len(unit.ids) <= longest:
            parts.append(unit)
        elif long_lines == "split":
            fits = functools.partial(_fits, unit, vocab, longest, letter_case)
            texts = split_text(unit.content, fits, language=language)
            smaller = _tokenize(unit.divide(texts, continues=True), vocab, letter_case)
            parts += [_cut(one, vocab, longest) for one in smaller]
        else:
            parts.append(_cut(unit, vocab, longest))
    firsts = {part.line: number for number, part in reversed([*enumerate(parts)]) if part.tag}
    for line, number in firsts.items():  # the first part contains the tags themselves
        first = parts[number]
        text = lines[line][: first.start] + first.content
        parts[number] = first._replace(start=0, content=text, tag="", tag_pieces=0)
    return parts


def _tokenize(parts: Sequence[SourcePart], vocab: Vocab, letter_case: LetterCase) -> list[SourcePart]:
    """Return the parts that are not blank with their ids; normalization may empty a text."""
    parts = [part for part in parts if not is_blank(part.content)]
    all_ids = vocab.tokenize_all([_write(part, part.content.strip(), letter_case) for part in parts])
    read = [part._replace(ids=ids) for part, ids in zip(parts, all_ids, strict=True)]
    return [part for part in read if part.num_pieces > part.tag_pieces]


def _fits(part: SourcePart, vocab: Vocab, longest: int, letter_case: LetterCase, text: str) -> bool:
    return len(vocab.tokenize(_write(part, text, letter_case))) <= longest


def _write(part: SourcePart, text: str, letter_case: LetterCase) -> str:
    """Return what the model reads of a text of a part, its tags included."""
    return part.added + part.tag + letter_case.lower(text, part.case)


def _cut(part: SourcePart, vocab: Vocab, longest: int) -> SourcePart:
    if len(part.ids) <= longest:
        return part
    return part._replace(ids=np.append(part.ids[: longest - 1], vocab.eos_id), cut=True)


def find_language_tags(line: str) -> str:
    """Return the language tags that a line starts with, with the white space around them; "" if none.

    ">>fr<< der Hund" gives ">>fr<< ", and "<2de>a dog" gives "<2de>". A line of tags alone has none.
    """
    match = _LANGUAGE_TAGS.match(line)
    return match[0] if match and match.end() < len(line) else ""


def check_lines(lines: Sequence[str], *, first_line: int) -> None:
    """Raise UserError for lines that are one string, or are not all strings; count from `first_line`."""
    if isinstance(lines, str):
        raise UserError("translate takes a list of lines, but got one string; put the string in a list")
    for number, line in enumerate(lines, start=first_line):
        if not isinstance(line, str):
            raise UserError(f"line {number} is {type(line).__name__}, not str; decode bytes to str first")
