"""Computes scores by direction, with their means, and by source length.

BLEU counts different tokens in each target language, so the sentences of all languages have no common score.
In the mean, each direction has the same weight, regardless of its number of sentences.
"""

import bisect
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from flaxformer_mt.config import TrainConfig
from flaxformer_mt.config.directions import Direction
from flaxformer_mt.corpus.pairs import Pairs
from flaxformer_mt.errors import warn_user
from flaxformer_mt.evaluation.evaluation_set import Translations
from flaxformer_mt.evaluation.tables import Table, make_table
from flaxformer_mt.scoring.bleu_tokenizers import SCRIPT_SAMPLE
from flaxformer_mt.scoring.metrics import METRICS, QUICK, choose_score_options, score_translations
from flaxformer_mt.translation.glossary import Glossary
from flaxformer_mt.unicode_text import MARKS, spell


class DirectionScorer:
    def __init__(self, pairs: Pairs, config: TrainConfig) -> None:
        """Choose the tokenizer of each target language; warn about a tokenizer that is not installed."""
        # Of each direction: its name, its sentences, and the options of its scores.
        self._parts, start = list[tuple[str, range, dict[str, Any]]](), 0
        for part, languages in zip(pairs.parts, pairs.languages, strict=True):
            direction = Direction(*languages)
            first = [pairs[number].target for number in range(start, start + min(part.size, SCRIPT_SAMPLE))]
            options = choose_score_options(config, direction.target, first, warn=warn_user)
            options["direction"] = direction
            options["only"] = [*QUICK, *(name for name in config.metrics if name not in (*QUICK, "loss"))]
            self._parts.append((direction.name, range(start, start + part.size), options))
            start += part.size
        self.directions = [(options["direction"], rows) for _, rows, options in self._parts]

    def score(self, translations: Translations) -> dict[str, float]:
        """Return mean BLEU, chrF and train.best_metric, and each direction's scores, such as bleu_de-en."""
        by_direction = {}
        for name, sentences, options in self._parts:
            part = translations.choose(sentences)
            by_direction[name] = score_translations(
                part.hypotheses, part.references, sources=part.sources, **options
            )
        values = {name: fmean(one[name] for one in by_direction.values()) for name in options["only"]}
        if len(by_direction) > 1:
            for name, one in by_direction.items():
                values |= {f"{metric}_{name}": score for metric, score in one.items()}
        return values


def join_reports(name: str, reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Join the reports of several directions: mean scores, summed counts, and the reports as `directions`."""
    first = next(iter(reports.values()))
    metrics = find_metrics(first)
    means = {metric: fmean(report[metric] for report in reports.values()) for metric in metrics}
    counts = ("sentences", "truncated", "seconds")
    sums = {field: sum(report[field] for report in reports.values()) for field in counts}
    names = ("checkpoint", "step", "method", "beam_size", "length_penalty", "mbr")
    same = {name: first[name] for name in names if name in first}
    return {
        "name": name,
        **same,
        **means,
        **({"scorers": first["scorers"]} if "scorers" in first else {}),
        **sums | {"seconds": round(sums["seconds"], 1)},
        "directions": dict(reports),
    }


def find_metrics(report: Mapping[str, Any]) -> list[str]:
    """Return the names of the metrics in a report: first the standard metrics, then those in `scorers`."""
    return [name for name in (*METRICS, *report.get("scorers", ())) if name in report]


def describe_directions(report: Mapping[str, Any]) -> Table:
    """Return a table of the scores of each direction, the BLEU of compared systems, and the means.

    direction  sentences   BLEU   chrF    TER  BLEU of runs/a@0
    en-de            500  30.10  52.20  55.00             28.70
    mean                  30.10  52.20  55.00             28.70
    """
    directions, metric = report["directions"], next(iter(metrics := find_metrics(report)), "")
    columns = {"direction": "{name}", "sentences": "{sentences}", **_name_columns(metrics)}
    records = [*({**one, "name": name} for name, one in directions.items()), {**report, "name": "mean"}]
    records[-1]["sentences"] = None
    for number, system in enumerate(next(iter(directions.values())).get("against", ())):
        columns[f"{title_of(metric)} of {system['name']}"] = f"{{against_{number}:.2f}}"
        scores = [one["against"][number][metric]["score"] for one in directions.values()]
        for record, score in zip(records, [*scores, fmean(scores)], strict=True):
            record[f"against_{number}"] = score
    return make_table(columns, records)


def _name_columns(metrics: Iterable[str]) -> dict[str, str]:
    return {title_of(metric): f"{{{metric}:.2f}}" for metric in metrics}


def title_of(metric: str) -> str:
    return METRICS[metric].title if metric in METRICS else metric


# The longest source of each bucket, in words; one more bucket contains all longer sources.
_LONGEST: tuple[int, ...] = (5, 10, 15, 20, 25, 30, 40, 50, 75, 100)


def score_by_length(translations: Translations, *, lowercase: bool, tokenize: str) -> list[dict[str, Any]]:
    """Compute BLEU, chrF and mean lengths in words for each bucket that is not empty, as JSON values.

    {"from": 6, "to": 10, "sentences": 72, "bleu": 35.1, "chrf": 58.0,  # to: None for the longest sources
     "hypothesis_length": 8.2, "reference_length": 8.4}
    """
    rows = []
    for (start, end), part in split_by_length(translations).items():
        scores = score_translations(part.hypotheses, part.references, lowercase=lowercase, tokenize=tokenize)
        rows.append(
            {
                "from": start,
                "to": end,
                "sentences": len(part.sources),
                **scores,
                "hypothesis_length": round(fmean(map(_count_words, part.hypotheses)), 2),
                "reference_length": round(fmean(map(_count_words, part.references)), 2),
            }
        )
    return rows


def score_terms(translations: Translations, glossary: Glossary) -> dict[str, Any]:
    """Count terms whose translations are in references; `used`: the share of them also in hypotheses."""
    found = list[bool]()
    texts = (translations.sources, translations.references, translations.hypotheses)
    for source, reference, hypothesis in zip(*texts, strict=True):
        for term in glossary.find(source):
            if _has_term(reference, term.target):
                found.append(_has_term(hypothesis, term.target))
    return {"count": len(found), "used": fmean(found) if found else None}


def _has_term(text: str, term: str) -> bool:
    """Return whether a text contains the words of a term in a row; punctuation around words is ignored."""
    words, wanted = spell(text).split(), spell(term).split()
    words = [word.strip(MARKS) or word for word in words]
    return any(words[start : start + len(wanted)] == wanted for start in range(len(words)))


def split_by_length(translations: Translations) -> dict[tuple[int, int | None], Translations]:
    """Split translations into buckets by source length; keys: the smallest and largest number of words."""
    indices: dict[int, list[int]] = {}
    for index, source in enumerate(translations.sources):
        indices.setdefault(bisect.bisect_left(_LONGEST, _count_words(source)), []).append(index)
    bounds = [*zip([0, *(longest + 1 for longest in _LONGEST)], [*_LONGEST, None], strict=True)]
    return {bounds[bucket]: translations.choose(indices[bucket]) for bucket in sorted(indices)}


def _count_words(line: str) -> int:
    return len(line.split())


def name_bucket(start: int, end: int | None) -> str:
    """Return the name of a bucket: `6-10`, or `101 or more` for the last one."""
    return f"{start} or more" if end is None else f"{start}-{end}"


def describe_by_length(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of the scores of each bucket of source lengths.

    source words  sentences   BLEU   chrF  words in translation  in reference
            6-10         72  35.10  58.00                   8.2           8.4
    """
    columns = {"source words": "{words}", "sentences": "{sentences}", **_name_columns(QUICK)}
    columns["words in translation"] = "{hypothesis_length:.1f}"
    columns["in reference"] = "{reference_length:.1f}"
    return make_table(columns, [{**row, "words": name_bucket(row["from"], row["to"])} for row in rows])
