"""Dropout, and its random number generator: a hash of a key and the index of each entry."""

import functools
import math
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.shapes import Array

# 32-bit words of a key: two random ones, and the index of the part of a batch.
_WORDS = 3


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dropout(x: Array, key: Array, rate: float) -> Array:
    """Zero entries with probability `rate` and rescale the others (Srivastava et al. 2014).

    Rescaling preserves the expectation; it is computed in float32, so that numbers are rounded only once. The
    gradient drops the same entries: the backward pass saves only the key and generates the numbers again.
    With a key from `make_dropout_key`, random numbers are computed where they are used, not stored in memory.
    """
    kept = jax.random.bits(key, x.shape, jnp.uint32) >= jnp.uint32(keep_threshold(rate))
    return jnp.where(kept, x.astype(jnp.float32) * dropout_scale(rate), 0.0).astype(x.dtype)


dropout.defvjp(
    lambda x, key, rate: (dropout(x, key, rate), key),
    lambda rate, key, gradient: (dropout(gradient, key, rate), None),
)


def dropout_scale(rate: float) -> float:
    return 2**32 / (2**32 - keep_threshold(rate))


def keep_threshold(rate: float) -> int:
    """Return the threshold for random numbers: an entry is kept if its number is at least the threshold.

    The cap keeps some entries at any rate below 1, even where rounding would drop all.
    """
    return min(round(rate * 2**32), 2**32 - 2**24)


def make_dropout_key(
    seed: Array | int, step: Array | int, microbatch: Array | int = 0, part: Array | int | None = None
) -> Array:
    """Make the key for all dropout of one microbatch; each microbatch has a different key.

    `part`: the index of the part, if the program computes one of several equal parts of the batch; dropout
    masks then equal the part's rows in the masks of the whole batch.
    """
    key = jax.random.key(seed, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, step), microbatch)
    return make_hash_key(key, 0 if part is None else part)


def make_hash_key(key: Array, part: Array | int = 0) -> Array:
    """Convert any JAX key to a key of this module's generator, which compiles quickly."""
    words = jax.random.bits(key, (_WORDS - 1,), jnp.uint32)
    return jax.random.wrap_key_data(jnp.append(words, jnp.asarray(part, jnp.uint32)), impl=_HASH)


def is_hash_key(key: Array) -> bool:
    """Return whether a key is from `make_dropout_key`, or derived from such a key."""
    return jax.random.key_impl(key) == _HASH


def split_key(key: Array, size: int) -> tuple[Array, Array]:
    """Return the key words for `hash_numbers`, and the number that it hashes for the first of `size` entries.

    `dropout` keeps entry i where hash_numbers(first + i, words) >= keep_threshold(rate), modulo 2 ** 32.
    """
    words = jax.random.key_data(key)
    return words[:2], words[2] * jnp.uint32(size % 2**32)


def hash_numbers(numbers: Array, words: Any) -> Array:
    """Hash each number to 32 random bits; `words[0]` is mixed in before the hash, `words[1]` halfway through.

    The multipliers and shifts are from lowbias32 (Wellons 2018); they were selected by a search for the least
    bias of any output bit to any input bit. The second key word prevents two keys from giving the same
    sequence at different offsets.
    """
    x = numbers ^ words[0]
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = x ^ words[1]
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _random_bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
    if width != 32:
        raise ValueError(f"random numbers of {width} bits: dropout draws words of 32 bits")
    return _hash_indices(key, shape)


@functools.partial(
    jax.jit, static_argnums=1
)  # one function in the text of a program for all arrays of a shape
def _hash_indices(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Hash the flat row-major index of each entry in the array of all parts, modulo 2 ** 32."""
    size = math.prod(shape) % 2**32
    numbers, stride = jnp.full(shape, key[2] * jnp.uint32(size)), 1
    for axis in reversed(range(len(shape))):
        index = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        numbers = numbers + index * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return jnp.asarray(hash_numbers(numbers, key))


def _fold_in(key: jax.Array, number: jax.Array | int) -> jax.Array:
    """Swap the key words and mix the hash of a number into each; constants are hashed at compile time."""
    twice = jnp.full(2, number, jnp.uint32)
    words = jnp.asarray(
        hash_numbers(twice, np.asarray([[0x9E3779B9, 0x7F4A7C15], [0xF39CC060, 0x5CEDC834]], np.uint32))
    )
    return jnp.stack([key[1] ^ words[0], key[0] ^ words[1], key[2]])


def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Make one key per number with `_fold_in`, starting from a key derived from this one."""
    numbers = jnp.arange(math.prod(shape), dtype=jnp.uint32)
    folded = _fold_in(key, math.prod(shape))
    return jax.vmap(lambda number: _fold_in(folded, number))(numbers).reshape(*shape, _WORDS)


def _seed(number: jax.Array) -> jax.Array:
    return _fold_in(jnp.arange(_WORDS, dtype=jnp.uint32).at[2].set(0), number)


_HASH = jax.extend.random.define_prng_impl(
    key_shape=(_WORDS,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="dropout_hash",
    tag="hsh",
)
