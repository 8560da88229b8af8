"""Losses against their definitions, and the sizes of chunks."""

import jax
import numpy as np
import pytest

from benchmarks.originals.plain_losses import count_correct, smoothed_cross_entropy
from flaxformer_mt.flops import loss_chunk_width

pytestmark = pytest.mark.usefixtures("strict_dtypes")

B, T, V = 2, 5, 7

cross_entropy = jax.jit(smoothed_cross_entropy, static_argnums=3)


def random_case(batch: int = B, length: int = T) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    logits = (3 * generator.normal(size=(batch, length, V))).astype(np.float32)
    target = generator.integers(0, V, size=(batch, length)).astype(np.int32)
    mask = np.arange(length)[None] < generator.integers(1, length + 1, size=batch)[:, None]
    return logits, target, mask


def definition(logits: np.ndarray, target: np.ndarray, mask: np.ndarray, smoothing: float) -> float:
    """The cross-entropy of a written-out distribution, summed one token at a time in float64."""
    total = 0.0
    for place in zip(*np.nonzero(mask), strict=True):
        scores = logits[place].astype(np.float64)
        log_probabilities = scores - np.log(np.exp(scores).sum())
        wanted = np.full(V, smoothing / V)
        wanted[target[place]] += 1 - smoothing
        total -= (wanted * log_probabilities).sum()
    return total


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_loss_is_the_cross_entropy_of_the_smoothed_distribution(smoothing):
    logits, target, mask = random_case()
    loss, weight = cross_entropy(logits, target, mask, smoothing)
    np.testing.assert_allclose(loss, definition(logits, target, mask, smoothing), rtol=1e-5)
    assert float(weight) == mask.sum()


def test_a_batch_of_padding_weighs_nothing():
    logits, target, mask = random_case()
    assert [float(x) for x in cross_entropy(logits, target, mask & False, 0.1)] == [0.0, 0.0]


def test_huge_logits_stay_finite_and_exact():
    logits = np.array([[[1e4, 0.0, -1e4, 0.0, 0.0, 0.0, 0.0]]], np.float32)
    one = np.ones((1, 1), bool)
    for target, expected in [(0, 0.0), (1, 1e4), (2, 2e4)]:
        loss, _ = cross_entropy(logits, np.array([[target]], np.int32), one, 0.0)
        assert float(loss) == expected


def test_of_equal_words_the_first_is_the_prediction_and_nan_is_none():
    one = np.ones((1, 4), bool)
    equal = np.zeros((1, 4, 3), np.float32)
    assert jax.jit(count_correct)(equal, np.array([[0, 1, 2, 0]], np.int32), one)[0] == 2.0
    assert jax.jit(count_correct)(equal * np.nan, np.array([[0, 1, 2, 0]], np.int32), one)[0] == 0.0


def test_chunks_are_cut_so_that_little_is_padding():
    for rows, length, tokens, width in [(32, 50, 256, 10), (96, 18, 256, 2), (4, 11, 20, 4)]:
        assert loss_chunk_width(rows, length, chunk_tokens=tokens) == width
    assert loss_chunk_width(300, 7, chunk_tokens=256) == 1  # a column of all rows is the least
    assert loss_chunk_width(2, 5, chunk_tokens=1000) == 5
