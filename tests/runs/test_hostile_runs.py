"""Runs that another program has written and sealed: one message, before anything is read, made or traced."""

import json
import resource
import shutil
import time
from pathlib import Path

import pytest
import tensorstore

from flaxformer_mt import atomic_folder
from flaxformer_mt.config.field_values import replace_fields
from flaxformer_mt.config.files import read_config, save_config
from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation.run_report.page import report_runs
from flaxformer_mt.runs import load_run
from flaxformer_mt.runs.array_files import read_item, read_stored_arrays
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.runs.load_run import load_trained
from flaxformer_mt.runs.run_directory import read_report
from flaxformer_mt.tracking import read_metrics


@pytest.fixture
def run(tiny_run, tmp_path) -> Path:
    shutil.copytree(tiny_run, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def is_cheap():
    """All of this in two seconds of processor time and 200 MB, without the imports of the first test."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 500 << 10


def newest(run: Path) -> Path:
    return Checkpoints(run).resolve("last")


def claim(item: Path, array: str, **changes) -> None:
    """Gives a stored array another head, and seals the checkpoint again."""
    store = tensorstore.KvStore.open(f"file://{item}/|ocdbt:").result()
    key = f"{array}/.zarray"
    head = json.loads(store.read(key).result().value) | changes
    store.write(key, json.dumps(head).encode()).result()
    facts = atomic_folder.read_metadata(item.parent)
    (item.parent / "manifest.json").unlink()
    atomic_folder.seal_folder(item.parent, facts)


@pytest.mark.parametrize("name", ["ema_params", "params"])
@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [1 << 21, 1 << 21]},
        {"shape": [50_000, 50_000]},
        {"chunks": [1 << 40, 1]},
        {"dtype": "<f8"},
        {"shape": [3]},
    ],
    ids=str,
)
def test_arrays_that_are_larger_than_their_manifest_says_are_not_read(run, name, changes):
    folder = newest(run)
    claim(folder / name, "decoder.layers_0.feedforward.input.kernel", **changes)
    started = time.process_time()
    specs = Checkpoints(run).read_specs("last")[name]
    with pytest.raises(UserError, match=r"arrays in .* (are not those of|cannot be read).*") as error:
        assert read_stored_arrays(folder / name, specs) is None
        read_item(folder / name, specs)
    assert "\n" not in str(error.value) and time.process_time() - started < 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.num_encoder_layers": 100_000}, "num_encoder_layers is 100000; it must be from 0 to 1000"),
        ({"model.num_decoder_layers": 900}, r"decoder: 900 layers by the config, \d in the checkpoint"),
        ({"search.beam_size": 1_000_000}, "beam_size is 1000000; it must be from 1 to 1000"),
        ({"model.model_dim": 1 << 40}, "model_dim is 1099511627776; it must be from 1 to 65536"),
        ({"model.model_dim": 1 << 16, "model.max_positions": 1 << 20}, "the table of 1048576 positions"),
    ],
    ids=str,
)
def test_sizes_of_a_config_are_compared_before_the_network_is_traced(run, changes, message, monkeypatch):
    config = replace_fields(read_config(run / "config.json"), changes, "config")
    save_config(config, run / "config.json")
    monkeypatch.setattr(load_run.TrainedModel, "find_shapes", lambda self: pytest.fail("it is traced"))
    with pytest.raises(UserError, match=message):
        load_trained(run)


FACTS = {
    "a list": [],
    "null": None,
    "no trees": {"progress": {}},
    "trees a list": {"trees": [], "progress": {}},
    "a tree a list": {"trees": {"params": []}, "progress": {}},
    "no spec": {"trees": {"params": {"a": 5}}, "progress": {}},
    "no type": {"trees": {"params": {"a": "spam[3]"}}, "progress": {}},
    "no numbers": {"trees": {"params": {"a": "float32[x]"}}, "progress": {}},
    "paths in paths": {"trees": {"params": {"a": "float32[2]", "a/b": "float32[2]"}}, "progress": {}},
    "no progress": {"trees": {"params": {"a": "float32[2]"}}},
    "progress a text": {"trees": {}, "progress": "x"},
    "metrics a text": {"trees": {}, "progress": {"metrics": "x"}},
    "a score of thousands of digits": {"trees": {}, "progress": {"metrics": {"bleu": 10**400}}},
}


@pytest.mark.parametrize("kind", FACTS)
def test_manifests_of_another_form_are_refused(run, kind):
    folder = newest(run)
    (folder / "manifest.json").unlink()
    atomic_folder.seal_folder(folder, FACTS[kind])
    for checkpoint in ("last", "48"):
        with pytest.raises(UserError):
            load_trained(run, checkpoint=checkpoint)
    with pytest.raises(UserError):
        Checkpoints(run).average(1)


def test_a_manifest_without_files_or_facts_is_refused(run):
    folder = newest(run)
    for body in ({"facts": {}}, {"files": [], "facts": {}}, {"files": {"a": 1}, "facts": {}}, {"files": {}}):
        atomic_folder._write_manifest(folder, {"format": 1} | body)
        with pytest.raises(UserError, match=r"manifest\.json is not readable"):
            load_trained(run, checkpoint="last")


REPORTS = {
    "train_seconds": ["x", [], 1e400, float("nan")],
    "parameters": ["x", {}],
    "target_tokens": ["x", [1]],
    "best": ["x", [1], {"step": "x"}],
    "test": ["x", [1], {"directions": []}, {"directions": {"a": None}}, {"directions": {"a": {"bleu": "x"}}}],
    "data": [[], {"train": "x"}, {"train": {"parts": [None]}}, {"train": {"parts": [{"name": "a"}]}}],
}


@pytest.mark.parametrize("name", REPORTS)
def test_reports_of_another_form_are_refused(run, name):
    report = json.loads((run / "report.json").read_bytes())
    assert read_report(run) == report
    for value in REPORTS[name]:
        (run / "report.json").write_text(json.dumps(report | {name: value}))
        with pytest.raises(UserError, match=f"report.json is damaged .{name} has another form"):
            report_runs([run], run / "page.html")


@pytest.mark.parametrize(
    "line",
    ["[" * 50_000, '{"step": 1, "loss": {}}', '{"step": 1, "loss": 1' + "0" * 400 + "}", '{"step": []}'],
)
def test_metrics_of_another_form_are_named_by_their_line(run, line):
    (run / "metrics.jsonl").write_text(f'{{"step": 1, "split": "train", "loss": "text"}}\n{line}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2 is damaged"):
        read_metrics(run)


def test_a_text_in_place_of_a_loss_and_signs_of_formulas_do_no_harm(run):
    (run / "metrics.jsonl").write_text(
        "".join(
            f'{{"step": {n}, "split": "train", "loss": {value}}}\n' for n, value in enumerate(['"x"', 1, 2])
        )
    )
    report = json.loads((run / "report.json").read_bytes())
    report["test"]["directions"] = {"$\\foo{$": {"bleu": 12.5, "chrf": 50, "sentences": 3}}
    (run / "report.json").write_text(json.dumps(report))
    report_runs([run], run / "page.html")
    assert (run / "page.html").is_file()
