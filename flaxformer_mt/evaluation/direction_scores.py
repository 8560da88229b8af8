"""Scores of a model of several directions: those of each direction, and their means.

BLEU of different target languages counts different tokens, so that the scores of all sentences together would
say little: the mean over directions gives each direction the same weight, whatever the sizes of its sets.
"""

from collections.abc import Mapping
from statistics import fmean
from typing import Any, NamedTuple

from flaxformer_mt.config import TrainConfig
from flaxformer_mt.config.directions import Direction
from flaxformer_mt.corpus.pairs import Pairs
from flaxformer_mt.errors import warn_user
from flaxformer_mt.evaluation.metrics import SCRIPT_SAMPLE, choose_score_options, score_translations
from flaxformer_mt.evaluation.translation_files import Translations


class _Rows(NamedTuple):
    """The sentences of one direction, and the options of `score_translations` for them."""

    direction: Direction
    start: int
    stop: int
    options: dict[str, Any]


class DirectionScorer:
    """Scores translations of the pairs of a set, each direction by itself."""

    def __init__(self, pairs: Pairs, config: TrainConfig) -> None:
        """Choose the tokenizer of each target language, with a warning for one that is not installed."""
        self._rows, start = list[_Rows](), 0
        for part, languages in zip(pairs.parts, pairs.languages, strict=True):
            direction = Direction(*languages)
            first = [pairs[number].target for number in range(start, start + min(part.size, SCRIPT_SAMPLE))]
            options = choose_score_options(config, direction.target, first, warn=warn_user)
            self._rows.append(_Rows(direction, start, start + part.size, options))
            start += part.size

    def score(self, translations: Translations) -> dict[str, float]:
        """Return the means `bleu` and `chrf`; of several directions also `bleu_de-en` and so on."""
        found = {}
        for direction, start, stop, options in self._rows:
            part = translations.choose(range(start, stop))
            found[direction.name] = score_translations(part.hypotheses, part.references, **options)
        values = {
            "bleu": fmean(scores.bleu for scores in found.values()),
            "chrf": fmean(scores.chrf for scores in found.values()),
        }
        if len(found) > 1:
            for name, scores in found.items():
                values |= {f"bleu_{name}": scores.bleu, f"chrf_{name}": scores.chrf}
        return values


def join_reports(name: str, reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the report of several directions: means, sum, and the report of each under `directions`."""
    first = next(iter(reports.values()))
    means = {metric: fmean(report[metric] for report in reports.values()) for metric in _METRICS}
    sums = {field: sum(report[field] for report in reports.values()) for field in _SUMS}
    same = {field: first[field] for field in ("checkpoint", "method", "beam_size", "length_penalty")}
    return {
        "name": name,
        **same,
        **means,
        **sums | {"seconds": round(sums["seconds"], 1)},
        "directions": dict(reports),
    }


_METRICS = ("bleu", "chrf", "ter")
_SUMS = ("sentences", "truncated", "seconds")


def describe_directions(report: Mapping[str, Any]) -> str:
    """Format the scores of each direction, and their means, as a table.

    direction  sentences    BLEU    chrF     TER
    en-de            500   30.10   52.20   55.00
    en-fr            500   34.30   56.40   50.00
    mean                   32.20   54.30   52.50
    """
    width = max(len("direction"), *map(len, report["directions"]))
    lines = [f"{'direction':<{width}}  sentences    BLEU    chrF     TER"]
    rows = [*report["directions"].items(), ("mean", {**report, "sentences": ""})]
    for name, scores in rows:
        numbers = "".join(f"{scores[metric]:>8.2f}" for metric in _METRICS)
        lines.append(f"{name:<{width}}  {scores['sentences']:>9}{numbers}")
    return "\n".join(lines)
