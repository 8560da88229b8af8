"""Likelihoods of a set: means over all batches, of sums that neither wait nor wear out."""

import math

import jax.numpy as jnp
import numpy as np

from flaxformer_mt.evaluation.perplexity import Likelihood, measure


def measure_steps(steps):
    """The likelihood of batches whose results these are."""
    return measure(lambda params, batch: batch, None, steps, put=lambda batch: batch)


def test_likelihoods_are_means_over_all_batches():
    """Batches of 2 and 6 tokens; perplexity beyond the largest float is infinite."""
    two = {"loss": (jnp.float32(4.0), jnp.int32(2)), "accuracy": (jnp.bfloat16(1.0), 2)}
    six = {"loss": (np.float32(4.0), 6), "accuracy": (5.0, 6.0)}
    likelihood = measure_steps([two, six])
    assert likelihood == Likelihood(tokens=8, loss=1.0, accuracy=0.75)
    assert [type(value) for value in likelihood] == [int, float, float]
    assert likelihood.perplexity == math.e
    assert Likelihood(1, 1000.0, 0.0).perplexity == math.inf


def test_sums_do_not_wear_out():
    """In float32, 2**24 + 1 is 2**24: a count of tokens would stand still."""
    first = {"loss": (jnp.float32(2.0**24), jnp.int32(2**30)), "accuracy": (0.0, 1)}
    further = {"loss": (jnp.float32(1), jnp.int32(2**30)), "accuracy": (0.0, 1)}
    likelihood = measure_steps([first, *[further] * 3])
    assert (likelihood.tokens, likelihood.loss) == (2**32, (2**24 + 3) / 2**32)


class Unread:
    """A scalar that remembers whether its value was asked for."""

    def __init__(self, value) -> None:
        self.value, self.was_read = value, False

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        self.was_read = True
        return np.asarray(self.value, dtype)


def test_no_step_waits_to_be_read():
    waiting = [Unread(value) for value in (2.0, 1.0, 1.0, 1.0) * 3]
    steps = [
        {"loss": tuple(waiting[i : i + 2]), "accuracy": tuple(waiting[i + 2 : i + 4])} for i in (0, 4, 8)
    ]

    def one_by_one():
        for step in steps:
            assert not any(value.was_read for value in waiting)
            yield step
        assert not any(value.was_read for value in waiting)

    assert measure_steps(one_by_one()) == Likelihood(3, 2.0, 1.0)
    assert all(value.was_read for value in waiting)
