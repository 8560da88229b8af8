"""Chooses among several translations of a sentence: by minimum Bayes risk, or by a scorer (reranking).

Minimum Bayes risk takes the candidate with the highest expected utility, with all candidates as references
(Eikema and Aziz 2020). Samples count equally, each as often as it was drawn; hypotheses of beam search are
weighted by their probabilities. External scorers are slow, so they compare with at most 16 references.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.config.directions import Direction
from flaxformer_mt.errors import UserError
from flaxformer_mt.scoring.metrics import find_metric, need_no_references, score_sentences
from flaxformer_mt.search import search_width
from flaxformer_mt.translation.result import Translation, rank
from flaxformer_mt.translation.segments import Segment

_CHRF_ORDERS = range(1, 7)
_RECALL_WEIGHT = 4  # beta squared
# A segment, and its best translation with the alternatives.
Ranked = tuple[Segment, Translation]
# A source, distinct texts, and the texts with which they are compared.
Compared = tuple[str, Sequence[str], Sequence[str]]
# Maximum number of references per sentence for an external scorer.
MOST_REFERENCES = 16


def _count_overlaps(bags: Sequence[Iterable[str]]) -> tuple[np.ndarray, np.ndarray]:
    """Count the elements of each of N bags, [N], and the elements that each two bags share, [N, N].

    An element that occurs twice in one bag and three times in another is shared twice. The k-th occurrence of
    an element is a separate feature, so each bag is a row of zeros and ones.
    """
    features: dict[tuple[str, int], int] = {}
    places: list[list[int]] = []
    for bag in bags:
        seen: Counter[str] = Counter()
        places.append([])
        for element in bag:
            seen[element] += 1
            places[-1].append(features.setdefault((element, seen[element]), len(features)))
    matrix = np.zeros((len(places), len(features)), np.float32)  # sums of ones are exact
    for row, columns in enumerate(places):
        matrix[row, columns] = 1
    return np.array(list(map(len, places))), (matrix @ matrix.T).astype(np.int64)


def score_chrf(texts: Sequence[str]) -> Float[np.ndarray, "N N"]:
    """Return the chrF (6-grams, beta 2; 0 to 100) of each text i with each text j as its reference."""
    joined = ["".join(text.split()) for text in texts]
    shape = (len(texts), len(texts))
    precision, recall, orders = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for order in _CHRF_ORDERS:
        ngrams = [[text[n : n + order] for n in range(len(text) - order + 1)] for text in joined]
        sizes, shared = _count_overlaps(ngrams)
        counted = (sizes[:, None] > 0) & (sizes[None, :] > 0)
        at_least_1 = np.maximum(sizes, 1)
        precision += np.where(counted, shared / at_least_1[:, None], 0.0)
        recall += np.where(counted, shared / at_least_1[None, :], 0.0)
        orders += counted
    precision, recall = precision / np.maximum(orders, 1), recall / np.maximum(orders, 1)
    below = _RECALL_WEIGHT * precision + recall
    score = (1 + _RECALL_WEIGHT) * precision * recall
    return 100 * np.divide(score, below, out=np.zeros(shape), where=below > 0)


def check_choice(search: SearchConfig) -> None:
    """Raise UserError if search.mbr or search.rerank names an unknown or unsuitable scorer."""
    if search.mbr:
        scorer = find_metric(search.mbr, "search.mbr").scorer
        if scorer is not None and scorer.by_direction:
            raise UserError(
                f"search.mbr is {search.mbr} ({scorer.definition}), but a run compares a translation with no "
                f"other; give it as search.rerank"
            )
    if search.rerank:
        need_no_references(search.rerank, find_metric(search.rerank, "search.rerank"), "search.rerank")


def count_candidates(search: SearchConfig, n_best: int) -> int:
    """Return how many hypotheses per sentence the search must find so that the n best can be chosen."""
    return search_width(search, n_best) if search.mbr or search.rerank else n_best


def rank_candidates(found: Sequence[Ranked], search: SearchConfig) -> list[Ranked]:
    """Return each segment with its n_best translations, chosen among its hypotheses or samples.

    External scorers are called once for all segments; runs are called once for all segments of a direction.
    """
    chosen = {number: best.n_best for number, (_, best) in enumerate(found) if best.tokens}
    sources = [segment.text for segment, _ in found]
    if search.mbr:
        weights = {n: weigh_references(candidates, search) for n, candidates in chosen.items()}
        groups = [(sources[n], distinct_texts(chosen[n]), list(weights[n])) for n in chosen]
        for number, matrix in zip(weights, compare_texts(groups, search.mbr), strict=True):
            expected = matrix @ np.array(list(weights[number].values()))
            chosen[number] = tuple(choose_candidates(chosen[number], expected))
    elif search.rerank:
        directions = [Direction(one.source_language, one.target_language) for one, _ in found]
        for direction in dict.fromkeys(directions[number] for number in chosen):
            rows = [(n, one) for n in chosen if directions[n] == direction for one in chosen[n]]
            columns = [sources[n] for n, _ in rows], [one.text for _, one in rows]
            scores = score_sentences(search.rerank, *columns, None, direction=direction)
            ranked: dict[int, list[Translation]] = {n: [] for n, _ in rows}
            for (number, one), score in zip(rows, scores, strict=True):
                ranked[number].append(_rescore(one, score, search.rerank_weight))
            chosen |= {n: tuple(sorted(ones, key=lambda one: -one.score)) for n, ones in ranked.items()}
    elif all(len(best.alternatives) < segment.request.n_best for segment, best in found):
        return list(found)
    return [
        (segment, rank(chosen.get(n, best.n_best)[: segment.request.n_best]))
        for n, (segment, best) in enumerate(found)
    ]


def weigh_references(candidates: Sequence[Translation], search: SearchConfig) -> dict[str, float]:
    """Return the texts that serve as references for all candidates, and their weights, which sum to 1.

    Hypotheses of beam search are weighted by their probabilities, samples equally. An external scorer gets at
    most 16 references, so its work grows linearly with the number of candidates (N-by-S, Eikema and Aziz
    2022): the 16 best hypotheses of a beam, or 16 samples at regular intervals of their ranking by score.
    """
    count = len(candidates)
    if find_metric(search.mbr, "search.mbr").scorer is not None and count > MOST_REFERENCES:
        step = 1 if search.method == "beam" else count / MOST_REFERENCES
        candidates = [candidates[int(number * step)] for number in range(MOST_REFERENCES)]
    log_probs = np.array([one.log_prob if search.method == "beam" else 0.0 for one in candidates])
    weights = np.exp(log_probs - log_probs.max())
    of_text = dict.fromkeys(distinct_texts(candidates), 0.0)
    for candidate, weight in zip(candidates, weights / weights.sum(), strict=True):
        of_text[candidate.text] += float(weight)
    return of_text


def _rescore(hypothesis: Translation, score: float, weight: float | None) -> Translation:
    total = score if weight is None else hypothesis.score + weight * score
    return dataclasses.replace(hypothesis, score=total, alternatives=())


def compare_texts(groups: Sequence[Compared], name: str) -> list[Float[np.ndarray, "N R"]]:
    """Return a matrix for each source: row i, column j is the utility of text i with reference j."""
    if name == "chrf" and all({*texts} >= {*references} for _, texts, references in groups):
        return [score_chrf(texts)[:, [*map(texts.index, references)]] for _, texts, references in groups]
    if find_metric(name, "search.mbr").scorer is None:
        return [_score_pairs([group], name)[0] for group in groups]
    return _score_pairs(groups, name)


def _score_pairs(groups: Sequence[Compared], name: str) -> list[Float[np.ndarray, "N R"]]:
    rows = [(source, *pair) for source, *both in groups for pair in itertools.product(*both)]
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], []]
    scores = iter(score_sentences(name, *columns))
    shapes = [(len(texts), len(references)) for _, texts, references in groups]
    return [np.array([next(scores) for _ in range(n * m)]).reshape(n, m) for n, m in shapes]


def distinct_texts(candidates: Sequence[Translation]) -> list[str]:
    return list(dict.fromkeys(candidate.text for candidate in candidates))


def choose_candidates(
    candidates: Sequence[Translation], expected: Float[np.ndarray, "N"]
) -> list[Translation]:
    """Return candidates with distinct texts, ordered by expected utility, which becomes their score.

    `expected` are the utilities of `distinct_texts(candidates)`. Of candidates with the same text, the first
    is kept; texts with equal utilities keep their order.
    """
    first: dict[str, Translation] = {}
    for candidate in candidates:
        first.setdefault(candidate.text, candidate)
    different, order = list(first.values()), np.argsort(-expected, kind="stable")
    return [dataclasses.replace(different[i], score=float(expected[i]), alternatives=()) for i in order]
