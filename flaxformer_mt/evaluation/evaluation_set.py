"""The evaluation set: sources and references from a split of a run's data set, or from a user's files."""

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from flaxformer_mt.atomic_file import write_atomically
from flaxformer_mt.config import Config, DataConfig
from flaxformer_mt.config.directions import Direction, find_directions
from flaxformer_mt.corpus.pairs import Pair
from flaxformer_mt.corpus.reader import has_split, read_pairs
from flaxformer_mt.errors import UserError
from flaxformer_mt.object_store.remote_runs import publish
from flaxformer_mt.parallel.processes import is_first
from flaxformer_mt.text_io.lines import STANDARD, open_input, read_lines
from flaxformer_mt.translation.language_tags import choose_line_tags

# Fields of `Translations`, and the suffixes of their files.
_KINDS = {"sources": "source", "references": "reference", "hypotheses": "hypothesis"}


@dataclass(frozen=True)
class Translations:
    """Sources, references (may be empty) and hypotheses; item i of each belongs to sentence i."""

    sources: tuple[str, ...]
    references: tuple[str, ...]
    hypotheses: tuple[str, ...]

    def choose(self, indices: Sequence[int]) -> "Translations":
        fields = (self.sources, self.references, self.hypotheses)
        return Translations(*(tuple(field[index] for index in indices) for field in fields))


def read_sentences(path: str) -> list[str]:
    """Read the lines of a file, or of standard input for `-`."""
    with open_input(path) as stream:
        return list(read_lines(stream, name=path))


def save_translations(run_dir: Path, name: str, translations: Translations, system: str = "") -> None:
    """Write RUN/translations/NAME.source, .reference and .hypothesis; line N of each belongs to sentence N.

    NAME.system names the checkpoint and the search. NAME.differences.tsv, which describes earlier
    translations, is deleted. Only the first process writes.
    """
    if not is_first():
        return
    folder = run_dir / "translations"
    folder.mkdir(parents=True, exist_ok=True)
    # First what says of which system the files are: a process may end between two of them.
    (folder / f"{name}.system").unlink(missing_ok=True)
    _differences_file(run_dir, name).unlink(missing_ok=True)
    for field, kind in _KINDS.items():
        file, texts = folder / f"{name}.{kind}", getattr(translations, field)
        if len(texts) < len(translations.sources):  # without references
            file.unlink(missing_ok=True)
            continue
        _write(file, [_one_line(text) for text in texts])
    if system:
        _write(folder / f"{name}.system", [system])
    publish(run_dir)


def load_translations(run_dir: Path, name: str) -> Translations:
    files = {field: str(run_dir / "translations" / f"{name}.{kind}") for field, kind in _KINDS.items()}
    return Translations(**{field: tuple(read_sentences(file)) for field, file in files.items()})


def save_differences(
    run_dir: Path, name: str, heading: Sequence[str], rows: Sequence[Sequence[str]]
) -> Path | None:
    """Write RUN/translations/NAME.differences.tsv in the first process; tabs in texts become spaces."""
    if not is_first():
        return None
    file = _differences_file(run_dir, name)
    file.parent.mkdir(parents=True, exist_ok=True)
    cells = [[_one_line(text).replace("\t", " ") for text in row] for row in (heading, *rows)]
    _write(file, ["\t".join(row) for row in cells])
    publish(run_dir)
    return file


def format_side_by_side(translations: Translations, *, count: int = 10) -> str:
    """Format source, translation and reference of up to `count` sentences, spread evenly over the set.

    source       ein Hund läuft .
    translation  a dog runs .
    reference    a dog is running .
    """
    total = len(translations.sources)
    count = min(count, total)
    shown = [index * total // count for index in range(count)]
    return "\n\n".join(
        f"source       {_one_line(translations.sources[index])}\n"
        f"translation  {_one_line(translations.hypotheses[index])}\n"
        f"reference    {_one_line(translations.references[index])}"
        for index in shown
    )


def _differences_file(run_dir: Path, name: str) -> Path:
    return run_dir / "translations" / f"{name}.differences.tsv"


def _write(file: Path, lines: Sequence[str]) -> None:
    write_atomically(file, "".join(f"{line}\n" for line in lines).encode("utf-8", errors="replace"))


def _one_line(text: str) -> str:
    return text.replace("\r", " ").replace("\n", " ")


Split = Literal["test", "valid"]


@dataclass(frozen=True)
class ScoredSet:
    # Name of the files under RUN/translations/.
    name: str
    sources: tuple[str, ...]
    # Empty: scorers need none.
    references: tuple[str, ...]
    direction: Direction
    # The languages to translate from and to, as `Translator.translate` takes them: those that are given, or
    # those of the direction if there are several. Other arguments may be added.
    languages: dict[str, Any]
    # The documents of the sentences, as `Translator.translate` takes them.
    documents: Sequence[Hashable] | bool = True

    def find_documents(self, data: DataConfig) -> dict[str, Any]:
        """Return the argument `documents` of `Translator.translate`; {} if the model uses no context."""
        return {"documents": self.documents} if data.context else {}


def read_sets(
    config: Config,
    split: Split,
    *,
    source: str | None,
    reference: str | None,
    languages: Mapping[str, str | None],
    vocab_tags: Mapping[str, int] = MappingProxyType({}),
    alone: bool = False,
) -> list[ScoredSet]:
    """Read the two files or, without files, the split of each direction with these languages (None: any).

    `alone`: whether a source may be given without a reference.
    """
    named = {name: language for name, language in languages.items() if language is not None}
    tags = choose_line_tags(config.data, **named, vocab_tags=vocab_tags)
    directions = [
        candidate
        for candidate in find_directions(config.data)
        if languages.get("source_language") in (None, candidate.source)
        and languages.get("target_language") in (None, candidate.target)
    ]
    alone = alone and source is not None and reference is None
    if (source is None) != (reference is None) and not alone:
        missing = "a reference" if reference is None else "a source"
        raise UserError(f"{source or reference} is given without {missing}; give both files, or --scorer")
    if source is None:
        return _read_split_sets(config, split, directions, named)
    if source == reference:
        raise UserError(f"source and reference are both {source}; give two files")
    sources, references = read_sentences(source), [] if reference is None else read_sentences(reference)
    if reference is not None and len(sources) != len(references):
        raise UserError(
            f"{source} has {len(sources)} lines, but {reference} has {len(references)}; "
            "line N of the reference must be the translation of line N of the source"
        )
    if len({candidate.target for candidate in directions}) > 1:
        raise UserError(tags.missing or "--target_language is missing: BLEU depends on the language")
    direction = directions[0] if directions else Direction(named["source_language"], named["target_language"])
    return [ScoredSet(name_of_file(source), tuple(sources), tuple(references), direction, named)]


def _read_split_sets(
    config: Config, split: Split, directions: Sequence[Direction], named: dict[str, str]
) -> list[ScoredSet]:
    files = "--source=FILE --reference=FILE"
    check_split(config, split, files=files)
    several, sets = len(find_directions(config.data)) > 1, []
    for direction, rows in _read_split(config.data, split).items():
        if direction in directions:
            name = f"{split}.{direction.name}" if several else split
            both = {"source_language": direction.source, "target_language": direction.target}
            sources, references = (tuple(getattr(pair, side) for pair, _ in rows) for side in Pair._fields)
            languages, documents = both if several else named, [document for _, document in rows]
            sets.append(ScoredSet(name, sources, references, direction, languages, documents))
    if not sets:
        raise UserError(
            f"{config.data.dataset} has no {split} split for {' and '.join(named.values())}; score files "
            f"with {files}"
        )
    return sets


def _read_split(data: DataConfig, split: Split) -> dict[Direction, list[tuple[Pair, Hashable]]]:
    """Read the pairs of each direction, and the document of each pair."""
    pairs = read_pairs(data, split, tagged=False)
    rows = zip(pairs, pairs.documents or itertools.repeat(0), strict=False)
    directions = find_directions(data)
    if len(directions) == 1:
        return {directions[0]: list(rows)}
    texts = dict[Direction, list[tuple[Pair, Hashable]]]()
    for part, languages in zip(pairs.parts, pairs.languages, strict=True):
        texts[Direction(*languages)] = list(itertools.islice(rows, part.size))
    return texts


def check_split(config: Config, split: Split, *, files: str) -> None:
    """Raise UserError if the data set lacks this split; the message suggests the flags in `files` instead."""
    if split not in get_args(Split):
        raise UserError(f"split is {split!r}; it must be test or valid")
    if not has_split(config.data, split):
        raise UserError(f"{config.data.dataset} has no {split} split; score files with {files}")


def name_of_file(path: str) -> str:
    return "stdin" if path == STANDARD else Path(path).name


def check_same_set(
    split: Split, evaluated: tuple[Path, Config, ScoredSet], other: tuple[Path, Config]
) -> None:
    """Raise UserError if the configs of two runs have different sentences in this split."""
    (run, config, scored), (other_run, other_config) = evaluated, other
    remedy = "score both on one set with --source=FILE --reference=FILE"
    names = (
        f"{run} has the {split} split of {config.data.dataset} ({len(scored.sources)} pairs, "
        f"{scored.direction.source} to {scored.direction.target})"
    )
    data = other_config.data
    if not has_split(data, split):
        raise UserError(f"{names}, but {other_run} has {data.dataset}, without a {split} split; {remedy}")
    all_pairs = _read_split(data, split)
    # Of several directions the same one; of a single one whatever its languages are called.
    own_direction = scored.direction if scored.direction in all_pairs else next(iter(all_pairs))
    pairs = [(pair.source, pair.target) for pair, _ in all_pairs[own_direction]]
    languages = f"{own_direction.source} to {own_direction.target}"
    if pairs != list(zip(scored.sources, scored.references, strict=True)):
        raise UserError(
            f"{names}, but {other_run} that of {data.dataset} ({len(pairs)} pairs, {languages}), and the "
            f"sentences differ; {remedy}"
        )
