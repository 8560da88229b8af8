"""The commands that make training data with a trained model: `backtranslate` and `distil`.

Both translate into DIR/translations.txt with the command `translate`, which is resumable, and then write the
pairs that pass the filters at once. A command that is run again with --resume repeats only the second part,
which is quick and a function of the first.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from flaxformer_mt.commands.options import (
    BacktranslateOptions,
    CorpusOptions,
    DistilOptions,
    FileTranslationOptions,
    TranslateOptions,
)
from flaxformer_mt.commands.translate import (
    check_line_flags,
    choose_search,
    translate_file,
)
from flaxformer_mt.config.checks import check_n_best
from flaxformer_mt.config.load_options import take_values
from flaxformer_mt.errors import UserError, name_full_disk, warn_user
from flaxformer_mt.scoring.metrics import find_metric, score_sentences
from flaxformer_mt.text_io.lines import STANDARD, check_writable, count_lines, open_input, open_lines
from flaxformer_mt.text_io.pair_table import TABLE, write_report, write_table

TRANSLATIONS = "translations.txt"
# N-best lists that a scorer from outside compares at a time.
_LISTS = 256


def backtranslate(options: BacktranslateOptions) -> dict[str, Any] | None:
    """Run the command `backtranslate`; return the report, or None in all processes but the first."""
    options = _check(options)
    if options.tag != "".join(options.tag.split()):
        raise UserError(f"--tag is {options.tag!r}; a tag is one symbol without spaces, such as <BT>")
    translate_file(_translate_options(options, backend=options.backend), keep_record=True)
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
    translate_file(_translate_options(options, n_best=n_best), keep_record=True)
    if not _is_first():
        return None
    sources = _read(options.input, options)
    targets = _read(str(options.output / TRANSLATIONS), options)
    if n_best is not None:
        references = _read(str(options.reference), options)
        originals = _read(options.input, options)
        targets = _choose_closest(originals, read_n_best(targets), references, options.metric)
    report = _write_pairs(options, zip(sources, targets, strict=True))
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
        for name, default in {"reference": None, "n_best": None, "metric": "bleu"}.items():
            if (value := getattr(options, name)) != default:
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
    find_metric(options.metric, "--metric")
    search = choose_search(options)
    n_best = (
        (search.beam_size if search.method != "greedy" else 1) if options.n_best is None else options.n_best
    )
    check_n_best(search, n_best, where="--")
    return n_best


def _translate_options(
    options: CorpusOptions, *, n_best: int | None = None, backend: Literal["jax", "ctranslate2"] = "jax"
) -> TranslateOptions:
    """Return the options of `translate` that translate --input into TRANSLATIONS."""
    return TranslateOptions(
        **take_values(options, FileTranslationOptions),
        input=options.input,
        output=str(options.output / TRANSLATIONS),
        n_best=n_best,
        backend=backend,
        window=options.window,
        resume=options.resume,
        overwrite=options.overwrite,
        capitals="never",
    )


def _is_first() -> bool:
    from flaxformer_mt.parallel.processes import is_first

    return is_first()


def _read(path: str, options: CorpusOptions) -> Iterator[str]:
    with open_lines(path, invalid_utf8=options.invalid_utf8) as text:
        yield from text.lines


def _write_pairs(
    options: CorpusOptions, pairs: Iterable[tuple[str, str]], *, tag: str = ""
) -> dict[str, Any]:
    with name_full_disk(options.output / TABLE):
        return write_table(options.output, pairs, options, tag=tag, weight=options.weight)


def read_n_best(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield the texts of each line of an n-best list, best first."""
    for _, group in itertools.groupby(lines, key=lambda line: line.partition(" ||| ")[0]):
        yield [line.split(" ||| ")[1].replace("&#124;&#124;&#124;", "|||") for line in group]


def _choose_closest(
    sources: Iterable[str], n_best: Iterable[list[str]], references: Iterable[str], metric: str
) -> Iterator[str]:
    """Yield of each list the text with the best score against its reference; of equal ones the first."""
    # A scorer from outside is asked for many lines at once; BLEU's tokenizer fits the script of one line.
    size = _LISTS if find_metric(metric, "--metric").scorer is not None else 1
    rows = zip(sources, n_best, references, strict=True)
    while lists := list(itertools.islice(rows, size)):
        candidates = [(source, text, reference) for source, texts, reference in lists for text in texts]
        scores = iter(score_sentences(metric, *map(list, zip(*candidates, strict=True))))
        for _, texts, _ in lists:
            own = [next(scores) for _ in texts]
            yield texts[own.index(max(own))]
