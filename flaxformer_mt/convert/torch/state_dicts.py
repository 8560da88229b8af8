"""Formats that consist of the state dict of a PyTorch class; only tensors are unpickled."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flaxformer_mt.config import Config
from flaxformer_mt.convert import formats
from flaxformer_mt.convert.foreign_files import check_equal, check_network
from flaxformer_mt.convert.formats import Format, ImportOverrides, Outputs, Weights
from flaxformer_mt.convert.name_table import Constant, Rule, Table, Tensors
from flaxformer_mt.convert.network_fields import Fields, find_problems
from flaxformer_mt.convert.stored_tensors import as_arrays, load_checkpoint, take_tensors
from flaxformer_mt.errors import UserError, name_full_disk
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import Vocabs

STATE_NAME = "state_dict.pt"
_NO_OVERRIDES = ImportOverrides()
Loaded = tuple[Tensors, Config, Vocabs]


@dataclass(frozen=True)
class StateDictFormat:
    """A format that consists of the state dict of one PyTorch class.

    rules: returns the rules of the name table. arguments: returns the class's arguments for config.json.
    run: returns logits [B, T, V] for the tensors of all files, the arguments and a batch.
    file_of: returns the name of the file that stores a tensor.
    absent: fields whose parameters the class always has; if a network lacks them, they are 0.
    write_more: writes further files, given the weights, the tensors and the folder.
    load_other: loads another kind of file, which contains its config; returns None for other paths.
    """

    name: str
    fields: Fields
    rules: Callable[[Config], list[Rule | Constant]]
    arguments: Callable[[Config, Vocabs], dict[str, Any]]
    run: Callable[[dict[str, torch.Tensor], dict[str, Any], Batch], torch.Tensor]
    find_more_problems: Callable[[Config], Iterable[str]] = lambda config: ()
    file_of: Callable[[str], str] = lambda name: STATE_NAME
    absent: tuple[str, ...] = ()
    write_more: Callable[[Weights, Tensors, Path], None] | None = None
    load_other: Callable[[Path, ImportOverrides], Loaded | None] = lambda path, overrides: None

    def problems(self, config: Config) -> list[str]:
        return [*find_problems(self.fields, config), *self.find_more_problems(config)]

    def make_format(self) -> Format:
        return Format(self.name, self.problems, self._write, self._open, self._read)

    def make_table(self, config: Config, vocabs: Vocabs) -> Table:
        rules = self.rules(config)
        return formats.make_table(config.model, vocabs, rules, what=self.name, absent=self.absent)

    def _write(self, weights: Weights, folder: Path, quantization: str) -> None:
        tensors = self.make_table(weights.config, weights.vocabs).to_foreign(weights.leaves)
        for file in {self.file_of(name): None for name in tensors}:
            save_tensors({n: a for n, a in tensors.items() if self.file_of(n) == file}, folder / file)
        (folder / formats.VOCAB_NAME).mkdir()
        weights.vocabs.save(folder / formats.VOCAB_NAME)
        arguments = self.arguments(weights.config, weights.vocabs)
        formats.write_config_json(weights, folder, self.name, {"arguments": arguments})
        if self.write_more is not None:
            self.write_more(weights, tensors, folder)

    def _open(self, path: Path, overrides: ImportOverrides = _NO_OVERRIDES) -> Outputs:
        tensors, config, vocabs = self._load(path, overrides)
        arguments = self.arguments(config, vocabs)
        state = {name: torch.from_numpy(np.array(array)) for name, array in tensors.items()}

        def outputs(batch: Batch) -> np.ndarray:
            with torch.no_grad():
                return self.run(state, arguments, batch).numpy()

        return outputs

    def _read(self, path: Path, overrides: ImportOverrides) -> Weights:
        tensors, config, vocabs = self._load(path, overrides)
        return formats.read_weights(self.make_table(config, vocabs), tensors, config, vocabs, path)

    def _load(self, path: Path, overrides: ImportOverrides) -> Loaded:
        folder = path if path.is_dir() else path.parent
        loaded = self.load_other(path, overrides)
        if loaded is None:
            config, vocabs = formats.find_config(folder, overrides), formats.find_vocabs(folder, overrides)
        else:
            _, config, vocabs = loaded
        check_network(config, folder)
        if problems := self.problems(config):
            raise UserError("\n".join(f"{self.name} cannot express this config: {line}" for line in problems))
        if loaded is not None:
            return loaded
        if overrides.config is None:
            stored, expected = formats.read_config_json(folder), self.arguments(config, vocabs)
            check_equal(stored.get("arguments"), expected, folder / formats.CONFIG_NAME)
        tensors: Tensors = {}
        for file in {self.file_of(name): None for name in self.make_table(config, vocabs).names}:
            tensors |= load_tensors(self._path_of(file, path))
        return tensors, config, vocabs

    def _path_of(self, file: str, path: Path) -> Path:
        """Return the path of a file of the format; `path` is the folder, or the state dict in it."""
        if path.is_dir():
            return path / file
        return path if file == STATE_NAME else path.parent / file


def tensor_of(ids: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(ids, np.int64))


def save_tensors(tensors: Tensors, path: Path) -> None:
    """Write a state dict; an array with several names is stored once, like tied tensors in PyTorch."""
    by_id: dict[int, torch.Tensor] = {}
    save_value(
        {n: by_id.setdefault(id(a), torch.from_numpy(np.array(a, copy=True))) for n, a in tensors.items()},
        path,
    )


def save_value(value: dict[str, Any], path: Path) -> None:
    with name_full_disk(path), path.open("wb") as file:  # with a path, PyTorch's errors lack the reason
        torch.save(value, file)


def load_tensors(path: Path) -> Tensors:
    state = take_tensors(load_checkpoint(path), path, what="it")
    return {name: np.asarray(array) for name, array in as_arrays(state).items()}
