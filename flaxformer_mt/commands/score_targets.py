"""The part of `distil` that writes a teacher's probabilities of the targets (word-level distillation).

The pairs of train.tsv are scored a chunk at a time, into files of their own, which are joined at the end: a
command that was killed goes on with the first chunk that is missing.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.commands.options import DistilOptions
from flaxformer_mt.commands.translate import choose_loading, choose_search
from flaxformer_mt.config.files import read_config
from flaxformer_mt.config.load_options import LoadOptions
from flaxformer_mt.corpus.score_files import ScoreFile, join_parts, open_score_file, write_part
from flaxformer_mt.errors import UserError
from flaxformer_mt.object_store.remote_runs import to_url
from flaxformer_mt.text_io.lines import count_lines, open_lines
from flaxformer_mt.text_io.pair_table import TABLE
from flaxformer_mt.vocab import load_vocabs

NAME = "train.scores"
# Pairs that are scored at a time; with other chunks, batches and so roundings would be others.
_CHUNK = 2048


def check_scores(options: DistilOptions) -> None:
    """Raise UserError if --teacher_scores is wrong by itself, or there is no teacher."""
    if options.teacher_scores is None:
        return
    read_config(options.run / "config.json")
    size = load_vocabs(options.run / "vocab").target.size
    if not 1 <= options.teacher_scores <= size:
        raise UserError(
            f"--teacher_scores is {options.teacher_scores}; it must be from 1 to {size}, the size of the "
            "target vocabulary, and is usually 8"
        )


def write_scores(options: DistilOptions, *, record: Path) -> dict[str, Any]:
    """Write the scores of all pairs of the table, unless that is done; return entries of the report."""
    file = options.output / NAME
    parts = options.output / f".{NAME}.parts"
    if options.overwrite or options.teacher_scores is None:
        file.unlink(missing_ok=True)  # of other pairs
        shutil.rmtree(parts, ignore_errors=True)
    if options.teacher_scores is None:
        return {}
    origin = _find_origin(options, record)
    if file.exists():
        found = open_score_file(file)
        if found.origin != origin:
            differing = [name for name in origin if found.origin.get(name) != origin[name]]
            raise UserError(
                f"{file} was made with other {' and '.join(differing)}; give --overwrite instead of --resume "
                "to start over, or another --output"
            )
        shutil.rmtree(parts, ignore_errors=True)  # if the command was killed before it could
        return {"teacher_scores": _describe(found)}
    _begin(parts, origin)
    made = _score_table(options, parts)
    vocab = load_vocabs(options.run / "vocab").target
    join_parts(file, made, size=vocab.size, vocabulary=vocab.fingerprint, origin=origin)
    shutil.rmtree(parts)
    return {"teacher_scores": _describe(open_score_file(file))}


def _find_origin(options: DistilOptions, record: Path) -> dict[str, Any]:
    """Return what the scores are made from: the pairs, and of the teacher what its translations were made
    from.
    """
    made_from = json.dumps(json.loads(record.read_bytes())["origin"], sort_keys=True).encode()
    pairs = (options.output / TABLE).read_bytes()
    return {
        "teacher_scores": options.teacher_scores,
        "pairs": hashlib.sha256(pairs).hexdigest(),
        "teacher": hashlib.sha256(made_from).hexdigest(),
    }


def _begin(parts: Path, origin: dict[str, Any]) -> None:
    """Make the folder of the chunks; one of another origin is removed first."""
    record = parts / "origin.json"
    text = json.dumps(origin)
    if record.is_file() and record.read_text() == text:
        return
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir(parents=True)
    record.write_text(text)


class _Chunk(NamedTuple):
    number: int
    # Source and target of each pair.
    rows: list[list[str]]

    def name(self) -> str:
        first = self.number * _CHUNK + 1
        return f"rows {first:,} to {first + len(self.rows) - 1:,} of {TABLE}"


# Of each pair the target's ids, and the teacher's tokens and probabilities; None: it is too long.
_Scored = list[tuple[np.ndarray, np.ndarray, np.ndarray] | None]


class ChunkScorer:
    """Scores chunks of pairs by a teacher that it loads; see `Work`."""

    def __init__(self, warn: Callable[[str], None], run: Path, loading: LoadOptions, top_k: int) -> None:
        """Load the run and the other members of the ensemble."""
        from flaxformer_mt.translation.translator import Translator

        self._teacher, self._top_k = Translator.load(run, loading, long_lines="cut", warn=warn), top_k

    def describe(self) -> dict[str, Any]:
        """Return what scores depend on besides the options."""
        from flaxformer_mt.parallel import default_device_kind

        return {"device_kind": default_device_kind()}

    def __call__(self, block: _Chunk) -> tuple[int, _Scored]:
        """Return the number of a chunk, and the scores of its pairs."""
        from flaxformer_mt.translation.requests import Request, run

        requests = [
            Request(source, target=target, top_k=self._top_k, seed=number)
            for number, (source, target, *_) in enumerate(block.rows, start=block.number * _CHUNK + 1)
        ]
        scored: _Scored = []
        for one in run(self._teacher.engine(), requests, _CHUNK):
            assert one.top is not None
            scored.append(None if one.truncated else (np.asarray(one.tokens), *one.top))
        return block.number, scored


def _score_table(options: DistilOptions, parts: Path) -> list[Path]:
    """Write the chunks that are missing; return all of them, in order."""
    from flaxformer_mt.text_io.throughput import Throughput
    from flaxformer_mt.workers.worker_pool import open_pool

    assert options.teacher_scores is not None
    rows = count_lines(str(options.output / TABLE)) or 0
    made = [parts / f"{number:06}.npz" for number in range(-(-rows // _CHUNK))]
    make = functools.partial(
        ChunkScorer,
        run=Path(to_url(options.run)),  # workers of other machines make copies of their own
        loading=dataclasses.replace(choose_loading(options, choose_search(options)), use_all_devices=False),
        top_k=options.teacher_scores,
    )
    with (
        open_pool(make, workers=options.workers, ray=options.ray) as worker_pool,
        Throughput(total=rows, quiet=False) as progress,
    ):
        chunks = _read_chunks(options.output / TABLE)
        missing = (_Chunk(n, chunk) for n, chunk in enumerate(chunks) if not made[n].exists())
        for number, scored in worker_pool.map(missing, name=_Chunk.name):
            write_part(made[number], scored, top_k=options.teacher_scores)
            tokens = sum(len(one[0]) for one in scored if one is not None)
            progress.add(lines=len(scored), tokens=tokens)
    return made


def _read_chunks(table: Path) -> Iterator[list[list[str]]]:
    """Yield source and target of the rows of the table, a chunk at a time."""
    with open_lines(str(table), invalid_utf8="replace") as text:
        rows = (line.split("\t") for line in text.lines)
        while chunk := list(itertools.islice(rows, _CHUNK)):
            yield chunk


def _describe(file: ScoreFile) -> dict[str, Any]:
    """Return the size of a file of scores, and the mean probability that its tokens cover."""
    tokens = int(file.offsets[-1])
    covered = float(file.probs.sum(dtype=np.float64)) / max(tokens, 1)
    without = int((np.diff(file.offsets) == 0).sum())
    return {"top_k": file.top_k, "tokens": tokens, "covered": round(covered, 4), "pairs_without": without}
