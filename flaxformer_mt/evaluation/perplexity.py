"""Measures the likelihood of text under a model with teacher forcing: loss, accuracy and perplexity."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn

from flaxformer_mt.config import TrainConfig
from flaxformer_mt.data.batch_array import BatchArray, as_batch
from flaxformer_mt.losses import TokenSums, smoothed_cross_entropy
from flaxformer_mt.shapes import Array, Batch


class Likelihood(NamedTuple):
    """The likelihood of a set of sentences under a model.

    tokens: target tokens with end symbols. loss: mean negative log-likelihood per token, in nats. accuracy:
    fraction of target tokens to which the model assigns the highest probability.
    """

    tokens: int
    loss: float
    accuracy: float

    @property
    def perplexity(self) -> float:
        """The exponential of the loss; infinity if it exceeds the largest float."""
        return math.exp(self.loss) if self.loss < 709 else math.inf


def measure(
    evaluation_step: Callable[[Any, Any], dict[str, tuple[Any, Any]]],
    params: Any,
    batches: Iterable[BatchArray],
    *,
    put: Callable[[BatchArray], Any] = jax.device_put,
) -> Likelihood:
    """Sum the results of an evaluation step over all batches in float64; `put` copies a batch to devices.

    The results stay on the device until the last batch, so that no step waits for a transfer.
    """
    results = [evaluation_step(params, put(batch)) for batch in batches]
    read = jax.device_get(results)
    (loss, tokens), (correct, _) = (
        np.array([found[name] for found in read], np.float64).sum(axis=0) for name in ("loss", "accuracy")
    )
    return Likelihood(int(tokens), float(loss / tokens), float(correct / tokens))


def make_evaluation_step(
    model: nn.Module, config: TrainConfig
) -> Callable[..., dict[str, tuple[Array, Array]]]:
    """Return a function that maps parameters and a batch to (sum, weight) of loss and of token accuracy.

    The loss is cross-entropy in nats, without label smoothing. `config.loss_chunk_tokens` limits the logits
    in memory as in training, so that every model that can be trained can be evaluated.
    """

    def evaluation_step(
        params: Any, batch: Batch | BatchArray, *, part: Array | None = None
    ) -> dict[str, tuple[Array, Array]]:
        del part  # evaluation draws no random numbers
        batch = as_batch(batch)

        def run(module: Any) -> TokenSums:
            hidden = module.hidden(batch, deterministic=True)
            chunk_tokens, unweighted = config.loss_chunk_tokens, batch._replace(target_weights=None)
            return smoothed_cross_entropy(
                module, hidden, unweighted, smoothing=0.0, chunk_tokens=chunk_tokens, count=True
            )

        sums = nn.apply(run, model)({"params": params})
        assert sums.correct_sum is not None
        return {"loss": (sums.loss_sum, sums.weight), "accuracy": (sums.correct_sum, sums.weight)}

    return evaluation_step
