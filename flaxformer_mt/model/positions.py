"""Position encodings: sinusoidal tables, learned tables, rotary embeddings, biases by distance.

Positions are passed as integers, which the models compute from padding and segments.
"""

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Float, Int

from flaxformer_mt.model.initializers import declare
from flaxformer_mt.parallel.sharding import gather
from flaxformer_mt.shapes import Array, typed


def sinusoidal_table(length: int, model_dim: int) -> np.ndarray:
    """Compute the table [length, D] of Vaswani et al. (2017, section 3.5); sines and cosines alternate.

    Row p has the sine and cosine of p / 10000^(2i / D) in columns 2i and 2i+1; an odd D ends in a sine.
    Angles are computed in float64, since float32 angles would be off by 4e-4 at position 5000; the table is
    float32.
    """
    rates = 10000.0 ** (-np.arange(0, model_dim, 2, dtype=np.float64) / model_dim)
    angles = np.arange(length, dtype=np.float64)[:, None] * rates[None, :]
    both = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(length, -1)
    return both[:, :model_dim].astype(np.float32)


def sinusoidal_half_table(length: int, model_dim: int) -> np.ndarray:
    """Compute the table [length, D] of fairseq and tensor2tensor: all sines, then all cosines.

    With H = D / 2, row p has the sine of p / 10000^(i / (H - 1)) in column i, so that the last rate is
    exactly 1 / 10000. An odd D ends in a zero. All numbers are float32, as in fairseq and tensor2tensor.
    """
    half = model_dim // 2
    step = np.float32(np.log(10000) / max(half - 1, 1))
    angles = np.arange(length, dtype=np.float32)[:, None] * np.exp(np.arange(half, dtype=np.float32) * -step)
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return np.pad(table, [(0, 0), (0, model_dim % 2)])


# Value of model.positions -> the function that computes its table [length, D].
SINUSOIDAL_TABLES = {"sinusoidal": sinusoidal_table, "sinusoidal_halves": sinusoidal_half_table}


@typed
def sinusoidal_positions(
    positions: Int[Array, "*P"], kind: str, *, length: int, model_dim: int
) -> Float[Array, "*P D"]:
    """Look up the encodings of positions, all below `length`, in the sinusoidal table `kind`."""
    table = SINUSOIDAL_TABLES[kind](max(length, 1), model_dim)  # an empty source looks up none
    return jnp.take(jnp.asarray(table), positions, axis=0, mode="clip")


@typed
def rotate(vectors: Float[Array, "*B T H K"], positions: Int[Array, "*#B #T"]) -> Float[Array, "*B T H K"]:
    """Rotate the query or key of each head by its position (RoFormer, Su et al. 2021, equation 34).

    Elements i and i + K/2 of a head form a pair that is rotated by the angle position / 10000^(2i / K).
    """
    half = vectors.shape[-1] // 2
    rates = jnp.asarray(10000.0 ** (-np.arange(half, dtype=np.float64) / half), jnp.float32)
    angles = jnp.asarray(positions, jnp.float32)[..., None, None] * rates  # [*B, T, H=1, K/2]
    first, second = jnp.split(vectors.astype(jnp.float32), 2, axis=-1)
    rotated = [
        first * jnp.cos(angles) - second * jnp.sin(angles),
        second * jnp.cos(angles) + first * jnp.sin(angles),
    ]
    return jnp.concatenate(rotated, axis=-1).astype(vectors.dtype)


class LearnedPositions(nn.Module):
    """A learned table [rows, D] with an optional bias [D]; callers must not pass positions beyond its end.

    With relative positions, the rows are buckets of distances, and D is the number of heads.
    """

    rows: int
    model_dim: int
    table_init: nn.initializers.Initializer
    # Initializer of the bias; None: no bias.
    bias_init: nn.initializers.Initializer | None = None

    def setup(self) -> None:
        self.embedding = declare(self, "embedding", self.table_init, (self.rows, self.model_dim))
        if self.bias_init is not None:
            self.bias = declare(self, "bias", self.bias_init, (self.model_dim,))

    def __call__(self, positions: Array) -> Array:
        """Look up the rows [..., D] of the table at `positions`."""
        return self._add_bias(jnp.take(gather(self.embedding, "PD"), positions, axis=0, mode="clip"))

    def one_vector(self) -> Array:
        """Return the sum [D] of the rows, each times its index: a linear map of [0, 1, ..., rows - 1].

        This follows the wording of document 002 literally; the result is the same at every position.
        """
        return self._add_bias(jnp.arange(self.rows, dtype=jnp.float32) @ gather(self.embedding, "PD"))

    def _add_bias(self, x: Array) -> Array:
        return x if self.bias_init is None else x + self.bias
