"""A run directory belongs to one config and one training: what may change, what is refused, and its lock."""

import errno
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import typing
import warnings
from typing import Any

import pytest

from flaxformer_mt.config import Config
from flaxformer_mt.config.files import flatten, read_config, save_config
from flaxformer_mt.errors import FlaxformerWarning, UserError
from flaxformer_mt.runs.run_directory import (
    lock_run,
    open_run,
    read_final_report,
    read_report,
    sweep_run,
    write_report,
)


def test_a_new_directory_gets_the_config(tmp_path):
    config = Config().replace({"seed": 7})
    open_run(tmp_path / "a" / "b", config)
    assert read_config(tmp_path / "a" / "b" / "config.json") == config
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["config.json"]
    open_run(tmp_path / "a" / "b", config)  # the same again is no contradiction


def test_another_config_is_refused_with_every_difference(tmp_path):
    open_run(tmp_path, Config())
    (tmp_path / "checkpoints" / "40").mkdir(parents=True)
    other = Config().replace({"model.ffn_dim": 1024, "optim.b2": 0.999})
    with pytest.raises(UserError) as error:
        open_run(tmp_path, other)
    lines = str(error.value).split("\n")
    assert str(tmp_path) in lines[0]
    differences = [line.strip() for line in lines[1:-1]]
    assert differences == ["model.ffn_dim: 2048 -> 1024", "optim.b2: 0.98 -> 0.999"]
    assert "--run=" in lines[-1]
    assert read_config(tmp_path / "config.json") == Config()  # nothing was written


# The fields that may change when a run is resumed, by section.
FREE = {
    f"{section}.{name}"
    for section, names in {
        "data": "cache_dir",
        "parallel": "backend data fsdp tensor",
        "model": "remat attention scan_layers",
        "train": "peak_flops bleu_tokenize log_every tensorboard trackers keep_checkpoints loss_chunk_tokens "
        "checkpoint_every evaluate_every patience steps compile_ahead",
        "search": "method length_penalty_kind stopping length_bound suppress batch_tokens top_p min_p mbr "
        "mbr_samples rerank rerank_weight beam_size diversity_groups top_k seed no_repeat_ngram "
        "min_length_offset max_length_offset length_penalty coverage_penalty patience diversity_strength "
        "temperature min_length_ratio max_length_ratio",
    }.items()
    for name in names.split()
}


@pytest.mark.parametrize("name", flatten(Config()))
@pytest.mark.filterwarnings("ignore::flaxformer_mt.FlaxformerWarning")
def test_only_what_training_can_go_on_with_may_change(name, tmp_path):
    """Every field of the config, one by one: free or refused by its name."""
    old = flatten(Config())[name]
    if isinstance(old, bool):
        value = not old
    elif isinstance(old, int | float):
        value = old + 1
    elif old is None:
        endings = {"rate": 0.25, "weight": 0.25, "norm": True}
        value = next((value for ending, value in endings.items() if name.endswith(ending)), 32)
    elif isinstance(old, tuple):
        others = {"data.weights": [1.0], "data.stages": [{"name": "a"}], "train.trackers": ["wandb"]}
        value = others.get(name, ["a"])
    else:
        value = another_word(name, old)
    new = Config().replace({name: value})
    open_run(tmp_path, Config())
    (tmp_path / "checkpoints" / "40").mkdir(parents=True)
    if name in FREE:
        open_run(tmp_path, new)
        assert read_config(tmp_path / "config.json") == new
    else:
        with pytest.raises(UserError, match=rf"\n  {name}: "):
            open_run(tmp_path, new)


def another_word(name: str, old: str) -> str:
    kind: Any = Config
    for part in name.split("."):
        kind = typing.get_type_hints(kind)[part]
    if typing.get_origin(kind) is not typing.Literal:
        return "text"
    return next(word for word in typing.get_args(kind) if word != old)


@pytest.mark.parametrize(
    ("schedule", "steps", "allowed"),
    [
        ("noam", 200, True),
        ("inverse_sqrt", 200, True),
        ("constant", 200, True),
        ("cosine", 200, False),  # its learning rates would have been others all along
        ("linear", 200, False),
        ("linear", 90, False),
        ("inverse_sqrt", 80, True),
        ("inverse_sqrt", 79, False),  # steps that were made cannot be unmade
    ],
)
@pytest.mark.filterwarnings("ignore::flaxformer_mt.FlaxformerWarning")
def test_a_run_may_end_elsewhere_where_its_schedule_has_no_end(schedule, steps, allowed, tmp_path):
    config = Config().replace({"optim.schedule": schedule, "train.steps": 100})
    open_run(tmp_path, config)
    (tmp_path / "checkpoints" / "80").mkdir(parents=True)
    longer = config.replace({"train.steps": steps})
    if allowed:
        open_run(tmp_path, longer)
        assert read_config(tmp_path / "config.json").train.steps == steps
    else:
        (tmp_path / "checkpoints" / "40").mkdir(parents=True)
        with pytest.raises(UserError, match=f"train.steps: 100 -> {steps} \\(") as error:
            open_run(tmp_path, longer)
        line, remedies = str(error.value).split("\n")[1:]
        reason = f"optim.schedule={schedule} depend on train.steps" if steps > 100 else "cannot be undone"
        assert reason in line
        # how to go on: the parameters become the start of another run
        assert f"train --init={tmp_path} --run=NEW --config.train.steps={steps}" in remedies


def test_the_command_of_the_remedy_gives_the_new_values(tmp_path):
    """As the command line reads it: texts, lists and truth values."""
    from flaxformer_mt.commands.flag_parser import parse_flags
    from flaxformer_mt.commands.options import ShowOptions

    open_run(tmp_path, Config())
    (tmp_path / "checkpoints" / "40").mkdir(parents=True)
    values = {
        "data.dataset": "parallel_text@a b,parallel_text@c",
        "data.weights": (1.0, 2.5),
        "optim.b2": 0.9,
    }
    new = Config().replace({**values, "optim.freeze": ("*/bias", "x"), "train.log_accuracy": True})
    with pytest.raises(UserError) as error:
        open_run(tmp_path, new)
    words = shlex.split(str(error.value).rpartition(" train --init=")[2])
    flags = [word for word in words if word.startswith("--config.")]
    (tmp_path / "config.py").write_text(
        "from flaxformer_mt.config import Config\n\n\ndef get_config():\n    return Config()\n"
    )
    options = parse_flags(ShowOptions, [f"--config={tmp_path / 'config.py'}", *flags], prog="show")
    assert options.config == new and len(flags) == 5


def test_a_run_without_updates_takes_any_config(tmp_path):
    open_run(tmp_path, Config())
    other = Config().replace({"vocab.size": 99, "train.steps": 1})
    open_run(tmp_path, other)
    assert read_config(tmp_path / "config.json") == other


def test_a_change_is_recorded_and_what_it_changes_is_said(tmp_path):
    history = tmp_path / "history.jsonl"
    open_run(tmp_path, Config())
    untrained = Config().replace({"model.remat": "full", "train.patience": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_run(tmp_path, untrained)  # nothing has been trained yet
        (tmp_path / "checkpoints" / "70").mkdir(parents=True)
        free = untrained.replace({"train.log_every": 1})
        open_run(tmp_path, free)
        open_run(tmp_path, free)
    changed = free.replace({"train.patience": 3, "search.beam_size": 9})
    with pytest.warns(FlaxformerWarning) as caught:
        open_run(tmp_path, changed.replace({"train.keep_checkpoints": 2}))
    assert str(caught[0].message) == (
        f"{tmp_path} is resumed at step 70 with another config: train.patience: 1 -> 3 (training may stop at "
        "another step); search.beam_size: 4 -> 9 (later translations and their scores differ)"
    )
    records = [json.loads(line) for line in history.read_text(encoding="utf-8").split("\n") if line]
    assert [(record["step"], record["changed"]) for record in records] == [
        (0, {"model.remat": ["none", "full"], "train.patience": [0, 1]}),
        (70, {"train.log_every": [50, 1]}),
        (70, {"train.keep_checkpoints": [5, 2], "train.patience": [1, 3], "search.beam_size": [4, 9]}),
    ]
    assert all(record["time"] > 1.7e9 for record in records)


def test_a_run_that_stopped_early_goes_on_with_more_patience(tmp_path):
    config = Config().replace({"train.steps": 100, "train.patience": 3})
    open_run(tmp_path, config)
    cases = [(2, 100, True), (3, 100, True), (4, 100, False), (0, 100, False), (0, 50, True)]
    for patience, steps, complete in cases:
        new = config.replace({"train.patience": patience, "train.steps": steps})
        # With the patience of the run in its report: whatever the config has become since.
        for report in (
            {"step": 50, "stopped_early": True},
            {"step": 50, "stopped_early": True, "patience": 3},
        ):
            write_report(tmp_path, report)
            assert read_final_report(tmp_path, new) == (report if complete else None)
    write_report(tmp_path, {"step": 50, "stopped_early": False})
    assert read_final_report(tmp_path, config) is None


def test_checkpoints_without_their_config_are_not_trained_further(tmp_path):
    """`train --run=RUN` would go on with the default config, and write that into the run."""
    (tmp_path / "checkpoints" / "40").mkdir(parents=True)
    with pytest.raises(UserError, match="has checkpoints, but no config.json that says what they are; resto"):
        open_run(tmp_path, Config())
    assert not (tmp_path / "config.json").exists()


def test_places_that_cannot_be_a_run(tmp_path):
    file = tmp_path / "file"
    file.write_text("not a directory", encoding="utf-8")
    with pytest.raises(UserError, match="is a file, not a directory"):
        open_run(file, Config())
    with pytest.raises(UserError, match=r"cannot write to the run directory .*file/below"):
        open_run(file / "below", Config())
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="config.json is damaged"):
        open_run(tmp_path, Config())


def test_a_report_is_written_whole_and_read_back(tmp_path):
    assert read_report(tmp_path) is None
    report = {"step": 3, "stopped_early": False, "test": {"bleu": 1.5, "signature": "nrefs:1|ü"}}
    write_report(tmp_path, report)
    write_report(tmp_path, report | {"step": 4})
    assert read_report(tmp_path) == report | {"step": 4}
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_config_and_report_survive_a_loss_of_power(tmp_path, monkeypatch):
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    save_config(Config(), tmp_path / "config.json")
    write_report(tmp_path, {"step": 3})
    assert len(synced) == 4, "each file, and the folder that has its name"


@pytest.mark.parametrize("content", [b'{"step": 3', b"\xff\xfe", b"[]", b'{"step": 3}', b""])
def test_a_damaged_report_is_named_with_the_remedy(content, tmp_path):
    (tmp_path / "report.json").write_bytes(content)
    with pytest.raises(UserError, match=r"report\.json is damaged .*delete it"):
        read_report(tmp_path)


def test_what_killed_processes_left_in_a_run_is_removed(tmp_path):
    save_config(Config(), tmp_path / "config.json")
    (tmp_path / "vocab").mkdir()
    kept = ["config.json", "vocab/joint.model", "metrics.jsonl"]
    left = [
        ".config.json.01acfe50",
        ".report.json.01acfe50",
        "vocab/.joint.model.01acfe50",
        ".metrics.jsonl.new",
    ]
    for name in kept[1:] + left:
        (tmp_path / name).write_text("")
    sweep_run(tmp_path)
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert found == set(kept)


def test_every_free_field_is_a_field_and_is_tried_above():
    from flaxformer_mt.runs.run_directory import CHANGEABLE_FIELDS

    assert set(CHANGEABLE_FIELDS) == FREE <= set(flatten(Config()))


def test_odd_names_among_the_checkpoints_are_no_steps(tmp_path):
    config = Config().replace({"optim.schedule": "constant"})
    open_run(tmp_path, config)
    for name in ("0999999", "²", "1" * 30, "-5", "12a"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    open_run(tmp_path, config.replace({"train.steps": config.train.steps - 1}))
    assert read_config(tmp_path / "config.json").train.steps == config.train.steps - 1


OWNER = """
import sys
from pathlib import Path
from flaxformer_mt.runs.run_directory import lock_run
with lock_run(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_second_owner_is_refused_with_the_first_and_a_killed_one_holds_nothing(tmp_path):
    run = tmp_path / "runs" / "a"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout.readline() == "locked\n"
        for _ in range(2):
            with (
                pytest.raises(UserError, match=f"{run} is being trained by process {owner.pid} on .*--run="),
                lock_run(run),
            ):
                pass
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert (run / ".lock").exists()
        with lock_run(run):
            (run / "config.json").write_text("")
            with pytest.raises(UserError, match=f"by process {os.getpid()} on host"), lock_run(run):
                pass
    assert [path.name for path in run.iterdir()] == ["config.json"]


def test_a_run_that_writes_nothing_leaves_nothing(tmp_path):
    (tmp_path / "there").mkdir()
    for run in (tmp_path / "new" / "deep" / "run", tmp_path / "there"):
        with pytest.raises(ZeroDivisionError), lock_run(run):
            assert (run / ".lock").exists()
            raise ZeroDivisionError
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match="cannot write to the run directory .*file/run"),
        lock_run(tmp_path / "file" / "run"),
    ):
        pass


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(FlaxformerWarning, match="has no locks"), lock_run(tmp_path):
        pass
