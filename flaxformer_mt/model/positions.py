"""Where a token stands: sinusoidal tables, learned tables, rotary turns.

Knows nothing of tokens or of padding; a position is whatever integer it is given.
"""

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Float, Int

from flaxformer_mt.shapes import Array, typed


def sinusoidal_table(length: int, model_dim: int) -> np.ndarray:
    """The table [length, D] of Vaswani et al. 2017, section 3.5, sine and cosine interleaved.

    Row p, columns 2i and 2i+1: sin and cos of p / 10000^(2i / D); an odd D ends in a sine. Angles in float64,
    stored as float32: in float32 they would be off by 4e-4 at position 5000.
    """
    rates = 10000.0 ** (-np.arange(0, model_dim, 2, dtype=np.float64) / model_dim)
    angles = np.arange(length, dtype=np.float64)[:, None] * rates[None, :]
    both = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(length, -1)
    return both[:, :model_dim].astype(np.float32)


@typed
def sinusoidal_positions(positions: Int[Array, "*P"], *, length: int, model_dim: int) -> Float[Array, "*P D"]:
    """The rows of `sinusoidal_table` at positions below `length`."""
    return jnp.take(jnp.asarray(sinusoidal_table(length, model_dim)), positions, axis=0, mode="clip")


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
    """A trained table [rows, D], with a bias [D] or not; the caller refuses positions beyond its end."""

    rows: int
    model_dim: int
    table_init: nn.initializers.Initializer
    # Of the bias; None: there is none.
    bias_init: nn.initializers.Initializer | None = None

    def setup(self) -> None:
        self.embedding = self.param("embedding", self.table_init, (self.rows, self.model_dim))
        if self.bias_init is not None:
            self.bias = self.param("bias", self.bias_init, (self.model_dim,))

    def __call__(self, positions: Array) -> Array:
        """Rows [..., D] of the table at `positions`."""
        return self._shift(jnp.take(self.embedding, positions, axis=0, mode="clip"))

    def one_vector(self) -> Array:
        """The sum [D] of all rows, each times its number: what a linear map makes of the vector of positions.

        The literal reading of document 002; it is the same wherever a token stands.
        """
        return self._shift(jnp.arange(self.rows, dtype=jnp.float32) @ self.embedding)

    def _shift(self, x: Array) -> Array:
        return x if self.bias_init is None else x + self.bias
