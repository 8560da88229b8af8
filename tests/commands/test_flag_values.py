"""Every flag of every command with each of its choices and with odd values: a value or one line of error."""

import json
import typing
from pathlib import Path

import pytest

from flaxformer_mt.commands.flag_parser import list_flag_types, parse_flags
from flaxformer_mt.commands.main import COMMANDS, main
from flaxformer_mt.config import Config
from flaxformer_mt.config.field_values import read_value, replace_fields
from flaxformer_mt.config.files import flatten, read_config
from flaxformer_mt.errors import UserError

ODD = ["", " ", "9" * 400, "\udcff", "\0", "ａｕｔｏ", "[]", "{}", "~nobody/x", "⅕"]
ODD += "x Auto true FALSE none 1 0 -1 2.5 nan inf 1e400 a,b , 1,2 = ٣ 1_000 0x10 --".split()
ODD_JSON = [1, 0, -1, 2.5, True, False, None, "", "x", [], {}, [1], ["x"], {"a": 1}, 1 << 70, float("nan")]


def list_choices(kind: object) -> list[object]:
    """The values of a Literal, also one that may be None or stands in a tuple."""
    if typing.get_origin(kind) is typing.Literal:
        return list(typing.get_args(kind))
    return [choice for argument in typing.get_args(kind) for choice in list_choices(argument)]


def read(text: str, kind: object, flag: str) -> tuple[object, str]:
    try:
        return read_value(text, kind, flag, from_text=True), ""
    except UserError as error:
        return None, str(error)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_takes_its_choices_and_answers_odd_values(command):
    for flag, kind in list_flag_types(COMMANDS[command].options).items():
        for choice in list_choices(kind):
            for text in {str(choice), str(choice).lower()} if isinstance(choice, bool) else {str(choice)}:
                value, message = read(text, kind, flag)
                value = value[0] if isinstance(value, tuple) else value
                assert (type(value), value) == (type(choice), choice), (flag, text, message)
        for text in ODD:
            _, message = read(text, kind, flag)
            assert not message or flag.removeprefix("--config.") in message or text in message, (flag, text)
            assert "\n" not in message


def test_every_field_answers_odd_values_of_json():
    for name, default in flatten(Config()).items():
        for value in ODD_JSON:
            try:
                found = flatten(replace_fields(Config(), {name: value}, "config"))[name]
            except UserError as error:
                assert f"config.{name}" in str(error), (name, value)
                continue
            assert isinstance(found, bool) == isinstance(value, bool), (name, value, default)


def test_a_choice_of_words_and_truth_values_is_set_from_the_command_line():
    """The only such field is model.scan_layers; a whole number is no truth value."""
    kind = COMMANDS["train"].options
    for text, expected in {"auto": "auto", "False": False, "false": False, "TRUE": True}.items():
        options = parse_flags(kind, [f"--config.model.scan_layers={text}"], prog="train")
        assert options.config.model.scan_layers is expected or expected == "auto"
    for text in ("1", "0", "fals", "None", "yes", ""):
        with pytest.raises(UserError, match=r"model.scan_layers .*\(allowed: auto, True, False\)"):
            parse_flags(kind, [f"--config.model.scan_layers={text}"], prog="train")
    for value in (1, 0, 1.0, None):
        with pytest.raises(UserError, match=r"model.scan_layers is .* \(allowed: auto, True, False\)"):
            replace_fields(Config(), {"model.scan_layers": value}, "config")


RUN_COMMANDS = [
    name
    for name, command in COMMANDS.items()
    if {"--run", "--checkpoint"} <= set(flags := list_flag_types(command.options)) and flags["--run"] is Path
]


@pytest.mark.parametrize("command", RUN_COMMANDS)
def test_run_at_checkpoint_is_taken_by_every_command_that_takes_a_checkpoint(command, tmp_path, monkeypatch):
    """As `evaluate` prints it and --init and --against take it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run@home").mkdir()
    kind = COMMANDS[command].options
    others = {"input": "x", "output": "y", "target": "x", "format": "hf"}
    others = [f"--{name}={value}" for name, value in others.items() if f"--{name}" in list_flag_types(kind)]

    def parse(*flags: str) -> tuple[str, str | None]:
        options = parse_flags(kind, [*flags, *others], prog=command, words=COMMANDS[command].words)
        return options.run.name, options.checkpoint

    assert parse("--run=run@250") == parse("run@250", "--checkpoint=250") == ("run", "250")
    assert parse("--run=run@home") == ("run@home", None) and parse("run@home@best") == ("run@home", "best")
    with pytest.raises(UserError, match="--run=run@250 and --checkpoint=last name two checkpoints"):
        parse("--run=run@250", "--checkpoint=last")
    assert len(RUN_COMMANDS) >= 7


def test_a_command_without_checkpoints_says_so(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="run@250 is not a run directory.*run is one, of which no checkpoint"):
        read_config(tmp_path / "run@250" / "config.json")


STAGES = "datasets: {toy_de_en: x}\nstages: [s]\ns: [toy_de_en 1]\nmodifiers: [UpperCase: 0.1]\n"


def test_a_file_of_stages_is_part_of_the_config(tmp_path, capsys):
    (tmp_path / "stages.yaml").write_text(f"{STAGES}seed: 7\n", encoding="utf-8")
    flags = [f"--config.data.stages={tmp_path / 'stages.yaml'}"]
    assert main(["show", f"--run={tmp_path / 'run'}", "--config=toy_de_en", *flags]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("warning: ") and "no effect here: seed;" in err and err.count("\n") == 1
    data = json.loads(out)["config"]["data"]
    assert [(one["name"], one["mix"], one["noise"]["upper_case"]) for one in data["stages"]] == [
        ("s", ["toy_de_en 1"], 0.1)
    ]
    with pytest.raises(SystemExit):
        main(["prepare", f"--run={tmp_path / 'run'}", *flags, "--help=all"])
    text = capsys.readouterr().out
    assert "--config.data.stages=FILE.yaml" in text and "--config.data.noise.typos=FLOAT" in text
