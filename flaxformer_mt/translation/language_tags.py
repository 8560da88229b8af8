"""The languages that a model translates, and the step that adds language tags to lines."""

import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from flaxformer_mt.config import DataConfig
from flaxformer_mt.config.directions import (
    LANGUAGE_CODE,
    Direction,
    choose_tags,
    choose_target_tag,
    common_languages,
    find_directions,
)
from flaxformer_mt.config.tag_styles import BOTH_SIDES, spell_tag
from flaxformer_mt.errors import UserError
from flaxformer_mt.translation.segments import Segment, Step
from flaxformer_mt.unicode_text import BLANKS
from flaxformer_mt.vocab import Vocabs

# Language tags at the start of a line, which select the languages of a multilingual model: >>fr<<,
# >>cmn_Hans<<, <2de>, <from:en>, with the white space around them.
_TAG = f">>{LANGUAGE_CODE}<<|<2{LANGUAGE_CODE}>|<from:{LANGUAGE_CODE}>"
_LANGUAGE_TAGS = re.compile(rf"[{BLANKS}]*(?:(?:{_TAG})[{BLANKS}]*)+")


class LineTags(NamedTuple):
    """The tags to put before each line: `added`, unless the line begins with one of the tags in `known`."""

    added: str
    # None are known where the request names the language: a tag in a line is then text.
    known: tuple[str, ...] = ()
    # Why `added` is not known, for a line that begins with no tag; "" where it is known.
    missing: str = ""
    # The languages of all lines and of their translations; "" if they are several.
    source_language: str = ""
    target_language: str = ""
    # The tag that translations begin with, and a space; "" if they begin with none.
    lead: str = ""

    def find(self, lines: Sequence[str], *, first_line: int = 1) -> list[str] | None:
        """Return the tags to put before each line; None if no line gets one."""
        if not (self.known or self.added or self.missing):
            return None
        found = []
        for number, line in enumerate(lines, start=first_line):
            plain = line.lstrip(BLANKS)
            tagged = not plain or plain.startswith(self.known)
            if not tagged and self.missing:
                raise UserError(f"{self.missing} (line {number} does not)" if self.known else self.missing)
            found.append("" if tagged else self.added)
        return found


class LanguageTags(Step):
    """Determines the languages of lines, and the tags that the model reads before each part of a line."""

    def __init__(self, data: DataConfig, vocabs: Vocabs, *, lines_have_tags: bool = False) -> None:
        """`lines_have_tags`: whether a line begins with its tags if its request names no language."""
        self._data, self._vocabs, self._lines_have_tags = data, vocabs, lines_have_tags
        self._choose = functools.cache(self._choose_tags)
        self._count = functools.cache(lambda tags: len(vocabs.source.tokenize(tags)) - 1)  # without eos

    def _choose_tags(self, source: str | None, target: str | None) -> LineTags:
        if self._lines_have_tags and (source, target) == (None, None):
            return LineTags("")
        return choose_line_tags(self._data, source, target, vocab_tags=self._vocabs.target.tags)

    def before(self, segments: list[Segment]) -> list[Segment]:
        for line in segments:
            tags = self._choose(line.request.source_language, line.request.target_language)
            line.source_language, line.target_language = tags.source_language, tags.target_language
            line.lead = tags.lead
            (added,) = tags.find([line.text], first_line=line.request.seed) or [""]
            tag = "" if added else find_language_tags(line.text)  # a tag that is not asked for is text
            # Without room for text after the tags, they are left out, or text.
            if added + tag and self._count(added + tag) + 1 < self._data.max_source_length:
                line.added, line.added_pieces = added, self._count(added) if added else 0
                line.tag, line.tag_pieces = tag, self._count(added + tag) - line.added_pieces
                line.text, line.start = line.text[len(tag) :], len(tag)
        return segments


def find_language_tags(line: str) -> str:
    """Return the language tags at the start of a line, with the white space around them; "" if none.

    ">>fr<< der Hund" gives ">>fr<< ", and "<2de>a dog" gives "<2de>". A line that has only tags gives "".
    """
    match = _LANGUAGE_TAGS.match(line)
    return match[0] if match and match.end() < len(line) else ""


def choose_line_tags(
    data: DataConfig,
    source_language: str | None = None,
    target_language: str | None = None,
    *,
    vocab_tags: Mapping[str, int] = MappingProxyType({}),
) -> LineTags:
    """Return the tags to put before lines for translation between these languages.

    A language that is None is the model's only language, or the one that a line's tag names. `vocab_tags`:
    the tags of a pretrained vocabulary, for languages that the model knows besides the languages of `data`.
    """
    directions = find_directions(data)
    by_side = {"source": source_language, "target": target_language}
    for side, language in by_side.items():
        known = list(dict.fromkeys(getattr(one, side) for one in directions))
        if language is None or language in known:
            continue
        if vocab_tags and data.tag_style not in ("opus", "t5"):
            check_language(language, f"--{side}_language", data, vocab_tags)
        else:
            raise UserError(
                f"--{side}_language is {language}, but this model translates "
                f"{'from' if side == 'source' else 'to'} {' and '.join(known)} "
                f"({', '.join(one.name for one in directions)})"
            )
    fitting = [one for one in directions if source_language in (None, one.source)]
    fitting = [one for one in fitting if target_language in (None, one.target)]
    if not fitting:  # a pair of languages that the model was not trained for
        fitting = [Direction(source_language or "", target_language or "")]
    all_tags = list(dict.fromkeys(choose_tags(data, one) for one in directions))
    known_tags = tuple(dict.fromkeys(tag for tags in all_tags for tag in tags))
    possible = list(dict.fromkeys(choose_tags(data, one) for one in fitting))
    targets = list(dict.fromkeys(choose_target_tag(data, one) for one in fitting))
    if len(targets) > 1:
        languages = list(dict.fromkeys(one.target for one in fitting))
        asked = f"this model translates to {' and '.join(languages)}; give --target_language={languages[0]}"
        return LineTags("", missing=asked)  # a tag in a line names its own language, not the translation's
    lead = f"{targets[0]} " if targets[0] else ""
    common = common_languages(fitting)
    if len(possible) > 1:
        return LineTags("", known_tags, _ask(fitting, possible), common.source, common.target, lead)
    added, known_tags = "".join(f"{tag} " for tag in possible[0]), (*known_tags, *possible[0])
    if (source_language if data.tag_style in BOTH_SIDES else target_language) is not None:
        known_tags = ()
    return LineTags(added, tuple(dict.fromkeys(known_tags)), "", common.source, common.target, lead)


def check_language(language: str, flag: str, data: DataConfig, vocab_tags: Mapping[str, int]) -> None:
    """Raise UserError if the vocabulary of a pretrained model has no tag for the language given by a flag."""
    try:
        tag = spell_tag(data.tag_style, language)
    except UserError as error:
        raise UserError(f"{flag} is {language}: {error}") from error
    if tag not in vocab_tags:
        near = difflib.get_close_matches(tag, vocab_tags, n=3, cutoff=0.3)
        raise UserError(
            f"{flag} is {language}, but this model has no language tag {tag}; it has "
            f"{len(vocab_tags)}, such as {', '.join(near or list(vocab_tags)[:3])}"
        )


def _ask(fitting: list[Direction], possible: list[tuple[str, ...]]) -> str:
    side = "target" if len({one.target for one in fitting}) > 1 else "source"
    languages = list(dict.fromkeys(getattr(one, side) for one in fitting))
    return (
        f"this model translates {'to' if side == 'target' else 'from'} {' and '.join(languages)}; give "
        f"--{side}_language={languages[0]}, or begin each line with its tag, as in {' '.join(possible[0])}"
    )
