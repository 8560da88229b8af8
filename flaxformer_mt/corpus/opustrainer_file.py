"""Curricula in OpusTrainer's YAML format, read as the stages of a config.

The only importer of yaml. What has no counterpart here is refused by its name. Data sets are those of
data.dataset: a file has names for them, and where it gives a path DIR/train.tsv, that of parallel_text@DIR.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from flaxformer_mt.config import NoiseConfig, StageConfig, TypoConfig
from flaxformer_mt.config.files import read_file
from flaxformer_mt.errors import UserError, warn_user

# OpusTrainer's modifiers -> fields of NoiseConfig.
_MODIFIERS = {
    "UpperCase": "upper_case",
    "TitleCase": "title_case",
    "RemoveEndPunct": "end_punctuation",
    "Typos": "typos",
}
_TYPO_KINDS = tuple(TypoConfig.__dataclass_fields__)
_KEYS = ("datasets", "stages", "modifiers", "seed", "num_fields", "trainer", "version")
_TABLES = ("train.tsv", "train.tsv.gz")


def read_curriculum(path: str | Path) -> tuple[StageConfig, ...]:
    """Reads the stages of a curriculum, each with its noise.

    A warning tells of `seed` and `trainer`, which have no effect.

    Raises:
      UserError: the file cannot be read, is malformed, or asks for something that there is not here.
    """
    values = _load(Path(path).expanduser())
    names = values.get("stages")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path} has no list of stages; write stages: and the name of each, as in - start")
    if unknown := [key for key in values if key not in _KEYS and key not in names]:
        raise UserError(
            f"{path} has {unknown[0]}, which is neither a stage nor known here ({', '.join(_KEYS)}); "
            "take it out, or name it in stages"
        )
    if str(values.get("version", 1)) != "1" or values.get("num_fields", 2) != 2:
        name = "num_fields" if str(values.get("version", 1)) == "1" else "version"
        raise UserError(
            f"{path} has {name} {values[name]}; version 1 and num_fields 2 are read; word alignments are "
            "those of data.alignments"
        )
    if unused := [name for name in ("seed", "trainer") if name in values]:
        warn_user(f"{path}: no effect here: {' and '.join(unused)}; the seed is --config.seed")
    sets = _read_datasets(path, values.get("datasets"))
    noise = _read_modifiers(path, values["modifiers"]) if "modifiers" in values else None
    return tuple(_read_stage(path, name, values.get(name), sets, noise) for name in names)


def _load(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(read_file(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"data.stages: {path} cannot be read: {reason}; give a YAML file in OpusTrainer's format"
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise UserError(f"data.stages: {path}{where} is not YAML: {reason}") from error
    if not isinstance(values, dict):
        raise UserError(f"data.stages: {path} is no curriculum; it has no datasets: and stages:")
    return values


def _read_datasets(path: str | Path, values: Any) -> dict[str, str]:
    """The name in data.dataset of each data set of the file."""
    if not isinstance(values, dict) or not values:
        raise UserError(f"{path} has no datasets; write datasets: and for each NAME: PATH")
    found = {}
    for name, value in values.items():
        files = value if isinstance(value, list) else [value]
        if not isinstance(name, str) or not all(isinstance(file, str) for file in files):
            raise UserError(f"{path}: data set {name} is {value!r}; write NAME: PATH")
        folder, _, table = files[0].rpartition("/")
        given = files[0] if "@" in files[0] else f"parallel_text@{folder}" if table in _TABLES else name
        found[name] = given if len(files) == 1 else name
    return found


def _read_stage(
    path: str | Path, name: str, value: Any, sets: dict[str, str], noise: NoiseConfig | None
) -> StageConfig:
    if isinstance(value, dict):
        if unknown := [key for key in value if key not in ("mix", "modifiers")]:
            raise UserError(f"{path}: stage {name} has {unknown[0]}; a stage has mix and modifiers")
        if "modifiers" in value:
            noise = _read_modifiers(path, value["modifiers"])
        value = value.get("mix")
    if not isinstance(value, list) or not value or not all(isinstance(line, str) for line in value):
        raise UserError(
            f"{path}: stage {name} has no mix; write a list of - NAME SHARE and - until NAME EPOCHS"
        )
    lines = [line.split() for line in value]
    *mix, last = lines
    until = ""
    if last[:1] == ["until"]:
        until = " ".join(_rename(path, name, last[1:], sets, steps=True))
    else:
        mix = lines
    return StageConfig(name, tuple(" ".join(_rename(path, name, line, sets)) for line in mix), until, noise)


def _rename(
    path: str | Path, stage: str, words: list[str], sets: dict[str, str], *, steps: bool = False
) -> list[str]:
    """A line of a mix, or the end of a stage, with the set's name in data.dataset."""
    if len(words) != 2:
        raise UserError(
            f"{path}: stage {stage} has the line {' '.join(words)!r}; write NAME SHARE, and at the end "
            "until NAME EPOCHS"
        )
    name, number = words
    if name not in sets and not (steps and name == "steps"):
        raise UserError(
            f"{path}: stage {stage} names {name}, which is not among its datasets ({', '.join(sets)}); add it"
        )
    return [sets.get(name, name), number]


def _read_modifiers(path: str | Path, values: Any) -> NoiseConfig:
    rates: dict[str, float] = {}
    kinds = TypoConfig()
    for value in _flatten(values):
        if not isinstance(value, dict) or not value:
            raise UserError(f"{path}: modifier {value!r} has no probability; write - NAME: PROBABILITY")
        (name, rate), *options = value.items()
        if name not in _MODIFIERS:
            raise UserError(
                f"{path}: modifier {name} is not supported; there are {', '.join(_MODIFIERS)}: take it out"
            )
        allowed = _TYPO_KINDS if name == "Typos" else ()
        for option, number in ((name, rate), *options):
            if option not in (name, *allowed):
                raise UserError(f"{path}: modifier {name} has the option {option}, which is not supported")
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= 1:
                raise UserError(f"{path}: {option} is {number!r}; it must be a probability from 0 to 1")
        if _MODIFIERS[name] in rates:
            raise UserError(f"{path}: modifier {name} is there twice; write it once")
        rates[_MODIFIERS[name]] = float(rate)
        if options:  # kinds that are not named do not occur
            chosen = dict(options)
            kinds = TypoConfig(**{kind: float(chosen.get(kind, 0)) for kind in _TYPO_KINDS})
    return NoiseConfig(**rates, typo_kinds=kinds)


def _flatten(values: Any) -> Iterator[Any]:
    """The entries of a list and of the lists in it, which YAML's references make."""
    if not isinstance(values, list):
        yield from () if values is None else (values,)
        return
    for value in values:
        yield from _flatten(value)
