"""The commands that work through text line by line, `translate` and `score`: from flags and files to rooms.

Owns which flags exclude each other, which files are read and written, and what a resumed run must have in
common with the first. What is heavy is imported when a command runs.
"""

import collections
import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from flaxformer_mt.commands.options import ScoreOptions, SearchOptions, TranslateOptions
from flaxformer_mt.config import SearchConfig
from flaxformer_mt.config.checks import check_n_best, check_search
from flaxformer_mt.config.files import read_config
from flaxformer_mt.errors import UserError
from flaxformer_mt.text_io.lines import STANDARD, count_lines, open_input, open_output, read_lines
from flaxformer_mt.text_io.resumable_output import ResumableOutput, open_resumable

if TYPE_CHECKING:
    from flaxformer_mt.translation.annotation import Notes
    from flaxformer_mt.translation.output_formats import TranslationFormat
    from flaxformer_mt.translation.translator import Translator

# Flags that have an effect on one method of search alone.
_ONLY = {
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
}

# Lines that are read before the first is written: they share batches.
WINDOW = 2048


def translate_file(options: TranslateOptions) -> None:
    """What the command `translate` does."""
    from flaxformer_mt.parallel import use_cores_apart
    from flaxformer_mt.text_io.throughput import Throughput
    from flaxformer_mt.translation.translator import Translator

    use_cores_apart()
    search = choose_search(options)
    n_best = 1 if options.n_best is None else options.n_best
    check_n_best(search, n_best, where="--")
    _check_flags(options)
    _check_standard_input(options)
    with contextlib.ExitStack() as files:
        stream = files.enter_context(open_input(options.input))
        inputs = _open_demands(options, files)
        translator = Translator.load(
            options.run,
            checkpoint=options.checkpoint,
            search=search,
            ensemble=options.ensemble,
            long_lines=options.long_lines,
            spread=True,
        )
        window = 1 if stream.isatty() else WINDOW  # whoever types a line waits for its translation
        output = files.enter_context(_open_one_output(options, translator, window, inputs=sorted(inputs)))
        lines = read_lines(stream, name=options.input, invalid_utf8=options.invalid_utf8)
        sources = _Remembered(output.read("input", lines))
        demands: dict[str, Any] = {name: output.read(name, lines) for name, lines in inputs.items()}
        if "required" in demands:
            demands["required"] = (line.split("\t") for line in demands["required"])
        form, notes = choose_format(options)
        translations = translator.translate_stream(
            sources, n_best=n_best, notes=notes, window=window, first_line=output.done + 1, **demands
        )
        quiet = stream.isatty() or _is_on_screen(options.output)
        total = count_lines(options.input)
        progress = files.enter_context(Throughput(total=total, done=output.done, quiet=quiet))
        for number, translation in enumerate(translations, start=output.done):
            output.write(form.lines(number, sources.take(), translation, translator.pieces))
            progress.add(tokens=len(translation.tokens))


def score_file(options: ScoreOptions) -> None:
    """What the command `score` does."""
    from flaxformer_mt.text_io.throughput import Throughput
    from flaxformer_mt.translation.output_formats import format_score
    from flaxformer_mt.translation.scorer import Scorer

    if options.json and options.tokens:
        raise UserError("--tokens has no effect beside --json, which writes all there is; leave it out")
    if options.source == options.target == STANDARD:
        raise UserError("only one of --source and --target can be standard input; give a file for the other")
    search = choose_search(options)
    language_model = not read_config(options.run / "config.json").data.source_language
    if language_model and options.source is not None:
        raise UserError(
            f"{options.run} is a language model (its data.source_language is empty), which scores text "
            "alone; leave out --source"
        )
    if not language_model and options.source is None:
        raise UserError("--source is missing: a translation is scored with what it is a translation of")
    with contextlib.ExitStack() as files:
        sources = None if options.source is None else _open_text(options.source, options, files)
        targets = _open_text(options.target, options, files)
        scorer = Scorer.load(
            options.run,
            checkpoint=options.checkpoint,
            search=search,
            long_lines=options.long_lines,
        )
        write = files.enter_context(open_output(options.output))
        quiet, total = _is_on_screen(options.output), count_lines(options.target)
        progress = files.enter_context(Throughput(total=total, quiet=quiet))
        for number, score in enumerate(scorer.score_stream(sources, targets, window=WINDOW)):
            pair = (None if sources is None else sources.take(), targets.take())
            pieces = scorer.vocabs.target.pieces
            write(format_score(score, number, pair, pieces, tokens=options.tokens, as_json=options.json))
            progress.add(tokens=len(score.tokens))


def _open_text(path: str, options: ScoreOptions, files: contextlib.ExitStack) -> "_Remembered":
    stream = files.enter_context(open_input(path))
    return _Remembered(read_lines(stream, name=path, invalid_utf8=options.invalid_utf8))


def _is_on_screen(output: str) -> bool:
    return output == STANDARD and sys.stdout.isatty()


def choose_search(options: SearchOptions | ScoreOptions) -> SearchConfig:
    """The run's own search with what the flags say instead.

    Raises:
      UserError: options that cannot be, or a flag that has no effect on the method.
    """
    stored = read_config(options.run / "config.json")
    names = [field.name for field in dataclasses.fields(SearchConfig)]
    flags = {name: getattr(options, name, None) for name in names}
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    search = dataclasses.replace(stored.search, **given)
    check_search(search, model=stored.model, where="--")
    for method, own in _ONLY.items():
        for name in own:
            if method != search.method and name in given and (name, given[name]) != ("beam_size", 1):
                raise UserError(
                    f"--{name}={given[name]} has no effect on {search.method} search; give --method={method} "
                    "or leave it out"
                )
    return search


def choose_format(options: TranslateOptions) -> "tuple[TranslationFormat, Notes]":
    """What is written of each translation, and what has to be found out for it."""
    from flaxformer_mt.translation.annotation import Notes
    from flaxformer_mt.translation.output_formats import TranslationFormat

    form = TranslationFormat(
        n_best=options.n_best is not None,
        scores=options.scores,
        token_scores=options.token_scores,
        alignments=options.alignments is not None,
        json=options.json,
    )
    notes = Notes(
        token_log_probs=options.token_scores or options.json,
        alignments=options.alignments or ("words" if options.json else None),
        layer=options.alignment_layer,
        head=options.alignment_head,
    )
    return form, notes


def _check_flags(options: TranslateOptions) -> None:
    """Refuses flags that exclude each other, or have no effect beside others."""
    paths = [path for path in (options.input, options.prefix, options.required) if path == STANDARD]
    if len(paths) > 1:
        raise UserError(
            "only one of --input, --prefix and --required can be standard input; give files for the others"
        )
    for written, names in (("json", ("scores", "token_scores")), ("n_best", ("scores", "token_scores"))):
        for name in names:
            if getattr(options, written) not in (False, None) and getattr(options, name):
                everything = "everything" if written == "json" else "each hypothesis with its score"
                more = "" if written == "json" or name == "scores" else ", or give --json as well"
                raise UserError(
                    f"--{name} has no effect beside --{written}, which writes {everything}; leave it "
                    f"out{more}"
                )
    if options.scores and options.token_scores:
        raise UserError("--token_scores writes the score too; leave out --scores")
    for name in ("alignment_layer", "alignment_head"):
        if getattr(options, name) is not None and options.alignments is None and not options.json:
            raise UserError(
                f"--{name} has no effect without --alignments or --json; give one, or leave it out"
            )
    if options.resume and options.output == STANDARD:
        raise UserError("--resume goes on with a file, but the output is standard output; give --output=FILE")


def _check_standard_input(options: TranslateOptions) -> None:
    from flaxformer_mt.parallel.processes import process_count

    for name in ("input", "prefix", "required"):
        if getattr(options, name) == STANDARD and process_count() > 1:
            raise UserError(f"{process_count()} processes cannot all read standard input; give --{name}=FILE")


def _open_demands(options: TranslateOptions, files: contextlib.ExitStack) -> dict[str, Iterator[str]]:
    """The lines of the files that ask something of the input's lines."""
    demands = {}
    for name, path in (("prefixes", options.prefix), ("required", options.required)):
        if path is not None:
            stream = files.enter_context(open_input(path))
            demands[name] = read_lines(stream, name=path, invalid_utf8=options.invalid_utf8)
    return demands


class _Remembered:
    """Lines that are read ahead, and given again one by one to whoever writes their results."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = iter(lines)
        self._waiting: collections.deque[str] = collections.deque()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self._waiting.append(line)
        return line

    def take(self) -> str:
        """The next line in order."""
        return self._waiting.popleft()


class _PlainOutput:
    """Any output with the methods of a `ResumableOutput`, from the beginning or after `done` lines."""

    def __init__(self, write: Callable[[str], object], done: int = 0) -> None:
        self._write, self.done = write, done

    def read(self, name: str, lines: Iterable[str]) -> Iterator[str]:
        return itertools.islice(lines, self.done, None)

    def write(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._write(line)


@contextlib.contextmanager
def _open_one_output(
    options: TranslateOptions, translator: "Translator", window: int, *, inputs: list[str]
) -> "Iterator[ResumableOutput | _PlainOutput]":
    """The output, which of several processes the first writes; all begin after the same line."""
    from flaxformer_mt.parallel.processes import exchange, is_first

    if not is_first():
        yield _PlainOutput(lambda line: None, done=int(exchange(b"")[0]))
        return
    with _open_output(options, translator, window, inputs=inputs) as output:
        exchange(str(output.done).encode())
        yield output


@contextlib.contextmanager
def _open_output(
    options: TranslateOptions, translator: "Translator", window: int, *, inputs: list[str]
) -> Iterator[ResumableOutput | _PlainOutput]:
    if options.output == STANDARD:
        with open_output(STANDARD) as write:
            yield _PlainOutput(write)
        return
    from flaxformer_mt.parallel import local_device_count
    from flaxformer_mt.parallel.processes import process_count

    form, notes = choose_format(options)
    origin = {
        "run": str(options.run.resolve()),
        **translator.describe(),
        "format": dataclasses.asdict(form),
        "notes": notes._asdict(),
        "n_best": options.n_best,
        "long_lines": options.long_lines,
        "invalid_utf8": options.invalid_utf8,
        "inputs": ["input", *inputs],
        "devices": [process_count(), local_device_count()],  # which share batches, and so round differently
    }
    with open_resumable(options.output, origin=origin, step=window, resume=options.resume) as output:
        try:
            yield output
        except BaseException:
            if output.done:
                kept = f"{output.partial} holds the output of the first {output.done:,} lines"
                print(f"{kept}; the same command with --resume goes on", file=sys.stderr)
            raise
