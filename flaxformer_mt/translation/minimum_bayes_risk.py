"""Minimum Bayes risk: of several candidates, the one with the highest expected utility is the translation.

The expectation is over the candidates as references (Eikema and Aziz 2020): samples count equally, as often
as each was drawn; hypotheses of beam search by their probabilities.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from flaxformer_mt.config import Config, SearchConfig
from flaxformer_mt.search import search_width
from flaxformer_mt.translation.bleu_tokenizers import choose_sentence_tokenizer, make_bleu
from flaxformer_mt.translation.result import Translation, rank

# The scores [N, N] of N texts: row i, column j is text i as a hypothesis and text j as its reference.
Utility = Callable[[Sequence[str]], Float[np.ndarray, "N N"]]

_CHRF_ORDERS = range(1, 7)
_BLEU_ORDERS = range(1, 5)
_RECALL_WEIGHT = 4  # beta squared


def _count_overlaps(bags: Sequence[Iterable[Hashable]]) -> tuple[np.ndarray, np.ndarray]:
    """Count the elements of each of N bags [N], and those that two bags share [N, N].

    An element that two bags have 2 and 3 times is shared twice. The k-th occurrence of an element is a
    feature of its own, so that bags are rows of zeros and ones.
    """
    features: dict[tuple[Hashable, int], int] = {}
    places: list[list[int]] = []
    for bag in bags:
        seen: Counter[Hashable] = Counter()
        places.append([])
        for element in bag:
            seen[element] += 1
            places[-1].append(features.setdefault((element, seen[element]), len(features)))
    matrix = np.zeros((len(places), len(features)), np.float32)  # sums of ones are exact
    for row, columns in enumerate(places):
        matrix[row, columns] = 1
    return np.array(list(map(len, places))), (matrix @ matrix.T).astype(np.int64)


def _ngrams(sequence: Any, order: int) -> list[Any]:
    return [sequence[start : start + order] for start in range(len(sequence) - order + 1)]


def score_chrf(texts: Sequence[str]) -> Float[np.ndarray, "N N"]:
    """Return the chrF of each text, from 0 to 100, with each text as its reference: 6-grams, beta 2."""
    joined = ["".join(text.split()) for text in texts]
    shape = (len(texts), len(texts))
    precision, recall, orders = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for order in _CHRF_ORDERS:
        sizes, shared = _count_overlaps([_ngrams(text, order) for text in joined])
        counted = (sizes[:, None] > 0) & (sizes[None, :] > 0)
        at_least_1 = np.maximum(sizes, 1)
        precision += np.where(counted, shared / at_least_1[:, None], 0.0)
        recall += np.where(counted, shared / at_least_1[None, :], 0.0)
        orders += counted
    precision, recall = precision / np.maximum(orders, 1), recall / np.maximum(orders, 1)
    below = _RECALL_WEIGHT * precision + recall
    score = (1 + _RECALL_WEIGHT) * precision * recall
    return 100 * np.divide(score, below, out=np.zeros(shape), where=below > 0)


def score_bleu(texts: Sequence[str], *, tokenize: str = "13a") -> Float[np.ndarray, "N N"]:
    """Return the sentence BLEU of each text, from 0 to 100, with each text as its reference.

    Uses sacreBLEU's tokenizer `tokenize`, exponential smoothing, and the orders that the hypothesis has.
    """
    tokenizer = make_bleu(False, tokenize).tokenizer
    words = [tuple(tokenizer(text.rstrip()).split()) for text in texts]
    lengths = np.array(list(map(len, words)))
    shape = (len(texts), len(texts))
    log_sum, orders, smoothing = np.zeros(shape), np.zeros(shape), np.ones(shape)
    any_shared = np.zeros(shape, bool)
    for order in _BLEU_ORDERS:
        sizes, shared = _count_overlaps([_ngrams(text, order) for text in words])
        total = np.broadcast_to(sizes[:, None], shape)
        counted, found = total > 0, shared > 0
        smoothing = np.where(counted & ~found, smoothing * 2, smoothing)
        precision = np.where(found, shared, 1 / smoothing) / np.maximum(total, 1)
        log_sum += np.where(counted, np.log(100 * precision), 0.0)
        orders += counted
        any_shared = any_shared | found
    short = lengths[:, None] < lengths[None, :]
    ratio = lengths[None, :] / np.maximum(lengths, 1)[:, None]
    brevity = np.where(short, np.exp(1 - np.where(short, ratio, 1.0)), 1.0)
    return np.where(any_shared, brevity * np.exp(log_sum / np.maximum(orders, 1)), 0.0)


def count_candidates(search: SearchConfig, n_best: int) -> int:
    """Return how many hypotheses of a sentence the search must find for the n best."""
    return search_width(search, n_best) if search.method == "mbr" else n_best


def rank_candidates(best: Translation, config: Config, n_best: int) -> Translation:
    """Return the translation of a sentence as the best of n_best of its hypotheses, or mbr's candidates."""
    if config.search.method != "mbr" and len(best.alternatives) < n_best:
        return best
    found: Sequence[Translation] = best.n_best
    if config.search.method == "mbr" and found[0].tokens:
        by_probability = config.search.mbr_candidates == "beam"
        found = choose_candidates(found, make_utility(config), by_probability=by_probability)
    return rank(found[:n_best])


def make_utility(config: Config) -> Utility:
    """Return the utility of search.mbr_utility; BLEU with train.bleu_tokenize.

    With auto the tokenizer is that of the target language, or of the script of the candidates.
    """
    if config.search.mbr_utility == "chrf":
        return score_chrf
    tokenize, language = config.train.bleu_tokenize, config.data.target_language
    if tokenize == "auto":
        return lambda texts: score_bleu(texts, tokenize=choose_sentence_tokenizer(texts, language=language))
    return functools.partial(score_bleu, tokenize=tokenize)


def choose_candidates(
    candidates: Sequence[Translation], utility: Utility, *, by_probability: bool
) -> list[Translation]:
    """Return the candidates of different texts, the highest expected utility first, which is their score.

    Of equal texts the first candidate stands for all; of equal utilities, the earlier text comes first.

    Args:
      candidates: at least one.
      by_probability: weigh the candidates as references by their probabilities; otherwise equally.
    """
    first: dict[str, int] = {}
    for number, candidate in enumerate(candidates):
        first.setdefault(candidate.text, number)
    log_probs = np.array([one.log_prob if by_probability else 0.0 for one in candidates])
    weights = np.exp(log_probs - log_probs.max())
    of_text = dict.fromkeys(first, 0.0)
    for candidate, weight in zip(candidates, weights, strict=True):
        of_text[candidate.text] += float(weight)
    shares = np.array(list(of_text.values())) / weights.sum()
    expected = utility(list(first)) @ shares
    order = np.argsort(-expected, kind="stable")
    kept = [candidates[number] for number in first.values()]
    return [dataclasses.replace(kept[i], score=float(expected[i]), alternatives=()) for i in order]
