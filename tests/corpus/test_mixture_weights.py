"""Temperature: sizes become weights and shares of an epoch."""

import numpy as np

from flaxformer_mt.config import DataConfig
from flaxformer_mt.corpus.mixture_weights import choose_weights, describe_shares, format_shares
from flaxformer_mt.corpus.pairs import Part


def test_shares_are_sizes_to_the_power_of_one_over_the_temperature():
    sizes = np.array([100, 10_000, 2500])
    for temperature in (1.0, 2.0, 5.0, 1000.0):
        weights = choose_weights(DataConfig(temperature=temperature), sizes.tolist())
        shares = weights * sizes / np.dot(weights, sizes)
        wanted = sizes ** (1 / temperature)
        np.testing.assert_allclose(shares, wanted / wanted.sum())
        assert weights[1] == 1  # the largest is seen once
    assert choose_weights(DataConfig(weights=(1.0, 2.0), temperature=5.0), [3, 4]) == (1.0, 2.0)


def test_the_log_tells_each_share():
    shares = describe_shares([Part("a", 3000, 1.0), Part("b", 1, 1000.0)])
    assert format_shares(shares) == "mixture: 75.0% a (3,000 pairs x 1), 25.0% b (1 pair x 1000)"
