"""Translations of lines with their scores and annotations."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from flaxformer_mt.unicode_text import spell

# Pairs of a source position and a target position.
Alignment = tuple[tuple[int, int], ...]


class Annotations(NamedTuple):
    """Selects additional outputs of translations; computing them takes one more forward pass."""

    # Whether to return the log-probability of each token.
    token_log_probs: bool = False
    # Alignments of words (separated by white space) or of subwords; None: no alignments.
    alignments: Literal["words", "pieces"] | None = None
    # Decoder layer whose attention gives the alignments, counted from 0; negative: counted from the last
    # layer. If layer and head are None: the layer and head that were trained on alignments, if all models
    # have the same `model.alignment`; otherwise the second-to-last or only layer. If layer and head are given
    # and equal the trained ones, the decoding step that they were trained for is used as well.
    layer: int | None = None
    # Attention head; None: the mean of all heads.
    head: int | None = None
    # Whether to return the attention weights of `layer` and `head`.
    attention: bool = False
    # Whether to remove tags and placeholders from lines and put them into the translations.
    markup: bool = False
    # Whether alignments are used to place markup: every source word is then aligned, and punctuation marks
    # have little weight.
    for_markup: bool = False

    @property
    def watched_any(self) -> bool:
        """Whether attention weights are needed."""
        return self.alignments is not None or self.attention

    @property
    def needs_reading(self) -> bool:
        """Whether computing the annotations takes an additional forward pass."""
        return self.watched_any or self.token_log_probs


NO_ANNOTATIONS = Annotations()


@dataclass(frozen=True)
class Translation:
    """The translation of one line, with its scores and its alternatives."""

    text: str
    # Log-probability divided by the length penalty, less the coverage penalty; hypotheses are ranked by it.
    # With search.mbr, the expected utility from 0 to 100.
    # NaN for a blank line, which is not searched.
    score: float
    log_prob: float
    # Ids of the target vocabulary; the last one is eos unless the length limit was reached.
    tokens: tuple[int, ...]
    # Whether only the beginning was translated, because the source exceeds data.max_source_length.
    truncated: bool = False
    # Whether the translation contains every phrase that the line requires; True without such phrases.
    satisfied: bool = True
    # The other hypotheses, best first.
    alternatives: tuple["Translation", ...] = ()
    # Log-probability of each token, if requested; they add up to log_prob.
    token_log_probs: tuple[float, ...] | None = None
    # Pairs of source and target words (or subwords), if requested, in the order of the target.
    alignment: Alignment | None = None
    # Number of parts in which the line was translated. If there are several, `tokens` are the tokens of all
    # parts, each part with its eos, and scores are sums over parts.
    parts: int = 1
    # Where the translation of each sentence starts in `text`, if the line was split into several sentences.
    sentence_starts: tuple[int, ...] = ()
    # Attention weights [target subword][source subword] without eos, if requested and if the line was
    # translated as one part.
    attention: tuple[tuple[float, ...], ...] | None = None
    # Subwords of the source, if there are attention weights.
    source_pieces: tuple[str, ...] = ()

    @property
    def n_best(self) -> tuple["Translation", ...]:
        """This translation and its alternatives, best first."""
        return (self, *self.alternatives)


# The translations of a line without words, and of a line for which the model's scores are NaN.
EMPTY = Translation(text="", score=math.nan, log_prob=0.0, tokens=())
FAILED = Translation(text="", score=-math.inf, log_prob=-math.inf, tokens=())


def rank(hypotheses: Sequence[Translation]) -> Translation:
    """Return the first hypothesis, with the others as its alternatives."""
    if len(hypotheses) == 1 and not hypotheses[0].alternatives:
        return hypotheses[0]
    return dataclasses.replace(hypotheses[0], alternatives=tuple(hypotheses[1:]))


def check_phrases(translation: Translation, phrases: Sequence[str]) -> Translation:
    """Set `satisfied` of a translation and its alternatives to whether each contains all phrases."""
    text = spell(translation.text)
    return dataclasses.replace(
        translation,
        satisfied=all(spell(phrase) in text for phrase in phrases),
        alternatives=tuple(check_phrases(other, phrases) for other in translation.alternatives),
    )


def drop_repeated(translation: Translation) -> Translation:
    """Drop each alternative with the text of a better hypothesis, even if its subwords differ."""
    first = {one.text: one for one in reversed(translation.n_best)}
    others = tuple(one for one in translation.alternatives if one is first[one.text])
    return dataclasses.replace(translation, alternatives=others)


# All characters that some program treats as the end of a line, replaced by spaces: a translation is one line.
_LINE_ENDS = dict.fromkeys(map(ord, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"), " ")


def one_line(text: str) -> str:
    """Replace the line breaks in a text by spaces."""
    return text.translate(_LINE_ENDS)
