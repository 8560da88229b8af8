"""The decoder-only Transformer: one causal stack over source and target, or over the target alone.

It has the same interface as EncoderDecoder. The start symbol of the target separates source and target.
"""

from typing import Any

import jax.numpy as jnp

from flaxformer_mt.kernels import MaskRule
from flaxformer_mt.kernels.masks import make_padding_mask
from flaxformer_mt.model.attention import Step, make_ancestors
from flaxformer_mt.model.blocks import CausalBlock
from flaxformer_mt.model.cached_decoding import CachedDecoder
from flaxformer_mt.model.stack import Embedding, Stack, make_embedding
from flaxformer_mt.shapes import Array, Batch, Cache


class DecoderOnly(CachedDecoder):
    """Embedding, causal stack and output layer, which is tied unless `model.tying` is `none`.

    A source [5 6 2 0] and target_in [1 7 8 0], with padding 0, form the row 5 6 2 0 1 7 8 0 with positions
    0 1 2 - 3 4 5 -, in which padding has no position. With an empty source, [B, 0], the model is a language
    model. Parameter paths: token_embedding/embedding, decoder/layers_N/... (layers/... with scan_layers),
    output_kernel, output_bias.
    """

    size: int

    def setup(self) -> None:
        config = self.config
        self.token_embedding = make_embedding(config, self.size)
        self.decoder = Stack(
            config, self.kernels, config.num_decoder_layers, CausalBlock, deterministic_argument=4
        )
        self._setup_output(self.size)

    def __call__(self, batch: Batch, *, deterministic: bool) -> Array:
        """Compute the float32 logits [B, T, V] of the next token at each target position."""
        return self.logits(self.hidden(batch, deterministic=deterministic))

    def hidden(self, batch: Batch, *, deterministic: bool) -> Array:
        """Compute the output layer's input: the hidden states [B, T, D] at the target positions."""
        tokens = jnp.concatenate([batch.source, batch.target_in], axis=1)
        rule, positions = self._rule_and_positions(batch)
        embedded = self.token_embedding(tokens)
        packed = batch.target_segments is not None
        x = self.decoder.start(
            embedded, positions, length=tokens.shape[1], packed=packed, deterministic=deterministic
        )
        x = self.decoder.run(x, rule, self.decoder.rotary(positions), deterministic)
        return self._finish(x[:, batch.source.shape[1] :])

    def start_decoding(self, source: Array, source_mask: Array, beams: int, max_length: int) -> Cache:
        """Run the sources [B, S] through the model, and make a cache for up to `max_length` target tokens."""
        batch, length = source.shape
        per_beam = [block.empty_cache(batch, beams, max_length) for block in self.decoder.blocks()]
        positions = jnp.arange(length)[None]
        if self.config.padding_mask == "none":
            source_mask = jnp.ones_like(source_mask)
        rule = MaskRule(None, source_mask, causal=True)
        x = self.decoder.start(self.token_embedding(source), positions, length=length, deterministic=True)
        prefixes = []
        for block in self.decoder.blocks():
            x, prefix = block.read(x, rule, self.decoder.rotary(positions))
            prefixes.append(prefix)
        shared = {"prefix": prefixes, "source_mask": source_mask}
        ancestors = make_ancestors(batch, beams, max_length)
        return Cache(per_beam, shared, jnp.zeros((), jnp.int32), ancestors)

    @property
    def _output_embedding(self) -> Embedding | None:
        return None if self.config.tying == "none" else self.token_embedding

    def _step(self, tokens: Array, cache: Cache, step: Step, length: int) -> tuple[Array, list[Any]]:
        source_mask = cache.shared["source_mask"]
        positions = source_mask.sum(axis=1, dtype=jnp.int32)[:, None] + step.positions
        length += source_mask.shape[1]
        x = self.decoder.start(self.token_embedding(tokens), positions, length=length, deterministic=True)
        per_beam = []
        for block, block_cache, prefix in zip(
            self.decoder.blocks(), cache.per_beam, cache.shared["prefix"], strict=True
        ):
            prefix_mask = make_padding_mask(source_mask)
            block_step = step._replace(positions=self.decoder.rotary(positions))
            x, updated = block.step(x, block_cache, prefix, prefix_mask, block_step)
            per_beam.append(updated)
        return self._finish(x), per_beam

    def _rule_and_positions(self, batch: Batch) -> tuple[MaskRule, Array]:
        """Make the mask rule and the positions [B, N] of concatenated source and target, N = S + T."""
        source_length, target_length = batch.source.shape[1], batch.target_in.shape[1]
        if batch.target_segments is not None:
            assert batch.source_segments is not None and batch.source_positions is not None
            assert batch.target_positions is not None
            segments = jnp.concatenate([batch.source_segments, batch.target_segments], axis=1)
            same = batch.target_segments[:, :, None] == batch.source_segments[:, None, :]
            after_source = same.sum(axis=-1, dtype=jnp.int32) + batch.target_positions
            positions = jnp.concatenate([batch.source_positions, after_source], axis=1)
            return MaskRule(segments, segments, causal=True), positions
        if self.config.padding_mask == "none":  # padding is attended to like text
            return MaskRule(causal=True), jnp.arange(source_length + target_length)[None]
        target_mask = batch.target_mask
        if self.config.padding_mask == "source":
            target_mask = jnp.ones_like(target_mask)
        is_token = jnp.concatenate([batch.source_mask, target_mask], axis=1)
        source_lengths = jnp.asarray(batch.source_mask).sum(axis=1, dtype=jnp.int32)[:, None]
        source_index = jnp.broadcast_to(jnp.arange(source_length)[None], batch.source.shape)
        positions = jnp.concatenate([source_index, source_lengths + jnp.arange(target_length)[None]], axis=1)
        return MaskRule(None, is_token, causal=True), positions
