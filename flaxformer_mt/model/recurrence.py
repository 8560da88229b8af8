"""The simpler simple recurrent unit (SSRU, Kim et al. 2019), which can replace a decoder's self-attention.

It keeps one vector per layer for all earlier tokens, so a decoding step has the same cost at every length.
Training computes all positions in parallel. The sentences of a packed row are given by their first positions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.kernels import Kernels
from flaxformer_mt.model.initializers import make_initializers
from flaxformer_mt.model.projections import Projection
from flaxformer_mt.parallel.sharding import constrain
from flaxformer_mt.shapes import Array, Cache


def recur(kept: Array, added: Array) -> Array:
    """Compute c_t = kept_t * c_{t-1} + added_t for all t of float32 [B, T, D] in parallel, with c_0 = 0.

    The composition of two maps c -> kept * c + added has the same form, so that all prefixes can be computed
    by an associative scan (Blelloch 1990) in log T steps.
    """

    def compose(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    return jax.lax.associative_scan(compose, (kept, added), axis=1)[1]


class Continuation(NamedTuple):
    """For each token of a decoding step, the recurrent state that it continues.

    starts: bool, broadcastable to [B, W], True for the first token of a sentence, which continues no state.
    parents: [B, W], the beam whose state each token continues; None: token w continues token w - 1 of the
      same row, as in a prefix that is read at once.
    """

    starts: Array
    parents: Array | None


def continue_beams(cache: Cache, *, beams: int, length: int) -> Continuation:
    """Return the beam [B, W] whose state each token of this step continues.

    When beams are reordered, states stay where they were written, like cached keys and values;
    `cache.ancestors` records which beam wrote them. With parents [[0 0]], both beams continue the state of
    beam 0.
    """
    starts = cache.prefix_lengths() == 0
    if cache.ancestors is None:
        return Continuation(starts, jnp.arange(beams)[None])
    parents = jax.lax.dynamic_index_in_dim(
        cache.ancestors, (cache.index - 1) % length, axis=2, keepdims=False
    )
    return Continuation(starts, parents)


def continue_prefix(cache: Cache, *, length: int) -> Continuation:
    """Return the states that the `length` tokens fed by `read_prefix` continue."""
    assert cache.start_steps is not None
    return Continuation(jnp.arange(length) == cache.start_steps[:, None], None)


def find_starts(segments: Array | None) -> Array | None:
    """Mark each segment's first position in [B, T]: [[1 1 2 2 0]] gives [[1 0 1 0 1]]; None gives None."""
    if segments is None:
        return None
    before = jnp.pad(segments[:, :-1], [(0, 0), (1, 0)], constant_values=-1)
    return jnp.asarray(segments) != before


class SimplerRecurrence(nn.Module):
    """SSRU (Kim et al. 2019): the output is ReLU(c_t), with states c_t = f_t * c_{t-1} + (1 - f_t) * W x_t.

    The forget gate is f_t = sigmoid(W_f x_t + b_f). States and gates are always float32.
    """

    config: ModelConfig
    kernels: Kernels

    def setup(self) -> None:
        config = self.config
        initializers = make_initializers(config)
        width = config.model_dim

        def project(use_bias: bool) -> Projection:
            # The channels of the state are independent: they are split over devices as a feed-forward width.
            return Projection(
                (width,),
                (width,),
                axes="DF",
                use_bias=use_bias,
                dtype=jnp.dtype(config.dtype),
                kernel_init=initializers.feedforward,
                bias_init=initializers.bias(width),
                kernels=self.kernels,
            )

        self.input = project(use_bias=False)
        self.forget = project(use_bias=True)

    def __call__(self, x: Array, starts: Array | None) -> Array:
        """Map x [B, T, D] to [B, T, D]; `starts`, bool [B, T], marks the first tokens of packed sentences."""
        kept, added = self._gates(x)
        if starts is not None:
            kept = jnp.where(starts[..., None], 0.0, kept)
        return self._output(recur(kept, added))

    def empty_cache(self, batch: int, beams: int) -> dict[str, Array]:
        return {"state": jnp.zeros((batch, beams, self.config.model_dim), jnp.float32)}

    def step(
        self, x: Array, cache: dict[str, Array], continuation: Continuation
    ) -> tuple[Array, dict[str, Array]]:
        """Run the tokens of one step, x [B, W, D]; return the output [B, W, D] and the updated cache."""
        kept, added = self._gates(x)
        kept = jnp.where(continuation.starts[..., None], 0.0, kept)
        if continuation.parents is None:
            state = recur(kept, added)
            return self._output(state), {"state": state[:, -1:]}
        parents = jnp.broadcast_to(continuation.parents, x.shape[:2])
        before = jnp.take_along_axis(cache["state"], parents[..., None], axis=1)
        state = kept * before + added
        return self._output(state), {"state": state}

    def _gates(self, x: Array) -> tuple[Array, Array]:
        """Compute, in float32, the factor by which each position keeps the state, and the value it adds."""
        forget, new = (constrain(gate(x), "BTF").astype(jnp.float32) for gate in (self.forget, self.input))
        kept = jax.nn.sigmoid(forget)
        return kept, (1 - kept) * new

    def _output(self, state: Array) -> Array:
        return jax.nn.relu(state).astype(jnp.dtype(self.config.dtype))
