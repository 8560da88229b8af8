"""What is translated and scored: a split of a run's data set, or a user's files.

Owns the set's name, that its sources and references pair up, and when two runs mean the same set by a split.
Knows nothing of models or of scores.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flaxformer_mt.config import Config
from flaxformer_mt.corpus.reader import has_split, read_pairs
from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation.translation_files import read_sentences
from flaxformer_mt.text_io.lines import STANDARD


@dataclass(frozen=True)
class ScoredSet:
    """Sources and a reference for each, as many as there are of the other."""

    # Of the files under RUN/translations/.
    name: str
    sources: tuple[str, ...]
    references: tuple[str, ...]


def read_set(
    config: Config, split: Literal["test", "valid"], *, source: str | None, reference: str | None
) -> ScoredSet:
    """The split of the config's data set, unless files are given.

    Raises:
      UserError: no such split or file, one file without the other, or unequal numbers of lines.
    """
    if (source is None) != (reference is None):
        missing = "a reference" if reference is None else "a source"
        raise UserError(f"{source or reference} is given without {missing}; files are scored in pairs")
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
            "line N of the one must be the translation of line N of the other"
        )
    return ScoredSet(name_of_file(source), tuple(sources), tuple(references))


def check_split(config: Config, split: Literal["test", "valid"], *, files: str) -> None:
    """Refuses a split that the config's data set has not; `files` says which flags would do instead."""
    if not has_split(config.data, split):
        raise UserError(f"{config.data.dataset} has no {split} split; score files with {files}")


def name_of_file(path: str) -> str:
    """What the scores of a file are called: its name without folders, or stdin."""
    return "stdin" if path == STANDARD else Path(path).name


def check_same_set(
    split: Literal["test", "valid"], own: tuple[Path, Config, ScoredSet], other: tuple[Path, Config]
) -> None:
    """Refuses to compare two runs on a split that is not the same sentences in both of their configs."""
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
            f"sentences are not the same; {remedy}"
        )
