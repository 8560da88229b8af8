"""What is written of a translation: columns, n-best lists, JSON that any reader takes."""

import dataclasses
import html
import json
import math

from flaxformer_mt.commands.output_formats import TranslationFormat, format_score
from flaxformer_mt.translation.result import EMPTY, Translation

NEXT = Translation("b\tc", -2.0, -3.0, (8, 2), token_log_probs=(-2.5, -0.5), alignment=((0, 0),))
BEST = Translation(
    "a ä",
    -0.25,
    -0.5,
    (7, 9, 2),
    token_log_probs=(-0.125, -0.25, -0.125),
    alignment=((1, 0), (0, 1)),
    alternatives=(NEXT,),
)


def pieces(tokens):
    return [f"p{token}" for token in tokens]


def lines(translation=BEST, **options):
    return TranslationFormat(**options).lines(4, "x y", translation, pieces)


def test_columns_come_before_the_text():
    assert lines() == ["a ä"]
    assert lines(scores=True) == ["-0.250000\ta ä"]
    assert lines(token_scores=True) == ["-0.250000\t-0.500000\t-0.125000 -0.250000 -0.125000\ta ä"]
    assert lines(alignments=True) == ["1-0 0-1\ta ä"]  # source first, in the order of the target
    unordered = dataclasses.replace(NEXT, alignment=((3, 1), (0, 1), (5, 0)))
    assert lines(unordered, alignments=True) == ["5-0 0-1 3-1\tb\tc"]
    assert lines(NEXT, scores=True, alignments=True) == ["-2.000000\t0-0\tb\tc"]
    blank = dataclasses.replace(EMPTY, token_log_probs=(), alignment=())
    assert lines(blank, token_scores=True, alignments=True) == ["nan\t0.000000\t\t\t"]
    assert lines(blank, n_best=True) == ["4 |||  ||| nan"]
    failed = json.loads(lines(Translation("", -math.inf, math.nan, ()), json=True)[0])
    assert failed["score"] is None and failed["log_prob"] is None


def test_fields_of_n_best_lists_can_be_told_apart():
    assert lines(n_best=True) == ["4 ||| a ä ||| -0.250000", "4 ||| b\tc ||| -2.000000"]
    assert lines(n_best=True, alignments=True)[0] == "4 ||| a ä ||| -0.250000 ||| 1-0 0-1"
    odd = Translation("a ||| b|||| c |||", -1.0, -1.0, (7, 2), alignment=((0, 0),))
    for options, count in (({}, 3), ({"alignments": True}, 4)):
        (line,) = lines(odd, n_best=True, **options)
        fields = line.split(" ||| ")
        assert len(fields) == count and "|||" not in fields[1]
        assert html.unescape(fields[1]) == odd.text
    assert lines(odd) == [odd.text] and json.loads(lines(odd, json=True)[0])["text"] == odd.text


def test_json_has_everything():
    (line,) = lines(json=True)
    assert json.loads(line) == {
        "line": 4,
        "source": "x y",
        "text": "a ä",
        "score": -0.25,
        "log_prob": -0.5,
        "tokens": [7, 9, 2],
        "pieces": ["p7", "p9", "p2"],
        "token_log_probs": [-0.125, -0.25, -0.125],
        "alignment": [[1, 0], [0, 1]],
        "truncated": False,
        "satisfied": True,
        "parts": 1,
    }
    assert "ä" in line and "\n" not in line
    several = json.loads(lines(json=True, n_best=True)[0])["n_best"]
    assert [one["text"] for one in several] == ["a ä", "b\tc"]


def test_scores():
    score = Translation("y", -0.25, -0.5, (7, 2), token_log_probs=(-0.125, -0.375))

    def write(line="x", **options):
        return format_score(score, 3, line, pieces, **({"tokens": False, "as_json": False} | options))

    assert write() == "-0.250000"
    assert write(tokens=True) == "-0.250000\t-0.500000\t-0.125000 -0.375000"
    scored = json.loads(write(as_json=True))
    whole = json.loads(lines(score, json=True)[0]) | {"line": 3, "source": "x", "target": "y"}
    assert scored == {name: whole[name] for name in scored} and len(scored) == 9
    assert scored.keys() - json.loads(write(None, as_json=True)).keys() == {"source"}
