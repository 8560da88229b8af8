"""The commands that process text line by line: `translate` and `score`.

Contains the checks of their flags, and the loop that reads lines, gives them to a model in blocks and writes
what comes back; `backtranslate` and `distil` use it too. Modules that import JAX are imported when a command
runs, so that `--help` is fast.
"""

import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flaxformer_mt.commands.corpus_options import CorpusOptions
from flaxformer_mt.commands.language_flags import read_languages
from flaxformer_mt.commands.options import GenerateOptions, ScoreOptions, SearchOptions, TranslateOptions
from flaxformer_mt.commands.translate_blocks import Block, BlockTranslator, check_workers, read_blocks
from flaxformer_mt.commands.translation_output import choose_format, describe_output, open_one_output
from flaxformer_mt.config import SearchConfig
from flaxformer_mt.config.checks import candidate_search, check_n_best, check_search
from flaxformer_mt.config.files import read_config
from flaxformer_mt.errors import UserError
from flaxformer_mt.object_store.working_copies import to_url
from flaxformer_mt.text_io.lines import (
    STANDARD,
    check_output,
    count_lines,
    is_device,
    open_lines,
    open_output,
)
from flaxformer_mt.text_io.resumable_output import ResumableOutput
from flaxformer_mt.workers.block_map import MakeWork

# Search method -> the flags that have an effect on this method only.
_METHOD_FLAGS = {
    "beam": (
        "beam_size",
        "coverage_penalty",
        "coverage_layer",
        "stopping",
        "patience",
        "diversity_groups",
        "diversity_strength",
    ),
    "sample": ("temperature", "top_k", "top_p", "min_p", "seed"),
    "mbr": ("mbr_candidates", "mbr_samples", "mbr_utility"),
}

# The number of lines that are read before the first is written; these lines share batches.
WINDOW = 2048


def translate_file(options: TranslateOptions, *, keep_record: bool = False) -> None:
    """Run the command `translate`; `keep_record`: see `open_resumable`."""
    from flaxformer_mt.parallel import use_cpu_cores_as_devices

    uses_workers = check_workers(options)
    use_cpu_cores_as_devices()  # before the number of processes is asked for, which starts JAX
    search = choose_search(options)
    languages = read_languages(options)
    n_best = 1 if options.n_best is None else options.n_best
    check_n_best(search, n_best, where="--")
    _check_flags(options)
    _check_standard_input(options, uses_workers=uses_workers)
    form, notes = choose_format(options)
    loaded = "checkpoint ensemble long_lines split_sentences dtype allow_nonfinite shortlist quantization"
    make = functools.partial(
        BlockTranslator,
        run=Path(to_url(options.run)),  # workers of other machines make copies of their own
        load={"search": search, **{name: getattr(options, name) for name in loaded.split()}},
        call={"n_best": n_best, "unique": options.unique, "notes": notes, **languages},
        warm_up=options.warm_up,
        form=form,
    )
    write_translations(options, make, languages=languages, keep_record=keep_record)


def write_translations(
    options: TranslateOptions, make: MakeWork, *, languages: Mapping[str, str], keep_record: bool
) -> None:
    """Translate --input by blocks of lines, and write the output of each in order.

    Args:
      make: makes the work on a block, as `BlockTranslator`.
      languages: those of the flags, as `read_languages` returns them.
      keep_record: see `open_resumable`.

    Raises:
      UserError: an input is absent or has another number of lines, or the output cannot be written.
    """
    from flaxformer_mt.text_io.throughput import Throughput
    from flaxformer_mt.workers.open_crew import Alone, open_crew

    paths = {"input": options.input, "prefixes": options.prefix, "required": options.required}
    with contextlib.ExitStack() as files:
        texts = {
            name: files.enter_context(open_lines(path, invalid_utf8=options.invalid_utf8))
            for name, path in paths.items()
            if path is not None
        }
        _check_lengths(options)
        crew = files.enter_context(open_crew(make, workers=options.workers, ray=options.ray))
        typed = options.input == STANDARD and sys.stdin.isatty()
        window = options.window or (1 if typed else WINDOW)  # typed lines are translated one by one
        origin = functools.partial(describe_output, options, crew.describe, [*texts], languages)
        output = files.enter_context(open_one_output(options, origin, window, keep=keep_record))
        is_ready = next((text.is_ready for text in texts.values() if text.is_ready), None)
        if isinstance(output, ResumableOutput):
            is_ready = None  # windows of fixed sizes, so that a resumed command writes the same bytes
        constraints: dict[str, Iterator[Any]] = {
            name: output.read(name, text.lines) for name, text in texts.items()
        }
        sources = constraints.pop("input")
        if "required" in constraints:
            constraints["required"] = (line.split("\t") for line in constraints["required"])
        blocks = read_blocks(sources, constraints, window, first_line=output.done + 1, is_ready=is_ready)
        quiet, total = typed or _is_on_screen(options.output), count_lines(options.input)
        progress = files.enter_context(Throughput(total=total, done=output.done, quiet=quiet))
        if isinstance(crew, Alone):
            crew.work.watch(progress.add)  # line by line
        for block in crew.map(blocks, name=Block.name):
            for lines_of_one in block.outputs:
                output.write(lines_of_one)
            if not isinstance(crew, Alone):
                progress.add(lines=len(block.outputs), tokens=block.tokens)


def score_file(options: ScoreOptions) -> None:
    """Run the command `score`."""
    from flaxformer_mt.text_io.throughput import Throughput
    from flaxformer_mt.translation.output_formats import format_score
    from flaxformer_mt.translation.scorer import Scorer

    if options.json and options.tokens:
        raise UserError("--tokens has no effect with --json, which writes all scores; leave out --tokens")
    if options.source == options.target == STANDARD:
        raise UserError("only one of --source and --target can be standard input; give a file for the other")
    if options.output != STANDARD:
        check_output(options.output, inputs=(options.source, options.target))
    search = choose_search(options)
    language_model = not read_config(options.run / "config.json").data.source_language
    if language_model and options.source is not None:
        raise UserError(
            f"{options.run} is a language model (its data.source_language is empty), which scores --target "
            "without a source; leave out --source"
        )
    if not language_model and options.source is None:
        raise UserError(
            "--source is missing; a translation model scores each line of --target given its source line"
        )
    languages = read_languages(options)
    with contextlib.ExitStack() as files:
        source = None
        if options.source is not None:
            source = files.enter_context(open_lines(options.source, invalid_utf8=options.invalid_utf8))
        target = files.enter_context(open_lines(options.target, invalid_utf8=options.invalid_utf8))
        scorer = Scorer.load(
            options.run,
            checkpoint=options.checkpoint,
            search=search,
            long_lines=options.long_lines,
            dtype=options.dtype,
            allow_nonfinite=options.allow_nonfinite,
        )
        write = files.enter_context(open_output(options.output))
        quiet, total = _is_on_screen(options.output), count_lines(options.target)
        progress = files.enter_context(Throughput(total=total, quiet=quiet))
        # Lines are read ahead of their scores; the second of each two iterators keeps them for the output.
        targets, kept_targets = itertools.tee(target.lines)
        sources, kept_sources = itertools.tee(source.lines) if source else (None, itertools.repeat(None))
        is_ready = (source and source.is_ready) or target.is_ready
        scores = scorer.score_stream(sources, targets, window=WINDOW, is_ready=is_ready, **languages)
        # Scores come first: at their end, no line has been taken for one more.
        lines = zip(scores, kept_sources, kept_targets, strict=False)
        for number, (score, source_line, target_line) in enumerate(lines):
            pieces, pair = scorer.vocabs.target.pieces, (source_line, target_line)
            write(format_score(score, number, pair, pieces, tokens=options.tokens, as_json=options.json))
            progress.add(tokens=len(score.tokens))


def _is_on_screen(output: str) -> bool:
    return output == STANDARD and sys.stdout.isatty()


def choose_search(options: SearchOptions | ScoreOptions | GenerateOptions) -> SearchConfig:
    """Return the search options of the run's config, overridden by the flags that are given.

    Raises:
      UserError: the search options are invalid, or a flag has no effect on the search method.
    """
    stored = read_config(options.run / "config.json")
    names = [field.name for field in dataclasses.fields(SearchConfig)]
    flags = {name: getattr(options, name, None) for name in names}
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    search = dataclasses.replace(stored.search, **given)
    check_search(search, model=stored.model, where="--")
    found_by = candidate_search(search)  # whose flags have an effect on mbr as well
    for method, method_flags in _METHOD_FLAGS.items():
        for name in method_flags if method not in (search.method, found_by.method) else ():
            if name in given and (name, given[name]) != ("beam_size", 1):
                raise UserError(
                    f"--{name}={given[name]} has no effect on {search.method} search; give --method={method} "
                    f"or leave out --{name}"
                )
    return search


def _check_flags(options: TranslateOptions) -> None:
    """Raise UserError for flags that exclude each other or have no effect in combination."""
    paths = [path for path in (options.input, options.prefix, options.required) if path == STANDARD]
    if len(paths) > 1:
        raise UserError(
            "only one of --input, --prefix and --required can be standard input; give files for the others"
        )
    for written, contents in (("json", "all scores"), ("n_best", "each hypothesis with its score")):
        for name in ("scores", "token_scores"):
            if getattr(options, written) not in (False, None) and getattr(options, name):
                both = (written, name) == ("n_best", "token_scores")
                more = f", or give --json instead of --{name}" if both else ""
                raise UserError(
                    f"--{name} has no effect with --{written}, which writes {contents}; leave out "
                    f"--{name}{more}"
                )
    if options.unique and options.n_best is None:
        raise UserError("--unique has no effect without --n_best; give --n_best=N, or leave out --unique")
    if options.scores and options.token_scores:
        raise UserError("--token_scores writes the score too; leave out --scores")
    for name in ("alignment_layer", "alignment_head"):
        used = options.alignments is not None or options.json or options.markup
        if getattr(options, name) is not None and not used:
            raise UserError(
                f"--{name} has no effect without --alignments or --json (or --markup); give one of these, or "
                f"leave out --{name}"
            )
    if options.markup and options.alignments == "pieces":
        raise UserError("--markup needs alignments of words, not --alignments=pieces; leave out pieces")
    for name, effect in (("resume", "continues an output file"), ("overwrite", "replaces an output file")):
        if getattr(options, name) and (options.output == STANDARD or is_device(options.output)):
            what = "standard output" if options.output == STANDARD else f"{options.output}, a device or pipe"
            raise UserError(f"--{name} {effect}, but the output is {what}; give --output=FILE")
    check_line_flags(options)
    if options.output != STANDARD:
        check_output(options.output, inputs=(options.input, options.prefix, options.required))


def check_line_flags(options: TranslateOptions | CorpusOptions) -> None:
    """Raise UserError if --resume and --overwrite are both given."""
    if options.resume and options.overwrite:
        raise UserError("--resume and --overwrite exclude each other; leave one out")


def _check_standard_input(options: TranslateOptions, *, uses_workers: bool) -> None:
    from flaxformer_mt.parallel.processes import process_count

    for name in ("input", "prefix", "required"):
        if getattr(options, name) == STANDARD and process_count() > 1:
            raise UserError(f"{process_count()} processes cannot all read standard input; give --{name}=FILE")
    for name in ("input", "output", "prefix", "required"):
        if getattr(options, name) == STANDARD and uses_workers:
            raise UserError(f"--workers and --ray translate files; give --{name}=FILE")


def _check_lengths(options: TranslateOptions) -> None:
    """Raise UserError if --prefix or --required has another number of lines than --input."""
    num_lines = count_lines(options.input)
    for flag in ("prefix", "required"):
        path = getattr(options, flag)
        count = None if path is None else count_lines(path)
        if None not in (num_lines, count) and num_lines != count:
            raise UserError(
                f"--{flag}={path} has {count} lines, but --input={options.input} has {num_lines}; give one "
                "for each line, an empty one for a line without constraint"
            )
