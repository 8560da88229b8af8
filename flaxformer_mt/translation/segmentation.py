"""Text that is too long for a model, cut into parts that are not, and their translations put together.

Owns where a text may be cut: after sentences, after clauses, between words, and only then within one. Pure
functions of strings; what is too long is for a function to say that the caller gives. Knows no vocabulary.
"""

import functools
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

# Marks that end a sentence where white space follows; those of East Asian scripts need none.
_STOPS = ".!?\u2026\u203c\u2047\u2048\u2049\u037e\u061f\u06d4\u0964\u0965\u0589\u1362\u17d4\u104b"
_WIDE_STOPS = "\u3002\uff01\uff1f\uff0e\uff61"
_CLAUSE_MARKS = ",;:\u060c\u061b\u2013\u2014\u1363\u1364"
_WIDE_CLAUSE_MARKS = "\u3001\uff0c\uff1b\uff1a"
# Quotes and brackets that belong to the sentence before them.
_CLOSING = (
    "\"')\\]}\u2019\u201d\u201c\u00bb\u203a\u300d\u300f\u3011\u3015\u3009\u300b\uff09\uff3d\u00ab\u2039"
)

_SENTENCE_END = re.compile(
    rf"(?:[{_STOPS}]+[{_CLOSING}]*\s+|[{_WIDE_STOPS}][{_STOPS}{_WIDE_STOPS}]*[{_CLOSING}]*\s*)"
)
_CLAUSE_END = re.compile(rf"(?:[{_CLAUSE_MARKS}]+[{_CLOSING}]*\s+|[{_WIDE_CLAUSE_MARKS}]+[{_CLOSING}]*\s*)")
_WORD_END = re.compile(r"\s+")
_LAST_WORD = re.compile(r"[^\s(\[{\"'\u201e\u201c\u00ab\u00bf\u00a1-]*\Z")

# Words before a full stop that something follows as a rule, even where the next word has a capital: so not
# "etc.", and no words that are also whole ones, in lower case.
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

# How many of the first units are tried together before it is known how many fit.
_FIRST_GUESS = 4

Fits = Callable[[str], bool]


class Part(NamedTuple):
    """A stretch of a text, with white space at its ends, and where its first character stands."""

    start: int
    text: str


def split_text(text: str, fits: Fits) -> list[Part]:
    """Cuts a text into parts that fit; put in a row they are the text again.

    A text that fits is one part. One that does not is cut after every sentence, since sentences are what
    models are trained on. A sentence that does not fit is cut into as few parts as its clauses allow, a
    clause likewise between words, and a word between characters. Only a single character is a part whether
    it fits or not. With room for three words, "a b. c d, e f" gives "a b. ", "c d, " and "e f".

    Args:
      fits: whether a text, without white space at its ends, is short enough.
    """
    texts = [text] if fits(text.strip()) else [p for s in split_sentences(text) for p in _split(s, 0, fits)]
    ends = itertools.accumulate(map(len, texts), initial=0)
    return [Part(start, part) for start, part in zip(ends, texts, strict=False)]


def _split(text: str, level: int, fits: Fits) -> Iterator[str]:
    """Gives the parts of a text whose cuts are those of `level` and finer."""
    if level == len(_CUTS) or fits(text.strip()):
        yield text
        return
    units, first = _CUTS[level](text), 0
    while first < len(units):
        count = _count_fitting(units, first, fits)
        if count:
            yield "".join(units[first : first + count])
        else:
            yield from _split(units[first], level + 1, fits)
        first += max(count, 1)


def _count_fitting(units: Sequence[str], first: int, fits: Fits) -> int:
    """How many units from the first one on fit together: the number doubles until they do not, then halves.

    The answer is a number that was tried, so they do fit, even where a longer text has fewer tokens.
    """

    def together(count: int) -> bool:
        return fits("".join(units[first : first + count]).strip())

    most = len(units) - first
    low, high = 0, min(_FIRST_GUESS, most)
    while together(high):
        low = high
        if high == most:
            return most
        high = min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if together(middle) else (low, middle)
    return low


def split_sentences(text: str) -> list[str]:
    """Cuts after sentences, with the white space that follows; put in a row they are the text again.

    A sentence ends in a full stop, a question or exclamation mark or an ellipsis of some script, and the
    quotes and brackets that close after it. Marks of most scripts end one only before white space, so 3.14
    and www.example.org stay whole; not after a known abbreviation, an initial or a one- or two-digit number
    ("Dr. Smith", "J. Smith", "am 3. Mai"), and not before a lower-case letter.
    """
    return _cut(text, _SENTENCE_END, _ends_sentence)


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
    """Whether a letter is of a script with capitals, where a single one is an initial or an abbreviation."""
    return letter.lower() != letter.upper()


def _split_clauses(text: str) -> list[str]:
    return _cut(text, _CLAUSE_END)


def _split_words(text: str) -> list[str]:
    return _cut(text, _WORD_END)


def _split_clusters(text: str) -> list[str]:
    """Characters as they are seen: a letter with its accents, an emoji with what is joined to it."""
    clusters: list[str] = []
    for character in text:
        if clusters and (_extends(character) or clusters[-1][-1] == "\u200d"):
            clusters[-1] += character
        else:
            clusters.append(character)
    return clusters


def _extends(character: str) -> bool:
    """Whether a character belongs to the one before it: marks, joiners, variation and skin-tone selectors."""
    return (
        unicodedata.category(character).startswith("M")
        or character == "\u200d"
        or "\U0001f3fb" <= character <= "\U0001f3ff"
    )


def _cut(
    text: str, end: re.Pattern[str], accept: Callable[[str, re.Match[str]], bool] | None = None
) -> list[str]:
    """Cuts after every match that is accepted."""
    units, start = [], 0
    for match in end.finditer(text):
        if accept is None or accept(text, match):
            units.append(text[start : match.end()])
            start = match.end()
    return [*units, text[start:]] if start < len(text) else units


# From coarse to fine; each gives units that are the text again when put in a row.
_CUTS: tuple[Callable[[str], list[str]], ...] = (_split_clauses, _split_words, _split_clusters, list)


def join_translations(translations: Sequence[str]) -> str:
    """The translations of a text's parts as one: a space between two, but none beside Chinese or Japanese.

    ["A b.", "", "C d."] gives "A b. C d.", and ["你好。", "再见。"] gives "你好。再见。".
    """
    return functools.reduce(_join, filter(None, (t.strip() for t in translations)), "")


def _join(left: str, right: str) -> str:
    spaced = left and not (is_unspaced(left[-1]) or is_unspaced(right[0]))
    return left + " " * bool(spaced) + right


def is_unspaced(character: str) -> bool:
    """Whether a character is Chinese or Japanese, or a mark of theirs: they are written without spaces."""
    return any(first <= ord(character) <= last for first, last in _UNSPACED)


# Blocks of Unicode: CJK marks and kana, bopomofo, ideographs with their extensions, full-width forms.
_UNSPACED = (
    (0x2E80, 0x312F),
    (0x3190, 0x9FFF),
    (0xF900, 0xFAFF),
    (0xFF00, 0xFFEF),
    (0x1B000, 0x1B16F),
    (0x20000, 0x3FFFF),
)
