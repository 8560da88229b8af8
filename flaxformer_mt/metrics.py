"""Scores of translations, and sums of what training measures.

Row 10 of the data path, and the only door to sacreBLEU. Knows nothing of models, files or where translations
come from.
"""

import dataclasses
import math
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from flaxformer_mt.config import TrainConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.shapes import Array


@dataclass(frozen=True)
class Scores:
    """Corpus scores from 0 to 100, with the signatures that make them comparable."""

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str
    # Precisions of 1- to 4-grams, brevity penalty, and the ratio of lengths, as sacreBLEU prints them.
    bleu_detail: str

    def to_dict(self) -> dict[str, Any]:
        """The scores as JSON values."""
        return dataclasses.asdict(self)


def score_translations(
    hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False, tokenize: str = "13a"
) -> Scores:
    """Corpus BLEU and chrF of detokenized hypotheses against one reference each.

    Args:
      lowercase: score regardless of case (both scores).
      tokenize: sacreBLEU's tokenizer for BLEU; chrF counts characters and has none.

    Raises:
      UserError: no sentences, different numbers of them, or a tokenizer that is unknown or not installed.
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    if len(hypotheses) != len(references):
        raise UserError(
            f"{len(hypotheses)} translations cannot be scored against {len(references)} references; "
            "give exactly one reference line for each translation"
        )
    if not hypotheses:
        raise UserError(
            "there are no translations to score (0 lines); give at least one line and its reference"
        )
    known = typing.get_args(typing.get_type_hints(TrainConfig)["bleu_tokenize"])
    if tokenize not in known:
        raise UserError(f"unknown BLEU tokenizer {tokenize!r}; known: {', '.join(known)}")
    try:
        # `force` only silences a warning about text that looks tokenized; it changes no score.
        bleu = BLEU(lowercase=lowercase, tokenize=tokenize, force=True)
    except (RuntimeError, ImportError) as error:  # a tokenizer whose libraries are an extra of sacreBLEU
        extra = tokenize.removesuffix("-mecab")
        raise UserError(
            f"BLEU tokenizer {tokenize} is not installed; get it with: pip install 'sacrebleu[{extra}]'"
        ) from error
    chrf = CHRF(lowercase=lowercase)
    bleu_score = bleu.corpus_score(hypotheses, [references])
    chrf_score = chrf.corpus_score(hypotheses, [references])
    return Scores(
        bleu=float(bleu_score.score),
        chrf=float(chrf_score.score),
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
        bleu_detail=str(bleu_score),
    )


class MetricSums:
    """Running sums of (sum, weight) pairs by name, read once in a while.

    The scalars stay on their device until `result`, so adding a step's metrics does not wait for that step;
    the sums are then formed in float64, which no number of steps or tokens can wear out.

        sums.add("loss", value_sum=12.0, weight=4); sums.add("loss", value_sum=3.0, weight=1)
        sums.result() -> {"loss_sum": 15.0, "loss_weight": 5.0, "loss_mean": 3.0}
    """

    def __init__(self) -> None:
        self._pairs: dict[str, list[tuple[Any, Any]]] = {}

    def add(self, name: str, *, value_sum: Array | float, weight: Array | float) -> None:
        """Adds a pair of scalars, on a device or not. Raises ValueError for anything that is no scalar."""
        for part, value in (("value_sum", value_sum), ("weight", weight)):
            if np.shape(value) != ():
                raise ValueError(f"{part} of {name} should be a scalar, got shape {np.shape(value)}")
        self._pairs.setdefault(name, []).append((value_sum, weight))

    def result(self) -> dict[str, float]:
        """`NAME_sum`, `NAME_weight` and `NAME_mean` of every name; the mean of no weight at all is nan."""
        totals = {}
        for name, pairs in jax.device_get(self._pairs).items():
            total = float(np.sum([np.float64(value_sum) for value_sum, _ in pairs]))
            weight = float(np.sum([np.float64(weight) for _, weight in pairs]))
            totals[f"{name}_sum"], totals[f"{name}_weight"] = total, weight
            totals[f"{name}_mean"] = total / weight if weight else math.nan
        return totals

    def reset(self) -> None:
        """Forgets everything added so far."""
        self._pairs.clear()
