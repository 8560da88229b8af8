"""The commands that make training data with a trained model: `backtranslate` and `distil`.

First, `translate` writes DIR/translations.txt, which can be resumed, or `distil` chooses among candidates.
Second, the pairs are filtered and written in one go. With --resume, a finished command repeats only the
second part.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from flaxformer_mt.commands.options import (
    BacktranslateOptions,
    CorpusOptions,
    DistilOptions,
    FileTranslationOptions,
    LanguageOptions,
    TranslateOptions,
)
from flaxformer_mt.commands.translate import (
    check_lengths,
    check_line_flags,
    choose_search,
    translate_file,
)
from flaxformer_mt.config.checks import check_n_best
from flaxformer_mt.config.directions import Direction, common_languages, find_directions
from flaxformer_mt.config.files import read_config
from flaxformer_mt.config.load_options import take_values
from flaxformer_mt.errors import UserError, name_full_disk, warn_user
from flaxformer_mt.scoring.metrics import find_metric, need_no_references
from flaxformer_mt.text_io.lines import STANDARD, check_writable, open_input, open_lines
from flaxformer_mt.text_io.pair_table import TABLE, write_report, write_table

TRANSLATIONS = "translations.txt"
# N-best lists that are chosen from at a time.
_LISTS = 256


def backtranslate(options: BacktranslateOptions) -> dict[str, Any] | None:
    """Run `backtranslate`; return the report, or None in all processes but the first."""
    options = _check(options)
    if options.tag != "".join(options.tag.split()):
        raise UserError(f"--tag is {options.tag!r}; a tag is one symbol without spaces, such as <BT>")
    translate_file(_translate_options(options, backend=options.backend), keep_record=True)
    if not _is_first():
        return None
    originals = _read(options.input, options)
    translated = _read(str(options.output / TRANSLATIONS), options)
    pairs, direction = zip(translated, originals, strict=True), _find_direction(options).reverse
    report = _write_pairs(options, pairs, direction, tag=options.tag)
    write_report(options.output, report)
    return report


def distil(options: DistilOptions) -> dict[str, Any] | None:
    """Run `distil`; return the report, or None in all processes but the first."""
    if options.candidates is not None:
        _check_candidates(options)
    elif missing := [f"--{name}" for name in ("run", "input") if getattr(options, name) is None]:
        raise UserError(f"distil lacks {' and '.join(missing)}, or --candidates=FILE; see --help")
    options = _check_targets(_check(options))
    if options.candidates is None:
        languages = take_values(options, LanguageOptions)
        translate_file(_translate_options(options, n_best=options.n_best, **languages), keep_record=True)
    if not _is_first():
        return None
    if options.candidates is not None:
        return _distil_candidates(options, options.candidates)
    direction, sources = _find_direction(options), _read(str(options.input), options)
    targets = _read(str(options.output / TRANSLATIONS), options)
    if options.targets != "best":
        targets = _choose_targets(options, read_n_best(targets), direction)
    report = _write_pairs(options, zip(sources, targets, strict=True), direction)
    write_report(options.output, report)
    return report


def _distil_candidates(options: DistilOptions, candidates: str) -> dict[str, Any]:
    from flaxformer_mt.commands.choose_candidates import CandidateReport, write_choices

    direction, made = _find_direction(options), CandidateReport()
    write_choices(options, candidates, direction)
    report = _write_pairs(options, made.read_pairs(options), direction)
    report |= {"targets": options.targets, "metric": options.metric, **made.facts}
    made.write_page(options, report)
    write_report(options.output, report)
    return report


def _check(options: Any) -> Any:
    """Raise UserError for invalid flags and existing output; create the output folder."""
    if options.max_length_ratio is not None:
        warn_user("--max_length_ratio, which filters pairs here, is now called --pair_length_ratio")
        changes = {"pair_length_ratio": options.max_length_ratio, "max_length_ratio": None}
        options = dataclasses.replace(options, **changes)
    name = "input" if getattr(options, "candidates", None) is None else "candidates"
    path = getattr(options, name)
    if path == STANDARD:
        raise UserError(f"--{name} is read twice, so that it cannot be standard input; give a file")
    with open_input(path, name):
        pass
    check_line_flags(options)
    folder = options.output.expanduser()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output={folder} is a file; give a folder")
    check_writable(folder)
    finished = folder / {"input": TRANSLATIONS, "candidates": "choices.jsonl"}[name]
    if finished.exists() and not (options.resume or options.overwrite):
        raise UserError(
            f"{finished} exists; give --resume to keep it, --overwrite to start over, or another --output"
        )
    check_lengths(options, ("reference", "document_ids"), name)
    folder.mkdir(parents=True, exist_ok=True)
    return dataclasses.replace(options, output=folder)


def _check_candidates(options: DistilOptions) -> None:
    """Raise UserError for translation flags, which have no effect with --candidates."""
    used = {"scorer", "scorer_timeout", "invalid_utf8", "documents", "document_ids", "max_length_ratio"}
    unused = {field.name for field in dataclasses.fields(FileTranslationOptions)} - used | {"input", "n_best"}
    for field in dataclasses.fields(options):
        if field.name in unused and (value := getattr(options, field.name)) != field.default:
            raise UserError(f"--{field.name}={value} has no effect with --candidates; leave one of them out")


def _check_targets(options: DistilOptions) -> DistilOptions:
    """Raise UserError for flags that have no effect or are missing; fill in n_best and the metric."""
    useless = {"best": ("reference", "n_best", "metric"), "nbest": ()}.get(options.targets, ("reference",))
    for name in useless:
        if (value := getattr(options, name)) is not None:
            problem = f"has no effect with --targets={options.targets}"
            raise UserError(f"--{name}={value} {problem}; give --targets=nbest")
    if options.targets == "best":
        return options
    if options.targets == "nbest" and options.reference is None:
        raise UserError("--targets=nbest compares translations with references; give --reference=FILE")
    metric = options.metric or {"nbest": "bleu", "mbr": "chrf"}.get(options.targets)
    if metric is None:
        raise UserError("--targets=scorer needs --metric=NAME, which --scorer=NAME=COMMAND defines")
    scorer = find_metric(metric, "--metric")
    if options.targets == "scorer":
        need_no_references(metric, scorer, "--targets=scorer")
    elif options.targets == "mbr" and scorer.scorer is not None and scorer.scorer.by_direction:
        raise UserError(
            f"--metric={metric} is a run, which compares no two translations; give --targets=scorer"
        )
    if options.candidates is not None:
        return dataclasses.replace(options, metric=metric)
    search, n_best = choose_search(options), options.n_best
    if n_best is None:
        n_best = search.beam_size if search.method != "greedy" else 1
    check_n_best(search, n_best, where="--")
    return dataclasses.replace(options, metric=metric, n_best=n_best)


def _translate_options(options: CorpusOptions, **more: Any) -> TranslateOptions:
    return TranslateOptions(
        **take_values(options, FileTranslationOptions),
        input=options.input,
        output=str(options.output / TRANSLATIONS),
        window=options.window,
        resume=options.resume,
        overwrite=options.overwrite,
        capitals="never",
        **more,
    )


def _is_first() -> bool:
    from flaxformer_mt.parallel.processes import is_first

    return is_first()


def _read(path: str, options: CorpusOptions) -> Iterator[str]:
    with open_lines(path, invalid_utf8=options.invalid_utf8) as text:
        yield from text.lines


def _find_direction(options: BacktranslateOptions | DistilOptions) -> Direction:
    """Return the languages of sources and translations; "" for several languages or an unknown language."""
    names = [getattr(options, f"{side}_language", None) for side in ("source", "target")]
    if getattr(options, "candidates", None) is not None:
        return Direction(*(name or "" for name in names))
    from flaxformer_mt.convert.formats import ImportOverrides, find_config

    run = Path(str(options.run))
    exported = getattr(options, "backend", "jax") == "ctranslate2"
    config = find_config(run, ImportOverrides()) if exported else read_config(run / "config.json")
    common = common_languages(find_directions(config.data))
    return Direction(*(name or side for name, side in zip(names, common, strict=True)))


def _write_pairs(
    options: CorpusOptions, pairs: Iterable[tuple[str, str]], direction: Direction, *, tag: str = ""
) -> dict[str, Any]:
    ids: Iterable[str] | None = itertools.repeat("") if options.documents else None
    if options.document_ids is not None:
        ids = _read(options.document_ids, options)
    columns: dict[str, Any] = {"direction": direction, "tag": tag, "weight": options.weight, "ids": ids}
    with name_full_disk(options.output / TABLE):
        return write_table(options.output, pairs, options, **columns)


def read_n_best(lines: Iterable[str]) -> Iterator[list[str]]:
    """Read the lines of an n-best list; yield the translations of each input line, best first."""
    for _, group in itertools.groupby(lines, key=lambda line: line.partition(" ||| ")[0]):
        yield [line.split(" ||| ")[1].replace("&#124;&#124;&#124;", "|||") for line in group]


def _choose_targets(
    options: DistilOptions, n_best: Iterable[list[str]], direction: Direction
) -> Iterator[str]:
    from flaxformer_mt.commands.choose_candidates import Group, choose

    references: Iterator[str | None] = itertools.repeat(None)
    if options.reference is not None:
        references = _read(options.reference, options)
    rows = zip(_read(str(options.input), options), n_best, references, strict=False)
    while lists := list(itertools.islice(rows, _LISTS)):
        groups = [Group(source, texts, [""] * len(texts), reference) for source, texts, reference in lists]
        for group, (number, _) in zip(groups, choose(groups, options, direction), strict=True):
            yield group.texts[number or 0]
