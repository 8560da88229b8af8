"""Likelihood of text under a model with teacher forcing: loss, token accuracy and perplexity.

Contains the evaluation step, the sums over a set of batches, and the scoring of text with a language model's
run.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
import numpy as np
from flax import linen as nn

from flaxformer_mt.config import Config, Dtype, TrainConfig
from flaxformer_mt.corpus.tfds_cache import compiled_dir
from flaxformer_mt.data.batch_array import BatchArray, as_batch
from flaxformer_mt.data.loader import valid_batches
from flaxformer_mt.data.token_store import TokenStore
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.losses import TokenSums, sum_over_tokens
from flaxformer_mt.parallel import enable_compilation_cache
from flaxformer_mt.runs.load_run import Warn, load_trained, name_checkpoint
from flaxformer_mt.shapes import Array, Batch
from flaxformer_mt.text_io.throughput import Throughput
from flaxformer_mt.vocab import Vocab


class Likelihood(NamedTuple):
    """The likelihood of a set of sentences under a model.

    tokens: number of target tokens, end symbols included. loss: mean negative log-likelihood per token, in
    nats. accuracy: fraction of target tokens to which the model assigns the highest probability.
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
    on_batch: Callable[[BatchArray], None] | None = None,
) -> Likelihood:
    """Sum the results of an evaluation step over all batches.

    They stay on their device until the last batch, so that no step waits to be read, and are summed in
    float64, which stays accurate for any number of tokens.

    Args:
      put: copies a batch to the devices.
      on_batch: is called with each batch once it has been computed. None: batches are not waited for.
    """
    results = []
    for batch in batches:
        results.append(evaluation_step(params, put(batch)))
        if on_batch is not None:
            jax.block_until_ready(results[-1])
            on_batch(batch)
    read = jax.device_get(results)
    (loss, tokens), (correct, _) = (
        np.array([found[name] for found in read], np.float64).sum(axis=0) for name in ("loss", "accuracy")
    )
    return Likelihood(int(tokens), float(loss / tokens), float(correct / tokens))


class ScoredText(NamedTuple):
    """The likelihood of a text, and the checkpoint of the model that scored it."""

    likelihood: Likelihood
    checkpoint: str
    step: int | None


def score_text(
    run_dir: Path,
    sentences: Sequence[str],
    *,
    checkpoint: str | None = None,
    dtype: Dtype | None = None,
    allow_nonfinite: bool = False,
    progress: TextIO | None = None,
    warn: Warn = warn_user,
) -> ScoredText:
    """Score sentences with the language model in `run_dir`.

    Args:
      sentences: scored independently, at full length; an empty sentence is scored by its end symbol alone.
      checkpoint: best, last, average or a step. None: as the run's config says.
      dtype, allow_nonfinite: see `load_trained`.
      progress: the stream that shows progress to a human; None: nothing is shown.

    Raises:
      UserError: the run or checkpoint is absent, there are no sentences, or one is longer than the positions
        of the model.
    """
    if not sentences:
        raise UserError("there is no text to score (0 lines); give at least one line")
    load: dict[str, Any] = {"dtype": dtype, "allow_nonfinite": allow_nonfinite, "warn": warn}
    trained = load_trained(run_dir, checkpoint=checkpoint, **load)
    enable_compilation_cache(compiled_dir())
    step = jax.jit(make_evaluation_step(trained.make_model(), trained.config.train))
    batches = _batch(sentences, trained.vocabs.target, trained.config)
    params = jax.device_put(trained.params)
    if progress is not None:
        noun = "sentence" if len(sentences) == 1 else "sentences"
        checkpoint = name_checkpoint(trained.checkpoint, trained.progress.get("step"))
        said = f"scoring {len(sentences):,} {noun} with checkpoint {checkpoint}"
        print(said, file=progress, flush=True)
    with Throughput(total=len(sentences), stream=progress, quiet=progress is None) as throughput:

        def count(batch: BatchArray) -> None:
            target = batch.sides()[1]
            throughput.add(lines=int(target.first.sum()), tokens=int(target.mask.sum()))

        likelihood = measure(step, params, batches, on_batch=count)
    return ScoredText(likelihood, trained.checkpoint, trained.progress.get("step"))


def _batch(sentences: Sequence[str], vocab: Vocab, config: Config) -> list[BatchArray]:
    ids: list[np.ndarray] = vocab.tokenize_all(sentences)
    store = TokenStore.of_ids([()] * len(ids), ids)
    return valid_batches(store, config.data, pad_id=vocab.pad_id, bos_id=vocab.bos_id)


def make_evaluation_step(
    model: nn.Module, config: TrainConfig
) -> Callable[..., dict[str, tuple[Array, Array]]]:
    """Build the function from parameters and a batch to (sum, weight) of loss and token accuracy.

    The loss is plain cross-entropy in nats per token, without label smoothing. `config.loss_chunk_tokens`
    limits the logits in memory as in training, so that a model that can be trained can be evaluated.
    """

    def evaluation_step(
        params: Any, batch: Batch | BatchArray, *, part: Array | None = None
    ) -> dict[str, tuple[Array, Array]]:
        del part  # evaluation draws no random numbers
        batch = as_batch(batch)

        def run(module: Any) -> TokenSums:
            hidden = module.hidden(batch, deterministic=True)
            chunk_tokens = config.loss_chunk_tokens
            target, mask = batch.target_out, batch.target_mask
            return sum_over_tokens(
                module, hidden, target, mask, smoothing=0.0, chunk_tokens=chunk_tokens, count=True
            )

        sums = nn.apply(run, model)({"params": params})
        assert sums.correct_sum is not None
        return {"loss": (sums.loss_sum, sums.weight), "accuracy": (sums.correct_sum, sums.weight)}

    return evaluation_step
