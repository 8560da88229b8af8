"""Linear maps into and out of the attention heads, and several of them as one matrix product.

The names and shapes of a projection's arrays are those that checkpoints and converters read.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from flaxformer_mt.model.initializers import Initializer
from flaxformer_mt.model.layers import Kept
from flaxformer_mt.model.products import add_bias, contract, rectify
from flaxformer_mt.model.quantization import Quantized, contract_quantized
from flaxformer_mt.shapes import Array, activations_are_sharded

# Name of the results of projections, which `model.remat=dots` keeps.
PROJECTED = "projected"


class Projection(nn.Module):
    """Linear map: the last axes of x times a kernel [*inputs, *features], plus a bias [*features]."""

    inputs: tuple[int, ...]
    features: tuple[int, ...]
    # Letters of the kernel's axes, without the single tap of a convolution.
    axes: str
    use_bias: bool
    dtype: DTypeLike
    # Initialises the kernel as a matrix [product of inputs, product of features].
    kernel_init: Initializer
    bias_init: Initializer

    def setup(self) -> None:
        matrix = math.prod(self.inputs), math.prod(self.features)

        def init(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
            return self.kernel_init(key, matrix, dtype).reshape(shape)

        self.kernel = self.param("kernel", init, (*self.inputs, *self.features))
        # [*features] of a quantised kernel, or None.
        self.kernel_scale = self.get_variable("params", "kernel_scale")
        if self.use_bias:

            def init_bias(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
                return self.bias_init(key, (math.prod(shape),), dtype).reshape(shape)

            self.bias = self.param("bias", init_bias, self.features)

    def __call__(self, x: Array) -> Array:
        """Map x [..., *inputs] to [..., *features]."""
        y = self._multiply(x)
        y = add_bias(y, self.bias, self.dtype) if self.use_bias else y.astype(self.dtype)
        return checkpoint_name(y, PROJECTED)

    def rectify(self, x: Array, kept: Kept | None) -> Array:
        """Map x [..., *inputs] to the positive part of [..., *features], less what dropout takes from it."""
        bias = self.bias if self.use_bias else None
        entries, scale = (None, 1.0) if kept is None else kept
        y = rectify(self._multiply(x), bias, entries, scale, self.dtype)
        return checkpoint_name(y, PROJECTED)

    def _multiply(self, x: Array) -> Array:
        """Multiply x [..., *inputs] with the kernel: float32 [..., *features]."""
        leading = x.shape[: x.ndim - len(self.inputs)]
        width = math.prod(self.inputs)  # not -1: a language model's source has no tokens
        x = x.astype(self.dtype).reshape(*leading, width)
        if not activations_are_sharded():
            y = _contract_merged(x, self.kernel, self.kernel_scale, inputs=len(self.inputs))
            return y.reshape(*leading, *self.features)
        kernel = self.kernel.reshape(self.kernel.shape[-len(self.axes) :])
        features = len(self.features)
        x = x.reshape(*leading, *kernel.shape[:-features])
        summed, kept = self.axes[:-features], self.axes[-features:]
        return contract(f"...{summed},{self.axes}->...{kept}", x, kernel, parameter=True)

    def of_head(self, x: Array, head: int) -> Array:
        """Map x [..., D] to the features [..., K] of one of the heads H, of features [H, K]."""
        scale = None if self.kernel_scale is None else self.kernel_scale[head]
        y = _contract_merged(x.astype(self.dtype), self.kernel[:, head], scale)
        return (y + self.bias[head] if self.use_bias else y).astype(self.dtype)


def project_beside(x: Array, projections: Sequence[Projection], *, biases: Array | None = None) -> Array:
    """Apply several projections of N equal shapes to the same x [..., D]: [..., N, *features].

    One product of three times the width is faster than three products, forward and backward, and reads x
    once. The kernels are stacked on a new axis; where devices share the work, the product keeps it beside the
    heads, so that each device computes its own heads only.

    Args:
      biases: what to add instead of `stack_biases`.
    """
    first = projections[0]
    dtype = first.dtype
    kernels = jnp.stack([projection.kernel for projection in projections], axis=1)
    scales = None
    if first.kernel_scale is not None:
        scales = jnp.stack([projection.kernel_scale for projection in projections])
    shape = (*x.shape[:-1], len(projections), *first.features)
    biases = stack_biases(projections) if biases is None else biases
    if activations_are_sharded():
        together = contract("...D,DNHK->...NHK", x.astype(dtype), kernels, parameter=True)
        if biases is not None:
            together = together + biases
        return checkpoint_name(together.astype(dtype), PROJECTED)
    # On one device the matrix of merged axes needs no transposition.
    together = _contract_merged(x.astype(dtype), kernels, scales)
    together = together.astype(dtype) if biases is None else add_bias(together, biases.reshape(-1), dtype)
    return checkpoint_name(together, PROJECTED).reshape(shape)


def _contract_merged(x: Array, kernel: Array, scale: Array | None, *, inputs: int = 1) -> Array:
    """Multiply x [..., D] with a kernel whose first axes are D and whose others are merged: [..., F].

    Args:
      scale: of the outputs, if the kernel is quantised.
    """
    matrix = kernel.reshape(math.prod(kernel.shape[:inputs]), -1)
    if scale is None:
        return contract("...D,DF->...F", x, matrix)
    return contract_quantized("...D,DF->...F", x, Quantized(matrix, scale.reshape(-1)))


def stack_biases(projections: Sequence[Projection]) -> Array | None:
    """Stack the biases of projections of equal shapes, [N, *features]; None without biases."""
    if not projections[0].use_bias:
        return None
    return jnp.stack([projection.bias for projection in projections])


def project_together(x: Array, projections: Sequence[Projection]) -> list[Array]:
    """Apply several projections to the same x [..., D], by one product if their shapes are equal."""
    if not have_equal_shapes(projections):
        return [projection(x) for projection in projections]
    together = project_beside(x, projections)
    parts = jax.lax.split(together, (1,) * len(projections), axis=x.ndim - 1)
    return [part.squeeze(x.ndim - 1) for part in parts]


def have_equal_shapes(projections: Sequence[Projection]) -> bool:
    """Tell whether the results of projections have the same shape, so that one product computes them."""
    return all(other.features == projections[0].features for other in projections)
