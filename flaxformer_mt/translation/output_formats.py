"""How a translation or a score is written: the lines of output for one line of input.

Owns the columns, the n-best format and the names in JSON. Knows nothing of files or of where results come
from.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flaxformer_mt.translation.alignment import format_pharaoh
from flaxformer_mt.translation.result import Translation
from flaxformer_mt.translation.scorer import PairScore

# From ids of the target vocabulary to their pieces.
Pieces = Callable[[Sequence[int]], list[str]]


@dataclass(frozen=True)
class TranslationFormat:
    """What is written of a translation.

    Columns have tabs between them, the text is the last one: score, log-probability and token
    log-probabilities, alignment, text. n_best: `i ||| text ||| score` for each hypothesis, and a fourth
    field where alignments are asked for. json: one object with everything.
    """

    n_best: bool = False
    scores: bool = False
    token_scores: bool = False
    alignments: bool = False
    json: bool = False

    def lines(self, number: int, source: str, translation: Translation, pieces: Pieces) -> list[str]:
        """The output lines of input line `number`, counted from 0."""
        if self.json:
            return [write_json(_describe(number, source, translation, pieces, n_best=self.n_best))]
        if self.n_best:
            return [self._write_hypothesis(number, one) for one in translation.n_best]
        columns = [f"{translation.score:.6f}"] if self.scores or self.token_scores else []
        if self.token_scores:
            columns += _write_log_probs(translation.log_prob, translation.token_log_probs or ())
        if self.alignments:
            columns.append(format_pharaoh(translation.alignment or ()))
        return ["\t".join([*columns, translation.text])]

    def _write_hypothesis(self, number: int, one: Translation) -> str:
        fields = [str(number), one.text, f"{one.score:.6f}"]
        if self.alignments:
            fields.append(format_pharaoh(one.alignment or ()))
        return " ||| ".join(fields)


def _describe(
    number: int, source: str, translation: Translation, pieces: Pieces, *, n_best: bool
) -> dict[str, Any]:
    described = {"line": number, "source": source, **_describe_one(translation, pieces)}
    if n_best:
        described["n_best"] = [_describe_one(one, pieces) for one in translation.n_best]
    return described


def _describe_one(one: Translation, pieces: Pieces) -> dict[str, Any]:
    return {
        "text": one.text,
        "score": one.score,
        "log_prob": one.log_prob,
        "tokens": one.tokens,
        "pieces": pieces(one.tokens),
        "token_log_probs": one.token_log_probs or (),
        "alignment": one.alignment or (),
        "truncated": one.truncated,
        "satisfied": one.satisfied,
        "parts": one.parts,
    }


def format_score(
    score: PairScore,
    number: int,
    pair: tuple[str | None, str],
    pieces: Pieces,
    *,
    tokens: bool,
    as_json: bool,
) -> str:
    """The line of a score: the score, or with `tokens` also log-probability and token log-probabilities.

    Args:
      number: of the pair, counted from 0.
      pair: source and target; no source for a language model.
    """
    if not as_json:
        columns = _write_log_probs(score.log_prob, score.token_log_probs) if tokens else []
        return "\t".join([f"{score.score:.6f}", *columns])
    source, target = pair
    return write_json(
        {
            "line": number,
            **({} if source is None else {"source": source}),
            "target": target,
            "score": score.score,
            "log_prob": score.log_prob,
            "tokens": score.tokens,
            "pieces": pieces(score.tokens),
            "token_log_probs": score.token_log_probs,
            "truncated": score.truncated,
        }
    )


def _write_log_probs(log_prob: float, token_log_probs: Sequence[float]) -> list[str]:
    return [f"{log_prob:.6f}", " ".join(f"{each:.6f}" for each in token_log_probs)]


def write_json(value: dict[str, Any]) -> str:
    """One line of JSON: numbers that are not finite are null, which JSON has, and others have six digits."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value
