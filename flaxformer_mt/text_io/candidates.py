"""Reads candidate translations of any system, and finds answers that are not translations.

The checks look for typical phrases of language models (answer_phrases.toml), and for scripts and words that
do not occur on the target side of the file.
"""

import collections
import functools
import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flaxformer_mt.errors import UserError
from flaxformer_mt.text_io.pair_table import PairRules
from flaxformer_mt.unicode_text import count_scripts, find_script, is_blank

PHRASES = Path(__file__).with_name("answer_phrases.toml")
# Pairs of marks that are removed if they enclose a whole answer, and its source begins with no such mark.
_WRAPS = "``` ``` ** ** ` ` \" \" “ ” „ “ „ ” « » » « ‘ ’ ' ' 「 」 『 』".split()
_COLON = re.compile(r"[:：]\**\s*")
# Scripts without spaces, and Hangul: their single letters are compared. Of words in other scripts, the first
# five letters are compared, which most inflected forms share.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3"
_LETTER = rf"[^\W\d_{_UNSPACED}]"
_BEGIN = rf"(?<!{_LETTER})"
_WORD = re.compile(rf"[{_UNSPACED}]|{_BEGIN}{_LETTER}{{1,5}}")
# Maximum length of a preamble, and minimum length of a source that no translation contains by chance, in
# characters.
_PREAMBLE, _LONG = 120, 20
# A text is in another language if it has _FEWEST_WORDS words and the share of words known on its side is
# below _KNOWN; this is only checked if the sample has _FEWEST_LINES lines.
_FEWEST_WORDS, _KNOWN, _FEWEST_LINES = 4, 0.15, 200
# Answers to a source are compared with each other if there are _FEWEST_ANSWERS. An answer must share _SHARED
# of its rare words with the others. A phrase at an edge of an answer is a remark if, in at least _RECURRING
# lines and in a share of at least _ALONE of the lines with it, no other answer has it.
_FEWEST_ANSWERS, _SHARED, _RECURRING, _ALONE = 3, 0.25, 3, 0.8
# The start (0) or the end (1) of an answer, followed by the words there.
Edge = tuple[int | str, ...]


class Candidates(NamedTuple):
    """A source and its candidate translations, in the order in which the system gave them."""

    source: str
    texts: Sequence[str]


def read_candidates(lines: Iterable[str], path: str, *, first_line: int = 1) -> Iterator[Candidates]:
    """Yield the candidates of each line, which is a JSON object if `path` ends in .jsonl, else tab-separated.

    Raises UserError, with the path and the line number, for an invalid line.
    """
    for number, line in enumerate(lines, start=first_line):
        try:
            if path.endswith(".jsonl"):
                value = json.loads(line)
                value = value if isinstance(value, dict) else {}
                source, texts = value["source"], value["translations"]
                if not isinstance(texts, list) or not all(isinstance(text, str) for text in (source, *texts)):
                    raise TypeError("source is no text, or translations are no list of texts")
            else:
                source, *texts = line.split("\t")
                if not texts and not is_blank(source):
                    raise ValueError("it has 1 column")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            raise UserError(
                f"{path} line {number} is no source with translations: {reason}; give columns separated by "
                'tabs, or in FILE.jsonl an object {"source": "...", "translations": ["...", ...]} per line'
            ) from None
        yield Candidates(source, texts)


@functools.cache
def _read_rules() -> list[dict[str, Any]]:
    rules = tomllib.loads(PHRASES.read_text(encoding="utf-8"))["rule"]
    for rule in rules:
        signs, excuses = (rule[name].strip().replace("\n", "|") for name in ("signs", "excuses"))
        rule["signs"] = re.compile(f"{_BEGIN}(?:{signs})")
        rule["excuses"] = re.compile(f"{_BEGIN}(?:{signs}|{excuses})")
    return rules


def find_phrase(source: str, answer: str) -> tuple[str, bool]:
    """Return the problem of an answer, such as "refusal" (or ""), and whether it is a removable preamble.

    A preamble ends in a colon and can be removed.
    """
    source, answer = (text.lower().replace("’", "'").lstrip("¡ ") for text in (source, answer))
    colons = [match.start() for match in _COLON.finditer(answer)]
    is_new = len(colons) > len(_COLON.findall(source)) and colons[0] <= _PREAMBLE
    for rule in _read_rules():
        text = answer if rule["part"] != "colon" else answer[: colons[0]] if is_new else ""
        sign = rule["signs"].match(text) if rule["part"] == "start" else rule["signs"].search(text)
        if sign and not rule["excuses"].search(source):
            return rule["problem"], rule["part"] == "colon"
    return "", False


def unwrap(source: str, answer: str) -> str:
    """Remove code fences around an answer; also quotes and other marks, unless the source begins with one."""
    answer = re.sub(r"\A```\w*\n(.*)\n```\Z", r"\1", answer.strip(), flags=re.S).strip()
    for begin, end in zip(_WRAPS[::2], _WRAPS[1::2], strict=True):
        inner = answer[len(begin) : -len(end)]
        wrapped = answer.startswith(begin) and answer.endswith(end) and inner.strip()
        if wrapped and begin not in inner and end not in inner and source[:1] not in {*"".join(_WRAPS)}:
            return unwrap(source, inner)
    return answer


class AnswerChecks:
    """Finds answers that are not translations; learns the usual scripts and words from a sample of lines."""

    def __init__(self, sample: Iterable[Candidates], rules: PairRules) -> None:
        self._rules, self._lines, scripts = rules, 0, collections.Counter[str]()
        # The number of lines with each word; each of the n translations of a line counts as 1 / n.
        of_sources, of_texts = collections.Counter[str](), collections.defaultdict[str, float](float)
        seen, alone = collections.Counter[Edge](), collections.Counter[Edge]()
        for source, texts in sample:
            self._lines += bool(texts)
            scripts += count_scripts(texts)
            of_sources.update(_find_words(source))
            for words, _, edges, lone in _compare(texts):
                seen.update(edges)
                alone.update(lone)
                for word in words:
                    of_texts[word] += 1 / len(texts)
        self._phrases = {edge for edge, n in alone.items() if n >= max(_RECURRING, _ALONE * seen[edge])}
        self._scripts = {script for script, count in scripts.items() if 4 * count >= max(scripts.values())}
        if "HIRAGANA" in self._scripts:
            self._scripts |= {"KATAKANA", "CJK"}
        self._lines_with = of_texts
        # Words that occur in at least two lines, except those that the other side has far more often.
        self._known = [
            {word for word, count in side.items() if count >= 2 and 2 * count >= other.get(word, 0)}
            for side, other in ((of_sources, of_texts), (of_texts, of_sources))
        ]

    def clean_all(self, source: str, answers: Sequence[str]) -> tuple[list[str], list[str]]:
        """Run `clean` on all answers to a source; compare three or more good answers to find outliers."""
        cleaned = [self.clean(source, answer) for answer in answers]
        texts, problems = [text for text, _ in cleaned], [problem for _, problem in cleaned]
        numbers = [number for number, problem in enumerate(problems) if not problem]
        if len(numbers) >= _FEWEST_ANSWERS:
            compared, most = _compare([texts[number] for number in numbers]), self._lines + 2
            for number, (words, others, _, lone) in zip(numbers, compared, strict=True):
                rarity = {word: math.log(most / (self._lines_with.get(word, 0.0) + 1)) for word in words}
                shared = sum(rarity[word] for word in words & others)
                if others and shared < _SHARED * sum(rarity.values()):
                    problems[number] = "outlier"
                elif lone & self._phrases:
                    problems[number] = "remark"
        return texts, problems

    def clean(self, source: str, answer: str) -> tuple[str, str]:
        """Return an answer without enclosing marks and preamble, and the answer's problem (or "")."""
        text = unwrap(source, answer)
        problem, has_preamble = self._find_problem(source, text)
        if has_preamble:
            rest = unwrap(source, _COLON.split(text, maxsplit=1)[1])
            if not self._find_problem(source, rest)[0]:
                return rest, ""
        return text, problem

    def _find_problem(self, source: str, text: str) -> tuple[str, bool]:
        plain = self._rules.find_problem(source, text) or ""
        if plain in ("empty", "too_long", "copies"):
            return plain, False
        phrase = find_phrase(source, text)
        if phrase[0]:
            return phrase
        if len(text) > len(source) >= _LONG and source.casefold().strip(" .") in text.casefold():
            return "copies", False
        if text.count("\n") > source.count("\n"):
            return "lines", False
        return self._find_other_side(source, text) or plain, False

    def _find_other_side(self, source: str, text: str) -> str:
        """Return "script" or "language" if the text is in another script or language than the target side.

        Returns "empty" for a text without letters and digits whose source has words, and "" otherwise.
        """
        letters = [find_script(letter) for word in text.split() if word not in source for letter in word]
        other = [script not in self._scripts for script in letters if script]
        if self._scripts and 2 * sum(other) > len(other):
            return "script"
        if _WORD.search(source) and not any(map(str.isalnum, text)):
            return "empty"
        words = _find_words(text)
        if len(words) < _FEWEST_WORDS or self._lines < _FEWEST_LINES:
            return ""
        of_source, of_target = (sum(word in known for word in words) / len(words) for known in self._known)
        return "language" if of_target < _KNOWN or 2 * of_target < of_source else ""


def _find_words(text: str) -> set[str]:
    return set(_WORD.findall(text.casefold()))


def _compare(texts: Sequence[str]) -> Iterator[tuple[set[str], set[str], set[Edge], set[Edge]]]:
    """Yield, for each text, its words, the words of all other texts, its edges, and its unique edges.

    Edges are the first two words, the last two words, and the first word if it has punctuation. An edge is
    unique if no other text has any of its words.
    """
    sets = [_find_words(text) for text in texts]
    for number, text in enumerate(texts):
        others = set[str]().union(*sets[:number], *sets[number + 1 :])
        words = _WORD.findall(text.casefold())
        edges: set[Edge] = {(0, *words[:2]), (1, *words[-2:])}
        if words and not text.split()[0].isalnum():
            edges.add((0, words[0]))
        yield sets[number], others, edges, {edge for edge in edges if others and others.isdisjoint(edge)}
