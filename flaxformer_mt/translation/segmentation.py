"""Segmentation of source lines: long lines are split into parts, whose translations are joined.

Contains pure functions of strings (the boundaries at which a text may be split: after sentences, after
clauses, between words, and as a last resort within a word), followed by the conversion of lines, whole or in
parts, to the ids that a model reads.
"""

import collections
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from flaxformer_mt.config.directions import LANGUAGE_CODE
from flaxformer_mt.errors import UserError
from flaxformer_mt.text_io.lines import format_line_numbers
from flaxformer_mt.vocab import Vocab

# Treatment of lines that are too long: split into parts, or cut after the maximum number of tokens.
LongLines = Literal["split", "cut"]

# Marks that end a sentence if white space follows; the wide marks of East Asian scripts need no white space.
_STOPS = ".!?\u2026\u203c\u2047\u2048\u2049\u037e\u061f\u06d4\u0964\u0965\u0589\u1362\u17d4\u104b"
_WIDE_STOPS = "\u3002\uff01\uff1f\uff0e\uff61"
_CLAUSE_MARKS = ",;:\u060c\u061b\u2013\u2014\u1363\u1364"
_WIDE_CLAUSE_MARKS = "\u3001\uff0c\uff1b\uff1a"
# Closing quotes and brackets, which belong to the sentence before them.
_CLOSING = (
    "\"')\\]}\u2019\u201d\u201c\u00bb\u203a\u300d\u300f\u3011\u3015\u3009\u300b\uff09\uff3d\u00ab\u2039"
)

# Each pattern matches only from the first mark of a run and does not backtrack into it (++, *+): from every
# mark of a run, a search for the white space after it would take quadratic time.
_SENTENCE_END = re.compile(
    rf"(?:(?<![{_STOPS}])[{_STOPS}]++[{_CLOSING}]*+\s+"
    rf"|[{_WIDE_STOPS}][{_STOPS}{_WIDE_STOPS}]*+[{_CLOSING}]*+\s*)"
)
_CLAUSE_END = re.compile(
    rf"(?:(?<![{_CLAUSE_MARKS}])[{_CLAUSE_MARKS}]++[{_CLOSING}]*+\s+"
    rf"|[{_WIDE_CLAUSE_MARKS}]++[{_CLOSING}]*+\s*)"
)
_WORD_END = re.compile(r"\s+")
_LAST_WORD = re.compile(r"[^\s(\[{\"'\u201e\u201c\u00ab\u00bf\u00a1-]*\Z")

# Abbreviations, in lower case, after whose full stop a sentence usually continues, even if the next word has
# a capital letter. "etc." and abbreviations that are also words are therefore absent.
_ABBREVIATIONS = frozenset(
    """
    mr mrs ms dr prof st sr jr gen col capt lt sgt rev hon gov sen rep pres vs nos fig figs vol pp eds cf al
    inc ltd corp dept approx e.g i.e u.s
    hr fr nr str bzw ca vgl evtl ggf inkl zzgl abb hrsg jh jhd mio mrd abs z.b d.h u.a o.ä s.o s.u i.d.r u.u
    dipl geb gest
    mme mlle av boul env chap p.ex c.-à-d n.b réf éd
    sra srta sres dña ud uds avda núm pág págs tel p.ej ee.uu
    dott sigg sig.ra pag pagg cfr
    dhr mevr bijv nl blz o.a d.w.z
    тыс млн млрд руб ул т.е т.н
    tzv např popř mj resp
    """.split()
)

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


def split_text(text: str, fits: Fits) -> list[Part]:
    """Splits a text into parts that fit; the concatenation of the parts is the text.

    A text that fits is one part. A longer text is split after every sentence, because models are trained on
    sentences. A sentence that is still too long is split into as few parts as possible after its clauses, a
    clause likewise between words, and a word between characters. A single character is a part even if it is
    too long. With at most three words in a part, "a b. c d, e f" gives "a b. ", "c d, " and "e f".

    Args:
      fits: returns whether a text, without white space at its ends, is short enough.
    """
    texts = [text] if fits(text.strip()) else [p for s in split_sentences(text) for p in _split(s, 0, fits)]
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


def split_sentences(text: str) -> list[str]:
    """Splits a text after sentences and the white space that follows; the concatenation is the text.

    A sentence ends in a full stop, a question or exclamation mark or an ellipsis of any known script, and the
    closing quotes and brackets after it. East Asian marks always end a sentence. Other marks need white space
    after them, so that 3.14 and www.example.org stay whole, and no lower-case letter after the white space;
    and a full stop after a known abbreviation, an initial or a number of one or two digits ("Dr. Smith",
    "J. Smith", "am 3. Mai") is part of the sentence.
    """
    return _split_after(text, _SENTENCE_END, _ends_sentence)


def _ends_sentence(text: str, match: re.Match[str]) -> bool:
    if match.end() == len(text) or match[0][0] in _WIDE_STOPS:
        return True
    if text[match.end()].islower():
        return False
    mark = match[0].rstrip()
    if mark != ".":
        return True
    word = _LAST_WORD.search(text, max(0, match.start() - 30), match.start())
    word_text = word[0] if word else ""
    if word_text.isdigit():
        return len(word_text) > 2
    last = word_text.rpartition(".")[2]
    single_letter = len(last) == 1 and last.isalpha() and _is_alphabetic(last)
    return not (single_letter or word_text.casefold() in _ABBREVIATIONS)


def _is_alphabetic(letter: str) -> bool:
    """Returns whether a letter has a capital form; a single such letter is an initial or an abbreviation."""
    return letter.lower() != letter.upper()


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


def _split_after(
    text: str, end: re.Pattern[str], accept: Callable[[str, re.Match[str]], bool] | None = None
) -> list[str]:
    """Splits a text after every match of `end` that `accept` accepts."""
    units, start = [], 0
    for match in end.finditer(text):
        if accept is None or accept(text, match):
            units.append(text[start : match.end()])
            start = match.end()
    return [*units, text[start:]] if start < len(text) else units


# From coarse to fine; the concatenation of the units that each returns is the text.
_SPLITTERS: tuple[Callable[[str], list[str]], ...] = (_split_clauses, _split_words, _split_clusters, list)


def join_translations(translations: Sequence[str]) -> str:
    """Joins the translations of a text's parts with spaces, but without a space beside Chinese or Japanese.

    ["A b.", "", "C d."] gives "A b. C d.", and ["你好。", "再见。"] gives "你好。再见。".
    """
    texts = list(filter(None, (text.strip() for text in translations)))
    return "".join(
        separator_before(text, before) + text for before, text in zip(["", *texts], texts, strict=False)
    )


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
    tags: Sequence[str] | None = None,
) -> list[SourcePart]:
    """Returns the parts of lines in order: none of a blank line, several of a split line, one of any other.

    Args:
      longest: maximum number of tokens of a part, with eos.
      long_lines: split: a longer line is split into several parts; cut: only its beginning is kept.
      tags: language tags to put before all parts of each line, each followed by a space and one piece of the
        vocabulary, as in ">>fr<< "; None: none.
    """
    tags = [""] * len(lines) if tags is None else tags
    nonblank = [index for index, line in enumerate(lines) if line.strip()]
    parts: list[SourcePart] = []
    texts = [tags[index] + lines[index] for index in nonblank]
    for index, ids in zip(nonblank, vocab.tokenize_all(texts), strict=True):
        added = len(tags[index].split())
        if len(ids) > longest and long_lines == "split":
            parts += _split_line(index, lines[index], vocab, longest, tags[index])
        elif len(ids) > 1 + added:  # a line that normalization empties has eos alone, and is blank too
            parts.append(_make_part(index, Part(0, lines[index]), ids, vocab, longest, added))
    return parts


def find_language_tags(line: str) -> str:
    """Returns the language tags that a line starts with, with the white space around them; "" if none.

    ">>fr<< der Hund" gives ">>fr<< ", and "<2de>a dog" gives "<2de>". A line of tags alone has none.
    """
    match = _LANGUAGE_TAGS.match(line)
    return match[0] if match and match.end() < len(line) else ""


def _split_line(index: int, line: str, vocab: Vocab, longest: int, added: str) -> list[SourcePart]:
    """Splits a line; its parts begin with `added`, and repeat the language tags at the line's start."""
    tag = find_language_tags(line)
    tag_tokens = len(vocab.tokenize(added + tag))
    if tag_tokens >= longest:  # no room for text after the tags
        added, tag, tag_tokens = "", "", 1
    added_pieces = len(added.split())

    def fits(text: str) -> bool:
        return len(vocab.tokenize(added + tag + text)) <= longest

    parts = [Part(len(tag) + start, text) for start, text in split_text(line[len(tag) :], fits)]
    all_ids = vocab.tokenize_all([added + tag + part.text.strip() for part in parts])
    found: list[SourcePart] = []
    for part, ids in zip(parts, all_ids, strict=True):
        if len(ids) > tag_tokens:  # not blank
            source = _make_part(index, part, ids, vocab, longest, added_pieces)
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
    counts = collections.Counter(first_line + part.line for part in parts)
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
