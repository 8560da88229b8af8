"""What an evaluation reports, from a translator that says what it is told."""

import dataclasses
import io
import json

import pytest

from flaxformer_mt.config import Config, SearchConfig, TrainConfig
from flaxformer_mt.config.files import save_config
from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation import evaluation_set as scored_set
from flaxformer_mt.evaluation.comparison import ResamplingOptions
from flaxformer_mt.evaluation.evaluate import describe_evaluation, evaluate_lines, evaluate_run
from flaxformer_mt.evaluation.evaluation_set import (
    Translations,
    format_side_by_side,
    load_translations,
    save_translations,
)
from flaxformer_mt.evaluation.metrics import resample_scores, score_translations
from flaxformer_mt.evaluation.score_breakdowns import describe_by_length, score_by_length
from flaxformer_mt.translation.translator import Translation, Translator

# What the fake knows: capitals are right, but the references have a small letter.
SOURCES = ["eins zwei drei vier fünf", "sechs sieben acht neun", ""]
REFERENCES = ["one two three four five", "six seven eight nine", "nothing at all here"]
ANSWERS = {SOURCES[0]: "One two three four five", SOURCES[1]: "six seven eight nine", "": ""}


class FakeTranslator:
    on_progress = None

    def __init__(self, search=None):
        self.config = Config(search=search or SearchConfig(beam_size=5, length_penalty=0.6))
        self.checkpoint, self.step = "best", 250

    def translate(self, lines):
        return [Translation(ANSWERS[line], 0.0, 0.0, (), truncated=line == SOURCES[1]) for line in lines]


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    save_config(Config(), tmp_path / "config.json")

    def load(run_dir, *, checkpoint, search, **options):
        fake = FakeTranslator(search)
        fake.checkpoint = checkpoint or "best"
        return fake

    monkeypatch.setattr(Translator, "load", load)
    return tmp_path


def write(path, lines, *, end=b"\n"):
    path.write_bytes(end.join(line.encode() for line in lines) + end)
    return str(path)


# ---- lines ----


def test_evaluate_lines_scores_what_the_translator_says():
    translator = FakeTranslator()
    cased = evaluate_lines(translator, SOURCES, REFERENCES, lowercase=False, tokenize="13a")
    assert cased.hypotheses == tuple(ANSWERS[source] for source in SOURCES)
    assert cased.truncated == 1
    assert 0 < cased.scores.bleu < 100 and 0 < cased.scores.chrf < 100 and cased.seconds >= 0
    uncased = evaluate_lines(translator, SOURCES, REFERENCES, lowercase=True, tokenize="13a")
    assert uncased.scores.bleu > cased.scores.bleu
    right = evaluate_lines(translator, SOURCES[1:2], REFERENCES[1:2], lowercase=False, tokenize="13a")
    assert right.scores.bleu == pytest.approx(100)


def test_progress_is_said_at_once_and_only_if_asked(capfd):
    said = io.StringIO()
    translator = FakeTranslator()
    translator.on_progress = before = object()
    evaluate_lines(translator, SOURCES, REFERENCES, lowercase=False, tokenize="13a", progress=said)
    assert (
        said.getvalue() == "translating 3 sentences with checkpoint best (step 250) (beam search, beam 5)\n"
    )
    assert translator.on_progress is before
    evaluate_lines(translator, SOURCES, REFERENCES, lowercase=False, tokenize="13a")
    assert capfd.readouterr() == ("", "")


def test_unequal_or_no_lines_are_refused():
    with pytest.raises(UserError, match="3 sources cannot be scored against 2 references"):
        evaluate_lines(FakeTranslator(), SOURCES, REFERENCES[:2], lowercase=False, tokenize="13a")
    with pytest.raises(UserError, match="0 lines"):
        evaluate_lines(FakeTranslator(), [], [], lowercase=False, tokenize="13a")


# ---- files of translations ----


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


def test_side_by_side_is_spread_over_the_set():
    numbers = [str(number) for number in range(30)]
    text = format_side_by_side(
        Translations(*(tuple(letter + n for n in numbers) for letter in ("s", "r", "h"))), count=3
    )
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


# ---- by length ----


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
    assert (rows[0]["bleu"], rows[0]["chrf"]) == (part.bleu, part.chrf)
    assert rows[1]["bleu"] == pytest.approx(100) and 0 < rows[2]["bleu"] < 100
    table = describe_by_length(rows).split("\n")
    assert [line.split()[:2] for line in table[1:4]] == [["0-5", "2"], ["6-10", "2"], ["11-15", "1"]]
    assert table[4].split() == ["101", "or", "more", "2", "100.00", "100.00", "6.0", "6.0"]
    assert len({len(line) for line in table}) == 1


def test_buckets_count_case_as_they_are_told():
    one = Translations(("x",), ("a b c d e",), ("A B C D E",))
    scores = [score_by_length(one, lowercase=case, tokenize="13a")[0]["bleu"] for case in (True, False)]
    assert scores == [pytest.approx(100), 0]


# ---- runs ----


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
    chars = evaluate_run(run_dir, source=source, reference=reference, tokenize="char")
    assert "|tok:char|" in chars["signature"] and "|tok:char|" in chars["lowercased"]["signature"]


def test_an_evaluation_has_edits_lengths_and_if_asked_intervals(run_dir):
    files = {"source": write(run_dir / "a", SOURCES), "reference": write(run_dir / "b", REFERENCES)}
    light = evaluate_run(run_dir, **files)
    ter = resample_scores({"": list(ANSWERS.values())}, REFERENCES, samples=0, only=["ter"])
    assert (light["ter"], light["ter_signature"]) == (
        ter.systems[0]["ter"].score,
        ter.plain_signatures["ter"],
    )
    assert [(row["to"], row["sentences"]) for row in light["by_length"]] == [(5, 3)]
    assert light["by_length"][0]["bleu"] == light["bleu"]
    assert not light.keys() & {"confidence", "against", "paired"}
    sure = evaluate_run(run_dir, **files, resamples=ResamplingOptions(20))
    assert light.items() <= (sure | {"seconds": light["seconds"]}).items()
    confidence = sure["confidence"]
    assert (confidence["samples"], confidence["level"]) == (20, 95)
    for metric in ("bleu", "chrf", "ter"):
        assert confidence[metric]["ci"] > 0 and "|bs:20|seed:12345|" in confidence[metric]["signature"]
    assert sure == evaluate_run(run_dir, **files, resamples=ResamplingOptions(20)) | {
        "seconds": sure["seconds"]
    }
    table = describe_evaluation(sure, name="mine")
    assert f"{sure['ter']:.2f} ± {confidence['ter']['ci']:.2f}" in table and "source words" in table
    assert "±" not in describe_evaluation(light, name="mine")
    assert describe_evaluation({"perplexity": 2.0}, name="text") == ""


def test_evaluate_run_counts_case_as_the_config_says(run_dir):
    files = {"source": write(run_dir / "a", SOURCES), "reference": write(run_dir / "b", REFERENCES)}
    save_config(dataclasses.replace(Config(), train=TrainConfig(lowercase=True)), run_dir / "config.json")
    found = evaluate_run(run_dir, **files)
    assert found["bleu"] == found["lowercased"]["bleu"] != found["cased"]["bleu"]
    assert evaluate_run(run_dir, **files, lowercase=False)["bleu"] == found["cased"]["bleu"]


def test_evaluate_run_on_a_split(run_dir, monkeypatch):
    pairs = [type("Pair", (), {"source": s, "target": t}) for s, t in zip(SOURCES, REFERENCES, strict=True)]
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
    with pytest.raises(UserError, match="without a reference"):
        evaluate_run(run_dir, source=source)
    with pytest.raises(UserError, match="without a source"):
        evaluate_run(run_dir, reference=short)
    with pytest.raises(UserError, match="both"):
        evaluate_run(run_dir, source=source, reference=source)
    with pytest.raises(UserError, match="nowhere does not exist"):
        evaluate_run(run_dir, source=source, reference=str(run_dir / "nowhere"))
    (run_dir / "latin1").write_bytes(b"\xe4\n" * 3)
    with pytest.raises(UserError, match="latin1, line 1, is not UTF-8"):
        evaluate_run(run_dir, source=source, reference=str(run_dir / "latin1"))
    with pytest.raises(UserError, match="not a run directory"):
        evaluate_run(tmp_path_factory.mktemp("empty"), source=source, reference=short)
    assert not (run_dir / "translations").exists()
