"""The parameters of a translator's models, in the types of their products, on their devices."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from flaxformer_mt.config import ModelConfig, Quantization
from flaxformer_mt.errors import UserError
from flaxformer_mt.kernels.bfloat16 import cast_kernels
from flaxformer_mt.parallel import SplitParameters, place_parameters
from flaxformer_mt.runs.load_run import TrainedModel
from flaxformer_mt.translation.quantization import quantize_params


def place_models(
    models: Sequence[tuple[Any, ModelConfig]],
    spread: bool | SplitParameters,
    quantization: Quantization | None,
) -> tuple[tuple[Any, ...], str]:
    """Cast or quantize the matrices of models, and put the parameters where programs expect them.

    Returns the parameters of each model, and a digest of all of them if several processes hold them together,
    which only these processes can compute together; otherwise an empty one.

    Args:
      models: parameters and config of each. Parameters may be None, and remain so.
      spread, quantization: see `Translator`.

    Raises:
      UserError: quantized parameters would have to be split over devices.
    """
    if quantization and isinstance(spread, SplitParameters):
        raise UserError(
            f"quantization={quantization} is for models that fit on one device, but this one has to be split "
            "over several; leave it out"
        )
    placed = []
    for params, config in models:
        if params is not None:
            kernels = cast_kernels(quantize_params(params) if quantization else params, config.dtype)
            params = place_parameters(kernels, spread)
        placed.append(params)
    digest = spread.digest((placed[0], tuple(placed[1:]))) if isinstance(spread, SplitParameters) else ""
    return tuple(placed), digest


def on_host(trained: TrainedModel) -> TrainedModel:
    """Take the parameters from the device, which would compile a program for each shape to cast them."""
    return dataclasses.replace(trained, params=jax.device_get(trained.params))
