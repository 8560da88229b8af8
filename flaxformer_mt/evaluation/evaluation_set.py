"""The evaluation set: sources and references from a split of a run's data set, or from a user's files.

Contains the name of the set, the check that each source has one reference, and the check that a split is the
same set for two runs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from flaxformer_mt.config import Config
from flaxformer_mt.corpus.reader import has_split, read_pairs
from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation.translation_files import read_sentences
from flaxformer_mt.text_io.lines import STANDARD

Split = Literal["test", "valid"]


@dataclass(frozen=True)
class ScoredSet:
    """Sources with one reference each."""

    # Name of the files under RUN/translations/.
    name: str
    sources: tuple[str, ...]
    references: tuple[str, ...]


def read_set(config: Config, split: Split, *, source: str | None, reference: str | None) -> ScoredSet:
    """Reads the split of the config's data set, unless files are given.

    Raises:
      UserError: the split or a file is absent, one file is missing, or their numbers of lines differ.
    """
    if (source is None) != (reference is None):
        missing = "a reference" if reference is None else "a source"
        raise UserError(f"{source or reference} is given without {missing}; give both files")
    if source is None or reference is None:
        check_split(config, split, files="--source=FILE --reference=FILE")
        pairs = list(read_pairs(config.data, split))
        return ScoredSet(split, tuple(pair.source for pair in pairs), tuple(pair.target for pair in pairs))
    if source == reference:
        raise UserError(f"source and reference are both {source}; give two files")
    sources, references = read_sentences(source), read_sentences(reference)
    if len(sources) != len(references):
        raise UserError(
            f"{source} has {len(sources)} lines, but {reference} has {len(references)}; "
            "line N of the reference must be the translation of line N of the source"
        )
    return ScoredSet(name_of_file(source), tuple(sources), tuple(references))


def check_split(config: Config, split: Split, *, files: str) -> None:
    """Raises UserError if the config's data set lacks a split; `files` names the flags to use instead."""
    if split not in get_args(Split):
        raise UserError(f"split is {split!r}; it must be test or valid")
    if not has_split(config.data, split):
        raise UserError(f"{config.data.dataset} has no {split} split; score files with {files}")


def name_of_file(path: str) -> str:
    """The name under which a file is reported: its name without folders, or stdin."""
    return "stdin" if path == STANDARD else Path(path).name


def check_same_set(split: Split, own: tuple[Path, Config, ScoredSet], other: tuple[Path, Config]) -> None:
    """Raises UserError if a split consists of different sentences in the configs of two runs."""
    (run, config, scored), (other_run, other_config) = own, other
    remedy = "score both on one set with --source=FILE --reference=FILE"
    names = (
        f"{run} has the {split} split of {config.data.dataset} ({len(scored.sources)} pairs, "
        f"{config.data.source_language} to {config.data.target_language})"
    )
    data = other_config.data
    languages = f"{data.source_language} to {data.target_language}"
    if not has_split(data, split):
        raise UserError(f"{names}, but {other_run} has {data.dataset}, without a {split} split; {remedy}")
    pairs = [(pair.source, pair.target) for pair in read_pairs(data, split)]
    if pairs != list(zip(scored.sources, scored.references, strict=True)):
        raise UserError(
            f"{names}, but {other_run} that of {data.dataset} ({len(pairs)} pairs, {languages}), and the "
            f"sentences differ; {remedy}"
        )
