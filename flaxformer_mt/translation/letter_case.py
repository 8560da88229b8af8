"""Letter cases that training lacked: such sentences are translated in sentence case, and put back."""

import functools
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from flaxformer_mt.data.text_noise import change_case
from flaxformer_mt.unicode_text import CASES, SHORT_WORD, find_case
from flaxformer_mt.vocab import Vocab

# Sentences in capitals, in title case, or of a single word: changed where training lacked them, or anyway.
Capitals = Literal["auto", "always", "never"]

# A model of whose training lines fewer are in a letter case does not know it.
_KNOWN = 0.005


def choose_cases(capitals: Capitals, shares: Mapping[str, float] | None) -> frozenset[str]:
    """Return the letter cases (of `CASES`) that are changed.

    Args:
      shares: of the training lines in each letter case. None: unknown; then `auto` changes none.
    """
    known = shares if capitals == "auto" else dict.fromkeys(CASES, 0.0 if capitals == "always" else 1.0)
    return frozenset(case for case, share in (known or {}).items() if share < _KNOWN)


class LetterCase(NamedTuple):
    """Puts sentences of some letter cases in sentence case."""

    cases: frozenset[str] = frozenset()
    # Of the sources, and their language; None: no case is changed.
    vocab: Vocab | None = None
    language: str = ""

    def find(self, text: str) -> str:
        """Return the letter case of a sentence, if the model is given another one; else ""."""
        case = find_case(text) if self.cases else ""
        return case if case in self.cases and self.lower(text, case) != text else ""

    def lower(self, text: str, case: str) -> str:
        """Return a text of a letter case in sentence case, with the capitals that it has in other texts.

        Of the spellings of each word, that of the fewest pieces is the usual one: MANN is Mann in German
        and STRASSE is Straße, if the vocabulary is of such text.
        """
        if not case or self.vocab is None:
            return text
        begin = len(text) - len(text.lstrip())
        return re.sub(r"\S+", lambda word: _choose(self, word[0], word.start() == begin), text)

    def _spell(self, word: str, *, first: bool) -> list[str]:
        """Return the spellings of a word; of equally good ones, the first is taken."""
        low = change_case(word, "lower_case", self.language)
        if self.language[:2] == "en":
            low = re.sub(r"\bi\b", "I", low)
        lows = [low, low.replace("ss", "ß")] if self.language[:2] == "de" else [low]
        titles = [change_case(one, "title_case", self.language) for one in lows]
        spellings = [*titles, *lows] if first else [*lows, *titles]
        return list(dict.fromkeys([*spellings, low.title(), word]))


@functools.lru_cache(maxsize=1 << 12)  # the words of a long text, whose halves are read again
def _choose(letter_case: LetterCase, word: str, first: bool) -> str:
    """Return the usual spelling of a word; `first`: at the beginning of a sentence."""
    vocab = letter_case.vocab
    assert vocab is not None
    spellings, counts = letter_case._spell(word, first=first), []
    for ids in map(list, vocab.tokenize_all(spellings)):  # of an unknown piece, any other is better
        counts.append(len(ids) + 9 * ids.count(vocab.unk_id))
    # A sentence begins with a capital, unless the vocabulary hardly knows it.
    counts[0] -= first
    return spellings[counts.index(min(counts))]


AS_IT_IS = LetterCase()


def put_back(text: str, case: str, language: str, source: str) -> str:
    """Put the translation of a sentence into the letter case of the sentence."""
    if case == "title_case" and not "".join(re.findall(r"(?<!\S)[^\w\s]*([^\W\d_])", source)).isupper():
        words = rf"^\W*\w+|[^\W\d_]{{{SHORT_WORD + 1},}}"  # short ones are small in the sentence too
        return re.sub(words, lambda word: change_case(word[0], "title_case", language), text)
    change = {"capitals": "upper_case", "title_case": "title_case"}.get(case)
    return text if change is None else change_case(text, change, language)
