"""The benchmark of translation: how batches for the peers are planned, and that all three systems run."""

import dataclasses
import json
import sys

import pytest
from tiny_experiment import quick_environment

from flaxformer_mt.config import SearchConfig

TINY = ["--tiny", "--rounds=1", "--lines=9"]


@pytest.fixture(scope="module")
def benchmark(load_benchmark):
    pytest.importorskip("ctranslate2")
    pytest.importorskip("transformers")
    return load_benchmark("translate")


@pytest.fixture
def material(benchmark):
    """The module that makes what is translated, as the benchmark has imported it."""
    return sys.modules["translation_material"]


def test_batches_are_sorted_and_within_the_budget(benchmark):
    search = SearchConfig(beam_size=4, batch_tokens=100, max_length_ratio=1.0, max_length_offset=2)
    batches = benchmark.plan_batches([3, 10, 4, 5], search, forced=False)
    # 10 + 4 * 12 leaves no room for a second row; 5 + 4 * 7 fits three times.
    assert batches == [{"indices": [1], "limit": 12}, {"indices": [3, 2, 0], "limit": 7}]
    forced = benchmark.plan_batches([3, 10, 4, 5], search, forced=True)
    assert [batch["limit"] for batch in forced] == [10, 4]  # 10 + 4 * 10 fits twice


def test_made_up_news_has_the_lengths_and_as_many_words_as_pieces(benchmark, material):
    pairs = material.read_news(benchmark.parse_options([]))
    lengths = sorted(len(text.split(" ")) for pair in pairs for text in pair)
    assert len(pairs) == 3000 and lengths[0] >= 3 and lengths[-1] <= 91
    assert abs(lengths[3000] - 23) <= 1
    assert len({word for pair in pairs for text in pair for word in text.split(" ")}) > 32_000


def test_only_the_systems_that_are_asked_for_are_exported(benchmark, material, monkeypatch, tmp_path, capsys):
    """A model that Hugging Face's formats cannot express is compared with CTranslate2."""
    options = benchmark.parse_options(["--systems=ours,ctranslate2", "--tiny"])
    weights = material.make_random_weights(options, material.read_news(options), tmp_path)
    model = dataclasses.replace(weights.config.model, positions="rotary")
    weights = dataclasses.replace(weights, config=dataclasses.replace(weights.config, model=model))
    exported = []
    monkeypatch.setattr(
        benchmark, "write_checked", lambda target, *arguments: exported.append(arguments[1].name)
    )
    for number, systems in enumerate((["ours", "ctranslate2"], ["ctranslate2"])):
        (folder := tmp_path / str(number)).mkdir()
        benchmark.write_models(weights, folder, systems)
        assert (folder / "ours" / "vocab").is_dir() == ("ours" in systems)
    assert exported == ["ctranslate2"] * 2
    for place, name in (("post", "marian"), ("pre", "hf-pre-norm")):
        config = dataclasses.replace(weights.config, model=dataclasses.replace(model, norm_position=place))
        with pytest.raises(SystemExit, match=f"{name} cannot express this model"):
            benchmark.write_models(dataclasses.replace(weights, config=config), tmp_path, ["hugging_face"])
    with pytest.raises(SystemExit):
        benchmark.parse_options(["--systems=ours,ctranslate"])
    assert "unknown systems ctranslate; known: ours, hugging_face, ctranslate2" in capsys.readouterr().err


@pytest.mark.slow
def test_all_systems_translate_all_sentences_to_the_forced_length(benchmark, monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", quick_environment(devices=2)["XLA_FLAGS"])
    monkeypatch.setattr(sys, "argv", ["translate.py", "--setting=news", *TINY])
    benchmark.main()
    found = json.loads(capsys.readouterr().out)
    systems = found["systems"]
    assert list(systems) == ["ours", "hugging_face", "ctranslate2"] and found["sentences"] == 9
    produced = {
        variant["target_tokens"] for system in systems.values() for variant in system["variants"].values()
    }
    # The end symbol may be the last token that is forced, and does not count.
    assert max(produced) - min(produced) <= found["sentences"]
    assert min(produced) >= found["source_tokens"] - found["sentences"]
    (ours,) = systems["ours"]["variants"]["as configured, float32"]["rounds"]
    for peer in ("hugging_face", "ctranslate2"):
        expected = round(ours / systems[peer]["target_tokens_per_second"], 2)
        assert found["ratios"]["as configured, float32"][peer] == expected, peer


def test_each_system_translates_in_the_precisions_that_it_has(benchmark):
    options = benchmark.parse_options(["--setting=captions"])
    ours = benchmark.our_variants(options)
    assert [variant["dtype"] for variant in ours.values()] == ["float32"] * 3 + ["bfloat16"] * 6
    assert [variant.get("quantization") for variant in ours.values()] == [None] * 6 + ["int8"] * 3
    rounds = {"a, float32": [1.0, 9.0, 3.0], "b, float32": [2.0], "a, int8": [5.0]}
    variants = {name: {"rounds": rates} for name, rates in rounds.items()}
    systems = {"ctranslate2": {"variants": variants}}
    found = benchmark.fastest_peers(systems, options.precisions)
    assert {label: name for label, (name, _) in found.items()} == {
        "ctranslate2": "a, int8",
        "ctranslate2 float32": "a, float32",
        "ctranslate2 int8": "a, int8",
    }
    options = benchmark.parse_options(["--setting=news", "--shortlist=FILE", "--precisions=float32"])
    assert [variant.get("shortlist", False) for variant in benchmark.our_variants(options).values()] == [
        False,
        True,
    ]
    variants["a, int8, shortlist"] = {"rounds": [7.0]}
    found = benchmark.fastest_peers(systems, options.precisions + ["int8"])
    assert found["ctranslate2 int8"][0] == "a, int8"
    assert found["ctranslate2 int8, shortlist"][0] == "a, int8, shortlist"


def test_the_best_variants_are_compared_at_equal_bleu(benchmark):
    ours = {"exact": {"rounds": [2.0, 6.0, 3.0], "bleu": 30.0}, "inexact": {"rounds": [4.0], "bleu": 29.85}}
    peers = {
        "good": ("a", {"rounds": [6.0], "bleu": 30.1}),
        "fair": ("b", {"rounds": [8.0], "bleu": 29.95}),
        "best": ("c", {"rounds": [8.0], "bleu": 30.2}),
    }
    assert benchmark.compare_best(ours, peers) == {
        "good": {"ours": "exact", "peer": "a", "ratio": 0.5, "bleu_difference": -0.1},
        "fair": {"ours": "inexact", "peer": "b", "ratio": 0.5, "bleu_difference": -0.1},
    }
    forced = benchmark.compare_best({"one": {"rounds": [4.0]}}, {"all": ("a", {"rounds": [2.0]})})
    assert forced == {"all": {"ours": "one", "peer": "a", "ratio": 2.0, "bleu_difference": 0.0}}
