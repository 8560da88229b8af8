"""The choice among several translations of a sentence: by minimum Bayes risk, or by a scorer (reranking).

Minimum Bayes risk takes the candidate with the highest expected utility. The expectation is over the
candidates as references (Eikema and Aziz 2020): samples count equally, as often as each was drawn; hypotheses
of beam search by their probabilities.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.scoring.metrics import find_metric, need_no_references, score_sentences
from flaxformer_mt.search import search_width
from flaxformer_mt.translation.result import Translation, rank

_CHRF_ORDERS = range(1, 7)
_RECALL_WEIGHT = 4  # beta squared


def _count_overlaps(bags: Sequence[Iterable[str]]) -> tuple[np.ndarray, np.ndarray]:
    """Count the elements of each of N bags [N], and those that two bags share [N, N].

    An element that two bags have 2 and 3 times is shared twice. The k-th occurrence of an element is a
    feature of its own, so that bags are rows of zeros and ones.
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
    """Return the chrF of each text, from 0 to 100, with each text as its reference: 6-grams, beta 2."""
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
    """Raise UserError for names of scorers that nothing defines, or that cannot rerank."""
    if search.mbr:
        find_metric(search.mbr, "search.mbr")
    if search.rerank:
        need_no_references(search.rerank, find_metric(search.rerank, "search.rerank"), "search.rerank")


def count_candidates(search: SearchConfig, n_best: int) -> int:
    """Return how many hypotheses of a sentence the search must find for the n best."""
    return search_width(search, n_best) if search.mbr or search.rerank else n_best


def rank_candidates(found: Sequence[tuple[str, Translation, int]], search: SearchConfig) -> list[Translation]:
    """Return the translation of each source as the best of n_best of its hypotheses or samples.

    Args:
      found: source, best hypothesis with its alternatives, and n_best of each sentence. Scorers from outside
        are asked once for all.
    """
    chosen = {number: best.n_best for number, (_, best, _) in enumerate(found) if best.tokens}
    if search.mbr:
        by_probability = search.method == "beam"
        utilities = compare_texts(
            [(found[n][0], distinct_texts(candidates)) for n, candidates in chosen.items()], search.mbr
        )
        for (number, candidates), matrix in zip(list(chosen.items()), utilities, strict=True):
            chosen[number] = tuple(choose_candidates(candidates, matrix, by_probability=by_probability))
    elif search.rerank:
        rows = [(number, one) for number, hypotheses in chosen.items() for one in hypotheses]
        sources, texts = [found[number][0] for number, _ in rows], [one.text for _, one in rows]
        scores = iter(score_sentences(search.rerank, sources, texts, None))
        for number, hypotheses in chosen.items():
            ranked = [_rescore(one, next(scores), search.rerank_weight) for one in hypotheses]
            chosen[number] = tuple(sorted(ranked, key=lambda one: -one.score))
    elif all(len(best.alternatives) < n_best for _, best, n_best in found):
        return [best for _, best, _ in found]
    return [rank(chosen.get(n, best.n_best)[:n_best]) for n, (_, best, n_best) in enumerate(found)]


def _rescore(hypothesis: Translation, score: float, weight: float | None) -> Translation:
    total = score if weight is None else hypothesis.score + weight * score
    return dataclasses.replace(hypothesis, score=total, alternatives=())


def compare_texts(groups: Sequence[tuple[str, Sequence[str]]], name: str) -> list[Float[np.ndarray, "N N"]]:
    """Return the utilities of the texts of each source: at row i, column j of text i with reference j.

    BLEU has the tokenizer that the script of a source's texts needs.
    """
    if name == "chrf":
        return [score_chrf(texts) for _, texts in groups]
    if find_metric(name, "search.mbr").scorer is None:
        return [_score_pairs([group], name)[0] for group in groups]
    return _score_pairs(groups, name)


def _score_pairs(groups: Sequence[tuple[str, Sequence[str]]], name: str) -> list[Float[np.ndarray, "N N"]]:
    rows = [(source, one, other) for source, texts in groups for one in texts for other in texts]
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], []]
    scores = iter(score_sentences(name, *columns))
    return [np.array([[next(scores) for _ in texts] for _ in texts]) for _, texts in groups]


def distinct_texts(candidates: Sequence[Translation]) -> list[str]:
    return list(dict.fromkeys(candidate.text for candidate in candidates))


def choose_candidates(
    candidates: Sequence[Translation], utilities: Float[np.ndarray, "N N"], *, by_probability: bool
) -> list[Translation]:
    """Return the candidates of different texts, the highest expected utility first, which is their score.

    Of equal texts the first candidate stands for all; of equal utilities (those of `distinct_texts`), the
    earlier text comes first. As references, candidates count by their probabilities, or equally.
    """
    first: dict[str, int] = {}
    for number, candidate in enumerate(candidates):
        first.setdefault(candidate.text, number)
    log_probs = np.array([one.log_prob if by_probability else 0.0 for one in candidates])
    weights = np.exp(log_probs - log_probs.max())
    of_text = dict.fromkeys(first, 0.0)
    for candidate, weight in zip(candidates, weights, strict=True):
        of_text[candidate.text] += float(weight)
    expected = utilities @ (np.array(list(of_text.values())) / weights.sum())
    order = np.argsort(-expected, kind="stable")
    kept = [candidates[number] for number in first.values()]
    return [dataclasses.replace(kept[i], score=float(expected[i]), alternatives=()) for i in order]
