"""What an evaluation reports: from a translator that says what it is told, by direction, and its loss."""

import dataclasses
import io
import json
import math
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_mt import define_scorer
from flaxformer_mt.commands.main import main
from flaxformer_mt.config import Config, SearchConfig, TrainConfig
from flaxformer_mt.config.files import save_config
from flaxformer_mt.corpus import read_pairs
from flaxformer_mt.corpus.pairs import Pair, Part
from flaxformer_mt.errors import FlaxformerWarning, UserError
from flaxformer_mt.evaluation import evaluation_set as scored_set
from flaxformer_mt.evaluation.evaluate import describe_evaluation, evaluate_run
from flaxformer_mt.evaluation.evaluation_set import (
    Translations,
    format_side_by_side,
    load_translations,
    save_translations,
)
from flaxformer_mt.evaluation.perplexity import Likelihood, measure
from flaxformer_mt.evaluation.score_breakdowns import (
    DirectionScorer,
    describe_by_length,
    score_by_length,
    score_terms,
)
from flaxformer_mt.evaluation.tables import write_text
from flaxformer_mt.scoring import metrics
from flaxformer_mt.scoring.metrics import score_translations
from flaxformer_mt.scoring.significance import ResamplingOptions, resample_scores
from flaxformer_mt.training.final_report import describe_report
from flaxformer_mt.translation.glossary import Glossary
from flaxformer_mt.translation.translator import Translation, Translator

# What the fake knows: capitals are right, but the references have a small letter.
SOURCES = ["eins zwei drei vier fünf", "sechs sieben acht neun", ""]
REFERENCES = ["one two three four five", "six seven eight nine", "nothing at all here"]
ANSWERS = {SOURCES[0]: "One two three four five", SOURCES[1]: "six seven eight nine", "": ""}


class FakeTranslator:
    def __init__(self, search=None):
        self.config = Config(search=search or SearchConfig(beam_size=5, length_penalty=0.6))
        self.checkpoint, self.step = "best", 250

    def translate(self, lines, *, on_progress=None):
        return [Translation(ANSWERS[line], 0.0, 0.0, (), truncated=line == SOURCES[1]) for line in lines]


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    save_config(Config(), tmp_path / "config.json")

    def load(run_dir, options):
        fake = FakeTranslator(options.search)
        fake.checkpoint = options.checkpoint or "best"
        return fake

    monkeypatch.setattr(Translator, "load", load)
    return tmp_path


def write(path, lines, *, end=b"\n"):
    path.write_bytes(end.join(line.encode() for line in lines) + end)
    return str(path)


def test_a_run_that_cannot_be_written_is_evaluated(run_dir):
    source, reference = write(run_dir / "s", SOURCES), write(run_dir / "r", REFERENCES)
    expected = evaluate_run(run_dir, source=source, reference=reference, against=[reference])
    shutil.rmtree(run_dir / "translations")
    (run_dir / "translations").write_text("in the way, as a folder without the right to write")
    with pytest.warns(FlaxformerWarning, match=r"the translations are not kept in the run: File exists"):
        result = evaluate_run(run_dir, source=source, reference=reference, against=[reference])
    assert result["bleu"] == expected["bleu"] and result["against"] == expected["against"]


def test_scorers_are_reported_with_references_and_without(run_dir, monkeypatch, capsys):
    monkeypatch.setattr(metrics, "_OTHERS", dict(metrics._OTHERS))
    seen = []

    def kiwi(sources, hypotheses, references):
        seen.append((sources, references))
        return [0.25 if one[:1].isupper() else 0.5 for one in hypotheses]

    define_scorer(kiwi)
    source, reference = write(run_dir / "s", SOURCES), write(run_dir / "r", REFERENCES)
    files = {"source": source, "reference": reference}
    result = evaluate_run(
        run_dir, **files, scorers=["kiwi", "chrf++", "ter"], resampling=ResamplingOptions(20)
    )
    assert result["kiwi"] == pytest.approx((0.25 + 0.5 + 0.5) / 3) and result["scorers"] == ["kiwi", "chrf++"]
    assert result["chrf++_signature"].startswith("nrefs:1|case:mixed|")
    assert {"bleu", "chrf", "ter", "kiwi", "chrf++"} < result["confidence"].keys()
    assert (list(seen[-1][0]), list(seen[-1][1])) == (SOURCES, REFERENCES)
    table = write_text(describe_evaluation(result, name="run"))
    assert "kiwi" in table.splitlines()[0] and "chrF++" in table.splitlines()[0].replace("chrf++", "chrF++")

    other = write(run_dir / "other", ["two", "Three", "four"])
    result = evaluate_run(run_dir, source=source, scorers=["kiwi"], against=[other])
    assert seen[-1][1] is None and "bleu" not in result and "by_length" not in result
    assert result["kiwi"] == result["against"][0]["kiwi"]["score"] == pytest.approx(1.25 / 3)
    assert (run_dir / "translations" / "s.hypothesis").exists()
    system = (run_dir / "translations" / "s.system").read_text(encoding="utf-8")
    assert re.fullmatch(r"checkpoint \w+( \(step \d+\))? \(\w+ search(, beam \d+)?\)\n", system)
    assert not (run_dir / "translations" / "s.reference").exists()
    assert "kiwi" in write_text(describe_evaluation(result, name="run"))
    for options, message in (
        ({"source": source, "scorers": ["kiwi", "chrf++"]}, "has no references, with which chrf.. compares"),
        ({"source": source}, "given without a reference; give both files"),
        ({**files, "scorers": ["kivi"]}, "the score 'kivi', which is not defined; did you mean kiwi"),
    ):
        with pytest.raises(UserError, match=message):
            evaluate_run(run_dir, **options)


def test_the_weight_of_a_scorer_is_found_on_the_sentences(run_dir, monkeypatch, capsys):
    """The scorer likes the second hypothesis of the first sentence, and of the second a little."""
    monkeypatch.setattr(metrics, "_OTHERS", dict(metrics._OTHERS))
    likes = {"one two three four five": 3.0, "wrong": 1.0}
    define_scorer(
        lambda sources, hypotheses, references: [likes.get(one, 0.0) for one in hypotheses], name="kiwi"
    )

    def translate(self, lines, n_best=1):
        others = {SOURCES[0]: "one two three four five", SOURCES[1]: "wrong"}
        return [
            Translation(
                ANSWERS[line], -1.0, -1.0, (5, 2), alternatives=(Translation(others[line], -2.0, -2.0, (2,)),)
            )
            if line
            else Translation("", math.nan, 0.0, ())
            for line in lines
        ]

    monkeypatch.setattr(FakeTranslator, "translate", translate)
    files = {"source": write(run_dir / "s", SOURCES), "reference": write(run_dir / "r", REFERENCES)}
    search = SearchConfig(beam_size=2, rerank="kiwi")
    found = evaluate_run(run_dir, **files, search=search, tune_rerank="bleu")
    tried = found["scores"]
    # Half of the model's mean deviation is the first score's; a weight of 1 changes the second sentence too.
    weight = found["rerank_weight"]
    assert 1 / 3 < float(weight) < 1 and tried[weight] == max(tried.values()) > max(tried["0"], tried["none"])
    assert describe_evaluation(found, name="run") == []
    for options, message in (
        ({"search": SearchConfig()}, "--tune_rerank needs --rerank=SCORER"),
        ({"search": dataclasses.replace(search, rerank_weight=1.0)}, "finds --rerank_weight: leave this out"),
        ({"search": search, "tune_rerank": "blue"}, "--tune_rerank names the score 'blue'"),
    ):
        with pytest.raises(UserError, match=message):
            evaluate_run(run_dir, **files | {"tune_rerank": "bleu"} | options)


def test_progress_is_said_at_once_and_only_if_asked(run_dir, capfd):
    said = io.StringIO()
    files = {"source": write(run_dir / "s", SOURCES), "reference": write(run_dir / "r", REFERENCES)}
    for stream in (said, None):
        evaluate_run(run_dir, **files, progress=stream)
    expected = "translating 3 sentences with checkpoint best (step 250) (beam search, beam 5)\n"
    assert said.getvalue().startswith(expected) and capfd.readouterr() == ("", "")
    nothing = {name: write(run_dir / name, [], end=b"") for name in ("source", "reference")}
    with pytest.raises(UserError, match="0 lines"):
        evaluate_run(run_dir, **nothing)


def test_translations_keep_their_lines(tmp_path):
    odd = ("a\x85b", "c\u2028d\te", "", "🐕", " f ")
    saved = Translations(odd, odd[::-1], ("x\ny", "p\rq", "r\r\ns", "", "t"))
    save_translations(tmp_path, "valid", saved)
    assert sorted(path.name for path in (tmp_path / "translations").iterdir()) == [
        "valid.hypothesis",
        "valid.reference",
        "valid.source",
    ]
    assert (tmp_path / "translations" / "valid.hypothesis").read_bytes() == b"x y\np q\nr  s\n\nt\n"
    loaded = load_translations(tmp_path, "valid")
    assert (loaded.sources, loaded.references) == (odd, odd[::-1])
    assert loaded.hypotheses == ("x y", "p q", "r  s", "", "t")
    with pytest.raises(UserError, match="test.source"):
        load_translations(tmp_path, "test")


def test_whoever_reads_translations_meanwhile_has_the_old_ones_whole(tmp_path):
    save_translations(tmp_path, "test", Translations(("a",), (), ("old",)))
    with (tmp_path / "translations" / "test.hypothesis").open() as reader:
        save_translations(tmp_path, "test", Translations(("a",), (), ("new",)))
        assert reader.read() == "old\n"
    assert (tmp_path / "translations" / "test.hypothesis").read_text() == "new\n"


def test_side_by_side_is_spread_over_the_set():
    numbers = [str(number) for number in range(30)]
    texts = (tuple(letter + n for n in numbers) for letter in ("s", "r", "h"))
    text = format_side_by_side(Translations(*texts), count=3)
    assert text.split("\n\n") == [
        f"source       s{n}\ntranslation  h{n}\nreference    r{n}" for n in (0, 10, 20)
    ]
    two = Translations(("a", "b"), ("c", "d"), ("e\nf", "g"))
    assert format_side_by_side(two).count("source") == 2 and "translation  e f" in format_side_by_side(two)
    assert format_side_by_side(Translations((), (), ())) == ""


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("flaxformer_mt.evaluation.evaluation_set.is_first", lambda: False)
    save_translations(tmp_path, "test", Translations(("a",), ("b",), ("c",)))
    assert not list(tmp_path.iterdir())


def words(count, word="w"):
    return " ".join([word] * count)


def test_buckets_are_by_words_of_the_source():
    """0 to 5, 6 to 10, ...; longer than 100 has no end; what has no sentences is left out."""
    counts = [0, 5, 6, 10, 11, 101, 300]
    sources = tuple(words(count) for count in counts)
    references = tuple(f"a b c d e {count}" for count in counts)
    hypotheses = ("", *references[1:4], "a b c d", *references[5:])
    rows = score_by_length(Translations(sources, references, hypotheses), lowercase=False, tokenize="13a")
    assert [(row["from"], row["to"], row["sentences"]) for row in rows] == [
        (0, 5, 2),
        (6, 10, 2),
        (11, 15, 1),
        (101, None, 2),
    ]
    assert [row["hypothesis_length"] for row in rows] == [3, 6, 4, 6]
    assert [row["reference_length"] for row in rows] == [6, 6, 6, 6]
    part = score_translations(hypotheses[:2], references[:2])
    assert (rows[0]["bleu"], rows[0]["chrf"]) == (part["bleu"], part["chrf"])
    assert rows[1]["bleu"] == pytest.approx(100) and 0 < rows[2]["bleu"] < 100
    table = write_text([describe_by_length(rows)], indent="").split("\n")
    assert [line.split()[:2] for line in table[1:4]] == [["0-5", "2"], ["6-10", "2"], ["11-15", "1"]]
    assert table[4].split() == ["101", "or", "more", "2", "100.00", "100.00", "6.0", "6.0"]
    assert len({len(line) for line in table}) == 1


def test_terms_are_counted_where_the_reference_has_them():
    """As whole words; a term that the reference translates otherwise is not counted."""
    texts = Translations(
        ("Hund", "Hund", "Hund, Apfel", "Hund", "Apfel"),
        ("dog!", "a dog", "a dog (red apple)", "a cat", "red apples"),
        ("dog", "the dogs .", "my “red apple”", "dog", "red apple"),
    )
    found = score_terms(texts, Glossary.make({"Hund": "dog", "Apfel": "red apple"}))
    assert found == {"count": 4, "used": 0.5}
    assert score_terms(texts, Glossary.make({"Katze": "cat"})) == {"count": 0, "used": None}
    spelled = Translations(("Hu\u00adnd",), ("ein\u00a0Bu\u0308ro",), ("\u200eein Büro.",))
    assert score_terms(spelled, Glossary.make({"Hund": "ein Büro"})) == {"count": 1, "used": 1.0}


def test_a_glossary_is_that_of_the_run_and_its_report(run_dir, tmp_path):
    """The fake translator has no such argument, and is given one only with a glossary."""
    source, reference = tmp_path / "source", tmp_path / "reference"
    source.write_text("eins zwei drei vier fünf\n", encoding="utf-8")
    reference.write_text("one two three four five\n", encoding="utf-8")
    files = {"source": source, "reference": reference}
    assert "terms" not in evaluate_run(run_dir, **files)
    given = []
    with pytest.MonkeyPatch.context() as patch:
        plain = FakeTranslator.translate
        patch.setattr(
            FakeTranslator,
            "translate",
            lambda self, lines, glossary, **more: given.append(glossary) or plain(self, lines),
        )
        result = evaluate_run(run_dir, **files, glossary={"drei": "three", "sechs": "six"})
    assert given == [Glossary.make({"drei": "three", "sechs": "six"})]
    assert result["terms"] == {"count": 1, "used": 1.0}


def test_evaluate_run_on_files(run_dir):
    source = write(run_dir / "set.de", SOURCES)
    reference = write(run_dir / "set.en", REFERENCES, end=b"\r\n")
    found = evaluate_run(run_dir, source=source, reference=reference, checkpoint="10", lowercase=True)
    assert json.loads(json.dumps(found)) == found
    assert (found["name"], found["checkpoint"], found["sentences"]) == ("set.de", "10", 3)
    assert found["step"] == 250
    assert (found["method"], found["beam_size"], found["length_penalty"]) == ("beam", 5, 0.6)
    assert found["bleu"] == found["lowercased"]["bleu"] > found["cased"]["bleu"]
    assert found["signature"] == found["lowercased"]["signature"]
    assert "case:lc" in found["lowercased"]["signature"] and "case:mixed" in found["cased"]["signature"]
    assert load_translations(run_dir, "set.de").references == tuple(REFERENCES)
    cased = evaluate_run(run_dir, source=source, reference=reference, search=SearchConfig(method="greedy"))
    assert cased["bleu"] == cased["cased"]["bleu"] == found["cased"]["bleu"]
    assert cased["lowercased"] == found["lowercased"]
    assert (cased["method"], cased["beam_size"]) == ("greedy", 1)
    assert "|tok:13a|" in cased["signature"]
    save_config(dataclasses.replace(Config(), train=TrainConfig(lowercase=True)), run_dir / "config.json")
    configured = evaluate_run(run_dir, source=source, reference=reference)
    assert configured["bleu"] == configured["lowercased"]["bleu"] == found["bleu"]
    chars = evaluate_run(run_dir, source=source, reference=reference, tokenize="char")
    assert "|tok:char|" in chars["signature"] and "|tok:char|" in chars["lowercased"]["signature"]


def test_an_evaluation_has_edits_lengths_and_if_asked_intervals(run_dir):
    files = {"source": write(run_dir / "a", SOURCES), "reference": write(run_dir / "b", REFERENCES)}
    light = evaluate_run(run_dir, **files)
    ter = resample_scores({"": list(ANSWERS.values())}, REFERENCES, ResamplingOptions(), only=["ter"])
    assert light["ter"] == ter.systems[0]["ter"].score
    assert light["ter_signature"] == ter.plain_signatures["ter"]
    assert [(row["to"], row["sentences"]) for row in light["by_length"]] == [(5, 3)]
    assert light["by_length"][0]["bleu"] == light["bleu"]
    assert not light.keys() & {"confidence", "against", "paired"}
    sure = evaluate_run(run_dir, **files, resampling=ResamplingOptions(20))
    assert light.items() <= (sure | {"seconds": light["seconds"]}).items()
    confidence = sure["confidence"]
    assert (confidence["samples"], confidence["level"]) == (20, 95)
    for metric in ("bleu", "chrf", "ter"):
        assert confidence[metric]["ci"] > 0 and "|bs:20|seed:12345|" in confidence[metric]["signature"]
    table = write_text(describe_evaluation(sure, name="mine"))
    assert f"{sure['ter']:.2f} ± {confidence['ter']['ci']:.2f}" in table and "source words" in table
    assert "±" not in write_text(describe_evaluation(light, name="mine"))
    assert describe_evaluation({"perplexity": 2.0}, name="text") == []


def test_evaluate_run_on_a_split(run_dir, monkeypatch):
    pairs = type("Pairs", (list,), {"documents": None})(map(Pair, SOURCES, REFERENCES))
    monkeypatch.setattr(scored_set, "has_split", lambda data, split: split == "valid")
    monkeypatch.setattr(scored_set, "read_pairs", lambda data, split, tagged: {"valid": pairs}[split])
    with pytest.raises(UserError, match="split is 'trial'; it must be test or valid"):
        evaluate_run(run_dir, split="trial")
    found = evaluate_run(run_dir, split="valid")
    assert (found["name"], found["sentences"], found["truncated"]) == ("valid", 3, 1)
    assert load_translations(run_dir, "valid").sources == tuple(SOURCES)
    with pytest.raises(UserError, match="toy_de_en has no test split"):
        evaluate_run(run_dir)


def test_mistakes_with_files_are_named(run_dir, tmp_path_factory):
    source, short = write(run_dir / "a", SOURCES), write(run_dir / "b", REFERENCES[:2])
    with pytest.raises(UserError, match=r"a has 3 lines, but .*b has 2"):
        evaluate_run(run_dir, source=source, reference=short)
    with pytest.raises(UserError, match="both"):
        evaluate_run(run_dir, source=source, reference=source)
    (run_dir / "latin1").write_bytes(b"\xe4\n" * 3)
    with pytest.raises(UserError, match="latin1, line 1, is not UTF-8"):
        evaluate_run(run_dir, source=source, reference=str(run_dir / "latin1"))
    with pytest.raises(UserError, match="not a run directory"):
        evaluate_run(tmp_path_factory.mktemp("empty"), source=source, reference=short)
    assert not (run_dir / "translations").exists()


class Set:
    """What a scorer reads of the pairs of a set."""

    def __init__(self, parts, languages, targets):
        self.parts, self.languages, self.targets = parts, languages, targets

    def __getitem__(self, number):
        return Pair("", self.targets[number])


def test_each_direction_has_its_tokenizer_and_counts_alike_in_the_mean():
    references = ("a b c d e f", "a b c d", "他是我的老师。")
    hypotheses = ("a b c d e f", "a b c e", "他是你的老师。")
    languages, parts = (("zh", "en"), ("en", "zh")), (Part("a", 2, 1.0), Part("b", 1, 1.0))
    pairs = Set(parts, languages, references)
    found = DirectionScorer(pairs, TrainConfig()).score(Translations(("",) * 3, references, hypotheses))
    english = score_translations(hypotheses[:2], references[:2], tokenize="13a")
    chinese = score_translations(hypotheses[2:], references[2:], tokenize="zh")
    assert found == pytest.approx(
        {name: (english[name] + chinese[name]) / 2 for name in english}
        | {f"{name}_zh-en": score for name, score in english.items()}
        | {f"{name}_en-zh": score for name, score in chinese.items()}
    )
    one = Set(parts[:1], languages[:1], references[:2])
    alone = DirectionScorer(one, TrainConfig()).score(Translations(("",) * 2, references, hypotheses))
    assert alone == english


def test_validation_and_report_have_each_direction(two_way_run):
    records = [json.loads(line) for line in (two_way_run / "metrics.jsonl").read_text().split("\n") if line]
    (valid,) = (record for record in records if record["split"] == "valid")
    for metric in ("bleu", "chrf"):
        each = [valid[f"{metric}_xx-yy"], valid[f"{metric}_yy-xx"]]
        assert valid[metric] == pytest.approx(sum(each) / 2)
    log = (two_way_run.parent / "log").read_text()
    assert "parallel_text:xx-yy,parallel_text:yy-xx xx-yy, yy-xx: 128 pairs" in log
    shares = "33.3% parallel_text:xx-yy (64 pairs x 1), 66.7% parallel_text:yy-xx (64 pairs x 2)"
    assert f"mixture: {shares}" in log
    assert f"| xx-yy {valid['bleu_xx-yy']:.2f} | yy-xx {valid['bleu_yy-xx']:.2f}" in log
    report = json.loads((two_way_run / "report.json").read_text())
    assert set(report["test"]["directions"]) == {"xx-yy", "yy-xx"}
    assert report["test"]["sentences"] == 12
    assert "yy-xx              6" in describe_report(report, two_way_run)


def test_evaluate_has_a_table_of_scores_by_direction(two_way_run, two_way_config, tiny_text, tmp_path, capfd):
    assert main(["evaluate", f"--run={two_way_run}", "--split=valid", "--bootstrap=0"]) == 0
    out, err = capfd.readouterr()
    result = json.loads(out)
    there, back = result["directions"]["xx-yy"], result["directions"]["yy-xx"]
    assert result["bleu"] == pytest.approx((there["bleu"] + back["bleu"]) / 2)
    assert there["name"] == "valid.xx-yy" and there["by_length"]
    assert "\ndirection  sentences  " in err and "\nxx-yy              6  " in err
    untagged = [pair.source for pair in read_pairs(two_way_config.data, "valid", tagged=False)]
    saved = two_way_run / "translations" / "valid.yy-xx.source"
    assert saved.read_text(encoding="utf-8").split("\n")[:-1] == untagged[6:]
    files = {"source": tiny_text / "valid.yy", "reference": tiny_text / "valid.xx"}
    for options in ({"split": "valid"}, files):
        one = evaluate_run(two_way_run, target_language="xx", **options)
        assert {"bleu": one["bleu"], "chrf": one["chrf"]} == {"bleu": back["bleu"], "chrf": back["chrf"]}
    with pytest.raises(UserError, match="translates to yy and xx; give --target_language=yy"):
        evaluate_run(two_way_run, **files)
    with pytest.raises(UserError, match="--target_language is zz, but this model translates to yy and xx"):
        evaluate_run(two_way_run, target_language="zz")


def measure_steps(steps):
    """The likelihood of batches whose results these are."""
    return measure(lambda params, batch: batch, None, steps, put=lambda batch: batch)


def test_likelihoods_are_means_over_all_batches():
    """Batches of 2 and 6 tokens; perplexity beyond the largest float is infinite."""
    two = {"loss": (jnp.float32(4.0), jnp.int32(2)), "accuracy": (jnp.bfloat16(1.0), 2)}
    six = {"loss": (np.float32(4.0), 6), "accuracy": (5.0, 6.0)}
    likelihood = measure_steps([two, six])
    assert likelihood == Likelihood(tokens=8, loss=1.0, accuracy=0.75)
    assert [type(value) for value in likelihood] == [int, float, float]
    assert likelihood.perplexity == math.e and Likelihood(1, 1000.0, 0.0).perplexity == math.inf
    # Sums do not wear out: in float32, 2**24 + 1 is 2**24.
    first = {"loss": (jnp.float32(2.0**24), jnp.int32(2**30)), "accuracy": (0.0, 1)}
    further = {"loss": (jnp.float32(1), jnp.int32(2**30)), "accuracy": (0.0, 1)}
    likelihood = measure_steps([first, *[further] * 3])
    assert (likelihood.tokens, likelihood.loss) == (2**32, (2**24 + 3) / 2**32)


class Unread:
    """A scalar that remembers whether its value was asked for."""

    was_read = False

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        self.was_read = True
        return np.ones((), dtype)


def test_no_step_waits_to_be_read():
    waiting = [Unread() for _ in range(12)]

    def one_by_one():
        for first in (0, 4, 8):
            loss, accuracy = waiting[first : first + 2], waiting[first + 2 : first + 4]
            yield {"loss": tuple(loss), "accuracy": tuple(accuracy)}
            assert not any(value.was_read for value in waiting)

    assert measure_steps(one_by_one()) == Likelihood(3, 1.0, 1.0)
    assert all(value.was_read for value in waiting)
