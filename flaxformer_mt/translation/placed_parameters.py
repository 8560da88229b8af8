"""The parameters of a translator's models, in the types of their products, on their devices."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from flaxformer_mt.config import ModelConfig, Quantization
from flaxformer_mt.errors import UserError
from flaxformer_mt.kernels.bfloat16 import cast_kernels
from flaxformer_mt.kernels.int8 import quantize_matrix
from flaxformer_mt.model.lora import matrix_axes
from flaxformer_mt.parallel import SplitParameters, place_parameters
from flaxformer_mt.runs.load_run import TrainedModel
from flaxformer_mt.trees import flatten_tree, nest_leaves

# Where the output layer's table can be, the first that is there: of its own, tied, or one for all.
_TABLES = (
    "output_kernel",
    "target_embedding/embedding",
    "shared_embedding/embedding",
    "token_embedding/embedding",
)


def quantize_params(params: Any) -> Any:
    """Quantise all projections and the output layer of a model's parameters, with one subtree per layer.

    Args:
      params: nested dicts of float arrays, numpy's or JAX's; what is quantised becomes numpy's.
    """
    leaves = flatten_tree(params)
    quantized = dict(leaves)
    for path, leaf in leaves.items():
        if path.endswith("/kernel"):
            inputs, _ = matrix_axes(path, leaf.shape)
            quantized[path], quantized[f"{path}_scale"] = quantize_matrix(leaf, range(len(inputs)))
    table = next(path for path in _TABLES if path in leaves)
    rows = np.asarray(leaves[table]).T if table == "output_kernel" else leaves[table]
    quantized["output_int8"], quantized["output_scale"] = quantize_matrix(rows, [1])
    return nest_leaves(quantized)


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
