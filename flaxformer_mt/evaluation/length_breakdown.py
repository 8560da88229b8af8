"""Scores by source length: how translation quality changes with the length of the sentence.

Contains the length buckets and their table. Length is the number of words between spaces, so that the buckets
are the same for every vocabulary; in a language without spaces, all sentences fall into the shortest bucket.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from flaxformer_mt.evaluation.metrics import score_translations
from flaxformer_mt.evaluation.translation_files import Translations

# The longest source of each bucket, in words; one more bucket contains all longer sources.
_LONGEST: tuple[int, ...] = (5, 10, 15, 20, 25, 30, 40, 50, 75, 100)


def score_by_length(translations: Translations, *, lowercase: bool, tokenize: str) -> list[dict[str, Any]]:
    """Compute BLEU, chrF and mean lengths in words for each bucket, as JSON values.

    Omits buckets without sentences. Example of an item; `to` is None in the bucket of the longest sources:

        {"from": 6, "to": 10, "sentences": 72, "bleu": 35.1, "chrf": 58.0,
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
                "bleu": scores.bleu,
                "chrf": scores.chrf,
                "hypothesis_length": round(fmean(map(_count_words, part.hypotheses)), 2),
                "reference_length": round(fmean(map(_count_words, part.references)), 2),
            }
        )
    return rows


def split_by_length(translations: Translations) -> dict[tuple[int, int | None], Translations]:
    """Return the sentences of each bucket that has any, by the words of its shortest and longest source."""
    lengths = [*map(_count_words, translations.sources)]
    starts = [0, *(longest + 1 for longest in _LONGEST)]
    found = {}
    for start, end in zip(starts, [*_LONGEST, None], strict=True):
        indices = [i for i, n in enumerate(lengths) if start <= n and (end is None or n <= end)]
        if indices:
            found[start, end] = translations.choose(indices)
    return found


def _count_words(line: str) -> int:
    return len(line.split())


def name_bucket(start: int, end: int | None) -> str:
    """Return the range of a bucket as it is shown: "6-10", "101 or more"."""
    return f"{start} or more" if end is None else f"{start}-{end}"


def describe_by_length(rows: Sequence[dict[str, Any]]) -> str:
    """Format the buckets as a table, one per line.

    source words  sentences    BLEU    chrF  words in translation  in reference
            6-10         72   35.10   58.00                   8.2           8.4
    """
    lines = ["source words  sentences    BLEU    chrF  words in translation  in reference"]
    for row in rows:
        words = name_bucket(row["from"], row["to"])
        lines.append(
            f"{words:>12}  {row['sentences']:>9}  {row['bleu']:>6.2f}  {row['chrf']:>6.2f}  "
            f"{row['hypothesis_length']:>20.1f}  {row['reference_length']:>12.1f}"
        )
    return "\n".join(lines)
