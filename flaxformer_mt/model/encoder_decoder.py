"""The encoder-decoder Transformer (Vaswani et al. 2017): tokens in, logits out, and the cached decoding step.

Row 7 of the data path. Knows nothing of special ids (padding arrives as masks), of losses, or of devices.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.model.blocks import DecoderBlock, EncoderBlock
from flaxformer_mt.model.layers import Dropout, make_initializer, make_norm
from flaxformer_mt.model.masks import make_causal_mask, make_padding_mask, make_segment_mask
from flaxformer_mt.model.positions import LearnedPositions, sinusoidal_positions
from flaxformer_mt.shapes import Array, Batch, Cache

_REMAT_POLICIES = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}


def _maybe_remat(
    block: type[nn.Module], config: ModelConfig, *, deterministic_argument: int
) -> type[nn.Module]:
    if config.remat == "none":
        return block
    return nn.remat(block, policy=_REMAT_POLICIES[config.remat], static_argnums=(deterministic_argument,))


class Embedding(nn.Module):
    """The table [V, D] that turns ids into vectors, and whose rows may be tied to the output."""

    size: int
    model_dim: int

    def setup(self) -> None:
        # The paper's scale: times sqrt(D) at the input gives unit variance, and so do the tied logits.
        init = nn.initializers.normal(self.model_dim**-0.5)
        self.embedding = self.param("embedding", init, (self.size, self.model_dim))

    def __call__(self, ids: Array) -> Array:
        """Vectors [..., D] of ids [...]."""
        return jnp.take(self.embedding, ids, axis=0)


class Stack(nn.Module):
    """What encoder and decoder share: positions added to embeddings, dropout, blocks, and the last norm."""

    config: ModelConfig
    num_layers: int
    block: type[nn.Module]

    def setup(self) -> None:
        config = self.config
        if config.positions == "learned":
            self.positions = LearnedPositions(config.max_positions, config.model_dim)
        self.embedding_dropout = Dropout(config.dropout_rate)
        deterministic_argument = 4 if self.block is EncoderBlock else 6
        block = _maybe_remat(self.block, config, deterministic_argument=deterministic_argument)
        self.layers = [block(config) for _ in range(self.num_layers)]
        if config.norm_position == "pre":
            self.final_norm = make_norm(config)

    def start(self, embedded: Array, positions: Array, *, deterministic: bool) -> Array:
        """Scaled embeddings [B, T, D] with their positions [B, T] or [1, T], in the computation's type."""
        config = self.config
        x = embedded * config.model_dim**0.5 if config.embedding_scale else embedded
        if config.positions == "sinusoidal":
            x = x + sinusoidal_positions(positions, model_dim=config.model_dim)
        elif config.positions == "learned":
            x = x + self.positions(positions)
        return self.embedding_dropout(x.astype(jnp.dtype(config.dtype)), deterministic=deterministic)

    def finish(self, x: Array) -> Array:
        """The norm after the last block, which only pre-norm stacks need."""
        return self.final_norm(x) if self.config.norm_position == "pre" else x

    def rotary(self, positions: Array) -> Array | None:
        """The positions that turn queries and keys, if they are of that kind."""
        return positions if self.config.positions == "rotary" else None


class EncoderDecoder(nn.Module):
    """Encoder, decoder, embeddings and output, tied as `model.tying` says.

    Parameter paths: {shared,source,target}_embedding/embedding, {encoder,decoder}/layers_N/...,
    output_kernel, output_bias.
    """

    config: ModelConfig
    source_size: int
    target_size: int

    def setup(self) -> None:
        config = self.config
        if config.tying == "all":
            self.shared_embedding = Embedding(self.target_size, config.model_dim)
        else:
            self.source_embedding = Embedding(self.source_size, config.model_dim)
            self.target_embedding = Embedding(self.target_size, config.model_dim)
        self.encoder = Stack(config, config.num_encoder_layers, EncoderBlock)
        self.decoder = Stack(config, config.num_decoder_layers, DecoderBlock)
        if config.tying == "none":
            init = make_initializer(config.initializer)
            self.output_kernel = self.param("output_kernel", init, (config.model_dim, self.target_size))
        if config.output_bias:
            self.output_bias = self.param("output_bias", nn.initializers.zeros, (self.target_size,))

    def __call__(self, batch: Batch, *, deterministic: bool) -> Array:
        """Logits [B, T, V] of every next target token, in float32."""
        return self.logits(self.hidden(batch, deterministic=deterministic))

    def hidden(self, batch: Batch, *, deterministic: bool) -> Array:
        """What the output layer turns into logits, [B, T, D]."""
        if batch.source_segments is None or batch.target_segments is None:
            source_mask = cross_mask = make_padding_mask(batch.source_mask)
            self_mask = make_causal_mask(batch.target_in.shape[1])
        else:
            source_mask = make_segment_mask(batch.source_segments, batch.source_segments)
            cross_mask = make_segment_mask(batch.target_segments, batch.source_segments)
            causal = make_causal_mask(batch.target_in.shape[1])
            self_mask = make_segment_mask(batch.target_segments, batch.target_segments) & causal
        memory = self._encode(batch.source, source_mask, batch.source_positions, deterministic=deterministic)
        return self._decode(
            batch.target_in,
            memory,
            self_mask=self_mask,
            cross_mask=cross_mask,
            positions=batch.target_positions,
            deterministic=deterministic,
        )

    def encode(self, source: Array, source_mask: Array) -> Array:
        """The memory [B, S, D] of sources [B, S], one to a row."""
        return self._encode(source, make_padding_mask(source_mask), None, deterministic=True)

    def decode(self, target_in: Array, memory: Array, source_mask: Array) -> Array:
        """Logits [B, T, V] of target prefixes [B, T] over a memory, all positions at once."""
        x = self._decode(
            target_in,
            memory,
            self_mask=make_causal_mask(target_in.shape[1]),
            cross_mask=make_padding_mask(source_mask),
            positions=None,
            deterministic=True,
        )
        return self.logits(x)

    def start_cache(self, memory: Array, source_mask: Array, beams: int, max_length: int) -> Cache:
        """The cache before the first token: room for `max_length`, and each source's keys and values."""
        blocks = self.decoder.layers
        per_beam = [block.empty_cache(memory.shape[0], beams, max_length) for block in blocks]
        shared = {"memory": [block.project_memory(memory) for block in blocks], "source_mask": source_mask}
        return Cache(per_beam, shared, jnp.zeros((), jnp.int32))

    def decode_step(self, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        """Logits [B, W, V] after one more token [B, W] of every beam, and the cache with that token in it."""
        positions = jnp.full((1, 1), cache.index)
        x = self.decoder.start(self._embed_target(tokens), positions, deterministic=True)
        cross_mask = make_padding_mask(cache.shared["source_mask"])
        per_beam = []
        for block, own, memory in zip(
            self.decoder.layers, cache.per_beam, cache.shared["memory"], strict=True
        ):
            x, grown = block.step(
                x,
                own,
                memory,
                index=cache.index,
                cross_mask=cross_mask,
                positions=self.decoder.rotary(positions),
            )
            per_beam.append(grown)
        logits = self.logits(self.decoder.finish(x))
        return logits, Cache(per_beam, cache.shared, cache.index + 1)

    def logits(self, x: Array) -> Array:
        """Scores [..., V] of the target vocabulary for x [..., D], in float32."""
        table, bias = self.output_layer()
        scores = jnp.einsum("...D,VD->...V", x, table.astype(x.dtype), preferred_element_type=jnp.float32)
        return scores if bias is None else scores + bias

    def output_layer(self) -> tuple[Array, Array | None]:
        """The matrix [V, D] and bias [V] that turn hidden states into logits."""
        bias = self.output_bias if self.config.output_bias else None
        if self.config.tying == "none":
            return self.output_kernel.T, bias
        return (
            self.shared_embedding if self.config.tying == "all" else self.target_embedding
        ).embedding, bias

    def _embed_source(self, ids: Array) -> Array:
        return self.shared_embedding(ids) if self.config.tying == "all" else self.source_embedding(ids)

    def _embed_target(self, ids: Array) -> Array:
        return self.shared_embedding(ids) if self.config.tying == "all" else self.target_embedding(ids)

    def _encode(self, source: Array, mask: Array, positions: Array | None, *, deterministic: bool) -> Array:
        positions = jnp.arange(source.shape[1])[None] if positions is None else positions
        x = self.encoder.start(self._embed_source(source), positions, deterministic=deterministic)
        for block in self.encoder.layers:
            x = block(x, mask, self.encoder.rotary(positions), deterministic)
        return self.encoder.finish(x)

    def _decode(
        self,
        target_in: Array,
        memory: Array,
        *,
        self_mask: Array,
        cross_mask: Array,
        positions: Array | None,
        deterministic: bool,
    ) -> Array:
        positions = jnp.arange(target_in.shape[1])[None] if positions is None else positions
        x = self.decoder.start(self._embed_target(target_in), positions, deterministic=deterministic)
        for block in self.decoder.layers:
            x = block(x, memory, self_mask, cross_mask, self.decoder.rotary(positions), deterministic)
        return self.decoder.finish(x)
