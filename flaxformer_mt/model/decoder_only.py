"""The decoder-only Transformer: one causal stack over source and target, or over a target alone.

Row 7 of the data path: token ids to logits, with the interface of EncoderDecoder. The start symbol of the
target separates source and target. Padding arrives as masks or segments; losses/ contains the losses.
"""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.model.attention import make_ancestors, make_ancestry_mask, make_prefix_inputs
from flaxformer_mt.model.bfloat16 import take_rows
from flaxformer_mt.model.blocks import CausalBlock
from flaxformer_mt.model.fused_attention import takes_rules
from flaxformer_mt.model.initializers import make_initializers
from flaxformer_mt.model.masks import MaskRule, make_causal_mask, make_padding_mask
from flaxformer_mt.model.quantization import find_output
from flaxformer_mt.model.stack import Stack, list_output, make_embedding, make_listed_logits, make_logits
from flaxformer_mt.shapes import Array, Batch, Cache, SharedByRows, share_by_rows


class DecoderOnly(nn.Module):
    """Embedding, causal stack and output layer, tied unless `model.tying` is none.

    A source [5 6 2 0] and target_in [1 7 8 0], with padding 0, form the row 5 6 2 0 1 7 8 0 with positions
    0 1 2 - 3 4 5 -: padding between source and target takes no position. With an empty source, [B, 0], the
    model is a language model. Parameter paths: token_embedding/embedding, decoder/layers_N/... (layers/...
    with scan_layers), output_kernel, output_bias.
    """

    config: ModelConfig
    size: int

    def setup(self) -> None:
        config = self.config
        self.token_embedding = make_embedding(config, self.size)
        self.decoder = Stack(config, config.num_decoder_layers, CausalBlock, deterministic_argument=4)
        initializers = make_initializers(config)
        if config.tying == "none":
            self.output_kernel = self.param(
                "output_kernel", initializers.output, (config.model_dim, self.size)
            )
        if config.output_bias:
            init = initializers.bias(config.model_dim)
            self.output_bias = self.param("output_bias", init, (self.size,))

    def __call__(self, batch: Batch, *, deterministic: bool) -> Array:
        """Compute float32 logits [B, T, V] of every next target token."""
        return self.logits(self.hidden(batch, deterministic=deterministic))

    def hidden(self, batch: Batch, *, deterministic: bool) -> Array:
        """Compute the hidden states [B, T, D] of the target positions, the input of the output layer."""
        tokens = jnp.concatenate([batch.source, batch.target_in], axis=1)
        mask, positions = self._mask_and_positions(batch)
        embedded = self.token_embedding(tokens)
        packed = batch.target_segments is not None
        x = self.decoder.start(
            embedded, positions, length=tokens.shape[1], packed=packed, deterministic=deterministic
        )
        x = self.decoder.run(x, mask, self.decoder.rotary(positions), deterministic)
        return self._finish(x[:, batch.source.shape[1] :])

    def start_decoding(self, source: Array, source_mask: Array, beams: int, max_length: int) -> Cache:
        """Run the sources [B, S] (prefill) and make the cache for up to `max_length` target tokens."""
        batch, length = source.shape
        per_beam = [block.empty_cache(batch, beams, max_length) for block in self.decoder.blocks()]
        positions = jnp.arange(length)[None]
        mask = make_causal_mask(length)
        if self.config.padding_mask != "none":
            mask = mask & make_padding_mask(source_mask)
        else:
            source_mask = jnp.ones_like(source_mask)
        x = self.decoder.start(self.token_embedding(source), positions, length=length, deterministic=True)
        prefixes = []
        for block in self.decoder.blocks():
            x, prefix = block.read(x, mask, self.decoder.rotary(positions))
            prefixes.append(prefix)
        shared = {"prefix": prefixes, "source_mask": source_mask}
        ancestors = make_ancestors(batch, beams, max_length)
        return Cache(per_beam, shared, jnp.zeros((), jnp.int32), ancestors)

    def decode_step(
        self, tokens: Array, cache: Cache, common: tuple[Array, Array | None] | None = None
    ) -> tuple[Array, Cache]:
        """Feed one token per beam, [B, W]; return the next logits [B, W, V] and the updated cache.

        With the output layer of `common` tokens, the logits are those of shortlists (`add_shortlists`).
        """
        capacity = cache.per_beam[0]["keys"].shape[3] // tokens.shape[1]
        mask = make_ancestry_mask(cache, beams=tokens.shape[1], length=capacity)
        slot = cache.index % capacity
        hidden, per_beam = self._step(tokens, cache, cache.prefix_lengths(), mask, slot=slot, length=capacity)
        if common is None:
            logits = self.logits(hidden)
        else:
            logits = make_listed_logits(hidden, cache.shared["output"], common)
        return logits, cache._replace(per_beam=per_beam, index=cache.index + 1)

    def add_shortlists(self, cache: Cache, tokens: Array) -> Cache:
        """Return the cache with the output layer of each row's tokens; see `EncoderDecoder`."""
        return cache._replace(shared=cache.shared | {"output": list_output(*self.output_layer(), tokens)})

    def take_output(self, ids: Array) -> tuple[Array, Array | None]:
        """Return the rows [N, D] of the output layer's table, and the biases [N], of tokens [N]."""
        table, bias = self.output_layer()
        return take_rows(table, ids), None if bias is None else bias[ids]

    def read_prefix(self, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        """Feed the first tokens of one beam at once, [B, P]; see `EncoderDecoder.read_prefix`."""
        length, capacity = tokens.shape[1], cache.per_beam[0]["keys"].shape[3]
        positions, mask = make_prefix_inputs(cache, length=length, capacity=capacity)
        hidden, per_beam = self._step(tokens, cache, positions, mask, slot=cache.index, length=length)
        return self.logits(hidden), cache._replace(per_beam=per_beam, index=cache.index + length)

    def _step(
        self, tokens: Array, cache: Cache, positions: Array, mask: Array, *, slot: Array, length: int
    ) -> tuple[Array, list[Any]]:
        """Run tokens [B, W] at their positions after the source, all < length; return states, caches."""
        source_mask = cache.shared["source_mask"]
        positions = source_mask.sum(axis=1, dtype=jnp.int32)[:, None] + positions
        length += source_mask.shape[1]
        x = self.decoder.start(self.token_embedding(tokens), positions, length=length, deterministic=True)
        per_beam = []
        for block, block_cache, prefix in zip(
            self.decoder.blocks(), cache.per_beam, cache.shared["prefix"], strict=True
        ):
            x, updated = block.step(
                x,
                block_cache,
                prefix,
                index=slot,
                prefix_mask=make_padding_mask(source_mask),
                positions=self.decoder.rotary(positions),
                ancestry_mask=mask,
            )
            per_beam.append(updated)
        return self._finish(x), per_beam

    def logits(self, x: Array) -> Array:
        """Compute float32 logits [..., V] of hidden states x [..., D]."""
        table, bias = self.output_layer()
        quantized = find_output(self.variables["params"])
        return make_logits(x, table if quantized is None else quantized, bias)

    def output_layer(self) -> tuple[Array, Array | None]:
        """Return the matrix [V, D] and the bias [V] that map hidden states to logits."""
        table, bias = self.shared_output_layer()
        return table.whole, bias

    def shared_output_layer(self) -> tuple[SharedByRows, Array | None]:
        """Return the output layer with the copies of its matrix that the embedding uses, too."""
        bias = self.output_bias if self.config.output_bias else None
        if self.config.tying == "none":
            return share_by_rows(self.output_kernel.T, "VD"), bias
        return self.token_embedding.table, bias

    def _finish(self, x: Array) -> Array:
        x = self.decoder.finish(x)
        return x * self.config.model_dim**-0.5 if self.config.logit_scale else x

    def _mask_and_positions(self, batch: Batch) -> tuple[Array | MaskRule | None, Array]:
        """Make the mask [B, 1, N, N] and positions [B, N] of source and target concatenated, N = S + T."""
        source_length, target_length = batch.source.shape[1], batch.target_in.shape[1]
        length = source_length + target_length
        if batch.target_segments is not None:
            assert batch.source_segments is not None and batch.source_positions is not None
            assert batch.target_positions is not None
            segments = jnp.concatenate([batch.source_segments, batch.target_segments], axis=1)
            same = batch.target_segments[:, :, None] == batch.source_segments[:, None, :]
            after_source = same.sum(axis=-1, dtype=jnp.int32) + batch.target_positions
            positions = jnp.concatenate([batch.source_positions, after_source], axis=1)
            return self._mask(MaskRule(segments, segments, causal=True), length), positions
        if self.config.padding_mask == "none":  # padding is attended to like text
            return self._mask(MaskRule(causal=True), length), jnp.arange(length)[None]
        target_mask = batch.target_mask
        if self.config.padding_mask == "source":
            target_mask = jnp.ones_like(target_mask)
        is_token = jnp.concatenate([batch.source_mask, target_mask], axis=1)
        source_lengths = jnp.asarray(batch.source_mask).sum(axis=1, dtype=jnp.int32)[:, None]
        source_index = jnp.broadcast_to(jnp.arange(source_length)[None], batch.source.shape)
        positions = jnp.concatenate([source_index, source_lengths + jnp.arange(target_length)[None]], axis=1)
        return self._mask(MaskRule(None, is_token, causal=True), length), positions

    def _mask(self, rule: MaskRule, length: int) -> Array | MaskRule | None:
        """Make the mask of `length` queries, or leave it to the kernel that computes attention."""
        return rule if takes_rules(self.config.attention) else rule.dense(length)
