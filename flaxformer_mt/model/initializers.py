"""Parameter initialization: `model.initializer` names a scheme of initializers, one per role of an array.
Arrays with more than two axes are initialized like the matrices that they represent.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from flax.core.meta import AxisMetadata

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.shapes import Array

# (key, shape, dtype) -> array.
Initializer = Callable[..., Array]

_GAIN_RELU = math.sqrt(2)


class Initializers(NamedTuple):
    """The initializers of a model's arrays, one per role."""

    # Kernels [D, H, K] of queries, keys and values, and [H, E, D] of the output, flattened to two axes.
    attention_input: Initializer
    attention_output: Initializer
    # Kernels [D, F] and [F, D].
    feedforward: Initializer
    # The table [V, D] of tokens, and the table [P, D] of learned positions.
    embedding: Initializer
    positions: Initializer
    # The matrix [D, V] of an untied output layer.
    output: Initializer
    torch_biases: bool

    def bias(self, fan_in: int) -> Initializer:
        """Return the bias initializer of a layer with `fan_in` inputs: zeros, or uniform as in PyTorch."""
        return uniform(fan_in**-0.5) if self.torch_biases else nn.initializers.zeros


@struct.dataclass
class Declared(AxisMetadata[Any]):
    """An initial value with its initializer, so that `init_params` can compute the value separately."""

    value: Any
    init: Initializer = struct.field(pytree_node=False)

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> Any:
        return dataclasses.replace(self, value=val)

    def add_axis(self, index: int, params: Any) -> Any:
        return self

    def remove_axis(self, index: int, params: Any) -> Any:
        return self


def declare(module: nn.Module, name: str, init: Initializer, shape: tuple[int, ...]) -> Array:
    """Declare a parameter; if it exists already, return its value or this device's part (see `gather`).

    `module.param` would compare the value with the declared shape, and raise an error for a part.
    """
    if module.has_variable("params", name):
        return nn.unbox(module.get_variable("params", name))
    return module.param(name, lambda key: Declared(init(key, shape, jnp.float32), init))


@dataclasses.dataclass(frozen=True)
class Reshaped:
    """Initializes an array in another shape, such as that of the matrix it represents, and reshapes it."""

    init: Initializer
    shape: tuple[int, ...]

    def __call__(self, key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return self.init(key, self.shape, dtype).reshape(shape)


@functools.cache
def uniform(bound: float) -> Initializer:

    def init(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


# Arrays of one initializer and shape are drawn by one program, so initializers are made once.
_xavier_uniform = functools.cache(nn.initializers.xavier_uniform)
_xavier_normal = functools.cache(nn.initializers.xavier_normal)
_lecun_normal = functools.cache(nn.initializers.lecun_normal)
_normal = functools.cache(nn.initializers.normal)
_variance_scaling = functools.cache(nn.initializers.variance_scaling)


def make_initializers(config: ModelConfig) -> Initializers:
    """Make the initializers of the scheme that `model.initializer` names.

    xavier_uniform, xavier_normal (Glorot and Bengio 2010), lecun_normal and normal draw all matrices from the
    distribution of that name. Embeddings have variance 1 / D, so that embeddings scaled by sqrt(D) and tied
    logits have variance 1. torch uses the defaults of PyTorch's layers, including biases. kokoyi and aiayn
    follow documents 001 and 003.
    """
    scheme = config.initializer
    if scheme == "torch":
        return _torch(config)
    if scheme == "kokoyi":
        return _kokoyi(config)
    xavier = _xavier_uniform()
    if scheme == "aiayn":  # Xavier for embeddings too; biases as in PyTorch
        small = _normal(0.02)
        return Initializers(xavier, xavier, xavier, xavier, small, xavier, torch_biases=True)
    matrix = {
        "xavier_uniform": xavier,
        "xavier_normal": _xavier_normal(),
        "lecun_normal": _lecun_normal(),
        "normal": _normal(0.02),
    }[scheme]
    return Initializers(
        attention_input=matrix,
        attention_output=matrix,
        feedforward=matrix,
        embedding=_normal(config.model_dim**-0.5),
        positions=_normal(0.02),
        output=matrix,
        torch_biases=False,
    )


def _linear(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    """Initialize a kernel [input, output] as PyTorch's nn.Linear does: uniform within 1 / sqrt(input)."""
    return uniform(math.prod(shape[:-1]) ** -0.5)(key, shape, dtype)


def _torch(config: ModelConfig) -> Initializers:
    # An embedding with a bias is nn.Linear on one-hot vectors; an embedding without a bias is nn.Embedding.
    table = _linear if config.embedding_bias else _normal(1.0)
    return Initializers(_linear, _linear, _linear, table, table, _linear, torch_biases=True)


def _kokoyi(config: ModelConfig) -> Initializers:
    """Make the scheme of document 001: Xavier on arrays [H, D, K], whose fans in PyTorch are D K and H K."""
    width, heads = config.model_dim, config.num_heads
    size = config.key_dim or width // heads
    gain = math.sqrt(width + size) / math.sqrt(width + heads * size)
    xavier_relu = _variance_scaling(_GAIN_RELU**2, "fan_avg", "uniform")
    return Initializers(
        attention_input=uniform(gain * math.sqrt(6 / (width * size + heads * size))),
        attention_output=uniform(gain * math.sqrt(6 / (width + heads * size))),
        feedforward=_linear,
        embedding=xavier_relu,
        positions=_normal(0.02),
        output=xavier_relu,
        torch_biases=True,
    )
