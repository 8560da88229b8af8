"""Losses against their definitions, and the loss in chunks against the loss at once."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from plain_losses import count_correct, smoothed_cross_entropy

from flaxformer_mt.flops import loss_chunk_width
from flaxformer_mt.kernels import Kernels
from flaxformer_mt.kernels.cross_entropy import CrossEntropy, Output
from flaxformer_mt.losses import TokenSums, mix_teacher, sum_over_tokens
from flaxformer_mt.shapes import TeacherTokens

pytestmark = pytest.mark.usefixtures("strict_dtypes")

B, T, D, V = 2, 5, 4, 7


def projected_cross_entropy(
    hidden: jax.Array,
    output: Output,
    *arrays: Any,
    count: bool = False,
    kernel: CrossEntropy = CrossEntropy(),  # noqa: B008  # frozen
    **options: Any,
) -> TokenSums:
    kernels = dataclasses.replace(Kernels(), cross_entropy=kernel)
    module = SimpleNamespace(kernels=kernels, output_layer=lambda: output)
    return sum_over_tokens(module, hidden, *arrays, count=count, **options)


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


def random_output(bias: bool) -> Output:
    generator = np.random.default_rng(1)
    table = generator.normal(size=(V, D)).astype(np.float32)
    return Output(table, generator.normal(size=V).astype(np.float32) if bias else None)


def random_hidden(batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(2).normal(size=(batch, length, D)).astype(np.float32)


def distilled(logits: np.ndarray, target: np.ndarray, teacher: TeacherTokens, weight: float) -> np.ndarray:
    """The cross-entropy of each token with a written-out mixture of target and teacher, in float64."""
    losses = np.zeros(target.shape)
    for place in np.ndindex(target.shape):
        scores = logits[place].astype(np.float64)
        log_probabilities = scores - np.log(np.exp(scores).sum())
        probs = teacher.probs[place].astype(np.float64)
        share = weight if probs.any() else 0.0
        wanted = np.full(V, (1 - share) * 0.1 / V + share * (1 - probs.sum()) / V)
        wanted[target[place]] += (1 - share) * 0.9
        for token, prob in zip(teacher.ids[place], probs, strict=True):
            wanted[token] += share * prob
        assert wanted.sum() == pytest.approx(1)
        losses[place] = -(wanted * log_probabilities).sum()
    return losses


@pytest.mark.parametrize(("weight", "chunk_tokens", "bias"), [(0.3, 4, True), (1.0, 1000, False)])
def test_a_teacher_shares_the_distribution_to_learn(weight, chunk_tokens, bias):
    """Value and gradients, of tokens with and without scores, against the written-out distribution."""
    generator = np.random.default_rng(4)
    _, target, mask = random_case()
    ids = np.argsort(generator.normal(size=(B, T, V)), axis=-1)[..., :3].astype(np.int32)
    probs = (0.3 * generator.random((B, T, 3))).astype(np.float16)
    probs[0, 1:3] = 0  # no scores
    teacher = TeacherTokens(ids, probs)
    token_weights = generator.random((B, T)).astype(np.float32)
    output, hidden = random_output(bias), random_hidden(B, T)

    def loss(hidden: jax.Array, output: Output) -> jax.Array:
        return projected_cross_entropy(
            hidden,
            output,
            target,
            mask,
            smoothing=0.1,
            chunk_tokens=chunk_tokens,
            token_weights=token_weights,
            mixture=mix_teacher(teacher, weight=weight, smoothing=0.1),
        )[0]

    def logits_of(hidden: np.ndarray, output: Output) -> np.ndarray:
        return hidden @ output.table.T + (0 if output.bias is None else output.bias)

    expected = distilled(logits_of(hidden, output), target, teacher, weight)
    run = jax.jit(lambda *arguments: (loss(*arguments), jax.value_and_grad(loss, (0, 1))(*arguments)))
    plain, (value, gradients) = jax.device_get(run(hidden, output))
    np.testing.assert_allclose(value, (expected * mask * token_weights).sum(), rtol=1e-5)
    np.testing.assert_allclose(plain, value, rtol=1e-5)
    for array, gradient in zip(jax.tree.leaves((hidden, output)), jax.tree.leaves(gradients), strict=True):
        for index in ((0,) * array.ndim, tuple(size - 1 for size in array.shape)):
            sides = []
            for change in (1e-4, -1e-4):
                leaves = [np.array(leaf, np.float64) for leaf in jax.tree.leaves((hidden, output))]
                changed = next(n for n, leaf in enumerate(jax.tree.leaves((hidden, output))) if leaf is array)
                leaves[changed][index] += change
                moved = jax.tree.unflatten(jax.tree.structure((hidden, output)), leaves)
                losses = distilled(logits_of(*moved), target, teacher, weight)
                sides.append((losses * mask * token_weights).sum())
            assert gradient[index] == pytest.approx((sides[0] - sides[1]) / 2e-4, abs=2e-4)


def test_a_teacher_whose_probabilities_round_to_more_than_one_leaves_no_negative_mass():
    teacher = TeacherTokens(np.zeros((1, 1, 2), np.int32), np.array([[[0.75, 0.2505]]], np.float16))
    mixture = mix_teacher(teacher, weight=1.0, smoothing=0.1)
    assert float(mixture.even[0, 0]) == float(mixture.target[0, 0]) == 0
    assert float(mixture.teacher.sum()) == pytest.approx(1)


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
