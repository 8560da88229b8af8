"""The position-wise feed-forward network, plain or gated."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.kernels import Kernels
from flaxformer_mt.kernels.relu import rectify
from flaxformer_mt.model.initializers import make_initializers
from flaxformer_mt.model.layers import Dropout
from flaxformer_mt.model.projections import PROJECTED, Projection
from flaxformer_mt.parallel.sharding import constrain
from flaxformer_mt.shapes import Array

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),  # with erf, Hendrycks and Gimpel 2016
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}
# Activations of which the gate is a projection of its own -> the function of the gate.
_GATED: dict[str, Callable[[Array], Array]] = {"swiglu": jax.nn.silu, "geglu_tanh": _ACTIVATIONS["gelu_tanh"]}


class FeedForward(nn.Module):
    """Feed-forward network: activation(x W1 + b1) W2 + b2 (Vaswani et al. 2017, section 3.3).

    With swiglu and geglu_tanh, a second input projection gates the first one (Shazeer 2020).
    """

    config: ModelConfig
    kernels: Kernels

    def setup(self) -> None:
        config = self.config
        self.input = self._make_layer(config.ffn_dim, fan_in=config.model_dim, axes="DF")
        if config.activation in _GATED:
            self.gate = self._make_layer(config.ffn_dim, fan_in=config.model_dim, axes="DF")
        self.output = self._make_layer(config.model_dim, fan_in=config.ffn_dim, axes="FD")
        rate = config.ffn_dropout_rate
        self.dropout = Dropout(config.dropout_rate if rate is None else rate)

    def _make_layer(self, features: int, *, fan_in: int, axes: str) -> Projection:
        """Make a dense layer with a kernel [input, output], or [1, input, output] for a convolution."""
        config = self.config
        initializers = make_initializers(config)
        taps = (1,) if config.ffn_layer == "convolution" else ()
        return Projection(
            (*taps, fan_in),
            (features,),
            axes=axes,
            use_bias=config.ffn_bias,
            dtype=jnp.dtype(config.dtype),
            kernel_init=initializers.feedforward,
            bias_init=initializers.bias(fan_in),
            kernels=self.kernels,
        )

    def __call__(self, x: Array, *, deterministic: bool) -> Array:
        """Map x [B, T, D] to [B, T, D], with hidden width F."""
        config = self.config
        if config.activation == "relu":
            key = self.dropout.draw_key(deterministic=deterministic)
            bias = self.input.bias if config.ffn_bias else None
            hidden = rectify(self.input.multiply(x), bias, key, self.dropout.rate, jnp.dtype(config.dtype))
            return self.output(constrain(checkpoint_name(hidden, PROJECTED), "BTF"))
        hidden = constrain(self.input(x), "BTF")
        if config.activation in _GATED:
            hidden = hidden * _GATED[config.activation](self.gate(x))
        else:
            hidden = _ACTIVATIONS[config.activation](hidden)
        return self.output(self.dropout(hidden, deterministic=deterministic))
