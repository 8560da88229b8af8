"""The step that copies text without letters, for which a model would invent a translation."""

import re

from flaxformer_mt.translation.result import Translation
from flaxformer_mt.translation.segments import Segment, Step
from flaxformer_mt.unicode_text import is_blank, split_words

_URL = re.compile(r"(?:https?://|www\.)\S+")


class CopiedText(Step):
    """Copies an emoji, `...`, `12:30` or a URL alone, unless something is required of the translation."""

    counted = "texts without letters that were copied"

    def before(self, segments: list[Segment]) -> list[Segment]:
        for segment in segments:
            text, request = segment.text.strip(), segment.request
            term = request.glossary is not None and request.glossary.find(text)
            if is_copied(text) and not (request.prefix or request.phrases or term):
                words = len(split_words(text)) if segment.annotations.alignments == "words" else 0
                has_alignment = segment.annotations.alignments is not None
                segment.memory[self] = None
                segment.translation = Translation(
                    text,
                    score=0.0,
                    log_prob=0.0,
                    tokens=(),
                    token_log_probs=() if segment.annotations.token_log_probs else None,
                    alignment=tuple((word, word) for word in range(words)) if has_alignment else None,
                )
        return segments


def is_copied(text: str) -> bool:
    """Return whether a text is a URL, or has no letter but something else to be seen."""
    return _URL.fullmatch(text) is not None or not (is_blank(text) or any(map(str.isalpha, text)))
