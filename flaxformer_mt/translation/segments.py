"""The data that translation steps pass on: a line, then its parts, with all that the steps add to them."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from flaxformer_mt.decoding.search_inputs import Sentence
from flaxformer_mt.translation.requests import Request
from flaxformer_mt.translation.result import Annotations, Translation
from flaxformer_mt.unicode_text import split_words

_NO_IDS = np.zeros(0, np.int32)


class Step(Protocol):
    """A transformation of lines before translation, which is undone in their translations.

    A step handles strings and ids and knows no network. Its only state that depends on lines is in
    `Segment.memory`.
    """

    # The message to users that counts the segments changed by the step; "": no message.
    counted: str = ""

    def before(self, segments: list["Segment"]) -> list["Segment"]:
        """Return the segments for the next step, from a window of lines or parts; can run in any thread.

        The segments are changed in place, divided into several (`Segment.divide`), or dropped if they have no
        words. A segment whose translation is set here skips all later steps.
        """

    def after(self, segment: "Segment", translation: Translation) -> Translation:
        """Undo this step in a segment's translation, using what `before` stored in `segment.memory`."""
        return translation


@dataclasses.dataclass(eq=False, slots=True)
class Segment:
    """A line to which steps are applied, or a part of it: a sentence, or a section of limited length."""

    request: Request
    # The whole line; the segment's `text`, with white space at its ends; where the text starts in the line.
    line: str
    text: str
    start: int = 0
    # For a part: its line (None: this is a line), and its number among the line's parts.
    whole: "Segment | None" = None
    number: int = 0
    # Whether the preceding part belongs to the same sentence, which was too long for one part.
    continues: bool = False
    # The requested annotations, and where the sentences of the line start (None: unknown).
    annotations: Annotations = Annotations()
    sentence_starts: tuple[int, ...] | None = None
    # The form of the line in which sentences are found, if it is not the text; see `MarkedLine.spoken`.
    spoken: str = ""
    # The languages ("": unknown), and the language tag and space that translations begin with.
    source_language: str = ""
    target_language: str = ""
    lead: str = ""
    # Tags before the text, and their numbers of subwords: those of requested languages, and the line's own.
    added: str = ""
    added_pieces: int = 0
    tag: str = ""
    tag_pieces: int = 0
    # Converts the text to the form that the model reads, such as another letter case.
    spell: Callable[[str], str] = str
    # The ids of tags and text, ending in eos, and whether they were cut.
    ids: np.ndarray = dataclasses.field(default_factory=lambda: _NO_IDS)
    is_cut: bool = False
    # The input of the search: ids and constraints.
    sentence: Sentence = Sentence(_NO_IDS)
    # The steps to undo, in order, and what each step stored for this.
    memory: dict[Step, Any] = dataclasses.field(default_factory=dict)
    # For a line: its parts, and the number of parts that are not translated yet.
    parts: list["Segment"] = dataclasses.field(default_factory=list)
    num_missing: int = 0
    translation: Translation | None = None

    @property
    def num_pieces(self) -> int:
        """The number of subwords of the text and of the line's own tags, without added tags."""
        return len(self.ids) - 1 - self.added_pieces

    @property
    def tag_words(self) -> int:
        """Number of words in the line's own tags; a tag with no space after it is part of the next word."""
        return len(split_words(self.tag)) - (self.tag != "" and self.tag[-1] not in " \t\r\n")

    def read(self, text: str) -> str:
        """Return the model's input for `text`: tags, then `text` as converted by `spell`."""
        return self.added + self.tag + self.spell(text)

    def divide(self, texts: Sequence[str], *, continues: bool = False) -> "list[Segment]":
        """Divide this segment into parts, one for each of the consecutive `texts`.

        `continues`: whether parts after the first continue the sentence of the part before. A part of a part
        gets a copy of its memory and belongs to the same line.
        """
        starts = itertools.accumulate(map(len, texts), initial=self.start)
        return [
            dataclasses.replace(
                self,
                text=text,
                start=start,
                whole=self.whole or self,
                continues=continues and start > self.start,
                memory=dict(self.memory) if self.whole else {},
                parts=[],
            )
            for start, text in zip(starts, texts, strict=False)
        ]

    def undo(self, translation: Translation) -> Translation:
        """Undo the steps that changed this segment, in reverse order."""
        for step in reversed(self.memory):
            translation = step.after(self, translation)
        return translation


def group_by_line(segments: Iterable[Segment]) -> Iterator[tuple[Segment, list[Segment]]]:
    """Yield each line with its parts; a line that is not divided is its only part."""
    for line, parts in itertools.groupby(segments, key=lambda segment: segment.whole or segment):
        yield line, list(parts)
