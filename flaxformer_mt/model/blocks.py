"""The blocks of the stacks: self-attention, cross-attention, feed-forward, and their residuals.

Blocks take the ModelConfig and arrays; they know nothing of tokens.
"""

from typing import Any

from flax import linen as nn

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.model.attention import MultiHeadAttention
from flaxformer_mt.model.feedforward import FeedForward
from flaxformer_mt.model.layers import Residual
from flaxformer_mt.shapes import Array


class EncoderBlock(nn.Module):
    """Self-attention and feed-forward."""

    config: ModelConfig

    def setup(self) -> None:
        self.self_attention = MultiHeadAttention(self.config)
        self.self_attention_residual = Residual(self.config)
        self.feedforward = FeedForward(self.config)
        self.feedforward_residual = Residual(self.config)

    def __call__(self, x: Array, mask: Array | None, positions: Array | None, deterministic: bool) -> Array:
        """x [B, S, D] -> [B, S, D]."""

        def attend(y: Array) -> Array:
            return self.self_attention(y, y, mask=mask, positions=positions, deterministic=deterministic)

        x = self.self_attention_residual(x, attend, deterministic=deterministic)
        return self.feedforward_residual(
            x, lambda y: self.feedforward(y, deterministic=deterministic), deterministic=deterministic
        )


class CausalBlock(EncoderBlock):
    """Self-attention and feed-forward, as in the encoder, with a cache for reading a token at a time."""

    def empty_cache(self, batch: int, beams: int, max_length: int) -> dict[str, Array]:
        """Room for the self-attention of `max_length` tokens."""
        return self.self_attention.empty_cache(batch, beams, max_length)

    def read(self, x: Array, mask: Array, positions: Array | None) -> tuple[Array, dict[str, Array]]:
        """A prefix x [B, S, D] as in a call, and its keys and values, which the tokens after it attend to."""
        kept: dict[str, Array] = {}

        def attend(y: Array) -> Array:
            kept.update(self.self_attention.project_memory(y, positions))
            return self.self_attention(y, y, mask=mask, positions=positions, deterministic=True)

        x = self.self_attention_residual(x, attend, deterministic=True)
        x = self.feedforward_residual(
            x, lambda y: self.feedforward(y, deterministic=True), deterministic=True
        )
        return x, kept

    def step(
        self,
        x: Array,
        cache: dict[str, Array],
        prefix: dict[str, Array],
        *,
        index: Array,
        prefix_mask: Array,
        positions: Array | None,
        lineage: Array,
    ) -> tuple[Array, dict[str, Any]]:
        """One token of every beam, x [B, W, D], after a prefix; with the cache before it and after it."""
        grown: dict[str, Any] = {}

        def attend(y: Array) -> Array:
            mixed, after = self.self_attention.step(
                y,
                cache,
                index,
                positions=positions,
                prefix=prefix,
                prefix_mask=prefix_mask,
                lineage=lineage,
            )
            grown.update(after)
            return mixed

        x = self.self_attention_residual(x, attend, deterministic=True)
        x = self.feedforward_residual(
            x, lambda y: self.feedforward(y, deterministic=True), deterministic=True
        )
        return x, grown


class DecoderBlock(nn.Module):
    """Causal self-attention, attention to the encoder's memory, and feed-forward."""

    config: ModelConfig

    def setup(self) -> None:
        self.self_attention = MultiHeadAttention(self.config)
        self.self_attention_residual = Residual(self.config)
        self.cross_attention = MultiHeadAttention(self.config)
        self.cross_attention_residual = Residual(self.config)
        self.feedforward = FeedForward(self.config)
        self.feedforward_residual = Residual(self.config)

    def __call__(
        self,
        x: Array,
        memory: Array,
        self_mask: Array,
        cross_mask: Array | None,
        positions: Array | None,
        deterministic: bool,
    ) -> Array:
        """x [B, T, D] over memory [B, S, D] -> [B, T, D]."""

        def attend_self(y: Array) -> Array:
            return self.self_attention(y, y, mask=self_mask, positions=positions, deterministic=deterministic)

        def attend_memory(y: Array) -> Array:
            return self.cross_attention(y, memory, mask=cross_mask, deterministic=deterministic)

        x = self.self_attention_residual(x, attend_self, deterministic=deterministic)
        x = self.cross_attention_residual(x, attend_memory, deterministic=deterministic)
        return self.feedforward_residual(
            x, lambda y: self.feedforward(y, deterministic=deterministic), deterministic=deterministic
        )

    def project_memory(self, memory: Array) -> dict[str, Array]:
        """Cross-attention keys and values of the memory, computed once a source."""
        return self.cross_attention.project_memory(memory)

    def empty_cache(self, batch: int, beams: int, max_length: int) -> dict[str, Array]:
        """Room for the self-attention of `max_length` tokens."""
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
        lineage: Array,
    ) -> tuple[Array, dict[str, Any]]:
        """One token of every beam, x [B, W, D], with the cache before it and the cache after it."""
        grown: dict[str, Any] = {}

        def attend_self(y: Array) -> Array:
            mixed, after = self.self_attention.step(y, cache, index, positions=positions, lineage=lineage)
            grown.update(after)
            return mixed

        x = self.self_attention_residual(x, attend_self, deterministic=True)
        x = self.cross_attention_residual(
            x, lambda y: self.cross_attention.attend_memory(y, memory, mask=cross_mask), deterministic=True
        )
        x = self.feedforward_residual(
            x, lambda y: self.feedforward(y, deterministic=True), deterministic=True
        )
        return x, grown
