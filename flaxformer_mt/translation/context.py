"""The step that prepends the preceding lines of a document, for models trained with data.context."""

import numpy as np

from flaxformer_mt.config import DataConfig
from flaxformer_mt.corpus.documents import Context, check_context, tokenize_before
from flaxformer_mt.corpus.sentence_split import split_sentences
from flaxformer_mt.translation.inline_markup import take_out
from flaxformer_mt.translation.language_tags import find_language_tags
from flaxformer_mt.translation.segments import Segment, Step, group_by_line
from flaxformer_mt.vocab import Vocab


class LinesBefore(Step):
    """Prepends the context to each part of a line: preceding lines, and preceding sentences of the line."""

    def __init__(self, data: DataConfig, vocab: Vocab, *, apart: bool) -> None:
        self._data, self._context, self._vocab, self._apart = data, Context.of(data), vocab, apart

    def before(self, segments: list[Segment]) -> list[Segment]:
        for line, parts in group_by_line(segments):
            if line.request.context:
                check_context(self._data, "a context")
            if self._context is not None and line.request.context is not None:
                self._add_context(line, parts, self._context)
        return segments

    def _add_context(self, line: Segment, parts: list[Segment], context: Context) -> None:
        texts, own = [self._read(text, line) for text in line.request.context or ()], list[str]()
        if self._apart:
            language = line.source_language
            texts = [one for text in texts for one in split_sentences(text, language=language)]
            own = [part.text for part in parts[:-1]]
        before = tokenize_before(self._vocab, [text.strip() for text in [*texts, *own]])
        for number, part in enumerate(parts):
            nearest = context.choose(len(part.ids), before[: len(texts) + (number if own else 0)])
            part.added_pieces += sum(map(len, nearest))
            part.ids = np.concatenate([*nearest, part.ids], dtype=np.int32)

    def _read(self, text: str, line: Segment) -> str:
        """Return a preceding line without markup, and without language tags unless these are plain text."""
        if line.request.annotations.markup:
            text = take_out(text).text
        return text if line.added else text[len(find_language_tags(text)) :]
