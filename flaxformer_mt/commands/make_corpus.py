"""The commands that make training data with a trained model: `backtranslate` and `distil`.

Both translate into DIR/translations.txt with the command `translate`, which is resumable, and then write the
pairs that pass the filters at once. A command that is run again with --resume repeats only the second part,
which is quick and a function of the first.

`distil --teacher_scores` writes a teacher's probabilities of the targets (word-level distillation). The pairs
of train.tsv are scored a chunk at a time, into files of their own, which are joined at the end: a command
that was killed goes on with the first chunk that is missing.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flaxformer_mt.commands.options import (
    BacktranslateOptions,
    CorpusOptions,
    DistilOptions,
    TranslateOptions,
    find_declaration,
)
from flaxformer_mt.commands.translate import (
    check_line_flags,
    choose_loading,
    choose_search,
    translate_file,
    translate_with_ctranslate2,
)
from flaxformer_mt.config.checks import check_n_best
from flaxformer_mt.config.files import read_config
from flaxformer_mt.config.load_options import LoadOptions
from flaxformer_mt.corpus.score_files import ScoreFile, join_parts, open_score_file, write_part
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.object_store.remote_runs import to_url
from flaxformer_mt.text_io.lines import STANDARD, check_writable, count_lines, open_input, open_lines
from flaxformer_mt.text_io.pair_table import TABLE, write_report, write_table
from flaxformer_mt.text_io.resumable_output import record_of
from flaxformer_mt.vocab import load_vocabs

TRANSLATIONS = "translations.txt"
SCORES = "train.scores"
# Pairs that are scored at a time; with other chunks, batches and so roundings would be others.
_CHUNK = 2048


def backtranslate(options: BacktranslateOptions) -> dict[str, Any] | None:
    """Run the command `backtranslate`; return the report, or None in all processes but the first."""
    options = _check(options)
    if options.tag != "".join(options.tag.split()):
        raise UserError(f"--tag is {options.tag!r}; a tag is one symbol without spaces, such as <BT>")
    if options.backend == "ctranslate2":
        translate_with_ctranslate2(_translate_options(options))
    else:
        translate_file(_translate_options(options), keep_record=True)
    if not _is_first():
        return None
    originals = _read(options.input, options)
    translated = _read(str(options.output / TRANSLATIONS), options)
    report = _write_pairs(options, zip(translated, originals, strict=True), tag=options.tag)
    write_report(options.output, report)
    return report


def distil(options: DistilOptions) -> dict[str, Any] | None:
    """Run the command `distil`; return the report, or None in all processes but the first."""
    options = _check(options)
    n_best = _check_targets(options)
    check_scores(options)
    translate_file(_translate_options(options, n_best=n_best), keep_record=True)
    if not _is_first():
        return None
    sources = _read(options.input, options)
    targets = _read(str(options.output / TRANSLATIONS), options)
    if n_best is not None:
        references = _read(str(options.reference), options)
        targets = _choose_closest(read_n_best(targets), references, options.metric)
    report = _write_pairs(options, zip(sources, targets, strict=True))
    report |= write_scores(options, record=record_of(options.output / TRANSLATIONS))
    write_report(options.output, report)
    return report


def _check(options: Any) -> Any:
    """Raise UserError for flags that are wrong by themselves; make the output folder."""
    if options.max_length_ratio is not None:
        warn_user("--max_length_ratio, which filters pairs here, is now called --pair_length_ratio")
        changes = {"pair_length_ratio": options.max_length_ratio, "max_length_ratio": None}
        options = dataclasses.replace(options, **changes)
    if options.input == STANDARD:
        raise UserError("--input is read twice, so that it cannot be standard input; give a file")
    with open_input(options.input):
        pass
    check_line_flags(options)
    folder = options.output.expanduser()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output={folder} is a file; give a folder")
    check_writable(folder)
    finished = folder / TRANSLATIONS
    if finished.exists() and not (options.resume or options.overwrite):
        raise UserError(
            f"{finished} exists; give --resume to keep it, --overwrite to start over, or another --output"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return dataclasses.replace(options, output=folder)


def _check_targets(options: DistilOptions) -> int | None:
    """Return the number of translations to choose from; None for the best one alone."""
    if options.targets == "best":
        for name in ("reference", "n_best"):
            if (value := getattr(options, name)) is not None:
                raise UserError(f"--{name}={value} has no effect with --targets=best; give --targets=nbest")
        return None
    if options.reference is None:
        raise UserError("--targets=nbest compares translations with references; give --reference=FILE")
    with open_input(options.reference):
        pass
    lines, references = count_lines(options.input), count_lines(options.reference)
    if lines != references:
        raise UserError(
            f"--reference={options.reference} has {references} lines, but --input={options.input} "
            f"has {lines}; give one reference for each line"
        )
    search = choose_search(options)
    n_best = (
        (search.beam_size if search.method != "greedy" else 1) if options.n_best is None else options.n_best
    )
    check_n_best(search, n_best, where="--")
    return n_best


def _translate_options(options: CorpusOptions, *, n_best: int | None = None) -> TranslateOptions:
    """Return the options of `translate` that translate --input into TRANSLATIONS."""
    values = {
        name: value
        for name, value in vars(options).items()
        if find_declaration(type(options), name) is find_declaration(TranslateOptions, name)
    }
    values |= {name: getattr(options, name) for name in ("input", "window", "resume", "overwrite")}
    return TranslateOptions(**values, output=str(options.output / TRANSLATIONS), n_best=n_best)


def _is_first() -> bool:
    from flaxformer_mt.parallel.processes import is_first

    return is_first()


def _read(path: str, options: CorpusOptions) -> Iterator[str]:
    with open_lines(path, invalid_utf8=options.invalid_utf8) as text:
        yield from text.lines


def _write_pairs(
    options: CorpusOptions, pairs: Iterable[tuple[str, str]], *, tag: str = ""
) -> dict[str, Any]:
    return write_table(options.output, pairs, options, tag=tag, weight=options.weight)


def read_n_best(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield the texts of each line of an n-best list, best first."""
    for _, group in itertools.groupby(lines, key=lambda line: line.partition(" ||| ")[0]):
        yield [line.split(" ||| ")[1].replace("&#124;&#124;&#124;", "|||") for line in group]


def _choose_closest(n_best: Iterable[list[str]], references: Iterable[str], metric: str) -> Iterator[str]:
    """Yield of each list the text with the best score against its reference; of equal ones the first."""
    from flaxformer_mt.evaluation.metrics import score_sentences_bleu, score_sentences_chrf

    score = score_sentences_bleu if metric == "bleu" else score_sentences_chrf
    for texts, reference in zip(n_best, references, strict=True):
        scores = score(texts, [reference] * len(texts))
        yield texts[scores.index(max(scores))]


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
    """Write the scores of all pairs of the table, unless that is done; return entries of the report.

    Args:
      record: file that says what the translations were made from.
    """
    file = options.output / SCORES
    parts = options.output / f".{SCORES}.parts"
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
        return {"teacher_scores": _describe_scores(found)}
    _begin(parts, origin)
    made = _score_table(options, parts)
    vocab = load_vocabs(options.run / "vocab").target
    join_parts(file, made, size=vocab.size, vocabulary=vocab.fingerprint, origin=origin)
    shutil.rmtree(parts)
    return {"teacher_scores": _describe_scores(open_score_file(file))}


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
    from flaxformer_mt.workers.worker_pool import open_crew

    assert options.teacher_scores is not None
    rows = count_lines(str(options.output / TABLE)) or 0
    made = [parts / f"{number:06}.npz" for number in range(-(-rows // _CHUNK))]
    make = functools.partial(
        ChunkScorer,
        run=Path(to_url(options.run)),  # workers of other machines make copies of their own
        loading=dataclasses.replace(choose_loading(options, choose_search(options)), spread=False),
        top_k=options.teacher_scores,
    )
    with (
        open_crew(make, workers=options.workers, ray=options.ray) as crew,
        Throughput(total=rows, quiet=False) as progress,
    ):
        chunks = _read_chunks(options.output / TABLE)
        missing = (_Chunk(n, chunk) for n, chunk in enumerate(chunks) if not made[n].exists())
        for number, scored in crew.map(missing, name=_Chunk.name):
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


def _describe_scores(file: ScoreFile) -> dict[str, Any]:
    """Return the size of a file of scores, and the mean probability that its tokens cover."""
    tokens = int(file.offsets[-1])
    covered = float(file.probs.sum(dtype=np.float64)) / max(tokens, 1)
    without = int((np.diff(file.offsets) == 0).sum())
    return {"top_k": file.top_k, "tokens": tokens, "covered": round(covered, 4), "pairs_without": without}
