"""Reads foreign files safely: sizes in a header or config are checked before memory is allocated for them.

A few bytes can describe a network of a terabyte. The sizes are compared with fixed bounds and with the size
of the files, which have at least one byte per parameter.
"""

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.config import Config
from flaxformer_mt.config.checks import check_bounds, validate
from flaxformer_mt.config.files import read_file
from flaxformer_mt.errors import UserError


def check_network(config: Config, folder: Path) -> None:
    validate(config)
    check_bounds(config, f"{folder}: ")
    model = config.model
    # Each layer has at least one feed-forward matrix.
    least = (model.num_encoder_layers + model.num_decoder_layers) * model.model_dim * model.ffn_dim
    stored = stored_bytes(folder)
    if least > stored:
        raise UserError(
            f"{folder}: model.num_encoder_layers {model.num_encoder_layers}, model.num_decoder_layers "
            f"{model.num_decoder_layers}, model.model_dim {model.model_dim} and model.ffn_dim "
            f"{model.ffn_dim} make more than {least} parameters, but the files have {stored} bytes"
        )


def stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def check_tensors(tensors: dict[str, Any], path: Path) -> None:
    """Raise UserError unless all PyTorch tensors are plain floating-point arrays, no larger than the file."""
    size = path.stat().st_size
    problems = [
        f"{name} {problem}" for name, tensor in tensors.items() if (problem := _problem(tensor, size))
    ]
    if problems:
        raise UserError(
            f"{path} has tensors that are not plain floating-point arrays; save the model in float32 without "
            "quantization:\n  " + "\n  ".join(problems)
        )


def _problem(tensor: Any, size: int) -> str:
    if tensor.is_nested or str(tensor.layout) != "torch.strided":
        return f"has the layout {'nested' if tensor.is_nested else tensor.layout}"
    if tensor.is_quantized or not tensor.is_floating_point():
        return f"has the type {tensor.dtype}"
    if tensor.is_meta:
        return "has no data (device meta)"
    if (count := tensor.numel() * tensor.element_size()) > size:
        return f"has {count} bytes, but the file has {size}"
    return ""


def check_equal(stored: Any, expected: dict[str, Any], path: Path) -> None:
    if not isinstance(stored, dict):
        raise UserError(f"{path} does not describe the arguments of the foreign model")
    for name, value in expected.items():
        if name in stored and stored[name] != value:
            raise UserError(f"{path}: {name} is {str(stored[name])[:80]}, but the config implies {value}")


def check_fields(
    fields: Mapping[str, Any], kinds: Mapping[str, tuple[type, float, float]], path: Path
) -> None:
    """Raise UserError unless each field is None or within its bounds in `kinds`: (type, minimum, maximum)."""
    problems = []
    for name, (kind, low, high) in kinds.items():
        value = fields.get(name)
        accepted = (int,) if kind is int else (int, float)
        if value is None or (type(value) in accepted and low <= value <= high):
            continue
        noun = "a whole number" if kind is int else "a number"
        problems.append(f"{path}: {name} is {str(value)[:80]!r}; it must be {noun} from {low:g} to {high:g}")
    if problems:
        raise UserError("\n".join(problems))


def read_bytes(path: Path, *, most: int = 1 << 30, remedy: str = "copy it again") -> bytes:
    try:
        return read_file(path, most=most)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}; {remedy}") from error


def read_text(path: Path, *, most: int = 1 << 30, remedy: str = "copy it again") -> str:
    try:
        return read_bytes(path, most=most, remedy=remedy).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} cannot be read: {error}; {remedy}") from error


def check_unpacked_size(path: Path) -> None:
    """Raise UserError if a zip archive unpacks to much more data than the size of its file."""
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > 2 * path.stat().st_size + (1 << 20):
        raise UserError(f"{path} has {path.stat().st_size} bytes, but claims to unpack to {unpacked}")


class StoredArray(NamedTuple):
    """An array in a file: its shape is known, and its values are read on each conversion to numpy."""

    read: Callable[[], np.ndarray]
    shape: tuple[int, ...]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.read(), dtype)
