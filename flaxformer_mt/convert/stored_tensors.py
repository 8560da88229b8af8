"""Reads and writes tensor files: safetensors files, and files written by torch.save.

Arrays are read one by one, so that a large model is never in memory twice. A Hugging Face folder has
model.safetensors, in one file or in several shards with an index, or pytorch_model.bin. Checkpoints of other
toolkits are read with `weights_only`, so that no code in a file is executed. An object whose class PyTorch
does not allow, such as argparse.Namespace, becomes a `Record` with the attributes from the file; its class is
not imported. Functions that PyTorch always rejects, such as those of the module os, raise a UserError.
"""

import contextlib
import functools
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, ValuesView
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from flaxformer_mt.config.files import read_json_object
from flaxformer_mt.convert.foreign_files import StoredArray, check_tensors, check_unpacked_size
from flaxformer_mt.convert.name_table import Tensors
from flaxformer_mt.errors import UserError, describe_error, first_line, name_full_disk

WEIGHTS_NAME = "model.safetensors"
# Pattern of the prefixes that wrappers add to names, in any order.
WRAPPERS = r"^(_orig_mod\.|module\.)+"
_PICKLE = "pytorch_model.bin"
# Maximum number of values (names, options, numbers) in a checkpoint; a large vocabulary has a million.
_MOST_VALUES = 1 << 21
# Number of pickles in a file that is not a zip archive: magic number, version, machine, object.
_OLD_PICKLES = 4
# This class is replaced by a plain dict, since PyTorch would reject its entries.
_DEFAULT_DICT = "collections.defaultdict"
# Types that objects refer to, as a defaultdict refers to the type of its values.
_TYPES = [f"builtins.{name}" for name in ("bool", "bytes", "dict", "float", "int", "list", "object", "str")]


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
            tensors[name] = _as_array(functools.partial(_read_tensor, path, name), shape)
    return unwrap(tensors)


def _read_tensor(path: Path, name: str) -> torch.Tensor:
    """Read one array; the file is memory-mapped only while reading, so that no other pages stay in memory."""
    with _naming_damage(path), safe_open(path, framework="pt") as file:
        tensor = file.get_tensor(name)
    check_tensors({name: tensor}, path)
    return tensor


def _open_pickles(folder: Path) -> dict[str, StoredArray]:
    tensors: dict[str, StoredArray] = {}
    for path in _find_files(folder, _PICKLE):
        tensors |= as_arrays(take_tensors(load_checkpoint(path), path, what="it"))
    return tensors


@contextlib.contextmanager
def _naming_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # damaged headers and pickles raise errors of many types
        reason = describe_error(error)
        raise UserError(f"{path} is damaged or no file of tensors: {reason}; copy it again") from error


def save_safetensors(tensors: Tensors, path: Path) -> None:
    path.touch()
    mode = path.stat().st_mode
    with name_full_disk(path):
        save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


class Record:
    """Stands for an object of a toolkit's class; keeps the object's attributes and constructor arguments."""

    def __new__(cls, *arguments: Any, **options: Any) -> "Record":
        self = super().__new__(cls)
        self.__dict__["arguments"] = arguments
        return self

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Do nothing, since `__new__` stores the arguments."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


def _make_dict(*arguments: Any) -> dict[Any, Any]:
    return {}


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint, which is a dict; raise UserError if this would execute code in the file."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; give its folder or the file itself as --input=PATH")
    try:
        is_archive = zipfile.is_zipfile(path)
        if is_archive:
            check_unpacked_size(path)
        known = torch.serialization.get_safe_globals()
        unknown: list[Any] = [(_make_dict, _DEFAULT_DICT)]
        classes = {*_TYPES, *_find_classes(path)} - {_DEFAULT_DICT}
        unknown += [(Record, name) for name in sorted(classes)]
        with torch.serialization.safe_globals([entry for entry in unknown if entry not in known]):
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except UserError:
        raise
    except Exception as error:  # a damaged file raises zip, pickle and storage errors of many types
        # For unsafe content, PyTorch states the cause in a later line, after advice to run the file's code.
        refused = re.search(
            r"(Unsupported|Trying to load unsupported|Can only|Only) .*?(?=\. |\n|$)", str(error)
        )
        reason = f"{type(error).__name__}: {refused[0] if refused else first_line(error)}"
        raise UserError(f"{path} is not a checkpoint that loads safely: {reason}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"{path} is not a checkpoint: it must be a dict, but is a {type(loaded).__name__}")
    _check_values(loaded, path)
    return {name: value for name, value in loaded.items() if isinstance(name, str)}


def _check_values(loaded: Any, path: Path) -> None:
    """Raise UserError for too many values, as in lists that contain themselves or each other."""
    left = [loaded]
    for one in left:  # the list grows in the loop
        inner: Any = vars(one) if isinstance(one, Record) else one
        inner = inner.values() if isinstance(inner, dict) else inner
        left += inner if isinstance(inner, list | tuple | set | ValuesView) else ()
        if len(left) > _MOST_VALUES:
            raise UserError(f"{path} has more than {_MOST_VALUES} values, each list counted where it is used")


def take_tensors(state: Any, path: Path, *, what: str) -> dict[str, torch.Tensor]:
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in state.items()
    ):
        raise UserError(f"{path}: {what} must contain named tensors and nothing else; save the model again")
    check_tensors(state, path)
    return unwrap(state)


def unwrap(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the prefixes of torch.compile and data parallelism from names if all names have a prefix."""
    if tensors and all(re.match(WRAPPERS, name) for name in tensors):
        return {re.sub(WRAPPERS, "", name): tensor for name, tensor in tensors.items()}
    return dict(tensors)


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the entries of a dict or the attributes of a `Record`; {} for other values."""
    if isinstance(value, Record):
        value = vars(value)
    return {str(name): attribute for name, attribute in value.items()} if isinstance(value, dict) else {}


def _find_classes(path: Path) -> set[str]:
    """Return the names of all classes and functions in a file's pickles that PyTorch does not allow."""
    known = set(torch._weights_only_unpickler._get_allowed_globals())
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            return {name for _ in range(_OLD_PICKLES) for name in _find_names(file)} - known
    with zipfile.ZipFile(path) as archive:
        name = next((name for name in archive.namelist() if name.endswith("data.pkl")), None)
        if name is None:
            raise UserError(f"{path} is a zip archive, but no file of torch.save")
        with archive.open(name) as file:
            return set(_find_names(file)) - known


def _find_names(file: Any) -> set[str]:
    names = (argument for code, argument, _ in pickletools.genops(file) if code.name == "GLOBAL")
    return {str(name).replace(" ", ".", 1) for name in names}
