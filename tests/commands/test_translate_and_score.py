"""`translate` and `score` on files, with a tiny run: options together, and what a kill leaves behind."""

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_engine import FakeBackend, fake_engine
from tiny_experiment import quick_environment

from flaxformer_mt.commands.main import main
from flaxformer_mt.config import Config, DataConfig, ModelConfig
from flaxformer_mt.config.files import read_config, save_config
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.text_io import lines as lines_module
from flaxformer_mt.text_io.resumable_output import ResumableOutput
from flaxformer_mt.translation.result import Annotations, Translation
from flaxformer_mt.translation.scorer import Scorer
from flaxformer_mt.translation.translator import Translator

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Commands run in a working directory of their own."""
    monkeypatch.chdir(tmp_path)


LINES = [
    "ba do",
    "",
    "gu\x85fi\tka\u2028.",
    "lo mi .",
    " \u3000",
    "ba. Do fi, gu ka lo fi ba. Mi nu ba do fi gu ka",
]


def write_lines(path, lines):
    Path(path).write_bytes("".join(f"{line}\n" for line in lines).encode())


def read_lines(path):
    return Path(path).read_bytes().decode().split("\n")[:-1]


def test_translations_and_their_scores(tiny_run, capfd):
    lines = LINES * 2
    write_lines("in", lines)
    assert main(["translate", f"--run={tiny_run}", "--input=in", "--output=out", "--json"]) == 0
    assert "lines 6, 12: longer than data.max_source_length 16" in capfd.readouterr().err
    found = [json.loads(line) for line in read_lines("out")]
    assert [one["source"] for one in found] == lines and [one["line"] for one in found] == list(range(12))
    assert [one["text"] == "" for one in found][1::3] == [True] * 4
    assert found[5]["parts"] > 1 and found[11]["parts"] > 1
    for one in found:
        assert len(one["token_log_probs"]) == len(one["tokens"]) == len(one["pieces"])
        assert sum(one["token_log_probs"]) == pytest.approx(one["log_prob"], abs=1e-4)
    flags = ["--token_scores", "--alignments"]
    assert main(["translate", f"--run={tiny_run}", "--input=in", "--output=columns", *flags]) == 0
    for line, one in zip(read_lines("columns"), found, strict=True):
        score, log_prob, tokens, alignment, text = line.split("\t", 4)
        assert (float(log_prob), text) == (one["log_prob"], one["text"])
        assert score == "nan" if one["score"] is None else float(score) == one["score"]
        assert list(map(float, tokens.split())) == one["token_log_probs"]
        assert [list(map(int, pair.split("-"))) for pair in alignment.split()] == one["alignment"]
    # The same through `score`, for a translation whose text is cut into the pieces that the search wrote.
    texts = [one["text"] if one["parts"] == 1 else "ba" for one in found]
    write_lines("texts", texts)
    write_lines("whole", [line if number % 6 < 5 else "ba" for number, line in enumerate(lines)])
    assert main(["score", f"--run={tiny_run}", "--source=whole", "--target=texts", "--json"]) == 0
    scored = list(map(json.loads, capfd.readouterr().out.split("\n")[:-1]))
    assert [one["target"] for one in scored] == texts
    same = [number for number in (0, 2, 3) if scored[number]["tokens"] == found[number]["tokens"]]
    assert same
    for number in same:
        assert scored[number]["score"] == pytest.approx(found[number]["score"], abs=1e-4)
    assert main(["score", f"--run={tiny_run}", "--source=whole", "--target=texts", "--output=s"]) == 0
    assert list(map(float, read_lines("s"))) == [one["score"] for one in scored]


def test_a_killed_translation_resumes_with_the_same_bytes(tiny_run, capfd, monkeypatch):
    words = "ba do fi gu ka lo mi .".split()
    lines = [" ".join(words[n % 7 : n % 7 + n % 3]) for n in range(112)]
    write_lines("in", lines)
    command = ["translate", f"--run={tiny_run}", "--json", "--window=16"]
    assert main([*command, "--input=in", "--output=whole"]) == 0
    # It waits for more input when it is killed, in the middle of the file.
    killed = subprocess.Popen(
        [sys.executable, "-m", "flaxformer_mt", *command, "--input=-", "--output=out"],
        env=quick_environment(PYTHONPATH=str(ROOT)),
        stdin=subprocess.PIPE,
    )
    killed.stdin.write("".join(f"{line}\n" for line in lines[:70]).encode())
    killed.stdin.flush()
    record = Path("out.partial.json")
    for _ in range(6000):
        if record.exists() and json.loads(record.read_text())["lines"] == 64:
            break
        assert killed.poll() is None
        time.sleep(0.1)
    killed.send_signal(signal.SIGKILL)
    killed.wait(timeout=60)
    killed.stdin.close()
    assert not Path("out").exists()
    with Path("out.partial").open("ab") as partial:
        partial.write(b'{"line": 64, "sour')
    # Another command is refused, and leaves all as it is.
    again = [*command, "--input=in", "--output=out", "--resume"]
    assert main([*again, "--length_penalty=0.5"]) == 2
    message = capfd.readouterr().err
    assert '"length_penalty": 0.5' in message and '"length_penalty": 1.0' in message
    with monkeypatch.context() as patch:  # another version may compute otherwise
        patch.setattr("flaxformer_mt.__version__", "0.0.1")
        assert main(again) == 2
    message = capfd.readouterr().err
    assert "versions: " in message and '"flaxformer_mt": "0.0.1"' in message
    assert main(again[:-1]) == 2
    assert "out.partial holds the output of the first 64 lines" in capfd.readouterr().err
    write_lines("other", ["x", *lines[1:]])
    assert main([*command, "--input=other", "--output=out", "--resume"]) == 2
    assert "the first 64 lines of input differ from those" in capfd.readouterr().err
    assert main(again) == 0
    assert Path("out").read_bytes() == Path("whole").read_bytes()
    assert not Path("out.partial").exists() and not record.exists()


@pytest.mark.parametrize("output", ["-", "out"])
def test_a_pipe_that_pauses_is_answered(untrained, monkeypatch, capfd, output):
    """With standard output, each line before the next is sent; a file has windows of fixed sizes."""
    monkeypatch.setattr("flaxformer_mt.text_io.lines._PAUSE", 0.05)
    shouting = FakeBackend(lambda request: Translation(request.text.upper(), -1.0, -1.0, (5, 2)))
    written = []
    loaded = SimpleNamespace(engine=lambda: fake_engine(shouting))
    monkeypatch.setattr(Translator, "load", lambda *arguments, **options: loaded)
    read_end, write_end = os.pipe()

    def talk():
        with open(write_end, "wb", buffering=0) as pipe:
            for number in range(3):
                pipe.write(f"line {number}\nsecond {number}\nthi".encode())
                deadline = time.monotonic() + (10 if output == "-" else 0.2)
                while len(shouting.windows) <= number and time.monotonic() < deadline:
                    time.sleep(0.01)
                written.append(len(shouting.windows))
                pipe.write(b"rd\n")

    talker = threading.Thread(target=talk)
    with open(read_end, "rb", buffering=0) as stream:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(stream)))
        talker.start()
        assert main(["translate", f"--run={untrained}", f"--output={output}"]) == 0
        talker.join()
    lines = [
        f"{word} {number}" if word != "THIRD" else word
        for number in range(3)
        for word in ("LINE", "SECOND", "THIRD")
    ]
    if output == "-":
        assert capfd.readouterr().out.split("\n")[:-1] == lines
        assert written == [1, 2, 3] and shouting.windows == [2, 3, 3, 1]
    else:
        assert read_lines("out") == lines and shouting.windows == [9]


def test_parameters_that_are_not_finite_are_refused(tiny_run, tmp_path, capfd):
    """Instead of blank lines, scores of nan and a BLEU of 0, all with status 0."""
    run = shutil.copytree(tiny_run, tmp_path / "run")
    checkpoints = Checkpoints(run)
    params, progress = checkpoints.restore_params(48)
    bias = params["decoder"]["final_norm"]["bias"]
    params["decoder"]["final_norm"]["bias"] = bias.at[5].set(float("nan"))
    checkpoints.save(49, {"params": params}, progress | {"step": 49})
    checkpoints.wait()
    write_lines("in", LINES)
    write_lines("reference", LINES)
    files = ["--source=in", "--reference=reference"]
    scoring = ["score", "--source=in", "--target=in"]
    for command in (["translate", "--input=in"], scoring, ["evaluate", *files]):
        assert main([*command, f"--run={run}", "--checkpoint=49"]) == 2, command
        out, err = capfd.readouterr()
        assert out == "" and "parameters, first in decoder/final_norm/bias; use another --checkpoint" in err
    assert main(["average", f"--run={run}", "--last=2"]) == 2
    assert "checkpoint 49 of" in capfd.readouterr().err
    assert main(["average", f"--run={run}", "--last=2", "--allow_nonfinite"]) == 0
    command = [*scoring, "--long_lines=cut", "--checkpoint=49"]
    assert main([*command, f"--run={run}", "--allow_nonfinite"]) == 0
    assert "nan" in capfd.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        ["translate", "--input=in"],
        ["evaluate", "--source=in", "--reference=out"],
        ["backtranslate", "--input=in", "--output=made"],
        ["score", "--source=in", "--target=in"],
    ],
    ids=lambda command: command[0],
)
def test_dtype_and_quantization_reach_the_model(command, tiny_run, monkeypatch, capfd):
    def load(run, loading, **options):
        raise UserError(f"loaded in {loading.dtype}, {loading.quantization}")

    monkeypatch.setattr(Translator, "load", load)
    monkeypatch.setattr(Scorer, "load", load)
    write_lines("in", LINES)
    write_lines("out", LINES)
    flags = {(): "None, None", ("--dtype=bfloat16",): "bfloat16, None"}
    if command[0] != "score":
        flags[("--quantization=int8",)] = "None, int8"
    for given, said in flags.items():
        assert main([*command, f"--run={tiny_run}", *given]) == 2
        assert f"loaded in {said}" in capfd.readouterr().err, command


@pytest.fixture
def untrained(tmp_path):
    save_config(Config(), tmp_path / "config.json")
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--then=x", "--alignments=pieces"], "--then joins alignments of words"),
        (["--n_best=2", "--token_scores"], "or give --json instead"),
        (["--resume"], "--resume continues an output file"),
        (["--overwrite"], "--overwrite replaces an output file"),
        (["--resume", "--overwrite", "--output=x"], "--resume and --overwrite exclude each other"),
    ],
)
def test_flags_that_exclude_each_other(untrained, capfd, monkeypatch, flags, words):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b""), encoding="ascii"))
    assert main(["translate", f"--run={untrained}", *flags]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("error: ") and words in err


def test_surplus_constraints_are_counted_before_the_run_is_loaded(untrained, capfd):
    write_lines("in", ["a", "b", "c"])
    for flag, count in (("prefix", 4), ("required", 2)):
        write_lines("more", ["x"] * count)
        assert main(["translate", f"--run={untrained}", "--input=in", f"--{flag}=more"]) == 2
        assert f"--{flag}=more has {count} lines, but --input=in has 3" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--target=a"], "--source is missing"),
        (["--source=-", "--target=-"], "only one of --source and --target"),
        (["--source=a", "--target=gone"], "input gone does not exist"),
        (["--source=a"], "--target is required"),
    ],
)
def test_what_score_refuses(untrained, capfd, flags, words):
    write_lines("a", ["x"])
    assert main(["score", f"--run={untrained}", *flags]) == 2
    assert words in capfd.readouterr().err


def test_an_output_that_score_cannot_write_costs_one_message(tiny_run, tmp_path, capfd, monkeypatch):
    """A read-only folder before the run is loaded; a full disk with the file."""
    write_lines("a", ["ba do"])
    score = ["score", f"--run={tiny_run}", "--source=a", "--target=a", "--output=out"]
    same = ["score", f"--run={tiny_run}", "--source=a", "--target=a"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        patch.setattr(Scorer, "load", pytest.fail)
        assert main(score) == 2
        assert capfd.readouterr().err.startswith(
            "error: output folder . cannot be written to: it is read-only"
        )

    class Full(io.FileIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lines_module, "open_locked", lambda path: Full(path, "w+"))
    assert main(score) == 2
    told = capfd.readouterr().err
    assert told.startswith("error: out.partial: No space left on device; free some space")
    assert told.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert main(same) == 0  # to standard output


def test_a_language_model_has_no_source(tmp_path, capfd):
    config = Config(
        data=DataConfig(source_language=""),
        model=ModelConfig(architecture="decoder_only", num_encoder_layers=0),
    )
    save_config(config, tmp_path / "config.json")
    assert main(["score", f"--run={tmp_path}", "--source=a", "--target=a"]) == 2
    assert "scores --target without a source; leave out --source" in capfd.readouterr().err


def test_two_runs_in_a_row_and_one_that_does_not_follow(tiny_run, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    then = tmp_path / "then"
    shutil.copytree(tiny_run, then)
    config = read_config(tiny_run / "config.json")
    save_config(
        config.replace({"data.source_language": "yy", "data.target_language": "zz"}), then / "config.json"
    )
    lines = ["ba do", "", "gu fi. Ka lo!", "mi nu"]
    write_lines("in", lines)
    command = ["translate", f"--run={tiny_run}", f"--then={then}@best", "--input=in"]
    whole = [*command, "--output=out", "--json", "--window=2"]
    assert main(whole) == 0
    first, second = (Translator.load(run, warn=lambda message: None) for run in (tiny_run, then))
    found = first.translate(lines, then=second, annotations=Annotations(alignments="words"))
    described = list(map(json.loads, read_lines("out")))
    assert [one["text"] for one in described] == [one.text for one in found] and found[0].tokens
    assert described[0]["score"] == pytest.approx(found[0].score, abs=1e-4) != 0
    assert described[0]["alignment"] == [list(pair) for pair in found[0].alignment]
    Path("out").rename("whole")
    write, written = ResumableOutput.write, list[int]()

    def write_three(self, lines):
        written.append(1)
        if len(written) > 3:
            raise KeyboardInterrupt
        write(self, lines)

    with monkeypatch.context() as patch:
        patch.setattr(ResumableOutput, "write", write_three)
        assert main(whole) == 130
    assert "holds the output of the first 2 lines" in capfd.readouterr().err
    with monkeypatch.context() as patch:  # on another kind of device
        patch.setattr("flaxformer_mt.translation.search_backend.default_device_kind", lambda: "another")
        assert main([*whole, "--resume"]) == 0
    assert Path("out").read_bytes() == Path("whole").read_bytes()
    assert main(command) == 0
    assert capfd.readouterr().out.split("\n")[:-1] == [one.text for one in found]
    for flags, words in (
        ([f"--then={tiny_run}"], "the second xx-yy, which leads in no way"),
        ([f"--then={then}", "--target_language=qq"], "to qq in no way"),
        (["--then=absent"], "absent"),
    ):
        assert main(["translate", f"--run={tiny_run}", "--input=in", *flags]) == 2
        assert words in capfd.readouterr().err


def test_a_model_of_several_languages_is_told_the_target(two_way_run, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("in").write_text("ba do\n\nfi\n")
    Path("tagged").write_text(">>yy<< ba do\n\n>>yy<< fi\n")
    run = f"--run={two_way_run}"
    unknown = "--target_language is zz, but this model translates to yy and xx (xx-yy, yy-xx)"
    missing = (
        "this model translates to yy and xx; give --target_language=yy, or begin each line with its tag, as "
        "in >>yy<< (line 1 does not)"
    )
    for command, files in (("translate", ["--input=in"]), ("score", ["--source=in", "--target=in"])):
        for flags, message in ((["--target_language=zz"], unknown), ([], missing)):
            assert main([command, run, *files, *flags]) == 2
            assert capfd.readouterr().err == f"error: {message}\n"
    outputs = []
    for flags in (["--input=in", "--target_language=yy"], ["--input=tagged"]):
        assert main(["translate", run, "--scores", *flags]) == 0
        outputs.append(capfd.readouterr().out)
    assert outputs[0] == outputs[1] and outputs[0].count("\n") == 3
