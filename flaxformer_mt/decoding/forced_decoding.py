"""Forced decoding (teacher forcing): the log-probability of each token of existing translations, and scores.

A search with the same models would rank the translations by the same scores. Each batch of pairs of token ids
takes one forward pass without search; batches have one of a few shapes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.config import ModelConfig, SearchConfig
from flaxformer_mt.data.batch_array import BatchArray, pad_pairs
from flaxformer_mt.data.buckets import Shape
from flaxformer_mt.decoding.ensemble_members import make_models
from flaxformer_mt.decoding.search_engine import TokenBudget
from flaxformer_mt.decoding.state_sizes import choose_batch_tokens, round_up_coarsely
from flaxformer_mt.model.scanned_layers import unstack_layers
from flaxformer_mt.parallel import SplitParameters
from flaxformer_mt.search import average_logits
from flaxformer_mt.search.penalties import coverage_penalty, length_penalty
from flaxformer_mt.shapes import Array, Batch
from flaxformer_mt.tracking.progress_display import announce_if_slow
from flaxformer_mt.vocab import Vocabs

if TYPE_CHECKING:
    from flaxformer_mt.model import Model

# Maximum number of logits of a batch: half a GiB in float32.
_MAX_LOGITS = 1 << 27

# Maximum length of a sequence if the model's positions do not limit it.
UNBOUNDED = 1 << 29

# Up to _FEW pairs are read in batches of _FEW_ROWS rows and at least _FEW_LENGTH tokens, so that few programs
# are compiled for them.
_FEW, _FEW_ROWS, _FEW_LENGTH = 32, 8, 32


class Pair(NamedTuple):
    """A source and its translation, as token ids without bos."""

    # The last id is eos; empty for a language model.
    source: Sequence[int] | np.ndarray
    # The last id is eos, unless the translation is unfinished.
    target: Sequence[int] | np.ndarray


class Watched(NamedTuple):
    """Selects target-to-source attention weights: a decoder layer, and a head or the mean of all heads."""

    # Counted from 0; -1 is the last layer.
    layer: int
    # None: the mean of all heads.
    head: int | None = None
    # Whether a token's weights come from the step that reads the token, not from the step that predicts it.
    reading: bool = False


class Reading(NamedTuple):
    """The log-probabilities and attention weights of one pair."""

    # Log-probability [T] of each target token.
    log_probs: np.ndarray
    # Weights [T, S] of each `Watched`, averaged over the models of an ensemble; row t belongs to token t.
    attention: tuple[np.ndarray, ...] = ()


class PairScore(NamedTuple):
    """The score of one existing translation."""

    # Log-probability divided by the length penalty, less the coverage penalty; hypotheses are ranked by it.
    # NaN if there are no tokens.
    score: float
    log_prob: float
    # Log-probability of each token; they add up to log_prob.
    token_log_probs: tuple[float, ...]
    # Ids of the target vocabulary; the last one is eos unless the target was cut.
    tokens: tuple[int, ...]


class TokenScorer:
    """Scores tokenized pairs with a model or an ensemble, as the search does; compiles once per shape."""

    def __init__(
        self,
        models: Sequence[ModelConfig],
        search: SearchConfig,
        vocabs: Vocabs,
        *,
        longest: tuple[int, int],
        warn: Callable[[str], None],
        spread: bool | SplitParameters = False,
    ) -> None:
        """`longest`: the maximum lengths of source and target, in tokens with eos; or `UNBOUNDED`."""
        self.models, self.vocabs = models, vocabs
        self.options, self._longest = search, longest
        self._budget = TokenBudget(choose_batch_tokens(search, models, vocabs.target.size), warn=warn)
        compile_program = spread.compile if isinstance(spread, SplitParameters) else jax.jit
        self.run = compile_program(self._read_batch, static_argnames=("watched",))

    @functools.cached_property
    def _networks(self) -> list["Model"]:
        configs = [dataclasses.replace(model, scan_layers=False) for model in self.models]
        return make_models(configs, (self.vocabs.source.size, self.vocabs.target.size))

    def warm_up(self, *, params: Sequence[Any], watched: Sequence[Watched]) -> None:
        """Compile the programs that score a few pairs at a time, for all source lengths."""
        longest = self._longest[0]
        for length in {min(_FEW_LENGTH << power, longest) for power in range(longest.bit_length())}:
            self.read_all([Pair(np.zeros(length, np.int32), (0,))], params=params, watched=watched)

    def score_all(self, pairs: Sequence[Pair], *, params: Sequence[Any]) -> list[PairScore]:
        """Return the scores of pairs in order; the score of a target without tokens is NaN."""
        covers = self.options.method == "beam" and self.options.coverage_penalty > 0
        watched = (Watched(-1),) if covers else ()
        readings = self.read_all(pairs, params=params, watched=watched)
        log_probs = np.array([reading.log_probs.sum(dtype=np.float64) for reading in readings])
        lengths = np.array([max(1, len(pair.target)) for pair in pairs], np.int32)
        scores = log_probs / np.asarray(length_penalty(lengths, self.options))
        if covers:
            scores = scores + self._coverage_penalties(readings)
        return [
            PairScore(
                score=float(score) if len(pair.target) else math.nan,
                log_prob=float(log_prob),
                token_log_probs=tuple(reading.log_probs.tolist()),
                tokens=tuple(map(int, pair.target)),
            )
            for pair, reading, score, log_prob in zip(pairs, readings, scores, log_probs, strict=True)
        ]

    def _coverage_penalties(self, readings: Sequence[Reading]) -> np.ndarray:
        """Return the coverage penalty of each reading, from its attention summed over target tokens."""
        sums = [reading.attention[0].sum(axis=0) for reading in readings]
        coverage = np.zeros((len(sums), 1, max(map(len, sums), default=0)), np.float32)
        mask = np.zeros((len(sums), coverage.shape[2]), bool)
        for row, attention in enumerate(sums):
            coverage[row, 0, : len(attention)], mask[row, : len(attention)] = attention, True
        return np.asarray(coverage_penalty(coverage, mask, self.options))[:, 0]

    def read_all(
        self,
        pairs: Sequence[Pair],
        *,
        params: Sequence[Any],
        watched: Sequence[Watched] = (),
    ) -> list[Reading]:
        """Return a `Reading` per pair, in order; after an out-of-memory error, later batches are smaller."""
        run = functools.partial(self.run, tuple(params), watched=tuple(watched))
        found: dict[int, Reading] = {}
        while missing := [index for index in range(len(pairs)) if index not in found]:
            try:
                for position, reading in self._read([pairs[index] for index in missing], run):
                    found[missing[position]] = reading
            except jax.errors.JaxRuntimeError as error:
                if not self._budget.halve_after(error):
                    raise
        return [found[index] for index in range(len(pairs))]

    def _read(self, pairs: Sequence[Pair], run: Callable[[BatchArray], Any]) -> Iterator[tuple[int, Reading]]:
        """Yield each pair's index and its reading, the longest pairs first."""
        lengths = [max(len(pair.source), len(pair.target), 1) for pair in pairs]
        waiting = sorted(range(len(pairs)), key=lambda index: -lengths[index])
        previous: tuple[list[int], list[Pair], Any] | None = None
        while waiting:
            shape = self._fit(lengths[waiting[0]], len(waiting), self._budget.tokens)
            indices, waiting = waiting[: shape.rows], waiting[shape.rows :]
            chosen = [pairs[index] for index in indices]
            sides = [pair.source for pair in chosen], [pair.target for pair in chosen]
            if not any(map(len, sides[0])):
                shape = shape._replace(source=0)  # a language model has no source
            ids: dict[str, Any] = {"pad_id": self.vocabs.target.pad_id, "bos_id": self.vocabs.target.bos_id}
            with announce_if_slow("compiling the scores (once per size; kept for later)"):
                outputs = run(pad_pairs(*sides, shape, **ids))
            # The device computes this batch while the host processes the previous one.
            if previous is not None:
                yield from _split_batch(*previous)
            previous = indices, chosen, outputs
        if previous is not None:
            yield from _split_batch(*previous)

    def _fit(self, length: int, count: int, batch_tokens: int) -> Shape:
        """Return the rows, source length and target length of the next batch of `count` remaining pairs.

        `length` is the length of the longest source or target. It is rounded up to 8, 12, 16, 24, 32, 48, ...
        tokens, so that at most a third is padding; for a few pairs, to a power of two.
        """
        few = count <= _FEW
        size = max(_FEW_LENGTH if few else 8, round_up_coarsely(length))
        if not few and 8 < length <= size * 3 // 4:
            size = size * 3 // 4
        source, target = (min(size, longest) for longest in self._longest)
        rows = max(
            1, min(batch_tokens // (source + target), _MAX_LOGITS // (target * self.vocabs.target.size))
        )
        return Shape(min(rows, _FEW_ROWS) if few else rows, source, target)

    def _read_batch(
        self, params: tuple[Any, ...], array: BatchArray, *, watched: tuple[Watched, ...]
    ) -> tuple[Array, list[Array]]:
        """Return log-probabilities [B, T], which are 0 for forced tokens, and watched attention [B, T, S]."""
        batch, logits = array.to_batch(), list[Array]()
        attention: list[list[Array]] = []
        for model, model_params in zip(self._networks, params, strict=True):
            variables = {"params": unstack_layers(model_params)}
            options: dict[str, Any] = {"deterministic": True, "method": "hidden"}
            if watched:
                hidden, collections = model.apply(variables, batch, **options, mutable=["intermediates"])
                decoder = collections["intermediates"]["decoder"]
                attention.append([_weights(decoder, one, batch) for one in watched])
            else:
                hidden = model.apply(variables, batch, **options)
            logits.append(model.apply(variables, hidden, method="logits"))
        mean_attention: list[Array] = [
            jnp.stack(weights).mean(axis=0) for weights in zip(*attention, strict=True)
        ]
        combined = logits[0] if len(logits) == 1 else average_logits(logits)
        chosen = jnp.take_along_axis(combined, batch.target_out[..., None], axis=-1)[..., 0]
        total = jax.nn.logsumexp(combined, axis=-1)
        log_probs = (chosen - total).at[:, : self.vocabs.target.num_forced].set(0.0)
        return log_probs, mean_attention


def _weights(decoder: Any, watched: Watched, batch: Batch) -> Array:
    """Return the attention weights [B, T, S]; a decoder-only model has them in its self-attention."""
    block = decoder[f"layers_{watched.layer % len(decoder)}"]
    if "cross_attention" in block:
        (weights,) = block["cross_attention"]["attention_weights"]  # [B, H, T, S]
    else:
        (all_weights,) = block["self_attention"]["attention_weights"]  # [B, H, S + T, S + T]
        source_length = batch.source.shape[1]
        weights = all_weights[:, :, source_length:, :source_length]
    chosen = weights.mean(axis=1) if watched.head is None else weights[:, watched.head]
    if not watched.reading:
        return chosen
    # No step reads the last token (eos, or the end of an unfinished translation), so its weights stay.
    is_read = batch.target_mask[:, 1:, None]
    return jnp.concatenate([jnp.where(is_read, chosen[:, 1:], chosen[:, :-1]), chosen[:, -1:]], axis=1)


def _split_batch(
    indices: Sequence[int], pairs: Sequence[Pair], outputs: tuple[Array, list[Array]]
) -> Iterator[tuple[int, Reading]]:
    """Yield each pair's index and its reading, with padding removed."""
    log_probs, attention = jax.tree.map(np.asarray, outputs)  # waits for the device
    for row, (index, pair) in enumerate(zip(indices, pairs, strict=True)):
        s, t = len(pair.source), len(pair.target)
        pair_attention = tuple(weights[row, :t, :s] for weights in attention)
        yield index, Reading(log_probs[row, :t], pair_attention)
