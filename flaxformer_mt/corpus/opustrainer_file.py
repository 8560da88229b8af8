"""Curricula in OpusTrainer's YAML format, read as the stages of a config.

What has no counterpart here is refused by its name. Names of data sets are those of data.dataset; a path
DIR/train.tsv is parallel_text@DIR.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from flaxformer_mt.config import NoiseConfig, StageConfig, TypoConfig
from flaxformer_mt.config.files import read_file
from flaxformer_mt.corpus.text_files import PACKINGS
from flaxformer_mt.errors import UserError, first_line, warn_user

# OpusTrainer's modifiers -> fields of NoiseConfig.
_MODIFIERS = {"UpperCase": "upper_case", "TitleCase": "title_case"}
_MODIFIERS |= {"RemoveEndPunct": "end_punctuation", "Typos": "typos"}
_TYPO_KINDS = tuple(TypoConfig.__dataclass_fields__)
_KEYS = ("datasets", "stages", "modifiers", "seed", "num_fields", "trainer", "version")


def read_curriculum(path: str | Path) -> tuple[StageConfig, ...]:
    """Read the stages of a curriculum with their noise; warn of `seed` and `trainer`, which do nothing."""
    values = _load(Path(path).expanduser())
    try:
        stages = _read_stages(values)
    except ValueError as error:
        raise UserError(f"data.stages: {path} {error}") from None
    if unused := [name for name in ("seed", "trainer") if name in values]:
        warn_user(f"{path}: no effect here: {' and '.join(unused)}; the seed is --config.seed")
    return stages


def _load(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(read_file(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"data.stages: {path} cannot be read: {reason}; give a YAML file in OpusTrainer's format"
        ) from error
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where, reason = f" line {mark.line + 1}" if mark else "", problem or first_line(error)
        raise UserError(f"data.stages: {path}{where} is not YAML: {reason}") from error
    if not isinstance(values, dict):
        raise UserError(f"data.stages: {path} is no curriculum; it has no datasets: and stages:")
    return values


def _is_list(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, str) for entry in value)


def _read_stages(values: dict[str, Any]) -> tuple[StageConfig, ...]:
    """Read the stages; raise ValueError, whose text goes on after the file's name."""
    names, sets = values.get("stages"), values.get("datasets")
    if not _is_list(names):
        raise ValueError("has no list of stages; write stages: and the name of each, as in - start")
    if unknown := [key for key in values if key not in _KEYS and key not in names]:
        known = ", ".join(_KEYS)
        raise ValueError(f"has {unknown[0]}, which is neither a stage nor one of {known}; take it out")
    for key, read in (("version", 1), ("num_fields", 2)):
        if str(values.get(key, read)) != str(read):
            raise ValueError(
                f"has {key} {values[key]}, not {read}; word alignments are those of data.alignments"
            )
    if not isinstance(sets, dict) or not sets:
        raise ValueError("has no datasets; write datasets: and for each NAME: PATH")
    datasets = {name: _read_dataset(name, value) for name, value in sets.items()}
    noise = _read_modifiers(values["modifiers"]) if "modifiers" in values else None
    return tuple(_read_stage(name, values.get(name), datasets, noise) for name in names)


def _read_dataset(name: Any, value: Any) -> str:
    files = value if isinstance(value, list) else [value]
    if not isinstance(name, str) or not all(isinstance(file, str) for file in files):
        raise ValueError(f"has the data set {name}: {value!r}; write NAME: PATH")
    folder, _, table = files[0].rpartition("/")
    if len(files) > 1 or (
        "@" not in files[0] and table not in (f"train.tsv{packing}" for packing in PACKINGS)
    ):
        return name
    return files[0] if "@" in files[0] else f"parallel_text@{folder}"


def _read_stage(name: str, value: Any, sets: dict[str, str], noise: NoiseConfig | None) -> StageConfig:
    if isinstance(value, dict):
        if unknown := [key for key in value if key not in ("mix", "modifiers")]:
            raise ValueError(f"has {unknown[0]} in stage {name}; a stage has mix and modifiers")
        noise = _read_modifiers(value["modifiers"]) if "modifiers" in value else noise
        value = value.get("mix")
    if not _is_list(value):
        raise ValueError(f"has no mix in stage {name}; list - NAME SHARE, and at the end - until NAME EPOCHS")
    lines = [line.removeprefix("until ").split() for line in value]
    for entry, line in zip(value, lines, strict=True):
        steps = line[:1] == ["steps"] and entry.startswith("until ")
        if len(line) != 2 or (entry.startswith("until ") and line is not lines[-1]):
            raise ValueError(
                f"has {entry!r} in stage {name}; write NAME SHARE, and at the end until NAME EPOCHS"
            )
        if line[0] not in sets and not steps:
            raise ValueError(
                f"has {line[0]} in stage {name}, which is not a data set ({', '.join(sets)}); add it"
            )
        line[0] = sets.get(line[0], line[0])
    until = " ".join(lines.pop()) if value[-1].startswith("until ") else ""
    return StageConfig(name, tuple(map(" ".join, lines)), until, noise)


def _read_modifiers(values: Any) -> NoiseConfig:
    rates: dict[str, float] = {}
    kinds = TypoConfig()
    for value in _flatten(values):
        if not isinstance(value, dict) or not value:
            raise ValueError(f"has the modifier {value!r} without a probability; write - NAME: PROBABILITY")
        name, *options = value
        if name not in _MODIFIERS:
            raise ValueError(f"has the modifier {name}; supported are {', '.join(_MODIFIERS)}: take it out")
        for option, number in value.items():
            if option != name and not (name == "Typos" and option in _TYPO_KINDS):
                raise ValueError(f"has the option {option} of {name}, which is not supported; take it out")
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= 1:
                raise ValueError(f"has {option}: {number!r}; it must be a probability from 0 to 1")
        if _MODIFIERS[name] in rates:
            raise ValueError(f"has the modifier {name} twice; write it once")
        rates[_MODIFIERS[name]] = float(value[name])
        if options:  # kinds that are not named do not occur
            kinds = TypoConfig(**{kind: float(value.get(kind, 0)) for kind in _TYPO_KINDS})
    return NoiseConfig(**rates, typo_kinds=kinds)


def _flatten(values: Any) -> Iterator[Any]:
    """Yield the entries of a list and of the lists in it, which YAML's references make."""
    if isinstance(values, list):
        for value in values:
            yield from _flatten(value)
    elif values is not None:
        yield values
