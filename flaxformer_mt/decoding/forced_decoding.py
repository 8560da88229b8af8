"""Forced decoding (teacher forcing): the probability of each token of a given translation.

Contains the batches of pairs of token ids, in few shapes, and the selection of attention weights. Each batch
takes one forward pass without search. translation/scorer.py turns probabilities into scores.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.config import ModelConfig, SearchConfig
from flaxformer_mt.decoding.sizes import SHORTEST, SearchBatch, plan_batches, round_down
from flaxformer_mt.model.scanned_layers import unstack_layers
from flaxformer_mt.parallel import SplitParameters, default_platform
from flaxformer_mt.shapes import Array, Batch

if TYPE_CHECKING:
    from flaxformer_mt.model import Model

# Maximum number of logits of a batch: half a GiB in float32.
_MAX_LOGITS = 1 << 27

# Maximum length of a sequence if the model's positions do not limit it.
UNBOUNDED = 1 << 29


class Pair(NamedTuple):
    """A source and its translation, as token ids without bos."""

    # The last id is eos; empty for a language model.
    source: Sequence[int] | np.ndarray
    # The last id is eos, unless the translation is unfinished.
    target: Sequence[int] | np.ndarray


class Watched(NamedTuple):
    """Attention weights from target to source to return: those of one layer and head of the decoder."""

    # Counted from 0; -1 is the last layer.
    layer: int
    # None: the mean of all heads.
    head: int | None = None
    # Whether the weights of a token are those of the step that reads it, not of the one that predicts it.
    reading: bool = False


class Reading(NamedTuple):
    """The result of forced decoding of a pair."""

    # Log-probability [T] of each target token.
    log_probs: np.ndarray
    # Weights [T, S] of each `Watched`, averaged over the models of an ensemble; row t belongs to token t.
    attention: tuple[np.ndarray, ...] = ()
    # With top_k, the k most probable tokens at each position, most probable first, and their probabilities.
    top_ids: np.ndarray | None = None
    top_probs: np.ndarray | None = None


class ForcedDecoder:
    """Decodes pairs by teacher forcing with one model, or with an ensemble that shares a vocabulary.

    Compiles once for each shape of a batch; other parameters of the same shapes need no new compilation.
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
        split: SplitParameters | None = None,
    ) -> None:
        """Builds the networks.

        Args:
          sizes: number of entries of the source and the target vocabulary.
          longest: maximum source and target length, in tokens with eos; `UNBOUNDED`: unlimited.
          split: the mesh over which parameters are split, if they are.
        """
        self._configs = [dataclasses.replace(model, scan_layers=False) for model in models]
        self._sizes = sizes
        self._pad_id, self._bos_id = pad_id, bos_id
        self._longest = longest
        self._ensemble_mean = ensemble_mean
        self._split = split
        self.compile()

    @functools.cached_property
    def _models(self) -> list["Model"]:
        from flaxformer_mt.model import make_model

        source_size, target_size = self._sizes
        sizes: Any = {"source_size": source_size, "target_size": target_size}
        return [make_model(config, **sizes, platform=default_platform()) for config in self._configs]

    def compile(self, **options: Any) -> None:
        """Discards compiled programs; the next calls compile with these options of `jax.jit`."""
        compile_program = jax.jit if self._split is None else self._split.compile
        self.run = compile_program(self.read_batch, static_argnames=("watched", "top_k"), **options)

    def read_all(
        self,
        pairs: Sequence[Pair],
        *,
        params: Sequence[Any],
        batch_tokens: int,
        watched: Sequence[Watched] = (),
        shortest: int = SHORTEST,
        top_k: int = 0,
    ) -> Iterator[tuple[int, Reading]]:
        """Yields each pair's index and its reading, in the order of batches.

        Args:
          params: the parameters of each model.
          batch_tokens: maximum number of source and target tokens of a batch, padding included.
          shortest: minimum length of a batch: a larger one gives fewer shapes, with more padding.
          top_k: number of most probable tokens to return for each position.
        """
        lengths = [max(len(pair.source), len(pair.target), 1) for pair in pairs]

        def rows_of(length: int) -> int:
            source_length, target_length = self._shape(length)
            rows = batch_tokens // (source_length + target_length)
            return round_down(max(1, min(rows, _MAX_LOGITS // (target_length * self._sizes[1]))))

        previous: tuple[list[int], list[Pair], Any] | None = None
        longest = max(self._longest)
        for plan in plan_batches(lengths, longest=longest, rows_of=rows_of, shortest=min(shortest, longest)):
            chosen = [pairs[index] for index in plan.indices]
            batch = self._make_batch(chosen, plan)
            outputs = self.run(tuple(params), batch, watched=tuple(watched), top_k=top_k)
            # The device computes this batch while the host processes the previous one.
            if previous is not None:
                yield from _split_batch(*previous)
            previous = list(plan.indices), chosen, outputs
        if previous is not None:
            yield from _split_batch(*previous)

    def _shape(self, length: int) -> tuple[int, int]:
        """Returns the source and target lengths of a batch; both derive from one length, for few shapes."""
        source, target = (min(length, longest) for longest in self._longest)
        return source, target

    def _make_batch(self, pairs: Sequence[Pair], plan: SearchBatch) -> Batch:
        """Makes a batch of one pair per row; rows of padding have one unmasked position for attention."""
        source_length, target_length = self._shape(plan.source_length)
        if not any(len(pair.source) for pair in pairs):
            source_length = 0  # a language model has no source
        source = np.full((plan.rows, source_length), self._pad_id, np.int32)
        target = np.full((2, plan.rows, target_length), self._pad_id, np.int32)
        source_mask, target_mask = np.zeros(source.shape, bool), np.zeros(target.shape[1:], bool)
        for row, pair in enumerate(pairs):
            s, t = len(pair.source), len(pair.target)
            source[row, :s], source_mask[row, :s] = pair.source, True
            target[0, row, :t] = [self._bos_id, *pair.target[:-1]][:t]
            target[1, row, :t], target_mask[row, :t] = pair.target, True
        source_mask[len(pairs) :, :1] = True
        target_mask[len(pairs) :, :1] = True
        return Batch(source, target[0], target[1], source_mask, target_mask)

    def read_batch(
        self, params: tuple[Any, ...], batch: Batch, *, watched: tuple[Watched, ...], top_k: int = 0
    ) -> tuple[Array, list[Array], tuple[Array, ...]]:
        """Returns log-probabilities [B, T] of target_out, and the watched attention [B, T, S]; traced.

        The third is empty, or with `top_k` the ids and probabilities [B, T, K] of the most probable tokens.
        """
        logits: list[Array] = []
        attention: list[list[Array]] = []
        for model, model_params in zip(self._models, params, strict=True):
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
        combined = logits[0] if len(logits) == 1 else self._combine(logits)
        chosen = jnp.take_along_axis(combined, batch.target_out[..., None], axis=-1)[..., 0]
        total = jax.nn.logsumexp(combined, axis=-1)
        top: tuple[Array, ...] = ()
        if top_k:
            largest, ids = jax.lax.top_k(combined, top_k)
            top = ids, jnp.exp(largest - total[..., None])
        return chosen - total, mean_attention, top

    def _combine(self, logits: Sequence[Array]) -> Array:
        """Averages the distributions of an ensemble as the search does; returns unnormalized logits."""
        log_probs = jnp.stack([jax.nn.log_softmax(model_logits, axis=-1) for model_logits in logits])
        if self._ensemble_mean == "log_probs":
            return log_probs.mean(axis=0)
        return jax.nn.logsumexp(log_probs, 0)


def _weights(decoder: Any, watched: Watched, batch: Batch) -> Array:
    """Returns the attention weights [B, T, S] from target to source.

    The sequence of a decoder-only model is the source followed by the target.
    """
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
    # No step reads the last token, which is eos unless the translation is unfinished; it keeps its own.
    is_read = batch.target_mask[:, 1:, None]
    return jnp.concatenate([jnp.where(is_read, chosen[:, 1:], chosen[:, :-1]), chosen[:, -1:]], axis=1)


def _split_batch(
    indices: Sequence[int],
    pairs: Sequence[Pair],
    outputs: tuple[Array, list[Array], tuple[Array, ...]],
) -> Iterator[tuple[int, Reading]]:
    """Yields each pair's index and its reading, without padding."""
    log_probs, attention, top = jax.tree.map(np.asarray, outputs)  # waits for the device
    for row, (index, pair) in enumerate(zip(indices, pairs, strict=True)):
        s, t = len(pair.source), len(pair.target)
        pair_attention = tuple(weights[row, :t, :s] for weights in attention)
        yield index, Reading(log_probs[row, :t], pair_attention, *(values[row, :t] for values in top))
