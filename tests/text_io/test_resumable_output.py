"""Output that is cut off anywhere and gone on with is what it would have been."""

import json
import os
import re
import subprocess
import sys

import pytest

from flaxformer_mt.errors import UserError
from flaxformer_mt.text_io.resumable_output import ResumableOutput

ORIGIN = {"run": "runs/a", "checkpoint": "best (step 10)", "options": {"beam_size": 4}}
LINES = ["a", "", "c\u2028", "d ||| x", "e", "f", "g"]


def outputs_of(number, line):
    """One to three output lines for an input line, some of which look like others."""
    return [f"{number} ||| {line}{rank}" for rank in range(1 + number % 3)]


class Killed(BaseException):
    pass


def run(path, lines, *, origin=ORIGIN, step=2, stop_after=None, second=None, resume=False, **options):
    with ResumableOutput(str(path), origin=origin, step=step, resume=resume, **options) as output:
        start = output.done
        reader = output.read("input", lines)
        other = None if second is None else output.read("prefix", second)
        for number, line in enumerate(reader, start=start):
            if other is not None:
                next(other)
            if number == stop_after:
                raise Killed
            output.write(outputs_of(number, line))
    return start


def expected():
    return "".join(f"{text}\n" for n, line in enumerate(LINES) for text in outputs_of(n, line)).encode()


@pytest.mark.parametrize("torn", [b"", b"4 ||| half a li", b"9 ||| whole\n9 |"])
@pytest.mark.parametrize("stop_after", range(7))
def test_wherever_it_is_cut_off_it_becomes_the_same(tmp_path, stop_after, torn):
    with pytest.raises(Killed):
        run(tmp_path / "out", LINES, stop_after=stop_after)
    assert not (tmp_path / "out").exists()
    with (tmp_path / "out.partial").open("ab") as partial:
        partial.write(torn)
    assert run(tmp_path / "out", LINES, resume=True) == stop_after - stop_after % 2
    assert (tmp_path / "out").read_bytes() == expected()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_it_may_be_cut_off_again_and_again_while_the_input_grows(tmp_path):
    for stop_after, size in ((3, 4), (3, 4), (5, 6), (6, 7)):
        with pytest.raises(Killed):
            run(tmp_path / "out", LINES[:size], resume=True, stop_after=stop_after)
    assert run(tmp_path / "out", LINES, resume=True) == 6
    assert (tmp_path / "out").read_bytes() == expected()


def test_nothing_to_resume_is_a_beginning_and_only_overwrite_begins_anew(tmp_path):
    assert run(tmp_path / "out", LINES, resume=True) == 0
    assert run(tmp_path / "empty", [], resume=True) == 0
    with pytest.raises(Killed):
        run(tmp_path / "new", LINES, stop_after=4)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    words = (
        r"new\.partial holds the output of the first 4 lines .* give --resume .*, --overwrite to start over"
    )
    with pytest.raises(UserError, match=words):
        run(tmp_path / "new", LINES)
    (tmp_path / "foreign.partial").write_bytes(b"of another program\n")
    with pytest.raises(UserError, match=r"foreign\.partial holds 19 bytes of output without a record"):
        run(tmp_path / "foreign", LINES)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("[!f]*")} == kept
    for name in ("new", "foreign"):
        assert run(tmp_path / name, LINES, overwrite=True) == 0
        assert (tmp_path / name).read_bytes() == (tmp_path / "out").read_bytes() == expected()
    with pytest.raises(Killed):  # less than a record is no loss
        run(tmp_path / "new", LINES, stop_after=1)
    assert run(tmp_path / "new", LINES) == 0


def interrupted(path, **options):
    with pytest.raises(Killed):
        run(path, LINES, stop_after=5, **options)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"origin": ORIGIN | {"checkpoint": "best (step 20)"}}, ["best (step 20)", "best (step 10)"]),
        ({"origin": ORIGIN | {"run": "runs/b"}}, ["run:", "runs/b", "runs/a"]),
        ({"origin": ORIGIN | {"options": {"beam_size": 5}}}, ['{"beam_size": 5}', '{"beam_size": 4}']),
        ({"origin": ORIGIN | {"more": 1}}, ["more: 1 now, absent for"]),
        ({"step": 3}, ["step: 3 now, 2 for"]),
    ],
)
def test_what_made_it_must_be_the_same(tmp_path, changes, words):
    interrupted(tmp_path / "out")
    before = (tmp_path / "out.partial").read_bytes()
    with pytest.raises(UserError) as error:
        run(tmp_path / "out", LINES, resume=True, **changes)
    assert all(word in str(error.value) for word in [*words, "--overwrite instead of --resume to start over"])
    assert (tmp_path / "out.partial").read_bytes() == before
    assert run(tmp_path / "out", LINES, resume=True) == 4


def test_the_lines_that_are_done_must_be_the_same(tmp_path):
    interrupted(tmp_path / "out", second=LINES)
    before = (tmp_path / "out.partial").read_bytes()
    with pytest.raises(UserError, match="the first 4 lines of input differ from those"):
        run(tmp_path / "out", ["A", *LINES[1:]], resume=True, second=LINES)
    with pytest.raises(UserError, match="the first 4 lines of prefix differ from those"):
        run(tmp_path / "out", LINES, resume=True, second=["A", *LINES[1:]])
    with pytest.raises(UserError, match="input ends after 3 lines, but .* is the output of 4"):
        run(tmp_path / "out", LINES[:3], resume=True, second=LINES)
    assert (tmp_path / "out.partial").read_bytes().startswith(before[:20])
    run(tmp_path / "out", LINES, resume=True, second=LINES)
    assert (tmp_path / "out").read_bytes() == expected()


def test_a_partial_file_without_its_record_is_refused(tmp_path):
    interrupted(tmp_path / "out")
    record = tmp_path / "out.partial.json"
    content = json.loads(record.read_text())
    assert content["lines"] == 4 and content["origin"] == ORIGIN
    (tmp_path / "out.partial").write_bytes(b"short")
    with pytest.raises(UserError, match="has 5 bytes, but its record says"):
        run(tmp_path / "out", LINES, resume=True)
    damages = ["{", "[]", "[" * 100_000, "", "\udc80", *({**content, name: None} for name in content)]
    damages += [{name: content[name] for name in content if name != left_out} for left_out in content]
    damages += [content | {"lines": -2}, content | {"bytes": True}, content | {"inputs": {"input": None}}]
    for damaged in damages:
        text = damaged if isinstance(damaged, str) else json.dumps(damaged)
        record.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(UserError, match=r"has no record out\.partial\.json"):
            run(tmp_path / "out", LINES, resume=True)
    record.unlink()
    with pytest.raises(UserError, match=r"has no record out\.partial\.json"):
        run(tmp_path / "out", LINES, resume=True)


def test_output_that_was_changed_is_refused(tmp_path):
    interrupted(tmp_path / "out")
    partial = tmp_path / "out.partial"
    before = partial.read_bytes()
    for place in (0, 10):
        partial.write_bytes(before[:place] + b"#" + before[place + 1 :])
        with pytest.raises(
            UserError, match=r"was changed: its first \d+ bytes have the SHA-256 .* --overwrite"
        ):
            run(tmp_path / "out", LINES, resume=True)
    partial.write_bytes(before)
    assert run(tmp_path / "out", LINES, resume=True) == 4
    assert (tmp_path / "out").read_bytes() == expected()


def test_a_complete_output_whose_record_was_kept_is_compared_and_stays(tmp_path):
    run(tmp_path / "out", LINES, keep=True)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(kept) == ["out", "out.json"] and kept["out"] == expected()
    for changes, lines, words in (
        ({}, [*LINES, "h"], "input has more lines than the 7 that .*out was made from"),
        ({}, LINES[:3], "input ends after 3 lines, but .*out is the output of 7"),
        ({}, ["A", *LINES[1:]], "the first 7 lines of input differ"),
        ({"step": 3}, LINES, "step: 3 now, 2 for .*out"),
    ):
        with pytest.raises(UserError, match=words):
            run(tmp_path / "out", lines, keep=True, resume=True, **changes)
    (tmp_path / "out.partial.json").write_text("{}")  # of a command that was killed at its end
    assert run(tmp_path / "out", LINES, keep=True, resume=True) == 7
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept
    for content, words in (
        (kept["out"] + b"more\n", r"bytes, but its record says"),
        (kept["out"][:-1], r"bytes, but its record says"),
        (b"#" + kept["out"][1:], "was changed: its first"),
    ):
        (tmp_path / "out").write_bytes(content)
        with pytest.raises(UserError, match=words):
            run(tmp_path / "out", LINES, keep=True, resume=True)
        assert (tmp_path / "out").read_bytes() == content
    assert run(tmp_path / "out", LINES, keep=True, overwrite=True) == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept


HOLD = """
import sys
from flaxformer_mt.text_io.resumable_output import ResumableOutput
with ResumableOutput(sys.argv[1], origin={}, step=2, resume=True) as output:
    print("open", flush=True)
    sys.stdin.read()
"""


def test_two_processes_do_not_write_one_file_and_a_kill_ends_the_lock(tmp_path):
    path = tmp_path / "out"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], **pipes) as holder:
        assert holder.stdout.readline() == b"open\n"
        for options in ({"resume": True}, {"overwrite": True}, {}):
            with pytest.raises(UserError, match=r"another process is writing .*out\.partial"):
                run(path, LINES, origin={}, **options)
        holder.kill()
    assert run(path, LINES, origin={}, resume=True) == 0
    assert path.read_bytes() == expected()


def test_the_record_is_on_the_disk_before_it_is_named(tmp_path, monkeypatch):
    """Synchronised in this order: the output, the new record, and the folder that then has its name."""
    calls = []
    sync, replace = os.fsync, os.replace

    def show(path):
        return re.sub(r"^\.(.*)\.[0-9a-f]{8}$", r"new \1", os.path.basename(path))

    def log_sync(descriptor):
        calls.append(show(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    def log_replace(source, target):
        calls.append(f"{show(source)} -> {show(target)}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", log_sync)
    monkeypatch.setattr(os, "replace", log_replace)
    run(tmp_path / "out", LINES[:2])
    record = ["new out.partial.json", "new out.partial.json -> out.partial.json", tmp_path.name]
    assert calls == [*record, "out.partial", *record, "out.partial", "out.partial -> out"]
