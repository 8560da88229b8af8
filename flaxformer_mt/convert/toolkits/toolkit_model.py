"""Functions that importers for other toolkits share: finding files, reading vocabularies and YAML."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.config import Config, DataConfig, ModelConfig
from flaxformer_mt.convert.foreign_files import check_network, read_bytes, read_text
from flaxformer_mt.convert.formats import Weights, fit_vocabulary, make_table, read_weights
from flaxformer_mt.convert.huggingface.model_config import make_data_config
from flaxformer_mt.convert.name_table import TABLE_TOLERANCE, Constant, Rule
from flaxformer_mt.convert.network_fields import Field
from flaxformer_mt.convert.sentencepiece_file import SPACE, Specials, make_word_model, renumber
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.model.positions import SINUSOIDAL_TABLES
from flaxformer_mt.vocab import Vocab, Vocabs
from flaxformer_mt.yaml_reader import load_yaml

_SUFFIXES = (".model", ".spm")
_SIDES = {"source": ("source", "src", "srcvocab"), "target": ("target", "tgt", "trg", "trgvocab")}
# Larger YAML files are rejected.
_LARGEST = 1 << 26

# Number of rows of a stored position table.
POSITIONS = 5000
# The fields that OpenNMT-py and eole have in common.
OPENNMT_FIELDS = (
    Field(
        "positions",
        "position_encoding_type",
        {"SinusoidalInterleaved": "sinusoidal", "SinusoidalConcat": "sinusoidal_halves"},
        default="SinusoidalInterleaved",
    ),
    Field("max_positions", values=POSITIONS),
    Field("source_end", values=False),
)


class Languages(NamedTuple):
    """The languages of a model; None if its files do not contain them."""

    source: str | None = None
    target: str | None = None


def find_file(path: Path, patterns: Sequence[str], *, what: str, without: str = "/") -> Path:
    """Return `path` if it is a file, or the file in the folder `path` that matches one of the patterns.

    The first pattern with a match decides. Raises UserError if no file or several files match. `without` is a
    suffix of names to ignore; `what` describes the file in errors.
    """
    if path.is_file():
        return path
    for pattern in patterns:
        files = sorted(file for file in path.glob(pattern) if not file.name.endswith(without))
        if len(files) > 1:
            names = ", ".join(file.name for file in files[:5])
            raise UserError(
                f"{path} has several files with {what}: {names}; give one of them as --input=FILE"
            )
        if files:
            return files[0]
    raise UserError(f"{path} has no file {' or '.join(patterns)} with {what}; give the model's folder")


def make_weights(
    network: ModelConfig,
    vocabs: Vocabs,
    tensors: Mapping[str, Any],
    rules: Iterable[Rule | Constant],
    *,
    path: Path,
    what: str,
    languages: Languages = Languages(),  # noqa: B008
) -> Weights:
    names = {
        "source_language": languages.source or DataConfig.source_language,
        "target_language": languages.target or DataConfig.target_language,
    }
    data = make_data_config(network.longest_input, **names)
    config = fit_vocabulary(Config(data=data, model=network), vocabs)
    check_network(config, path.parent)
    table = make_table(network, vocabs, rules, what=what)
    return read_weights(table, tensors, config, vocabs, path, may_omit_tied=True)


def languages_of(codes: Iterable[Any]) -> Languages:
    return Languages(*(code if isinstance(code, str) and code else None for code in codes))


def position_constants(network: ModelConfig, names: Iterable[str], *, axis: int) -> list[Constant]:
    """Return a `Constant` for the position table of each name; files store it with an added axis `axis`."""
    table = np.expand_dims(SINUSOIDAL_TABLES[network.positions](POSITIONS, network.model_dim), axis)
    return [Constant(name, table, optional=True, tolerance=TABLE_TOLERANCE) for name in names]


class PieceList(NamedTuple):
    """The subwords of one side.

    names: all subwords in the order of ids. specials: the special symbols among them. unused: subwords that
    occur in no text, such as the entries that fill a list up to a multiple of eight.
    """

    names: Sequence[str]
    specials: Specials
    unused: Collection[str] = ()


def make_opennmt_list(names: Sequence[str], specials: Specials, bos: str) -> PieceList:
    """Make the subword list of OpenNMT-py or eole; the fillers and `bos` are marked as unused in text."""
    unused = {name for name in names if name == bos or name.startswith("averyunlikelytoken")}
    return PieceList(names, specials, unused)


def read_vocabs(
    folder: Path,
    lists: Sequence[PieceList],
    languages: Languages,
    *,
    models: Mapping[str, Path] | None = None,
) -> Vocabs:
    source, target = lists
    joint = list(source.names) == list(target.names)
    if models is None:
        found = sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES and file.is_file())
        models = choose_sides(found, languages, what="SentencePiece models", folder=folder) if found else {}
    if not models:
        warn_user(
            f"{folder} has no SentencePiece model (.model or .spm): text is separated at spaces, and must be "
            "segmented as it was for training; else put the model into the folder and import again"
        )
    vocabs = {
        side: _make_vocab(pieces, models.get(side), folder)
        for side, pieces in (("source", source), ("target", target))
    }
    shared = joint and vocabs["source"].fingerprint == vocabs["target"].fingerprint
    return Vocabs(vocabs["source"], vocabs["source"] if shared else vocabs["target"], joint=joint)


def _make_vocab(pieces: PieceList, model: Path | None, folder: Path) -> Vocab:
    names = list(pieces.names)
    if len(set(names)) < len(names):
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise UserError(
            f"the vocabulary of {folder} has {twice!r:.60} twice; each piece needs an id of its own"
        )
    if absent := [name for name in pieces.specials if name is not None and name not in names]:
        raise UserError(f"the vocabulary of {folder} lacks {' and '.join(absent)}; the model needs them")
    if model is None:
        # In a list of words, SentencePiece's symbol for a space is an ordinary character.
        words = [name if name in pieces.specials else name.replace(SPACE, "_") for name in names]
        return Vocab(make_word_model(words, pieces.specials), name=str(folder))
    numbered = renumber(read_bytes(model), names, pieces.specials, origin=str(model), unused=pieces.unused)
    return Vocab(numbered, name=str(model))


def choose_sides(found: list[Path], languages: Languages, *, what: str, folder: Path) -> dict[str, Path]:
    """Find each side's file by its name, as in source.model or vocab.de.yml; raise UserError if ambiguous."""
    if len(found) == 1:
        return dict.fromkeys(_SIDES, found[0])
    marks = {
        side: {*marks, language} - {None}
        for (side, marks), language in zip(_SIDES.items(), languages, strict=True)
    }
    by_side = {
        side: [file for file in found if names & set(file.name.replace("_", ".").split("."))]
        for side, names in marks.items()
    }
    if any(len(files) != 1 for files in by_side.values()) or by_side["source"] == by_side["target"]:
        raise UserError(
            f"{folder} has several {what} ({', '.join(file.name for file in found)}); put source and target "
            "into their names, as in source.model, or leave one for both sides"
        )
    return {side: files[0] for side, files in by_side.items()}


def read_yaml(path: Path, *, as_text: bool = False) -> dict[str, Any]:
    return parse_yaml(read_text(path, most=_LARGEST), str(path), as_text=as_text)


def parse_yaml(content: str, name: str, *, as_text: bool = False) -> dict[str, Any]:
    values = load_yaml(content, name, as_text=as_text)
    if not isinstance(values, Mapping):
        raise UserError(f"{name} must be a mapping of names to values, but is {type(values).__name__}")
    return {str(key): value for key, value in values.items()}
