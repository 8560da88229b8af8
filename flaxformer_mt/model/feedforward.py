"""The position-wise feed-forward network, plain or gated."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from flaxformer_mt.config import ModelConfig
from flaxformer_mt.model.initializers import make_initializers
from flaxformer_mt.model.layers import Dropout
from flaxformer_mt.model.projections import Projection
from flaxformer_mt.shapes import Array, constrain

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),  # with erf, Hendrycks and Gimpel 2016
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}


class FeedForward(nn.Module):
    """Feed-forward network activation(x W1 + b1) W2 + b2 (Vaswani et al. 2017, section 3.3).

    With swiglu a second input projection gates the first one (Shazeer 2020).
    """

    config: ModelConfig

    def setup(self) -> None:
        config = self.config
        self.input = self._make_layer(config.ffn_dim, fan_in=config.model_dim, axes="DF")
        if config.activation == "swiglu":
            self.gate = self._make_layer(config.ffn_dim, fan_in=config.model_dim, axes="DF")
        self.output = self._make_layer(config.model_dim, fan_in=config.ffn_dim, axes="FD")
        rate = config.ffn_dropout_rate
        self.dropout = Dropout(config.dropout_rate if rate is None else rate)

    def _make_layer(self, features: int, *, fan_in: int, axes: str) -> Projection:
        """Make a dense layer, kernel [input, output], or an equal convolution, kernel [1, input, output]."""
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
        )

    def __call__(self, x: Array, *, deterministic: bool) -> Array:
        """Map x [B, T, D] to [B, T, D] through width F."""
        if self.config.activation == "relu":
            kept = self.dropout.draw((*x.shape[:-1], self.config.ffn_dim), deterministic=deterministic)
            hidden = self.input.rectify(_taps(self.input, x), kept)
            return _run(self.output, constrain(hidden, "BTF"))
        hidden = constrain(_run(self.input, x), "BTF")
        if self.config.activation == "swiglu":
            hidden = hidden * jax.nn.silu(_run(self.gate, x))
        else:
            hidden = _ACTIVATIONS[self.config.activation](hidden)
        return _run(self.output, self.dropout(hidden, deterministic=deterministic))


def _run(layer: Projection, x: Array) -> Array:
    """Apply a layer to x [..., D]."""
    return layer(_taps(layer, x))


def _taps(layer: Projection, x: Array) -> Array:
    """Shape x [..., D] as the inputs of a layer: [..., D], or [..., 1, D] of a convolution."""
    return x.reshape(*x.shape[:-1], *layer.inputs)
