"""Attention: the pure function, and the multi-head layer with its cached single step.

Knows nothing of vocabularies, batches or devices. Axes as in `shapes`.
"""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.model.fused_attention import attend_fused, choose_attention
from flaxformer_mt.model.initializers import make_initializers
from flaxformer_mt.model.layers import Dropout
from flaxformer_mt.model.positions import rotate
from flaxformer_mt.model.projections import Projection, project_together
from flaxformer_mt.shapes import Array, AttentionMask, Cache, typed


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
        shared = {"use_bias": config.attention_bias, "dtype": jnp.dtype(config.dtype)}
        into_heads = functools.partial(
            Projection,
            (config.model_dim,),
            kernel_init=initializers.attention_input,
            bias_init=initializers.bias(config.model_dim),
            **shared,
        )
        self.query = into_heads((config.num_heads, key_dim))
        self.key = into_heads((config.num_heads, key_dim))
        self.value = into_heads((config.num_heads, value_dim))
        self.output = Projection(
            (config.num_heads, value_dim),
            (config.model_dim,),
            kernel_init=initializers.attention_output,
            bias_init=initializers.bias(config.num_heads * value_dim),
            **shared,
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
        if memory is x:
            query, keys, values = project_together(x, [self.query, self.key, self.value])
        else:
            query = self.query(x)
            keys, values = project_together(memory, [self.key, self.value])
        if positions is not None:
            query, keys = rotate(query, positions), rotate(keys, positions)
        dropping = not deterministic and self.dropout.rate > 0
        kind = choose_attention(
            self.config.attention,
            query,
            keys,
            values,
            needs_weights=dropping or self.is_mutable_collection("intermediates"),
            platform=jax.default_backend(),
        )
        if kind != "plain":
            return self.output(attend_fused(query, keys, values, mask, kind))
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
        keys, values = project_together(memory, [self.key, self.value])
        return {"keys": keys if positions is None else rotate(keys, positions), "values": values}

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
        lineage: Array | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        """Attends from the token at `index`, x [B, W, D], to itself and the tokens before it.

        With a prefix, to that as well: projected memory [B, M, ...] that all beams of a row share, of which
        prefix_mask [B, 1, 1, M] may be attended to. With a lineage [B, W, W, T] (see `make_lineage`), the
        tokens before it are where that says; without, in the beam's own places.
        """
        query, key, value = project_together(x, [self.query, self.key, self.value])  # [B, W, H, K]
        if positions is not None:
            query, key = rotate(query, positions), rotate(key, positions)
        write = jax.lax.dynamic_update_slice_in_dim
        keys = write(cache["keys"], key[..., None, :], index, axis=3)
        values = write(cache["values"], value[..., None, :], index, axis=3)
        batch, beams, heads, length, _ = keys.shape
        seen = (jnp.arange(length) <= index)[None, None, None, :]
        grown: dict[str, Array] = {"keys": keys, "values": values}
        if lineage is not None:
            return self.output(_attend_lineage(query, grown, lineage, prefix, prefix_mask)), grown
        if prefix is not None:
            mixed = _attend_after_prefix(query, prefix, prefix_mask, grown, seen)
            return self.output(mixed), grown

        def by_row(cached: Array) -> Array:  # [B, W, H, T, K] -> [BW, T, H, K]: each beam is a row of its own
            return cached.reshape(batch * beams, heads, length, -1).swapaxes(1, 2)

        rows = query.reshape(batch * beams, 1, heads, -1)
        mixed = self.attend(rows, by_row(keys), by_row(values), mask=seen, deterministic=True)
        return mixed.reshape(batch, beams, -1), grown


def make_lineage(cache: Cache) -> Array | None:
    """Whose places each hypothesis reads, [B, W, U, T] for beams U of its row; None: its own alone.

    With ancestors [[0 0] [0 1]] of two beams at index 1, beam 1 reads token 0 in place 0 and its own token 1.
    """
    if cache.ancestors is None:
        return None
    beams, places = cache.ancestors.shape[1], jnp.arange(cache.ancestors.shape[2])
    own = jnp.arange(beams)[:, None]
    written_by = jnp.where(places == cache.index, own, cache.ancestors)  # [B, W, T]
    return (written_by[:, :, None, :] == own) & (places <= cache.index)


def _attend_lineage(
    query: Array,
    own: dict[str, Array],
    lineage: Array,
    prefix: dict[str, Array] | None,
    prefix_mask: Array | None,
) -> Array:
    """Means [B, W, H, E] over the tokens of all beams that are a hypothesis's own, and over a row's prefix.

    All beams of a row are compared with all, and what is not theirs is masked: more products, but nothing is
    moved. Which of the two costs less depends on the device, the width and the length.
    """
    query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    least = jnp.finfo(jnp.float32).min
    scores = jnp.einsum("BWHK,BUHTK->BHWUT", query, own["keys"]).astype(jnp.float32)
    shape = scores.shape
    scores = jnp.where(lineage[:, None], scores, least).reshape(*shape[:3], -1)
    if prefix is not None:
        on_prefix = jnp.einsum("BWHK,BMHK->BHWM", query, prefix["keys"]).astype(jnp.float32)
        if prefix_mask is not None:
            on_prefix = jnp.where(prefix_mask, on_prefix, least)
        scores = jnp.concatenate([scores, on_prefix], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    by_own, by_prefix = jnp.split(weights, [shape[3] * shape[4]], axis=-1)
    mixed = jnp.einsum("BHWUT,BUHTE->BWHE", by_own.reshape(shape), own["values"])
    if prefix is not None:
        mixed = mixed + jnp.einsum("BHWM,BMHE->BWHE", by_prefix, prefix["values"])
    return mixed


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
