"""Reads curricula in OpusTrainer's YAML format, which Firefox's pipeline uses, as the stages of a config.

An unsupported key raises an error that names the key. Data sets have the names of data.dataset; the path
DIR/train.tsv means parallel_text@DIR.
"""

import itertools
from pathlib import Path
from typing import Any, TypeGuard

from flaxformer_mt.config import NoiseConfig, StageConfig
from flaxformer_mt.config.field_values import show_value
from flaxformer_mt.config.files import read_file
from flaxformer_mt.corpus.text_files import PACKINGS
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.yaml_reader import load_yaml

# OpusTrainer's modifiers -> the corresponding fields of NoiseConfig.
_MODIFIERS = {
    "UpperCase": "upper_case",
    "TitleCase": "title_case",
    "RemoveEndPunct": "end_punctuation",
    "Typos": "typos",
    "Noise": "random_text",
    "Tags": "inline",
}
# The supported options of modifiers, each with the only supported value.
_OPTIONS = {
    "Noise": {"min_word_length": 2, "max_word_length": 5, "max_words": 6},
    "Tags": {"augment": 1, "tag": 0},
}
# Options of Tags that are ignored: texts are not tokenized, and the run has its own vocabulary.
_UNUSED = ("custom_detok_src", "custom_detok_trg", "spm_vocab_src", "spm_vocab_trg")
_KEYS = ("datasets", "stages", "modifiers", "seed", "num_fields", "curriculum")


def read_curriculum(path: str | Path) -> tuple[StageConfig, ...]:
    """Read the stages of a curriculum with their noise; warn of keys that have no effect, such as `seed`.

    `path` is a file or, if the file has several curricula like teacher.yml of Firefox's pipeline, FILE#NAME.
    """
    file, _, name = str(path).partition("#")
    values = _load(Path(file).expanduser())
    try:
        values = _choose(values, name)
        stages = _read_stages(values)
    except ValueError as error:
        raise UserError(f"data.stages: {path} {error}") from None
    if "seed" in values:
        warn_user(f"{path}: no effect here: seed; the seed is --config.seed")
    groups = values.get("modifiers")
    if isinstance(groups, dict) and (scripts := [name for name in groups if name != "common"]):
        names = " and ".join(scripts)
        warn_user(f"{path}: modifiers of {names} are used for any script; take out what does not suit yours")
    return stages


def _choose(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Merge the curriculum `name`, or the only curriculum, into the other values of the file."""
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
        content = read_file(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"data.stages: {path} cannot be read: {reason}; give a YAML file in OpusTrainer's format"
        ) from error
    values = load_yaml(content, f"data.stages: {path}")
    if not isinstance(values, dict):
        raise UserError(f"data.stages: {path} is no curriculum; it has no datasets: and stages:")
    return values


def _is_list(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, str) for entry in value)


def _read_stages(values: dict[str, Any]) -> tuple[StageConfig, ...]:
    """Read the stages; raise ValueError with a message to be put after the name of the file."""
    names, sets = values.get("stages"), values.get("datasets")
    if not _is_list(names):
        raise ValueError("has no list of stages; write stages: and the name of each, as in - start")
    if unknown := [key for key in values if key not in _KEYS and key not in names]:
        known = ", ".join(_KEYS)
        raise ValueError(f"has {unknown[0]}, which is neither a stage nor one of {known}; take it out")
    if values.get("num_fields", 2) not in (2, 3):
        raise ValueError(f"has num_fields {show_value(values['num_fields'])}, not 2 or 3")
    if not isinstance(sets, dict) or not sets:
        raise ValueError("has no datasets; write datasets: and for each NAME: PATH")
    datasets = {name: _read_dataset(name, value) for name, value in sets.items()}
    noise = _read_modifiers(values["modifiers"]) if "modifiers" in values else None
    return tuple(_read_stage(name, values.get(name), datasets, noise) for name in names)


def _read_dataset(name: Any, value: Any) -> str:
    if isinstance(value, dict) and list(value.values()) == [None]:
        return str(name)  # {dataset0}, for which a pipeline writes a path
    if not isinstance(name, str) or not isinstance(value, str):
        raise ValueError(f"has the data set {name}: {show_value(value)}; write NAME: PATH")
    folder, _, file = value.rpartition("/")
    return f"parallel_text@{folder}" if file in [f"train.tsv{packing}" for packing in PACKINGS] else name


def _read_stage(name: str, lines: Any, sets: dict[str, str], noise: NoiseConfig | None) -> StageConfig:
    if not _is_list(lines):
        raise ValueError(f"has no mix in stage {name}; list - NAME SHARE, and at the end - until NAME EPOCHS")
    *mix, end = lines
    until = ""
    if end.startswith("until "):
        until = _name_set(end.removeprefix("until "), name, sets)
    else:
        mix.append(end)
    return StageConfig(name, tuple(_name_set(line, name, sets) for line in mix), until, noise)


def _name_set(line: str, stage: str, sets: dict[str, str]) -> str:
    """Return the line `NAME NUMBER` of a stage with NAME replaced by the name in data.dataset."""
    words = line.split()
    if len(words) != 2:
        raise ValueError(f"has {line!r} in stage {stage}; write NAME SHARE, and at the end until NAME EPOCHS")
    name, number = words
    if name not in sets:
        raise ValueError(f"has {name} in stage {stage}, which is not a data set ({', '.join(sets)}); add it")
    return f"{sets[name]} {number}"


def _read_modifiers(values: Any) -> NoiseConfig:
    """Read a list of modifiers, or one list per script; False, as in Firefox's backward.yml, means none."""
    if values is False:
        return NoiseConfig()
    groups = values.values() if isinstance(values, dict) else [values]
    lists = [group if isinstance(group, list) else [group] for group in groups if group is not None]
    rates: dict[str, float] = {}
    for value in itertools.chain(*lists):
        if not isinstance(value, dict) or not value:
            raise ValueError(
                f"has the modifier {show_value(value)} without a probability; write - NAME: PROBABILITY"
            )
        name = next(iter(value))
        if name not in _MODIFIERS:
            raise ValueError(f"has the modifier {name}; supported are {', '.join(_MODIFIERS)}: take it out")
        if _MODIFIERS[name] in rates:
            raise ValueError(f"has the modifier {name} twice; write it once")
        rate = value[name]
        if type(rate) not in (int, float) or not 0 <= rate <= 1:
            raise ValueError(f"has {name}: {show_value(rate)}; it must be a probability from 0 to 1")
        _check_options(name, value)
        rates[_MODIFIERS[name]] = float(rate)
    return NoiseConfig(**rates)


def _check_options(name: str, value: dict[str, Any]) -> None:
    options = {option: number for option, number in value.items() if option != name}
    if name == "Tags":
        if ignored := [option for option in options if option in _UNUSED]:
            warn_user(f"no effect here: {', '.join(ignored)}: text is plain, and its pieces find their words")
        # Without augment, OpusTrainer writes the translations next to the words.
        options = {"augment": 0} | {option: options[option] for option in options if option not in ignored}
    supported = _OPTIONS.get(name, {})
    for option, number in options.items():
        if option not in supported or number != supported[option]:
            known = ", ".join(f"{one}: {value}" for one, value in supported.items())
            hint = f"supported are {known}" if supported else "it has no options here, take it out"
            raise ValueError(f"has {option}: {show_value(number)} in {name}; {hint}")
