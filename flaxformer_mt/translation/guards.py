"""Guards: sentences in a letter case that training lacked, and translations that repeat themselves."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from flaxformer_mt.data.text_noise import change_case
from flaxformer_mt.unicode_text import CASES, SHORT_WORD, find_case
from flaxformer_mt.vocab import Vocab

# Sentences in capitals, in title case, or of a single word: changed where training lacked them, or anyway.
Capitals = Literal["auto", "always", "never"]
# Translations that repeat themselves are searched again, or stay.
Repetitions = Literal["search_again", "keep"]

# A model of whose training lines fewer are in a letter case does not know it.
_KNOWN = 0.005
# Tokens in a row that repeat what is before them, from which on a translation is searched again.
_LOOP = 4


class Guards(NamedTuple):
    """What is guarded: the letter cases (of `CASES`), and whether repetitions are searched again."""

    cases: frozenset[str] = frozenset()
    repetitions: bool = False

    def describe(self) -> dict[str, Any]:
        return {} if self == NO_GUARDS else {"guards": [sorted(self.cases), self.repetitions]}


NO_GUARDS = Guards()


def choose_guards(capitals: Capitals, repetitions: Repetitions, shares: Mapping[str, float] | None) -> Guards:
    """Return the guards by the options.

    Args:
      shares: of the training lines in each letter case. None: unknown; then `auto` changes none.
    """
    known = shares if capitals == "auto" else dict.fromkeys(CASES, 0.0 if capitals == "always" else 1.0)
    lacking = frozenset(case for case, share in (known or {}).items() if share < _KNOWN)
    return Guards(lacking, repetitions == "search_again")


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
        vocab = self.vocab

        def choose(word: re.Match[str]) -> str:
            first = not text[: word.start()].strip()
            spellings, counts = self._spell(word[0], first=first), []
            for ids in map(list, vocab.tokenize_all(spellings)):  # of an unknown piece, any other is better
                counts.append(len(ids) + 9 * ids.count(vocab.unk_id))
            # A sentence begins with a capital, unless the vocabulary hardly knows it.
            counts[0] -= first
            return spellings[counts.index(min(counts))]

        return re.sub(r"\S+", choose, text)

    def _spell(self, word: str, *, first: bool) -> list[str]:
        """Return the spellings of a word; of equally good ones, the first is taken."""
        low = change_case(word, "lower_case", self.language)
        if self.language[:2] == "en":
            low = re.sub(r"\bi\b", "I", low)
        lows = [low, low.replace("ss", "ß")] if self.language[:2] == "de" else [low]
        titles = [change_case(one, "title_case", self.language) for one in lows]
        spellings = [*titles, *lows] if first else [*lows, *titles]
        return list(dict.fromkeys([*spellings, low.title(), word]))


AS_IT_IS = LetterCase()


def put_back(text: str, case: str, language: str, source: str) -> str:
    """Put the translation of a sentence into the letter case of the sentence."""
    if case == "title_case" and not "".join(re.findall(r"(?<!\S)[^\w\s]*([^\W\d_])", source)).isupper():
        words = rf"^\W*\w+|[^\W\d_]{{{SHORT_WORD + 1},}}"  # short ones are small in the sentence too
        return re.sub(words, lambda word: change_case(word[0], "title_case", language), text)
    change = {"capitals": "upper_case", "title_case": "title_case"}.get(case)
    return text if change is None else change_case(text, change, language)


def count_repeated(tokens: Sequence[int]) -> int:
    """Return how many tokens in a row, at most, repeat those before them: [7 5 6 5 6 5 6 8] has 4; 0: few."""
    most, size = 0, len(tokens)
    if len(set(zip(*(tokens[n:] for n in range(_LOOP)), strict=False))) > size - _LOOP:
        return 0  # too few to count, for most sentences
    for distance in range(1, size // 2 + 1):
        same = map(int.__eq__, tokens[distance:], tokens)
        run = max((sum(1 for _ in group) for equal, group in itertools.groupby(same) if equal), default=0)
        most = max(most, run if run >= distance else 0)
    return most


def repeats_itself(tokens: Sequence[int], source: Sequence[int]) -> bool:
    """Return whether the tokens of a translation repeat themselves more than those of its source."""
    repeated = count_repeated(tokens)
    return repeated >= _LOOP and repeated > count_repeated(source)
