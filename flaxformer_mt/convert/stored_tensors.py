"""The arrays of a Hugging Face folder, read one by one: a model of gigabytes is never in memory twice.

Reads model.safetensors, in one file or in several shards with an index, and pytorch_model.bin.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from flaxformer_mt.config.files import read_json_object
from flaxformer_mt.convert.foreign_files import StoredArray, check_tensors
from flaxformer_mt.convert.name_table import Tensors
from flaxformer_mt.errors import UserError, describe_error

WEIGHTS_NAME = "model.safetensors"
_PICKLE = "pytorch_model.bin"


def as_arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, StoredArray]:
    return {name: _as_array(tensor.detach, tuple(tensor.shape)) for name, tensor in tensors.items()}


def _as_array(read: Callable[[], torch.Tensor], shape: tuple[int, ...]) -> StoredArray:
    return StoredArray(lambda: read().float().numpy(), shape)


def open_tensors(folder: Path) -> dict[str, StoredArray]:
    if _has_only_pickles(folder):
        return _open_pickles(folder)
    return open_safetensors(_find_files(folder, WEIGHTS_NAME))


def _has_only_pickles(folder: Path) -> bool:
    stored = (folder / name for name in (WEIGHTS_NAME, f"{WEIGHTS_NAME}.index.json"))
    return not any(path.is_file() for path in stored) and any(
        (folder / name).is_file() for name in (_PICKLE, f"{_PICKLE}.index.json")
    )


def _find_files(folder: Path, name: str) -> list[Path]:
    index = folder / f"{name}.index.json"
    if (folder / name).is_file():
        return [folder / name]
    if not index.is_file():
        raise UserError(
            f"{folder / name} does not exist, nor does {index.name}; give the folder of a model as "
            "--input=PATH"
        )
    try:
        shards = read_json_object(index)["weight_map"]
        names = sorted({shard for shard in shards.values() if isinstance(shard, str)})
    except (ValueError, OSError, KeyError, AttributeError) as error:
        raise UserError(f"{index} is damaged: {type(error).__name__}: {error}; download it again") from error
    for shard in names:
        if Path(shard).name != shard:
            raise UserError(f"{index} names the shard {shard!r:.60}, which is not a file of its folder")
        if not (folder / shard).is_file():
            raise UserError(f"{folder / shard} does not exist, but {index.name} lists it; download it")
    return [folder / shard for shard in names]


def open_safetensors(paths: Iterable[Path]) -> dict[str, StoredArray]:
    tensors: dict[str, StoredArray] = {}
    for path in paths:
        with _naming_damage(path), safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        for name, shape in shapes.items():
            _add(tensors, name, _as_array(functools.partial(_read_tensor, path, name), shape), path)
    return tensors


def _read_tensor(path: Path, name: str) -> torch.Tensor:
    """Map a file into memory for one array alone: pages of others do not stay."""
    with _naming_damage(path), safe_open(path, framework="pt") as file:
        tensor = file.get_tensor(name)
    check_tensors({name: tensor}, path)
    return tensor


def _open_pickles(folder: Path) -> dict[str, StoredArray]:
    tensors: dict[str, StoredArray] = {}
    for path in _find_files(folder, _PICKLE):
        with _naming_damage(path):
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        state: Mapping[Any, Any] = loaded if isinstance(loaded, dict) else {}
        if not state or not all(
            isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in state.items()
        ):
            raise UserError(f"{path} is no state dict: it must have a tensor for each name")
        check_tensors(dict(state), path)
        for name, tensor in as_arrays(state).items():
            _add(tensors, name, tensor, path)
    return tensors


def _add(tensors: dict[str, StoredArray], name: str, tensor: StoredArray, path: Path) -> None:
    if name in tensors:
        raise UserError(f"{path} has {name}, which another shard has too; download the model again")
    tensors[name] = tensor


@contextlib.contextmanager
def _naming_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # damaged headers and pickles raise errors of many types
        reason = describe_error(error)
        raise UserError(f"{path} is damaged or no file of tensors: {reason}") from error


def save_safetensors(tensors: Tensors, path: Path) -> None:
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)
