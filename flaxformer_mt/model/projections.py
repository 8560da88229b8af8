"""Linear maps: of the model width, into attention heads and out of them.

The names and shapes of a projection's arrays are those that checkpoints and converters read.
"""

import math

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
    kernels: Kernels

    def setup(self) -> None:
        matrix = math.prod(self.inputs), math.prod(self.features)
        kernel_init = Reshaped(self.kernel_init, matrix)
        self.kernel = declare(self, "kernel", kernel_init, (*self.inputs, *self.features))
        # [*features] of a quantised kernel, or None.
        self.kernel_scale = self.get_variable("params", "kernel_scale")
        if self.use_bias:
            self.bias = declare(self, "bias", self.bias_init, self.features)

    def __call__(self, x: Array) -> Array:
        """Map x [..., *inputs] to [..., *features]."""
        y = self.multiply(x)
        y = y + self.bias if self.use_bias else y
        return checkpoint_name(y.astype(self.dtype), PROJECTED)

    def multiply(self, x: Array) -> Array:
        """Multiply x [..., *inputs] with the kernel, to float32 [..., *features], without the bias."""
        summed, kept = self.axes[: -len(self.features)], self.axes[-len(self.features) :]
        x = x.astype(self.dtype)
        if self.kernel_scale is not None:
            return self._multiply_quantized(x, len(summed))
        kernel = self.kernel.reshape(self.kernel.shape[-len(self.axes) :])
        return self.kernels.product(f"...{summed},{self.axes}->...{kept}", x, kernel, parameter=True)

    def _multiply_quantized(self, x: Array, summed: int) -> Array:
        leading = x.shape[: x.ndim - summed]
        inputs = math.prod(self.inputs)  # not -1: a language model's source has no tokens
        matrix = Quantized(self.kernel.reshape(inputs, -1), self.kernel_scale.reshape(-1))
        x = x.reshape(*leading, inputs)
        y = multiply_quantized(self.kernels.integer_product, "...D,DF->...F", x, matrix)
        return y.reshape(*leading, *self.features)

    def of_head(self, x: Array, head: int) -> Array:
        """Map x [..., D] to the features [..., K] of one of the heads H, of features [H, K]."""
        y = self.kernels.product("...D,DK->...K", x.astype(self.dtype), self.kernel[:, head], parameter=True)
        return (y + self.bias[head] if self.use_bias else y).astype(self.dtype)
