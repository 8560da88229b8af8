"""The command line: the table of commands, each with its options and the function that runs it.

Results go to standard output as JSON (translations as text), everything else to standard error. A command's
modules are imported when the command runs, so that `--help` is fast.
"""

import contextlib
import dataclasses
import errno
import functools
import itertools
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json import dumps
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, TextIO

import flaxformer_mt
from flaxformer_mt.commands import options as command_options
from flaxformer_mt.commands.doctor import doctor, summarize_doctor
from flaxformer_mt.commands.flags import parse_flags, run_locally, take_log_level, takes_config
from flaxformer_mt.commands.make_corpus import backtranslate, distil
from flaxformer_mt.commands.options import WITH_COMMAS, read_glossary, read_languages
from flaxformer_mt.commands.server.serve import serve
from flaxformer_mt.commands.terminal_tables import (
    summarize_experiment,
    summarize_preparation,
    summarize_values,
)
from flaxformer_mt.commands.translate import choose_loading, choose_search, score_file, translate_file
from flaxformer_mt.config.checks import validate
from flaxformer_mt.config.directions import refuse_language_model
from flaxformer_mt.config.files import load_config, read_config
from flaxformer_mt.cpu import core_count
from flaxformer_mt.errors import (
    DISK_FULL,
    FlaxformerWarning,
    TrainingInterrupted,
    UserError,
    find_url,
    name_full_disk,
    name_urls,
    suggest,
    warn_user,
)
from flaxformer_mt.evaluation.tables import write_text
from flaxformer_mt.text_io.lines import check_output, open_output
from flaxformer_mt.tracking.progress_display import WorkProgress

# The options that have an effect on a language model, or are refused where it is evaluated.
_FOR_TEXT = {
    *("run", "checkpoint", "split", "source", "reference", "dtype", "allow_nonfinite"),
    *(field.name for field in dataclasses.fields(command_options.ProcessOptions)),
}


# Commands that show no progress of their own.
_SILENT = ("average", "doctor", "export", "import", "plot", "report")
# Pairs that are read at a time.
_CHUNK = 4096
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


def evaluate(options: command_options.EvaluateOptions) -> object:
    from flaxformer_mt.evaluation.evaluate import describe_evaluation, evaluate_run
    from flaxformer_mt.scoring.metrics import define_scorers

    data = read_config(options.run / "config.json").data
    language_model = not data.source_language
    for_translations = [
        f"--{field.name}"
        for field in dataclasses.fields(options)
        if field.name not in _FOR_TEXT and getattr(options, field.name) != field.default
    ]
    if for_translations:
        leave_out = f"leave out {' and '.join(for_translations)}"
        reason = f", which is evaluated by loss and perplexity only; {leave_out}"
        refuse_language_model(data, options.run, reason)
    search = None if language_model else choose_search(options)
    file = options.reference if options.source is None else options.source
    if file is not None and options.split is not None:
        flag = "--reference" if options.source is None else "--source"
        raise UserError(f"--split={options.split} and {flag}={file} exclude each other; leave one out")
    result = evaluate_run(
        options.run,
        choose_loading(options, search),
        split=options.split or "test",
        source=options.source,
        reference=options.reference,
        lowercase=options.lowercase,
        tokenize=options.bleu_tokenize,
        glossary=read_glossary(options),
        scorers=define_scorers(options.scorer, timeout=options.scorer_timeout),
        tune_rerank=options.tune_rerank,
        progress=sys.stderr,
        **({} if language_model else _comparison(options) | read_languages(options)),
    )
    if tables := describe_evaluation(result, name=name_urls(str(options.run))):
        print(write_text(tables, indent=""), file=sys.stderr)
    return result


def _comparison(options: command_options.EvaluateOptions) -> dict[str, Any]:
    """Return the arguments of `evaluate_run` for confidence intervals and significance tests."""
    from flaxformer_mt.evaluation.comparison import make_resampling_options, parse_compared_system

    resampling = make_resampling_options(
        options.bootstrap, options.paired, options.trials, compared=options.against
    )
    systems = [parse_compared_system(name) for name in options.against]
    # Search flags apply to every compared run; options without a flag are those of that run's config.
    against = [
        dataclasses.replace(system, search=choose_search(dataclasses.replace(options, run=system.run)))
        if system.run
        else system
        for system in systems
    ]
    return {"against": against, "resampling": resampling}


@dataclass(frozen=True)
class ReportOptions:
    """Writes a page about runs: curves, scores, differing sentences, configs and data, in one HTML file."""

    # Run directories, separated by commas or each with its own --run; the first one is compared with the
    # others.
    run: Annotated[tuple[str, ...], WITH_COMMAS]
    # The HTML file.
    output: Path = Path("report.html")
    # Name of the translations to compare: RUN/translations/NAME.hypothesis, which `evaluate` writes.
    name: str = "test"
    # Numbers of the sentences, from 1, whose attention is shown, such as 1,17; the model of the first run is
    # loaded and translates these sentences. Empty: none.
    attention: tuple[int, ...] = ()


def report(options: ReportOptions) -> dict[str, Any]:
    from flaxformer_mt.evaluation.run_report.page import report_runs

    # The name of a run may have a comma.
    texts = [[text] if Path(text).is_dir() else text.split(",") for text in options.run]
    runs = [run for run in itertools.chain(*texts) if run.strip()]
    return report_runs(runs, options.output, name=options.name, attention=options.attention)


def align_training_pairs(options: command_options.AlignOptions) -> dict[str, Any]:
    from flaxformer_mt.corpus.reader import find_files, open_train_set
    from flaxformer_mt.corpus.word_alignment import align_corpus, format_points
    from flaxformer_mt.unicode_text import split_words

    data = options.config.data
    if options.output is None and (url := find_url(data.text_dir)):
        raise UserError(f"data.text_dir is {url}, which is not written to; give --output=FILE or a URL")
    split = open_train_set(data)
    output: str | Path | None = options.output or find_files(data, data.alignments)[0]
    if not output:
        raise UserError("there is no file to write to; give --output=FILE, or set data.alignments")
    if not split.has_source:
        raise UserError("data.source_language is empty: there are no pairs to align; set it")
    check_output(str(output))

    def read_words() -> Any:
        for start in range(0, len(split), _CHUNK):
            for pair in split.read(range(start, min(start + _CHUNK, len(split)))):
                yield tuple(split_words(text.decode("utf-8", errors="replace")) for text in pair)

    alignments = align_corpus(read_words(), say=lambda text: print(text, file=sys.stderr, flush=True))
    with open_output(str(output)) as write:
        for points in alignments:
            write(format_points(points.tolist()))
    words = sum(len(target) for _, target in read_words())
    aligned = sum(len(set(points[:, 1].tolist())) for points in alignments)
    share = round(aligned / words, 4) if words else 0.0
    return {"output": str(output), "pairs": len(split), "aligned_target_words": share}


def _train(options: command_options.TrainOptions) -> object:
    from flaxformer_mt.training.loop import fit
    from flaxformer_mt.training.report import describe_report

    if options.new_vocab and options.init is None:
        raise UserError("--new_vocab needs the run that training starts from; give --init=RUN")
    report = fit(
        options.config,
        options.run,
        init=options.init,
        new_vocab=options.new_vocab,
        profile=options.profile or 0,
        allow_changed_data=options.allow_changed_data,
        progress=sys.stderr,
        workers=core_count(),
    )
    print(name_urls(describe_report(report, options.run)), file=sys.stderr)
    return report


def _show(options: command_options.ShowOptions) -> object:
    from flaxformer_mt.commands.show import show

    if options.target is None:
        return show(options.config, options.run)
    from flaxformer_mt.commands.show_target import show_for_target
    from flaxformer_mt.commands.target_devices import parse_target

    target = parse_target(options.target)
    print(f"compiling an update for {target.name}; this can take minutes", file=sys.stderr, flush=True)
    return show_for_target(options.config, options.run, target)


def _summarize_experiment(result: dict[str, Any]) -> str:
    if "target" not in result:
        return summarize_experiment(result)
    from flaxformer_mt.commands.show_target import summarize_target

    return f"{summarize_experiment(result)}\n\n{summarize_target(result['target'])}"


def _prepare(options: command_options.PrepareOptions) -> object:
    from flaxformer_mt.data.corpus_diagnostics import describe_lost_text, describe_overlap
    from flaxformer_mt.data.learned_shortlist import ShortlistRequest
    from flaxformer_mt.data.prepare import prepare
    from flaxformer_mt.text_io.lines import check_output
    from flaxformer_mt.workers.worker_pool import choose_pool

    shortlist = None
    if options.shortlist is not None:
        check_output(str(options.shortlist))
        shortlist = ShortlistRequest(
            options.shortlist, options.shortlist_candidates, options.shortlist_common
        )
    report = prepare(
        options.config,
        options.run,
        progress=WorkProgress(sys.stderr),
        overlap=True,
        shortlist=shortlist,
        pool=choose_pool(options.workers, options.ray),
    ).report
    for warning in (*describe_overlap(report["overlap"]), *describe_lost_text(report.get("lost_text"))):
        warn_user(warning)
    return report


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


def _summarize_scores(result: dict[str, Any]) -> str:
    if "by_length" in result or "directions" in result:
        return ""  # the tables on standard error have said it
    return summarize_values(result)


def _average(options: command_options.AverageOptions) -> object:
    from flaxformer_mt.runs.checkpoints import Checkpoints

    read_config(options.run / "config.json")  # raises UserError if options.run is not a run directory
    written = Checkpoints(options.run).average(options.last, allow_nonfinite=options.allow_nonfinite)
    return {"checkpoint": str(written), "averaged": options.last}


def _plot(options: command_options.PlotOptions) -> object:
    from flaxformer_mt.commands.plot import plot

    return plot(options.run, source=options.source, output=options.output, checkpoint=options.checkpoint)


def _export(options: command_options.ExportOptions) -> object:
    from flaxformer_mt.convert.export_run import export_run

    others = {name: value for name, value in vars(options).items() if name not in ("run", "format")}
    return export_run(options.run, format_name=options.format, **others)


def _import(options: command_options.ImportOptions) -> object:
    from flaxformer_mt.convert.import_run import import_run

    return import_run(
        options.input,
        format_name=options.format,
        run_dir=options.run,
        config=None if options.config is None else load_config(options.config),
        vocab=options.vocab,
        tolerance=options.tolerance,
        languages=options.languages,
        vocab_text=options.vocab_text or (),
    )


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
        examples={"corpus.fr corpus.en --run=runs/fr_en": "then: train runs/fr_en.py"},
        summarize=lambda result: summarize_values({n: result[n] for n in ("pairs", "problems") if result[n]}),
    ),
    "train": _Command(
        command_options.TrainOptions,
        _train,
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
            "wmt14_en_de_base": "its size, and what an update costs",
            "wmt14_en_de_base --target=h100:8": "whether it fits into eight H100, without having them",
        },
        summarize=_summarize_experiment,
    ),
    "prepare": _Command(
        command_options.PrepareOptions,
        _prepare,
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
            "runs/a --source=new.de --reference=new.en --against=runs/b": "other text; is runs/b better?",
        },
        summarize=_summarize_scores,
    ),
    "translate": _Command(
        command_options.TranslateOptions,
        translate_file,
        words=("run", "input"),
        examples={
            "runs/a in.de --output=out.en": "a file",
            "runs/a --beam_size=8 --n_best=8 --scores < in.de": "the eight best of each line",
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
        _export,
        words=("run",),
        examples={
            "runs/a --format=marian --output=exported": "for transformers",
            "runs/a --format=ctranslate2 --output=exported --quantization=int8": "for CTranslate2",
        },
    ),
    "import": _Command(
        command_options.ImportOptions,
        _import,
        words=("input",),
        examples={"opus-mt-de-en --format=marian --run=runs/opus": "a model of OPUS-MT"},
    ),
    "plot": _Command(command_options.PlotOptions, _plot, words=("run",)),
    "report": _Command(ReportOptions, report, words=("run",)),
    "serve": _Command(
        command_options.ServeOptions,
        serve,
        words=("run",),
        examples={"runs/a --port=5000": "a page and LibreTranslate's interface at http://127.0.0.1:5000"},
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

    The status is 141 if the reader of standard output has closed it, and 128 + the number of the signal if
    training was interrupted after saving a checkpoint. `--help` prints the help and raises SystemExit(0).
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
    """Let what is left of standard output go nowhere: Python flushes again at exit, which must not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _speak(level: str) -> Iterator[None]:
    """Print each warning of the package as `warning: MESSAGE`; above level info, nothing else but errors."""
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
    """Print a result as JSON; on a terminal, unless `json`, as a person reads it."""
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
    if isinstance(options, command_options.ScorerOptions):
        _define_scorers(options)
    run = _run_in_processes if isinstance(options, command_options.ProcessOptions) else run_locally
    with WorkProgress(sys.stderr if name in _SILENT else None).part(f"{name} is at work"):
        result = run(command.run, options)
    _print_result(result, command.summarize, json=getattr(options, "json", False))


def _define_scorers(options: Any) -> None:
    """Define what --scorer names, and refuse what nothing uses; `evaluate` defines and reports all."""
    from flaxformer_mt.scoring.metrics import define_scorers

    if not options.scorer and options.scorer_timeout != command_options.ScorerOptions.scorer_timeout:
        raise UserError("--scorer_timeout has no effect without --scorer; leave it out")
    if isinstance(options, command_options.EvaluateOptions):
        return
    fields = "--rerank, --mbr, --metric or --clean_scores"
    places = [getattr(options, name, None) for name in re.findall(r"\w+", fields)]
    if config := getattr(options, "config", None):
        fields = "train.best_metric, search.rerank, search.mbr or data.clean.scores"
        places = [attrgetter(name)(config) for name in re.findall(r"\w+(?:[.]\w+)+", fields)]
    used = re.findall(r"[\w+-]+", repr(places))
    for name in define_scorers(options.scorer, timeout=options.scorer_timeout):
        if name not in used:
            raise UserError(
                f"--scorer defines {name}, which nothing uses; name it by {fields}, or leave it out"
            )


def _program(command: str = "") -> str:
    """How this program was started, as help and examples write it."""
    script = Path(sys.argv[0]).name
    if script == "train.py" and command in ("", "train"):
        return "python train.py"
    return " ".join(
        filter(None, ("python -m flaxformer_mt" if script == "__main__.py" else PROGRAM, command))
    )


def _run_in_processes(run: Callable[[Any], object], options: command_options.ProcessOptions) -> object:
    """Run a command in one process, or as one of several; only the first of several returns the result."""
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
