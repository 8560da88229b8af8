"""The parity check, which compares the outputs of the Flax model and of a foreign model."""

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.config import Config
from flaxformer_mt.convert.formats import Outputs, Weights
from flaxformer_mt.corpus.reader import has_split, read_pairs
from flaxformer_mt.data.batch_array import pad_pairs
from flaxformer_mt.errors import UserError
from flaxformer_mt.model import Model
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import Vocab, Vocabs

# Number of compared pairs, and rows per batch; rows of one batch differ in length, so that some are padded.
_PAIRS, _ROWS = 16, 8

# Splits in order of preference: the pairs come from the first split that the run's data set has.
_SPLITS: tuple[Literal["valid", "test", "train"], ...] = ("valid", "test", "train")

Ids = list[list[int]]


@dataclass(frozen=True)
class Parity:
    """The result of a parity check; the maxima are over all target tokens except padding."""

    largest_difference: float
    largest_output: float
    quantity: str
    tokens: int
    checked_on: str

    def is_within(self, tolerance: float) -> bool:
        """Return whether the largest difference is at most tolerance * max(1, largest output).

        Rounding errors are proportional to the outputs.
        """
        return self.largest_difference <= tolerance * max(1.0, self.largest_output)


def check_tolerance(tolerance: float) -> None:
    if tolerance < 0:
        raise UserError(f"--tolerance is {tolerance:g}; it must be at least 0")


class OwnOutputs(NamedTuple):
    """Batches, and the Flax model's outputs for them; `checked_on` describes the sentences."""

    batches: list[Batch]
    outputs: list[np.ndarray]
    quantity: str
    checked_on: str


def measure(weights: Weights, theirs: Outputs, *, quantity: str) -> Parity:
    return compare(compute_own(weights, quantity=quantity), theirs)


def compute_own(weights: Weights, *, quantity: str, read_data: bool = True) -> OwnOutputs:
    """Compute the outputs of the Flax model, so that its parameters can be freed before the comparison."""
    batches, checked_on = make_batches(weights, read_data=read_data)
    outputs = [flax_outputs(weights, batch, quantity=quantity) for batch in batches]
    return OwnOutputs(batches, outputs, quantity, checked_on)


def compare(computed: OwnOutputs, theirs: Outputs) -> Parity:
    largest, output, tokens = 0.0, 0.0, 0
    for batch, ours in zip(computed.batches, computed.outputs, strict=True):
        their_outputs = theirs(batch)
        difference = np.abs(ours - their_outputs)[batch.target_mask]
        output = max(output, float(np.abs(their_outputs[batch.target_mask]).max(initial=0.0)))
        # NaN in either output counts as an infinite difference.
        largest = max(largest, float(np.nan_to_num(difference, nan=np.inf).max(initial=0.0)))
        tokens += int(batch.target_mask.sum())
    return Parity(largest, output, computed.quantity, tokens, computed.checked_on)


def flax_outputs(weights: Weights, batch: Batch, *, quantity: str) -> np.ndarray:
    with jax.default_matmul_precision("highest"):
        return np.asarray(_run(weights.params, batch, model=weights.make_model(), quantity=quantity))


# One function for all calls, so that batches of the same shape share a compiled program.
@functools.partial(jax.jit, static_argnames=("model", "quantity"))
def _run(params: dict, batch: Batch, *, model: Model, quantity: str) -> jax.Array:
    if quantity == "target vectors":
        return model.apply({"params": params}, batch, method="embed_target")
    logits = model.apply({"params": params}, batch, deterministic=True)
    if quantity == "logits":
        return logits
    picked = jnp.take_along_axis(logits, batch.target_out[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(logits, axis=-1)


def make_batches(weights: Weights, *, read_data: bool = True) -> tuple[list[Batch], str]:
    """Return batches of the first validation pairs of the run's data, and a description of the pairs.

    The batches have random tokens instead if the data cannot be read, or without `read_data`: the config of
    an imported model must not choose which files are opened or which data sets are downloaded.
    """
    config, vocabs = weights.config, weights.vocabs
    try:
        if not read_data:
            raise UserError("this config came with the model, and must not choose files")
        sources, targets, split = read_sample(weights, _PAIRS)
        description = f"{len(sources)} pairs of the {split} set"
    except UserError as error:
        sources, targets = _truncate_pairs(config, *_random_ids(vocabs))
        description = f"random tokens instead of data: {error}".split("\n")[0]
    # All batches have the same shape, and so share one compiled program.
    lengths = max(map(len, sources), default=0), max(map(len, targets), default=0)
    parts = [slice(start, start + _ROWS) for start in range(0, len(sources), _ROWS)]
    options: dict[str, Any] = {"config": config, "lengths": lengths}
    return [make_batch(sources[part], targets[part], vocabs, **options) for part in parts], description


def read_sample(weights: Weights, most: int) -> tuple[Ids, Ids, str]:
    """Return the ids of the first `most` pairs of the first existing split in _SPLITS, and its name."""
    config, vocabs = weights.config, weights.vocabs
    split = next((name for name in _SPLITS if has_split(config.data, name)), _SPLITS[-1])
    pairs = read_pairs(config.data, split)
    sample = [pairs[index] for index in range(min(most, len(pairs)))]
    sources = [vocabs.source.tokenize(pair.source) for pair in sample]
    targets = [vocabs.target.tokenize(pair.target) for pair in sample]
    return *_truncate_pairs(config, sources, targets), split


def make_batch(
    sources: Ids, targets: Ids, vocabs: Vocabs, *, config: Config, lengths: tuple[int, int] = (0, 0)
) -> Batch:
    """Return a padded batch of sentence pairs that end in eos; for language models, sources have length 0."""
    if not config.data.source_language:
        sources, lengths = [[] for _ in targets], (0, lengths[1])
    ids: dict[str, Any] = {"pad_id": vocabs.target.pad_id, "bos_id": vocabs.target.bos_id}
    return pad_pairs(sources, targets, (0, *lengths), **ids).to_batch(np)


def _random_ids(vocabs: Vocabs) -> tuple[Ids, Ids]:
    random = np.random.default_rng(0)

    def sentence(vocab: Vocab) -> list[int]:
        return [*random.integers(4, vocab.size, random.integers(1, 12)).tolist(), vocab.eos_id]

    return [sentence(vocabs.source) for _ in range(_PAIRS)], [sentence(vocabs.target) for _ in range(_PAIRS)]


def _truncate_pairs(config: Config, sources: Ids, targets: Ids) -> tuple[Ids, Ids]:

    def truncate(ids: list[int], max_length: int) -> list[int]:
        return ids if len(ids) <= max_length else [*ids[: max_length - 1], ids[-1]]

    return (
        [truncate(ids, config.data.max_source_length) for ids in sources],
        [truncate(ids, config.data.max_target_length) for ids in targets],
    )
