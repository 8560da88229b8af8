"""The encoder-decoder Transformer (Vaswani et al. 2017), with its cached decoding step.

Row 7 of the data path: token ids to logits. Padding arrives as masks or segments; losses/ contains the
losses.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.model.attention import make_ancestors, make_ancestry_mask, make_prefix_inputs
from flaxformer_mt.model.bfloat16 import take_rows
from flaxformer_mt.model.blocks import DecoderBlock, EncoderBlock, RecurrentDecoderBlock
from flaxformer_mt.model.fused_attention import takes_rules
from flaxformer_mt.model.initializers import make_initializers
from flaxformer_mt.model.masks import MaskRule, make_padding_mask
from flaxformer_mt.model.quantization import find_output
from flaxformer_mt.model.recurrence import Continuation, continue_beams, continue_prefix, find_starts
from flaxformer_mt.model.stack import Stack, list_output, make_embedding, make_listed_logits, make_logits
from flaxformer_mt.model.unpadding import BatchPlaces, Mask, TokenPlaces, UnpaddedMask, remove_padding
from flaxformer_mt.shapes import Array, Batch, Cache, SharedByRows, share_by_rows, tokens_of_slots


class EncoderDecoder(nn.Module):
    """Encoder, decoder, embeddings and output layer, tied as `model.tying` says.

    Parameter paths: {shared,source,target}_embedding/embedding, {encoder,decoder}/layers_N/... (layers/...
    with scan_layers), output_kernel, output_bias.
    """

    config: ModelConfig
    source_size: int
    target_size: int

    def setup(self) -> None:
        config = self.config
        if config.tying in ("all", "embeddings"):
            self.shared_embedding = make_embedding(config, self.target_size)
        else:
            self.source_embedding = make_embedding(config, self.source_size)
            self.target_embedding = make_embedding(config, self.target_size)
        self.encoder = Stack(config, config.num_encoder_layers, EncoderBlock, deterministic_argument=4)
        block = RecurrentDecoderBlock if self._is_recurrent else DecoderBlock
        self.decoder = Stack(config, config.num_decoder_layers, block, deterministic_argument=6)
        initializers = make_initializers(config)
        if config.tying in ("none", "embeddings"):
            self.output_kernel = self.param(
                "output_kernel", initializers.output, (config.model_dim, self.target_size)
            )
        if config.output_bias:
            init = initializers.bias(config.model_dim)
            self.output_bias = self.param("output_bias", init, (self.target_size,))

    def __call__(self, batch: Batch, *, deterministic: bool) -> Array:
        """Compute float32 logits [B, T, V] of every next target token."""
        return self.logits(self.hidden(batch, deterministic=deterministic))

    def hidden(self, batch: Batch, *, deterministic: bool, places: BatchPlaces | None = None) -> Array:
        """Compute the hidden states [B, T, D] of the decoder, the input of the output layer.

        Args:
          places: where the tokens of the batch are, to compute them without padding: [R, N, D].
        """
        source_mask, cross_mask, self_mask = self._masks(batch, places)
        source_places, target_places = (None, None) if places is None else places
        memory = self._encode(
            batch.source,
            batch.source_mask,
            source_mask,
            positions=batch.source_positions,
            places=source_places,
            deterministic=deterministic,
        )
        return self._decode(
            batch.target_in,
            memory,
            self_mask=self_mask,
            cross_mask=cross_mask,
            positions=batch.target_positions,
            places=target_places,
            deterministic=deterministic,
        )

    def _masks(self, batch: Batch, places: BatchPlaces | None) -> tuple[Mask, Mask, Mask]:
        """Make the masks of attention in the encoder, of cross-attention, and of causal attention."""
        cross_rule = self._cross_rule(batch)
        if batch.source_segments is None or batch.target_segments is None:
            source_rule = cross_rule
            reads_padding = self.config.padding_mask != "both"
            self_rule = MaskRule(None, None if reads_padding else batch.target_mask, True, True)
        else:
            source_rule = MaskRule(batch.source_segments, batch.source_segments)
            self_rule = MaskRule(batch.target_segments, batch.target_segments, causal=True)
        source, target = batch.source.shape[1], batch.target_in.shape[1]
        of_source, of_cross = self._mask(source_rule, source), self._mask(cross_rule, target)
        of_target = self._target_mask(self_rule, target)
        if places is None:
            return of_source, of_cross, of_target
        return (
            UnpaddedMask(of_source, places.source, places.source),
            UnpaddedMask(of_cross, places.target, places.source),
            UnpaddedMask(of_target, places.target, places.target),
        )

    def cross_mask(self, batch: Batch) -> Array | None:
        """Make the mask of cross-attention, broadcastable to [B, 1, T, S]."""
        return self._cross_rule(batch).dense(batch.target_in.shape[1])

    def _cross_rule(self, batch: Batch) -> MaskRule:
        if batch.source_segments is None or batch.target_segments is None:
            return self._padding_rule(batch.source_mask)
        return MaskRule(batch.target_segments, batch.source_segments)

    def embed_target(self, batch: Batch) -> Array:
        """Compute the vectors [B, T, D] of target tokens and positions, the input of the first layer."""
        length = batch.target_in.shape[1]
        embedded = self._embed_target(batch.target_in)
        return self.decoder.start(embedded, jnp.arange(length)[None], length=length, deterministic=True)

    def encode(self, source: Array, source_mask: Array) -> Array:
        """Encode sources [B, S], one per row, to memory [B, S, D]."""
        mask = self._mask(self._padding_rule(source_mask), source.shape[1])
        return self._encode(source, source_mask, mask, positions=None, deterministic=True)

    def decode(self, target_in: Array, memory: Array, source_mask: Array) -> Array:
        """Compute logits [B, T, V] of target prefixes [B, T] over a memory, all positions in parallel."""
        x = self._decode(
            target_in,
            memory,
            self_mask=self._target_mask(MaskRule(causal=True), target_in.shape[1]),
            cross_mask=self._mask(self._padding_rule(source_mask), target_in.shape[1]),
            positions=None,
            deterministic=True,
        )
        return self.logits(x)

    def start_decoding(self, source: Array, source_mask: Array, beams: int, max_length: int) -> Cache:
        """Encode sources [B, S] and make the cache for up to `max_length` target tokens."""
        return self.start_cache(self.encode(source, source_mask), source_mask, beams, max_length)

    def start_cache(self, memory: Array, source_mask: Array, beams: int, max_length: int) -> Cache:
        """Make the cache for up to `max_length` target tokens, with the keys and values of each source."""
        blocks = self.decoder.blocks()
        per_beam = [block.empty_cache(memory.shape[0], beams, max_length) for block in blocks]
        shared = {"memory": [block.project_memory(memory) for block in blocks], "source_mask": source_mask}
        ancestors = make_ancestors(memory.shape[0], beams, max_length)
        return Cache(per_beam, shared, jnp.zeros((), jnp.int32), ancestors)

    def decode_step(
        self, tokens: Array, cache: Cache, common: tuple[Array, Array | None] | None = None
    ) -> tuple[Array, Cache]:
        """Feed one token per beam, [B, W]; return the next logits [B, W, V] and the updated cache.

        With the output layer of `common` tokens, the logits are those of shortlists (`add_shortlists`).
        """
        beams, length = tokens.shape[1], self._capacity(cache, tokens.shape[1])
        ancestry_of = continue_beams if self._is_recurrent else make_ancestry_mask
        ancestry = ancestry_of(cache, beams=beams, length=length)
        slot = cache.index % length
        positions = cache.prefix_lengths()
        hidden, per_beam = self._step(tokens, cache, positions, ancestry, slot=slot, length=length)
        if common is None:
            logits = self.logits(hidden)
        else:
            logits = make_listed_logits(hidden, cache.shared["output"], common)
        return logits, cache._replace(per_beam=per_beam, index=cache.index + 1)

    def add_shortlists(self, cache: Cache, tokens: Array) -> Cache:
        """Return the cache with the output layer of each row's tokens [B, C]: ids plus 1; 0: padding."""
        return cache._replace(shared=cache.shared | {"output": list_output(*self.output_layer(), tokens)})

    def take_output(self, ids: Array) -> tuple[Array, Array | None]:
        """Return the rows [N, D] of the output layer's table, and the biases [N], of tokens [N]."""
        table, bias = self.output_layer()
        return take_rows(table, ids), None if bias is None else bias[ids]

    def read_prefix(self, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        """Feed the first tokens of one beam at once, [B, P]; return the logits after each, and the cache.

        The cache is empty, of one beam; the tokens of row b begin at step start_steps[b] (right-aligned).
        """
        length, capacity = tokens.shape[1], self._capacity(cache, 1)
        ancestry: Array | Continuation
        positions, ancestry = make_prefix_inputs(cache, length=length, capacity=capacity)
        if self._is_recurrent:
            ancestry = continue_prefix(cache, length=length)
        # The slots of P tokens of one beam are those of one token of P beams: a single step writes them.
        hidden, per_beam = self._step(tokens, cache, positions, ancestry, slot=cache.index, length=length)
        return self.logits(hidden), cache._replace(per_beam=per_beam, index=cache.index + length)

    @property
    def _is_recurrent(self) -> bool:
        return self.config.decoder_self_attention == "ssru"

    def _capacity(self, cache: Cache, beams: int) -> int:
        """Return the number of target tokens that a cache is made for."""
        if cache.ancestors is not None:
            return cache.ancestors.shape[2]
        if self._is_recurrent:
            raise ValueError("a recurrent decoder needs Cache.ancestors, as `start_cache` makes them")
        return cache.per_beam[0]["keys"].shape[3] // beams

    def _target_mask(self, rule: MaskRule, length: int) -> Array | MaskRule | None:
        """Make the mask of self-attention; for a recurrence, the starts of sentences, of packed rows only."""
        if self._is_recurrent:
            return find_starts(rule.query_segments)
        return self._mask(rule, length)

    def _step(
        self,
        tokens: Array,
        cache: Cache,
        positions: Array,
        ancestry: Array | Continuation,
        *,
        slot: Array,
        length: int,
    ) -> tuple[Array, list[Any]]:
        """Run tokens [B, W] at their positions, all < length; return hidden states and new caches."""
        x = self.decoder.start(self._embed_target(tokens), positions, length=length, deterministic=True)
        cross_mask = self._padding(cache.shared["source_mask"])
        per_beam = []
        for block, block_cache, memory in zip(
            self.decoder.blocks(), cache.per_beam, cache.shared["memory"], strict=True
        ):
            x, updated = block.step(
                x,
                block_cache,
                memory,
                index=slot,
                cross_mask=cross_mask,
                positions=self.decoder.rotary(positions),
                ancestry=ancestry,
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
        """Return the output layer with the copies of its matrix that embeddings use, too."""
        bias = self.output_bias if self.config.output_bias else None
        if self.config.tying in ("none", "embeddings"):
            return share_by_rows(self.output_kernel.T, "VD"), bias
        tied = self.shared_embedding if self.config.tying == "all" else self.target_embedding
        return tied.table, bias

    def _mask(self, rule: MaskRule, length: int) -> Array | MaskRule | None:
        """Make the mask of `length` queries, or leave it to the kernel that computes attention."""
        return rule if takes_rules(self.config.attention) else rule.dense(length)

    def _padding_rule(self, is_token: Array) -> MaskRule:
        return MaskRule(None, None if self.config.padding_mask == "none" else is_token, padded_at_end=True)

    def _padding(self, is_token: Array) -> Array | None:
        return None if self.config.padding_mask == "none" else make_padding_mask(is_token)

    def _embed_source(self, ids: Array, is_token: Array) -> Array:
        shared = self.config.tying in ("all", "embeddings")
        embedded = self.shared_embedding(ids) if shared else self.source_embedding(ids)
        if self.config.padding_mask == "none":
            # Padding is read but not trained, as with padding_idx in PyTorch. Masks stop its gradient
            # elsewhere; target padding has no loss, and no token attends to it.
            embedded = jnp.where(is_token[..., None], embedded, jax.lax.stop_gradient(embedded))
        return embedded

    def _embed_target(self, ids: Array) -> Array:
        shared = self.config.tying in ("all", "embeddings")
        return self.shared_embedding(ids) if shared else self.target_embedding(ids)

    def _encode(
        self,
        source: Array,
        is_token: Array,
        mask: Mask,
        *,
        positions: Array | None,
        places: TokenPlaces | None = None,
        deterministic: bool,
    ) -> Array:
        length, packed = source.shape[1], positions is not None
        positions = jnp.arange(length)[None] if positions is None else positions
        if places is not None:
            source, is_token, positions = _take_tokens(places, source, is_token, positions)
        with tokens_of_slots(None if places is None else places.slots):
            embedded = self._embed_source(source, is_token)
            options: dict[str, Any] = {"length": length, "packed": packed, "deterministic": deterministic}
            x = self.encoder.start(embedded, positions, **options)
            x = self.encoder.run(x, mask, self.encoder.rotary(positions), deterministic)
            return self.encoder.finish(x)

    def _decode(
        self,
        target_in: Array,
        memory: Array,
        *,
        self_mask: Mask,
        cross_mask: Mask,
        positions: Array | None,
        places: TokenPlaces | None = None,
        deterministic: bool,
    ) -> Array:
        length, packed = target_in.shape[1], positions is not None
        positions = jnp.arange(length)[None] if positions is None else positions
        if places is not None:
            target_in, positions = _take_tokens(places, target_in, positions)
        with tokens_of_slots(None if places is None else places.slots):
            embedded = self._embed_target(target_in)
            options: dict[str, Any] = {"length": length, "packed": packed, "deterministic": deterministic}
            x = self.decoder.start(embedded, positions, **options)
            rotary = self.decoder.rotary(positions)
            x = self.decoder.run(x, memory, self_mask, cross_mask, rotary, deterministic)
            return self._finish(x)

    def _finish(self, x: Array) -> Array:
        x = self.decoder.finish(x)
        return x * self.config.model_dim**-0.5 if self.config.logit_scale else x


def _take_tokens(places: TokenPlaces, *arrays: Array) -> list[Array]:
    """Take the entries [R, N] of arrays [B, T], or [1, T] if all rows are alike."""
    shape = places.entries.shape
    return [remove_padding(jnp.broadcast_to(array, shape), places) for array in arrays]
