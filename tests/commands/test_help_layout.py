"""Help: groups of flags, each default said once, lines that fit."""

import dataclasses
import re

import pytest

from flaxformer_mt.commands.help_layout import format_help, read_comments
from flaxformer_mt.commands.main import COMMANDS, main
from flaxformer_mt.commands.options import TranslateOptions
from flaxformer_mt.config import Config
from flaxformer_mt.config.files import flatten


def read_flags(text: str) -> dict[str, str]:
    entries = re.split(r"\n  (?=-)", text)[1:]
    return {
        (words := entry.split("\n\n")[0].split())[0]: " ".join(words[1:])
        for entry in (entry.replace("-h, --help", "--help") for entry in entries)
    }


def test_flags_are_in_groups_and_every_field_has_a_comment():
    text = format_help(TranslateOptions, usage="x translate", description="Translates.")
    groups = re.findall(r"^(\w[\w ]+):$", text, re.M)
    assert groups[0] == "general" and groups[-2:] == ["several processes", "workers"]
    assert groups.index("sampling") < groups.index("several processes") and len(groups) >= 8
    assert set(groups).isdisjoint({"options"}) and len(set(groups)) == len(groups)
    assert text.index("--run=") < text.index("--input=") < text.index("--beam_size=")
    for command in COMMANDS.values():
        for name, comment in read_comments(command.options).items():
            assert comment.text.endswith((".", ")")), (name, comment)
    flags = read_flags(text)
    assert {flag.strip("-").partition("=")[0].partition("[")[0] for flag in flags} == {
        *("help", "log_level", "quiet"),
        *(field.name for field in dataclasses.fields(TranslateOptions)),
    }


def test_switches_are_written_without_a_value_and_defaults_said_once():
    flags = read_flags(format_help(TranslateOptions, usage="x", description=""))
    assert {"--scores", "--token_scores", "--json", "--resume", "--distributed"} <= flags.keys()
    assert "--alignments[={words,pieces}]" in flags
    assert flags["--run=PATH"].endswith("(required)")
    assert flags["--prefix=STR"].endswith("sets no prefix. (default: no prefixes)")
    assert flags["--beam_size=INT"].endswith("usually 4 or 5. (default: as in the run's config)")
    assert flags["--ensemble=STR,..."].endswith("(default: none)")
    for explanation in flags.values():
        assert "None" not in explanation and "Empty" not in explanation
        assert explanation.count("(default:") <= 1


def test_lines_fit_terminals_and_pipes(capfd, monkeypatch):
    for name, columns in [("train", "80"), ("train", "240"), ("translate", "80"), ("export", "60")]:
        monkeypatch.setenv("COLUMNS", columns)
        with pytest.raises(SystemExit):
            main([name, "--help"])
        lines = capfd.readouterr().out.split("\n")
        # a name, a file or a single word may be longer than a narrow terminal
        assert max(map(len, lines)) <= min(int(columns), 100) or columns == "60"
        assert max(map(len, lines)) > int(columns) - 8 or columns == "240"


def test_fields_of_the_config_show_the_values_of_the_chosen_config(capfd):
    with pytest.raises(SystemExit):
        main(["show", "--config=wmt14_en_de_base", "--help=all"])
    out = capfd.readouterr().out
    flags = read_flags(out)
    names = {flag.removeprefix("--config.").partition("=")[0] for flag in flags if "--config." in flag}
    assert names == set(flatten(Config()))
    assert flags["--config.train.steps=INT"].endswith("once. (default: 100000)")
    assert flags["--config.model.key_dim=INT|none"].endswith("(default: model_dim / num_heads)")
    assert "--config.data.clean.*:" in out
