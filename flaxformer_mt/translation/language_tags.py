"""The languages that a model translates, and the tags that its lines get before they are tokenized."""

from collections.abc import Sequence
from typing import NamedTuple

from flaxformer_mt.config import DataConfig
from flaxformer_mt.config.directions import Direction, choose_tags, common_languages, find_directions
from flaxformer_mt.errors import UserError


class LineTags(NamedTuple):
    """What is put before each line: `added`, unless the line begins with one of the tags in `known`."""

    added: str
    known: tuple[str, ...] = ()
    # Why `added` is not known, for a line that begins with no tag; "" where it is known.
    missing: str = ""
    # The languages of all lines and of their translations; "" if they are several.
    source: str = ""
    target: str = ""

    def find(self, lines: Sequence[str], *, first_line: int = 1) -> list[str] | None:
        """Returns the tags to put before each line; None if no line gets one.

        Raises:
          UserError: a line that is not blank needs a tag, and the languages are not known.
        """
        if not self.known:
            return None
        found = []
        for number, line in enumerate(lines, start=first_line):
            plain = line.lstrip()
            tagged = not plain or plain.startswith(self.known)
            if not tagged and self.missing:
                raise UserError(f"{self.missing} (line {number} does not)")
            found.append("" if tagged else self.added)
        return found


def choose_line_tags(
    data: DataConfig, source_language: str | None = None, target_language: str | None = None
) -> LineTags:
    """Returns the tags that lines get, to be translated from and to these languages.

    Args:
      data: the config that the model was trained with.
      source_language, target_language: None: the one that the model has, or that the tags of lines name.

    Raises:
      UserError: the model does not have a language.
    """
    directions = find_directions(data)
    given = {"source": source_language, "target": target_language}
    for side, language in given.items():
        known = list(dict.fromkeys(getattr(one, side) for one in directions))
        if language is not None and language not in known:
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
    added, missing = "", ""
    if len(possible) > 1:
        missing = _ask(fitting, possible)
    else:
        added = "".join(f"{tag} " for tag in possible[0])
    return LineTags(added, known_tags, missing, *common_languages(fitting))


def _ask(fitting: list[Direction], possible: list[tuple[str, ...]]) -> str:
    side = "target" if len({one.target for one in fitting}) > 1 else "source"
    languages = list(dict.fromkeys(getattr(one, side) for one in fitting))
    return (
        f"this model translates {'to' if side == 'target' else 'from'} {' and '.join(languages)}; give "
        f"--{side}_language={languages[0]}, or begin each line with its tag, as in {' '.join(possible[0])}"
    )
