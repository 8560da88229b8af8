"""Paired tests: sacreBLEU's own numbers, what may be compared with what, and the files that are left."""

import dataclasses
import json
import random

import pytest
from pytest import raises
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.significance import PairedTest

from flaxformer_mt.commands.main import main
from flaxformer_mt.config import Config, DataConfig, SearchConfig
from flaxformer_mt.config.files import save_config
from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation import evaluation_set as scored_set
from flaxformer_mt.evaluation.comparison import make_resampling_options, parse_compared_system
from flaxformer_mt.evaluation.evaluate import describe_evaluation, evaluate_run
from flaxformer_mt.evaluation.tables import write_text
from flaxformer_mt.scoring.metrics import score_translations
from flaxformer_mt.scoring.significance import ResamplingOptions, resample_scores
from flaxformer_mt.translation.translator import Translation, Translator

COUNT = 60
KINDS_OF_TESTS = [("bootstrap", "bs", (50, -1)), ("approximate", "ar", (80, 50))]


def spoil(lines, share, *, seed):
    rng = random.Random(seed)
    return [" ".join("spoilt" if rng.random() < share else word for word in line.split()) for line in lines]


@pytest.fixture(scope="module")
def references():
    rng = random.Random(0)
    return [" ".join(rng.choices("one two three four five six".split(), k=9)) for _ in range(COUNT)]


@pytest.fixture(scope="module")
def systems(references):
    """A good one, a clearly worse one, and one that is about as good as the first."""
    return {
        "good": spoil(references, 0.10, seed=1),
        "bad": spoil(references, 0.40, seed=2),
        "like": spoil(references, 0.10, seed=3),
    }


@pytest.mark.parametrize(("paired", "kind", "counts"), KINDS_OF_TESTS)
def test_numbers_and_signatures_are_sacrebleus(systems, references, paired, kind, counts):
    found = resample_scores(systems, references, ResamplingOptions(50, paired, 80), lowercase=True)
    signatures, columns = PairedTest(
        list(systems.items()),
        {"b": BLEU(lowercase=True), "c": CHRF(lowercase=True), "t": TER()},
        [references],
        test_type=kind,
        n_samples=counts[0],
        n_ar_confidence=counts[1],
    )()
    for metric, name in (("bleu", "BLEU"), ("chrf", "chrF2"), ("ter", "TER")):
        for ours, theirs in zip(found.systems, columns[name], strict=True):
            expected = (theirs.score, theirs.mean, theirs.ci, theirs.p_value)
            assert ours[metric] == pytest.approx(expected)
        assert found.signatures[metric] == str(signatures[name])
    assert "|seed:12345|" in found.signatures["ter"] and f"|{kind}:" in found.signatures["ter"]
    plain = score_translations(systems["good"], references, lowercase=True)
    ter = TER()
    ter.corpus_score(systems["good"], [references])
    assert found.systems[0]["bleu"].score == plain["bleu"] and found.systems[0]["chrf"].score == plain["chrf"]
    assert found.plain_signatures == {
        "bleu": plain.signatures["bleu"],
        "chrf": plain.signatures["chrf"],
        "ter": str(ter.get_signature()),
    }


def test_without_samples_randomization_has_no_intervals(systems, references):
    found = resample_scores(systems, references, ResamplingOptions(0, "approximate", 20))
    assert [row["bleu"].mean for row in found.systems] == [None] * 3
    assert found.systems[1]["bleu"].p_value < 0.1 and "|bs:" not in found.signatures["bleu"]


@pytest.fixture
def runs(tmp_path, monkeypatch, systems, references):
    """Run directories named after the systems, whose translators say what these say."""
    sources = [f"source {number}" for number in range(COUNT)]
    for name in systems:
        for checkpoint in ("250", "average"):
            (tmp_path / name / "checkpoints" / checkpoint).mkdir(parents=True)
        save_config(Config(), tmp_path / name / "config.json")
    (tmp_path / "source").write_text("".join(f"{line}\n" for line in sources))
    (tmp_path / "reference").write_text("".join(f"{line}\n" for line in references))
    (tmp_path / "bad.txt").write_text("".join(f"{line}\n" for line in systems["bad"]))

    class FakeTranslator:
        def __init__(self, run, options):
            self.config = Config(search=options.search or SearchConfig())
            self.checkpoint, self.step = options.checkpoint or "best", 250
            self.said = systems[run.name]

        def translate(self, lines, *, on_progress=None):
            assert list(lines) == sources
            return [Translation(text, 0.0, 0.0, ()) for text in self.said]

    monkeypatch.setattr(Translator, "load", FakeTranslator)
    pairs = [type("Pair", (), {"source": s, "target": t}) for s, t in zip(sources, references, strict=True)]
    rows = type("Pairs", (list,), {"documents": None})
    sets = {"toy_de_en": rows(pairs), "shorter": rows(pairs[:-1])}
    monkeypatch.setattr(scored_set, "has_split", lambda data, split: split == "test" and data.dataset in sets)
    monkeypatch.setattr(scored_set, "read_pairs", lambda data, split, tagged: sets[data.dataset])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def evaluate(runs, *against, samples=20, **options):
    return evaluate_run(
        runs / "good",
        against=[parse_compared_system(name) for name in against],
        resampling=make_resampling_options(samples, None, None, compared=against),
        **options,
    )


def test_a_run_is_compared_with_runs_and_files(runs, systems, references):
    found = evaluate(runs, "like@average", "bad.txt")
    assert json.loads(json.dumps(found)) == found
    all_three = {name: systems[name] for name in ("good", "like", "bad")}
    expected = resample_scores(all_three, references, ResamplingOptions(20))
    like, bad = found["against"]
    assert (like["name"], like["checkpoint"], like["method"]) == ("like@average", "average", "beam")
    assert bad["name"] == "bad.txt" and "checkpoint" not in bad
    for metric in ("bleu", "chrf", "ter"):
        assert like[metric] == expected.systems[1][metric]._asdict()
        assert bad[metric] == expected.systems[2][metric]._asdict()
        own = expected.systems[0][metric]
        assert (found["confidence"][metric]["mean"], found["confidence"][metric]["ci"]) == own[1:3]
        assert found["confidence"][metric]["signature"] == expected.signatures[metric]
    assert found["paired"] == {"test": "bootstrap", "signatures": expected.signatures}
    assert bad["differing"] == sum(a != b for a, b in zip(systems["good"], systems["bad"], strict=True))
    assert found["ter"] == TER().corpus_score(systems["good"], [references]).score
    rows = write_text(describe_evaluation(found, name="good"), indent="").split("\n")
    assert rows[0].split() == ["BLEU", "chrF", "TER"]
    assert [row.split()[0] for row in rows[1:4]] == [f"good@{found['checkpoint']}", "like@average", "bad.txt"]
    again = describe_evaluation(found | {"checkpoint": "best"}, name="like")[0]
    assert [row[0].split()[0] for row in again.rows] == ["like@best", "like@average", "bad.txt"]
    assert rows[1].startswith(f"good@{found['checkpoint']} (step 250) ")
    assert rows[2].startswith("like@average (step 250) ") and like["step"] == found["step"] == 250
    assert f"{bad['bleu']['score']:.2f} ± {bad['bleu']['ci']:.2f}" in rows[3] and "p=0.0476" in rows[3]


def test_the_sentences_that_differ_most_are_kept(runs, systems, references):
    evaluate(runs, "bad.txt", "good")
    file = runs / "good" / "translations" / "test.differences.tsv"
    heading, *rows = [line.split("\t") for line in file.read_text().split("\n")[:-1]]
    assert heading[:4] == ["against", "line", "chrF", "chrF against"] and len(heading) == 8
    unlike = [i for i in range(COUNT) if systems["good"][i] != systems["bad"][i]]
    assert sorted(int(row[1]) - 1 for row in rows) == unlike  # all against bad.txt, none against itself
    distances = [abs(float(row[2]) - float(row[3])) for row in rows]
    assert distances == pytest.approx(sorted(distances, reverse=True), abs=0.03) and distances[0] > 10
    index = int(rows[0][1]) - 1
    assert rows[0][0] == "bad.txt"
    texts = [f"source {index}", references[index], systems["good"][index], systems["bad"][index]]
    assert rows[0][4:] == texts
    evaluate_run(runs / "good")
    assert not file.exists()  # it would be about other translations


def test_runs_are_compared_on_one_set_only(runs):
    save_config(Config(data=DataConfig(dataset="shorter")), runs / "like" / "config.json")
    save_config(Config(data=DataConfig(dataset="without")), runs / "bad" / "config.json")
    with raises(UserError, match=r"good has the test split of toy_de_en \(60 pairs, de to en\), but") as told:
        evaluate(runs, "like")
    assert "like that of shorter (59 pairs, de to en)" in str(told.value)
    assert "--source=FILE" in str(told.value)
    with raises(UserError, match="bad has without, without a test split; score both"):
        evaluate(runs, "bad")
    assert not (runs / "good" / "translations").exists()
    found = evaluate(runs, "like", "bad", source="source", reference="reference")
    assert [rival["name"] for rival in found["against"]] == ["like", "bad"]


def test_what_cannot_be_compared_ends_with_one_line(runs, capfd, monkeypatch):
    text_alone = dataclasses.replace(Config().data, source_language="")
    (runs / "text").mkdir()
    save_config(Config(data=text_alone), runs / "text" / "config.json")
    (runs / "empty").mkdir()
    (runs / "short.txt").write_text("a\nb\n")
    for flags, message in [
        (["--against=gone"], "--against=gone is neither a run directory nor a file of translations"),
        (["--against=empty"], "empty is not a run directory: it has no config.json"),
        (["--against=bad@77"], "there is no checkpoint 77; "),
        (["--against=text"], "--against=text is a language model (its data.source_language is empty)"),
        (["--against=short.txt"], "short.txt has 2 lines, but test has 60 sentences"),
        (["--against=bad,like,bad"], "--against names bad twice; name it once"),
        (["--bootstrap=1"], "--bootstrap is 1; it must be 0 for no intervals, or at least 2"),
        (["--against=bad", "--bootstrap=0"], "--bootstrap is 0, but comparing by paired bootstrap needs"),
        (["--paired=approximate"], "--paired=approximate has no effect without --against=RUN"),
        (["--against=bad", "--trials=9"], "--trials=9 has no effect without --against=RUN --paired=appro"),
        (["--against=bad", "--paired=approximate", "--trials=0"], "--trials is 0; it must be at least 1"),
    ]:
        assert main(["evaluate", "--run=good", *flags]) == 2, flags
        out, err = capfd.readouterr()
        assert out == "" and err.startswith(f"error: {message}") and err.count("\n") == 1, err
    for flags in (["--against=good"], ["--bootstrap=9"], ["--paired=bootstrap"]):
        assert main(["evaluate", "--run=text", *flags]) == 2
        message = capfd.readouterr().err
        assert "text is a language model" in message and f"leave out {flags[0].partition('=')[0]}" in message
    with raises(UserError, match="no translations to compare with those of good"):
        evaluate_run(runs / "text", against=[parse_compared_system("good")])


def test_the_command_prints_json_and_tables_and_searches_alike(runs, capfd):
    own = dataclasses.replace(Config(), search=SearchConfig(length_penalty=1.5))
    save_config(own, runs / "like" / "config.json")
    flags = ["--against=like", "--paired=approximate", "--trials=30", "--bootstrap=0", "--beam_size=7"]
    assert main(["evaluate", "--run=good", *flags]) == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    (rival,) = found["against"]
    assert (found["beam_size"], found["length_penalty"]) == (7, SearchConfig().length_penalty)
    assert (rival["beam_size"], rival["length_penalty"]) == (7, 1.5)  # of its own config: no flag says else
    assert "confidence" not in found and "|ar:30|" in found["paired"]["signatures"]["bleu"]
    assert "source words" in err and "like" in err and "±" not in err
    assert main(["evaluate", "--run=good", "--bootstrap=9"]) == 0
    assert json.loads(capfd.readouterr().out)["confidence"]["samples"] == 9
