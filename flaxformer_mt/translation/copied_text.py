"""The step that copies text without letters, for which a model would invent a translation."""

import re

from flaxformer_mt.translation.result import Translation, one_line
from flaxformer_mt.translation.segments import Segment, Step
from flaxformer_mt.unicode_text import is_blank, split_words
from flaxformer_mt.vocab import Vocab

_URL = re.compile(r"(?:https?://|www\.)\S+")
# The replacement of invalid bytes, which translations do not contain.
_INVALID = "\ufffd"


class CopiedText(Step):
    """Copies a URL, or text without letters (`...` or `12:30`), unless the translation has constraints."""

    counted = "texts without letters that were copied"

    def __init__(self, vocab: Vocab) -> None:
        """`vocab`: the source vocabulary."""
        self._vocab = vocab

    def before(self, segments: list[Segment]) -> list[Segment]:
        for segment in segments:
            request = segment.request
            text = one_line(segment.text.replace(_INVALID, "")).strip()
            term = request.glossary is not None and request.glossary.find(text)
            if is_copied(text) and not (request.prefix.strip() or request.phrases or term):
                segment.memory[self] = None
                # For the alignments of subwords, which count these.
                (segment.ids,) = self._vocab.tokenize_all([segment.read(text)])
                segment.translation = _copy(segment, text)
        return segments


def is_copied(text: str) -> bool:
    """Return whether a text is a URL, or has visible characters but no letters."""
    return _URL.fullmatch(text) is not None or not (is_blank(text) or any(map(str.isalpha, text)))


def _copy(segment: Segment, text: str) -> Translation:
    """Return a text as its translation, in which each word is aligned with itself."""
    kind, alignment = segment.annotations.alignments, None
    if kind is not None:
        words = range(len(split_words(text)) if kind == "words" else 0)
        alignment = tuple((segment.tag_words + word, word) for word in words)
    log_probs = () if segment.annotations.token_log_probs else None
    return Translation(text, 0.0, 0.0, (), token_log_probs=log_probs, alignment=alignment)
