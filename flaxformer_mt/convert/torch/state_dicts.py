"""Formats that are the state dict of one PyTorch class, read without unpickling anything but tensors."""

import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flaxformer_mt.config import Config
from flaxformer_mt.convert import formats
from flaxformer_mt.convert.foreign_files import check_equal, check_network, check_tensors, check_unpacked_size
from flaxformer_mt.convert.formats import Format, ImportOverrides, Outputs, Weights
from flaxformer_mt.convert.name_table import Constant, Rule, Shapes, Table, Tensors
from flaxformer_mt.errors import UserError
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import Vocabs

STATE_NAME = "state_dict.pt"
# Supported values of formats whose network is that of Vaswani et al. 2017, but for further fields.
POST_NORM: dict[str, tuple[Any, ...]] = {
    "model.architecture": ("encoder_decoder",),
    "model.decoder_self_attention": ("attention",),
    "model.activation": ("relu",),
    "model.norm_position": ("post",),
    "model.norm": ("layer",),
    "model.norm_affine": (True,),
    "model.final_norm": (None, False),
    "model.positions": ("sinusoidal",),
    "model.embedding_bias": (False,),
    "model.ffn_bias": (True,),
    "model.output_bias": (False,),
}
_NO_OVERRIDES = ImportOverrides()


@dataclass(frozen=True)
class StateDictFormat:
    """A format that consists of the state dict of one PyTorch class.

    problems: maps a config to the reasons why the class cannot express it.
    rules: maps a config and the shapes of its parameters to the rules of the name table.
    arguments: arguments of the class for a config and its vocabularies; config.json stores them.
    make_module: the class, or a function with the same arguments.
    run: logits [B, T, V] of the module for a batch; the third argument has the tensors of all files.
    file_of: the file that stores the tensor of a name.
    write_more: writes further files; arguments: weights, tensors and folder.
    """

    name: str
    problems: Callable[[Config], list[str]]
    rules: Callable[[Config, Shapes], list[Rule | Constant]]
    arguments: Callable[[Config, Vocabs], dict[str, Any]]
    make_module: Callable[..., torch.nn.Module]
    run: Callable[[torch.nn.Module, Batch, dict[str, torch.Tensor]], torch.Tensor]
    file_of: Callable[[str], str] = lambda name: STATE_NAME
    write_more: Callable[[Weights, Tensors, Path], None] | None = None

    def make_format(self) -> Format:
        return Format(self.name, self.problems, self._write, self.open, self.read)

    def make_table(self, config: Config, vocabs: Vocabs) -> Table:
        shapes = formats.shapes_of(
            config.model, source_size=vocabs.source.size, target_size=vocabs.target.size
        )
        return Table(shapes, self.rules(config, shapes), what=self.name)

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

    def open(self, path: Path, overrides: ImportOverrides = _NO_OVERRIDES) -> Outputs:
        folder = path if path.is_dir() else path.parent
        config, vocabs = formats.find_config(folder, overrides), formats.find_vocabs(folder, overrides)
        arguments = self.arguments(config, vocabs)
        if overrides.config is None:
            check_equal(
                formats.read_config_json(folder).get("arguments"), arguments, folder / formats.CONFIG_NAME
            )
        return self.outputs_of(self._load(path, config, vocabs), arguments)

    def outputs_of(self, tensors: Tensors, arguments: dict[str, Any]) -> Outputs:
        module = self.make_module(**arguments)
        named = {name: torch.from_numpy(np.array(array)) for name, array in tensors.items()}
        state = {name: tensor for name, tensor in named.items() if self.file_of(name) == STATE_NAME}
        module.load_state_dict(state, strict=True)
        module.eval()

        def outputs(batch: Batch) -> np.ndarray:
            with torch.no_grad():
                return self.run(module, batch, named).numpy()

        return outputs

    def read(self, path: Path, overrides: ImportOverrides) -> Weights:
        folder = path if path.is_dir() else path.parent
        config, vocabs = formats.find_config(folder, overrides), formats.find_vocabs(folder, overrides)
        check_network(config, folder)
        self.check_config(config)
        return self.weights_of(self._load(path, config, vocabs), config, vocabs, origin=str(path))

    def check_config(self, config: Config) -> None:
        if problems := self.problems(config):
            raise UserError("\n".join(f"{self.name} cannot express this config: {line}" for line in problems))

    def weights_of(self, tensors: Tensors, config: Config, vocabs: Vocabs, *, origin: str) -> Weights:
        table, sizes = self.make_table(config, vocabs), formats.size_fields(config, vocabs)
        return Weights(config, vocabs, table.to_flax(tensors, origin=origin, sizes=sizes))

    def _load(self, path: Path, config: Config, vocabs: Vocabs) -> Tensors:
        tensors: Tensors = {}
        for file in {self.file_of(name): None for name in self.make_table(config, vocabs).names}:
            tensors |= load_tensors(self._path_of(file, path))
        return tensors

    def _path_of(self, file: str, path: Path) -> Path:
        """Return a file of the format, in the folder or beside the state dict that the user gives as path."""
        if path.is_dir():
            return path / file
        return path if file == STATE_NAME else path.parent / file


def tensor_of(ids: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(ids, np.int64))


def save_tensors(tensors: Tensors, path: Path) -> None:
    """Write a state dict; an array with several names is stored once, as PyTorch stores tied tensors."""
    by_id: dict[int, torch.Tensor] = {}
    torch.save(
        {n: by_id.setdefault(id(a), torch.from_numpy(np.array(a, copy=True))) for n, a in tensors.items()},
        path,
    )


def load_tensors(path: Path) -> Tensors:
    state = load_safely(path, what="a state dict")
    if not isinstance(state, dict) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise UserError(f"{path} is not a state dict: it must contain named tensors and nothing else")
    check_tensors(state, path)
    return to_arrays(state)


def load_safely(path: Path, *, what: str, classes: Sequence[type] = ()) -> Any:
    """Read a file of torch.save that contains tensors, plain values and instances of `classes` only.

    Executes no code from the file, and takes little more memory than the file has bytes.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist; give its folder or the file itself as --input=PATH")
    try:
        if zipfile.is_zipfile(path):
            check_unpacked_size(path)
        with torch.serialization.safe_globals(list(classes)):
            return torch.load(path, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except Exception as error:  # a damaged file raises zip, pickle and storage errors of many types
        raise UserError(f"{path} is not {what} that loads safely: {error}".split("\n")[0]) from error


def to_arrays(state: dict[str, torch.Tensor]) -> Tensors:
    return {str(name): tensor.detach().to(torch.float32).numpy() for name, tensor in state.items()}
