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
        """Keys [B, H, K, M] and values [B, H, M, E] of a memory [B, M, D], as every decoding step takes them.

        So laid out, a step multiplies them as they are; otherwise it would first copy them all.
        """
        keys, values = project_together(memory, [self.key, self.value])
        if positions is not None:
            keys = rotate(keys, positions)
        return {"keys": keys.transpose(0, 2, 3, 1), "values": values.swapaxes(1, 2)}

    def attend_memory(self, x: Array, memory: dict[str, Array], *, mask: Array | None) -> Array:
        """One step of x [B, W, D] over projected memory; the beams of a source are queries of one row."""
        scores = _score(_lay_out_query(self.query(x)), memory["keys"], mask)
        weights = jax.nn.softmax(scores, axis=-1)
        self.sow("intermediates", "attention_weights", weights)
        return self._project_mixed(_mix(weights, memory["values"]))

    def _project_mixed(self, mixed: Array) -> Array:
        """From means [B, H, W, E] to the output [B, W, D]."""
        return self.output(mixed.swapaxes(1, 2))

    def empty_cache(self, batch: int, beams: int, max_length: int) -> dict[str, Array]:
        """Room for keys [B, H, K, TW] and values [B, H, TW, E] of `max_length` decoded tokens.

        Place t * W + w is of token t of beam w: a step multiplies both as they are and writes in one place.
        """
        config = self.config
        key_dim = config.key_dim or config.model_dim // config.num_heads
        value_dim = config.value_dim or config.model_dim // config.num_heads
        rows, places = (batch, config.num_heads), max_length * beams
        dtype = jnp.dtype(config.dtype)
        return {
            "keys": jnp.zeros((*rows, key_dim, places), dtype),
            "values": jnp.zeros((*rows, places, value_dim), dtype),
        }

    def step(
        self,
        x: Array,
        cache: dict[str, Array],
        index: Array,
        *,
        lineage: Array,
        positions: Array | None = None,
        prefix: dict[str, Array] | None = None,
        prefix_mask: Array | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        """Attends from the token at `index`, x [B, W, D], to itself and the tokens before it.

        Which those are says lineage [B, W, T, W] (see `make_lineage`). With a prefix, to that as well:
        projected memory that all beams of a row share, of which prefix_mask [B, 1, 1, M] may be attended to.
        """
        query, key, value = project_together(x, [self.query, self.key, self.value])  # [B, W, H, K]
        if positions is not None:
            query, key = rotate(query, positions), rotate(key, positions)
        write = jax.lax.dynamic_update_slice_in_dim
        beams = x.shape[1]
        keys = write(cache["keys"], key.transpose(0, 2, 3, 1), index * beams, axis=3)
        values = write(cache["values"], value.swapaxes(1, 2), index * beams, axis=2)
        query = _lay_out_query(query)
        # All beams of a row are compared with the tokens of all, and what is not theirs is masked: more
        # products, but nothing is moved, which is faster for beams of the usual widths.
        places = keys.shape[3]
        scores = _score(query, keys, lineage.reshape(*lineage.shape[:2], places)[:, None])
        if prefix is not None:
            scores = jnp.concatenate([scores, _score(query, prefix["keys"], prefix_mask)], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)
        mixed = _mix(weights[..., :places], values)
        if prefix is not None:
            mixed = mixed + _mix(weights[..., places:], prefix["values"])
        return self._project_mixed(mixed), {"keys": keys, "values": values}


def _lay_out_query(query: Array) -> Array:
    """Scaled queries [B, H, W, K] of one step, from [B, W, H, K]."""
    return query.swapaxes(1, 2) * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)


def _score(query: Array, keys: Array, mask: Array | None) -> Array:
    """Float32 products [B, H, W, M] of scaled queries [B, H, W, K] and keys [B, H, K, M]."""
    scores = jnp.matmul(query, keys).astype(jnp.float32)
    return scores if mask is None else jnp.where(mask, scores, jnp.finfo(jnp.float32).min)


def _mix(weights: Array, values: Array) -> Array:
    """Means [B, H, W, E] of values [B, H, M, E] under weights [B, H, W, M]."""
    return jnp.matmul(weights.astype(values.dtype), values)


def make_ancestors(batch: int, beams: int, length: int) -> Array:
    """Before the first token: every beam [B, W, T] is its own past."""
    return jnp.broadcast_to(jnp.arange(beams)[None, :, None], (batch, beams, length))


def make_lineage(cache: Cache, *, beams: int, length: int) -> Array:
    """Which tokens each hypothesis reads, [B, W, T, U]: those that it has of beams U of its row.

    With ancestors [[0 0] [0 1]] of two beams at index 1, beam 1 reads token 0 in place 0 and its own token 1.
    Without ancestors each beam reads its own places.
    """
    places, own = jnp.arange(length), jnp.arange(beams)
    written_by = jnp.broadcast_to(own[None, :, None], (1, beams, length))
    if cache.ancestors is not None:
        written_by = jnp.where(places == cache.index % length, written_by, cache.ancestors)  # [B, W, T]
    # A place's token is the last that was written there.
    of_line = (cache.index - places) % length <= cache.ages()  # [B or 1, T]
    return (written_by[..., None] == own) & of_line[:, None, :, None]
