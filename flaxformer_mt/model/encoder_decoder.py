"""The encoder-decoder Transformer (Vaswani et al. 2017), and its decoding with a cache."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from flaxformer_mt.kernels import MaskRule, drop_ends
from flaxformer_mt.model.attention import Step, make_ancestors
from flaxformer_mt.model.blocks import DecoderBlock, EncoderBlock, RecurrentDecoderBlock
from flaxformer_mt.model.cached_decoding import CachedDecoder
from flaxformer_mt.model.stack import Embedding, Stack, make_embedding
from flaxformer_mt.shapes import Array, Batch, Cache


class EncoderDecoder(CachedDecoder):
    """Encoder, decoder, embeddings and output layer; `model.tying` says which tables are shared.

    Parameter paths: {shared,source,target}_embedding/embedding, {encoder,decoder}/layers_N/... (layers/...
    with scan_layers), output_kernel, output_bias.
    """

    source_size: int
    target_size: int

    def setup(self) -> None:
        config = self.config
        if config.tying in ("all", "embeddings"):
            self.shared_embedding = make_embedding(config, self.target_size)
        else:
            self.source_embedding = make_embedding(config, self.source_size)
            self.target_embedding = make_embedding(config, self.target_size)
        make = functools.partial(Stack, config, self.kernels)
        self.encoder = make(config.num_encoder_layers, EncoderBlock, deterministic_argument=4)
        block = RecurrentDecoderBlock if self._is_recurrent else DecoderBlock
        self.decoder = make(config.num_decoder_layers, block, deterministic_argument=6)
        self._setup_output(self.target_size)

    def __call__(self, batch: Batch, *, deterministic: bool) -> Array:
        """Compute the float32 logits [B, T, V] of the next token at each target position."""
        return self.logits(self.hidden(batch, deterministic=deterministic))

    def hidden(self, batch: Batch, *, deterministic: bool) -> Array:
        """Compute the output layer's input: the hidden states [B, T, D] of the decoder."""
        memory = self._encode(
            batch.source,
            batch.source_mask,
            self._rule_of_sources(batch, batch.source_segments),
            positions=batch.source_positions,
            deterministic=deterministic,
        )
        self_rule, cross_rule = self._target_rule(batch), self.cross_rule(batch)
        length, packed = batch.target_in.shape[1], batch.target_positions is not None
        positions = jnp.arange(length)[None] if batch.target_positions is None else batch.target_positions
        embedded = self._embed_target(batch.target_in, positions)
        x = self.decoder.start(embedded, positions, length=length, packed=packed, deterministic=deterministic)
        self_rule = self._add_bias(self_rule, self.decoder, bidirectional=False)
        x = self.decoder.run(x, memory, self_rule, cross_rule, self.decoder.rotary(positions), deterministic)
        return self._finish(x)

    def _target_rule(self, batch: Batch) -> MaskRule:
        if batch.target_segments is not None:
            return MaskRule(batch.target_segments, batch.target_segments, causal=True)
        is_token = batch.target_mask if self.config.padding_mask == "both" else None
        return MaskRule(None, is_token, causal=True, padded_at_end=True)

    def cross_rule(self, batch: Batch) -> MaskRule:
        """Return the mask rule of cross-attention: which source positions a target position may attend to."""
        return self._rule_of_sources(batch, batch.target_segments)

    def _rule_of_sources(self, batch: Batch, query_segments: Array | None) -> MaskRule:
        segments: Any = batch.source_segments
        if segments is None:
            return self._padding_rule(batch.source_mask)
        if not self.config.source_end:
            segments = drop_ends(jnp.asarray(segments, jnp.int32))
        return MaskRule(query_segments, segments)

    def embed_target(self, batch: Batch) -> Array:
        """Compute the input [B, T, D] of the first decoder layer from target tokens and their positions."""
        length = batch.target_in.shape[1]
        positions = jnp.arange(length)[None]
        embedded = self._embed_target(batch.target_in, positions)
        return self.decoder.start(embedded, positions, length=length, deterministic=True)

    def encode(self, source: Array, source_mask: Array) -> Array:
        """Encode sources [B, S], one per row; return the encoder output [B, S, D]."""
        rule = self._padding_rule(source_mask)
        return self._encode(source, source_mask, rule, positions=None, deterministic=True)

    def start_decoding(self, source: Array, source_mask: Array, beams: int, max_length: int) -> Cache:
        """Encode sources [B, S], and make a cache for up to `max_length` target tokens."""
        return self.start_cache(self.encode(source, source_mask), source_mask, beams, max_length)

    def start_cache(self, memory: Array, source_mask: Array, beams: int, max_length: int) -> Cache:
        """Make a cache for up to `max_length` target tokens, with the keys and values of encoded sources."""
        blocks = self.decoder.blocks()
        per_beam = [block.empty_cache(memory.shape[0], beams, max_length) for block in blocks]
        shared = {"memory": [block.project_memory(memory) for block in blocks], "source_mask": source_mask}
        ancestors = make_ancestors(memory.shape[0], beams, max_length)
        return Cache(per_beam, shared, jnp.zeros((), jnp.int32), ancestors)

    @property
    def _output_embedding(self) -> Embedding | None:
        if self.config.tying in ("none", "embeddings"):
            return None
        return self.shared_embedding if self.config.tying == "all" else self.target_embedding

    def _step(self, tokens: Array, cache: Cache, step: Step, length: int) -> tuple[Array, list[Any]]:
        assert step.positions is not None
        embedded = self._embed_target(tokens, step.positions)
        x = self.decoder.start(embedded, step.positions, length=length, deterministic=True)
        cross_mask = self._padding_rule(cache.shared["source_mask"]).dense(1)
        per_beam = []
        for block, block_cache, memory in zip(
            self.decoder.blocks(), cache.per_beam, cache.shared["memory"], strict=True
        ):
            block_step = step._replace(positions=self.decoder.rotary(step.positions))
            x, updated = block.step(x, block_cache, memory, cross_mask, block_step)
            per_beam.append(updated)
        return self._finish(x), per_beam

    def _padding_rule(self, is_token: Array) -> MaskRule:
        """Return the mask rule for sources that are not packed: which source positions may be attended to."""
        if self.config.padding_mask == "none":
            return MaskRule(padded_at_end=True)
        if not self.config.source_end:
            is_token = drop_ends(jnp.asarray(is_token, jnp.int32)) > 0
        return MaskRule(None, is_token, padded_at_end=True)

    def _add_bias(self, rule: MaskRule, stack: Stack, *, bidirectional: bool) -> MaskRule:
        """Add the relative-position bias, if the model has one, to a mask rule of self-attention.

        The distance of two tokens is the distance of their slots, which is also correct within a sentence of
        a packed row.
        """
        if not self._is_relative:
            return rule
        return dataclasses.replace(rule, bias=stack.relative_bias(bidirectional=bidirectional))

    def _embed_source(self, ids: Array, is_token: Array) -> Array:
        shared = self.config.tying in ("all", "embeddings")
        embedded = self.shared_embedding(ids) if shared else self.source_embedding(ids)
        if self.config.padding_mask == "none":
            # Padding is read but not trained, as with padding_idx in PyTorch. Masks stop its gradient
            # elsewhere; target padding has no loss, and no token attends to it.
            embedded = jnp.where(is_token[..., None], embedded, jax.lax.stop_gradient(embedded))
        return embedded

    def _embed_target(self, ids: Array, positions: Array) -> Array:
        shared = self.config.tying in ("all", "embeddings")
        embedded = self.shared_embedding(ids) if shared else self.target_embedding(ids)
        if self.config.target_start == "zeros":
            embedded = jnp.where((positions == 0)[..., None], 0, embedded)
        return embedded

    def _encode(
        self, source: Array, is_token: Array, rule: MaskRule, *, positions: Array | None, deterministic: bool
    ) -> Array:
        length, packed = source.shape[1], positions is not None
        positions = jnp.arange(length)[None] if positions is None else positions
        embedded = self._embed_source(source, is_token)
        x = self.encoder.start(embedded, positions, length=length, packed=packed, deterministic=deterministic)
        rule = self._add_bias(rule, self.encoder, bidirectional=True)
        x = self.encoder.run(x, rule, self.encoder.rotary(positions), deterministic)
        return self.encoder.finish(x)
