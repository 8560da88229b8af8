"""Weights of the data sets of a mixture, and their shares of an epoch."""

from collections.abc import Sequence
from typing import Any

from flaxformer_mt.config import DataConfig
from flaxformer_mt.corpus.pairs import Part


def choose_weights(config: DataConfig, sizes: Sequence[int]) -> tuple[float, ...]:
    """Return, for each data set, how often an epoch contains each of its pairs.

    The weights are `data.weights` or, if that is empty, result from `data.temperature`: at temperature T, the
    share of a set of n pairs is proportional to n ** (1 / T), and the largest set has weight 1. At T = 2, a
    set 100 times smaller than the largest has weight 10.
    """
    if config.weights:
        return config.weights
    largest = max(sizes)
    return tuple((largest / size) ** (1 - 1 / config.temperature) for size in sizes)


def describe_shares(parts: Sequence[Part]) -> list[dict[str, Any]]:
    total = sum(part.size * part.weight for part in parts)
    return [
        {
            "name": part.name,
            "pairs": part.size,
            "weight": round(part.weight, 4),
            "share": round(part.size * part.weight / total, 4),
        }
        for part in parts
    ]


def format_shares(shares: Sequence[dict[str, Any]]) -> str:
    """Format shares for the log: `mixture: 75.0% a (30 pairs x 1), 25.0% b (1 pair x 10)`."""
    texts = [
        f"{share['share']:.1%} {share['name']} ({share['pairs']:,} pair{'s' * (share['pairs'] != 1)} x "
        f"{share['weight']:.4g})"
        for share in shares
    ]
    return f"mixture: {', '.join(texts)}"
