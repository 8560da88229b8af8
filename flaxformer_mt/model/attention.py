"""Multi-head attention over whole sequences, and as a step with a cache for decoding token by token.

The letters of axes, as in [B, T, D], are defined in `shapes`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.kernels import Drop, Kernels, MaskRule
from flaxformer_mt.kernels.key_value_cache import KeyValues, average, score, store, write
from flaxformer_mt.model.initializers import make_initializers
from flaxformer_mt.model.layers import Dropout
from flaxformer_mt.model.positions import rotate
from flaxformer_mt.model.projections import Projection
from flaxformer_mt.parallel.sharding import constrain
from flaxformer_mt.shapes import Array, Cache

# Collection in which a forward pass stores the queries and keys of the head that learns alignments.
GUIDED = "guided_alignment"


class Step(NamedTuple):
    """The inputs of a decoding step that are the same for the self-attention (or recurrence) of all blocks.

    slot: the cache slot to which the tokens are written. ancestry: which cached tokens belong to each
    hypothesis, bool [B, W, T, W] (`make_ancestry_mask`); for a recurrence, a `Continuation`. positions: the
    positions of the tokens; inside blocks, None without rotary embeddings. bias: [1, H, W or 1, T], added to
    the scores of the cached tokens.
    """

    slot: Array
    ancestry: Any
    positions: Array | None = None
    bias: Array | None = None


class MultiHeadAttention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2).

    Queries come from one sequence, keys and values from the same or another sequence. If the model is applied
    with `mutable=["intermediates"]`, the layer stores its attention weights in this collection as
    `attention_weights`.
    """

    config: ModelConfig
    kernels: Kernels

    def setup(self) -> None:
        config = self.config
        key_dim = config.key_dim or config.model_dim // config.num_heads
        value_dim = config.value_dim or config.model_dim // config.num_heads

        initializers = make_initializers(config)
        shared = {
            "use_bias": config.attention_bias,
            "dtype": jnp.dtype(config.dtype),
            "kernels": self.kernels,
        }
        # Of rotated queries and keys, attention would sum other gradients.
        self.leaves_biases = (
            self.kernels.sums_biases and config.attention_bias and config.positions != "rotary"
        )
        make_projection = functools.partial(
            Projection,
            (config.model_dim,),
            axes="DHK",
            kernel_init=initializers.attention_input,
            bias_init=initializers.bias(config.model_dim),
            bias_gradient=not self.leaves_biases,
            **shared,
        )
        self.query = make_projection((config.num_heads, key_dim))
        self.key = make_projection((config.num_heads, key_dim))
        self.value = make_projection((config.num_heads, value_dim))
        self.output = Projection(
            (config.num_heads, value_dim),
            (config.model_dim,),
            axes="HED",
            kernel_init=initializers.attention_output,
            bias_init=initializers.bias(config.num_heads * value_dim),
            **shared,
        )
        rate = config.attention_dropout_rate
        self.dropout = Dropout(config.dropout_rate if rate is None else rate)

    def __call__(
        self, x: Array, memory: Array, *, mask: MaskRule, positions: Array | None = None, deterministic: bool
    ) -> Array:
        """Attend from x [B, Q, D] to memory [B, M, D]; with `positions`, queries and keys are rotated."""
        query, keys, values = self.query(x), self.key(memory), self.value(memory)
        if positions is not None:
            query, keys = rotate(query, positions), rotate(keys, positions)

        def see_weights(weights: Array) -> Array:  # [B, H, Q, M]
            self.sow("intermediates", "attention_weights", weights)
            return weights

        biases = {}
        if self.leaves_biases:
            biases = {"biases": [projection.bias for projection in (self.query, self.key, self.value)]}
        key = self.dropout.draw_key(deterministic=deterministic)
        sees = self.is_mutable_collection("intermediates")
        query, keys, values = (constrain(heads, "BTHK") for heads in (query, keys, values))
        heads = self.kernels.attention(
            query,
            keys,
            values,
            mask,
            scale=None if self.config.attention_scale else 1.0,
            drop=None if key is None else Drop(key, self.dropout.rate),
            see_weights=see_weights if sees else None,
            **biases,
        )
        return self.output(heads)

    def store_head(self, x: Array, memory: Array) -> None:
        """Store the queries [B, Q, K] and keys [B, M, K] of the head that learns alignments.

        Does nothing without guided alignment, or if the collection `GUIDED` is not mutable. The projections
        of this head are computed a second time here, so that any attention kernel can be used for the layer.
        """
        if self.config.alignment.weight and self.is_mutable_collection(GUIDED):
            self.sow(GUIDED, "head_query", self.query.of_first_head(x))
            self.sow(GUIDED, "head_keys", self.key.of_first_head(memory))

    def project_memory(self, memory: Array, positions: Array | None = None) -> KeyValues:
        """Project encoder output or a prefix, [B, M, D], to keys [B, H, K, M] and values [B, H, M, E]."""
        keys, values = self.key(memory), self.value(memory)
        if positions is not None:
            keys = rotate(keys, positions)
        return store(keys, values, quantized=self._is_quantized)

    @property
    def _is_quantized(self) -> bool:
        return self.key.kernel_scale is not None

    def attend_memory(self, x: Array, memory: KeyValues, *, mask: Array | None) -> Array:
        """Attend from one token per beam, x [B, W, D], to keys and values that the beams of a row share."""
        scores = score(self.kernels, self._scale_query(self.query(x)), memory, mask)
        weights = jax.nn.softmax(scores, axis=-1)
        self.sow("intermediates", "attention_weights", weights)
        return self.output(average(self.kernels, weights, memory, self.config.dtype).swapaxes(1, 2))

    def empty_cache(self, batch: int, beams: int, max_length: int) -> KeyValues:
        """Make an empty cache for T = `max_length` tokens: keys [B, H, K, TW] and values [B, H, TW, E]."""
        config = self.config
        key_dim = config.key_dim or config.model_dim // config.num_heads
        value_dim = config.value_dim or config.model_dim // config.num_heads
        leading, dtype = (batch, max_length * beams, config.num_heads), jnp.dtype(config.dtype)
        keys, values = (jnp.zeros((*leading, width), dtype) for width in (key_dim, value_dim))
        return store(keys, values, quantized=self._is_quantized)

    def step(
        self,
        x: Array,
        cache: KeyValues,
        step: Step,
        prefix: KeyValues | None = None,
        prefix_mask: Array | None = None,
    ) -> tuple[Array, KeyValues]:
        """Attend from one token per beam, x [B, W, D], to itself and to the earlier tokens of its hypothesis.

        Returns the output [B, W, D] and the updated cache. `prefix` is projected memory that all beams of a
        row share, such as the source of a decoder-only model; `prefix_mask`, bool [B, 1, 1, M], marks its
        tokens.
        """
        query, key, value = self.query(x), self.key(x), self.value(x)  # [B, W, H, K]
        if step.positions is not None:
            query, key = rotate(query, step.positions), rotate(key, step.positions)
        cache = write(cache, store(key, value, quantized=self._is_quantized), step.slot * x.shape[1])
        query = self._scale_query(query)
        # Each beam is scored against the cached tokens of all beams of its row, and the tokens of other
        # hypotheses are masked: more products, but no cache entry moves, which is faster at usual beam sizes.
        slots, dtype = cache["keys"].shape[3], self.config.dtype
        mask, bias = step.ancestry.reshape(*step.ancestry.shape[:2], slots)[:, None], step.bias
        if bias is not None:
            bias = jnp.repeat(bias, slots // bias.shape[-1], axis=-1)
        scores = score(self.kernels, query, cache, mask, bias)
        if prefix is not None:
            scores = jnp.concatenate([scores, score(self.kernels, query, prefix, prefix_mask)], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)
        averaged = average(self.kernels, weights[..., :slots], cache, dtype)
        if prefix is not None:
            averaged = averaged + average(self.kernels, weights[..., slots:], prefix, dtype)
        return self.output(averaged.swapaxes(1, 2)), cache

    def _scale_query(self, query: Array) -> Array:
        """Scale the queries [B, W, H, K] of one step, and transpose them to [B, H, W, K]."""
        query = query.swapaxes(1, 2)
        if not self.config.attention_scale:
            return query
        return query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)


def make_ancestors(batch: int, beams: int, length: int) -> Array:
    """Make the initial `Cache.ancestors` [B, W, T], in which each beam refers to itself."""
    return jnp.broadcast_to(jnp.arange(beams)[None, :, None], (batch, beams, length))


def make_ancestry_mask(cache: Cache, *, beams: int, length: int) -> Array:
    """Mark the cached tokens of each hypothesis: bool [B, W, T, U], True if beam u wrote token t of beam w.

    With ancestors [[0 0] [0 1]] of two beams at index 1, beam 1 attends to token 0 of beam 0 and to its own
    token 1. Without ancestors, each beam attends to the tokens that it wrote itself.
    """
    slots, beam_ids = jnp.arange(length), jnp.arange(beams)
    writers = jnp.broadcast_to(beam_ids[None, :, None], (1, beams, length))
    if cache.ancestors is not None:
        writers = jnp.where(slots == cache.index % length, writers, cache.ancestors)  # [B, W, T]
    # The cache is a ring buffer: a slot holds the last token written there, which belongs to the sentence of
    # the row if it is at most as old as that sentence.
    is_current = (cache.index - slots) % length <= cache.prefix_lengths()  # [B or 1, T]
    return (writers[..., None] == beam_ids) & is_current[:, None, :, None]


def make_prefix_inputs(cache: Cache, *, length: int, capacity: int) -> tuple[Array, Array]:
    """Make the positions [B, P] and the mask [B, P, T] of the P tokens that `read_prefix` feeds at once.

    P is `length`, and T is the `capacity` of the cache. The tokens of row b begin at step start_steps[b]:
    with start_steps [0 2] and P = 3, the rows have the positions [0 1 2] and [0 0 0], and the last token of
    the second row attends only to itself.
    """
    assert cache.start_steps is not None
    steps, slots = jnp.arange(length), jnp.arange(capacity)
    starts = cache.start_steps[:, None]
    mask = (slots <= steps[:, None]) & (slots >= starts[..., None])
    return jnp.maximum(steps - starts, 0), mask
