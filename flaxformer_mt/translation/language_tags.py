"""The languages that a model translates, and the tags that its lines get before they are tokenized."""

import difflib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from flaxformer_mt.config import DataConfig
from flaxformer_mt.config.directions import (
    Direction,
    choose_tags,
    choose_target_tag,
    common_languages,
    find_directions,
)
from flaxformer_mt.config.tag_styles import BOTH_SIDES, spell_tag
from flaxformer_mt.errors import UserError
from flaxformer_mt.unicode_text import BLANKS


class LineTags(NamedTuple):
    """What is put before each line: `added`, unless the line begins with one of the tags in `known`."""

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
        if not (self.known or self.added):
            return None
        found = []
        for number, line in enumerate(lines, start=first_line):
            plain = line.lstrip(BLANKS)
            tagged = not plain or plain.startswith(self.known)
            if not tagged and self.missing:
                raise UserError(f"{self.missing} (line {number} does not)")
            found.append("" if tagged else self.added)
        return found


def choose_line_tags(
    data: DataConfig,
    source_language: str | None = None,
    target_language: str | None = None,
    *,
    vocab_tags: Mapping[str, int] = MappingProxyType({}),
) -> LineTags:
    """Return the tags that lines get, to be translated from and to these languages.

    Args:
      data: the config that the model was trained with.
      source_language, target_language: None: the one that the model has, or that the tags of lines name.
      vocab_tags: the tags of a pretrained vocabulary, whose languages the model has besides those of `data`.
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
        raise UserError(
            f"this model translates to {' and '.join(languages)}; give --target_language={languages[0]}"
        )
    lead = f"{targets[0]} " if targets[0] else ""
    common = common_languages(fitting)
    if len(possible) > 1:
        return LineTags("", known_tags, _ask(fitting, possible), common.source, common.target, lead)
    added, known_tags = "".join(f"{tag} " for tag in possible[0]), (*known_tags, *possible[0])
    if (source_language if data.tag_style in BOTH_SIDES else target_language) is not None:
        known_tags = ()
    return LineTags(added, tuple(dict.fromkeys(known_tags)), "", common.source, common.target, lead)


def check_language(language: str, flag: str, data: DataConfig, vocab_tags: Mapping[str, int]) -> None:
    """Check that a pretrained model has a tag for a language.

    Args:
      flag: that names the language, for the message.
      vocab_tags: the tags of the model's vocabulary.
    """
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
