"""Checkpoints that other toolkits write with torch.save: tensors, plain values, and objects of their classes.

Reads them with `weights_only`, which runs no code of a file. An object of a class that PyTorch does not know,
such as argparse.Namespace, becomes a `Record`: what the file says of it, and no class of that name. What
PyTorch refuses whatever it is called, as functions of the system and Python's own, stays refused.
"""

import pickletools
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from flaxformer_mt.convert.foreign_files import check_tensors, check_unpacked_size
from flaxformer_mt.errors import UserError, first_line

# Pickles of a file that is no zip archive: magic number, version, machine, object.
_OLD_PICKLES = 4
# A plain dict takes the place of this class, whose entries PyTorch would refuse.
_DEFAULT_DICT = "collections.defaultdict"
# Types that objects name, as a defaultdict that of its values.
_TYPES = [f"builtins.{name}" for name in ("bool", "bytes", "dict", "float", "int", "list", "object", "str")]


class Record:
    """An object of another program's class: its attributes, and the arguments that it was made with."""

    def __new__(cls, *arguments: Any, **options: Any) -> "Record":
        self = super().__new__(cls)
        self.__dict__["arguments"] = arguments
        return self

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Do nothing: `__new__` has kept the arguments."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


def _make_dict(*arguments: Any) -> dict[Any, Any]:
    return {}


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint, which is a dict; tensors of a zip archive stay in the file until they are used."""
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
        # Of what PyTorch refuses it says the cause in a later line, after advice to run the file's code.
        refused = re.search(
            r"(Unsupported|Trying to load unsupported|Can only|Only) .*?(?=\. |\n|$)", str(error)
        )
        reason = f"{type(error).__name__}: {refused[0] if refused else first_line(error)}"
        raise UserError(f"{path} is not a checkpoint that loads safely: {reason}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"{path} is not a checkpoint: it must be a dict, but is a {type(loaded).__name__}")
    return {name: value for name, value in loaded.items() if isinstance(name, str)}


def take_tensors(state: Any, path: Path, *, what: str) -> dict[str, torch.Tensor]:
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in state.items()
    ):
        raise UserError(f"{path} has no tensors under {what}; give a checkpoint that the toolkit has saved")
    check_tensors(state, path)
    return dict(state)


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the entries of a dict, or the attributes of an object that was one in the toolkit."""
    if isinstance(value, Record):
        value = vars(value)
    return {str(name): attribute for name, attribute in value.items()} if isinstance(value, dict) else {}


def _find_classes(path: Path) -> set[str]:
    """Return the names of classes and functions in the pickles of a file that PyTorch does not know."""
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
