"""The step that puts letter cases that training lacked into sentence case, and restores them afterwards."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Literal

from flaxformer_mt.data.text_noise import change_case
from flaxformer_mt.translation.result import Translation
from flaxformer_mt.translation.segments import Segment, Step, group_by_line
from flaxformer_mt.unicode_text import CASES, SHORT_WORD, find_case
from flaxformer_mt.vocab import Vocab

# Whether to change sentences in capitals, in title case or of one word; auto: if such are rare in training.
Capitals = Literal["auto", "always", "never"]

# A letter case is unknown to a model if a smaller share of its training lines has it.
_KNOWN = 0.005


def choose_cases(capitals: Capitals, shares: Mapping[str, float] | None) -> frozenset[str]:
    """Return the letter cases (of `CASES`) to change; auto: those that are rare among the training lines.

    `shares`: the share of each letter case in the training lines. None: unknown; `auto` then changes none.
    """
    known = shares if capitals == "auto" else dict.fromkeys(CASES, 0.0 if capitals == "always" else 1.0)
    return frozenset(case for case, share in (known or {}).items() if share < _KNOWN)


class LetterCase(Step):
    """Puts sentences of some letter cases into sentence case, and restores the case in their translations.

    Sentences of lines with a prefix, required phrases or glossary terms stay unchanged, because their
    translations must contain the given text as it is.
    """

    counted = "sentences that --capitals has changed"

    def __init__(self, cases: frozenset[str], vocab: Vocab) -> None:
        """`cases`: the letter cases (of `CASES`) to change; `vocab`: the source vocabulary."""
        self._cases, self._vocab = cases, vocab
        # Cached, because the halves of a text that is too long are read again.
        self._choose = functools.lru_cache(maxsize=1 << 12)(self._choose_spelling)

    def before(self, segments: list[Segment]) -> list[Segment]:
        for line, parts in group_by_line(segments) if self._cases else ():
            request = line.request
            if request.prefix.strip() or request.phrases:
                continue
            if request.glossary is not None and request.glossary.find(line.line):
                continue
            for part in parts:
                case = find_case(part.text)
                spell = functools.partial(self.lower, language=part.source_language)
                if case in self._cases and spell(part.text) != part.text:
                    part.spell, part.memory[self] = spell, case
        return segments

    def after(self, segment: Segment, translation: Translation) -> Translation:
        others = tuple(self.after(segment, one) for one in translation.alternatives)
        text = put_back(translation.text, segment.memory[self], segment.target_language, segment.text)
        return dataclasses.replace(translation, text=text, alternatives=others)

    def lower(self, text: str, language: str) -> str:
        """Return a text in sentence case, with the capitals that its words usually have.

        The usual spelling of a word is the one with the fewest subwords: in German, MANN becomes Mann and
        STRASSE becomes Straße, if the vocabulary was trained on such text.
        """
        begin = len(text) - len(text.lstrip())
        return re.sub(r"\S+", lambda word: self._choose(word[0], word.start() == begin, language), text)

    def _choose_spelling(self, word: str, first: bool, language: str) -> str:
        """Return the usual spelling of a word; `first`: whether the word begins a sentence."""
        spellings, counts = _spell(word, language, first=first), []
        for ids in map(list, self._vocab.tokenize_all(spellings)):  # of an unknown piece, any other is better
            counts.append(len(ids) + 9 * ids.count(self._vocab.unk_id))
        # A sentence begins with a capital, unless the vocabulary hardly knows it.
        counts[0] -= first
        return spellings[counts.index(min(counts))]


def _spell(word: str, language: str, *, first: bool) -> list[str]:
    """Return the possible spellings of a word; of equally good spellings, the first is preferred."""
    low = change_case(word, "lower_case", language)
    if language[:2] == "en":
        low = re.sub(r"\bi\b", "I", low)
    lows = [low, low.replace("ss", "ß")] if language[:2] == "de" else [low]
    titles = [change_case(one, "title_case", language) for one in lows]
    spellings = [*titles, *lows] if first else [*lows, *titles]
    return list(dict.fromkeys([*spellings, low.title(), word]))


def put_back(text: str, case: str, language: str, source: str) -> str:
    """Put the translation of a sentence into the letter case of the source sentence."""
    if case == "title_case" and not "".join(re.findall(r"(?<!\S)[^\w\s]*([^\W\d_])", source)).isupper():
        words = rf"^\W*\w+|[^\W\d_]{{{SHORT_WORD + 1},}}"  # short ones are small in the sentence too
        return re.sub(words, lambda word: change_case(word[0], "title_case", language), text)
    change = {"capitals": "upper_case", "title_case": "title_case"}.get(case)
    return text if change is None else change_case(text, change, language)
