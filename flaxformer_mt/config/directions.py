"""Directions of translation: the data sets in `data.dataset`, their languages, and the language tags of
sources.

A data set in a mixture may name its direction, as in parallel_text@DIR:de-en. In a multilingual model, tags
before the source name the target language (>>fr<<) and the source language (<from:de>). Other model families
have other tags (tag_styles.py), and some also put a tag before the target.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from flaxformer_mt.config.schema import DataConfig
from flaxformer_mt.config.tag_styles import BOTH_SIDES, spell_tag, spell_task
from flaxformer_mt.errors import UserError

# Code of a language in a tag.
LANGUAGE_CODE = r"[a-z]{2,3}(?:[_-][A-Za-z0-9]{2,8})*"
# Code of a language in a direction, where a hyphen separates the two.
_CODE = r"[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)*"
_DIRECTED = re.compile(rf"(?P<dataset>.*):(?P<source>{_CODE})-(?P<target>{_CODE})")


class Direction(NamedTuple):
    """A source and a target language, spelled as in the data sets; the source is "" for a language model."""

    source: str
    target: str

    @property
    def name(self) -> str:
        """The direction as text, such as de-en; for a language model, only the target language."""
        return f"{self.source}-{self.target}" if self.source else self.target

    @property
    def reverse(self) -> "Direction":
        return Direction(self.target, self.source)


class Member(NamedTuple):
    """A data set of a mixture: its name in the config, the name without a direction, and the direction."""

    name: str
    dataset: str
    direction: Direction


def refuse_language_model(data: DataConfig, name: object, reason: str) -> None:
    """Raise UserError if the run `name` is a language model; `reason` ends the message."""
    if not data.source_language:
        raise UserError(f"{name} is a language model (its data.source_language is empty){reason}")


def read_members(data: DataConfig) -> list[Member]:
    """Return the data sets in `data.dataset`; sets without a direction get the direction of the config."""
    members = []
    for name in (name.strip() for name in data.dataset.split(",")):
        dataset, direction = name, Direction(data.source_language, data.target_language)
        if match := _DIRECTED.fullmatch(name):
            dataset, direction = match["dataset"], Direction(match["source"], match["target"])
        if not dataset:
            raise UserError(
                f"data.dataset {data.dataset!r} has an empty name; write toy_de_en, or A,B for a mixture"
            )
        members.append(Member(name, dataset, direction))
    return members


def find_directions(data: DataConfig) -> list[Direction]:
    """Return the distinct directions that a model of this config is trained for, in order."""
    return list(dict.fromkeys(member.direction for member in read_members(data)))


def common_languages(directions: Iterable[Direction]) -> Direction:
    """Return the source and the target language that all directions share; "" where they differ."""
    sides = (set(side) for side in zip(*directions, strict=True))
    return Direction(*(languages.pop() if len(languages) == 1 else "" for languages in sides))


def choose_tags(data: DataConfig, direction: Direction) -> tuple[str, ...]:
    """Return the tags before the sources of a direction, such as (">>fr<<", "<from:de>"); () for no tags."""
    if not direction.source:
        return ()
    if data.tag_style != "opus":
        if data.target_tags == "never":
            return ()
        if data.tag_style == "t5":
            return (spell_task(*direction),)
        named = direction.source if data.tag_style in BOTH_SIDES else direction.target
        return (spell_tag(data.tag_style, named),)
    several = len({other.target for other in find_directions(data)}) > 1
    tags = []
    if data.target_tags == "always" or (data.target_tags == "auto" and several):
        tags.append(f">>{_check_code(direction.target)}<<")
    if data.source_tags:
        tags.append(f"<from:{_check_code(direction.source)}>")
    return tuple(tags)


def _check_code(language: str) -> str:
    if not re.fullmatch(LANGUAGE_CODE, language):
        raise UserError(
            f"{language!r} cannot be the language of a tag; a tag has a code such as fr, zh or zh_Hant: give "
            "the files or the language such a name"
        )
    return language


def choose_target_tag(data: DataConfig, direction: Direction) -> str:
    """Return the tag before the targets of a direction; "" for no tag."""
    if data.tag_style not in BOTH_SIDES or data.target_tags == "never":
        return ""
    return spell_tag(data.tag_style, direction.target)


def find_direction_problems(data: DataConfig) -> list[str]:
    members, problems = read_members(data), []
    for member in members:
        source, target = member.direction
        if member.name != member.dataset and source == target:
            problems.append(
                f"data.dataset: {member.name} translates from {source} to itself; change one language"
            )
    named = [member.name for member in members if member.name != member.dataset]
    if named and not data.source_language:
        problems.append(
            f"data.dataset: {named[0]} names a direction, but data.source_language is empty, which means a "
            "language model; set data.source_language, or leave out the directions"
        )
    if not data.source_language and (data.source_tags or data.target_tags == "always"):
        field = "source_tags" if data.source_tags else "target_tags"
        problems.append(
            f"data.{field} is {getattr(data, field)}, but a language model has no sources to put tags before "
            "(data.source_language is empty); leave it out"
        )
    for direction in dict.fromkeys(member.direction for member in members):
        try:
            choose_tags(data, direction)
            choose_target_tag(data, direction)
        except UserError as error:
            problems.append(str(error))
    return list(dict.fromkeys(problems))
