"""The step that divides lines into sentences; `join_sentences.py` joins their translations."""

import itertools
from typing import Literal

from flaxformer_mt.corpus.sentence_split import split_sentences
from flaxformer_mt.translation.segments import Segment, Step

# Treatment of lines of several sentences: each sentence is translated apart, or the line as a whole; auto:
# apart, unless the model was trained on such lines.
SplitSentences = Literal["auto", "always", "never"]

# If at least this share of the training lines has several sentences, such lines are translated whole.
_TRAINED_ON_SEVERAL = 0.1


def splits_sentences(option: SplitSentences, *, several: float | None) -> bool:
    """Return whether the sentences of a line are translated separately.

    `several` is the share of the model's training lines that have several sentences; None: unknown. Nearly
    all models are trained on single sentences, and would translate only the first sentence of a longer line.
    """
    return option == "always" or (option == "auto" and (several or 0.0) < _TRAINED_ON_SEVERAL)


class Sentences(Step):
    """Makes each line one part or, if `apart`, makes each sentence a part.

    A line with required phrases stays one part, because it is unknown which sentence each phrase belongs to.
    """

    def __init__(self, *, apart: bool) -> None:
        self._apart = apart

    def before(self, segments: list[Segment]) -> list[Segment]:
        parts = []
        for line in segments:
            apart = self._apart and not line.request.phrases
            parts += line.divide(self._split(line) if apart else [line.text])
        return parts

    def _split(self, line: Segment) -> list[str]:
        starts, glossary = line.sentence_starts, line.request.glossary
        if starts is None:
            text = line.spoken[line.start :] or line.text
            sentences = split_sentences(text, language=line.source_language)
            starts = tuple(itertools.accumulate(map(len, sentences[:-1]), initial=line.start))
        terms = glossary.find(line.line) if glossary and len(starts) > 1 else ()  # a term stays whole
        cuts = [n for n in starts if n > line.start and not any(term.start < n < term.end for term in terms)]
        return [line.line[n:m] for n, m in itertools.pairwise([line.start, *cuts, len(line.line)])]
