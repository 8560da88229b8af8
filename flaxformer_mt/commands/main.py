"""The command line: the table of commands, each with its options and the function that runs it.

Contains the exit statuses and the destinations of output: results go to standard output as JSON (translations
as text), everything else goes to standard error. A command's modules are imported when the command runs, so
that `--help` is fast.
"""

import contextlib
import dataclasses
import difflib
import errno
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import flaxformer_mt
from flaxformer_mt.commands.align import align_training_pairs
from flaxformer_mt.commands.conversion_options import ExportOptions, ImportOptions
from flaxformer_mt.commands.corpus_options import BacktranslateOptions, DistilOptions
from flaxformer_mt.commands.evaluate_command import evaluate
from flaxformer_mt.commands.experiment_options import (
    AlignOptions,
    PrepareOptions,
    ProcessOptions,
    ShowOptions,
    TrainOptions,
)
from flaxformer_mt.commands.flags import parse_flags, takes_config
from flaxformer_mt.commands.make_corpus import backtranslate, distil
from flaxformer_mt.commands.options import (
    AverageOptions,
    DoctorOptions,
    EvaluateOptions,
    GenerateOptions,
    PlotOptions,
    ScoreOptions,
    TranslateOptions,
)
from flaxformer_mt.commands.run_report_command import ReportOptions, report
from flaxformer_mt.commands.server.serve import serve
from flaxformer_mt.commands.server.serve_options import ServeOptions
from flaxformer_mt.commands.store_paths import run_locally
from flaxformer_mt.commands.translate_and_score import choose_search, score_file, translate_file
from flaxformer_mt.config.checks import validate
from flaxformer_mt.config.files import read_config
from flaxformer_mt.config.find_config import load_config
from flaxformer_mt.errors import (
    DISK_FULL,
    FlaxformerWarning,
    TrainingInterrupted,
    UserError,
    name_urls,
    warn_user,
)

PROGRAM = "flaxformer-mt"

# Errors that the user's files, disks and limits cause -> what to do, where the error itself does not say it.
_REMEDIES = {
    **dict.fromkeys(DISK_FULL, "; free some space and run the command again"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR), ""),
    errno.EROFS: "; give a folder that can be written to",
    **dict.fromkeys((errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.ENODEV), "; give another path"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "; raise the limit of open files (ulimit -n)"),
    **dict.fromkeys((errno.EIO, errno.ESTALE), "; check the disk and run the command again"),
}


def _train(options: TrainOptions) -> object:
    from flaxformer_mt.training.loop import fit
    from flaxformer_mt.training.report import describe_report

    if options.profile is not None and options.profile < 1:
        raise UserError(
            f"--profile is {options.profile}; it must be at least 1 (the number of updates to record)"
        )
    if options.new_vocab and options.init is None:
        raise UserError("--new_vocab needs the run that training starts from; give --init=RUN")
    report = fit(
        options.config,
        options.run,
        init=options.init,
        new_vocab=options.new_vocab,
        profile=options.profile or 0,
        progress=sys.stderr,
    )
    print(name_urls(describe_report(report, options.run)), file=sys.stderr)
    return report


def _show(options: ShowOptions) -> object:
    from flaxformer_mt.commands.show import show
    from flaxformer_mt.commands.summaries import summarize_experiment

    if options.target is not None:
        from flaxformer_mt.commands.targets.target_report import show_for_target, summarize_target

        result = show_for_target(options.config, options.run, options.target, say=_say)

        def summarize(result: Any) -> str:
            return f"{summarize_experiment(result)}\n\n{summarize_target(result['target'])}"

        return _for_reader(result, summarize, json=options.json)
    return _for_reader(show(options.config, options.run), summarize_experiment, json=options.json)


def _prepare(options: PrepareOptions) -> object:
    from flaxformer_mt.commands.summaries import summarize_preparation
    from flaxformer_mt.data.lexical_table import ShortlistRequest
    from flaxformer_mt.data.overlap import describe_overlap
    from flaxformer_mt.data.prepare import prepare
    from flaxformer_mt.workers.open_crew import choose_hands

    file, candidates, common = options.shortlist, options.shortlist_candidates, options.shortlist_common
    shortlist = None if file is None else ShortlistRequest(file, candidates, common)
    hands = choose_hands(options.workers, options.ray)
    report = prepare(
        options.config, options.run, say=_say, overlap=True, shortlist=shortlist, hands=hands
    ).report
    for warning in describe_overlap(report["overlap"]):
        warn_user(warning)
    return _for_reader(report, summarize_preparation, json=options.json)


def _for_reader(result: dict[str, Any], summarize: Callable[[Any], str], *, json: bool) -> object:
    """The result for a program, or None once a person has been shown its summary on the terminal."""
    if json or not sys.stdout.isatty():
        return result
    print(summarize(result))
    return None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _generate(options: GenerateOptions) -> None:
    from flaxformer_mt.translation.text_generator import generate_text

    texts = generate_text(
        options.run,
        prompt=options.prompt,
        n_best=options.n_best,
        length=options.length,
        search=choose_search(options),
        checkpoint=options.checkpoint,
    )
    lines = "".join(f"{text.text}\n" for text in texts)
    sys.stdout.buffer.write(lines.encode("utf-8"))  # regardless of the terminal's encoding


def _average(options: AverageOptions) -> object:
    from flaxformer_mt.runs.checkpoints import Checkpoints

    read_config(options.run / "config.json")  # raises UserError if options.run is not a run directory
    written = Checkpoints(options.run).average(options.last, allow_nonfinite=options.allow_nonfinite)
    return {"checkpoint": str(written), "averaged": options.last}


def _plot(options: PlotOptions) -> object:
    from flaxformer_mt.commands.plot import plot, plot_encoding

    if options.positions is not None:
        given = [name for name in ("run", "source", "checkpoint") if getattr(options, name)]
        if given:
            raise UserError(
                f"--positions plots an encoding without a run; leave out --{' and --'.join(given)}"
            )
        return plot_encoding(options.positions, options.output)
    if options.run is None:
        raise UserError("--run is missing; give --run=DIR, or --positions=WIDTH to plot without a run")
    return plot(options.run, source=options.source, output=options.output, checkpoint=options.checkpoint)


def _export(options: ExportOptions) -> object:
    from flaxformer_mt.convert.export_run import export_run

    return export_run(
        options.run,
        format_name=options.format,
        output=options.output,
        checkpoint=options.checkpoint,
        quantization=options.quantization,
        tolerance=options.tolerance,
        shortlist=options.shortlist,
    )


def _import(options: ImportOptions) -> object:
    from flaxformer_mt.convert.import_run import import_run

    return import_run(
        options.input,
        format_name=options.format,
        run_dir=options.run,
        config=None if options.config is None else load_config(options.config),
        vocab=options.vocab,
        tolerance=options.tolerance,
    )


def _doctor(options: DoctorOptions) -> object:
    from flaxformer_mt.commands.doctor import doctor

    return doctor(options.run)


@dataclass(frozen=True)
class _Command:
    options: type
    run: Callable[[Any], object]

    @property
    def summary(self) -> str:
        return (self.options.__doc__ or "").split("\n")[0]


COMMANDS = {
    "train": _Command(TrainOptions, _train),
    "show": _Command(ShowOptions, _show),
    "prepare": _Command(PrepareOptions, _prepare),
    "align": _Command(AlignOptions, align_training_pairs),
    "evaluate": _Command(EvaluateOptions, evaluate),
    "translate": _Command(TranslateOptions, translate_file),
    "score": _Command(ScoreOptions, score_file),
    "backtranslate": _Command(BacktranslateOptions, backtranslate),
    "distil": _Command(DistilOptions, distil),
    "generate": _Command(GenerateOptions, _generate),
    "average": _Command(AverageOptions, _average),
    "export": _Command(ExportOptions, _export),
    "import": _Command(ImportOptions, _import),
    "plot": _Command(PlotOptions, _plot),
    "report": _Command(ReportOptions, report),
    "serve": _Command(ServeOptions, serve),
    "doctor": _Command(DoctorOptions, _doctor),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 on success, 2 after a user error, 130 after Ctrl-C.

    The status is 141 if the reader of standard output has closed it, and 128 + the number of the signal if
    training was interrupted after saving a checkpoint. `--help` prints the help and raises SystemExit(0).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with _warnings_as_lines():
            try:
                _print_json(_run(arguments))
            finally:
                sys.stdout.flush()  # a closed pipe raises BrokenPipeError here instead of at exit
    except UserError as error:
        return _fail(str(error))
    except TrainingInterrupted as stop:
        return stop.exit_status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe. Python flushes again at exit, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno not in _REMEDIES or (error.errno == errno.EIO and error.filename is None):
            raise
        return _fail(f"{error.filename or 'a file'}: {error.strerror}{_REMEDIES[error.errno]}")
    return 0


@contextlib.contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Prints every warning of the package as `warning: MESSAGE` on standard error, repeated ones included."""

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, FlaxformerWarning):
            print(f"warning: {message}", file=sys.stderr)
        else:
            previous(message, category, *place, **more)

    with warnings.catch_warnings():
        warnings.simplefilter("always", FlaxformerWarning)
        previous, warnings.showwarning = warnings.showwarning, show
        yield


def _fail(message: str) -> int:
    print("error: " + message.replace("\n", "\n       "), file=sys.stderr)
    return 2


def _print_json(result: object) -> None:
    if result is None:
        return
    text = name_urls(json.dumps(result, indent=2, ensure_ascii=False)) + "\n"
    # UTF-8 regardless of the terminal's encoding; a path that is not UTF-8 gets the escapes of JSON.
    sys.stdout.buffer.write(text.encode("utf-8", errors="backslashreplace"))


def _run(arguments: list[str]) -> object:
    name, *flags = arguments or [""]
    if name in ("-h", "--help", "help"):
        print(_overview())
        return None
    if name == "--version":
        print(f"{PROGRAM} {flaxformer_mt.__version__}")
        return None
    if name not in COMMANDS:
        similar = difflib.get_close_matches(name, COMMANDS, n=1)
        what = f"unknown command {name!r}" if name else "no command given"
        hint = f"; did you mean {similar[0]}?" if similar else ""
        raise UserError(f"{what}{hint} (commands: {', '.join(COMMANDS)})")
    command = COMMANDS[name]
    options = parse_flags(command.options, flags, prog=f"{PROGRAM} {name}")
    if takes_config(command.options):
        validate(options.config)
    if not isinstance(options, ProcessOptions):
        return run_locally(command.run, options)
    process_flags = {field.name: getattr(options, field.name) for field in dataclasses.fields(ProcessOptions)}
    return _run_in_processes(command, options, **process_flags)


def _run_in_processes(command: _Command, options: Any, *, distributed: bool, **flags: Any) -> object:
    """Runs a command in one process, or as one of several; only the first of several returns the result."""
    if not distributed and all(value is None for value in flags.values()):
        return run_locally(command.run, options)
    from flaxformer_mt.parallel.processes import connect, is_first, work_together

    connect(**flags, detect=distributed)
    with work_together():
        result = run_locally(command.run, options)
    return result if is_first() else None


def _overview() -> str:
    rows = [f"  {name:<13} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {PROGRAM} COMMAND [FLAGS]",
            "",
            *rows,
            "",
            f"{PROGRAM} COMMAND --help explains every flag, {PROGRAM} --version names the version.",
        ]
    )
