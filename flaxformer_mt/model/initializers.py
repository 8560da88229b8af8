"""Where parameters start: one scheme for all of a model, by the role that an array has in it.

Owns the choice by name (`model.initializer`) and the fans of arrays that have more than two axes. Knows
nothing of where in a model an array is.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.shapes import Array

# From a key, a shape and a type to an array.
Initializer = Callable[..., Array]

_GAIN_RELU = math.sqrt(2)


class Initializers(NamedTuple):
    """What a model's arrays start as, by their role."""

    # Kernels [D, H, K] of queries, keys and values, and [H, E, D] of the output, flattened to two axes.
    attention_input: Initializer
    attention_output: Initializer
    # Kernels [D, F] and [F, D].
    feedforward: Initializer
    # The table [V, D] of tokens, and the table [P, D] of learned positions.
    embedding: Initializer
    positions: Initializer
    # The matrix [D, V] of an output that is not tied.
    output: Initializer
    torch_biases: bool

    def bias(self, fan_in: int) -> Initializer:
        """Of a map from `fan_in` numbers: zeros, or PyTorch's uniform."""
        return uniform(fan_in**-0.5) if self.torch_biases else nn.initializers.zeros


def uniform(bound: float) -> Initializer:
    """Numbers from -bound to bound."""

    def init(key: Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def make_initializers(config: ModelConfig) -> Initializers:
    """The scheme that `model.initializer` names.

    xavier_uniform, xavier_normal (Glorot and Bengio 2010), lecun_normal, normal: that for all matrices, with
    embeddings of variance 1 / D, so that the paper's scale brings them to 1 and tied logits as well.
    torch: what PyTorch's layers start as, biases too. kokoyi, aiayn: documents 001 and 003.
    """
    scheme = config.initializer
    if scheme == "torch":
        return _torch(config)
    if scheme == "kokoyi":
        return _kokoyi(config)
    xavier = nn.initializers.xavier_uniform()
    if scheme == "aiayn":  # every matrix, embeddings too; biases are left to PyTorch
        small = nn.initializers.normal(0.02)
        return Initializers(xavier, xavier, xavier, xavier, small, xavier, torch_biases=True)
    matrix = {
        "xavier_uniform": xavier,
        "xavier_normal": nn.initializers.xavier_normal(),
        "lecun_normal": nn.initializers.lecun_normal(),
        "normal": nn.initializers.normal(0.02),
    }[scheme]
    return Initializers(
        attention_input=matrix,
        attention_output=matrix,
        feedforward=matrix,
        embedding=nn.initializers.normal(config.model_dim**-0.5),
        positions=nn.initializers.normal(0.02),
        output=matrix,
        torch_biases=False,
    )


def _linear(key: Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> Array:
    """PyTorch's nn.Linear for a kernel [input, output]: uniform within 1 / sqrt(input)."""
    return uniform(math.prod(shape[:-1]) ** -0.5)(key, shape, dtype)


def _torch(config: ModelConfig) -> Initializers:
    # An embedding with a bias is a linear map of one-hot vectors; one without is nn.Embedding.
    table = _linear if config.embedding_bias else nn.initializers.normal(1.0)
    return Initializers(_linear, _linear, _linear, table, table, _linear, torch_biases=True)


def _kokoyi(config: ModelConfig) -> Initializers:
    """Document 001: Xavier over head-stacked matrices [H, D, K], whose fans PyTorch takes as D K and H K."""
    width, heads = config.model_dim, config.num_heads
    size = config.key_dim or width // heads
    gain = math.sqrt(width + size) / math.sqrt(width + heads * size)
    xavier_relu = nn.initializers.variance_scaling(_GAIN_RELU**2, "fan_avg", "uniform")
    return Initializers(
        attention_input=uniform(gain * math.sqrt(6 / (width * size + heads * size))),
        attention_output=uniform(gain * math.sqrt(6 / (width + heads * size))),
        feedforward=_linear,
        embedding=xavier_relu,
        positions=nn.initializers.normal(0.02),
        output=xavier_relu,
        torch_biases=True,
    )
