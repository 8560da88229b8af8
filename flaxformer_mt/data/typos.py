"""Typos, and slips of punctuation and spaces: functions from a text and a source of chance to a text.

No function removes or adds a word, but for those of spaces; each returns the text itself where there is
nothing to change. Characters without case, letters and punctuation, such as the marks that stand for symbols
of the vocabulary, stay as they are.
"""

import random
import unicodedata
from collections.abc import Callable, Sequence

# From a text and a source of chance to a text.
Slip = Callable[[str, random.Random], str]

# Rows of keyboards, each row half a key to the right of the one above: QWERTY, the Russian and the Greek one.
_KEYBOARDS = (
    ("1234567890", "qwertyuiop", "asdfghjkl", "zxcvbnm"),
    ("1234567890", "йцукенгшщзхъ", "фывапролджэ", "ячсмитьбю"),
    ("1234567890", "ςερτυθιοπ", "ασδφγηξκλ", "ζχψωβνμ"),
)
_ALIKE = {
    **{"o": "0", "0": "o", "l": "1i", "1": "l", "i": "l1", "s": "5", "5": "s", "z": "2", "2": "z", "b": "6"},
    **{"6": "b", "g": "9q", "9": "g", "q": "g", "u": "v", "v": "u", "n": "m", "m": "n", "c": "e", "e": "c"},
    **{"ß": "B", "ı": "i", "ł": "l", "ø": "o", "æ": "e", "đ": "d", "ς": "s", "α": "a", "ο": "o", "а": "a"},
    **{"е": "e", "о": "o", "р": "p", "с": "c", "х": "x", "у": "y", "і": "i"},
}
# Styles of a punctuation mark.
_STYLES = {
    **{"'": "’", "’": "'", '"': "“", "“": '"', "”": '"', "„": '"', "«": '"', "»": '"', "-": "–", "–": "-"},
    **{
        "—": "-",
        ".": ",",
        ",": ".",
        ";": ",",
        "!": ".",
        "?": "?!",
        "…": "..",
        "。": ".",
        "、": "，",
        "，": ",",
    },
}
_DOUBLED = ".,!?。！？…"
_BEFORE_SPACE = ".,;:!?"


def pick(chance: random.Random, size: int) -> int:
    """Draws an index below `size`, in the same way in every version of Python."""
    return int(chance.random() * size)


def _find_neighbours() -> dict[str, str]:
    found: dict[str, str] = {}
    for rows in _KEYBOARDS:
        for number, row in enumerate(rows):
            for at, key in enumerate(row):
                beside = [row[at - 1 : at], row[at + 1 : at + 2]]
                if number:
                    beside.append(rows[number - 1][at : at + 2])
                if number + 1 < len(rows):
                    beside.append(rows[number + 1][max(at - 1, 0) : at + 1])
                found.setdefault(key, "".join(beside))
    return found


_NEIGHBOURS = _find_neighbours()


def _choose(chance: random.Random, positions: Sequence[int]) -> int | None:
    return positions[pick(chance, len(positions))] if positions else None


def _find_letters(text: str) -> list[int]:
    """Positions of letters that no combining mark follows."""
    return [
        at
        for at, character in enumerate(text)
        if character.isalpha() and not (at + 1 < len(text) and unicodedata.category(text[at + 1])[0] == "M")
    ]


def _with_case_of(letter: str, like: str) -> str:
    """The letter in upper case if `like` is."""
    return letter.upper() if like.isupper() and len(letter.upper()) == 1 else letter


def swap(text: str, chance: random.Random) -> str:
    """Lets two different neighbouring letters change places: `Hund` becomes `Hnud`."""
    letters = set(_find_letters(text))
    at = _choose(chance, [i for i in sorted(letters) if i + 1 in letters and text[i] != text[i + 1]])
    return text if at is None else text[:at] + text[at + 1] + text[at] + text[at + 2 :]


def leave_out(text: str, chance: random.Random) -> str:
    """Leaves out a letter beside another one, so that no word disappears: `Hund` becomes `Hnd`."""
    letters = _find_letters(text)
    found = [i for i in letters if text[i - 1 : i].isalpha() or text[i + 1 : i + 2].isalpha()]
    at = _choose(chance, found)
    return text if at is None else text[:at] + text[at + 1 :]


def add_neighbour(text: str, chance: random.Random) -> str:
    """Puts a letter of a neighbouring key before or after a letter: `Hund` becomes `Huznd`."""
    at, letter = _choose_neighbour(text, chance)
    if at is None:
        return text
    at += pick(chance, 2)
    return text[:at] + letter + text[at:]


def replace_by_neighbour(text: str, chance: random.Random) -> str:
    """Replaces a letter by that of a neighbouring key: `Hund` becomes `Hynd`."""
    at, letter = _choose_neighbour(text, chance)
    return text if at is None else text[:at] + letter + text[at + 1 :]


def _choose_neighbour(text: str, chance: random.Random) -> tuple[int | None, str]:
    at = _choose(chance, [i for i in _find_letters(text) if text[i].lower() in _NEIGHBOURS])
    if at is None:
        return None, ""
    keys = _NEIGHBOURS[text[at].lower()]
    return at, _with_case_of(keys[pick(chance, len(keys))], text[at])


def replace_by_similar(text: str, chance: random.Random) -> str:
    """Replaces a letter by one that looks like it: `Tür` becomes `Tur`, `Hund` becomes `Hvnd`."""
    at = _choose(chance, [i for i in _find_letters(text) if _find_similar(text[i])])
    if at is None:
        return text
    similar = _find_similar(text[at])
    return text[:at] + _with_case_of(similar[pick(chance, len(similar))], text[at]) + text[at + 1 :]


def _find_similar(letter: str) -> str:
    decomposed = unicodedata.normalize("NFD", letter)
    plain = decomposed[0]
    # Syllables of Hangul decompose into letters, not into a letter and marks.
    if len(decomposed) > 1 and unicodedata.category(decomposed[1])[0] == "M":
        return plain
    return _ALIKE.get(letter.lower(), "")


def repeat(text: str, chance: random.Random) -> str:
    """Writes a letter twice: `Hund` becomes `Hunnd`."""
    at = _choose(chance, _find_letters(text))
    return text if at is None else text[: at + 1] + text[at:]


def write_once(text: str, chance: random.Random) -> str:
    """Writes a double letter once: `Wasser` becomes `Waser`."""
    letters = set(_find_letters(text))
    at = _choose(chance, [i for i in sorted(letters) if i + 1 in letters and text[i] == text[i + 1]])
    return text if at is None else text[:at] + text[at + 1 :]


def join_words(text: str, chance: random.Random) -> str:
    """Leaves out a space between two words."""
    spaces = [
        i
        for i in range(1, len(text) - 1)
        if text[i] == " " and _is_written(text[i - 1]) and _is_written(text[i + 1])
    ]
    at = _choose(chance, spaces)
    return text if at is None else text[:at] + text[at + 1 :]


def _is_written(character: str) -> bool:
    """Whether a character is part of a word: no space, and no mark that stands for a symbol."""
    return unicodedata.category(character)[0] in "LNPM"


def split_word(text: str, chance: random.Random) -> str:
    """Puts a space between two letters of a word."""
    letters = _find_letters(text)
    at = _choose(chance, [i + 1 for i in letters if text[i + 1 : i + 2].isalpha()])
    return text if at is None else f"{text[:at]} {text[at:]}"


def space_before_mark(text: str, chance: random.Random) -> str:
    """Puts a space between a word and the punctuation mark after it: `Hund!` becomes `Hund !`."""
    marks = [i for i in range(1, len(text)) if text[i] in _BEFORE_SPACE and text[i - 1].isalnum()]
    at = _choose(chance, marks)
    return text if at is None else f"{text[:at]} {text[at:]}"


def change_space(text: str, chance: random.Random) -> str:
    """Makes one of the three changes of spaces, the first possible one of a random order."""
    return _first_change(text, chance, (join_words, split_word, space_before_mark))


def change_mark(text: str, chance: random.Random) -> str:
    """Leaves out, doubles or restyles one punctuation mark."""
    return _first_change(text, chance, (_drop_mark, _double_mark, _restyle_mark))


def _first_change(text: str, chance: random.Random, slips: Sequence[Slip]) -> str:
    first = pick(chance, len(slips))
    for slip in (*slips[first:], *slips[:first]):
        if (changed := slip(text, chance)) != text:
            return changed
    return text


def _drop_mark(text: str, chance: random.Random) -> str:
    at = _choose(chance, [i for i, c in enumerate(text) if unicodedata.category(c)[0] == "P"])
    if at is None:
        return text
    before, after = text[:at], text[at + 1 :]
    if before[-1:] in ("", " ") and after[:1] in ("", " "):  # a word of its own
        return before + after[1:] if after else before[:-1]
    return before + after


def _double_mark(text: str, chance: random.Random) -> str:
    at = _choose(chance, [i for i, c in enumerate(text) if c in _DOUBLED])
    return text if at is None else text[: at + 1] + text[at] * (1 + pick(chance, 2)) + text[at + 1 :]


def _restyle_mark(text: str, chance: random.Random) -> str:
    at = _choose(chance, [i for i, c in enumerate(text) if c in _STYLES])
    return text if at is None else text[:at] + _STYLES[text[at]] + text[at + 1 :]


# By the fields of TypoConfig, in the order in which they are applied.
TYPOS: dict[str, Slip] = {
    "char_swap": swap,
    "missing_char": leave_out,
    "extra_char": add_neighbour,
    "nearby_char": replace_by_neighbour,
    "similar_char": replace_by_similar,
    "skipped_space": join_words,
    "random_space": split_word,
    "repeated_char": repeat,
    "unichar": write_once,
}
