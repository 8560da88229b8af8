"""The base of encoder-decoder and decoder-only models: the output layer, and decoding with a cache."""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from flax import linen as nn

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.kernels import Kernels
from flaxformer_mt.kernels.bfloat16 import take_rows
from flaxformer_mt.kernels.int8 import Quantized, multiply_quantized
from flaxformer_mt.model.attention import Step, make_ancestry_mask, make_prefix_inputs
from flaxformer_mt.model.initializers import declare, make_initializers
from flaxformer_mt.model.recurrence import continue_beams, continue_prefix
from flaxformer_mt.model.stack import Embedding, Stack
from flaxformer_mt.parallel.sharding import gather
from flaxformer_mt.shapes import Array, Cache


def make_logits(kernels: Kernels, x: Array, table: Array | Quantized, bias: Array | None) -> Array:
    """Compute float32 logits [..., V] of hidden states x [..., D] with the output table [V, D]."""
    spec = "...D,VD->...V"
    if isinstance(table, Quantized):
        scores = multiply_quantized(kernels.integer_product, spec, x, table)
    else:
        scores = kernels.product(spec, x, table)
    return scores if bias is None else scores + bias


class ListedOutput(NamedTuple):
    """The columns of the output layer for the tokens in the shortlist of each batch row."""

    # float32 in any dtype of the model, since CPUs multiply so few columns faster in float32.
    kernel: Array  # [B, D, C]
    bias: Array | None  # [B, C]
    # Which columns belong to a token; the others are padding.
    listed: Array  # [B, C]


def list_output(table: Array, bias: Array | None, tokens: Array) -> ListedOutput:
    """Gather the output layer's columns for `tokens` [B, C]; an entry is 0 for padding, otherwise id + 1."""
    ids = jnp.maximum(tokens - 1, 0)
    kernel = jnp.swapaxes(take_rows(table, ids).astype(jnp.float32), 1, 2)
    return ListedOutput(kernel, None if bias is None else jnp.take(bias, ids).astype(jnp.float32), tokens > 0)


def make_listed_logits(
    kernels: Kernels, x: Array, own: ListedOutput, common: tuple[Array, Array | None]
) -> Array:
    """Compute float32 logits [B, W, N + C] of hidden states x [B, W, D] for the tokens of shortlists.

    `common` has the rows [N, D] of the output table and the biases [N] of N tokens that all rows share; `own`
    has the columns of each row's own C tokens, whose logits come last.
    """
    scores = kernels.product("BWD,BDC->BWC", x.astype(jnp.float32), own.kernel)
    scores = scores if own.bias is None else scores + own.bias[:, None]
    scores = jnp.where(own.listed[:, None], scores, -jnp.inf)
    return jnp.concatenate([make_logits(kernels, x, *common), scores], axis=-1)


def find_output(params: dict[str, Any]) -> Quantized | None:
    """Return the quantized table [V, D] of the output layer; None if the parameters are not quantized."""
    return Quantized(params["output_int8"], params["output_scale"]) if "output_int8" in params else None


class CachedDecoder(nn.Module):
    """The base class of the models, with the output layer and decoding with a cache.

    A subclass has the stack `decoder`, calls `_setup_output` in its `setup`, and defines `_output_embedding`
    and `_step`.
    """

    config: ModelConfig
    kernels: Kernels

    if TYPE_CHECKING:  # made in setup: an annotation would make it a field
        decoder: Stack

    def _setup_output(self, size: int) -> None:
        config = self.config
        initializers = make_initializers(config)
        if self._output_embedding is None:
            shape = config.model_dim, size
            self.output_kernel = declare(self, "output_kernel", initializers.output, shape)
        if config.output_bias:
            init = initializers.bias(config.model_dim)
            self.output_bias = declare(self, "output_bias", init, (size,))

    def logits(self, x: Array) -> Array:
        """Compute float32 logits [..., V] of hidden states x [..., D]."""
        table, bias = self.output_layer()
        quantized = find_output(self.variables["params"])
        return make_logits(self.kernels, x, table if quantized is None else quantized, bias)

    def output_layer(self) -> tuple[Array, Array | None]:
        """Return the matrix [V, D] and the bias [V] that map hidden states to logits."""
        bias = self.output_bias if self.config.output_bias else None
        tied = self._output_embedding
        table = gather(self.output_kernel, "DV").T if tied is None else tied.table
        return table, bias

    def take_output(self, ids: Array) -> tuple[Array, Array | None]:
        """Return the rows [N, D] of the output layer's table and the biases [N] for the tokens `ids` [N]."""
        table, bias = self.output_layer()
        return take_rows(table, ids), None if bias is None else bias[ids]

    def add_shortlists(self, cache: Cache, tokens: Array) -> Cache:
        """Add each row's shortlist to a cache: output columns for `tokens` (0: padding; else id + 1)."""
        return cache._replace(shared=cache.shared | {"output": list_output(*self.output_layer(), tokens)})

    def decode_step(
        self, tokens: Array, cache: Cache, common: tuple[Array, Array | None] | None = None
    ) -> tuple[Array, Cache]:
        """Feed one token per beam, [B, W]; return the next logits [B, W, V] and the updated cache.

        With `common`, the output layer of N common tokens (`take_output`), the logits are [B, W, N + C]: for
        the common tokens, then for the C tokens of each row's shortlist (`add_shortlists`).
        """
        beams, length = tokens.shape[1], self._capacity(cache, tokens.shape[1])
        ancestry_of = continue_beams if self._is_recurrent else make_ancestry_mask
        ancestry = ancestry_of(cache, beams=beams, length=length)
        slot = cache.index % length
        # The ages of the tokens in the slots, which are a ring buffer.
        bias = self._bias_of((cache.index - jnp.arange(length))[None] % length) if self._is_relative else None
        step = Step(slot, ancestry, cache.prefix_lengths(), bias)
        hidden, per_beam = self._step(tokens, cache, step, length)
        if common is None:
            logits = self.logits(hidden)
        else:
            logits = make_listed_logits(self.kernels, hidden, cache.shared["output"], common)
        return logits, cache._replace(per_beam=per_beam, index=cache.index + 1)

    def read_prefix(self, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        """Feed the first P tokens of each row at once, [B, P]; return logits [B, P, V] and the updated cache.

        The cache must be empty and have one beam. The tokens are right-aligned: row b begins at step
        start_steps[b].
        """
        length, capacity = tokens.shape[1], self._capacity(cache, 1)
        positions, mask = make_prefix_inputs(cache, length=length, capacity=capacity)
        ancestry = continue_prefix(cache, length=length) if self._is_recurrent else mask
        bias = None
        if self._is_relative:
            bias = self._bias_of(jnp.arange(length)[:, None] - jnp.arange(capacity))
        # The slots of P tokens of one beam are those of one token of P beams: a single step writes them.
        step = Step(cache.index, ancestry, positions, bias)
        hidden, per_beam = self._step(tokens, cache, step, length)
        return self.logits(hidden), cache._replace(per_beam=per_beam, index=cache.index + length)

    @property
    def _output_embedding(self) -> Embedding | None:
        """The embedding whose table the output layer shares; None: the output layer has its own table."""
        raise AssertionError("a subclass defines it")

    def _step(self, tokens: Array, cache: Cache, step: Step, length: int) -> tuple[Array, list[Any]]:
        """Run tokens [B, W] at positions below `length`; return hidden states [B, W, D] and block caches."""
        raise AssertionError("a subclass defines it")

    def _bias_of(self, ages: Array) -> Array:
        """Return the relative-position bias of cache slots from the ages [W or 1, T] of their tokens."""
        return self.decoder.relative_bias(bidirectional=False).of_ages(ages)

    def _finish(self, x: Array) -> Array:
        x = self.decoder.finish(x)
        return x * self.config.model_dim**-0.5 if self.config.logit_scale else x

    @property
    def _is_relative(self) -> bool:
        return self.config.positions == "relative"

    @property
    def _is_recurrent(self) -> bool:
        return self.config.decoder_self_attention == "ssru"

    def _capacity(self, cache: Cache, beams: int) -> int:
        """Return the number of target tokens for which a cache has room."""
        if cache.ancestors is not None:
            return cache.ancestors.shape[2]
        if self._is_recurrent:
            raise ValueError("a recurrent decoder needs Cache.ancestors, as `start_cache` makes them")
        return cache.per_beam[0]["keys"].shape[3] // beams
