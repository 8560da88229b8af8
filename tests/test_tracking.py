"""Tracking: what is recorded is valid, complete and not recorded twice; what is shown can be read."""

import io
import json
import math
import re
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_mt.config import Config
from flaxformer_mt.errors import FlaxformerWarning, UserError
from flaxformer_mt.tracking import (
    Sample,
    Tracker,
    format_duration,
    progress_display,
    read_metrics,
    tracking_services,
)
from flaxformer_mt.tracking import tracker as tracker_module
from flaxformer_mt.tracking.progress_display import WorkProgress, announce_if_slow, format_train_line
from flaxformer_mt.training.loop import fit


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def read_lines(self) -> list[str]:
        """What was shown, line by line, without the movements of the cursor and colors."""
        return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue()))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1.7e9 + self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    stopped = Clock()
    monkeypatch.setattr(tracker_module, "time", stopped)
    return stopped


def make_tracker(run_dir: Path, **options) -> Tracker:
    options = {"total_steps": 100, "tensorboard": False, "stream": io.StringIO()} | options
    return Tracker(run_dir, **options)


def read_events(run_dir: Path) -> list:
    """All events of all TensorBoard files, in the order of the files' start steps."""
    from tensorboardX.proto.event_pb2 import Event

    events = []
    files = sorted((run_dir / "tensorboard").iterdir(), key=lambda path: int(path.name.rsplit("-", 1)[1]))
    for path in files:
        data = path.read_bytes()
        while data:  # a record is its length, a checksum, the event, and another checksum
            (length,) = struct.unpack("<Q", data[:8])
            events.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return events


def test_each_log_is_one_line_of_json_with_null_for_numbers_that_are_not_finite(tmp_path, clock):
    run_dir, stream = tmp_path / "new" / "run", io.StringIO()
    kept = {"tokens": np.int64(7), "rate": jnp.float32(0.5), "note": "ü\u2028x"}
    lost = {"loss": math.nan, "norm": np.float32(math.inf), "low": -math.inf, "none": None}
    with make_tracker(run_dir, tensorboard=True, stream=stream) as tracker:
        tracker.log(50, "train", kept | lost)
        clock.now = 101.5
        tracker.log(50, "valid", {"bleu": 12.25})
        # another process reads what is there so far
        assert len(read_metrics(run_dir)) == 2
    first, second, end = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
    assert first.startswith('{"step": 50, "time": 1700000100.0, "split": "train", "tokens": 7, "rate": 0.5')
    expected = {"step": 50, "time": 1700000100.0, "split": "train", "note": "ü\u2028x"}
    assert json.loads(first) == expected | {"tokens": 7, "rate": 0.5} | dict.fromkeys(lost)
    assert json.loads(second) == {"step": 50, "time": 1700000101.5, "split": "valid", "bleu": 12.25}
    assert end == ""
    assert "loss nan" in stream.getvalue()
    tags = [value.tag for event in read_events(run_dir) for value in event.summary.value]
    assert tags == ["train/tokens", "train/rate", "valid/bleu"]


def test_resuming_removes_what_comes_again(tmp_path):
    with make_tracker(tmp_path) as tracker:
        for step in (10, 20, 30, 40):
            tracker.log(step, "train", {"loss": float(step)})
            tracker.log(step, "valid", {"bleu": float(step)})
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(whole[:4]) + b"\n" + whole[4][:-9])  # killed while writing step 30
    assert [record["step"] for record in read_metrics(tmp_path)] == [10, 10, 20, 20]
    stream = io.StringIO()
    with make_tracker(tmp_path, start_step=20, stream=stream) as tracker:
        tracker.log(30, "train", {"loss": 31.0})
    assert path.read_bytes().split(b"\n")[:4] == whole[:4]
    assert read_metrics(tmp_path)[4]["loss"] == 31.0
    assert "removed" not in stream.getvalue()
    with make_tracker(tmp_path, start_step=10) as tracker:
        kept = [(record["step"], record["split"]) for record in read_metrics(tmp_path)]
        assert kept == [(10, "train"), (10, "valid")]
    with make_tracker(tmp_path) as tracker:
        assert read_metrics(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    path.write_text('{"step": 1}\n{"step": 2}')  # a whole last line without its newline is kept
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]
    with make_tracker(tmp_path, start_step=5) as tracker:
        tracker.log(6, "train", {})
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 6]


def test_damaged_lines_are_named_when_read_and_counted_when_removed(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 1}\n{"st\n\xff\xfe\n[3]\n{"step": "4"}\n{"step": 5}\n'
    )
    with pytest.raises(UserError, match=r"metrics.jsonl, line 2 is damaged: .*remove the line"):
        read_metrics(tmp_path)
    stream = io.StringIO()
    with make_tracker(tmp_path, start_step=9, stream=stream):
        assert [record["step"] for record in read_metrics(tmp_path)] == [1, 5]
    assert "removed 4 unreadable lines" in stream.getvalue()
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/zero")
    with pytest.raises(UserError, match="damaged: it is not a file, but a pipe or a device; remove it"):
        make_tracker(tmp_path, start_step=9)
    with pytest.raises(UserError, match="metrics.jsonl does not exist; train in"):
        read_metrics(tmp_path / "elsewhere")


def test_tensorboard_has_the_scalars_and_is_told_what_to_forget(tmp_path):
    with pytest.raises(ZeroDivisionError), make_tracker(tmp_path, tensorboard=True) as tracker:
        tracker.log(10, "train", {"loss": 2.5, "note": "text"})
        tracker.log(10, "valid", {"bleu": 11, "chrf": None})
        _ = 1 / 0
    with pytest.raises(ValueError, match="closed file"):
        tracker.log(11, "train", {"loss": 1.0})
    with make_tracker(tmp_path, tensorboard=True, start_step=10) as tracker:
        tracker.log(20, "train", {"loss": 1.5})
    events = read_events(tmp_path)
    scalars = [
        (event.step, value.tag, value.simple_value) for event in events for value in event.summary.value
    ]
    assert scalars == [(10, "train/loss", 2.5), (10, "valid/bleu", 11.0), (20, "train/loss", 1.5)]
    starts = [event.step for event in events if event.HasField("session_log")]
    assert starts == [0, 11]  # TensorBoard forgets what it read of these steps and later


def test_without_tensorboard_it_is_not_imported(tmp_path):
    code = (
        "import sys, pathlib; from flaxformer_mt.tracking import Tracker\n"
        f"run = pathlib.Path({str(tmp_path)!r})\n"
        "with Tracker(run, total_steps=1, tensorboard=False, stream=sys.stderr) as tracker:\n"
        "    tracker.log(1, 'train', {})\n"
        "assert not {'tensorboardX', 'rich', 'tensorflow', 'torch', 'jax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert not (tmp_path / "tensorboard").exists()


def test_the_line_of_progress():
    values = {"loss": 3.4119, "learning_rate": 8.9e-4, "tokens_per_second": 5600.4, "padding": 0.0613}
    line = "step  1200/5000 | loss 3.412 | lr 8.9e-04 | 5,600 tokens/s | padding 6.1% | 12:31 left"
    assert format_train_line(1200, 5000, values | {"other": 1}, 751) == line
    shares = {"loss": 1.0, "perplexity": 2.718, "accuracy": 0.456}
    usage = {"utilization": 0.4312, "data_wait": 0.034, "model_flops_per_second": 1e15}
    for values, shown in (
        (shares, "loss 1.000 | perplexity 2.72 | accuracy 45.6%"),
        (usage, "MFU 43.1% | data wait 3.4%"),
        ({"utilization": 0.5, "data_wait": 0.01, "loss": None, "padding": "?"}, "MFU 50.0%"),
    ):
        assert format_train_line(1, 9, values, math.nan) == f"step     1/9 | {shown}"


def test_durations():
    minutes = {0: "0:00", 59.6: "1:00", 751: "12:31", 3599.4: "59:59"}
    hours = {3599.6: "1 h 00 min", 11_130: "3 h 05 min", 172_799: "47 h 59 min"}
    expected = minutes | hours | {172_800: "2 d 00 h", 190_000: "2 d 04 h"}
    assert {seconds: format_duration(seconds) for seconds in expected} == expected


def test_time_left(tmp_path, clock):
    """From ten steps on, by the rate of the last lines, without compilation and what came before a stop."""
    stream = io.StringIO()
    with make_tracker(tmp_path, total_steps=1500, start_step=500, stream=stream) as tracker:
        clock.now += 170  # all programs are compiled
        tracker.start_clock()
        clock.now += 10  # one second a step
        tracker.log(510, "train", {})
        tracker.log(510, "valid", {"bleu": 1.0})
        for step in range(520, 1010, 10):
            clock.now += 5  # half a second
            tracker.log(step, "train", {})
    lines = stream.getvalue().split("\n")
    assert lines[0] == "step   510/1500 | 16:30 left"
    assert lines[2] == "step   520/1500 | 8:10 left"
    assert lines[-2] == "step  1000/1500 | 4:10 left"
    stream = io.StringIO()
    with make_tracker(tmp_path, stream=stream) as tracker:
        for step in (1, 9):  # the first step waits for a compiler
            clock.now += 25
            tracker.log(step, "train", {})
    assert stream.getvalue() == "step     1/100\nstep     9/100\n"


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_without_a_cursor_that_moves_each_line_stands(tmp_path, monkeypatch, kind):
    """In a file, and on a simple terminal."""
    monkeypatch.setenv("TERM", "dumb")
    stream = kind()
    tracker = make_tracker(tmp_path, stream=stream)
    tracker.message("begins [bold]here[/bold]")
    tracker.log(100, "train", {"loss": 1.0})
    tracker.log(100, "valid", {"loss": 2.0, "bleu": 31.204, "chrf": 55.1})
    tracker.log(100, "epoch", {"epoch": 3, "loss": 1.5})
    tracker.close()
    tracker.close()
    assert stream.getvalue().split("\n") == [
        "begins [bold]here[/bold]",
        "step   100/100 | loss 1.000 | 0:00 left",
        "valid @100 | loss 2.000 | BLEU 31.20 | chrF 55.10",
        "epoch 3 @100 | loss 1.500",
        "",
    ]


def test_a_terminal_shows_one_line_written_over_and_messages_above_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    stream, message = Terminal(), "a message with [brackets] and :smile: " + "long " * 40
    with make_tracker(tmp_path, stream=stream) as tracker:
        tracker.log(10, "train", {"loss": 5.0})
        tracker.message(message)
        tracker.log_samples(10, [Sample("wort " * 40, "", "word")])
        print("for programs")
        tracker.log(20, "train", {"loss": 4.0})
        tracker.log(20, "valid", {"bleu": 3.0})
    shown = stream.getvalue()
    assert "\x1b[2K" in shown  # lines are erased
    assert message in shown.replace("\n", "")
    assert "valid @20 | BLEU 3.00" in shown
    assert shown.index("loss 5.000") < shown.index("a message") < shown.index("loss 4.000")
    assert shown.rstrip("\n\x1b[?25h").endswith("left")
    (translation,) = [line for line in stream.read_lines() if "wort" in line]
    assert len(translation) == 120 and translation.endswith("…")
    assert capsys.readouterr().out == "for programs\n"


def test_a_narrow_terminal_keeps_the_bar_and_the_time_left(tmp_path, clock, monkeypatch):
    values = {"loss": 3.412, "learning_rate": 8.9e-4, "tokens_per_second": 5600.0, "padding": 0.061}
    values |= {"accuracy": 0.5, "utilization": 0.431, "data_wait": 0.034}
    monkeypatch.setenv("TERM", "xterm-256color")
    all_values = "accuracy 50.0% | lr 8.9e-04 | 5,600 tokens/s | padding 6.1% | MFU 43.1% | data wait 3.4%"
    for columns, shown in [
        (60, ""),
        (80, " | 5,600 tokens/s"),
        (100, " | 5,600 tokens/s | MFU 43.1%"),
        (200, f" | {all_values}"),
    ]:
        monkeypatch.setenv("COLUMNS", str(columns))
        stream = Terminal()
        with make_tracker(tmp_path, total_steps=50_000, stream=stream) as tracker:
            clock.now += 60
            tracker.log(1200, "train", values)
        *_, line = [line.rstrip() for line in stream.read_lines() if "step" in line]
        assert line == f"{'━' * 16} step  1200/50000 | loss 3.412{shown} | 40:40 left"


def test_long_silence_ends_with_the_number_of_the_step(tmp_path, clock):
    stream = io.StringIO()
    with make_tracker(tmp_path, total_steps=100, stream=stream) as tracker:
        tracker.end_silence(6)
        clock.now += 21.0
        tracker.end_silence(7)
        tracker.end_silence(8)
        clock.now += 10.0
        tracker.log(50, "train", {"loss": 1.0})
        clock.now += 21.0
        tracker.end_silence(60)
    assert stream.getvalue().split("\n")[:3] == [
        "step     7/100",
        "step    50/100 | loss 1.000 | 0:31 left",
        "step    60/100 | 0:25 left",
    ]
    assert [record["step"] for record in read_metrics(tmp_path)] == [50]


def test_slow_work_is_announced_and_on_a_terminal_a_sign_moves(tmp_path, monkeypatch):
    said: list[str] = []
    with announce_if_slow("quick", said.append):
        pass
    assert said == []
    monkeypatch.setattr(progress_display, "_SLOW", 0.0)
    monkeypatch.setattr(progress_display, "_SIGN", 0.02)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    for stream in (io.StringIO(), Terminal()):
        with make_tracker(tmp_path, stream=stream) as tracker, tracker.busy("compiling (2 of 6 programs)"):
            time.sleep(0.3)
        if stream.isatty():
            signs = set(re.findall(r"programs\) ([-|/\\])", stream.getvalue()))
            assert {"|", "/", "-"} <= signs and "step     0/100" in stream.read_lines()[-2]
        else:
            assert stream.getvalue() == "compiling (2 of 6 programs)\n"


def test_a_message_is_one_write_since_threads_share_the_stream():
    writes: list[str] = []
    stream = SimpleNamespace(isatty=lambda: False, write=writes.append, flush=lambda: None)
    progress_display.make_display(stream, total=None).say("compiling")
    assert writes == ["compiling\n"]


def test_tensorboard_has_the_config_and_translations_of_each_evaluation(tmp_path):
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    fields = {"seed": 3, "optim.learning_rate": 0.5, "data.weights": (1.0, 2.5), "model.key_dim": None}
    fields["a|b"] = "x|y"
    samples = [Sample(f"source {n}", f"reference {n}", f"a | b {n}") for n in range(3)]
    stream = io.StringIO()
    with make_tracker(tmp_path, tensorboard=True, stream=stream) as tracker:
        tracker.log_config(fields)
        tracker.log_samples(100, samples)
        tracker.log_samples(200, [])
    values = {
        value.tag: (event.step, value) for event in read_events(tmp_path) for value in event.summary.value
    }
    step, config = values["config/text_summary"]
    text = config.tensor.string_val[0].decode()
    assert step == 0
    for row in ("| seed | 3 |", "| data.weights | 1.0,2.5 |", "| model.key_dim | None |", r"x\|y"):
        assert row in text
    start = values["_hparams_/session_start_info"][1].metadata.plugin_data.content
    hparams = HParamsPluginData.FromString(start).session_start_info.hparams
    assert set(hparams) == set(fields)
    assert hparams["optim.learning_rate"].number_value == 0.5
    assert hparams["data.weights"].string_value == "1.0,2.5"
    assert "_hparams_/session_end_info" in values
    step, shown = values["valid/translations/text_summary"]
    table = shown.tensor.string_val[0].decode().split("\n")
    assert step == 100 and table[2] == r"| source 0 | reference 0 | a \| b 0 |" and len(table) == 5
    assert stream.getvalue().split("\n") == [*(f"  source {n} -> a | b {n}" for n in range(3)), ""]


def test_without_a_directory_nothing_is_recorded_and_shown(clock):
    """Of several processes, only one records, whatever it is given."""
    stream = io.StringIO()
    with Tracker(None, total_steps=9, trackers=["wandb"], stream=stream) as tracker:
        tracker.log_config({"seed": 1})
        tracker.log(3, "train", {"loss": 1.0, "time": 0})
        tracker.log_samples(3, [Sample("a", "b", "c")])
        tracker.message("said")
        tracker.start_clock()
        clock.now += 1e9
        with tracker.busy("compiling"):
            tracker.end_silence(4)
    assert stream.getvalue() == ""


class Failing:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, step, values):
        self.steps.append(step)
        if step > 10:
            raise ConnectionError("no route")

    def close(self, *, failed):
        raise AssertionError("it was left out")


def test_training_goes_on_without_a_service_that_fails(tmp_path, monkeypatch):
    service = Failing()
    monkeypatch.setattr(tracker_module, "open_service", lambda name, run_dir: service)
    with make_tracker(tmp_path, trackers=["wandb"]) as tracker:
        tracker.log(10, "train", {"loss": 1.0})
        with pytest.warns(FlaxformerWarning, match="wandb gets nothing more .* ConnectionError: no route"):
            tracker.log(20, "train", {"loss": 1.0})
        tracker.log(30, "train", {"loss": 1.0})
    assert service.steps == [10, 20] and len(read_metrics(tmp_path)) == 3


def test_a_service_whose_package_is_missing_is_named_with_its_extra(tmp_path, monkeypatch):
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, f"flaxformer_mt.tracking.{name}_run", raising=False)
        with pytest.raises(UserError, match=f"train.trackers={name} needs the package {name}.*pip install"):
            make_tracker(tmp_path, trackers=[name])


def record_two_processes(run_dir: Path, name: str, page: Path) -> None:
    """What a process that is interrupted after step 20, and the one that resumes it at step 10, record."""
    fields = {"seed": 3, "model.key_dim": None, "data.weights": (1.0, 2.5)}
    sample = Sample("ein Buch", "a book", "one <b> | book")
    with pytest.raises(KeyboardInterrupt), make_tracker(run_dir, trackers=[name]) as tracker:
        tracker.log_config(fields)
        tracker.log(10, "train", {"loss": 3.0, "note": "x", "bad": math.nan})
        tracker.log(20, "train", {"loss": 2.0})
        raise KeyboardInterrupt
    with make_tracker(run_dir, trackers=[name], start_step=10) as tracker:
        tracker.log_config(fields | {"seed": 4})
        tracker.log(20, "train", {"loss": 2.5})
        tracker.log(20, "valid", {"bleu": 30.0})
        tracker.log_samples(20, [sample])
        tracker.log_report(page)


def read_leveldb_log(data: bytes) -> list[bytes]:
    """The records of a log in LevelDB's format, with wandb's header of 7 bytes in the first block."""
    records, at, record = [], 7, b""
    while at + 7 < len(data):
        if 32_768 - at % 32_768 < 7:
            at += 32_768 - at % 32_768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(record)
            record = b""
    return records


@pytest.mark.filterwarnings("error::flaxformer_mt.errors.FlaxformerWarning", "ignore")  # those of mlflow
def test_mlflow_has_numbers_config_translations_and_the_report(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    page = tmp_path / "report.html"
    page.write_text("<p>x</p>")
    record_two_processes(tmp_path / "my_run", "mlflow", page)
    (run,) = mlflow.search_runs(output_format="list", search_all_experiments=True)
    assert (run.info.run_name, run.info.status) == ("my_run", "FINISHED")
    assert run.data.metrics == {"train/loss": 2.5, "valid/bleu": 30.0}
    assert run.data.params == {"seed": "3", "model.key_dim": "None", "data.weights": "(1.0, 2.5)"}
    client = mlflow.MlflowClient()
    assert {one.path for one in client.list_artifacts(run.info.run_id)} == {
        *("config.json", "report.html", "translations.json")
    }
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "translations.json")).read_text())
    assert table == {
        "columns": ["step", "source", "reference", "translation"],
        "data": [[20, "ein Buch", "a book", "one <b> | book"]],
    }


@pytest.mark.filterwarnings("error::flaxformer_mt.errors.FlaxformerWarning", "ignore")  # those of wandb
def test_wandb_has_numbers_config_translations_and_the_report(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs the extra wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    page = tmp_path / "report.html"
    page.write_text("<p>x</p>")
    record_two_processes(tmp_path / "my_run", "wandb", page)
    logs = sorted((tmp_path / "my_run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(logs) == 2 and len({log.stem for log in logs}) == 1, "both belong to one run"
    deadline, records = time.monotonic() + 30, []
    while not any(record.HasField("exit") for record in records) and time.monotonic() < deadline:
        records = [
            wandb_internal_pb2.Record.FromString(data) for data in read_leveldb_log(logs[1].read_bytes())
        ]
    records += [wandb_internal_pb2.Record.FromString(data) for data in read_leveldb_log(logs[0].read_bytes())]
    assert {record.run.display_name for record in records if record.run.run_id} == {"my_run"}
    rows = [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.history.item
    ]
    losses = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert sorted(losses) == [(10, 3.0), (20, 2.0), (20, 2.5)]
    table = next(row for row in rows if any("translations" in key for key in row))
    assert table["step"] == 20
    assert any(record.artifact.type == "report" for record in records)
    stored = [json.loads(path.read_text()) for path in (tmp_path / "my_run").rglob("*.table.json")]
    assert stored[0]["data"] == [["ein Buch", "a book", "one <b> | book"]]


def test_a_service_that_cannot_begin_is_one_line_before_the_data_are_read(tmp_path, monkeypatch):
    """As wandb and mlflow for a user without a home folder."""
    (tmp_path / "wandb.py").write_text("raise RuntimeError('Could not determine home directory.')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("wandb", "flaxformer_mt.tracking.wandb_run"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    message = "^train.trackers=wandb cannot begin: RuntimeError: Could not determine home directory.; correct"
    config = Config().replace({"train.trackers": ("wandb",), "data.dataset": "parallel_text@absent"})
    with pytest.raises(UserError, match=message):
        fit(config, tmp_path / "run")

    class Refusing:
        def __init__(self, run_dir, identity):
            raise ValueError("no login\nmore")

    monkeypatch.setattr(tracking_services, "import_service", lambda name: Refusing)
    with pytest.raises(UserError, match="^train.trackers=mlflow cannot begin: ValueError: no login; correct"):
        tracking_services.open_service("mlflow", tmp_path)


def test_a_file_receives_lines_and_a_terminal_one_bar_that_disappears(monkeypatch):
    """Every few seconds, with rate and time left; the first 2,000 were there before."""
    monkeypatch.setenv("TERM", "xterm")
    for stream in (None, io.StringIO(), Terminal()):
        now = [0.0]
        with WorkProgress(stream, clock=lambda now=now: now[0]).part("counting", total=10_000) as count:
            for now[0], items in ((0.0, 2000), (1.0, 500), (10.0, 1500), (11.0, 100), (20.0, 1900)):
                count(items)
        lines = [
            "4,000/10,000 pairs | 200 pairs/s | 0:30 left",
            "6,000/10,000 pairs | 200 pairs/s | 0:20 left",
        ]
        if isinstance(stream, Terminal):
            assert all(f"counting | {line}" in stream.getvalue() for line in lines)
            assert stream.getvalue().endswith("\x1b[2K")  # the last thing is that the line is erased
        elif stream:
            assert stream.getvalue().split("\n") == [*lines, ""]
