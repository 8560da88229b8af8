"""Mutated flags and config files: status 0 or 2, and with 2 one message on standard error, never a traceback.

The commands do nothing: what is tried is all that precedes their work. FLAXFORMER_MT_FUZZ=100 tries 2,000
command lines and 1,000 files; seeds are fixed.
"""

import dataclasses
import io
import random
import re
from collections.abc import Callable

import pytest
from damage import BYTES, SIZE, VALUES, draw_for

from flaxformer_mt.commands import main as main_module
from flaxformer_mt.commands.flag_parser import list_flag_types
from flaxformer_mt.commands.main import COMMANDS, main
from flaxformer_mt.config.files import flatten, list_recipes, load_config

# Of values that are right somewhere.
PLAUSIBLE = "4 0.1 true none best a,b x.de runs/a toy_de_en 1e-3 -1 de -".split() + [""]

RIGHT = [
    ("translate", "runs/a in.de --output=out.en --beam_size=8 --n_best=4 --scores"),
    ("train", "--config=toy_de_en --config.train.steps=30 --run=x --config.data.weights=1,2"),
    ("evaluate", "--run=x --source=a.de --reference=a.en --against=b,c --bootstrap=10"),
    ("serve", "--run=a --run=b --port=0 --host=::1 --max_waiting=3"),
    ("export", "--run=x --format=torch --output=y --tolerance=1e-3"),
    ("show", "wmt14_en_de_base --config.model.num_heads=4 --json"),
]


def numbers(small: int, large: int) -> range:
    return range(large * SIZE // 100 if SIZE > 1 else small)


def mutate_text(text: str, draw: random.Random) -> str:
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(text) + 1)
        one, rest = text[at : at + 1], text[at + 1 :]
        other = draw.choice("-=_. é") + rest
        text = text[:at] + draw.choice([rest, one + one + rest, rest[:1] + one + rest[1:], other])
    return text


def mutate_line(draw: random.Random) -> list[str]:
    command = draw.choice(sorted(COMMANDS))
    flags = draw.sample(list(list_flag_types(COMMANDS[command].options)), 3)
    words = [f"{flag}={draw.choice(PLAUSIBLE)}" for flag in flags if flag != "--help"]
    if draw.random() < 0.3:  # a right line, to begin with
        command, words = draw.choice(RIGHT)
        words = words.split()
    for _ in range(draw.randint(1, 2)):
        at = draw.randrange(len(words))
        flag, _, value = words[at].partition("=")
        words[at : at + 1] = draw.choice(
            [
                [f"{flag}={draw.choice(VALUES)}"],
                [mutate_text(words[at], draw)],
                [flag],
                [flag, value],
                [value],
                [words[at], words[at]],
                [flag.replace("_", "-")],
                [flag.upper()],
                [flag.rpartition(".")[2]],
                ["--" + flag],
                ["--", flag],
                [],
            ],
        )
        words = words or ["--run=x"]
    return [mutate_text(command, draw) if draw.random() < 0.05 else command, *words]


def mutate_file(draw: random.Random) -> bytes:
    """The text of a recipe with a field, a value or some bytes changed."""
    text = draw.choice(sorted(list_recipes().values())).read_text(encoding="utf-8")
    values = re.findall(r"(?<==)[\w.\"]+", text)
    fields = [name.rpartition(".")[2] for name in flatten(load_config("toy_de_en"))]
    used = [name for name in fields if f"{name}=" in text]
    if draw.random() < 0.3:
        kind = draw.choice([name for name in sorted(BYTES) if name != "nested"])
        return BYTES[kind](text.encode(), draw)
    if draw.random() < 0.3:
        lines = text.split("\n")
        del lines[draw.randrange(len(lines))]
        return "\n".join(lines).encode()
    if used and draw.random() < 0.5:
        name = draw.choice(used)
        other = draw.choice([mutate_text(name, draw), draw.choice(fields)])
        return text.replace(f"{name}=", f"{other}=").encode()
    new = draw.choice("None -1 0 1e9 float('nan') 'x' () [] True 1/0 object() 2**70".split())
    return text.replace(draw.choice(values), new).encode("utf-8", errors="replace")


@pytest.fixture
def run(monkeypatch, capfd, tmp_path) -> Callable[[list[str]], tuple[int, str]]:
    """Runs a command line up to its work; returns the status and standard error."""
    idle = {
        name: dataclasses.replace(command, run=lambda options: None) for name, command in COMMANDS.items()
    }
    monkeypatch.setattr(main_module, "COMMANDS", idle)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    # It would take the standard output of the whole test process.
    monkeypatch.setattr("flaxformer_mt.parallel.processes._reserve_standard_output", lambda: None)
    monkeypatch.chdir(tmp_path)

    def run(line: list[str]) -> tuple[int, str]:
        try:
            status = main(line)
        except SystemExit as end:
            status = int(end.code or 0)
        return status, capfd.readouterr().err

    return run


def check(line: object, status: int, said: str) -> None:
    assert status in (0, 2), (line, said)
    assert "Traceback" not in said and "\x1b" not in said, (line, said)
    errors = [row for row in said.split("\n") if row.startswith("error: ")]
    assert len(errors) == (status == 2), (line, said)
    if status == 2:
        message = said[said.index("error: ") :].rstrip("\n")
        # Several problems of a config have a line each.
        assert 15 < len(errors[0]) and message.count("\n") < 30 and len(message) < 6000, (line, said)


def test_mutated_command_lines_are_run_or_refused_with_one_message(run):
    statuses = set()
    for number in numbers(60, 2000):
        line = mutate_line(draw_for("command line", number))
        if line[1:2] == ["--version"]:
            continue
        status, said = run(line)
        check((number, line), status, said)
        statuses.add(status)
    assert statuses == {0, 2}


def test_mutated_config_files_are_run_or_refused_with_one_message(run, tmp_path):
    statuses = set()
    path = tmp_path / "my_config.py"
    for number in numbers(40, 1000):
        content = mutate_file(draw_for("config file", number))
        path.write_bytes(content)
        status, said = run(["show", f"--config={path}"])
        check((number, content), status, said)
        statuses.add(status)
    assert statuses == {0, 2}
