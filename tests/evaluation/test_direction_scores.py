"""Scores per direction: in validation and its log, in the report of a run, and in its evaluation."""

import json

import pytest

from flaxformer_mt.commands.main import main
from flaxformer_mt.config import TrainConfig
from flaxformer_mt.corpus import read_pairs
from flaxformer_mt.corpus.pairs import Pair, Part
from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation.evaluate import evaluate_run
from flaxformer_mt.evaluation.evaluation_set import Translations
from flaxformer_mt.evaluation.metrics import score_translations
from flaxformer_mt.evaluation.score_breakdowns import DirectionScorer
from flaxformer_mt.training.report import describe_report


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
        {
            "bleu": (english.bleu + chinese.bleu) / 2,
            "chrf": (english.chrf + chinese.chrf) / 2,
            "bleu_zh-en": english.bleu,
            "chrf_zh-en": english.chrf,
            "bleu_en-zh": chinese.bleu,
            "chrf_en-zh": chinese.chrf,
        }
    )
    one = Set(parts[:1], languages[:1], references[:2])
    alone = DirectionScorer(one, TrainConfig()).score(Translations(("",) * 2, references, hypotheses))
    assert alone == {"bleu": english.bleu, "chrf": english.chrf}


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


def test_evaluate_has_a_table_and_the_scores_of_each_direction(
    two_way_run, two_way_config, tiny_text, tmp_path, capfd
):
    assert main(["evaluate", f"--run={two_way_run}", "--split=valid", "--bootstrap=0"]) == 0
    out, err = capfd.readouterr()
    result = json.loads(out)
    there, back = result["directions"]["xx-yy"], result["directions"]["yy-xx"]
    assert result["bleu"] == pytest.approx((there["bleu"] + back["bleu"]) / 2)
    assert there["name"] == "valid.xx-yy" and there["by_length"]
    assert "direction  sentences    BLEU    chrF     TER\nxx-yy              6" in err
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
