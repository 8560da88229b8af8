"""The command line: the table of commands, with the options of each command and the function that runs it.

Results go to standard output as JSON (translations as text), all other output to standard error. The modules
of a command are imported only when the command runs, so that `--help` is fast.
"""

import contextlib
import errno
import functools
import itertools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json import dumps
from pathlib import Path
from typing import Annotated, Any, TextIO

import flaxformer_mt
from flaxformer_mt.commands import options as command_options
from flaxformer_mt.commands.align import align_training_pairs
from flaxformer_mt.commands.doctor import doctor, summarize_doctor
from flaxformer_mt.commands.evaluate import evaluate, summarize_scores
from flaxformer_mt.commands.export import export, import_model
from flaxformer_mt.commands.flag_parser import parse_flags, run_locally, take_log_level, takes_config
from flaxformer_mt.commands.make_corpus import backtranslate, distil
from flaxformer_mt.commands.options import WITH_COMMAS
from flaxformer_mt.commands.score import score_file
from flaxformer_mt.commands.server.serve import serve
from flaxformer_mt.commands.terminal_tables import (
    summarize_experiment,
    summarize_preparation,
    summarize_values,
)
from flaxformer_mt.commands.train import prepare, train
from flaxformer_mt.commands.translate import choose_search, translate_file
from flaxformer_mt.config.checks import validate
from flaxformer_mt.config.files import read_config
from flaxformer_mt.errors import (
    DISK_FULL,
    FlaxformerWarning,
    TrainingInterrupted,
    UserError,
    name_full_disk,
    name_urls,
    suggest,
)
from flaxformer_mt.tracking.progress_display import WorkProgress
from flaxformer_mt.translation.define_scorer import define_scorers

# Commands that show no progress of their own.
_SILENT = ("average", "doctor", "export", "import", "plot", "report")
PROGRAM = "flaxformer-mt"
# The name of standard output in messages.
_STDOUT = "standard output"
# Errors that the user's files, disks and limits cause -> what to do, where the error itself does not say it.
_REMEDIES = {
    **dict.fromkeys(DISK_FULL, "; free some space and run the command again"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EISDIR), ""),
    errno.ENOTDIR: "; one of its folders is a file: give another path",
    errno.EROFS: "; give a folder that can be written to",
    **dict.fromkeys((errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.ENODEV), "; give another path"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "; raise the limit of open files (ulimit -n)"),
    **dict.fromkeys((errno.EIO, errno.ESTALE), "; check the disk and run the command again"),
}


@dataclass(frozen=True)
class ReportOptions:
    """Writes an HTML page about runs: curves, scores, translations that differ, configs and data."""

    # Run directories, separated by commas or each with its own --run; the first one is compared with the
    # others.
    run: Annotated[tuple[str, ...], WITH_COMMAS]
    # The HTML file.
    output: Path = Path("report.html")
    # Name of the translations to compare, which `evaluate` wrote to RUN/translations/NAME.hypothesis.
    name: str = "test"
    # Sentences whose attention is shown, as numbers counted from 1, such as 1,17; the model of the first run
    # translates them. Empty: none.
    attention: tuple[int, ...] = ()


def report(options: ReportOptions) -> dict[str, Any]:
    from flaxformer_mt.evaluation.run_report.page import report_runs

    # The name of a run may have a comma.
    texts = [[text] if Path(text).is_dir() else text.split(",") for text in options.run]
    runs = [run for run in itertools.chain(*texts) if run.strip()]
    return report_runs(runs, options.output, name=options.name, attention=options.attention)


def _show(options: command_options.ShowOptions) -> object:
    from flaxformer_mt.commands.show import show

    if options.target is None:
        return show(options.config, options.run)
    from flaxformer_mt.commands.show_target import show_for_target
    from flaxformer_mt.commands.target_devices import parse_target

    target = parse_target(options.target)
    print(f"compiling a training step for {target.name}; this can take minutes", file=sys.stderr, flush=True)
    return show_for_target(options.config, options.run, target)


def _summarize_experiment(result: dict[str, Any]) -> str:
    if "target" not in result:
        return summarize_experiment(result)
    from flaxformer_mt.commands.show_target import summarize_target

    return f"{summarize_experiment(result)}\n\n{summarize_target(result['target'])}"


def _generate(options: command_options.GenerateOptions) -> None:
    from flaxformer_mt.translation.scorer import generate_text

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


def _average(options: command_options.AverageOptions) -> object:
    from flaxformer_mt.runs.checkpoints import Checkpoints

    read_config(options.run / "config.json")  # raises UserError if options.run is not a run directory
    written = Checkpoints(options.run).average(options.last, allow_nonfinite=options.allow_nonfinite)
    return {"checkpoint": str(written), "averaged": options.last}


def _plot(options: command_options.PlotOptions) -> object:
    from flaxformer_mt.commands.plot import plot

    return plot(options)


@dataclass(frozen=True)
class _Command:
    options: type
    run: Callable[[Any], object]
    # The options that may be given as words without a flag.
    words: tuple[str, ...] = ()
    # Flags -> what the command does with them.
    examples: Mapping[str, str] = field(default_factory=dict)
    # The result as a person reads it on a terminal.
    summarize: Callable[[dict[str, Any]], str] = summarize_values

    @property
    def summary(self) -> str:
        return (self.options.__doc__ or "").split("\n")[0]


def _new(options: command_options.NewOptions) -> object:
    from flaxformer_mt.commands.new_config import write_new_config

    return write_new_config(options)


COMMANDS = {
    "new": _Command(
        command_options.NewOptions,
        _new,
        words=("files",),
        examples={
            "corpus.fr corpus.en --run=runs/fr_en": "then: train runs/fr_en.py",
            "corpus.fr corpus.en --run=runs/fr_en --for=browser": "a teacher and its small student",
        },
        summarize=lambda result: summarize_values({n: result[n] for n in ("pairs", "problems") if result[n]}),
    ),
    "train": _Command(
        command_options.TrainOptions,
        train,
        words=("config",),
        examples={
            "--config.train.steps=300": "the toy corpus, into runs/toy_de_en; repeat it to resume",
            "--init=runs/a --run=runs/b --config.data.dataset=parallel_text@my_text": "start from a run",
        },
        summarize=lambda report: "",  # a person has been told the result on standard error
    ),
    "show": _Command(
        command_options.ShowOptions,
        _show,
        words=("config",),
        examples={
            "wmt14_en_de_base": "the size of the model and the cost of a step",
            "wmt14_en_de_base --target=h100:8": "whether training fits on eight H100 GPUs",
        },
        summarize=_summarize_experiment,
    ),
    "prepare": _Command(
        command_options.PrepareOptions,
        prepare,
        words=("config",),
        examples={"parallel_text --config.data.text_dir=my_text": "check and count train.de, train.en, ..."},
        summarize=summarize_preparation,
    ),
    "align": _Command(command_options.AlignOptions, align_training_pairs, words=("config",)),
    "evaluate": _Command(
        command_options.EvaluateOptions,
        evaluate,
        words=("run",),
        examples={
            "runs/a": "the test set of the run's data",
            "runs/a --source=new.de --reference=new.en --against=runs/b": "other text, compared with runs/b",
        },
        summarize=summarize_scores,
    ),
    "translate": _Command(
        command_options.TranslateOptions,
        translate_file,
        words=("run", "input"),
        examples={
            "runs/a in.de --output=out.en": "a file",
            "runs/a --beam_size=8 --n_best=8 --scores < in.de": "the eight best translations of each line",
        },
    ),
    "score": _Command(
        command_options.ScoreOptions,
        score_file,
        words=("run",),
        examples={"runs/a --source=in.de --target=out.en": "how probable each line of out.en is"},
    ),
    "backtranslate": _Command(command_options.BacktranslateOptions, backtranslate, words=("run",)),
    "distil": _Command(command_options.DistilOptions, distil, words=("run",)),
    "generate": _Command(command_options.GenerateOptions, _generate, words=("run",)),
    "average": _Command(
        command_options.AverageOptions,
        _average,
        words=("run",),
        examples={"runs/a --last=5": "then: translate runs/a --checkpoint=average"},
    ),
    "export": _Command(
        command_options.ExportOptions,
        export,
        words=("run",),
        examples={
            "runs/a --format=marian --output=exported": "for transformers",
            "runs/a --format=ctranslate2 --output=exported --quantization=int8": "for CTranslate2",
        },
    ),
    "import": _Command(
        command_options.ImportOptions,
        import_model,
        words=("input",),
        examples={"opus-mt-de-en --format=marian --run=runs/opus": "a model of OPUS-MT"},
    ),
    "plot": _Command(command_options.PlotOptions, _plot, words=("run",)),
    "report": _Command(ReportOptions, report, words=("run",)),
    "serve": _Command(
        command_options.ServeOptions,
        serve,
        words=("run",),
        examples={"runs/a --port=5000": "a page and LibreTranslate's API at http://127.0.0.1:5000"},
    ),
    "doctor": _Command(
        command_options.DoctorOptions,
        lambda options: doctor(options.run),
        words=("run",),
        summarize=summarize_doctor,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 on success, 2 after a user error, 130 after Ctrl-C.

    141: the reader of standard output closed the pipe. 128 + N: signal N interrupted training, which saved a
    checkpoint. `--help` raises SystemExit(0).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments, level = take_log_level(arguments)
        with _speak(level):
            try:
                _run(arguments)
            finally:
                with name_full_disk(_STDOUT):
                    sys.stdout.flush()  # a closed pipe raises BrokenPipeError here instead of at exit
    except UserError as error:
        return _fail(str(error))
    except TrainingInterrupted as stop:
        return stop.exit_status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        _drop_output()
        return 141
    except MemoryError as error:
        return _fail(f"the memory does not suffice: {error or 'no more can be had'}; give smaller sizes")
    except OSError as error:
        if error.errno not in _REMEDIES or (error.errno == errno.EIO and error.filename is None):
            raise
        if error.filename == _STDOUT:
            _drop_output()
        return _fail(f"{error.filename or 'a file'}: {error.strerror}{_REMEDIES[error.errno]}")
    return 0


def _drop_output() -> None:
    """Redirect standard output to /dev/null, so that Python's flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _speak(level: str) -> Iterator[None]:
    """Print the package's warnings as `warning: MESSAGE`; above level info, print only warnings or errors."""
    stream: TextIO | None = None  # what is standard error at that time

    @functools.cache
    def say(text: str) -> None:
        print(text, file=stream or sys.stderr, flush=True)

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, FlaxformerWarning):
            say(f"warning: {message}")
        else:
            previous(message, category, *place, **more)

    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore" if level == "error" else "always", FlaxformerWarning)
        previous, warnings.showwarning = warnings.showwarning, show
        if level != "info":
            stream = sys.stderr
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        else:  # what is being waited for
            logger, handler = logging.getLogger("flaxformer_mt"), logging.Handler()
            handler.emit = lambda record: say(record.getMessage())  # type: ignore[method-assign]
            logger.setLevel(logging.INFO)
            logger.propagate = False
            logger.addHandler(handler)
            stack.callback(logger.removeHandler, handler)
        yield


def _fail(message: str) -> int:
    print("error: " + message.replace("\n", "\n       "), file=sys.stderr)
    return 2


def _print_result(result: object, summarize: Callable[[dict[str, Any]], str], *, json: bool) -> None:
    """Print a result: on a terminal as readable text unless `json` is set, otherwise as JSON."""
    if result is None:
        return
    if sys.stdout.isatty() and not json and isinstance(result, dict):
        text = summarize(result)
    else:
        text = dumps(result, indent=2, ensure_ascii=False)
    # UTF-8 regardless of the terminal's encoding; a path that is not UTF-8 gets the escapes of JSON.
    if text:
        data = (name_urls(text) + "\n").encode("utf-8", errors="backslashreplace")
        with name_full_disk(_STDOUT):
            sys.stdout.buffer.write(data)


def _print(text: str) -> None:
    with name_full_disk(_STDOUT):
        print(text)


def _run(arguments: list[str]) -> None:
    name, *flags = arguments or ["help"]
    if name in ("-h", "--help", "help"):
        _print(_overview())
        return
    if name == "--version":
        _print(f"{PROGRAM} {flaxformer_mt.__version__}")
        return
    if name == "--print-completion":
        from flaxformer_mt.commands.completion import format_completion

        kinds = {name: command.options for name, command in COMMANDS.items()}
        _print(format_completion(flags, kinds))
        return
    if name not in COMMANDS:
        raise UserError(
            f"unknown command {name!r}{suggest(name, COMMANDS)} (commands: {', '.join(COMMANDS)})"
        )
    command = COMMANDS[name]
    options = parse_flags(
        command.options, flags, prog=_program(name), words=command.words, examples=command.examples
    )
    if takes_config(command.options):
        validate(options.config)
    if isinstance(options, command_options.ScorerOptions) and options.scorer:
        define_scorers(options.scorer, timeout=options.scorer_timeout)
    run = _run_in_processes if isinstance(options, command_options.ProcessOptions) else run_locally
    with WorkProgress(sys.stderr if name in _SILENT else None).part(f"{name} is at work"):
        result = run(command.run, options)
    _print_result(result, command.summarize, json=getattr(options, "json", False))


def _program(command: str = "") -> str:
    script = Path(sys.argv[0]).name
    if script == "train.py" and command in ("", "train"):
        return "python train.py"
    return " ".join(
        filter(None, ("python -m flaxformer_mt" if script == "__main__.py" else PROGRAM, command))
    )


def _run_in_processes(run: Callable[[Any], object], options: command_options.ProcessOptions) -> object:
    """Run a command in this process, or as a process of a job, whose first process returns the result."""
    job = {name: getattr(options, name) for name in ("coordinator", "processes", "process")}
    if not options.distributed and all(value is None for value in job.values()):
        return run_locally(run, options)
    from flaxformer_mt.parallel.processes import connect, is_first, work_together

    connect(**job, detect=options.distributed)
    with work_together():
        result = run_locally(run, options)
    return result if is_first() else None


def _overview() -> str:
    rows = [f"  {name:<13} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {_program()} COMMAND [FLAGS]",
            "",
            *rows,
            "",
            f"{_program()} COMMAND --help explains the flags of a command, --help=all every setting as well,",
            "--version names the version, --print-completion bash (zsh, fish) writes completion for a shell.",
        ]
    )
