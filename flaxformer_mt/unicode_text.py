"""Properties of text and its characters: script, words, letter case, and the encoding of a file."""

import collections
import functools
import re
import string
import unicodedata
from collections.abc import Iterable
from typing import Any

from flaxformer_mt.errors import UserError

# Scripts that are written without spaces between words, by the first word of their characters' names: those
# whose line breaks need a dictionary (Line_Break=SA) or may be at any character (ID), and Tibetan, Javanese
# and Balinese. "TAI" are Tai Le, Tai Tham and Tai Viet; "NEW" is New Tai Lue.
_WITHOUT_SPACES = frozenset(
    "AHOM BALINESE BOPOMOFO CJK HIRAGANA JAVANESE KATAKANA KHMER LAO MYANMAR NEW NUSHU TAI TANGUT THAI "
    "TIBETAN YI".split()
)
# Soft hyphen, Arabic letter mark, zero-width space, marks of direction, embeddings and overrides of it, word
# joiner, invisible operators of formulas, isolates, deprecated format characters, byte order mark.
INVISIBLE = "\u00ad\u061c\u200b\u200e\u200f\ufeff" + "".join(
    map(chr, (*range(0x202A, 0x202F), *range(0x2060, 0x2065), *range(0x2066, 0x2070)))
)
# These and all white space, as strip methods and character classes take them.
BLANKS = "".join(c for c in map(chr, range(0x3001)) if c.isspace()) + INVISIBLE
# Punctuation that is not part of the adjacent word.
MARKS = string.punctuation + "¡¿«»‘’‚“”„…–—、。！？，"
# The words that alignments number: text between spaces and tabs, as in the files of fast_align and Moses.
# A no-break space does not end a word.
WORD = re.compile(r"[^ \t\r\n]+")


def split_words(text: str) -> list[str]:
    """Split a text at spaces, tabs and line ends into words, as word alignments count them."""
    return WORD.findall(text)


@functools.cache
def _compile_character() -> Any:
    """Compile the pattern of white space, invisible characters, or one visible character with its marks."""
    import regex  # `--help` needs no package

    return regex.compile(rf"(\s[{BLANKS}]*)|[{INVISIBLE}]+|(\X)")


def normalize(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Normalize a text, so that texts that look alike become equal.

    Returns the text in NFKC, with single spaces for all white space and without invisible characters, and for
    each of its characters the span (start, end) in the original text. Glossaries, required phrases,
    alignments and term scores all compare words by this form.
    """
    characters, spans = list[str](), list[tuple[int, int]]()
    for match in _compile_character().finditer(text):
        # No letter has more than 30 accents (Unicode's stream-safe format); more take quadratic time.
        spelling = " " if match[1] else unicodedata.normalize("NFKC", (match[2] or "")[:30])
        characters += spelling
        spans += [match.span()] * len(spelling)
    return "".join(characters), spans


def spell(text: str) -> str:
    """Return the normalized text, without spaces at its ends; see `normalize`."""
    return normalize(text)[0].strip()


# Ways to write a line by the case of its letters, and lines of a single word.
CASES = ("capitals", "title_case", "single_words")
# Words of more letters than this begin with a capital in title case.
SHORT_WORD = 3


def find_case(text: str) -> str:
    """Return which of `CASES` a text is in: capitals, title_case or single_words; "" if in none.

    capitals: two letters or more, and no lower-case letter. title_case: the first word and all words of more
    than three letters begin with a capital, and there are at least two such words after the first one:
    "Der Herr der Neun Ringe".
    """
    letters = [letter for letter in text if letter.isalpha()]
    if text.isupper() and len(letters) > 1:
        return "capitals"
    words = [word for word in text.split() if any(map(str.isalpha, word))]
    if len(words) == 1:
        return "single_words"
    long = [word for number, word in enumerate(words) if not number or len(word) > SHORT_WORD]
    capitals = [word.lstrip("\"'([{«„“‘¿¡")[:1].isupper() for word in long]
    return "title_case" if len(long) > 2 and all(capitals) else ""


# Number of bytes that are examined.
BEGINNING = 4096
_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32LE",
    b"\x00\x00\xfe\xff": "UTF-32BE",
    b"\xff\xfe": "UTF-16LE",
    b"\xfe\xff": "UTF-16BE",
}
# Of UTF-16 in scripts below U+2000, at least this share of the high bytes are control characters, and at most
# that of the low ones.
_HIGH, _LOW = 0.9, 0.4


@functools.lru_cache(maxsize=1 << 16)
def find_script(character: str) -> str:
    """Return the script of a letter or mark: the first word of its Unicode name ("LATIN", "CJK"); else ""."""
    if unicodedata.category(character)[0] not in "LM":
        return ""
    first = unicodedata.name(character, "").partition(" ")[0]
    # Letters of several scripts, and forms of letters, are named by what they are.
    return "" if first in ("COMBINING", "MODIFIER", "FULLWIDTH", "HALFWIDTH", "MATHEMATICAL") else first


def count_scripts(texts: Iterable[str]) -> collections.Counter[str]:
    counts: collections.Counter[str] = collections.Counter()
    for text in texts:
        for character, number in collections.Counter(text).items():
            if script := find_script(character):
                counts[script] += number
    return counts


def find_main_script(texts: Iterable[str]) -> str:
    return next((script for script, _ in count_scripts(texts).most_common(1)), "")


def lacks_spaces(texts: Iterable[str]) -> bool:
    """Return whether most letters of the texts belong to scripts that put no spaces between words."""
    counts = count_scripts(texts)
    return 2 * sum(counts[script] for script in _WITHOUT_SPACES) > counts.total()


def is_blank(text: str) -> bool:
    """Return whether a text has no visible character: only white space, direction marks, byte order marks."""
    return not text or text.isspace() or all(map(_is_invisible, text))


@functools.lru_cache(maxsize=1 << 12)
def _is_invisible(character: str) -> bool:
    """Return whether a character is invisible; format characters that enclose numbers are visible."""
    import regex

    invisible = r"[\s\p{Cc}\p{Cf}\p{Default_Ignorable_Code_Point}]"
    pattern = rf"[{invisible}--\p{{Prepended_Concatenation_Mark}}]"
    return regex.fullmatch(pattern, character, regex.V1) is not None


def find_encoding(beginning: bytes) -> str:
    """Return UTF-16LE, UTF-16BE, UTF-32LE or UTF-32BE if a file begins in this encoding; else ""."""
    for mark, name in _MARKS.items():
        if beginning.startswith(mark):
            return name
    beginning = beginning[:BEGINNING]
    if 0 not in beginning or not any(beginning):
        return ""
    four = [beginning[start::4][: len(beginning) // 4] for start in range(4)]
    if len(four[0]) > 1:
        if not any(four[2] + four[3]):
            return "UTF-32LE"
        if not any(four[0] + four[1]):
            return "UTF-32BE"
    even, odd = (beginning[start::2][: len(beginning) // 2] for start in range(2))
    if len(even) > 1:
        for name, high, low in (("UTF-16LE", odd, even), ("UTF-16BE", even, odd)):
            if _count_controls(high) >= _HIGH * len(high) and _count_controls(low) <= _LOW * len(low):
                return name
    return ""


def check_encoding(beginning: bytes, name: str) -> None:
    """Raise UserError, which calls the file `name`, if its first bytes are UTF-16 or UTF-32."""
    if encoding := find_encoding(beginning):
        raise UserError(
            f"{name} is in {encoding}, not in UTF-8; convert it, as with "
            f"`iconv -f {encoding} -t UTF-8 {name} > {name}.utf8`"
        )


def _count_controls(text: bytes) -> int:
    return sum(byte < 32 for byte in text)
