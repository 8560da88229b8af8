"""The blocks of the stacks: self-attention, cross-attention, feed-forward, and their residual connections.

Blocks map hidden states to hidden states; stack.py embeds tokens and computes logits.
"""

from typing import Any

from flax import linen as nn

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.kernels import Kernels, MaskRule
from flaxformer_mt.model.attention import MultiHeadAttention
from flaxformer_mt.model.feedforward import FeedForward
from flaxformer_mt.model.layers import Residual
from flaxformer_mt.model.recurrence import Continuation, SimplerRecurrence, find_starts
from flaxformer_mt.shapes import Array


class EncoderBlock(nn.Module):
    """Encoder block: self-attention and feed-forward."""

    config: ModelConfig
    kernels: Kernels

    def setup(self) -> None:
        self.self_attention = MultiHeadAttention(self.config, self.kernels)
        self.self_attention_residual = Residual(self.config)
        self.feedforward = FeedForward(self.config, self.kernels)
        self.feedforward_residual = Residual(self.config)

    def __call__(self, x: Array, mask: MaskRule, positions: Array | None, deterministic: bool) -> Array:
        """Map x [B, S, D] to [B, S, D]."""

        def attend(y: Array) -> Array:
            return self.self_attention(y, y, mask=mask, positions=positions, deterministic=deterministic)

        x = self.self_attention_residual(x, attend, deterministic=deterministic)
        return self.feedforward_residual(
            x, lambda y: self.feedforward(y, deterministic=deterministic), deterministic=deterministic
        )


class CausalBlock(EncoderBlock):
    """Decoder-only block: self-attention and feed-forward, with a cache for decoding token by token."""

    def empty_cache(self, batch: int, beams: int, max_length: int) -> dict[str, Array]:
        """Make an empty self-attention cache for `max_length` tokens."""
        return self.self_attention.empty_cache(batch, beams, max_length)

    def read(self, x: Array, mask: MaskRule, positions: Array | None) -> tuple[Array, dict[str, Array]]:
        """Run a prefix x [B, S, D] (prefill); return the output and the keys and values for later tokens."""
        keys_and_values: dict[str, Array] = {}

        def attend(y: Array) -> Array:
            keys_and_values.update(self.self_attention.project_memory(y, positions))
            return self.self_attention(y, y, mask=mask, positions=positions, deterministic=True)

        x = self.self_attention_residual(x, attend, deterministic=True)
        x = self.feedforward_residual(
            x, lambda y: self.feedforward(y, deterministic=True), deterministic=True
        )
        return x, keys_and_values

    def step(
        self,
        x: Array,
        cache: dict[str, Array],
        prefix: dict[str, Array],
        *,
        index: Array,
        prefix_mask: Array,
        positions: Array | None,
        ancestry_mask: Array,
    ) -> tuple[Array, dict[str, Any]]:
        """Run one token per beam, x [B, W, D], after a prefix; return the output and the updated cache."""
        updated: dict[str, Any] = {}

        def attend(y: Array) -> Array:
            attended, new_cache = self.self_attention.step(
                y,
                cache,
                index,
                positions=positions,
                prefix=prefix,
                prefix_mask=prefix_mask,
                ancestry_mask=ancestry_mask,
            )
            updated.update(new_cache)
            return attended

        x = self.self_attention_residual(x, attend, deterministic=True)
        x = self.feedforward_residual(
            x, lambda y: self.feedforward(y, deterministic=True), deterministic=True
        )
        return x, updated


class DecoderBlock(nn.Module):
    """Decoder block: causal self-attention, cross-attention to the encoder output, and feed-forward."""

    config: ModelConfig
    kernels: Kernels

    def setup(self) -> None:
        self._setup_target()
        self.cross_attention = MultiHeadAttention(self.config, self.kernels)
        self.cross_attention_residual = Residual(self.config)
        self.feedforward = FeedForward(self.config, self.kernels)
        self.feedforward_residual = Residual(self.config)

    def _setup_target(self) -> None:
        self.self_attention = MultiHeadAttention(self.config, self.kernels)
        self.self_attention_residual = Residual(self.config)

    def __call__(
        self,
        x: Array,
        memory: Array,
        self_mask: MaskRule,
        cross_mask: MaskRule,
        positions: Array | None,
        deterministic: bool,
    ) -> Array:
        """Map x [B, T, D] to [B, T, D], with cross-attention to memory [B, S, D]."""

        def attend_memory(y: Array) -> Array:
            self.cross_attention.store_head(y, memory)
            return self.cross_attention(y, memory, mask=cross_mask, deterministic=deterministic)

        x = self._read_target(x, self_mask, positions, deterministic)
        x = self.cross_attention_residual(x, attend_memory, deterministic=deterministic)
        return self.feedforward_residual(
            x, lambda y: self.feedforward(y, deterministic=deterministic), deterministic=deterministic
        )

    def _read_target(self, x: Array, mask: MaskRule, positions: Array | None, deterministic: bool) -> Array:
        """Run the first sublayer, which reads the earlier target tokens."""

        def attend(y: Array) -> Array:
            return self.self_attention(y, y, mask=mask, positions=positions, deterministic=deterministic)

        return self.self_attention_residual(x, attend, deterministic=deterministic)

    def project_memory(self, memory: Array) -> dict[str, Array]:
        """Project the memory to the keys and values of cross-attention, once per source."""
        return self.cross_attention.project_memory(memory)

    def empty_cache(self, batch: int, beams: int, max_length: int) -> dict[str, Array]:
        """Make an empty self-attention cache for `max_length` tokens."""
        return self.self_attention.empty_cache(batch, beams, max_length)

    def step(
        self,
        x: Array,
        cache: dict[str, Array],
        memory: dict[str, Array],
        *,
        index: Array,
        cross_mask: Array | None,
        positions: Array | None,
        ancestry: Array | Continuation,
    ) -> tuple[Array, dict[str, Any]]:
        """Run one token per beam, x [B, W, D]; return the output and the updated cache.

        Args:
          ancestry: which cached tokens belong to each hypothesis, as its first sublayer reads them.
        """
        x, updated = self._step_target(x, cache, index, positions, ancestry)
        x = self.cross_attention_residual(
            x, lambda y: self.cross_attention.attend_memory(y, memory, mask=cross_mask), deterministic=True
        )
        x = self.feedforward_residual(
            x, lambda y: self.feedforward(y, deterministic=True), deterministic=True
        )
        return x, updated

    def _step_target(
        self, x: Array, cache: dict[str, Array], index: Array, positions: Array | None, ancestry: Any
    ) -> tuple[Array, dict[str, Any]]:
        updated: dict[str, Any] = {}

        def attend(y: Array) -> Array:
            attended, new_cache = self.self_attention.step(
                y, cache, index, positions=positions, ancestry_mask=ancestry
            )
            updated.update(new_cache)
            return attended

        return self.self_attention_residual(x, attend, deterministic=True), updated


class RecurrentDecoderBlock(DecoderBlock):
    """Decoder block whose first sublayer is a recurrence (SSRU) instead of causal self-attention.

    Of a mask it reads the starts of sentences, and it uses no positions.
    """

    def _setup_target(self) -> None:
        self.recurrence = SimplerRecurrence(self.config, self.kernels)
        self.recurrence_residual = Residual(self.config)

    def _read_target(self, x: Array, mask: MaskRule, positions: Array | None, deterministic: bool) -> Array:
        starts = find_starts(mask.query_segments)
        return self.recurrence_residual(x, lambda y: self.recurrence(y, starts), deterministic=deterministic)

    def empty_cache(self, batch: int, beams: int, max_length: int) -> dict[str, Array]:
        """Make the recurrent states before the first token, whatever `max_length`."""
        return self.recurrence.empty_cache(batch, beams)

    def _step_target(
        self, x: Array, cache: dict[str, Array], index: Array, positions: Array | None, ancestry: Any
    ) -> tuple[Array, dict[str, Any]]:
        updated: dict[str, Any] = {}

        def recur(y: Array) -> Array:
            output, new_cache = self.recurrence.step(y, cache, ancestry)
            updated.update(new_cache)
            return output

        return self.recurrence_residual(x, recur, deterministic=True), updated
