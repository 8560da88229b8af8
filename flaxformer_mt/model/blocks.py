"""Transformer blocks: self-attention, cross-attention, feed-forward, and their residual connections."""

from flax import linen as nn

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.kernels import Kernels, MaskRule
from flaxformer_mt.model.attention import MultiHeadAttention, Step
from flaxformer_mt.model.feedforward import FeedForward
from flaxformer_mt.model.layers import Residual
from flaxformer_mt.model.recurrence import SimplerRecurrence, find_starts
from flaxformer_mt.shapes import Array

# The cached arrays of a block, by name.
BlockCache = dict[str, Array]


class Block(nn.Module):
    """The base class of blocks: the first sublayer combines tokens, and the last is feed-forward."""

    config: ModelConfig
    kernels: Kernels

    def setup(self) -> None:
        self._setup_reading()
        self._setup_feedforward()

    def _setup_reading(self) -> None:
        self.self_attention = MultiHeadAttention(self.config, self.kernels)
        self.self_attention_residual = Residual(self.config, self.kernels)

    def _setup_feedforward(self) -> None:
        self.feedforward = FeedForward(self.config, self.kernels)
        self.feedforward_residual = Residual(self.config, self.kernels)

    def empty_cache(self, batch: int, beams: int, max_length: int) -> BlockCache:
        return self.self_attention.empty_cache(batch, beams, max_length)

    def _read(self, x: Array, mask: MaskRule, positions: Array | None, deterministic: bool) -> Array:
        """Run the first sublayer, which reads other tokens, on all tokens."""
        y = self.self_attention_residual.before(x)
        y = self.self_attention(y, y, mask=mask, positions=positions, deterministic=deterministic)
        return self.self_attention_residual.after(x, y, deterministic=deterministic)

    def _feed(self, x: Array, deterministic: bool) -> Array:
        y = self.feedforward(self.feedforward_residual.before(x), deterministic=deterministic)
        return self.feedforward_residual.after(x, y, deterministic=deterministic)


class EncoderBlock(Block):
    """Encoder block: self-attention and feed-forward."""

    def __call__(self, x: Array, mask: MaskRule, positions: Array | None, deterministic: bool) -> Array:
        """Map x [B, S, D] to [B, S, D]."""
        return self._feed(self._read(x, mask, positions, deterministic), deterministic)


class CausalBlock(EncoderBlock):
    """Decoder-only block: self-attention and feed-forward, with a cache for decoding token by token."""

    def read(self, x: Array, mask: MaskRule, positions: Array | None) -> tuple[Array, BlockCache]:
        """Run the block on a prefix, x [B, S, D]; return the output, and keys and values for later steps."""
        prefix = self.self_attention.project_memory(self.self_attention_residual.before(x), positions)
        return self._feed(self._read(x, mask, positions, True), True), prefix

    def step(
        self, x: Array, cache: BlockCache, prefix: BlockCache, prefix_mask: Array, step: Step
    ) -> tuple[Array, BlockCache]:
        """Run one token per beam, x [B, W, D], after a prefix; return the output and the updated cache."""
        y = self.self_attention_residual.before(x)
        y, updated = self.self_attention.step(y, cache, step, prefix, prefix_mask)
        x = self.self_attention_residual.after(x, y, deterministic=True)
        return self._feed(x, True), updated


class DecoderBlock(Block):
    """Decoder block: causal self-attention, cross-attention to the encoder output, and feed-forward."""

    def setup(self) -> None:
        self._setup_reading()
        self.cross_attention = MultiHeadAttention(self.config, self.kernels)
        self.cross_attention_residual = Residual(self.config, self.kernels)
        self._setup_feedforward()

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
        x = self._read(x, self_mask, positions, deterministic)
        y = self.cross_attention_residual.before(x)
        self.cross_attention.store_head(y, memory)
        y = self.cross_attention(y, memory, mask=cross_mask, deterministic=deterministic)
        return self._feed(
            self.cross_attention_residual.after(x, y, deterministic=deterministic), deterministic
        )

    def project_memory(self, memory: Array) -> BlockCache:
        """Project the encoder output to the keys and values of cross-attention, once per source."""
        return self.cross_attention.project_memory(memory)

    def step(
        self, x: Array, cache: BlockCache, memory: BlockCache, cross_mask: Array | None, step: Step
    ) -> tuple[Array, BlockCache]:
        """Run one token per beam, x [B, W, D]; return the output and the updated cache."""
        x, updated = self._read_one(x, cache, step)
        y = self.cross_attention_residual.before(x)
        y = self.cross_attention.attend_memory(y, memory, mask=cross_mask)
        return self._feed(self.cross_attention_residual.after(x, y, deterministic=True), True), updated

    def _read_one(self, x: Array, cache: BlockCache, step: Step) -> tuple[Array, BlockCache]:
        y, updated = self.self_attention.step(self.self_attention_residual.before(x), cache, step)
        return self.self_attention_residual.after(x, y, deterministic=True), updated


class RecurrentDecoderBlock(DecoderBlock):
    """Decoder block whose first sublayer is a recurrence (SSRU) instead of causal self-attention.

    It uses a mask only to find where sentences start, and ignores positions.
    """

    def _setup_reading(self) -> None:
        self.recurrence = SimplerRecurrence(self.config, self.kernels)
        self.recurrence_residual = Residual(self.config, self.kernels)

    def _read(self, x: Array, mask: MaskRule, positions: Array | None, deterministic: bool) -> Array:
        y = self.recurrence(self.recurrence_residual.before(x), find_starts(mask.query_segments))
        return self.recurrence_residual.after(x, y, deterministic=deterministic)

    def empty_cache(self, batch: int, beams: int, max_length: int) -> BlockCache:
        """Make the recurrent states before the first token; their size does not depend on `max_length`."""
        return self.recurrence.empty_cache(batch, beams)

    def _read_one(self, x: Array, cache: BlockCache, step: Step) -> tuple[Array, BlockCache]:
        y, updated = self.recurrence.step(self.recurrence_residual.before(x), cache, step.ancestry)
        return self.recurrence_residual.after(x, y, deterministic=True), updated
