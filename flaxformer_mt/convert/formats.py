"""The interface for formats of other systems (`Format`), the list of formats, and helpers that they share.

All formats write and read `Weights`; exports store the run's config under "flaxformer_mt" in config.json.
"""

import dataclasses
import functools
import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from flaxformer_mt.config import Config, ModelConfig, SearchConfig
from flaxformer_mt.config.files import from_dict, read_json_object, to_dict
from flaxformer_mt.convert.name_table import Constant, Leaves, Rule, Shapes, Table
from flaxformer_mt.errors import UserError, importing, suggest
from flaxformer_mt.model import Model, init_params, make_model
from flaxformer_mt.parallel import default_platform
from flaxformer_mt.parameter_trees import flatten_tree, nest_leaves
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import Vocabs, load_vocabs
from flaxformer_mt.vocab.shortlist import Shortlist

CONFIG_NAME = "config.json"
VOCAB_NAME = "vocab"
# Key of this package's entry in config.json, for every format.
OUR_KEY = "flaxformer_mt"


@dataclass(frozen=True)
class Weights:
    """A model to export or an imported model; `leaves` are its float32 parameters in host memory, by path."""

    config: Config
    vocabs: Vocabs
    leaves: Leaves
    # The exported checkpoint and its step; empty and 0 for imported weights.
    checkpoint: str = ""
    step: int = 0

    @property
    def params(self) -> dict[str, Any]:
        return nest_leaves(self.leaves)

    def make_model(self) -> Model:
        config = dataclasses.replace(self.config.model, dtype="float32", remat="none", scan_layers=False)
        return make_model(
            config,
            source_size=self.vocabs.source.size,
            target_size=self.vocabs.target.size,
            platform=default_platform(),
        )


@dataclass(frozen=True)
class ImportOverrides:
    """The config and the vocabularies that the user gives for an import; None: read from the files."""

    config: Config | None = None
    vocabs: Vocabs | None = None


Rules = Iterable[Rule | Constant]
# Maps a batch to float32 logits [B, T, V], to log-probabilities [B, T] of target_out, or to the embedded
# decoder inputs [B, T, D].
Outputs = Callable[[Batch], np.ndarray]

_ONLY_READ = "its files are only read; give another --format, such as torch or ctranslate2"


def changed_options(search: SearchConfig, names: Iterable[str]) -> list[str]:
    """Return the options among `names` that differ from their defaults, as "search.NAME=VALUE"."""
    default = SearchConfig()
    shown: dict[type, Callable[[Any], str]] = {tuple: ",".join, float: "{:g}".format}
    values = {name: value for name in names if (value := getattr(search, name)) != getattr(default, name)}
    return [f"search.{name}={shown.get(type(value), str)(value)}" for name, value in values.items()]


def constraining_options(search: SearchConfig) -> list[str]:
    """Return the non-default options that forbid or force tokens, as "search.NAME=VALUE"."""
    names = ("suppress", "no_repeat_ngram", "min_length_ratio", "min_length_offset")
    return changed_options(search, names)


@dataclass(frozen=True)
class Format:
    """A foreign format: functions that export, import and compare models.

    problems: returns the reasons why the format cannot express a config, with supported values.
    more_problems: returns further reasons, which depend on parameters and vocabularies.
    write: writes all files into an existing folder, with a quantization. None for import-only formats.
    open: loads the files with the foreign system and returns its forward function, for the parity check. For
      an import, also gets the user's config and vocabularies. None for import-only formats.
    read: reads the files that `write` or the foreign system wrote; None for export-only formats.
    lost_options: lists the search options that are set but that the exported files cannot express.
    compare_ids: compares the ids of the written tokenizer with the run's; returns entries for `ExportResult`.
    write_shortlist: adds a shortlist to a written folder; None if the foreign system supports no shortlist.
    """

    name: str
    problems: Callable[[Config], list[str]] = lambda config: [_ONLY_READ]
    write: Callable[[Weights, Path, str], None] | None = None
    open: Callable[..., Outputs] | None = None
    read: Callable[[Path, ImportOverrides], Weights] | None = None
    quantity: Literal["logits", "log_probs", "target vectors"] = "logits"
    quantizations: tuple[str, ...] = ("none",)
    lost_options: Callable[[SearchConfig], list[str]] = constraining_options
    write_shortlist: Callable[[Shortlist, Path], None] | None = None
    more_problems: Callable[[Weights], list[str]] = lambda weights: []
    compare_ids: Callable[[Weights, Path], dict[str, Any]] = lambda weights, folder: {}


def shapes_of(config: ModelConfig, *, source_size: int, target_size: int, **changes: Any) -> Shapes:
    """Return the shapes of a network's parameters by path; `changes` replace fields of its config."""
    # Exported trees have one subtree per layer, even if training stacks the layers (model.scan_layers).
    changes["scan_layers"] = False
    return dict(_trace_shapes(dataclasses.replace(config, **changes), source_size, target_size))


def absent_shapes(model: ModelConfig, fields: Iterable[str], **sizes: int) -> Shapes:
    """Return the shapes of the parameters that a network lacks because some of `fields` are False."""
    present = shapes_of(model, **sizes)
    whole = shapes_of(model, **sizes, **dict.fromkeys(fields, True))
    return {path: shape for path, shape in whole.items() if path not in present}


def make_table(
    model: ModelConfig, vocabs: Vocabs, rules: Rules, what: str, absent: Iterable[str] = ()
) -> Table:
    """Make a name table; the foreign network always has the parameters of the fields in `absent`."""
    sizes = {"source_size": vocabs.source.size, "target_size": vocabs.target.size}
    return Table(shapes_of(model, **sizes), rules, what=what, absent=absent_shapes(model, absent, **sizes))


@functools.lru_cache(maxsize=128)
def _trace_shapes(config: ModelConfig, source_size: int, target_size: int) -> Shapes:
    model = make_model(config, source_size=source_size, target_size=target_size)
    params = jax.eval_shape(lambda key: init_params(model, key), jax.random.key(0))
    return {path: tuple(leaf.shape) for path, leaf in flatten_tree(params).items()}


def write_config_json(weights: Weights, folder: Path, format_name: str, theirs: dict[str, Any]) -> None:
    entry = {
        "format": format_name,
        "checkpoint": weights.checkpoint,
        "step": weights.step,
        "config": to_dict(weights.config),
    }
    write_json({**theirs, OUR_KEY: entry}, folder / CONFIG_NAME)


def write_json(content: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_config_json(folder: Path, name: str = CONFIG_NAME) -> dict[str, Any]:
    """Read config.json or another JSON file of settings; return {} if the file does not exist."""
    path = folder / name
    try:
        return read_json_object(path)
    except FileNotFoundError:
        return {}
    except PermissionError:
        raise  # the file may be intact
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is damaged: {error}; copy or download it again") from error


def find_config(folder: Path, overrides: ImportOverrides) -> Config:
    if overrides.config is not None:
        return overrides.config
    entry = read_config_json(folder).get(OUR_KEY)
    if entry is None:
        raise UserError(
            f"{folder / CONFIG_NAME} does not describe the model; give --config=FILE, whose model section "
            "describes it"
        )
    if not isinstance(entry, dict) or not isinstance(entry.get("config"), dict):
        raise UserError(
            f"{folder / CONFIG_NAME} is damaged: its entry {OUR_KEY} has no config; give --config=FILE"
        )
    return from_dict(entry["config"])


def refuse_overrides(overrides: ImportOverrides, folder: Path) -> None:
    """Raise UserError if the user gives a config or vocabularies, since the files contain both."""
    if overrides != ImportOverrides():
        raise UserError(
            f"{folder} describes its network and its vocabulary itself; leave out --config and --vocab"
        )


def find_vocabs(folder: Path, overrides: ImportOverrides) -> Vocabs:
    if overrides.vocabs is not None:
        return overrides.vocabs
    if not (folder / VOCAB_NAME).is_dir():
        raise UserError(
            f"{folder} has no folder {VOCAB_NAME} with SentencePiece models; give --vocab=DIR, a "
            "folder with joint.model, or with source.model and target.model"
        )
    return load_vocabs(folder / VOCAB_NAME)


def read_weights(
    table: Table, tensors: Mapping[str, Any], config: Config, vocabs: Vocabs, origin: Path, **options: Any
) -> Weights:
    return Weights(config, vocabs, table.to_flax(tensors, origin=str(origin), **options))


def fit_vocabulary(config: Config, vocabs: Vocabs) -> Config:
    """Return the config with the sizes and special ids of `vocabs` in its vocabulary section."""
    target = vocabs.target
    taken = {target.pad_id, target.eos_id, target.unk_id}
    vocab = dataclasses.replace(
        config.vocab,
        size=target.size,
        source_size=None,
        joint=vocabs.joint,
        # With these files set, sizes are not checked, so the two vocabularies may differ in size.
        source_model="" if vocabs.joint else "vocab/source.model",
        target_model="" if vocabs.joint else "vocab/target.model",
        pad_id=target.pad_id,
        # Set even if the model has no start symbol and its targets begin with padding.
        bos_id=next(i for i in (target.bos_id, *range(4)) if i not in taken),
        eos_id=target.eos_id,
        unk_id=target.unk_id,
    )
    return dataclasses.replace(config, vocab=vocab)


# Format name -> module under flaxformer_mt.convert, and the variable with the format if it is not FORMAT.
_HOMES = {
    "torch": "torch.standalone_format",
    "torch-nn": "torch.nn_transformer",
    "handbuilt": "papers.handbuilt",
    "kokoyi": "papers.kokoyi",
    "decoder-only": "papers.decoder_only",
    "aiayn": "papers.aiayn",
    "embeddings": "papers.embeddings",
    "hf": "huggingface.nllb_bart_t5",
    "marian": "huggingface.marian_pegasus:MARIAN",
    "hf-pre-norm": "huggingface.marian_pegasus:PEGASUS",
    "ctranslate2": "ctranslate2.model_folder",
    "fairseq": "toolkits.fairseq",
    "opennmt-py": "toolkits.opennmt_py",
    "eole": "toolkits.eole",
    "marian-npz": "toolkits.marian_npz",
    "bergamot": "toolkits.bergamot",
    "joeynmt": "toolkits.joeynmt",
}
NAMES = tuple(_HOMES)
# The formats that `export` supports, and those that `import` supports.
EXPORTED = tuple(name for name in NAMES if name not in ("fairseq", "opennmt-py", "eole", "joeynmt"))
IMPORTED = tuple(name for name in NAMES if name not in ("ctranslate2", "embeddings"))
# Other common names -> the name of the format, for suggestions.
_OTHER_NAMES = {
    **dict.fromkeys(("huggingface", "transformers", "hugging_face", "hub"), "hf"),
    **dict.fromkeys(("pytorch", "pt", "safetensors"), "torch"),
    **dict.fromkeys(("ct2", "opennmt"), "ctranslate2"),
    **dict.fromkeys(("opus", "opus-mt", "marianmt"), "marian"),
    "pegasus": "hf-pre-norm",
    **dict.fromkeys(("firefox", "intgemm"), "bergamot"),
}


def find_format(name: str, known: Sequence[str] = NAMES) -> Format:
    if name not in _HOMES:
        hint = suggest(_OTHER_NAMES.get(name, name), known, otherwise=f"known formats: {', '.join(known)}")
        raise UserError(f"unknown format {name}{hint}")
    module, _, attribute = _HOMES[name].partition(":")
    with importing("ctranslate2" if name == "ctranslate2" else "torch", what=f"format {name}"):
        return getattr(importlib.import_module(f"flaxformer_mt.convert.{module}"), attribute or "FORMAT")
