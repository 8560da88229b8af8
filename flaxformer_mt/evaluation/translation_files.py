"""The files under RUN/translations/: sources, references and hypotheses, line by line.

Contains the names and the formats of these files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flaxformer_mt.errors import name_full_disk
from flaxformer_mt.object_store.working_copies import publish
from flaxformer_mt.parallel.processes import is_first
from flaxformer_mt.text_io.lines import open_input, read_lines

# Fields of `Translations`, and the suffixes of their files.
_KINDS = {"sources": "source", "references": "reference", "hypotheses": "hypothesis"}


@dataclass(frozen=True)
class Translations:
    """Sources, references and hypotheses: index i of each belongs to sentence i."""

    sources: tuple[str, ...]
    references: tuple[str, ...]
    hypotheses: tuple[str, ...]

    def choose(self, indices: Sequence[int]) -> "Translations":
        """Return the sentences of these indices."""
        fields = (self.sources, self.references, self.hypotheses)
        return Translations(*(tuple(field[index] for index in indices) for field in fields))


def read_sentences(path: str) -> list[str]:
    """Read the lines of a file, or of standard input for `-`. Raises UserError if absent or not UTF-8."""
    with open_input(path) as stream:
        return list(read_lines(stream, name=path))


def save_translations(run_dir: Path, name: str, translations: Translations) -> None:
    """Write RUN/translations/NAME.source, .reference and .hypothesis; line N of each belongs to sentence N.

    Deletes NAME.differences.tsv, which describes earlier translations. With several processes, only the first
    writes.
    """
    if not is_first():
        return
    folder = run_dir / "translations"
    folder.mkdir(parents=True, exist_ok=True)
    for field, kind in _KINDS.items():
        _write(folder / f"{name}.{kind}", [_one_line(text) for text in getattr(translations, field)])
    _differences_file(run_dir, name).unlink(missing_ok=True)
    publish(run_dir)


def load_translations(run_dir: Path, name: str) -> Translations:
    """Read what `save_translations` wrote. Raises UserError if a file is absent."""
    files = {field: str(run_dir / "translations" / f"{name}.{kind}") for field, kind in _KINDS.items()}
    return Translations(**{field: tuple(read_sentences(file)) for field, file in files.items()})


def save_differences(
    run_dir: Path, name: str, heading: Sequence[str], rows: Sequence[Sequence[str]]
) -> Path | None:
    """Write RUN/translations/NAME.differences.tsv: a header line and one line per row, separated by tabs.

    Replaces tabs within a text by spaces. Returns the path of the file; None in all processes but the first.
    """
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
    with name_full_disk(file):
        file.write_bytes("".join(f"{line}\n" for line in lines).encode("utf-8", errors="replace"))


def _one_line(text: str) -> str:
    return text.replace("\r", " ").replace("\n", " ")
