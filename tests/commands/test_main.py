"""The command line: flags reach the functions, lines keep number and order, user errors give one message."""

import dataclasses
import errno
import importlib
import io
import json
import os
import re
import shlex
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engine import FakeBackend, fake_engine

from flaxformer_mt import processor
from flaxformer_mt.commands import doctor, launch, plot
from flaxformer_mt.commands import main as main_module
from flaxformer_mt.commands.flag_parser import list_flag_types
from flaxformer_mt.commands.main import COMMANDS, main
from flaxformer_mt.commands.options import TranslateOptions
from flaxformer_mt.config import Config, ModelConfig, SearchConfig
from flaxformer_mt.config.files import flatten, list_recipes, save_config
from flaxformer_mt.config.foreign_names import FOREIGN_NAMES
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.scoring import metrics
from flaxformer_mt.tracking import progress_display
from flaxformer_mt.training import final_report as training_report
from flaxformer_mt.training import loop as trainer
from flaxformer_mt.translation.result import Translation
from flaxformer_mt.translation.translator import Translator

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "--config=wmt14_en_de_base"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def fitted(monkeypatch):
    """What `train` passes to `fit`; the summary of the report names the run."""
    calls = []
    monkeypatch.setattr(training_report, "describe_report", lambda report, run_dir: f"summary of {run_dir}")

    def fit(config, run_dir, *, profile, progress, **start):
        calls.append((config, run_dir, profile))
        assert progress is sys.stderr
        return {"step": 7}

    monkeypatch.setattr(trainer, "fit", fit)
    return calls


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    save_config(Config(), folder / "config.json")
    return folder


class FakeTranslator:
    """Turns text into capitals."""

    def __init__(self):
        self.backend = FakeBackend(self._shout, description={"checkpoint": "best"})
        self.requests, self.warmed = [], ()

    def warm_up(self, *, n_best):
        self.warmed = (*self.warmed, n_best)

    def engine(self):
        return fake_engine(self.backend)

    def _shout(self, request):
        self.requests.append(request)
        return Translation(request.text.upper(), -0.5, -1.0, (7, 2))


@pytest.fixture
def translator(monkeypatch):
    fake = FakeTranslator()

    def load(run_dir, options, **more):
        fake.loaded = (run_dir, options.checkpoint, options.search)
        fake.ensemble, fake.long_lines = options.ensemble, options.long_lines
        return fake

    monkeypatch.setattr(Translator, "load", load)
    return fake


def feed(monkeypatch, data: bytes):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))


def fail(capfd, *arguments) -> str:
    """Runs a command that must fail as a user's mistake does, and gives its message."""
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("error: ") == 1 and err.endswith("\n")
    assert "Traceback" not in err and "╭" not in err
    return err.removeprefix("error: ").rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trian", f"unknown command 'trian'; did you mean train? (commands: {', '.join(COMMANDS)})"),
        ("--run=x", f"unknown command '--run=x' (commands: {', '.join(COMMANDS)})"),
        (
            "train --config.model.model_dmi=64",
            "unknown flag --config.model.model_dmi; did you mean --config.model.model_dim?",
        ),
        ("train --model_dim=64", "unknown flag --model_dim; did you mean --config.model.model_dim?"),
        (
            "train --config.optim.rate=1",
            "unknown flag --config.optim.rate; did you mean --config.optim.freeze or "
            "--config.optim.learning_rate?",
        ),
        ("train --steps=9", "unknown flag --steps; did you mean --config.train.steps?"),
        ("train --zzzzzzzz", "unknown flag --zzzzzzzz; --help=all lists all flags"),
        (
            "train now",
            "config now is neither a file nor a recipe; known recipes: " + ", ".join(list_recipes()),
        ),
        ("train toy_de_en now", "unexpected argument 'now' after CONFIG; write values as --flag=value"),
        (
            "translate --json gone --beam-size 4 in out",
            "unexpected argument 'out' after RUN and INPUT; write values as --flag=value",
        ),
        ("translate --json gone --beam-size 4 in", "gone is not a run directory: it has no config.json"),
        ("train --lr=1", "unknown flag --lr; here it is --config.optim.learning_rate"),
        (
            "train --arch=transformer",
            "unknown flag --arch; the network is that of the config: --config=NAME, or --config.model.*",
        ),
        ("translate --run=gone --remove-bpe", "unknown flag --remove-bpe; pieces are joined by themselves"),
        (
            "train --epochs=1",
            "unknown flag --epochs; here it is --config.train.steps, which counts steps; `show` says how "
            "many an epoch has",
        ),
        ("train --resume", "unknown flag --resume; train goes on with a run by itself: give its --run again"),
        (
            "train --help=modle",
            "--help=modle: there is no such part of the help (there are: all, data, data.noise, data.clean, "
            "vocab, model, model.alignment, optim, optim.lora, train, parallel, search)",
        ),
        ("--print-completion fsh", "--print-completion needs a shell, but got 'fsh' (bash, zsh, fish)"),
        ("train --src=de", "unknown flag --src; here it is --config.data.source_language"),
        ("translate --run=run --src=x.de", "unknown flag --src; here it is --input"),
        ("translate --run=run --output_dir=x", "unknown flag --output_dir; here it is --output"),
        ("evaluate --run=run --output_dir=x", "unknown flag --output_dir; here it is --run"),
        (
            "show --config.model.layers=6",
            "unknown flag --config.model.layers; here it is --config.model.num_encoder_layers",
        ),
        (
            "train --config.model.model_dim=abc",
            "--config.model.model_dim is 'abc'; it must be a whole number",
        ),
        (
            "train --config.model.dropout_rate=x",
            "--config.model.dropout_rate is 'x'; it must be a finite number",
        ),
        ("train --config.data.weights=1,x", "--config.data.weights is 'x'; it must be a finite number"),
        ("train --config.vocab.joint=maybe", "--config.vocab.joint is 'maybe' (allowed: True, False)"),
        (
            "train --config.model.norm=leyer",
            "--config.model.norm is 'leyer'; did you mean layer? (allowed: layer, rms)",
        ),
        (
            "train --config.model.model_dim --config.seed=3",
            "--config.model.model_dim has no value; give --config.model.model_dim=VALUE",
        ),
        ("train --run=", "--run has no value; give --run=VALUE"),
        (
            "train --config=toy_de_ne",
            "config toy_de_ne is neither a file nor a recipe; did you mean toy_de_en?",
        ),
        ("train --config=here/toy.py", "config file here/toy.py does not exist"),
        (
            "train --config.train=5",
            "--config.train has several values; give one of them, as --config.train.steps=VALUE",
        ),
        ("train --profile=0", "--profile is 0; it must be at least 1"),
        ("average", "--run and --last are required; see --help"),
        ("report --run=,", "--run has no value; give --run=VALUE"),
        ("new --files --run=x", "--files has no value; give --files=VALUE"),
        ("translate --run=gone -- --beam_size=4", "unknown flag --; --help=all lists all flags"),
        ("translate --run=gone --scoers", "unknown flag --scoers; did you mean --scores?"),
        (
            "train --config.optim.learning_rate -1",
            "optim.learning_rate is -1.0; it must be above 0 and at most 1000",
        ),
        (
            "train --config.train.log_every=0 --config.search.beam_size=0",
            "train.log_every is 0; it must be at least 1\n"
            "       search.beam_size is 0; it must be from 1 to 1000",
        ),
        ("doctor --run=gone", "gone is not a run directory: it has no config.json"),
    ],
)
def test_mistakes_are_named_with_the_remedy(capfd, arguments, message):
    assert fail(capfd, *arguments.split()) == message


def test_errors_become_messages_and_bugs_stay_visible(capfd, monkeypatch):
    def raise_error(error):
        def fit(config, run_dir, *, profile, progress=None, **start):
            raise error

        monkeypatch.setattr(trainer, "fit", fit)

    raise_error(UserError("one\ntwo"))
    assert fail(capfd, "train") == "one\n       two"
    for code, remedy in (
        (errno.EACCES, ""),
        (errno.ENOSPC, "; free some space and run the command again"),
        (errno.EROFS, "; give a folder that can be written to"),
        (errno.EIO, "; check the disk and run the command again"),
        (errno.ENAMETOOLONG, "; give another path"),
    ):
        raise_error(OSError(code, os.strerror(code), "runs/x"))
        assert fail(capfd, "train") == f"runs/x: {os.strerror(code)}{remedy}"
    raise_error(KeyboardInterrupt())
    assert main(["train"]) == 130
    assert capfd.readouterr() == ("", "interrupted\n")
    for bug in (ValueError("a bug"), OSError(errno.EIO, "Input/output error")):
        raise_error(bug)
        with pytest.raises(type(bug)):
            main(["train"])


def test_train_without_a_config_is_the_toy_job(capfd, fitted):
    assert main(["train", "--profile", "3"]) == 0
    ((config, run_dir, profile),) = fitted
    assert config.data.dataset == "toy_de_en" and run_dir == Path("runs/toy_de_en") and profile == 3
    out, err = capfd.readouterr()
    assert json.loads(out) == {"step": 7} and err == "summary of runs/toy_de_en\n"


def test_overrides_are_typed_in_both_forms(fitted):
    flags = """
        --config.model.model_dim=64 --config.model.num_heads 4 --config.optim.learning_rate=1 --config.seed 3
        --config.data.dataset=a,b --config.data.weights=1,2.5 --config.data.text_dir=
        --config.data.clean.empty=keep --config.vocab.joint=false --config.model.tying none
        --config.model.key_dim=16 --config.model.value-dim=None
    """
    assert main(["train", CONFIG, *flags.split()]) == 0
    ((config, run_dir, profile),) = fitted
    assert run_dir == Path("runs/wmt14_en_de_base") and profile == 0
    changed = {
        "model.model_dim": 64,
        "model.num_heads": 4,
        "optim.learning_rate": 1.0,
        "seed": 3,
        "data.dataset": "a,b",
        "data.weights": (1.0, 2.5),
        "vocab.joint": False,
        "model.tying": "none",
        "model.key_dim": 16,
        "model.value_dim": None,
        "data.text_dir": "",
        "data.clean.empty": "keep",
    }
    from flaxformer_mt.config.files import choose_config

    expected = flatten(choose_config("wmt14_en_de_base", None)[0]) | changed
    assert flatten(config) == expected


def test_evaluate_passes_its_flags(capfd, monkeypatch, run_dir):
    from flaxformer_mt.evaluation import evaluate

    calls = []
    monkeypatch.setattr(
        evaluate, "evaluate_run", lambda *args, **kwargs: calls.append((args, kwargs)) or {"perplexity": 1.5}
    )
    flags = ["--lowercase", "--checkpoint=1500", "--beam_size=7", "--shortlist=s"]
    assert main(["evaluate", f"--run={run_dir}", *flags]) == 0
    assert json.loads(capfd.readouterr().out) == {"perplexity": 1.5}
    assert main(["evaluate", f"--run={run_dir}", "--source=a", "--reference", "b", "--method=greedy"]) == 0
    ((run, loading), options), ((_, of_files), files) = calls
    assert (run, loading.shortlist, of_files.shortlist) == (run_dir, Path("s"), None)
    assert (options["split"], options["lowercase"], loading.checkpoint) == ("test", True, "1500")
    assert (loading.search.beam_size, loading.search.length_penalty) == (7, Config().search.length_penalty)
    assert (files["source"], files["reference"], files["lowercase"]) == ("a", "b", None)  # as configured
    assert of_files.search.method == "greedy"


def test_evaluate_refuses_half_a_pair_of_files(capfd, monkeypatch, run_dir):
    for flag, other in (("source", "reference"), ("reference", "source")):
        message = fail(capfd, "evaluate", f"--run={run_dir}", f"--{flag}=a")
        assert message == f"a is given without a {other}; give both files, or --scorer"
    message = fail(capfd, "evaluate", f"--run={run_dir}", "--split=valid", "--source=a", "--reference=b")
    assert message == "--split=valid and --source=a exclude each other; leave one out"
    message = fail(capfd, "evaluate", f"--run={run_dir}", "--source=a", "--reference=b")
    assert message == "input a does not exist"
    monkeypatch.setattr(metrics, "_OTHERS", dict(metrics._OTHERS))
    scorer = f"--scorer=kiwi={sys.executable} -c 'while True: input(); print(1)'"
    message = fail(capfd, "evaluate", f"--run={run_dir}", "--source=a", scorer)
    assert message == "input a does not exist"  # a source without a reference is scored


def test_one_line_for_each_line_in_order(capfd, monkeypatch, run_dir, translator):
    for source, written in {
        "a\x85b\u2028c\n\n  \ntab\there\r\nx\x0by\nlast line, no end ä😀": (
            "A\x85B\u2028C\n\n  \nTAB\tHERE\nX\x0bY\nLAST LINE, NO END Ä😀\n"
        ),
        **{"": "", "\n\n": "\n\n", "a": "A\n", "a\n": "A\n", "\ufeffa": "A\n"},
    }.items():
        feed(monkeypatch, source.encode())
        assert main(["translate", f"--run={run_dir}"]) == 0
        assert capfd.readouterr() == (written, "")
    assert translator.loaded == (run_dir, None, Config().search)


def test_all_options_of_a_search_are_flags(monkeypatch, run_dir, translator):
    feed(monkeypatch, b"")
    flags = ["--method=sample", "--top_p=0.9", "--seed=7", "--suppress=a,12"]
    assert main(["translate", f"--run={run_dir}", "--checkpoint=last", *flags]) == 0
    assert translator.loaded[:2] == (run_dir, "last")
    expected = {"method": "sample", "top_p": 0.9, "seed": 7, "suppress": ("a", "12")}
    assert translator.loaded[2] == dataclasses.replace(Config().search, **expected)
    missing = {f.name for f in dataclasses.fields(SearchConfig)} - {
        f.name for f in dataclasses.fields(TranslateOptions)
    }
    assert not missing


def test_files_give_constraints_of_each_line(tmp_path, capfd, run_dir, translator):
    (tmp_path / "in").write_bytes(b"a\nb\n")
    (tmp_path / "starts").write_bytes(b"the\n\n")
    (tmp_path / "phrases").write_bytes(b"\nred apples\tdog\n")
    files = ["--input=in", "--prefix=starts", "--required=phrases", "--ensemble=x@3,y"]
    assert main(["translate", f"--run={run_dir}", *files]) == 0
    assert [(one.prefix, one.required) for one in translator.requests] == [
        ("the", ("",)),
        ("", ("red apples", "dog")),
    ]
    assert translator.ensemble == ("x@3", "y")
    assert capfd.readouterr().out == "A\nB\n"


def test_programs_are_prepared_on_request(monkeypatch, run_dir, translator):
    for flags, warmed in (([], ()), (["--warm_up"], (1,)), (["--warm_up", "--n_best=3"], (1, 3))):
        feed(monkeypatch, b"one line\n")
        assert main(["translate", f"--run={run_dir}", *flags]) == 0
        assert translator.warmed == warmed


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--batch_tokens=0"], ["--batch_tokens is 0", "at least 1"]),
        (["--n_best=6", "--beam_size=5"], ["--n_best is 6", "beam_size 5", "--beam_size=6"]),
        (["--n_best=2", "--method=greedy"], ["--n_best is 2", "greedy", "--method=beam"]),
        (["--method=greedy", "--beam_size=5"], ["--beam_size=5", "greedy", "--method=beam"]),
        (["--temperature=0.5"], ["--temperature=0.5 has no effect on beam search", "--method=sample"]),
        (["--method=sample", "--top_p=1.5"], ["--top_p is 1.5", "above 0 and at most 1"]),
        (["--diversity_groups=3"], ["--beam_size 4 is not divisible by --diversity_groups 3", "3"]),
        (["--min_length_offset=99"], ["--min_length_offset 99", "--max_length_offset 20"]),
        (["--prefix=-"], ["only one of --input, --prefix, --required and --glossary"]),
        (["--input=gone.txt"], ["input gone.txt does not exist"]),
        (["--glossary=rum"], ["the glossary rum does not exist; did you mean run?"]),
        (["--input=."], ["input . is a folder"]),
        (["--glossary=."], ["the glossary . is a folder"]),
        (["--output=no/where.txt"], ["output folder no does not exist"]),
        (["--output=."], ["output . is a folder"]),
    ],
)
def test_translate_refuses_invalid_flags(capfd, monkeypatch, run_dir, translator, flags, words):
    feed(monkeypatch, b"a\n")
    message = fail(capfd, "translate", f"--run={run_dir}", *flags)
    for word in words:
        assert word in message


def test_lines_that_are_not_utf8(capfd, monkeypatch, run_dir, translator):
    data = b"good\nb\xe4d\ngood\n"
    feed(monkeypatch, data)
    assert main(["translate", f"--run={run_dir}"]) == 2
    out, err = capfd.readouterr()
    assert out == "GOOD\n"  # what came before is not lost
    assert (
        err.startswith("error: standard input, line 2, is not UTF-8 (byte 0xe4 at 2)")
        and "--invalid_utf8=replace" in err
    )
    feed(monkeypatch, data)
    assert main(["translate", f"--run={run_dir}", "--invalid_utf8=replace"]) == 0
    assert capfd.readouterr().out == "GOOD\nB\ufffdD\nGOOD\n"


def test_an_output_never_overwrites_an_input(capfd, tmp_path, run_dir, translator):
    """By whatever name: the same, a link, another name of the file, or the name of the unfinished output."""
    (tmp_path / "text").write_bytes(b"a\nb\n")
    (tmp_path / "link").symlink_to("text")
    (tmp_path / "hard").hardlink_to(tmp_path / "text")
    (tmp_path / "other").write_bytes(b"\n\n")
    (tmp_path / "new.partial").symlink_to("text")
    for flags in (
        ["--input=text", "--output=text"],
        ["--input=text", "--output=link"],
        ["--input=hard", "--output=text"],
        ["--input=other", "--prefix=link", "--output=./text"],
        ["--input=other", "--required=text", "--output=text"],
        ["--input=text", "--output=new"],
        ["--input=text", "--output=text", "--resume"],
    ):
        said = fail(capfd, "translate", f"--run={run_dir}", *flags)
        assert "would overwrite the input" in said and "give another --output=FILE" in said, flags
    for name in ("source", "target"):
        flags = {"source": "other", "target": "other", name: "text"}
        said = fail(
            capfd, "score", f"--run={run_dir}", "--output=link", *(f"--{n}={v}" for n, v in flags.items())
        )
        assert "would overwrite the input text" in said
    assert (tmp_path / "text").read_bytes() == b"a\nb\n"
    assert not (tmp_path / "text.partial").exists()


def test_an_output_that_is_a_link_a_device_or_a_pipe_stays_what_it_is(capfd, tmp_path, run_dir, translator):
    translate = ["translate", f"--run={run_dir}", "--input=in"]
    (tmp_path / "in").write_bytes(b"a\nb\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/real")
    for _ in range(2):  # a link to nowhere, then to an older file
        assert main([*translate, "--output=link"]) == 0
        assert (tmp_path / "link").is_symlink() and (tmp_path / "folder" / "real").read_bytes() == b"A\nB\n"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "to the pipe").symlink_to("pipe")
    for name in ("pipe", "to the pipe"):
        assert main([*translate, f"--output={name}"]) == 0
        assert os.read(reader, 100) == b"A\nB\n"
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    device = tmp_path / "device"
    device.symlink_to("/dev/null")
    assert main([*translate, f"--output={device}"]) == 0
    assert device.is_symlink() and stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    assert sorted(path.name for path in tmp_path.rglob("*.partial*")) == []
    capfd.readouterr()
    assert "a device or pipe" in fail(capfd, *translate, "--output=pipe", "--resume")
    (tmp_path / "out.partial").mkdir()
    assert "which exists and is not a file; remove it" in fail(capfd, *translate, "--output=out")
    os.close(reader)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["help"]])
def test_overview_lists_all_commands(capfd, arguments):
    assert main(arguments) == 0
    out = capfd.readouterr().out
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.summary)}$", out, re.M)


def test_the_help_of_a_command_is_short_and_that_of_a_section_is_complete(capfd, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["flaxformer-mt"])  # however the tests were started

    def show(*arguments) -> str:
        with pytest.raises(SystemExit):
            main(arguments)
        return capfd.readouterr().out

    short, section = show("train", "--help"), show("train", "--help=model")
    assert short.count("\n") <= 150 < show("train", "--help=all").count("\n")
    assert "examples:" in short and "--config.train.steps=INT" in short and "--help=optim" in short
    names = {field.name for field in dataclasses.fields(ModelConfig)} - {"alignment"}
    assert set(re.findall(r"--config\.model\.(\w+)=", section)) == names and "--run" not in section
    assert "usage: flaxformer-mt translate [RUN] [INPUT] [FLAGS]" in show("translate", "--help")


def test_words_and_dashes_are_other_spellings_of_flags(monkeypatch):
    given = []
    monkeypatch.setattr(
        main_module, "COMMANDS", {"translate": dataclasses.replace(COMMANDS["translate"], run=given.append)}
    )
    for line in (
        "--run=a --input=b --beam_size=3 --json --ensemble=c,d",
        "a b --beam-size=3 --json --ensemble c d",
        "--beam_size 3 a --json b --ensemble=c --ensemble=d",
    ):
        assert main(["translate", *line.split()]) == 0
    assert given[0] == given[1] == given[2] and (given[0].run, given[0].input) == (Path("a"), "b")


def test_flags_of_several_values_are_joined_and_take_no_flag_as_a_value(monkeypatch):
    given = []
    commands = {name: dataclasses.replace(COMMANDS[name], run=given.append) for name in ("report", "serve")}
    monkeypatch.setattr(main_module, "COMMANDS", commands)
    for line in ("report a --run=b --attention=1,17 --attention 3 4", "serve a --run b --port=0 --run"):
        assert main(line.split()) == 0
    report, serve = given
    assert report.run == ("a", "b") and report.attention == (1, 17, 3, 4)
    assert serve.run == (Path("a"), Path("b")) and serve.port == 0


def test_options_of_other_toolkits_are_answered_with_options_that_exist():
    flags = set().union(*(list_flag_types(command.options) for command in COMMANDS.values()))
    for ours, names in FOREIGN_NAMES.items():
        assert {f"--{ours}", f"--config.{ours}"} & flags, ours
        assert not flags & {f"--{name}" for name in names.split()}, ours


def test_quiet_leaves_warnings_and_errors(capfd, monkeypatch):
    def timer(seconds, say, arguments):
        return SimpleNamespace(start=lambda: say(*arguments), cancel=lambda: None)

    monkeypatch.setattr(progress_display.threading, "Timer", timer)  # all is slow

    def work(options):
        print("progress", file=sys.stderr)
        for _ in range(2):  # each is said once
            warn_user("look here")
            with progress_display.announce_if_slow("compiling"):
                pass
        raise UserError("it failed")

    monkeypatch.setattr(
        main_module, "COMMANDS", {"doctor": dataclasses.replace(COMMANDS["doctor"], run=work)}
    )
    assert main(["doctor", "--quiet"]) == 2
    assert capfd.readouterr().err == "warning: look here\nerror: it failed\n"
    assert main(["doctor", "--log-level=warning"]) == 2
    assert capfd.readouterr().err == "warning: look here\nerror: it failed\n"
    assert main(["doctor", "--log_level", "error"]) == 2
    assert capfd.readouterr().err == "error: it failed\n"
    assert main(["doctor"]) == 2
    said = capfd.readouterr().err.splitlines()
    wanted = {"doctor is at work ...", "compiling", "progress", "warning: look here", "error: it failed"}
    assert set(said) == wanted and len(said) == 5
    for wrong in ("--log_level=loud", "--log_level", "--quiet=1"):
        assert main(["doctor", wrong]) == 2
        assert wrong.partition("=")[0] in capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("train --mini-batch-fit", "batches have --config.data.batch_tokens; show --target says whether"),
        ("train --config.model.dimm=3", " or --config.model.model_dim or "),
        ("train RUN", "RUN is a run directory, not a config file; give --run=RUN"),
        ("import Helsinki-NLP/opus-mt-de-en --run=x", "hf:Helsinki-NLP/opus-mt-de-en"),
        ("import a/b/c --run=x", "give the folder of the model as --input=PATH\n"),
        ("export RUN --format=huggingface --output=x", "did you mean hf?"),
    ],
)
def test_what_users_of_other_toolkits_write_is_answered_with_what_they_mean(
    capfd, tmp_path, monkeypatch, line, answer
):
    monkeypatch.chdir(tmp_path)
    Path("RUN").mkdir()
    save_config(Config(), Path("RUN/config.json"))
    assert main(line.split()) == 2
    assert answer in capfd.readouterr().err
    with pytest.raises(UserError, match="unknown config field config.train.lr; here it is config.optim.lear"):
        Config().replace({"train.lr": 1.0})


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(capfd, name):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert COMMANDS[name].summary in " ".join(capfd.readouterr().out.split())


def run_process(*arguments, stdout=subprocess.PIPE, **options):
    options |= {"stdout": stdout, "stderr": subprocess.PIPE, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    return subprocess.run([sys.executable, *arguments], timeout=300, **options)


def test_the_launcher_runs_from_anywhere(tmp_path):
    done = run_process(str(ROOT / "train.py"), "--config.model.norm=leyer", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"error: --config.model.norm is 'leyer'")


def test_a_reader_who_leaves_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as broken:
        done = run_process("-m", "flaxformer_mt", "--help", stdout=broken)
    assert (done.returncode, done.stderr) == (141, b"")


def test_paths_that_are_not_utf8_are_printed_as_json(capfd, monkeypatch):
    """Python reads such a byte of a path as a lone surrogate, which UTF-8 cannot encode."""
    from flaxformer_mt.data import prepare

    report = {"folder": "a\udcff\ud800/ä", "overlap": {}}
    given = {}
    monkeypatch.setattr(
        prepare,
        "prepare",
        lambda config, run, **options: given.update(options) or SimpleNamespace(report=report),
    )
    assert main(["prepare", CONFIG, "--shortlist=s", "--shortlist_candidates=7"]) == 0
    assert given["shortlist"] == (Path("s"), 7, 200)
    out = capfd.readouterr().out
    assert json.loads(out) == report and "ä" in out


def test_show_prints_the_size_of_a_run_and_its_time_at_peak(capfd):
    small = [
        "--config.vocab.size=1000",
        "--config.model.num_encoder_layers=1",
        "--config.model.num_decoder_layers=1",
        "--config.train.peak_flops=2e12",
        "--config.train.steps=7200",
    ]
    assert main(["show", CONFIG, *small]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert shown["config"]["model"]["num_encoder_layers"] == 1
    assert (
        shown["longest_batch"]["rows"] * shown["longest_batch"]["target_length"]
        == shown["step"]["target_tokens"]
    )
    assert shown["step"]["memory_mib"]["optimizer"] == pytest.approx(
        2 * shown["parameters"]["total"] * 4 / 2**20, abs=0.1
    )
    assert shown["batches"] is None
    assert shown["step"]["teraflops"] > 0
    at_peak = shown["at_peak"]
    assert (at_peak["device"], at_peak["teraflops_a_second"]) == ("cpu", 2)
    assert at_peak["seconds_a_step"] == pytest.approx(shown["step"]["teraflops"] / 2, rel=1e-3)
    assert at_peak["device_hours"] == pytest.approx(2 * at_peak["seconds_a_step"], rel=1e-3)


def test_show_asks_for_the_vocabulary_where_it_decides_the_sizes(capfd):
    assert main(["show", "--config=kokoyi_iwslt"]) == 2
    assert "all words or characters of the training text; prepare it first" in capfd.readouterr().err


def test_show_takes_sizes_and_batches_from_data_that_is_prepared(capfd, monkeypatch, run_dir):
    from flaxformer_mt.data import prepare

    report = {"vocabulary": {"source_size": 500, "target_size": 300}, "batches": {"shapes": [[8, 16, 16]]}}
    asked = []
    monkeypatch.setattr(
        prepare, "prepare", lambda config, where: asked.append(where) or SimpleNamespace(report=report)
    )
    flags = [f"--run={run_dir}", "--config.model.tying=target_output"]
    sizes = ["num_encoder_layers", "num_decoder_layers"]
    flags += [f"--config.model.{name}=1" for name in sizes]
    assert main(["show", *flags]) == 0
    assert (
        json.loads(capfd.readouterr().out)["batches"] is None and asked == []
    )  # nothing is prepared for a look
    (run_dir / "vocab").mkdir()
    assert main(["show", *flags]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert asked == [run_dir]
    assert shown["batches"] == report["batches"]
    assert shown["at_peak"] is None  # the peak of a CPU is unknown
    modules = shown["parameters"]["modules"]
    assert shown["parameters"]["embeddings"] == 800 * Config().model.model_dim
    assert modules["source_embedding/embedding"] == 500 * Config().model.model_dim
    assert modules["target_embedding/embedding"] == 300 * Config().model.model_dim
    # A run that was trained with another config does not keep anybody from looking at this one.
    (run_dir / "checkpoints" / "40").mkdir(parents=True)
    assert main(["show", *flags]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["batches"] is None and asked == [run_dir]
    assert f"warning: {run_dir} was made with another config; its vocabularies and batches" in said.err


def test_doctor_finds_nothing_wrong_here(capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("FLAXFORMER_MT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "file").write_bytes(b"x" * 2**21)
    assert main(["doctor"]) == 0
    out, err = capfd.readouterr()
    report = json.loads(out)
    assert err in ("", "doctor is at work ...\n") and report["problems"] == []
    assert all(report["packages"].values()) and report["devices"]["count"] >= 1
    assert report["cache"]["directory"] == str(tmp_path / "cache") and report["cache"]["writable"]
    assert report["cache"]["gib"] == pytest.approx(0.002, abs=0.0005)
    monkeypatch.setattr(processor, "_read_cpuinfo", lambda: {"Features": "asimd bf16"})
    assert "dtype of their training, since it has bf16" in doctor.doctor()["host"]["bfloat16"]
    monkeypatch.setattr(processor, "_read_cpuinfo", lambda: {"flags": "avx avx2"})
    assert "float32, since it has none of avx512_bf16" in doctor.doctor()["host"]["bfloat16"]
    intel = {"flags": "avx2 avx512_bf16", "vendor_id": "GenuineIntel"}
    monkeypatch.setattr(processor, "_read_cpuinfo", lambda: intel)
    assert "float32, since avx512_bf16 of Intel's" in doctor.doctor()["host"]["bfloat16"]


def test_doctor_lists_the_programs_of_a_run(tiny_run):
    programs = doctor.doctor(tiny_run)["programs"]
    assert [(one["sentences"], one["source_tokens"]) for one in programs] == [
        ("one", 16),
        ("a few", 16),
        ("many", 16),
    ]
    assert all(one["programs"] == ["empty", "prefill", "generate"] for one in programs)


def test_doctor_names_what_is_missing_and_how_to_get_it(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLAXFORMER_MT_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(doctor, "REQUIRED", {"jax": "jax", "nothing-of-the-sort": "nothing_of_the_sort"})
    monkeypatch.setattr(
        doctor, "EXTRAS", {"cuda13": ("GPUs", ("nothing-of-the-sort",)), "test": ("tests", ("pytest",))}
    )
    report = doctor.doctor()
    assert report["packages"]["nothing-of-the-sort"] is None
    package, cache = report["problems"]
    assert f"{sys.executable} -m pip install" in package and "nothing-of-the-sort" in package
    assert "FLAXFORMER_MT_CACHE" in cache and not report["cache"]["writable"]
    assert report["extras"]["test"] == {"for": "tests", "installed": True}
    assert report["extras"]["cuda13"]["get"] == f"{sys.executable} -m pip install 'jax[cuda13]>=0.10.2,<0.13'"


@pytest.mark.parametrize("flags", [["--version"], ["--print-completion", "bash"]])
def test_a_full_disk_behind_standard_output_is_one_line(flags):
    with open("/dev/full", "wb") as full:
        done = run_process("-m", "flaxformer_mt", *flags, stdout=full)
    message = b"error: standard output: No space left on device; free some space and run the command again\n"
    assert (done.returncode, done.stderr) == (2, message)


@pytest.mark.parametrize(
    "closed, status, said",
    [
        (">&-", 2, "error: standard output is closed; redirect it to a file, or to /dev/null\n"),
        ("<&-", 0, ""),
        ("2>&-", 0, ""),
    ],
)
def test_closed_streams(closed, status, said):
    """Without a stream, its number would go to the next file that is opened."""
    command = f"exec {shlex.quote(sys.executable)} -m flaxformer_mt --version {closed}"
    done = run_process("-c", f"import os; os.execvp('sh', ['sh', '-c', {command!r}])")
    assert (done.returncode, done.stderr.decode()) == (status, said)
    assert done.stdout.decode().startswith("flaxformer-mt ") == (status == 0)


def test_too_little_memory_is_one_line(capfd, monkeypatch):
    monkeypatch.setattr(plot, "plot", lambda options: np.empty(1 << 57))
    assert main(["plot", "--run=run"]) == 2
    error = capfd.readouterr().err
    assert re.fullmatch(
        "error: the memory does not suffice: Unable to allocate .*; give smaller sizes\n", error
    )


def test_outputs_that_cannot_be_written_are_refused_before_work(capfd, tmp_path):
    missing = tmp_path / "absent" / "list"
    assert main(["prepare", CONFIG, f"--shortlist={missing}"]) == 2
    assert f"error: output folder {missing.parent} does not exist; create it" in capfd.readouterr().err
    for command in ("export", "import"):
        flags = {"export": "--format=torch", "import": "--input=x"}
        output = f"--run={tmp_path}", f"--output={tmp_path / 'out'}"
        assert main([command, *output[: 2 - (command == "import")], flags[command], "--tolerance=-1"]) == 2
        assert capfd.readouterr().err == "error: --tolerance is -1; it must be at least 0\n"


def test_the_installed_command_is_the_launcher():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["flaxformer-mt"].partition(":")
    assert getattr(importlib.import_module(module), function) is launch.launch
