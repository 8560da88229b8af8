"""Target lengths: the line above nearly all of them, the file, and who reads it."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from flaxformer_mt.data.prepare import prepare
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs import target_lengths
from flaxformer_mt.runs.target_lengths import (
    TargetLengths,
    describe_target_lengths,
    fit_target_lengths,
    read_target_lengths,
    write_target_lengths,
)
from flaxformer_mt.translation.translator import Translator


@pytest.fixture
def run(tiny_run, tmp_path):
    return shutil.copytree(tiny_run, tmp_path / "run")


def make_lengths(count: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    sources = generator.integers(2, 40, count)
    return sources, np.maximum(1, (1.3 * sources + generator.normal(0, 2, count)).astype(int))


def share_within(line: TargetLengths, sources: np.ndarray, targets: np.ndarray) -> float:
    return float(np.mean(targets <= (line.ratio * sources + line.offset).astype(int)))


def test_the_line_is_just_above_999_of_1000_targets():
    sources, targets = make_lengths(20_000)
    line = fit_target_lengths(sources, targets)
    assert 0.999 <= share_within(line, sources, targets) < 0.9996
    # Nearly that of the lengths' own law: 1.3 times the source, and 3.1 standard deviations of 2.
    assert 1.25 < line.ratio < 1.4 and 3 < line.offset < 8
    assert share_within(line._replace(offset=line.offset - 1), sources, targets) < 0.999
    # Never flatter than the mean ratio, so that it holds for longer sources, too.
    assert line.ratio >= round(targets.sum() / sources.sum(), 3)


def test_targets_of_one_length_have_a_line_and_few_pairs_have_none():
    copies = np.arange(1, 1201)
    assert fit_target_lengths(copies, copies) == TargetLengths(1.0, 0.01)
    assert fit_target_lengths(copies[:999], copies[:999]) is None
    assert describe_target_lengths(copies[:999], copies[:999]) is None
    assert fit_target_lengths(np.zeros(2000, int), np.ones(2000, int)) is None  # a language model
    assert fit_target_lengths(np.zeros(0, int), np.zeros(0, int)) is None


def test_a_large_training_set_is_thinned_out_evenly(monkeypatch):
    sources, targets = make_lengths(20_000)
    monkeypatch.setattr(target_lengths, "_MAX_PAIRS", 5000)
    assert fit_target_lengths(sources, targets) == fit_target_lengths(sources[::4], targets[::4])


def test_the_file_has_the_distribution_of_each_group(tmp_path):
    sources, targets = np.array([8] * 1000 + [9, 200] * 50), np.array([*range(1, 1001)] + [7, 90] * 50)
    described = describe_target_lengths(sources, targets)
    write_target_lengths(tmp_path, described)
    found = json.loads((tmp_path / "target_lengths.json").read_text())
    assert found == described and (found["pairs"], found["share"]) == (1100, 0.999)
    first, second, last = found["groups"]
    quantiles = {"median": 500, "99%": 990, "99.9%": 999, "longest": 1000}
    assert first == {"longest_source": 8, "pairs": 1000, **quantiles}
    assert second["longest_source"] == 16 and (second["median"], second["pairs"]) == (7, 50)
    assert "longest_source" not in last and last["longest"] == 90
    assert read_target_lengths(tmp_path) == (fit_target_lengths(sources, targets), None, None)
    write_target_lengths(tmp_path, None)
    assert read_target_lengths(tmp_path) == (None, None, None) and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "it is not valid JSON"),
        ('{"ratio": 1.1}', "'offset' is missing"),
        ('{"ratio": "x", "offset": 1}', "could not convert"),
        ('{"ratio": 1.1, "offset": NaN}', "offset is nan"),
        ('{"ratio": -1, "offset": 1}', "ratio is -1"),
        ("[1, 2]", "must contain a JSON object"),
        *(
            (f'{{"ratio": 1.1, "offset": 1, "{name}": {share}}}', "")
            for name in ("several_sentences", "capitals")
            for share in ('"x"', "NaN", "1.5", "null")
        ),
    ],
)
def test_a_damaged_file_is_named_with_a_remedy(tmp_path, text, problem):
    (tmp_path / "target_lengths.json").write_text(text)
    with pytest.raises(UserError, match=f"target_lengths.json is damaged .*{problem}.*prepare --run="):
        read_target_lengths(tmp_path)


def test_a_prepared_run_learns_them_and_translates_with_them(tiny_config, run, monkeypatch):
    assert prepare(tiny_config, run).report["target_lengths"] is None  # 64 pairs are too few
    translator = Translator.load(run)
    assert translator.search.lengths.learned is None and "target_lengths" not in translator.describe()
    monkeypatch.setattr(target_lengths, "_MIN_PAIRS", 64)
    prepared = prepare(tiny_config, run)
    line, *_ = read_target_lengths(run)
    assert line == prepared.target_lengths and prepared.report["target_lengths"]["ratio"] == line.ratio
    translator = Translator.load(run)
    assert translator.search.lengths.learned == line
    assert translator.describe()["target_lengths"] == list(line)
    limit = dataclasses.replace(tiny_config.search, length_bound="limit")
    assert Translator.load(run, search=limit).search.lengths.learned is None


def test_training_lines_of_several_sentences_and_in_capitals_are_counted(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(target_lengths, "_MIN_PAIRS", 64)
    data = tmp_path / "data"
    shutil.copytree(tiny_config.data.text_dir, data)
    source = data / "train.xx"
    lines = ["Ba do. Fi gu!", "Mi 3.5 nu."] * 8 + ["BA DO", "Badado fi Midofi Lonumi", "MI", "Mi."]
    lines += [f"{line} a" for line in source.read_text().splitlines()[20:]]
    source.write_text("".join(f"{line}\n" for line in lines))
    own = dataclasses.replace(tiny_config.data, text_dir=str(data))
    prepared = prepare(dataclasses.replace(tiny_config, data=own), tmp_path / "run")
    assert prepared.several_sentences == 8 / 64
    described = json.loads((tmp_path / "run/target_lengths.json").read_text())
    shares = {"capitals": 2 / 64, "title_case": 1 / 64, "single_words": 1 / 64}
    assert described | shares | {"several_sentences": 8 / 64} == described
    assert read_target_lengths(tmp_path / "run")[1:] == (8 / 64, shares)


def test_letter_cases_are_guarded_as_the_run_was_trained(run):
    """Runs without the record, of earlier versions, translate capitals as they are, unless told otherwise."""
    for known, option, expected in (
        ({}, "auto", []),
        ({}, "always", ["capitals", "single_words", "title_case"]),
        ({"capitals": 0.0, "title_case": 0.02, "single_words": 0.001}, "auto", ["capitals", "single_words"]),
        ({"capitals": 0.0, "title_case": 0.02, "single_words": 0.001}, "never", []),
    ):
        (run / "target_lengths.json").write_text(json.dumps({"ratio": 1.0, "offset": 9.0, **known}))
        translator = Translator.load(run, capitals=option, use_all_devices=False)
        assert translator.describe().get("capitals", []) == expected


def test_sentences_are_translated_apart_as_the_run_was_trained(run):
    decided = {}
    for share in (None, 0.0, 0.3):
        known = {} if share is None else {"several_sentences": share}
        (run / "target_lengths.json").write_text(json.dumps({"ratio": 1.0, "offset": 9.0, **known}))
        for option in ("auto", "always", "never"):
            translator = Translator.load(run, split_sentences=option, use_all_devices=False)
            decided[share, option] = translator.describe()["sentences"]
    apart = {key for key, value in decided.items() if value == "apart"}
    assert apart == {(None, "auto"), (0.0, "auto"), (None, "always"), (0.0, "always"), (0.3, "always")}
