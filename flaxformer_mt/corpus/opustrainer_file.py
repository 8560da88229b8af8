"""Curricula in OpusTrainer's YAML format, read as the stages of a config.

What has no counterpart here is refused by its name. Names of data sets are those of data.dataset; a path
DIR/train.tsv is parallel_text@DIR.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from flaxformer_mt.config import NoiseConfig, StageConfig
from flaxformer_mt.config.field_values import find_wrong_values
from flaxformer_mt.config.files import read_file
from flaxformer_mt.corpus.text_files import PACKINGS
from flaxformer_mt.errors import UserError, first_line, warn_user

# OpusTrainer's modifiers -> fields of NoiseConfig: of the rate, and of the options if there are any.
_MODIFIERS = {
    "UpperCase": ("upper_case", ""),
    "TitleCase": ("title_case", ""),
    "RemoveEndPunct": ("end_punctuation", ""),
    "Typos": ("typos", "typo_kinds"),
    "Merge": ("merge", "merge_lines"),
    "Noise": ("random_text", "random_words"),
    "Tags": ("tags", "tag_kinds"),
    "Prefix": ("prefix", "prefix_words"),
}
# How the words of Tags become text and pieces, which are those of the vocabulary here.
_UNUSED = ("custom_detok_src", "custom_detok_trg", "spm_vocab", "spm_vocab_src", "spm_vocab_trg")
_KEYS = ("datasets", "stages", "modifiers", "seed", "num_fields", "trainer", "version", "curriculum")


def read_curriculum(path: str | Path) -> tuple[StageConfig, ...]:
    """Read the stages of a curriculum with their noise; warn of what does nothing, as `seed`.

    `path` is a file, or FILE#NAME if it has several curricula, as teacher.yml of Firefox's pipeline.
    """
    file, _, name = str(path).partition("#")
    values = _load(Path(file).expanduser())
    try:
        values = _choose(values, name)
        stages = _read_stages(values)
    except ValueError as error:
        raise UserError(f"data.stages: {path} {error}") from None
    if unused := [name for name in ("seed", "trainer") if name in values]:
        warn_user(f"{path}: no effect here: {' and '.join(unused)}; the seed is --config.seed")
    groups = values.get("modifiers")
    if isinstance(groups, dict) and (scripts := [name for name in groups if name != "common"]):
        names = " and ".join(scripts)
        warn_user(f"{path}: modifiers of {names} are used for any script; take out what does not suit yours")
    return stages


def _choose(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the values with those of the curriculum `name`, or of the only one."""
    if "curriculum" not in values and not name:
        return values
    curricula = values.get("curriculum")
    known = curricula if isinstance(curricula, dict) else {}
    chosen = known.get(name or next(iter(known), ""))
    if not isinstance(chosen, dict) or not (name or len(known) == 1):
        raise ValueError(f"has the curricula {', '.join(map(str, known)) or 'none'}; choose one as FILE#NAME")
    return values | chosen


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
    for key, wanted in (("version", ["1"]), ("num_fields", ["2", "3"])):
        if str(values.get(key, wanted[0])) not in wanted:
            raise ValueError(f"has {key} {values[key]}, not {' or '.join(wanted)}")
    if not isinstance(sets, dict) or not sets:
        raise ValueError("has no datasets; write datasets: and for each NAME: PATH")
    datasets = {name: _read_dataset(name, value) for name, value in sets.items()}
    noise = _read_modifiers(values["modifiers"]) if "modifiers" in values else None
    return tuple(_read_stage(name, values.get(name), datasets, noise) for name in names)


def _read_dataset(name: Any, value: Any) -> str:
    if isinstance(value, dict) and list(value.values()) == [None]:
        return str(name)  # {dataset0}, for which a pipeline writes a path
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
    if values is False:  # as backward.yml of Firefox's pipeline says that there are none
        return NoiseConfig()
    noise: dict[str, Any] = {}
    for value in _flatten(list(values.values()) if isinstance(values, dict) else values):  # groups by script
        if not isinstance(value, dict) or not value:
            raise ValueError(f"has the modifier {value!r} without a probability; write - NAME: PROBABILITY")
        name, *options = value
        if name not in _MODIFIERS:
            raise ValueError(f"has the modifier {name}; supported are {', '.join(_MODIFIERS)}: take it out")
        field, kinds = _MODIFIERS[name]
        default: Any = getattr(NoiseConfig(), kinds) if kinds else None
        known = {} if default is None else dataclasses.asdict(default)
        if ignored := [option for option in options if name == "Tags" and option in _UNUSED]:
            warn_user(f"no effect here: {', '.join(ignored)}: text is plain, and its pieces find their words")
        options = [option for option in options if option not in ignored]
        for option in (name, *options):
            if option not in (name, *known):
                raise ValueError(f"has the option {option} of {name}, which is not supported; take it out")
            number, is_share = value[option], option == name or isinstance(known[option], float)
            if is_share and (type(number) not in (int, float) or not 0 <= number <= 1):
                raise ValueError(f"has {option}: {number!r}; it must be a probability from 0 to 1")
            value[option] = float(number) if is_share else number
        if field in noise:
            raise ValueError(f"has the modifier {name} twice; write it once")
        noise[field] = value[name]
        if options:  # kinds of typos that are not named do not occur
            absent = dict.fromkeys(known, 0.0) if name == "Typos" else {}
            noise[kinds] = type(default)(**absent | {option: value[option] for option in options})
            if wrong := next(find_wrong_values(noise[kinds], f"{name}: "), None):
                raise ValueError(f"is wrong: {wrong[1]}")
    return NoiseConfig(**noise)


def _flatten(values: Any) -> Iterator[Any]:
    """Yield the entries of a list and of the lists in it, which YAML's references make."""
    if isinstance(values, list):
        for value in values:
            yield from _flatten(value)
    elif values is not None:
        yield values
