"""Minimum Bayes risk: the utilities are sacreBLEU's sentence scores, and the best expected one is chosen."""

import dataclasses
import itertools
import random
import sys

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from flaxformer_mt import define_scorer
from flaxformer_mt.config import SearchConfig
from flaxformer_mt.config.checks import check_n_best
from flaxformer_mt.errors import UserError
from flaxformer_mt.scoring import metrics
from flaxformer_mt.scoring.metrics import score_sentences
from flaxformer_mt.translation.minimum_bayes_risk import (
    MOST_REFERENCES,
    choose_candidates,
    compare_texts,
    distinct_texts,
    rank_candidates,
    score_chrf,
    weigh_references,
)
from flaxformer_mt.translation.requests import Request
from flaxformer_mt.translation.result import Translation
from flaxformer_mt.translation.segments import Segment
from flaxformer_mt.translation.translator import Translator

TEXTS = [
    "",
    "a",
    "ab",
    "  a  b ",
    "the cat sat on the mat.",
    "the cat sat on the the mat",
    "Ein Hund!",
    "ü\u3000x",
]


def segment(text, n_best=1):
    return Segment(Request(text, n_best=n_best), text, text)


def test_bleu_of_candidates_has_the_tokenizer_that_their_script_needs():
    """Whatever the candidates of other sentences are."""
    groups = {
        "char": ["ทำงานหนักมาก", "ทำงานหนักมากๆ", "ไม่มีใคร"],
        "zh": ["总数为 1234567。", "总数为 1234568。", "共 1234567 个。"],
        "13a": ["a b c", "a b d"],
    }
    found = compare_texts([("", texts, texts) for texts in groups.values()], "bleu")
    for (tokenize, texts), matrix in zip(groups.items(), found, strict=True):
        metric = BLEU(tokenize=tokenize, effective_order=True)
        wanted = [[metric.sentence_score(one, [other]).score for other in texts] for one in texts]
        np.testing.assert_array_equal(matrix, wanted)


def test_chrf_of_candidates_is_the_sentence_score_of_sacrebleu():
    draw = random.Random(2)
    texts = [
        *TEXTS,
        *(" ".join(draw.choices(["aa", "ab", "b,", "ba."], k=draw.randrange(12))) for _ in range(9)),
    ]
    metric = CHRF()
    wanted = [[metric.sentence_score(one, [other]).score for other in texts] for one in texts]
    np.testing.assert_array_equal(score_chrf(texts), wanted)


def make(text, log_prob):
    return Translation(text, score=log_prob, log_prob=log_prob, tokens=(5, 2))


def test_the_highest_expected_utility_is_chosen():
    """Samples count as often as they were drawn; hypotheses of a beam by their probabilities."""
    matrix = np.array([[1.0, 0.0, 0.2], [0.0, 1.0, 0.2], [0.5, 0.5, 1.0]])
    drawn = [make("x", -1.0), make("y", -2.0), make("y", -2.5), make("z", -3.0)]
    assert distinct_texts(drawn) == ["x", "y", "z"]

    def choose(candidates, matrix, method):
        weights = weigh_references(candidates, SearchConfig(mbr="chrf", method=method))
        assert list(weights) == distinct_texts(candidates)
        return choose_candidates(candidates, matrix @ np.array([*weights.values()]))

    samples = choose(drawn, matrix, "sample")
    assert [(one.text, one.log_prob) for one in samples] == [("z", -3.0), ("y", -2.0), ("x", -1.0)]
    np.testing.assert_allclose([one.score for one in samples], [0.625, 0.55, 0.3])
    beam = choose(drawn, matrix, "beam")
    weights = np.array([np.exp(-1), np.exp(-2) + np.exp(-2.5), np.exp(-3)])
    wanted = matrix @ weights / weights.sum()
    assert [one.text for one in beam] == [["x", "y", "z"][i] for i in np.argsort(-wanted)]
    np.testing.assert_allclose([one.score for one in beam], sorted(wanted, reverse=True))
    (alone,) = choose([make("", -1.0)], score_chrf([""]), "sample")
    assert alone.score == 0


def test_translations_are_chosen_among_the_samples_or_hypotheses(tiny_run):
    """The candidates are those of sampling, or of beam search, with the same options and seeds."""
    lines = ["aa ba", "", "bbb ab a"]

    def translate(n_best, **options):
        search = SearchConfig(max_length_offset=4, beam_size=3, seed=4, **options)
        return Translator.load(tiny_run, search=search, use_all_devices=False).translate(lines, n_best=n_best)

    samples = translate(5, method="sample")
    chosen = translate(1, method="sample", mbr="chrf", mbr_samples=5)
    several = translate(3, method="sample", mbr="bleu", mbr_samples=5)
    for one, other, drawn in zip(chosen, several, samples, strict=True):
        texts = [hypothesis.text for hypothesis in drawn.n_best]
        if not drawn.tokens:
            assert one.text == "" and np.isnan(one.score)
            continue
        expected = score_chrf(texts).mean(axis=1)
        assert one.score == pytest.approx(expected.max()) and not one.alternatives
        assert one.text == texts[int(np.argmax(np.round(expected, 9)))]
        scores = [hypothesis.score for hypothesis in other.n_best]
        assert scores == sorted(scores, reverse=True) and len({h.text for h in other.n_best}) == len(scores)
        bleu = [[score_sentences("bleu", [""], [a], [b])[0] for b in texts] for a in texts]
        assert scores[0] == pytest.approx(np.mean(bleu, axis=1).max())
    beams = translate(3, method="beam")
    chosen = translate(1, method="beam", mbr="chrf")
    assert all(one.text in [h.text for h in beam.n_best] for one, beam in zip(chosen, beams, strict=True))


def test_wrong_numbers_and_flags_are_refused(tiny_run, capsys):
    from flaxformer_mt.commands.main import main

    with pytest.raises(UserError, match=r"n_best is 33, but mbr chooses among mbr_samples=32; .*=33"):
        check_n_best(SearchConfig(method="sample", mbr="chrf"), 33)
    samples = ["--method=sample", "--mbr=chrf"]
    for flags, message in (
        ([*samples, "--beam_size=8"], "--beam_size=8 has no effect on sample search"),
        (["--mbr=chrf", "--mbr_samples=8"], "--mbr_samples=8 has no effect on beam search; give --method="),
        (["--method=sample", "--mbr_samples=8"], "--mbr_samples=8 has no effect without --mbr"),
        ([*samples, "--n_best=40"], "--n_best is 40, but --mbr chooses among --mbr_samples=32"),
        (["--mbr=chrf", "--n_best=40"], "--n_best is 40, but beam search with beam_size 2 keeps 2"),
        (["--mbr=chrf", "--method=greedy"], "--mbr is chrf, but --method is greedy, which finds one"),
        (["--mbr=chrf", "--rerank=chrf"], "--mbr is chrf and --rerank is chrf, but only one score"),
    ):
        assert main(["translate", f"--run={tiny_run}", "--input=/dev/null", *flags]) == 2
        (line,) = capsys.readouterr().err.strip().split("\n")
        assert line.startswith("error: ") and message in line, line


def test_any_metric_is_a_utility_and_scorers_from_outside_are_asked_once(monkeypatch):
    calls = []

    def overlap(sources, hypotheses, references):
        calls.append(len(hypotheses))
        rows = zip(sources, hypotheses, references, strict=True)
        return [len(set(source) & set(one) & set(other)) for source, one, other in rows]

    monkeypatch.setattr(metrics, "_OTHERS", dict(metrics._OTHERS))
    groups = [("abc", ["ab", "bc", "x"], ["ab", "bc", "x"]), ("d", ["d"], ["d"])]
    first, second = compare_texts(groups, define_scorer(overlap))
    assert calls == [10] and second.tolist() == [[1]]
    assert first.tolist() == [[2, 1, 0], [1, 2, 0], [0, 0, 0]]
    wanted = [[CHRF(word_order=2).sentence_score(a, [b]).score for b in TEXTS] for a in TEXTS]
    np.testing.assert_array_equal(compare_texts([("", TEXTS, TEXTS)], "chrf++")[0], wanted)


def test_an_outside_utility_has_no_more_than_16_references(monkeypatch):
    """Of a beam the best, of 32 samples every second; with few candidates all, as a metric built in has."""
    monkeypatch.setattr(metrics, "_OTHERS", dict(metrics._OTHERS))
    calls = []

    def similarity(sources, hypotheses, references):
        calls.append(len(hypotheses))
        rows = zip(hypotheses, references, strict=True)
        return [CHRF().sentence_score(one, [other]).score for one, other in rows]

    define_scorer(similarity)
    draw = random.Random(3)
    texts = ["".join(draw.choices("ab ", k=draw.randrange(1, 9))) for _ in range(32)]
    for method, size in itertools.product(("beam", "sample"), (MOST_REFERENCES, len(texts))):
        candidates = [make(text, -0.1 * number) for number, text in enumerate(texts[:size])]
        best = dataclasses.replace(candidates[0], alternatives=tuple(candidates[1:]))
        found, built_in = (
            rank_candidates([(segment("", size), best)], SearchConfig(mbr=mbr, method=method))[0][1].n_best
            for mbr in ("similarity", "chrf")
        )
        taken = candidates[: len(texts) // 2] if method == "beam" else candidates[:: size // MOST_REFERENCES]
        weights = np.exp([one.log_prob if method == "beam" else 0.0 for one in taken])
        matrix = [[CHRF().sentence_score(a.text, [b.text]).score for b in taken] for a in candidates]
        expected = dict(zip(texts[:size], matrix @ weights / weights.sum(), strict=True))
        for one in found:
            assert one.score == pytest.approx(expected[one.text])
        assert [one.score for one in found] == pytest.approx(sorted(expected.values(), reverse=True))
        if size == MOST_REFERENCES:
            assert [one.text for one in found] == [one.text for one in built_in]
        distinct = len(set(texts[:size])), len({one.text for one in taken})
        assert calls.pop() == distinct[0] * distinct[1]


def test_a_scorer_ranks_hypotheses_alone_or_with_the_model(monkeypatch):
    monkeypatch.setattr(metrics, "_OTHERS", dict(metrics._OTHERS))
    define_scorer(lambda sources, hypotheses, references: [len(one) for one in hypotheses], name="size")
    best = dataclasses.replace(make("a", -1.0), alternatives=(make("bbb", -2.0), make("cc", -1.5)))
    blank = Translation("", score=np.nan, log_prob=0.0, tokens=())
    found = [(segment("x", 2), best), (segment("y"), blank), (segment("z"), make("d", -3.0))]

    def ranked(**options):
        first, second, third = (one for _, one in rank_candidates(found, SearchConfig(**options)))
        assert second is blank or second.text == ""
        return [(one.text, one.score) for one in first.n_best], third.score

    assert ranked() == ([("a", -1.0), ("bbb", -2.0)], -3.0)
    assert ranked(rerank="size") == ([("bbb", 3.0), ("cc", 2.0)], 1.0)
    assert ranked(rerank="size", rerank_weight=0.25) == ([("a", -0.75), ("cc", -1.0)], -2.75)


def test_translations_are_reranked_and_wrong_scorers_are_one_line(tiny_run, tmp_path, monkeypatch, capfd):
    from flaxformer_mt.commands.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(metrics, "_OTHERS", dict(metrics._OTHERS))
    (tmp_path / "size.py").write_text(
        "import json, sys\nfor line in sys.stdin: print(-len(json.loads(line)['hypothesis']), flush=True)"
    )
    (tmp_path / "in").write_text("aa ba\n\nbbb ab a\n")
    command = ["translate", f"--run={tiny_run}", "--input=in", "--n_best=2"]
    scorer = f"--scorer={sys.executable} size.py"
    assert main([*command, "--rerank=size", scorer]) == 0
    found = [line.split(" ||| ") for line in capfd.readouterr().out.splitlines()]
    assert [i for i, *_ in found] == ["0", "0", "1", "2", "2"]
    assert [float(score) for _, text, score in found if text] == [-len(text) for _, text, _ in found if text]
    for flags, message in (
        (["--rerank=size"], "search.rerank names the score 'size', which is not defined"),
        (["--rerank=chrf"], "search.rerank has no references, with which chrf compares"),
        (
            ["--rerank=size", scorer, "--method=greedy"],
            "--rerank is size, but --method is greedy, which has no list",
        ),
        (["--rerank_weight=1"], "--rerank_weight 1.0 has no effect without --rerank"),
        (["--rerank=size", scorer, scorer], "--scorer defines size twice"),
        (["--mbr=chfr"], "search.mbr names the score 'chfr'"),
        (["--rerank=size", "--scorer=size=false"], "scorer size (false) ended with status 1 after 0 of "),
    ):
        metrics._OTHERS.pop("size", None)
        assert main([*command, *flags]) == 2, flags
        output = capfd.readouterr()
        (line,) = [line for line in output.err.strip().split("\n") if not line.startswith("translat")]
        assert line.startswith("error: ") and message in line, line
