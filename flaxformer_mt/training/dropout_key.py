"""The random key of dropout masks: one for each update and microbatch, from which layers fold in their own.

Contains the generators of `train.prng`, and knows nothing of masks (model/layers.py).
"""

import math

import jax
import jax.extend
import jax.numpy as jnp

from flaxformer_mt.config import Config
from flaxformer_mt.model.layers import hash_numbers
from flaxformer_mt.shapes import Array

# Number of 32-bit words of a key.
_WORDS = 4


def make_dropout_key(
    config: Config, step: Array | int, microbatch: Array | int, *, platform: str = "cpu"
) -> Array:
    """Makes the key of all dropout masks of one microbatch; no two of them share a key.

    The numbers are folded in by threefry: `fold_in` of unsafe_rbg is an exclusive or, which gives (1, 2) and
    (2, 1) the same key and lets equal numbers cancel. All devices share the key; each draws its own rows of
    the masks.

    With `train.prng=rbg`, layers go on from this key with XLA's generator, and on GPUs with a hash: their
    compiler would expand that generator into some 200 operations for each dropout of the model.

    Args:
      platform: the platform that programs are compiled for, as JAX names it: cpu, gpu (or cuda), tpu.
    """
    key = jax.random.key(config.seed, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, step), microbatch)
    if config.train.prng == "threefry":
        return key
    words = jax.random.bits(key, (_WORDS,), jnp.uint32)
    return jax.random.wrap_key_data(words, impl=_HASHED if platform in ("gpu", "cuda") else "unsafe_rbg")


def _fold_in(key: jax.Array, number: jax.Array | int) -> jax.Array:
    """Mixes a number into each word of a key, and the word before it, so that all words depend on each other.

    Two numbers never give the same word.
    """
    return _hash(key, (jnp.asarray(number, jnp.uint32), jnp.roll(key, 1)))


def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Makes keys as `_fold_in` does, each by its number, from the words in another order."""
    numbers = jnp.arange(math.prod(shape), dtype=jnp.uint32)[:, None]
    words = jnp.roll(key, 2)
    return _hash(words, (numbers, jnp.roll(words, 1))).reshape(*shape, _WORDS)


def _random_bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
    if width != 32:
        raise ValueError(f"random numbers of {width} bits: dropout draws words of 32 bits")
    numbers = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
    return _hash(_hash(numbers, (key[0], key[1])), (key[2], key[3]))


def _seed(number: jax.Array) -> jax.Array:
    return _fold_in(jnp.arange(_WORDS, dtype=jnp.uint32), number)


def _hash(numbers: jax.Array, words: tuple[Array, Array]) -> jax.Array:
    return jnp.asarray(hash_numbers(numbers, words))


_HASHED = jax.extend.random.define_prng_impl(
    key_shape=(_WORDS,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="dropout_hash",
    tag="hsh",
)
