"""Relative position biases of attention (T5, Raffel et al. 2020): one number per head and distance bucket.

Distances from a query to the position it attends to fall into buckets: one bucket for each short distance,
wider buckets up to a longest distance, and one bucket for all longer distances.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.shapes import Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["table"], meta_fields=["longest", "bidirectional"]
)
@dataclasses.dataclass(frozen=True)
class RelativeBias:
    """The bias that attention adds to a score; it depends on the distance from query to attended position.

    table: float32 [buckets, H]. longest: the distance from which all distances share a bucket. bidirectional:
    whether half of the buckets are for later positions; otherwise all later positions use the bucket of
    distance 0.
    """

    table: Array
    longest: int
    bidirectional: bool

    def dense(self, queries: int, attended: int) -> Array:
        """Compute the biases [1, H, Q, M] for queries 0 to Q - 1 and attended positions 0 to M - 1."""
        distances = np.arange(-(queries - 1), attended)
        by_distance = self._look_up(self._find_buckets(distances))
        heads, width = by_distance.shape[1], len(distances)
        rows = jnp.broadcast_to(by_distance.T[:, None], (heads, queries, width))
        # One more column, and the same numbers in rows of the old length: row q moves q columns to the right.
        flat = jnp.pad(rows, [(0, 0), (0, 0), (0, 1)]).reshape(heads, -1)
        shifted = flat[:, : queries * width].reshape(heads, queries, width)
        return shifted[None, :, :, queries - 1 :]

    def of_ages(self, ages: Array) -> Array:
        """Compute the biases [1, H, Q, M] of attended positions that precede the query by `ages` [Q, M]."""
        by_age = jnp.asarray(self._find_buckets(-np.arange(self.longest + 1)))
        buckets = jnp.take(by_age, jnp.clip(ages, 0, self.longest), axis=0)
        return self._look_up(buckets).transpose(2, 0, 1)[None]

    def _find_buckets(self, distances: np.ndarray) -> np.ndarray:
        return find_buckets(distances, len(self.table), self.longest, self.bidirectional)

    def _look_up(self, buckets: Array | np.ndarray) -> Array:
        return jnp.take(self.table, jnp.asarray(buckets), axis=0).astype(jnp.float32)


def find_buckets(distances: np.ndarray, count: int, longest: int, bidirectional: bool) -> np.ndarray:
    """Return the int32 bucket of each distance, which is the attended position minus the query's position.

    With 8 buckets and a longest distance of 20, distances -9 -3 -1 0 1 3 9 have buckets 3 2 1 0 5 6 7 if
    bidirectional, and 6 3 1 0 0 0 0 otherwise. Logarithms are float32, as in the system that trained the
    models: exact logarithms would move distances at the ends of buckets.
    """
    offset = np.zeros_like(distances)
    if bidirectional:
        count //= 2
        offset = np.where(distances > 0, count, 0)
        distances = np.abs(distances)
    else:
        distances = np.maximum(-distances, 0)
    exact = count // 2
    ratio = np.log(np.maximum(distances, 1).astype(np.float32) / np.float32(exact))
    growth = ratio / np.float32(np.log(longest / exact)) * np.float32(count - exact)
    wide = np.minimum(exact + growth.astype(np.int64), count - 1)
    return (offset + np.where(distances < exact, distances, wide)).astype(np.int32)
