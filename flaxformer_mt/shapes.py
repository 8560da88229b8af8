"""The letters that name array axes, array types, and the structures `Batch` and `Cache`.

B batch · S source length · T target length · Q query length · M attended (memory) length · D model width ·
H heads · K query/key size of a head · E value size of a head · F feed-forward width · V vocabulary ·
W beam width · L layers. Masks are bool, True = may attend.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

Array = jax.Array | np.ndarray

Tokens = Int[Array, "B T"]
Activations = Float[Array, "B T D"]
AttentionMask = Bool[Array, "#B #H #Q M"]

Function = TypeVar("Function", bound=Callable[..., Any])


def typed(function: Function) -> Function:
    """Check the annotated shapes of a function at each call; under jit, only once, while it is traced.

    The checker is loaded at the first call: programs that are loaded from disk without tracing need none.
    """

    @functools.cache
    def make_checked() -> Callable[..., Any]:
        from beartype import beartype
        from jaxtyping import jaxtyped

        return jaxtyped(typechecker=beartype)(function)

    @functools.wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        return make_checked()(*arguments, **named)

    return cast(Function, checked)


class Batch(NamedTuple):
    """Sentence pairs as arrays, padded to one of a few static shapes.

    With pad 0, bos 1, eos 2, the pair ([5, 6, 2], [7, 8, 9, 2]) in a 4x6 bucket is the row
    source [5 6 2 0], target_in [1 7 8 9 0 0], target_out [7 8 9 2 0 0].
    In packed rows, `*_segments` number the pairs of a row 1, 2, ... (0: padding), and `*_positions` restart
    at each pair. Bucketed rows hold one pair, and these four arrays are None.
    `target_weights` weight each token in the loss by the weight of its pair; None: all weights are 1.
    With guided alignment, bit s % 8 of alignment[b, t, s // 8] is set if target_out t is aligned with
    source s.
    """

    source: Int[Array, "B S"]
    target_in: Int[Array, "B T"]
    target_out: Int[Array, "B T"]
    source_mask: Bool[Array, "B S"]
    target_mask: Bool[Array, "B T"]
    source_segments: Int[Array, "B S"] | None = None
    target_segments: Int[Array, "B T"] | None = None
    source_positions: Int[Array, "B S"] | None = None
    target_positions: Int[Array, "B T"] | None = None
    target_weights: Float[Array, "B T"] | None = None
    alignment: UInt8[Array, "B T S8"] | None = None


class Cache(NamedTuple):
    """The state of incremental decoding between two steps.

    `per_beam` arrays are [B, W, ...]; when beams are reordered, they are reordered with their hypotheses.
    `shared` arrays are [B, ...], computed once per source and shared by its beams. `index` counts the
    decoding steps so far.
    With `ancestors`, the per_beam arrays stay in place when beams are reordered: ancestors[b, w, t] is the
    beam that wrote the token of hypothesis w at step t < index. Initially each beam refers to itself.
    With `start_steps` (continuous batching), the sentence of row b starts at step start_steps[b], and arrays
    with capacity T are ring buffers: the token of step i is in slot i % T.
    """

    per_beam: Any
    shared: Any
    index: Int[Array, ""]
    ancestors: Int[Array, "B W T"] | None = None
    start_steps: Int[Array, "B"] | None = None

    def prefix_lengths(self) -> Array:
        """Return the number of decoded tokens per row, [B, 1]; [1, 1] if all rows started together."""
        return (
            jnp.full((1, 1), self.index)
            if self.start_steps is None
            else (self.index - self.start_steps)[:, None]
        )
