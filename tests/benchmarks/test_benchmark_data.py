"""The benchmark of the input pipeline: what it makes up is what it says, and all of it runs."""

import importlib.util
import itertools
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from flaxformer_mt.config import DataConfig

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "data.py"


@pytest.fixture(scope="module")
def data():
    spec = importlib.util.spec_from_file_location("benchmark_data", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_made_up_ids_are_a_store_like_any_other(data, tmp_path):
    store = data.make_stores(70, tmp_path, vocabulary=40).base
    assert len(store) == 70
    lengths = list(data.MadeUpPairs(70))
    assert [(len(source), len(target)) for source, target in map(store.__getitem__, range(70))] == lengths
    for side in (store.source, store.target):
        ends = side.offsets[1:] - 1
        assert (side.tokens[ends] == 2).all()
        words = np.delete(side.tokens, ends)
        assert words.min() >= 4 and words.max() < 40
    again = data.make_stores(70, tmp_path, vocabulary=40).base
    assert again.folder == store.folder and np.array_equal(again.target.tokens, store.target.tokens)


def test_the_large_part_measures_every_stage(data, tmp_path):
    found = data.measure_large(200, tmp_path, vocabulary=40)
    stages = ["store_written", "store_opened"]
    stages += [f"{stage}_{mode}" for mode in ("bucket", "pack") for stage in ("epoch_planned", "first_batch")]
    assert [name for name, value in found.items() if isinstance(value, dict)] == stages
    peaks = [found["peak_mib_of_imports"], *(found[name]["peak_mib"] for name in stages)]
    assert peaks == sorted(peaks) and peaks[0] > 0
    assert found["target_tokens"] == sum(target for _, target in data.MadeUpPairs(200))


def test_the_rate_of_the_loader_is_that_of_its_tokens(data, tmp_path, monkeypatch):
    """With a clock that ticks once a look, a run takes one second; the buffer's two batches do not count."""
    stores = data.make_stores(100, tmp_path, vocabulary=40)
    config = DataConfig(batching="pack", batch_tokens=2048, prefetch=1, loader_threads=1)
    loader = data.train_batches(stores, config, seed=1, **data.SPECIAL)
    batches = [batch for _, batch in itertools.islice(loader, 5)]
    loader.close()
    ticks = iter(range(100))
    monkeypatch.setattr(data, "time", types.SimpleNamespace(perf_counter=lambda: next(ticks)))
    rates = data.measure_pipeline(stores, config, batches=3, repeats=1)
    assert rates["as_arrays"] == rates["on_device"] == sum(int(b.target_mask.sum()) for b in batches[2:]) > 0


def test_the_command_prints_rates_and_their_ratio(data, tmp_path, monkeypatch, capsys):
    """With a clock that ticks once a look, rates are numbers of tokens."""
    ticks = itertools.count()
    monkeypatch.setattr(data, "time", types.SimpleNamespace(perf_counter=lambda: next(ticks)))
    monkeypatch.setattr(data, "MODES", ("bucket",))
    monkeypatch.setattr(sys, "argv", [str(FILE), "--tiny", "--part=pipeline", f"--work={tmp_path}"])
    data.main()
    found = json.loads(capsys.readouterr().out)["pipeline"]["bucket"]
    assert found["ratio"] == round(found["on_device"] / found["training"], 1)
    assert found["enough"] == (found["on_device"] >= 30 * found["training"])
    assert min(found["as_arrays"], found["on_device"], found["training"]) > 0
    assert not list(tmp_path.iterdir())
