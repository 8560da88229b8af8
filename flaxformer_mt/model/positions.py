"""Where a token stands: sinusoidal tables, learned tables, rotary turns.

Positions start at 0. Knows nothing of tokens or of padding; a position is whatever integer it is given.
"""

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Float, Int

from flaxformer_mt.shapes import Array, typed


def sinusoidal_table(length: int, model_dim: int) -> np.ndarray:
    """The table [length, D] of Vaswani et al. 2017, section 3.5, sine and cosine interleaved.

    Row p, columns 2i and 2i+1: sin and cos of p / 10000^(2i / D). Angles in float64, stored as float32.
    """
    rates = 10000.0 ** (-np.arange(0, model_dim, 2, dtype=np.float64) / model_dim)
    angles = np.arange(length, dtype=np.float64)[:, None] * rates[None, :]
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(length, model_dim).astype(np.float32)


@typed
def sinusoidal_positions(positions: Int[Array, "*P"], *, model_dim: int) -> Float[Array, "*P D"]:
    """The rows of `sinusoidal_table` at the given positions, computed where they are needed, in float32."""
    rates = jnp.asarray(10000.0 ** (-np.arange(0, model_dim, 2, dtype=np.float64) / model_dim), jnp.float32)
    angles = jnp.asarray(positions, jnp.float32)[..., None] * rates
    table = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return table.reshape(*angles.shape[:-1], model_dim)


@typed
def rotate(vectors: Float[Array, "*B T H K"], positions: Int[Array, "*#B #T"]) -> Float[Array, "*B T H K"]:
    """Turns each head's query or key by its position (Su et al. 2021, RoFormer, equation 34).

    Numbers i and i + K/2 of a head form a pair that turns by position / 10000^(2i / K).
    """
    half = vectors.shape[-1] // 2
    rates = jnp.asarray(10000.0 ** (-np.arange(half, dtype=np.float64) / half), jnp.float32)
    angles = jnp.asarray(positions, jnp.float32)[..., None, None] * rates  # [*B, T, H=1, K/2]
    first, second = jnp.split(vectors.astype(jnp.float32), 2, axis=-1)
    turned = [
        first * jnp.cos(angles) - second * jnp.sin(angles),
        second * jnp.cos(angles) + first * jnp.sin(angles),
    ]
    return jnp.concatenate(turned, axis=-1).astype(vectors.dtype)


class LearnedPositions(nn.Module):
    """A trained table [max_positions, D]; positions at or beyond its end are the caller's to refuse."""

    max_positions: int
    model_dim: int

    @nn.compact
    def __call__(self, positions: Array) -> Array:
        """Rows [..., D] of the table at `positions`."""
        table = self.param("embedding", nn.initializers.normal(0.02), (self.max_positions, self.model_dim))
        return jnp.take(table, positions, axis=0, mode="clip")
