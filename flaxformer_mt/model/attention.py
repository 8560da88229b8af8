"""Attention: the pure function, and the multi-head layer with its cached single step.

Knows nothing of vocabularies, batches or devices. Axes as in `shapes`.
"""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.model.initializers import make_initializers
from flaxformer_mt.model.layers import Dropout
from flaxformer_mt.model.positions import rotate
from flaxformer_mt.shapes import Array, AttentionMask, typed


@typed
def attention_weights(
    query: Float[Array, "B Q H K"], keys: Float[Array, "B M H K"], mask: AttentionMask | None = None
) -> Float[Array, "B H Q M"]:
    """Softmax of the scaled products of queries and keys (Vaswani et al. 2017, equation 1), in float32.

    A query that may attend to nothing gets equal weights, never NaN.
    """
    query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    scores = jnp.einsum("BQHK,BMHK->BHQM", query, keys).astype(jnp.float32)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores, axis=-1)


@typed
def weighted_values(
    weights: Float[Array, "B H Q M"], values: Float[Array, "B M H E"]
) -> Float[Array, "B Q H E"]:
    """Each query's mean of the values under its weights."""
    return jnp.einsum("BHQM,BMHE->BQHE", weights.astype(values.dtype), values)


class MultiHeadAttention(nn.Module):
    """Queries from one sequence, keys and values from the same or another (section 3.2.2).

    Weights are kept on request: apply with `mutable=["intermediates"]` and find `attention_weights` there.
    """

    config: ModelConfig

    def setup(self) -> None:
        config = self.config
        key_dim = config.key_dim or config.model_dim // config.num_heads
        value_dim = config.value_dim or config.model_dim // config.num_heads

        initializers = make_initializers(config)
        projection = functools.partial(
            nn.DenseGeneral,
            use_bias=config.attention_bias,
            dtype=jnp.dtype(config.dtype),
            kernel_init=initializers.attention_input,
            bias_init=initializers.bias(config.model_dim),
        )
        self.query = projection((config.num_heads, key_dim))
        self.key = projection((config.num_heads, key_dim))
        self.value = projection((config.num_heads, value_dim))
        self.output = projection(
            config.model_dim,
            axis=(-2, -1),
            kernel_init=initializers.attention_output,
            bias_init=initializers.bias(config.num_heads * value_dim),
        )
        rate = config.attention_dropout_rate
        self.dropout = Dropout(config.dropout_rate if rate is None else rate)

    def __call__(
        self,
        x: Array,
        memory: Array,
        *,
        mask: Array | None,
        positions: Array | None = None,
        deterministic: bool,
    ) -> Array:
        """Attends from x [B, Q, D] to memory [B, M, D]; `positions` turn both when they are rotary."""
        query, projected = self.query(x), self.project_memory(memory, positions)
        if positions is not None:
            query = rotate(query, positions)
        keys, values = projected["keys"], projected["values"]
        return self.attend(query, keys, values, mask=mask, deterministic=deterministic)

    def attend(
        self, query: Array, keys: Array, values: Array, *, mask: Array | None, deterministic: bool
    ) -> Array:
        """The mixed and projected values [B, Q, D] for projected query [B, Q, H, K]."""
        weights = attention_weights(query, keys, mask)
        self.sow("intermediates", "attention_weights", weights)
        weights = self.dropout(weights, deterministic=deterministic)
        return self.output(weighted_values(weights, values))

    def project_memory(self, memory: Array, positions: Array | None = None) -> dict[str, Array]:
        """Keys and values of a memory [B, M, D], as `attend` and every decoding step take them."""
        keys = self.key(memory)
        return {
            "keys": keys if positions is None else rotate(keys, positions),
            "values": self.value(memory),
        }

    def attend_memory(self, x: Array, memory: dict[str, Array], *, mask: Array | None) -> Array:
        """One step of x [B, W, D] over projected memory; the beams of a source are queries of one row."""
        return self.attend(self.query(x), memory["keys"], memory["values"], mask=mask, deterministic=True)

    def empty_cache(self, batch: int, beams: int, max_length: int) -> dict[str, Array]:
        """Room for the keys [B, W, H, T, K] and values [B, W, H, T, E] of `max_length` decoded tokens."""
        config = self.config
        key_dim = config.key_dim or config.model_dim // config.num_heads
        value_dim = config.value_dim or config.model_dim // config.num_heads
        shape = (batch, beams, config.num_heads, max_length)
        dtype = jnp.dtype(config.dtype)
        return {"keys": jnp.zeros((*shape, key_dim), dtype), "values": jnp.zeros((*shape, value_dim), dtype)}

    def step(
        self,
        x: Array,
        cache: dict[str, Array],
        index: Array,
        *,
        positions: Array | None = None,
        prefix: dict[str, Array] | None = None,
        prefix_mask: Array | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        """Attends from the token at `index`, x [B, W, D], to itself and the tokens before it.

        With a prefix, to that as well: projected memory [B, M, ...] that all beams of a row share, of which
        prefix_mask [B, 1, 1, M] may be attended to.
        """
        query, key, value = self.query(x), self.key(x), self.value(x)  # [B, W, H, K]
        if positions is not None:
            query, key = rotate(query, positions), rotate(key, positions)
        write = jax.lax.dynamic_update_slice_in_dim
        keys = write(cache["keys"], key[..., None, :], index, axis=3)
        values = write(cache["values"], value[..., None, :], index, axis=3)
        batch, beams, heads, length, _ = keys.shape
        seen = (jnp.arange(length) <= index)[None, None, None, :]
        grown: dict[str, Array] = {"keys": keys, "values": values}
        if prefix is not None:
            mixed = _attend_after_prefix(query, prefix, prefix_mask, grown, seen)
            return self.output(mixed), grown

        def by_row(cached: Array) -> Array:  # [B, W, H, T, K] -> [BW, T, H, K]: each beam is a row of its own
            return cached.reshape(batch * beams, heads, length, -1).swapaxes(1, 2)

        rows = query.reshape(batch * beams, 1, heads, -1)
        mixed = self.attend(rows, by_row(keys), by_row(values), mask=seen, deterministic=True)
        return mixed.reshape(batch, beams, -1), grown


def _attend_after_prefix(
    query: Array, prefix: dict[str, Array], prefix_mask: Array | None, own: dict[str, Array], seen: Array
) -> Array:
    """Means [B, W, H, E] over a row's prefix, which no beam copies, and each beam's own tokens."""
    query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    on_prefix = jnp.einsum("BWHK,BMHK->BHWM", query, prefix["keys"]).astype(jnp.float32)
    on_own = jnp.einsum("BWHK,BWHTK->BHWT", query, own["keys"]).astype(jnp.float32)
    least = jnp.finfo(jnp.float32).min
    if prefix_mask is not None:
        on_prefix = jnp.where(prefix_mask, on_prefix, least)
    scores = jnp.concatenate([on_prefix, jnp.where(seen, on_own, least)], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    by_prefix, by_own = jnp.split(weights, [prefix["keys"].shape[1]], axis=-1)
    mixed = jnp.einsum("BHWM,BMHE->BWHE", by_prefix, prefix["values"])
    return mixed + jnp.einsum("BHWT,BWHTE->BWHE", by_own, own["values"])
