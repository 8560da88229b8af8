"""Removed fields, values and flags of earlier versions, with the reasons and the replacements.

A removed field or flag at its default value is accepted. Another value is an error in training. In the config
of a trained run, it is only a warning, unless the run's network needs the field.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from flaxformer_mt.config.field_values import show_value
from flaxformer_mt.errors import UserError


class Removed(NamedTuple):
    """A removed field, value or flag.

    default: the only value that is still accepted; Ellipsis: any value, as for options of removed noise.
    needed: whether runs that were trained with another value can no longer be used.
    """

    default: Any
    reason: str
    needed: bool = False

    def describe(self, name: str) -> str:
        return f"{name} was removed in version 0.3: {self.reason}"


_ANNOTATION = "the model ignored annotations (0 of 923 unknown terms); --glossary=FILE requires terms"
_RDROP = "R-Drop lost 2.9 BLEU in three seeds; docs/extending.md shows how to add a term to the loss"
_EIGHT_BITS = "updates in 8 bits gained no more than in float32; --quantization=int8 rounds any model"
_TEACHER = "a student had 40.65 BLEU with scores, 40.76 without; `distil` writes translations"
_TARGET_CONTEXT = "targets as context gained nothing (99.90 against 100.00 BLEU); data.context reads sources"
_REPETITIONS = "searching again changed 1 of 1,000 lines; --no_repeat_ngram forbids repetitions"
_COMET = '--scorer="comet=python recipes/scorers/comet.py" reports COMET'
_MBR = "minimum Bayes risk is now search.mbr=chrf with search.method=sample or beam"
_UNMEASURED = "its gain was never measured"
_TYPOS = "data.noise.typos makes all kinds of typos, each with probability 0.1"
_WORDS = "random words have 2 to 5 characters, and there are at most 6"

_DECIDED = "no config that we know of needed another value"

# Dotted names of fields, NAME=VALUE of values, flags of commands, and classes.
_TABLE: dict[str, Removed] = {
    "train.prng": Removed(..., "the generator of random numbers is chosen by itself"),
    "data.terms": Removed(0.0, _ANNOTATION),
    "--glossary_use": Removed("auto", _ANNOTATION),
    "train.rdrop_weight": Removed(0.0, _RDROP),
    "model.quantization": Removed(None, _EIGHT_BITS),
    "model.attention=xla": Removed(None, "on CPUs, it was no faster than model.attention=plain"),
    "train.teacher_weight": Removed(0.0, _TEACHER),
    "data.teacher_scores": Removed((), _TEACHER),
    "--teacher_scores": Removed(None, _TEACHER),
    "optim.lora.tokens": Removed(
        0, "it gained nothing (37.76 BLEU, 37.68 without); optim.lora.also_train trains tables", needed=True
    ),
    "optim.final_fraction": Removed(0.0, "schedules cosine and linear fall to 0"),
    "model.alignment.head": Removed(0, "the first head of a layer learns alignments", needed=True),
    "data.target_context": Removed(False, _TARGET_CONTEXT, needed=True),
    "--repetitions": Removed("keep", _REPETITIONS),
    "--comet": Removed(None, _COMET),
    "--positions": Removed(
        None, "no page showed its figure; model.positions.sinusoidal_table gives the numbers"
    ),
    "search.method=mbr": Removed(None, _MBR),
    "search.mbr_candidates": Removed("samples", _MBR),
    "search.mbr_utility": Removed("chrf", _MBR),
    "search.coverage_layer": Removed(-1, "coverage is that of the last decoder layer"),
    "search.allow_unknown": Removed(True, "give the unknown symbol to search.suppress, as in <unk>"),
    "search.ensemble_mean": Removed("log_probs", "ensembles take the mean of log-probabilities"),
    "data.noise.tags": Removed(0.0, "data.noise.inline adds the same random words on both sides"),
    "data.noise.whitespace": Removed(0.0, "data.noise.typos drops and adds spaces"),
    "data.noise.random_words.min_word_length": Removed(2, _WORDS),
    "data.noise.random_words.max_word_length": Removed(5, _WORDS),
    "data.noise.random_words.max_words": Removed(6, _WORDS),
    "data.tfds_data_dir": Removed("", "the environment variable TFDS_DATA_DIR names the folder"),
    "data.loader_threads": Removed(2, _DECIDED),
    "data.prefetch": Removed(8, _DECIDED),
    "data.clean.repeated_targets": Removed("off", _UNMEASURED),
    "data.clean.min_script_share": Removed(0.5, _DECIDED),
    "data.clean.min_language_probability": Removed(0.5, _DECIDED),
    "vocab.max_sentences": Removed(2_000_000, _DECIDED),
    "train.unpad": Removed("auto", "it only turned off what is faster"),
    "train.max_nonfinite_steps": Removed(20, _DECIDED),
    "parallel.devices": Removed(0, "parallel.data x fsdp x tensor devices are used, as 1 by parallel.data=1"),
    "parallel.fsdp_gathers": Removed("auto", "CPUs gather matrices twice, accelerators once"),
    "parallel.xla_flags": Removed(
        (), "none that was tried made a step faster; the environment variable XLA_FLAGS sets them"
    ),
    "TypoConfig": Removed(..., _TYPOS),
}
_TABLE |= dict.fromkeys(
    ("data.noise.merge", "data.noise.prefix", "data.noise.punctuation"), Removed(0.0, _UNMEASURED)
)
_TABLE |= dict.fromkeys(
    ("data.noise.merge_lines", "data.noise.prefix_words", "data.noise.tag_kinds"), Removed(..., _UNMEASURED)
)
_TABLE |= {
    f"data.noise.typo_kinds.{kind}": Removed(0.1, _TYPOS)
    for kind in (
        *("char_swap", "missing_char", "extra_char", "nearby_char", "similar_char"),
        *("skipped_space", "random_space", "repeated_char", "unichar"),
    )
}


def find_removed(name: str, value: Any = None) -> Removed | None:
    """Return the entry of a removed field, flag or value; None if it was not removed."""
    name = re.sub(r"^data\.stages\.\d+\.noise\b", "data.noise", name)
    names = [name, name.rpartition(".")[0], *([f"{name}={value}"] if isinstance(value, str) else [])]
    return next((_TABLE[key] for key in names if key in _TABLE), None)


def take_out(values: Mapping[str, Any], where: str = "") -> tuple[dict[str, Any], dict[str, Removed]]:
    """Take removed fields out of a config; also return a `Removed` for each that is not at default.

    take_out({"train": {"steps": 9, "rdrop_weight": 5.0}}) returns {"train": {"steps": 9}} and the entry of
    "train.rdrop_weight=5.0".
    """
    rest: dict[str, Any] = {}
    changed: dict[str, Removed] = {}
    for name, value in values.items():
        path = f"{where}{name}"
        if removed := find_removed(path, value):
            if not _is_default(value, removed):
                changed[f"{path}={value if isinstance(value, str) else show_value(value)}"] = removed
            continue
        if isinstance(value, dict):
            inner, changed_inside = take_out(value, f"{path}.")
            changed |= changed_inside
            if value and not inner:  # a section of nothing but removed fields
                continue
            value = inner
        elif isinstance(value, list):
            numbered = {str(number): item for number, item in enumerate(value)}
            inner, changed_inside = take_out(numbered, f"{path}.")
            changed |= changed_inside
            value = list(inner.values())
        rest[name] = value
    return rest, changed


def refuse_removed(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return the values without removed fields; raise UserError if a removed field is not at its default."""
    rest, changed = take_out(values, where)
    if changed:
        raise UserError(
            "\n".join(f"{removed.describe(name)}; leave it out" for name, removed in changed.items())
        )
    return rest


def refuse_removed_flag(flag: str, text: str) -> bool:
    """Return whether a flag or its value was removed; raise UserError if the value is not the default.

    --config.train.rdrop_weight and the flags of search.* are looked up as their config fields.
    """
    names = (flag, flag.removeprefix("--config."), f"search.{flag.removeprefix('--')}")
    removed = next(filter(None, (find_removed(name, text) for name in names)), None)
    if removed and not _is_default(text, removed):
        raise UserError(f"{removed.describe(f'{flag}={text}')}; leave it out")
    return removed is not None


def _is_default(value: Any, removed: Removed) -> bool:
    """Return whether a value from Python, JSON or the text of a flag is the default."""
    default = removed.default
    if default is ... or value == default or (default == () and not value):
        return True
    if not isinstance(value, str):
        return False
    return value.lower() in (str(default).lower(), f"{default:g}" if isinstance(default, float) else "")
