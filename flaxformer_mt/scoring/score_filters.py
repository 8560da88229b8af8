"""Filters for sentence pairs by score: "kiwi>=0.4", "kiwi best 80%"."""

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flaxformer_mt.config.directions import Direction
from flaxformer_mt.errors import UserError
from flaxformer_mt.scoring.metrics import find_metric, need_no_references, score_sentences

# Number of pairs that are scored at a time.
_SCORED = 4096


class ScoreFilter(NamedTuple):
    """Keeps the pairs with scores of at least `least`, or the best-scored `share` of all pairs."""

    name: str
    least: float | None
    share: float

    def keep(self, pairs: Iterable[tuple[str, str]], direction: Direction) -> list[bool]:
        """Return whether to keep each (source, target) pair; at equal scores, earlier pairs are preferred."""
        rows, scores = iter(pairs), list[float]()
        while chunk := list(itertools.islice(rows, _SCORED)):
            sources, targets = zip(*chunk, strict=True)
            scores += score_sentences(self.name, sources, targets, None, direction=direction)
        if self.least is not None:
            return [score >= self.least for score in scores]
        order = sorted(range(len(scores)), key=lambda row: -scores[row])
        best = set(order[: round(self.share * len(scores))])
        return [row in best for row in range(len(scores))]


def read_filters(texts: Sequence[str], where: str) -> list[ScoreFilter]:
    """Parse filters such as "kiwi>=0.4" (minimum score) or "kiwi best 80%" (share of the pairs)."""
    filters = []
    for text in texts:
        match = re.fullmatch(
            r"\s*([\w+-]+?)\s*(?:>=\s*(-?\d*\.?\d+(?:e-?\d+)?)|\s+best\s+(\d*\.?\d+)%)\s*", text
        )
        share = float(match[3] or 100) / 100 if match else 0
        if match is None or not 0 < share <= 1:
            raise UserError(f"{where} has {text!r}; give NAME>=SCORE, or 'NAME best 80%', above 0 to 100%")
        need_no_references(match[1], find_metric(match[1], where), where)
        filters.append(ScoreFilter(match[1], float(match[2]) if match[2] else None, share))
    return filters
