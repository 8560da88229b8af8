"""What goes through the steps of a translation: a line, then its parts, with what the steps know of them."""

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
    """One thing that happens to lines on their way to the model, and is undone in their translations.

    A step sees strings and ids, no network. It has no state that depends on lines, but `Segment.memory`.
    """

    # What users are told of the number of segments that the step has changed; "": nothing.
    counted: str = ""

    def before(self, segments: list["Segment"]) -> list["Segment"]:
        """Return what the next step gets for a window of lines or parts, in any thread.

        These are the segments, changed; several for one (`Segment.divide`); or none for one without words. A
        segment that is given its translation here goes no further.
        """

    def after(self, segment: "Segment", translation: Translation) -> Translation:
        """Return the translation of a segment for which `before` has put something into its memory."""
        return translation


@dataclasses.dataclass(eq=False, slots=True)
class Segment:
    """A line on its way through the steps, or a part of it: a sentence, or what the model can read of one."""

    request: Request
    # The text of the whole line, of which `text` is this segment, from `start`, with white space at its ends.
    line: str
    text: str
    start: int = 0
    # The line that this is a part of, its number among the parts; None: it is a line.
    whole: "Segment | None" = None
    number: int = 0
    # Whether the part before is of the same sentence, which was too long for one part.
    continues: bool = False
    # What the search is asked for besides, and where the sentences of the line start; None: not known.
    annotations: Annotations = Annotations()
    sentence_starts: tuple[int, ...] | None = None
    # The line as sentences are found in it, if that is not its text; see `MarkedLine.spoken`.
    spoken: str = ""
    # The languages, "" if they are not known, and what translations begin with: a language tag and a space.
    source_language: str = ""
    target_language: str = ""
    lead: str = ""
    # What the model reads before the text, with the number of its pieces: tags of given languages, and the
    # tags at the start of the line.
    added: str = ""
    added_pieces: int = 0
    tag: str = ""
    tag_pieces: int = 0
    # How the model reads the text, as in another letter case.
    spell: Callable[[str], str] = str
    # The ids of all this; the last one is eos. Whether they are only the beginning.
    ids: np.ndarray = dataclasses.field(default_factory=lambda: _NO_IDS)
    is_cut: bool = False
    # What is searched: ids and constraints.
    sentence: Sentence = Sentence(_NO_IDS)
    # The steps to be undone, in order, with what each needs to know for it.
    memory: dict[Step, Any] = dataclasses.field(default_factory=dict)
    # Of a line: its parts, and how many of them are not translated.
    parts: list["Segment"] = dataclasses.field(default_factory=list)
    num_missing: int = 0
    translation: Translation | None = None

    @property
    def num_pieces(self) -> int:
        """The number of pieces of the text and the line's own tags."""
        return len(self.ids) - 1 - self.added_pieces

    @property
    def tag_words(self) -> int:
        """The number of words of the line's own tags; without a space, the last is in the word after it."""
        return len(split_words(self.tag)) - (self.tag != "" and self.tag[-1] not in " \t\r\n")

    def read(self, text: str) -> str:
        """Return what the model reads for a text of the segment."""
        return self.added + self.tag + self.spell(text)

    def divide(self, texts: Sequence[str], *, continues: bool = False) -> "list[Segment]":
        """Return a part for each of consecutive texts; `continues`: of those after the first.

        Parts of a part have its memory, and are of the same line.
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
        """Undo the steps that this segment went through, in reverse order."""
        for step in reversed(self.memory):
            translation = step.after(self, translation)
        return translation


def group_by_line(segments: Iterable[Segment]) -> Iterator[tuple[Segment, list[Segment]]]:
    """Yield lines and their parts; a line that is not divided is its only part."""
    for line, parts in itertools.groupby(segments, key=lambda segment: segment.whole or segment):
        yield line, list(parts)
