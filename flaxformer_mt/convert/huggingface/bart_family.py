"""Hugging Face formats: files, array names and the parity check that Marian and Pegasus share.

marian.py and pegasus.py give the class of each format, bart_table.py the names of arrays, model_config.py the
config files, tokenizer_files.py the tokenizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flaxformer_mt.config import Config
from flaxformer_mt.convert.foreign_limits import check_network
from flaxformer_mt.convert.format_interface import (
    OUR_KEY,
    Format,
    Given,
    Weights,
    find_config,
    read_config_json,
    shapes_of,
    size_fields,
    unsupported_fields,
    write_config_json,
)
from flaxformer_mt.convert.huggingface.bart_table import has_output_bias, make_bart_table, tied_names
from flaxformer_mt.convert.huggingface.forward_pass import open_model
from flaxformer_mt.convert.huggingface.generation_options import lost_options, write_generation
from flaxformer_mt.convert.huggingface.model_config import (
    ACTIVATIONS,
    longest_target,
    make_config,
    make_model_fields,
    num_positions,
    read_model_fields,
)
from flaxformer_mt.convert.huggingface.stored_tensors import WEIGHTS_NAME, open_tensors
from flaxformer_mt.convert.huggingface.tokenizer_files import (
    read_exported_tokenizer,
    read_tokenizer,
    write_tokenizer,
)
from flaxformer_mt.convert.name_table import Table
from flaxformer_mt.convert.safetensors_file import save_safetensors
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import Vocabs

_ALLOWED: dict[str, tuple[Any, ...]] = {
    "model.architecture": ("encoder_decoder",),
    "model.decoder_self_attention": ("attention",),
    "model.norm": ("layer",),
    "model.norm_epsilon": (1e-5,),
    "model.embedding_norm": (False,),
    "model.positions": ("sinusoidal",),
    "model.first_position": (0,),
    "model.logit_scale": (False,),
    "model.embedding_bias": (False,),
    "model.padding_mask": ("source", "both"),
    "model.activation": ACTIVATIONS,
}
_FORMAT_OF_NORM_POSITION = {"pre": "hf-pre-norm", "post": "marian"}


@dataclass(frozen=True)
class HuggingFaceFormat:
    """A format whose folder is loaded by `from_pretrained` of transformers.

    name: the name of the format. model_type, class_name: the type and class in transformers.
    final_norm: whether both stacks end in a norm. tyings: the supported values of model.tying.
    """

    name: str
    model_type: str
    class_name: str
    norm_position: Literal["pre", "post"]
    final_norm: bool
    tyings: tuple[str, ...]

    def make_format(self) -> Format:
        """Return the interface for the export and import commands."""
        return Format(
            self.name, self.problems, self._write, open_model, self._read, lost_options=lost_options
        )

    def problems(self, config: Config) -> list[str]:
        """Return reasons why the class cannot express the model, one line each."""
        model = config.model
        size, rest = divmod(model.model_dim, model.num_heads)
        allowed = _ALLOWED | {
            "model.norm_position": (self.norm_position,),
            "model.final_norm": (None, self.final_norm),
            "model.tying": self.tyings,
            "model.key_dim": (None, size),
            "model.value_dim": (None, size),
        }
        other = _FORMAT_OF_NORM_POSITION[model.norm_position]
        problems = [
            f"{line} (for {model.norm_position}: --format={other})" if "norm_position" in line else line
            for line in unsupported_fields(config, allowed)
        ]
        if rest:
            problems.append(
                f"model.model_dim {model.model_dim} is not divisible by model.num_heads {model.num_heads}; "
                "all heads of this class have the size model_dim / num_heads"
            )
        return problems

    # ---- name table ----

    def make_table(self, config: Config, vocabs: Vocabs, positions: int) -> Table:
        """Return the table of all arrays of the class, with position tables of `positions` rows."""
        shapes = shapes_of(config.model, source_size=vocabs.source.size, target_size=vocabs.target.size)
        return make_bart_table(
            config, shapes, what=self.name, positions=positions, final_norm=self.final_norm
        )

    # ---- files ----

    def _write(self, weights: Weights, folder: Path, quantization: str) -> None:
        config, vocabs = weights.config, weights.vocabs
        tensors = self.make_table(config, vocabs, num_positions(config)).to_foreign(weights.leaves)
        write_tokenizer(vocabs, config, folder)
        write_generation(config, vocabs.target, folder, longest_target=longest_target(config))
        facts = {"architectures": [self.class_name], "model_type": self.model_type}
        write_config_json(weights, folder, self.name, facts | make_model_fields(config, vocabs))
        for name in tied_names(config.model)[1:] if _class_ties_arrays(config) else []:
            del tensors[name]
        save_safetensors(tensors, folder / WEIGHTS_NAME)

    def _read(self, path: Path, given: Given) -> Weights:
        folder = path if path.is_dir() else path.parent
        stored = read_config_json(folder)
        if stored.get("model_type") != self.model_type:
            raise UserError(
                f"{folder} has model_type {stored.get('model_type')}; {self.name} reads {self.model_type}"
            )
        facts = read_model_fields(folder)
        return self._read_tensors(path, given, stored, facts, open_tensors(folder))

    def _read_tensors(
        self,
        path: Path,
        given: Given,
        stored: dict[str, Any],
        facts: dict[str, Any],
        tensors: Mapping[str, Any],
    ) -> Weights:
        folder = path if path.is_dir() else path.parent
        if given.vocabs is not None:
            vocabs = given.vocabs
        elif OUR_KEY in stored:
            vocabs = read_exported_tokenizer(folder, joint=find_config(folder, Given()).vocab.joint)
        else:
            vocabs = read_tokenizer(folder, facts)
        if OUR_KEY in stored or given.config is not None:
            config = find_config(folder, given)
        else:
            bias = has_output_bias(tensors)
            config = make_config(folder, facts, vocabs, norm_position=self.norm_position, output_bias=bias)
        check_network(config, folder)
        if problems := self.problems(config):
            raise UserError("\n".join(f"{self.name} cannot express this config: {line}" for line in problems))
        table = self.make_table(config, vocabs, facts["max_position_embeddings"])
        leaves = table.to_flax(
            tensors,
            tied=tied_names(config.model),
            origin=str(path),
            sizes=size_fields(config, vocabs),
        )
        return Weights(config, vocabs, leaves)


def _class_ties_arrays(config: Config) -> bool:
    """Return whether the class shares what model.tying shares; with tying=embeddings it stores copies."""
    return config.model.tying in ("all", "target_output")
