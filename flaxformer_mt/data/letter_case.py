"""Upper, lower and title case of a text, for every script and for the two i of Turkish.

Python's rules are those of Unicode: ß becomes SS, Greek ς is written at the end of a word, and scripts
without case stay as they are. Turkish, Azerbaijani, Crimean Tatar, Kazakh and Tatar in Latin script have i
with a dot and without: i becomes İ, and I becomes ı.
"""

import re

_DOTTED = re.compile("(?:tr|tur|az|aze|crh|tt|tat|kk|kaz)(?:[_-].*)?")
_WORD = re.compile(r"\S+")


def _has_two_i(language: str) -> bool:
    return _DOTTED.fullmatch(language.lower()) is not None


def to_upper(text: str, language: str) -> str:
    """The text in upper case; `language` is a code such as tr or tr_TR."""
    return (text.replace("i", "İ") if _has_two_i(language) else text).upper()


def to_lower(text: str, language: str) -> str:
    """The text in lower case."""
    if _has_two_i(language):
        text = text.replace("İ", "i").replace("I", "ı")
    # Without the dot that Unicode keeps as a mark of its own after the i of İ.
    return text.lower().replace("i̇", "i")


def to_title(text: str, language: str) -> str:
    """The text with a capital at the beginning of each word; its other letters and all spaces stay."""
    return _WORD.sub(lambda word: _capitalize(word[0], language), text)


def _capitalize(word: str, language: str) -> str:
    at = next((i for i, character in enumerate(word) if character.isalnum()), None)
    if at is None:
        return word
    first = "İ" if word[at] == "i" and _has_two_i(language) else word[at].title()
    return word[:at] + first + word[at + 1 :]
