"""Linear maps into and out of the heads of attention, and several of them as one matrix product.

Owns the arrays of a projection, by the names and shapes that checkpoints and converters read. Knows nothing
of what is projected.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from flaxformer_mt.model.initializers import Initializer
from flaxformer_mt.shapes import Array


class Projection(nn.Module):
    """x times a kernel [*inputs, *features], over the last axes of x, plus a bias [*features]."""

    inputs: tuple[int, ...]
    features: tuple[int, ...]
    use_bias: bool
    dtype: DTypeLike
    # Of the kernel as a matrix [product of inputs, product of features].
    kernel_init: Initializer
    bias_init: Initializer

    def setup(self) -> None:
        matrix = math.prod(self.inputs), math.prod(self.features)

        def init(key: Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> Array:
            return self.kernel_init(key, matrix, dtype).reshape(shape)

        self.kernel = self.param("kernel", init, (*self.inputs, *self.features))
        if self.use_bias:

            def init_bias(key: Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> Array:
                return self.bias_init(key, (math.prod(shape),), dtype).reshape(shape)

            self.bias = self.param("bias", init_bias, self.features)

    def __call__(self, x: Array) -> Array:
        """x [..., *inputs] -> [..., *features]."""
        flat = x.shape[: x.ndim - len(self.inputs)]
        matrix = self.kernel.astype(self.dtype).reshape(math.prod(self.inputs), -1)
        y = multiply(x.astype(self.dtype).reshape(*flat, -1), matrix).reshape(*flat, *self.features)
        return y + self.bias.astype(self.dtype) if self.use_bias else y


@jax.custom_vjp
def multiply(x: Array, kernel: Array) -> Array:
    """x [..., D] times a matrix [D, F], with a gradient that is found in the kernel's own layout.

    JAX's rule makes the gradient of the kernel as [F, D] and turns it; on CPUs that transposes the wider of
    two large arrays in memory first.
    """
    return jnp.tensordot(x, kernel, axes=1)


def _multiply_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return jnp.tensordot(x, kernel, axes=1), (x, kernel)


def _multiply_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, kernel = saved
    rows = tuple(range(x.ndim - 1))
    return jnp.tensordot(gradient, kernel.T, axes=1), jnp.tensordot(x, gradient, axes=(rows, rows))


multiply.defvjp(_multiply_forward, _multiply_backward)


def project_together(x: Array, projections: Sequence[Projection]) -> list[Array]:
    """What each projection makes of the same x [..., D], by one product with all their kernels side by side.

    One product of three times the width is faster than three, forward and backward, and x is read once. The
    kernels are joined on an axis of their own, so that heads which are split over devices stay where they
    are; kernels of different shapes are multiplied one by one.
    """
    first = projections[0]
    if any(other.features != first.features for other in projections):
        return [projection(x) for projection in projections]
    dtype = first.dtype
    kernels = jnp.stack([projection.kernel.astype(dtype) for projection in projections], axis=1)
    together = multiply(x.astype(dtype), kernels.reshape(x.shape[-1], -1))
    together = together.reshape(*x.shape[:-1], len(projections), *first.features)
    if first.use_bias:
        together = together + jnp.stack([projection.bias.astype(dtype) for projection in projections])
    parts = jax.lax.split(together, (1,) * len(projections), axis=x.ndim - 1)
    return [part.squeeze(x.ndim - 1) for part in parts]
