"""The command line: what each command takes, and one call into the room that does its work.

Owns the words that users type, exit statuses and the form of messages; the only door to tyro. Results go to
standard output as JSON (translations as text), everything else to standard error. The rooms are imported when
their command runs, so that `--help` is instant.
"""

import contextlib
import dataclasses
import difflib
import errno
import io
import itertools
import json
import os
import re
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import tyro

from flaxformer_mt.config import Config, SearchConfig
from flaxformer_mt.config_checks import validate
from flaxformer_mt.config_files import flatten, read_config
from flaxformer_mt.errors import UserError
from flaxformer_mt.lines import open_input, open_output, read_lines
from flaxformer_mt.options import (
    AverageOptions,
    DoctorOptions,
    EvaluateOptions,
    ExperimentOptions,
    PrepareOptions,
    SearchOptions,
    ShowOptions,
    TrainOptions,
    TranslateOptions,
    describe_type,
    read_value,
)
from flaxformer_mt.recipes import DEFAULT_CONFIG, choose_config, list_recipes

PROGRAM = "flaxformer-mt"

# Lines that `translate` reads before it writes the first: they share batches.
WINDOW = 2048

_CONFIG_HELP = f"""

--config=FILE chooses the defaults of the --config.* flags: a Python file with get_config() -> Config, or the
name of a recipe ({{recipes}}). Without it: the config of --run=DIR if there is one, else {DEFAULT_CONFIG}."""


def _train(options: TrainOptions) -> object:
    from flaxformer_mt.trainer import fit

    return fit(options.config, options.run)


def _show(options: ShowOptions) -> object:
    from flaxformer_mt.show import show

    return show(options.config, options.run)


def _prepare(options: PrepareOptions) -> object:
    from flaxformer_mt.prepare import prepare

    return prepare(options.config, options.run).report


def _evaluate(options: EvaluateOptions) -> object:
    from flaxformer_mt.evaluate import evaluate_run

    search = _search_config(options)
    if (options.source is None) != (options.reference is None):
        missing = "--reference" if options.reference is None else "--source"
        raise UserError(
            f"{missing} is missing: a file is scored with --source=FILE and --reference=FILE together"
        )
    if options.source is not None and options.split is not None:
        raise UserError(
            f"--split={options.split} and --source={options.source} exclude each other; leave one out"
        )
    return evaluate_run(
        options.run,
        split=options.split or "test",
        source=options.source,
        reference=options.reference,
        checkpoint=options.checkpoint,
        lowercase=options.lowercase,
        search=search,
    )


def _translate(options: TranslateOptions) -> None:
    from flaxformer_mt.translate import Translator

    search = _search_config(options)
    n_best = 1 if options.n_best is None else options.n_best
    width = 1 if search.method == "greedy" else search.beam_size
    if not 1 <= n_best <= width:
        raise UserError(
            f"--n_best is {n_best}, but {search.method} search with beam_size {width} keeps {width}; "
            f"give 1 to {width}, or --method=beam --beam_size={max(n_best, 1)}"
        )
    with open_input(options.input) as stream:
        translator = Translator.load(options.run, checkpoint=options.checkpoint, search=search)
        lines = read_lines(stream, name=options.input, invalid_utf8=options.invalid_utf8)
        window = 1 if stream.isatty() else WINDOW  # whoever types a line waits for its translation
        translations = translator.translate_stream(lines, n_best=n_best, window=window)
        with open_output(options.output) as write:
            for number, translation in enumerate(translations):
                for text in _format(number, translation, options):
                    write(text)


def _format(number: int, translation: Any, options: TranslateOptions) -> list[str]:
    if options.n_best is not None:
        return [f"{number} ||| {one.text} ||| {one.score:.6f}" for one in translation.n_best]
    if options.scores:
        return [f"{translation.score:.6f}\t{translation.text}"]
    return [translation.text]


def _average(options: AverageOptions) -> object:
    from flaxformer_mt.checkpoint import Checkpoints

    read_config(options.run / "config.json")  # says so if this is no run directory
    return {"checkpoint": str(Checkpoints(options.run).average(options.last)), "averaged": options.last}


def _doctor(options: DoctorOptions) -> object:
    from flaxformer_mt.doctor import doctor

    return doctor()


@dataclass(frozen=True)
class _Command:
    options: type
    run: Callable[[Any], object]

    @property
    def takes_config(self) -> bool:
        return issubclass(self.options, ExperimentOptions)

    @property
    def summary(self) -> str:
        return (self.options.__doc__ or "").split("\n")[0]


COMMANDS = {
    "train": _Command(TrainOptions, _train),
    "show": _Command(ShowOptions, _show),
    "prepare": _Command(PrepareOptions, _prepare),
    "evaluate": _Command(EvaluateOptions, _evaluate),
    "translate": _Command(TranslateOptions, _translate),
    "average": _Command(AverageOptions, _average),
    "doctor": _Command(DoctorOptions, _doctor),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, 2 after a user's mistake, 130 after Ctrl-C.

    `--help` prints and raises SystemExit(0).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            _print_json(_run(arguments))
        finally:
            sys.stdout.flush()  # here, so that a reader who has left is noticed here
    except UserError as error:
        return _fail(str(error))
    except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
        return _fail(f"{error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has left, as `head` does. Python would complain again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return _fail(
            f"{error.filename or 'output'}: {error.strerror}; free some space and run the command again"
        )
    return 0


def _fail(message: str) -> int:
    print("error: " + message.replace("\n", "\n       "), file=sys.stderr)
    return 2


def _print_json(result: object) -> None:
    if result is None:
        return
    text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    sys.stdout.buffer.write(text.encode("utf-8"))  # whatever the terminal's encoding


def _run(arguments: list[str]) -> object:
    name, *flags = arguments or [""]
    if name in ("-h", "--help", "help"):
        print(_overview())
        return None
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        what = f"unknown command {name!r}" if name else "no command given"
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{what}{hint} (commands: {', '.join(COMMANDS)})")
    options = _parse(name, flags)
    if COMMANDS[name].takes_config:
        validate(options.config)
    return COMMANDS[name].run(options)


def _overview() -> str:
    rows = [f"  {name:<10} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [f"usage: {PROGRAM} COMMAND [FLAGS]", "", *rows, "", f"{PROGRAM} COMMAND --help explains every flag."]
    )


def _parse(name: str, flags: list[str]) -> Any:
    """Types the flags of a command against its options, and those of a config against its config file."""
    command = COMMANDS[name]
    default: Any = tyro.MISSING_NONPROP
    description = command.options.__doc__ or ""
    if command.takes_config:
        flags, config_name = _take_flag(flags, "--config")
        _, run = _take_flag(flags, "--run")
        config, run_dir = choose_config(config_name, run)
        default = command.options(run=run_dir, config=config)
        description += _CONFIG_HELP.format(recipes=", ".join(list_recipes()))
    switches = {f"--{f.name}" for f in dataclasses.fields(command.options) if f.type in (bool, bool | None)}
    flags = [f"{flag}=True" if flag in switches else flag for flag in flags]
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            options, unknown = tyro.cli(
                command.options,
                prog=f"{PROGRAM} {name}",
                description=description,
                args=flags,
                default=default,
                return_unknown_args=True,
                use_underscores=True,
                config=(tyro.conf.FlagConversionOff,),
                registry=_registry(),
            )
    except SystemExit as stop:
        if stop.code in (0, None):  # --help has been printed
            raise
        raise UserError(_plain(captured.getvalue())) from None
    if unknown:
        _refuse_unknown(unknown[0], _flag_names(command))
    # Shells leave the ~ of --run=~/x to the program.
    values = ((f.name, getattr(options, f.name)) for f in dataclasses.fields(options))
    return dataclasses.replace(options, **{k: v.expanduser() for k, v in values if isinstance(v, Path)})


def _take_flag(flags: list[str], flag: str) -> tuple[list[str], str | None]:
    """Splits off a flag in either of its forms: ["--a", "1", "--b=2"] without --a is ["--b=2"], "1"."""
    rest, value, waiting = [], None, False
    for token in flags:
        if waiting:
            value, waiting = token, False
        elif token == flag:
            waiting = True
        elif token.startswith(flag + "="):
            value = token[len(flag) + 1 :]
        else:
            rest.append(token)
    if waiting or value == "":
        raise UserError(f"{flag} has no value; give {flag}=VALUE")
    return rest, value


def _flag_names(command: _Command) -> list[str]:
    names = [f.name for f in dataclasses.fields(command.options)]
    return [f"--{name}" for name in names] + (
        [f"--config.{name}" for name in flatten(Config())] if command.takes_config else []
    )


def _refuse_unknown(token: str, known: Sequence[str]) -> NoReturn:
    if not token.startswith("--"):
        raise UserError(f"unexpected argument {token!r}; values are given to flags, as --flag=value")
    flag = token.partition("=")[0]
    field = flag.removeprefix("--").rpartition(".")[2].replace("-", "_")
    same_field = [name for name in known if name.removeprefix("--").rpartition(".")[2] == field]
    near = same_field or difflib.get_close_matches(flag, known, n=1)
    hint = f"did you mean {' or '.join(near)}?" if near else "--help lists all flags"
    raise UserError(f"unknown flag {flag}; {hint}")


def _plain(box: str) -> str:
    """The message of one of tyro's framed error texts, in one line, without its frame and its footer."""
    title, *rows = [line.strip("│╭╮╰╯ ") for line in box.strip().split("\n")]
    body = " ".join(itertools.takewhile(lambda row: not row.startswith("──"), rows)).strip()
    bad_value = re.match(r"Error parsing (\S+): (.*)", body)
    if bad_value:
        return f"{bad_value[1]} {bad_value[2]}"
    if title.startswith("─ Required options"):
        missing = [flag for flag in re.findall(r"--[a-z_0-9]+", box) if flag != "--help"]
        return f"{' and '.join(missing)} must be given; see --help"
    no_value = re.match(r"Missing value for argument '(\S+)'", body)
    return f"{no_value[1]} has no value; give {no_value[1]}=VALUE" if no_value else body or box


def _search_config(options: SearchOptions) -> SearchConfig:
    """The run's own search with what the flags say instead."""
    stored = read_config(options.run / "config.json").search
    names = ("method", "beam_size", "length_penalty", "batch_tokens")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    search = dataclasses.replace(stored, **given)
    for name in ("beam_size", "batch_tokens"):
        if getattr(search, name) < 1:
            raise UserError(f"--{name} is {getattr(search, name)}; it must be at least 1")
    if search.method == "greedy" and options.beam_size not in (None, 1):
        raise UserError(
            f"--beam_size={options.beam_size} and greedy search exclude each other; give --method=beam"
        )
    return search


def _registry() -> tyro.constructors.ConstructorRegistry:
    """Tells tyro how text becomes a value, so that messages are for people instead of Python's own."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
        kind: Any = info.type
        if kind not in (bool, int, float, str, Path) and typing.get_origin(kind) is None:
            return None  # a section, whose fields are flags
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs="*" if typing.get_origin(kind) is tuple else 1,
            metavar=describe_type(kind),
            instance_from_str=lambda words: read_value(",".join(words), kind),
            is_instance=lambda value: True,
            str_from_instance=lambda value: [
                ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            ],
        )

    return registry
