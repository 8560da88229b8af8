"""Requests to a translation engine, and their answers."""

import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from flaxformer_mt.corpus.documents import Documents
from flaxformer_mt.errors import UserError
from flaxformer_mt.translation.glossary import Glossary
from flaxformer_mt.translation.result import NO_ANNOTATIONS, Annotations, Translation
from flaxformer_mt.unicode_text import is_blank


@dataclasses.dataclass(frozen=True)
class Request:
    """A line to translate. Requests can be pickled.

    Attributes:
      text: the source; "" for a language model.
      id: identifies the answer; unique among the requests of an engine.
      seed: gives equal texts different samples. For a line of a file, the line number, which messages report.
      prefix: the text that the translation must begin with.
      required: phrases that the translation must contain.
      glossary: terms of the source, and their translations.
      n_best: maximum number of hypotheses, the translation itself included.
      source_language: for a multilingual model. None: the tag at the start of the text names it.
      target_language: for a multilingual model. None: the tag at the start of the text names it.
      annotations: additional output, and whether markup is taken out and put back.
      sentence_starts: where the sentences of the text start. None: the engine finds them, as it always does
        in text with markup.
      context: the preceding lines of the document, the nearest last, for a model with data.context. None: the
        line is not part of a document.
    """

    text: str
    id: Hashable = None
    seed: int = 1
    prefix: str = ""
    required: tuple[str, ...] = ()
    n_best: int = 1
    source_language: str | None = None
    target_language: str | None = None
    annotations: Annotations = NO_ANNOTATIONS
    context: tuple[str, ...] | None = None
    glossary: Glossary | None = None
    sentence_starts: tuple[int, ...] | None = None

    @property
    def phrases(self) -> list[str]:
        """The required phrases, without blank ones."""
        return [phrase for phrase in self.required if not is_blank(phrase)]


def make_requests(
    lines: Iterable[str],
    constraints: Mapping[str, tuple[str, Iterable[Any] | None]],
    *,
    first_line: int = 1,
    documents: Documents | None = None,
    **fields: Any,
) -> Iterator[Request]:
    """Yield a request for each line, with the line number as its seed; `fields` are shared by all requests.

    `constraints` map each field to its name in messages and its values, one per line (None: the default).
    `documents`: the documents of the lines, if the model reads preceding lines.
    """
    columns = {
        name: (what, iter(values)) for name, (what, values) in constraints.items() if values is not None
    }
    number = first_line - 1
    for number, line in enumerate(lines, start=first_line):
        values: dict[str, Any] = {name: next(column, None) for name, (_, column) in columns.items()}
        if missing := [columns[name][0] for name, value in values.items() if value is None]:
            raise UserError(count_message(missing[0], number - 1, number))
        if "required" in values:
            values["required"] = tuple(values["required"])
        if documents is not None:
            values["context"] = documents.before
        yield Request(line, seed=number, **values, **fields)
    for what, column in columns.values():
        if next(column, None) is not None:
            raise UserError(f"there are more {what} than the {number} lines; give one for each line")


def count_message(what: str, count: int, num_lines: int) -> str:
    """Return the error message for different numbers of constraints and lines."""
    return (
        f"there are {count} {what} for {num_lines} lines; give one for each line, an empty one for a line "
        "without constraint"
    )


# The id of a request, and its translation or why there is none.
Answer = tuple[Any, Translation | Exception]


def check_lines(lines: Sequence[str], *, first_line: int = 1) -> None:
    """Raise UserError if `lines` is one string, or has an element that is not a string."""
    if isinstance(lines, str):
        raise UserError("translate takes a list of lines, but got one string; put the string in a list")
    for number, line in enumerate(lines, start=first_line):
        if not isinstance(line, str):
            raise UserError(f"line {number} is {type(line).__name__}, not str; decode bytes to str first")
