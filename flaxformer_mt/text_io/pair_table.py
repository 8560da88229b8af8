"""Writes generated sentence pairs as DIR/train.tsv, which data.dataset=parallel_text@DIR reads, and a report.

Contains the rules by which pairs are dropped. The table depends only on the pairs and is written when they
are complete, so that a command that is killed and run again writes the same bytes.
"""

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from flaxformer_mt.atomic_file import write_atomically
from flaxformer_mt.config.directions import Direction
from flaxformer_mt.config.field_values import at_least
from flaxformer_mt.scoring.score_filters import ScoreFilter, read_filters
from flaxformer_mt.unicode_text import find_script, is_blank, lacks_spaces

# Lengths of repeated sequences: in words, and in letters for scripts without spaces.
_WORDS, _LETTERS = range(1, 5), range(2, 25)
TABLE, DOCUMENTS, REPORT = "train.tsv", "train.documents", "report.json"


@dataclass(frozen=True, kw_only=True)
class PairRules:
    """Rules that decide which pairs are left out."""

    # ---- pairs that are left out ----

    # Leave out pairs whose source or target has more than this many characters.
    max_characters: Annotated[int, at_least(1)] = 1000
    # Leave out pairs if one side has more than this many times as many characters as the other.
    pair_length_ratio: Annotated[float, at_least(1)] = 4.0
    # Leave out pairs whose source or target has a sequence of one to four words (in scripts without spaces, 2
    # to 24 letters) more than this many times in a row.
    max_repetitions: Annotated[int, at_least(1)] = 3
    # Keep pairs whose source and target are equal except for case.
    copies: bool = False
    # Conditions that pairs must meet, separated by commas: NAME>=SCORE (at least this score) or NAME best 80%
    # (among the best 80% of the pairs). NAME is a scorer that --scorer defines and that needs no references.
    # Empty: none.
    clean_scores: tuple[str, ...] = ()

    def find_problem(self, source: str, target: str) -> str | None:
        """Return the name of the first rule that leaves a pair out, or None."""
        lengths = len(source), len(target)
        if is_blank(source) or is_blank(target):
            return "empty"
        if max(lengths) > self.max_characters:
            return "too_long"
        if max(lengths) > self.pair_length_ratio * min(lengths):
            return "length_ratio"
        if not self.copies and _plain(source) == _plain(target):
            return "copies"
        if any(count_repetitions(text) > self.max_repetitions for text in (source, target)):
            return "repeated"
        return None


_PROBLEMS = ("empty", "too_long", "length_ratio", "copies", "repeated")


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def count_repetitions(text: str) -> int:
    """Return the largest number of consecutive repetitions of one to four words: 3 for "a b a b a b c".

    In scripts without spaces between words, repetitions of 2 to 24 letters are counted, ignoring other
    characters between them.
    """
    if lacks_spaces([text]):
        units: Sequence[str] = [letter for letter in text if find_script(letter)]
        sizes = _LETTERS
    else:
        units, sizes = text.split(), _WORDS
    most = 1 if units else 0
    for size in sizes:
        run = 0  # number of consecutive units that equal the unit `size` positions earlier
        for unit, before in zip(units[size:], units, strict=False):
            run = run + 1 if unit == before else 0
            most = max(most, 1 + run // size)
    return most


def write_table(
    folder: Path,
    pairs: Iterable[tuple[str, str]],
    rules: PairRules,
    *,
    direction: Direction,
    tag: str = "",
    weight: float | None = None,
    ids: Iterable[str] | None = None,
) -> dict[str, Any]:
    """Write to `folder` the pairs that pass the rules; return the report's entries, as JSON values.

    tag: precedes each source in the table; the rules are applied without it.
    weight: weight of each pair in the loss, for a third column. None: no third column.
    ids: document id of each pair, for the file train.documents. None: no such file.
    """
    filters = read_filters(rules.clean_scores, "--clean_scores")
    counts = dict.fromkeys(("lines", "pairs"), 0)
    dropped = dict.fromkeys(_PROBLEMS, 0)
    column = "" if weight is None else f"\t{weight!r}"
    prefix = f"{tag} " if tag else ""
    partial = folder / f"{TABLE}.partial"
    with partial.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
        for (source, target), place in zip(pairs, itertools.repeat("") if ids is None else ids, strict=False):
            counts["lines"] += 1
            problem = rules.find_problem(source, target)
            if problem is not None:
                dropped[problem] += 1
                continue
            counts["pairs"] += 1
            place = "" if ids is None else f"\t{counts['lines']} {_one_cell(place)}"
            file.write(f"{prefix}{_one_cell(source)}\t{_one_cell(target)}{column}{place}\n")
    for one in filters:
        left_out = _filter_table(partial, one, prefix, direction)
        counts["pairs"] -= left_out
        dropped["scores"] = dropped.get("scores", 0) + left_out
    (folder / DOCUMENTS).unlink(missing_ok=True)
    if ids is not None:
        _take_places(partial, folder / DOCUMENTS)
    with partial.open("rb") as table:
        os.fsync(table.fileno())
    os.replace(partial, folder / TABLE)
    values = {field.name: getattr(rules, field.name) for field in dataclasses.fields(PairRules)}
    if not filters:
        del values["clean_scores"]
    values["max_length_ratio"] = values.pop("pair_length_ratio")  # its name in all reports
    return {**counts, "dropped": dropped, "tag": tag, "rules": values}


def _filter_table(table: Path, chosen: ScoreFilter, prefix: str, direction: Direction) -> int:
    """Remove rows from a table by a score filter; return the number of removed rows."""
    with table.open(encoding="utf-8", newline="\n") as file:
        rows = (line.rstrip("\n").split("\t") for line in file)
        pairs = ((source.removeprefix(prefix), target) for source, target, *_ in rows)
        kept = chosen.keep(pairs, direction)
    better = table.with_suffix(".scored")
    with table.open("rb") as file, better.open("wb") as output:
        output.writelines(itertools.compress(file, kept))
    os.replace(better, table)
    return kept.count(False)


def _take_places(table: Path, documents: Path) -> None:
    """Move the last column of a table (line and document of each row) to the file `documents`.

    The file has, for each row, the number of the first line of its document as the document id. A document
    also ends where a line was left out, so that context lines directly precede a line in the input.
    """
    better, first, following = table.with_suffix(".placed"), b"", (0, b"")
    with table.open("rb") as rows, better.open("wb") as output, documents.open("wb") as file:
        for row in rows:
            pair, place = row.removesuffix(b"\n").rsplit(b"\t", 1)
            line, _, document = place.partition(b" ")
            first = first if (int(line), document) == following else line
            following = int(line) + 1, document
            output.write(pair + b"\n")
            file.write(first + b"\n")
    os.replace(better, table)


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Write the report next to the table; a table with a report is complete."""
    write_atomically(folder / REPORT, (json.dumps(report, indent=2) + "\n").encode())


def _one_cell(text: str) -> str:
    """Return the text with spaces instead of tabs and line ends, which would end a cell of a table."""
    return re.sub("[\t\r\n]+", " ", text).strip(" ")
