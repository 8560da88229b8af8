"""Minimum Bayes risk: of several candidates, the one with the highest expected utility is the translation.

The expectation is over the candidates as references (Eikema and Aziz 2020): samples count equally, as often
as each was drawn; hypotheses of beam search by their probabilities.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from flaxformer_mt.config import Config, SearchConfig
from flaxformer_mt.search import SearchResult, search_width
from flaxformer_mt.translation.result import Translation, rank, read_result
from flaxformer_mt.translation.utility import Utility, score_bleu, score_chrf
from flaxformer_mt.vocab import Vocab
from flaxformer_mt.writing_systems import lacks_spaces


def count_candidates(search: SearchConfig, n_best: int) -> int:
    """Return how many hypotheses of a sentence the search must find for the n best."""
    return search_width(search, n_best) if search.method == "mbr" else n_best


def read_best(result: SearchResult, vocab: Vocab, config: Config, n_best: int) -> Translation:
    """Return the translation of a sentence from the hypotheses of its search, as the best of n_best.

    Args:
      result: the hypotheses [N, ...] of one sentence, candidates with the method mbr.
      vocab: the target vocabulary.
    """
    found: Sequence[Translation] = read_result(result, vocab).n_best
    if config.search.method == "mbr" and found[0].tokens:
        by_probability = config.search.mbr_candidates == "beam"
        found = choose_candidates(found, make_utility(config), by_probability=by_probability)
    return rank(found[:n_best])


def make_utility(config: Config) -> Utility:
    """Return the utility of search.mbr_utility; BLEU with train.bleu_tokenize.

    With auto the tokenizer is 13a, or char for candidates without spaces between words.
    """
    if config.search.mbr_utility == "chrf":
        return score_chrf
    tokenize = config.train.bleu_tokenize
    if tokenize == "auto":
        return lambda texts: score_bleu(texts, tokenize="char" if lacks_spaces(texts) else "13a")
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
