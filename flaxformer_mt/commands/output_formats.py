"""Output formats of `translate` and `score`: columns, n-best lists, Pharaoh alignments, JSON lines."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flaxformer_mt.corpus.pharaoh import format_points
from flaxformer_mt.translation.result import Translation, drop_repeated

# Maps ids of the target vocabulary to pieces.
Pieces = Callable[[Sequence[int]], list[str]]

# Written for ||| in the text of an n-best list, whose fields are separated by it; Moses escapes | so.
_ESCAPED = "&#124;" * 3


@dataclass(frozen=True)
class TranslationFormat:
    """Selects what is written for each translation.

    Columns, separated by tabs: score, log-probability and token log-probabilities, alignment, text (always).
    n_best: one line `i ||| text ||| score` per hypothesis, with the alignment as a fourth field; ||| in a
    text becomes &#124;&#124;&#124;. unique: leave out hypotheses that repeat an earlier text. json: one
    object with all fields. The score of a blank line is nan, in JSON null.
    """

    n_best: bool = False
    scores: bool = False
    token_scores: bool = False
    alignments: bool = False
    json: bool = False
    unique: bool = False

    def lines(self, number: int, source: str, translation: Translation, pieces: Pieces) -> list[str]:
        """Return the output lines of input line `number`, counted from 0."""
        if self.unique:
            translation = drop_repeated(translation)
        if self.json:
            described = {"line": number, "source": source, **_describe(translation, pieces)}
            if self.n_best:
                described["n_best"] = [_describe(one, pieces) for one in translation.n_best]
            return [write_json(described)]
        if self.n_best:
            return [self._format_hypothesis(number, hypothesis) for hypothesis in translation.n_best]
        columns = [f"{translation.score:.6f}"] if self.scores or self.token_scores else []
        if self.token_scores:
            columns += _format_log_probs(translation.log_prob, translation.token_log_probs or ())
        if self.alignments:
            columns.append(format_points(translation.alignment or ()))
        return ["\t".join([*columns, translation.text])]

    def _format_hypothesis(self, number: int, hypothesis: Translation) -> str:
        fields = [str(number), hypothesis.text.replace("|||", _ESCAPED), f"{hypothesis.score:.6f}"]
        if self.alignments:
            fields.append(format_points(hypothesis.alignment or ()))
        return " ||| ".join(fields)


def _describe(hypothesis: Translation, pieces: Pieces) -> dict[str, Any]:
    return {
        "text": hypothesis.text,
        "score": hypothesis.score,
        "log_prob": hypothesis.log_prob,
        "tokens": hypothesis.tokens,
        "pieces": pieces(hypothesis.tokens),
        "token_log_probs": hypothesis.token_log_probs or (),
        "alignment": hypothesis.alignment or (),
        "truncated": hypothesis.truncated,
        "satisfied": hypothesis.satisfied,
        "parts": hypothesis.parts,
    }


def format_score(
    score: Translation, number: int, source: str | None, pieces: Pieces, *, tokens: bool, as_json: bool
) -> str:
    """Return the output line for the score of a translation; `number` is its line, counted from 0.

    `source` is None for a language model. `tokens` adds the log-probability and token log-probabilities.
    """
    if not as_json:
        columns = _format_log_probs(score.log_prob, score.token_log_probs or ()) if tokens else []
        return "\t".join([f"{score.score:.6f}", *columns])
    names = ("score", "log_prob", "tokens", "pieces", "token_log_probs", "truncated")
    described = _describe(score, pieces)
    pair = {"target": score.text} if source is None else {"source": source, "target": score.text}
    return write_json({"line": number, **pair, **{name: described[name] for name in names}})


def _format_log_probs(log_prob: float, token_log_probs: Sequence[float]) -> list[str]:
    return [f"{log_prob:.6f}", " ".join(f"{each:.6f}" for each in token_log_probs)]


def write_json(value: dict[str, Any]) -> str:
    """Format a value as one line of JSON: floats with at most six decimals, null for NaN and infinity."""
    return json.dumps(_to_json(value), ensure_ascii=False, allow_nan=False)


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _to_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(inner) for inner in value]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value
