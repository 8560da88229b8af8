"""Given translations read by the network: the probability of each token after the true ones before it.

Owns the batches of such pairs, in few shapes, and which attention weights are kept. One full forward pass, no
search. Knows ids alone: nothing of text, of files, or of what a translation is worth.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.config import ModelConfig, SearchConfig
from flaxformer_mt.decoding.sizes import SearchBatch, plan_batches, round_down
from flaxformer_mt.model import make_model
from flaxformer_mt.model.scanned_layers import unstack_layers
from flaxformer_mt.parallel import default_platform
from flaxformer_mt.shapes import Array, Batch

# No more logits than this are made at a time: half a GiB in float32.
_MOST_LOGITS = 1 << 27

# Longer than anything, where no positions bound the length.
UNBOUNDED = 1 << 29


class Pair(NamedTuple):
    """A source and a translation of it, as ids without bos."""

    # Ends in eos; empty for a language model.
    source: Sequence[int] | np.ndarray
    # Ends in eos, unless it is a beginning only.
    target: Sequence[int] | np.ndarray


class Watched(NamedTuple):
    """Attention of target to source that is kept: of a decoder layer, counted from 0, -1 being the last.

    head None: the mean of all heads.
    """

    layer: int
    head: int | None = None


class Reading(NamedTuple):
    """What reading a pair gave.

    log_probs [T]: of each target token. attention: the weights [T, S] of each `Watched`, averaged over the
    models of an ensemble; row t is where the step that gives token t looks.
    """

    log_probs: np.ndarray
    attention: tuple[np.ndarray, ...] = ()


class ForcedDecoder:
    """Reads pairs with one model, or with several that have one vocabulary.

    Compiles once for each shape of batch; other parameters of the same shapes need no compilation.
    """

    def __init__(
        self,
        models: Sequence[ModelConfig],
        *,
        sizes: tuple[int, int],
        pad_id: int,
        bos_id: int,
        longest: tuple[int, int],
        ensemble_mean: str = SearchConfig.ensemble_mean,
    ) -> None:
        """Makes the networks.

        Args:
          sizes: of the source and the target vocabulary.
          longest: source and target, in tokens with eos; none is longer. `UNBOUNDED` where there is no bound.
        """
        self._configs = [dataclasses.replace(model, scan_layers=False) for model in models]
        self._models = [make_model(c, source_size=sizes[0], target_size=sizes[1], platform=default_platform()) for c in self._configs]
        self._target_size = sizes[1]
        self._pad_id, self._bos_id = pad_id, bos_id
        self._longest = longest
        self._ensemble_mean = ensemble_mean
        self.compile()

    def compile(self, **options: Any) -> None:
        """Compiles anew when next called, with options of `jax.jit`, as compiler_options={...}."""
        self.run = jax.jit(self.read_batch, static_argnames="watched", **options)

    def read_all(
        self,
        pairs: Sequence[Pair],
        *,
        params: Sequence[Any],
        batch_tokens: int,
        watched: Sequence[Watched] = (),
    ) -> Iterator[tuple[int, Reading]]:
        """Each pair's index and its reading, in the order of batches.

        Args:
          params: of each model.
          batch_tokens: of source and target together, padding included, in one batch.
        """
        lengths = [max(len(pair.source), len(pair.target), 1) for pair in pairs]

        def rows_of(length: int) -> int:
            source_length, target_length = self._shape(length)
            rows = batch_tokens // (source_length + target_length)
            return round_down(max(1, min(rows, _MOST_LOGITS // (target_length * self._target_size))))

        waiting: tuple[list[int], list[Pair], Any] | None = None
        for plan in plan_batches(lengths, longest=max(self._longest), rows_of=rows_of):
            chosen = [pairs[index] for index in plan.indices]
            batch = self._make_batch(chosen, plan)
            started = self.run(tuple(params), batch, watched=tuple(watched))
            # The device works on this batch while the host reads the one before.
            if waiting is not None:
                yield from _by_pair(*waiting)
            waiting = list(plan.indices), chosen, started
        if waiting is not None:
            yield from _by_pair(*waiting)

    def _shape(self, length: int) -> tuple[int, int]:
        """The source and target lengths of a batch whose pairs reach a length: one number, so few shapes."""
        source, target = (min(length, longest) for longest in self._longest)
        return source, target

    def _make_batch(self, pairs: Sequence[Pair], plan: SearchBatch) -> Batch:
        """Pairs in rows; rows to spare hold padding alone, but for one token that attention can look at."""
        source_length, target_length = self._shape(plan.source_length)
        if not any(len(pair.source) for pair in pairs):
            source_length = 0  # a language model reads no source
        source = np.full((plan.rows, source_length), self._pad_id, np.int32)
        target = np.full((2, plan.rows, target_length), self._pad_id, np.int32)
        source_mask, target_mask = np.zeros(source.shape, bool), np.zeros(target.shape[1:], bool)
        for row, pair in enumerate(pairs):
            read, written = len(pair.source), len(pair.target)
            source[row, :read], source_mask[row, :read] = pair.source, True
            target[0, row, :written] = [self._bos_id, *pair.target[:-1]][:written]
            target[1, row, :written], target_mask[row, :written] = pair.target, True
        source_mask[len(pairs) :, :1] = True
        target_mask[len(pairs) :, :1] = True
        return Batch(source, target[0], target[1], source_mask, target_mask)

    def read_batch(
        self, params: tuple[Any, ...], batch: Batch, *, watched: tuple[Watched, ...]
    ) -> tuple[Array, list[Array]]:
        """The traced part: log-probabilities [B, T] of target_out, and the watched attention [B, T, S]."""
        logits: list[Array] = []
        attention: list[list[Array]] = []
        for model, own in zip(self._models, params, strict=True):
            variables = {"params": unstack_layers(own)}
            options: dict[str, Any] = {"deterministic": True, "method": "hidden"}
            if watched:
                hidden, kept = model.apply(variables, batch, **options, mutable=["intermediates"])
                decoder = kept["intermediates"]["decoder"]
                attention.append([_weights(decoder, one, batch.source.shape[1]) for one in watched])
            else:
                hidden = model.apply(variables, batch, **options)
            logits.append(model.apply(variables, hidden, method="logits"))
        together: list[Array] = [jnp.stack(weights).mean(axis=0) for weights in zip(*attention, strict=True)]
        combined = logits[0] if len(logits) == 1 else self._combine(logits)
        chosen = jnp.take_along_axis(combined, batch.target_out[..., None], axis=-1)[..., 0]
        return chosen - jax.nn.logsumexp(combined, axis=-1), together

    def _combine(self, logits: Sequence[Array]) -> Array:
        """An ensemble's logits, as the search averages them."""
        opinions = jnp.stack([jax.nn.log_softmax(each, axis=-1) for each in logits])
        return opinions.mean(axis=0) if self._ensemble_mean == "log_probs" else jax.nn.logsumexp(opinions, 0)


def _weights(decoder: Any, watched: Watched, source_length: int) -> Array:
    """The weights [B, T, S] of target to source; a decoder-only stack has both in one row."""
    block = decoder[f"layers_{watched.layer % len(decoder)}"]
    if "cross_attention" in block:
        (weights,) = block["cross_attention"]["attention_weights"]  # [B, H, T, S]
    else:
        (both,) = block["self_attention"]["attention_weights"]  # [B, H, S + T, S + T]
        weights = both[:, :, source_length:, :source_length]
    return weights.mean(axis=1) if watched.head is None else weights[:, watched.head]


def _by_pair(
    indices: Sequence[int], pairs: Sequence[Pair], started: tuple[Array, list[Array]]
) -> Iterator[tuple[int, Reading]]:
    log_probs, attention = jax.tree.map(np.asarray, started)  # waits for the device
    for row, (index, pair) in enumerate(zip(indices, pairs, strict=True)):
        read, written = len(pair.source), len(pair.target)
        kept = tuple(weights[row, :written, :read] for weights in attention)
        yield index, Reading(log_probs[row, :written], kept)
