"""`fit` end to end on a made-up language: it learns, writes its directory, and survives what kills it."""

import functools
import json
import math
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from pytest import raises, warns
from tiny_experiment import change

from flaxformer_mt import define_scorer
from flaxformer_mt.config import Config, NoiseConfig, StageConfig
from flaxformer_mt.config.files import read_config, save_config
from flaxformer_mt.errors import FlaxformerWarning, TrainingInterrupted, UserError
from flaxformer_mt.model import init_params, make_model
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.runs.run_directory import lock_run
from flaxformer_mt.scoring import metrics
from flaxformer_mt.tracking import read_metrics
from flaxformer_mt.training import loop, setup
from flaxformer_mt.training.checkpoint_trees import to_trees
from flaxformer_mt.training.final_report import describe_report
from flaxformer_mt.training.loop import fit
from flaxformer_mt.training.resume_position import TrainProgress
from flaxformer_mt.training.state import init_state
from flaxformer_mt.training.train_log import TrainingLog
from flaxformer_mt.training.validation import Validation
from flaxformer_mt.vocab import load_vocabs

# What a library warns of reaches the user's terminal.
pytestmark = pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")

ROOT = Path(__file__).resolve().parents[2]

# What two runs of the same config may differ in: how long things took.
CLOCKS = {"time", "seconds", "tokens_per_second", "steps_per_second", "data_wait", "model_flops_per_second"}
CLOCKS |= {"utilization"}

REPORT_KEYS = {
    *("step", "stopped_early", "patience", "train_seconds", "target_tokens", "parameters"),
    *("hardware", "finished", "version", "command", "python", "best", "data", "test"),
}

# The interruption at update 3 is at the border of the stages, which end before train.steps.
STAGES = (
    StageConfig("first", ("parallel_text 1",), "steps 3"),
    StageConfig("second", ("parallel_text 1",), "steps 1", noise=NoiseConfig(upper_case=0.2, typos=0.5)),
)


@pytest.fixture(scope="module")
def base(tiny_config) -> Config:
    return tiny_config


@pytest.fixture(scope="module")
def reference(tiny_run, tiny_report) -> tuple[Path, dict[str, Any]]:
    return tiny_run, tiny_report


# The score is the length of the translation; dies when it is asked for the third time.
KIWI = """
import json, sys
how, asked = sys.argv[1] if sys.argv[1:] else "", 0
if how == "no_model": sys.exit("no_model is no model")
for line in sys.stdin:
    row = json.loads(line)
    if how == "dies" and asked == 2: sys.exit("out of memory")
    assert row["reference"]
    print(len(row["hypothesis"]), flush=True)
    asked += row["left"] == 0
"""


def load_state(run_dir: Path, step: int | str) -> dict[str, Any]:
    """All arrays of a checkpoint, by the names that the trainer gives them."""
    config = read_config(run_dir / "config.json")
    vocabs = load_vocabs(run_dir / "vocab")
    model = make_model(config.model, source_size=vocabs.source.size, target_size=vocabs.target.size)
    shapes = jax.eval_shape(lambda: to_trees(init_state(init_params(model, jax.random.key(0)), config.optim)))
    return Checkpoints(run_dir).restore(step, shapes)[0]


def assert_same_run(run_dir: Path, expected_dir: Path) -> None:
    """Final arrays are equal bit for bit, and so is what was logged, apart from the clocks."""
    left, right = load_state(run_dir, "last"), load_state(expected_dir, "last")
    assert {"params", "opt_state", "counters"} <= set(left)
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (path, a), b in zip(jax.tree.leaves_with_path(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)
    assert without_clocks(read_metrics(run_dir)) == without_clocks(read_metrics(expected_dir))
    for name in ("test.hypothesis", "test.source", "test.reference"):
        left, right = (folder / "translations" / name for folder in (run_dir, expected_dir))
        assert left.read_bytes() == right.read_bytes()


def without_clocks(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name not in CLOCKS} for record in records]


@pytest.fixture
def at_step(monkeypatch):
    """Calls functions after the updates that the steps number: at_step({3: stop})."""

    add = TrainingLog.add

    def install(actions: dict[int, Any]) -> None:
        def add_and_act(self: TrainingLog, step: int, *arguments: Any) -> None:
            add(self, step, *arguments)
            if step in actions:
                actions[step]()

        monkeypatch.setattr(TrainingLog, "add", add_and_act)

    return install


def test_training_learns_and_writes_its_directory(base, reference):
    run_dir, report = reference
    assert {path.name for path in run_dir.iterdir()} == {
        *("config.json", "vocab", "checkpoints", "metrics.jsonl", "translations", "report.json"),
        "report.html",
    }
    assert read_config(run_dir / "config.json") == base
    assert Checkpoints(run_dir).steps() == [16, 32, 48]
    records = read_metrics(run_dir)
    train = [record for record in records if record["split"] == "train"]
    valid = [record for record in records if record["split"] == "valid"]
    assert [record["step"] for record in train] == [20, 40, 48]
    assert [record["step"] for record in valid] == [32, 48]
    assert train[-1]["loss"] < 0.9 * train[0]["loss"]
    assert valid[-1]["loss"] < valid[0]["loss"]
    assert all(0 <= record["padding"] < 1 and record["skipped"] == 0 for record in train)
    assert train[0]["learning_rate"] == pytest.approx(0.02 * (4 / 20) ** 0.5)
    assert {"loss", "perplexity", "accuracy", "bleu", "chrf"} <= set(valid[0])
    assert valid[0]["perplexity"] == pytest.approx(math.exp(valid[0]["loss"]))
    assert sum(record["target_tokens"] for record in train) == report["target_tokens"]
    assert all(0 <= record["data_wait"] <= 1 and record["model_flops_per_second"] > 0 for record in train)
    assert not any({"utilization", "device_memory_gib"} & set(record) for record in train)  # on a CPU


def test_the_report_says_what_was_documented(reference):
    run_dir, report = reference
    assert set(report) == REPORT_KEYS
    assert json.loads((run_dir / "report.json").read_text(encoding="utf-8")) == report
    assert (report["step"], report["stopped_early"]) == (48, False)
    assert report["hardware"].endswith(" cores)")
    state = load_state(run_dir, 48)
    assert report["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    test = report["test"]
    assert (test["sentences"], test["beam_size"], test["method"]) == (6, 2, "beam")
    assert {"bleu", "chrf", "signature"} <= set(test)
    hypotheses = (run_dir / "translations" / "test.hypothesis").read_text(encoding="utf-8").split("\n")
    assert len(hypotheses) == 7 and hypotheses.pop() == ""
    assert test["chrf"] > 0 and len(set(hypotheses)) > 2, "lines that are empty alike"
    best = max((r for r in read_metrics(run_dir) if r["split"] == "valid"), key=lambda r: r["bleu"])
    assert report["best"] == {"step": best["step"], "bleu": best["bleu"]}


def test_each_epoch_has_its_line(reference):
    """All epochs are over the same tokens, so that their losses can be compared."""
    run_dir, _ = reference
    progress = Checkpoints(run_dir).restore_params(48)[1]
    epochs = [record for record in read_metrics(run_dir) if record["split"] == "epoch"]
    assert [record["epoch"] for record in epochs] == list(range(1, progress["epoch"] + 1))
    assert len(epochs) >= 1 and len({record["target_tokens"] for record in epochs}) == 1
    assert all(0 < record["accuracy"] < 1 for record in epochs)
    batches = epochs[0]["step"]
    assert [record["step"] for record in epochs] == [batches * record["epoch"] for record in epochs]
    train = [record for record in read_metrics(run_dir) if record["split"] == "train"]
    assert all(0 <= record["accuracy"] < 1 for record in train)


def test_a_finished_run_returns_its_report_and_does_nothing(base, reference, capsys, monkeypatch):
    run_dir, report = reference
    monkeypatch.setattr(loop, "set_up_training", None)  # whoever calls it fails
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.name != "config.json"}
    assert fit(base, str(run_dir)) == report
    assert capsys.readouterr().err == ""  # a library prints only on the stream that it is given
    assert fit(base, run_dir, progress=sys.stderr) == report
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert capsys.readouterr().err == f"{run_dir} is finished, at step 48 of 48.\n"
    assert f"test BLEU {report['test']['bleu']:.2f}" in describe_report(report, run_dir)


def test_workers_prepare_the_data_only_if_they_are_asked_for(base, tmp_path, monkeypatch):
    asked = []

    def prepare(*args, pool, **options):
        asked.append(pool.workers)
        raise UserError("no further")

    monkeypatch.setattr(setup, "prepare", prepare)
    for options in ({}, {"workers": 3}):
        with raises(UserError, match="no further"):
            fit(base, tmp_path / "run", **options)
    assert asked == [None, 3]


def test_a_second_training_of_a_run_is_refused(base, tmp_path):
    """Also where the first has not yet written anything that the second could compare."""
    with lock_run(tmp_path / "run"):
        with raises(UserError, match=r"run is being trained by process \d+ on host .*another --run="):
            fit(base, tmp_path / "run")
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


KILLED = """
import os, signal, sys
from pathlib import Path
from flaxformer_mt import atomic_folder
from flaxformer_mt.training import loop, setup
from flaxformer_mt.config.files import read_config
from flaxformer_mt.training.train_log import TrainingLog

run_dir, config, where, number = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
calls = 0

def kill_in(owner, name, matters):
    original = getattr(owner, name)
    def killing(*arguments, **options):
        global calls
        if matters(*arguments):
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)
    setattr(owner, name, killing)

if where == "update":
    kill_in(TrainingLog, "add", lambda *_: True)
else:
    kill_in(atomic_folder, "seal_folder", lambda folder, *_: folder.parent.name == "checkpoints")
loop.fit(read_config(config), run_dir, progress=sys.stderr)
"""


def run_killed(run_dir: Path, config: Path, where: str, number: int) -> subprocess.CompletedProcess:
    """Trains in a process that is killed at the given update or save of a checkpoint."""
    command = [sys.executable, "-c", KILLED, str(run_dir), str(config), where, str(number)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_killed_and_resumed_equals_undisturbed(base, reference, tmp_path, capfd):
    """Killed while the checkpoint of step 32 is being saved; then again three updates after that of step 16.

    The last part is profiled, which changes nothing but leaves a trace of three updates, and knows
    the peak of the device, so that its log has the utilization.
    """
    config, run_dir = tmp_path / "config.json", tmp_path / "run"
    save_config(base, config)
    assert run_killed(run_dir, config, "save", 2).returncode == -signal.SIGKILL
    assert Checkpoints(run_dir).steps() == [16]
    assert any(path.name.startswith(".writing") for path in (run_dir / "checkpoints").iterdir())
    assert run_killed(run_dir, config, "update", 3).returncode == -signal.SIGKILL
    assert Checkpoints(run_dir).steps() == [16]
    capfd.readouterr()
    report = fit(change(base, train={"peak_flops": 1e12}), run_dir, profile=3, progress=sys.stderr)
    stderr = capfd.readouterr().err
    assert "resuming at step 16 of 48" in stderr
    assert not [line for line in stderr.split("\n") if "arning" in line or "Traceback" in line]
    assert not list((run_dir / "checkpoints").glob(".*"))
    assert_same_run(run_dir, reference[0])
    assert json.loads((run_dir / "report.json").read_text(encoding="utf-8")) == report
    for name in ("step", "target_tokens", "best", "parameters"):
        assert report[name] == reference[1][name]
    said = re.search(r"profile of steps 27 to 29: (\S+);", stderr)
    assert said and said[1].startswith(str(run_dir / "profile"))
    names = {path.suffixes[-1] for path in Path(said[1]).iterdir()}
    assert names == {".gz", ".pb"} and (Path(said[1]) / "perfetto_trace.json.gz").is_file()
    lines = [record for record in read_metrics(run_dir) if record["split"] == "train"]
    assert [line["step"] for line in lines] == [20, 40, 48]
    for line in lines:
        assert line["utilization"] == pytest.approx(line["model_flops_per_second"] / 1e12)


def test_documents_killed_and_resumed_equal_undisturbed(base, tmp_path):
    """Lines before each pair are drawn again for each epoch."""
    config = change(
        base,
        data={"context": 2, "max_source_length": 32},
        vocab={"sampling": 0.2},
        train={"steps": 6, "log_every": 6, "checkpoint_every": 2, "evaluate_every": 6},
        search={"method": "greedy", "beam_size": 1},
    )
    config = change(config, data={"batch_tokens": 1024})
    fit(config, tmp_path / "undisturbed")
    save_config(config, tmp_path / "config.json")
    killed = run_killed(tmp_path / "run", tmp_path / "config.json", "update", 5)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert Checkpoints(tmp_path / "run").steps()[:1] == [2]
    assert fit(config, tmp_path / "run")["step"] == 6
    assert_same_run(tmp_path / "run", tmp_path / "undisturbed")
    stores = [*Path(config.data.cache_dir).glob("tokens/*/source.values")]
    assert stores, "token stores are kept"


def test_text_that_has_changed_since_the_last_checkpoint_is_named(
    base, tmp_path, at_step, monkeypatch, capfd
):
    shutil.copytree(base.data.text_dir, tmp_path / "text")
    config = change(
        base,
        data={"text_dir": str(tmp_path / "text")},
        train={"steps": 2, "evaluate_every": 100},
        search={"method": "greedy", "beam_size": 1},
    )
    at_step({1: functools.partial(signal.raise_signal, signal.SIGTERM)})
    with raises(TrainingInterrupted):
        fit(config, tmp_path / "run")
    at_step({})
    for language in ("xx", "yy"):
        with (tmp_path / "text" / f"train.{language}").open("a") as file:
            file.write("ba do\n")
    message = f"has changed since step 1: train.xx, train.yy in {tmp_path}/text; restore it, or give --allow_"
    with raises(UserError, match=re.escape(message)):
        fit(config, tmp_path / "run")
    # Checkpoints of earlier versions do not say what text they are of.
    with monkeypatch.context() as patch:
        patch.setattr(TrainProgress, "from_dict", lambda values: TrainProgress(**values | {"texts": {}}))
        assert Checkpoints(tmp_path / "run").steps() == [1]
        setup.set_up_training(config, tmp_path / "run")
    assert fit(config, tmp_path / "run", allow_changed_data=True, progress=sys.stderr)["step"] == 2
    assert re.search(r"scoring the test set\ntranslating [\d,]+ sentences with", capfd.readouterr().err)


@pytest.mark.parametrize(
    ("sections", "number", "status"),
    [
        pytest.param({"optim": {"accumulation": 2}}, signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(
            {"data": {"batching": "pack"}, "vocab": {"sampling": 0.2}},
            signal.SIGTERM,
            143,
            marks=pytest.mark.slow,  # data/test_loader.py resumes packed data at each batch
        ),
        ({"data": {"stages": STAGES, "noise": NoiseConfig(typos=0.3)}}, signal.SIGINT, 130),
    ],
    ids=["accumulation", "packing and sampling", "stages and noise"],
)
def test_asked_to_stop_it_saves_and_resumes(base, tmp_path, at_step, capfd, sections, number, status):
    """Between checkpoints and between lines of the log; the checkpoint of the stop leaves no trace."""
    config = change(base, **sections)
    config = change(
        config,
        train={"steps": 4, "log_every": 4, "checkpoint_every": 2, "evaluate_every": 100, "average_last": 2},
        search={"method": "greedy", "beam_size": 1},
    )
    if config.data.stages:
        config = change(config, train={"steps": 9})
    fit(config, tmp_path / "undisturbed")
    run_dir = tmp_path / "stopped"
    at_step({3: functools.partial(signal.raise_signal, number)})
    capfd.readouterr()
    with raises(TrainingInterrupted) as stopped:
        fit(config, run_dir, progress=sys.stderr)
    assert (stopped.value.step, stopped.value.exit_status) == (3, status)
    assert Checkpoints(run_dir).steps() == [2, 3]
    assert not (run_dir / "report.json").exists()
    told = capfd.readouterr().err
    if config.data.stages:
        assert "stage 1 of 2, first: 100.0% parallel_text, from about step 1 for 3 steps; noise: " in told
        assert "step 3 ends stage first, then stage second" in told
    assert f"{number.name}: saving after this step" in told
    assert "stopped at step 3 and saved" in told
    at_step({})
    report = fit(config, run_dir, progress=sys.stderr)
    assert report["step"] == 4 and report.get("stages_ended", False) is bool(config.data.stages)
    assert f"resuming at step 3 of {config.train.steps}" in capfd.readouterr().err
    assert fit(config, run_dir) == report
    assert Checkpoints(run_dir).steps() == [2, 4]
    assert_same_run(run_dir, tmp_path / "undisturbed")
    averages = [Checkpoints(run).restore_params("average") for run in (run_dir, tmp_path / "undisturbed")]
    assert averages[0][1] == averages[1][1]
    assert jax.tree.all(jax.tree.map(np.array_equal, averages[0][0], averages[1][0]))


def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_is_used(base, reference, tmp_path, capsys):
    """A run killed after its last update, before its report, whose last checkpoint then lost a bit."""
    run_dir = tmp_path / "run"
    shutil.copytree(reference[0], run_dir)
    (run_dir / "report.json").unlink()
    victim = max((run_dir / "checkpoints" / "48" / "params").rglob("*"), key=lambda p: p.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    with warns(FlaxformerWarning, match="checkpoint 48"):
        report = fit(base, run_dir, progress=sys.stderr)
    assert "resuming at step 32 of 48" in capsys.readouterr().err
    assert report["step"] == 48
    assert_same_run(run_dir, reference[0])


def test_patience_ends_a_run_and_the_average_is_the_final_checkpoint(base, tmp_path, monkeypatch, capsys):
    """Scores 1, 3, 2, 3 with patience 2 end at the fourth evaluation; more patience and it goes on.

    Without a test set, on three devices, which do not divide the rows of a batch (`data.row_multiple`, 8).
    """
    scores = iter([1.0, 3.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr(Validation, "__call__", lambda self, params: {"loss": 1.0, "bleu": next(scores)})
    text = tmp_path / "text"
    shutil.copytree(base.data.text_dir, text, ignore=shutil.ignore_patterns("test.*"))
    config = change(
        base,
        data={"text_dir": str(text)},
        train={"evaluate_every": 1, "checkpoint_every": 100, "patience": 2, "average_last": 2}
        | {"final_checkpoint": "average"},
        parallel={"data": 3},
    )
    report = fit(config, tmp_path / "run")
    assert (report["step"], report["stopped_early"]) == (4, True)
    assert report["best"] == {"step": 2, "bleu": 3.0}
    assert report["hardware"].endswith(" cores, 3 simulated devices)")
    assert "test" not in report
    checkpoints = Checkpoints(tmp_path / "run", best_metric="bleu")
    assert checkpoints.steps() == [2, 3, 4]
    assert checkpoints.best() == 2
    averaged, progress = checkpoints.restore_params("average")
    assert progress["averaged_steps"] == [3, 4]
    third, fourth = (checkpoints.restore_params(step)[0] for step in (3, 4))
    mean = jax.tree.map(lambda a, b: (np.float64(a) + np.float64(b)) / 2, third, fourth)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), averaged, mean)
    [line] = [record for record in read_metrics(tmp_path / "run") if record["split"] == "train"]
    assert line["step"] == 4  # what had been gathered when it ended
    assert fit(config, tmp_path / "run", progress=sys.stderr) == report  # and it stays ended
    assert "is finished, at step 4 of 48" in capsys.readouterr().err
    longer = change(config, train={"patience": 3, "steps": 5})
    with warns(FlaxformerWarning, match=r"resumed at step 4 .* train\.patience: 2 -> 3 \(training may"):
        report = fit(longer, tmp_path / "run")
    assert (report["step"], report["stopped_early"], report["best"]) == (5, False, {"step": 5, "bleu": 4.0})


def test_a_scorer_that_dies_ends_training_in_one_line_and_the_run_resumes(base, tmp_path, monkeypatch):
    """With the scores and arrays of a run whose scorer did not die; the first of several scorers decides."""
    monkeypatch.setattr(metrics, "_OTHERS", dict(metrics._OTHERS))
    (tmp_path / "kiwi.py").write_text(KIWI)
    config = change(
        base,
        train={"best_metric": "kiwi,ter,chrf++", "steps": 6, "evaluate_every": 2, "checkpoint_every": 2},
    )
    with raises(UserError, match="train.best_metric names the score 'kiwi', which is not defined"):
        fit(config, tmp_path / "run")
    define_scorer(f"{sys.executable} {tmp_path}/kiwi.py no_model")
    with raises(UserError, match="ended with status 1 after 0 of 1 scores, saying 'no_model is no model'"):
        fit(config, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()
    define_scorer(f"{sys.executable} {tmp_path}/kiwi.py dies")
    with raises(UserError) as caught:
        fit(config, tmp_path / "run")
    assert "ended with status 1 after 0 of 6 scores, saying 'out of memory'" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert Checkpoints(tmp_path / "run", best_metric="kiwi").steps() == [2]
    define_scorer(f"{sys.executable} {tmp_path}/kiwi.py")
    report = fit(config, tmp_path / "run")
    undisturbed = fit(config, tmp_path / "other")
    assert_same_run(tmp_path / "run", tmp_path / "other")
    scores = [record for record in read_metrics(tmp_path / "run") if record["split"] == "valid"]
    assert [record["step"] for record in scores] == [2, 4, 6] and {"ter", "chrf++"} < scores[0].keys()
    best = max(scores, key=lambda record: (record["kiwi"], -record["loss"]))
    assert report["best"] == undisturbed["best"] == {"step": best["step"], "kiwi": best["kiwi"]}
    assert Checkpoints(tmp_path / "run", best_metric="kiwi").best() == best["step"]
    assert report["test"]["scorers"] == ["kiwi", "chrf++"] and report["test"]["kiwi"] > 0
    assert f"test kiwi {report['test']['kiwi']:.4g}" in describe_report(report, tmp_path / "run")


def test_without_a_validation_set_there_is_no_best(base, tmp_path):
    text = tmp_path / "text"
    shutil.copytree(base.data.text_dir, text, ignore=shutil.ignore_patterns("valid.*"))
    config = change(base, data={"text_dir": str(text)}, train={"patience": 3})
    with raises(UserError) as error:
        fit(config, tmp_path / "run")
    message = str(error.value)
    assert "validation set is required by train.patience=3 and train.final_checkpoint=best" in message
    languages = config.data.source_language, config.data.target_language
    files = " and ".join(f"valid.{language}" for language in languages)
    assert f"has no split valid (no {files} in {config.data.text_dir})" in message
    assert "hold out pairs of the training set with --config.data.valid_pairs=500" in message
    assert "set train.final_checkpoint=last" in message


def test_training_that_produces_no_numbers_ends_with_the_remedy(base, tmp_path, monkeypatch):
    """A learning rate at which the first update overflows; without a validation set, which needs none."""
    monkeypatch.setattr(loop, "validate", lambda config: None)  # which would refuse the learning rate
    monkeypatch.setattr("flaxformer_mt.training.train_log._MOST_SKIPPED", 3)
    text = tmp_path / "text"
    shutil.copytree(base.data.text_dir, text, ignore=shutil.ignore_patterns("valid.*"))
    config = change(
        base,
        data={"text_dir": str(text)},
        optim={"learning_rate": 1e38, "schedule": "constant", "warmup_steps": 0},
        train={"log_every": 1, "final_checkpoint": "last", "checkpoint_every": 2},
    )
    with raises(UserError, match=r"the last 3 steps up to step 4 .*lower optim\.learning_rate"):
        fit(config, tmp_path / "run")
    lines = [record for record in read_metrics(tmp_path / "run") if record["split"] == "train"]
    assert [record["skipped"] for record in lines] == [0, 1, 2, 3]
    state = load_state(tmp_path / "run", 2)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state["params"]))


def test_an_invalid_config_is_refused_before_anything_is_written(base, tmp_path):
    with raises(UserError, match=r"train\.steps is 0"):
        fit(change(base, train={"steps": 0}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
