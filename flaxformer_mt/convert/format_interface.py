"""What a foreign format is to the export and import commands: a name, and functions that know its files.

Owns the interface and the part of config.json that is ours. Knows no format.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from flaxformer_mt.config import Config, ModelConfig
from flaxformer_mt.config.files import flatten, from_dict, to_dict
from flaxformer_mt.convert.name_table import Leaves, Shapes
from flaxformer_mt.errors import UserError
from flaxformer_mt.model import Model, init_params, make_model
from flaxformer_mt.shapes import Batch
from flaxformer_mt.trees import flatten_tree, nest_leaves
from flaxformer_mt.vocab import Vocabs, load_vocabs

CONFIG_NAME = "config.json"
VOCAB_NAME = "vocab"
# The entry of config.json that holds what is ours, in every format.
OUR_KEY = "flaxformer_mt"


@dataclass(frozen=True)
class Weights:
    """A model on its way out or in: parameters by path, float32 on the host, and what they go with."""

    config: Config
    vocabs: Vocabs
    leaves: Leaves
    # Which checkpoint of which step they are; empty and 0 for imported ones.
    checkpoint: str = ""
    step: int = 0

    @property
    def params(self) -> dict[str, Any]:
        """The parameters as nested dicts."""
        return nest_leaves(self.leaves)

    def make_model(self) -> Model:
        """The network, computing in float32."""
        config = dataclasses.replace(self.config.model, dtype="float32", remat="none", scan_layers=False)
        return make_model(config, source_size=self.vocabs.source.size, target_size=self.vocabs.target.size)


@dataclass(frozen=True)
class Given:
    """What whoever imports says beside the files: None where the files should tell."""

    config: Config | None = None
    vocabs: Vocabs | None = None


# From a batch to logits [B, T, V], or to the log-probabilities [B, T] of target_out; float32.
Outputs = Callable[[Batch], np.ndarray]


@dataclass(frozen=True)
class Format:
    """A foreign format.

    problems: from a config to what the format cannot express: the field, its value, what would do.
    write: puts all files into an existing folder; the third argument is the quantization, "none" where the
      format has no other.
    open: makes a function of the files as the foreign system reads them, for the parity check.
    read: the inverse of write; None: the format is for export only.
    """

    name: str
    problems: Callable[[Config], list[str]]
    write: Callable[[Weights, Path, str], None]
    open: Callable[[Path], Outputs]
    read: Callable[[Path, Given], Weights] | None
    quantity: Literal["logits", "log_probs"] = "logits"
    quantizations: tuple[str, ...] = ("none",)


def shapes_of(config: ModelConfig, *, source_size: int, target_size: int) -> Shapes:
    """The shapes of a model's parameters, by path."""
    single = dataclasses.replace(config, scan_layers=False)  # a tree for each layer, whoever trains it how
    model = make_model(single, source_size=source_size, target_size=target_size)
    params = jax.eval_shape(lambda key: init_params(model, key), jax.random.key(0))
    return {path: tuple(leaf.shape) for path, leaf in flatten_tree(params).items()}


def write_facts(weights: Weights, folder: Path, format_name: str, theirs: dict[str, Any]) -> None:
    """Writes config.json: what the foreign system wants to find there, and our own part."""
    ours = {
        "format": format_name,
        "checkpoint": weights.checkpoint,
        "step": weights.step,
        "config": to_dict(weights.config),
    }
    text = json.dumps({**theirs, OUR_KEY: ours}, indent=2, ensure_ascii=False)
    (folder / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")


def read_facts(folder: Path) -> dict[str, Any]:
    """Reads config.json; {} if there is none. Raises UserError if it is damaged."""
    path = folder / CONFIG_NAME
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not isinstance(facts, dict):
        raise UserError(f"{path} is damaged: it holds no JSON object")
    return facts


def find_config(folder: Path, given: Given) -> Config:
    """The config of the files: given, or our part of config.json.

    Raises:
      UserError: neither is there.
    """
    if given.config is not None:
        return given.config
    ours = read_facts(folder).get(OUR_KEY)
    if ours is None:
        raise UserError(
            f"{folder / CONFIG_NAME} does not say which model this is; give --config=FILE, whose model "
            "section describes it"
        )
    return from_dict(ours["config"])


def find_vocabs(folder: Path, given: Given) -> Vocabs:
    """The vocabularies of the files: given, or those in the folder vocab.

    Raises:
      UserError: neither is there.
    """
    if given.vocabs is not None:
        return given.vocabs
    if not (folder / VOCAB_NAME).is_dir():
        raise UserError(
            f"{folder} has no folder {VOCAB_NAME} with SentencePiece models; give --vocab=DIR, with "
            "joint.model, or source.model and target.model"
        )
    return load_vocabs(folder / VOCAB_NAME)


def refusals(config: Config, allowed: dict[str, tuple[Any, ...]]) -> list[str]:
    """A line for each field that is not as a format has it: `model.norm_position is pre; it has only post`.

    Args:
      allowed: the values that a format has, by the field's dotted name.
    """
    fields = flatten(config)
    return [
        f"{name} is {fields[name]}; it has only {' and '.join(str(value) for value in values)}"
        for name, values in allowed.items()
        if fields[name] not in values
    ]
