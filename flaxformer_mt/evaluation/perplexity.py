"""How probable a model finds text: loss, accuracy and perplexity, each token after the true ones before it.

Owns what is added up over a set, and the scoring of text by a language model's run. Knows nothing of search
or of scores against references.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxformer_mt.config import Config
from flaxformer_mt.corpus.tfds_cache import cache_dir
from flaxformer_mt.data.loader import valid_batches
from flaxformer_mt.data.token_store import TokenStore
from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation.metrics import MetricSums
from flaxformer_mt.parallel import enable_compilation_cache
from flaxformer_mt.runs.load_run import Warn, load_trained
from flaxformer_mt.shapes import Batch
from flaxformer_mt.training.update import make_evaluation_step
from flaxformer_mt.vocab import Vocab


class Likelihood(NamedTuple):
    """What a model thinks of a set of sentences.

    tokens: of the targets, end symbols included. loss: the mean negative log-likelihood of one, in nats.
    accuracy: the share that the most probable word gets right.
    """

    tokens: int
    loss: float
    accuracy: float

    @property
    def perplexity(self) -> float:
        """The exponential of the loss; infinite beyond the largest float."""
        return math.exp(self.loss) if self.loss < 709 else math.inf


def measure(
    evaluation_step: Callable[[Any, Any], dict[str, tuple[Any, Any]]],
    params: Any,
    batches: Iterable[Batch],
    *,
    put: Callable[[Batch], Any] = jax.device_put,
) -> Likelihood:
    """Adds up what `make_evaluation_step` reports of all batches; `put` brings one to the devices."""
    sums = MetricSums()
    for batch in batches:
        for name, (value_sum, weight) in evaluation_step(params, put(batch)).items():
            sums.add(name, value_sum=value_sum, weight=weight)
    totals = sums.result()
    return Likelihood(int(totals["loss_weight"]), totals["loss_mean"], totals["accuracy_mean"])


class ScoredText(NamedTuple):
    """The likelihood of a text, and the checkpoint whose parameters found it."""

    likelihood: Likelihood
    checkpoint: str


def score_text(
    run_dir: Path, sentences: Sequence[str], *, checkpoint: str | None = None, warn: Warn
) -> ScoredText:
    """Scores sentences with the language model in `run_dir`.

    Args:
      sentences: scored each by itself, however long, an empty one by its end symbol alone.
      checkpoint: best, last, average or a step. None: as the run's config says.

    Raises:
      UserError: no run or checkpoint of that name, no sentences, or one beyond the model's positions.
    """
    if not sentences:
        raise UserError("there is no text to score (0 lines); give at least one")
    trained = load_trained(run_dir, checkpoint=checkpoint, warn=warn)
    enable_compilation_cache(cache_dir(trained.config.data) / "compiled")
    step = jax.jit(make_evaluation_step(trained.make_model()))
    batches = _batch(sentences, trained.vocabs.target, trained.config)
    return ScoredText(measure(step, jax.device_put(trained.params), batches), trained.checkpoint)


def _batch(sentences: Sequence[str], vocab: Vocab, config: Config) -> list[Batch]:
    ids: list[np.ndarray] = vocab.tokenize_all(sentences)
    store = TokenStore.from_targets(ids)
    return valid_batches(store, config.data, pad_id=vocab.pad_id, bos_id=vocab.bos_id)
