"""Linear layers: dense layers, and the projections into and out of attention heads.

Checkpoints and converters depend on the names and shapes of their arrays.
"""

import math

import jax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from flaxformer_mt.kernels import Kernels
from flaxformer_mt.kernels.int8 import Quantized, multiply_quantized
from flaxformer_mt.model.initializers import Initializer, Reshaped, declare
from flaxformer_mt.shapes import Array

# Name of the results of projections, which `model.remat=dots` keeps.
PROJECTED = "projected"


class Projection(nn.Module):
    """A linear layer: x [..., *inputs] times a kernel [*inputs, *features], plus a bias [*features]."""

    inputs: tuple[int, ...]
    features: tuple[int, ...]
    # Letters of the kernel's axes, without the single tap of a convolution.
    axes: str
    use_bias: bool
    dtype: DTypeLike
    # Initializes the kernel as a matrix [product of inputs, product of features].
    kernel_init: Initializer
    bias_init: Initializer
    kernels: Kernels
    # Whether the bias gets its gradient here; otherwise, where the results are used.
    bias_gradient: bool = True

    def setup(self) -> None:
        matrix = math.prod(self.inputs), math.prod(self.features)
        kernel_init = Reshaped(self.kernel_init, matrix)
        self.kernel = declare(self, "kernel", kernel_init, (*self.inputs, *self.features))
        # The scale [*features] of a quantized kernel; else None.
        self.kernel_scale = self.get_variable("params", "kernel_scale")
        if self.use_bias:
            self.bias = declare(self, "bias", self.bias_init, self.features)

    def __call__(self, x: Array) -> Array:
        y = self.multiply(x)
        if self.use_bias:
            y = y + (self.bias if self.bias_gradient else jax.lax.stop_gradient(self.bias)).reshape(-1)
        return checkpoint_name(y.astype(self.dtype), PROJECTED).reshape(*y.shape[:-1], *self.features)

    def multiply(self, x: Array) -> Array:
        """Multiply x [..., *inputs] by the kernel, without adding the bias; the result is float32 [..., F].

        F joins the axes of heads and their features, as in the matrices of the paper. On a TPU, which pads
        the last axis to 128, separate axes would have to be rearranged before and after the attention kernel.
        """
        leading = x.shape[: x.ndim - len(self.axes) + len(self.features)]
        inputs, features = math.prod(self.inputs), math.prod(self.features)
        x = x.astype(self.dtype).reshape(*leading, inputs)
        spec, shape = ("...D,DF->...F", (-1, features))  # -1: devices may have a part along D
        if self.axes.endswith("D"):
            spec, shape = ("...F,FD->...D", (inputs, -1))
        matrix = self.kernel.reshape(shape)
        if self.kernel_scale is None:
            return self.kernels.product(spec, x, matrix, parameter=True)
        quantized = Quantized(matrix, self.kernel_scale.reshape(-1))
        return multiply_quantized(self.kernels.integer_product, spec, x, quantized)

    def of_first_head(self, x: Array) -> Array:
        """Project x [..., D] to the features [..., K] of the first head only."""
        y = self.kernels.product("...D,DK->...K", x.astype(self.dtype), self.kernel[:, 0], parameter=True)
        return (y + self.bias[0] if self.use_bias else y).astype(self.dtype)
