"""What prepare and show print: tables for people on a terminal, JSON for programs."""

import json
import sys

import pytest

from flaxformer_mt.commands.main import main
from flaxformer_mt.commands.show import show
from flaxformer_mt.commands.terminal_tables import summarize_experiment, summarize_preparation
from flaxformer_mt.config import Config
from flaxformer_mt.config.files import save_config
from flaxformer_mt.evaluation.tables import make_table, write_text

PROBLEMS = {
    "empty": {"count": 1200, "action": "drop", "examples": [{"where": "train.de line 7", "target": ""}]},
    "duplicates": {"count": 3, "action": "keep", "examples": [{"where": "train.de line 9", "target": "x"}]},
}
REPORT = {
    "train": {"parts": [{"name": "parallel_text", "read": 50_000, "pairs": 48_800, "problems": PROBLEMS}]},
    "valid": {"parts": [{"name": "parallel_text", "read": 100, "pairs": 100, "problems": {}}]},
    "test": None,
    "vocabulary": {"kind": "bpe", "joint": True, "source_size": 8000, "target_size": 8000},
    "batches": {
        "batches": 320,
        "pairs": 48_000,
        "skipped": 800,
        "source_tokens": 1,
        "target_tokens": 900_000,
        "padding": 0.0512,
        "shapes": [{"rows": 128, "source": 16, "target": 16, "batches": 300}],
    },
    "lost_text": {"lines": 100, "lost": 3, "characters": [], "examples": []},
    "overlap": {"valid": {"of": 100, "pairs": 4, "sources": 12}},
    "target_lengths": {
        "ratio": 1.088,
        "offset": -7.2,
        "share": 0.999,
        "pairs": 48_800,
        "groups": [
            {"longest_source": 8, "pairs": 1200, "median": 9, "99%": 14, "99.9%": 17, "longest": 18},
            {"pairs": 47_600, "median": 150, "99%": 190, "99.9%": 200, "longest": 1210},
        ],
    },
}


def test_the_summary_of_preparation_says_what_became_of_the_pairs():
    text = summarize_preparation(REPORT)
    rows = [line.split() for line in text.split("\n")]
    words = [" ".join(row) for row in rows]
    assert "train parallel_text 50,000 48,800 empty or blank side 1,200 left out train.de line 7" in words
    assert "exact duplicates 3 kept train.de line 9" in words
    assert "valid parallel_text 100 100" in words
    assert "valid 4 12 100" in words  # the overlap
    assert "Vocabulary: bpe subwords, 8,000, shared by both languages" in words
    assert "It can produce 97 of 100 targets of the validation set exactly" in words
    assert any("320 an epoch" in line for line in words)
    assert "800 pairs have too many tokens and are left out" in words
    assert "128 16 16 300" in words
    assert "Target lengths: 99.9% of the pairs have at most 1.088 x source tokens - 7.2" in words
    assert "to 8 1,200 9 14 17 18" in words and "more 47,600 150 190 200 1,210" in words
    assert max(map(len, text.split("\n"))) <= 100 and "{" not in text
    part = REPORT["train"]["parts"][0] | {"held_out": {"valid": 20, "test": 30, "aside": 0}}
    splits = {split: REPORT["train"] | {"parts": [part]} for split in ("train", "valid", "test")}
    held = summarize_preparation(REPORT | splits)
    assert held.count("held out for validation") == 1, "of the training set alone"
    words = [" ".join(line.split()) for line in held.split("\n")]
    assert "held out for validation 20 left out" in words and "held out for test 30 left out" in words
    assert "shared with" not in held
    stage = {"name": "start", "from_update": 1, "updates": 90, "reached": True, "epochs": 2, "epoch_of": "a"}
    stage |= {"mix": [{"name": "a", "share": 0.8}, {"name": "b", "share": 0.2}], "noise": {"typos": 0.1}}
    last = stage | {"name": "end", "from_update": 91, "updates": None, "epochs": None, "noise": {}}
    staged = summarize_preparation(REPORT | {"stages": [stage, last | {"reached": False}, last]})
    rows = [" ".join(line.split()) for line in staged.split("\n")]
    assert "start 1 90 2 of a a 80.0% typos 0.1" in rows and "b 20.0%" in rows
    assert "end 91 to the end a 80.0%" in rows and "end not reached to the end a 80.0%" in rows
    apart = REPORT | {"vocabulary": REPORT["vocabulary"] | {"joint": False, "source_size": 9000}}
    assert "9,000 source and 8,000 target" in summarize_preparation(apart)
    alone = REPORT | {"vocabulary": REPORT["vocabulary"] | {"source_size": 0}}
    assert "bpe subwords, 8,000\n" in summarize_preparation(alone)


def test_the_summary_of_an_experiment_has_its_size_memory_and_time():
    result = show(Config())
    text = summarize_experiment(result)
    assert f"Parameters: {result['parameters']['total']:,}," in text and "encoder/layers_0" in text
    assert "(by the config; the data is not prepared)" in text
    assert f"{result['step']['memory_mib']['without_activations']:,.1f} MiB" in text
    assert "peak rate of this device is unknown" in text
    peak = {"device": "H100", "teraflops_a_second": 989.0, "seconds_a_step": 0.1, "device_hours": 3.5}
    text = summarize_experiment(result | {"at_peak": peak, "batches": REPORT["batches"]})
    assert "H100" in text and "0.1 s a step, 3.5 device hours" in text and "320 an epoch" in text


def test_columns_are_aligned_numbers_on_the_right():
    records = [{"name": "a", "count": 7}, {"name": "bcdef", "count": 1000}, {"name": "g", "count": None}]
    table = make_table({"name": "{name}", "count": "{count:,}"}, records, "Counts")
    assert write_text(["first", table, "last"]).split("\n") == [
        *("first", "Counts", "  name   count", "  a          7", "  bcdef  1,000", "  g", "last")
    ]


@pytest.mark.parametrize("command", ["prepare", "show"])
def test_a_terminal_gets_tables_and_everything_else_json(command, capfd, monkeypatch, tmp_path, tiny_config):
    save_config(tiny_config, tmp_path / "config.json")
    for terminal, flags, is_json in [(True, [], False), (True, ["--json"], True), (False, [], True)]:
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        assert main([command, f"--run={tmp_path}", *flags]) == 0
        out = capfd.readouterr().out
        if is_json:
            assert isinstance(json.loads(out), dict)
        else:
            assert "Batches:" in out or "Memory on each device" in out
            with pytest.raises(ValueError):
                json.loads(out)
