"""`parallel_text`: the user's own text files as a TFDS data set, prepared again when their content changes.

Contains the TFDS builder over text files and the checks of whole files. The prepared set holds all lines in
the order of the files; `cleaning` selects among them later. Imports TFDS, so import this module late.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from flaxformer_mt.config import CleanConfig
from flaxformer_mt.corpus import text_files
from flaxformer_mt.corpus.cache_use import use_cache
from flaxformer_mt.corpus.cached_json import digest
from flaxformer_mt.corpus.pair_weights import find_weights
from flaxformer_mt.corpus.pairs import RawSplit
from flaxformer_mt.corpus.text_files import Scan
from flaxformer_mt.corpus.tfds_cache import build_once
from flaxformer_mt.errors import UserError

# Size limit of a stored split: TFDS holds a split in memory while writing it, and needs TensorFlow beyond
# 1 GB, so the text is stored in several splits.
_PART_BYTES = 1 << 28


@dataclass(eq=False, kw_only=True)
class ParallelTextConfig(tfds.core.BuilderConfig):
    """The files of one split; `name` is a digest of their content, so edited files are another data set.

    stamps: `read_stamp` of each file. languages: of both sides, or of the target alone. ranges: the lines
    [start, stop) of each stored split.
    """

    files: tuple[Path, ...] = ()
    stamps: tuple[tuple[int, ...], ...] = ()
    languages: tuple[str, ...] = ()
    ranges: tuple[tuple[int, int], ...] = ()


class ParallelText(tfds.core.GeneratorBasedBuilder):
    """Pairs of lines, or lines of one language, in the order of the files, in splits of bounded size.

    The splits are named part00000, part00001, ...
    """

    # Nothing is downloaded. Without this line TFDS looks for checksums, with a package it does not require.
    url_infos = None
    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        languages = self.builder_config.languages
        return tfds.core.DatasetInfo(
            builder=self,
            description="Pairs of lines, or lines of one language, of the user's text files.",
            features=tfds.features.Translation(languages=languages),
            supervised_keys=languages if len(languages) == 2 else None,
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        rows = _read_unchanging(self.builder_config)
        # All splits read one stream: TFDS exhausts each generator before it starts the next.
        return {
            f"part{number:05d}": self._generate_examples(rows, start, stop)
            for number, (start, stop) in enumerate(self.builder_config.ranges)
        }

    def _generate_examples(
        self, rows: Iterator, start: int, stop: int
    ) -> Iterator[tuple[int, dict[str, bytes]]]:
        for line, pair in enumerate(islice(rows, stop - start), start):
            yield line, dict(zip(self.builder_config.languages, pair, strict=True))


def _read_unchanging(config: ParallelTextConfig) -> Iterator[tuple[bytes, ...]]:
    """Yields the rows; raises UserError instead of the last row if a file changed since its scan."""
    lines = config.ranges[-1][1]
    rows: Iterator[tuple[bytes, ...]] = (
        text_files.read_rows(config.files)
        if len(config.languages) == 2
        else zip(text_files.read_lines(config.files[0]), strict=True)
    )
    for line, row in enumerate(islice(rows, lines), start=1):
        if line == lines:
            for path, stamp in zip(config.files, config.stamps, strict=True):
                if text_files.read_stamp(path) != stamp:
                    raise UserError(f"{path} changed while it was being read; run the command again")
        yield row


def open_parallel_text(
    folder: Path,
    split: str,
    *,
    name: str,
    languages: tuple[str, str],
    clean: CleanConfig,
    may_drop: bool,
    cache: Path,
) -> RawSplit:
    """Prepares the files `folder/split.*` under `cache` unless they are prepared already, and opens them.

    Without a source language only the target's file is read. Weights of pairs are read for the train split,
    which is the one that `may_drop`.

    Raises:
      UserError: a file is missing or empty; line counts differ (unless `clean` drops the surplus lines of a
        train split); a line of a .tsv file has not two columns, or three; a weight is invalid; or there is no
        source language and only a .tsv file.
    """
    files = text_files.find_files(folder, split, languages)
    stamps = tuple(text_files.read_stamp(path) for path in files)
    present = tuple(filter(None, languages))
    columns = 1 + len(present) - len(files)
    use_cache(cache)
    scans = tuple(text_files.load_or_scan(path, columns=columns, folder=cache / "scans") for path in files)
    lines = _count_lines(files, scans, clean, may_drop=may_drop)
    weights = find_weights(folder, split, files, scans[0], cache / "scans") if may_drop else None
    values = None if weights is None else weights.load(lines, cache / "weights")
    config = ParallelTextConfig(
        name=digest([present, columns, lines, [scan.digest for scan in scans]]),
        files=files,
        stamps=stamps,
        languages=present,
        ranges=tuple(text_files.cut_into_blocks(scans, lines, max_bytes=_PART_BYTES)),
    )
    builder = build_once(
        lambda: ParallelText(
            config=config, data_dir=cache / "tfds", file_format=tfds.core.FileFormat.ARRAY_RECORD
        ),
        root=cache / "tfds" / ParallelText.name,
    )
    return RawSplit(
        name=name,
        identity=config.name if weights is None else digest([config.name, weights.identity]),
        rows=builder.as_data_source("+".join(sorted(builder.info.splits))),
        languages=languages,
        sides=(files[0].name, files[-1].name),
        unit="line",
        facts={
            "folder": str(folder),
            "files": [
                {"file": path.name, "lines": scan.lines, "crlf_lines": scan.crlf_lines, "bom": scan.bom}
                for path, scan in zip(files, scans, strict=True)
            ],
            "surplus_lines": max(scan.lines for scan in scans) - lines,
            **_read_tag(files[0]),
        },
        weights=values,
    )


def _read_tag(file: Path) -> dict[str, str]:
    """The symbol before the sources of a table that `backtranslate` made, as its report says."""
    try:
        report = json.loads((file.parent / "report.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    made = file.name == "train.tsv" and isinstance(report, dict) and "dropped" in report
    tag = report.get("tag") if made else None
    return {"tag": tag} if isinstance(tag, str) and tag else {}


def _count_lines(
    files: tuple[Path, ...], scans: tuple[Scan, ...], clean: CleanConfig, *, may_drop: bool
) -> int:
    counts = [scan.lines for scan in scans]
    for path, count in zip(files, counts, strict=True):
        if count == 0:
            raise UserError(f"{path} is empty; it should hold one sentence per line")
    if len(set(counts)) > 1 and not (may_drop and clean.unequal_lines == "drop"):
        remedy = "correct the files; validation and test data is never dropped"
        if may_drop:
            remedy = "correct them, or drop the surplus lines with --config.data.clean.unequal_lines=drop"
        raise UserError(f"{files[0]} has {counts[0]} lines, but {files[1]} has {counts[1]}; {remedy}")
    return min(counts)
