"""The rules of cleaning on blocks of pairs: what each finds, and that rules that are off change nothing."""

import dataclasses

import numpy as np
import pytest

from flaxformer_mt.config import CleanConfig
from flaxformer_mt.corpus.cleaning import clean
from flaxformer_mt.corpus.pair_checks import RULES, CheckBlocks, TextBlock
from flaxformer_mt.corpus.pairs import RawSplit


def block(*pairs: tuple[str, str]) -> TextBlock:
    sources, targets = (list(side) for side in zip(*pairs, strict=True))
    return TextBlock((sources, targets), np.array([[len(a), len(b)] for a, b in pairs]), 0, ("de", "en"))


@pytest.mark.parametrize(
    ("source", "target", "differ"),
    [
        ("Im Jahr 1984", "In 1984", False),
        ("1.000,50 Euro", "1,000.5 euros", False),
        ("am 3.12.", "on 12/3", False),
        ("٣ كتب", "3 books", False),
        ("Kapitel 3", "Chapter 4", True),
        ("22 Hunde", "2 dogs", True),
        ("zwei Hunde", "2 dogs", True),
        ("Hunde", "dogs", False),
    ],
)
def test_numbers(source, target, differ):
    assert RULES["numbers"](block((source, target)), CleanConfig()).tolist() == [0 if differ else -1]


def test_sides_that_show_nothing_are_empty():
    pairs = [("Hund", "dog"), ("\ufeff", "dog"), ("Hund", "\u200b \u200e"), ("", ""), ("a\u200b", "b")]
    assert RULES["empty"](block(*pairs), CleanConfig()).tolist() == [-1, 0, 1, 0, -1]
    # of the empty ones, the ratio of lengths is not looked at
    long = [(source * 20, target) for source, target in pairs]
    assert RULES["length_ratio"](block(*long), CleanConfig()).tolist() == [0, -1, -1, -1, 0]


def test_scripts():
    rules = CleanConfig(script="drop", source_script="cyrillic", target_script="CJK+HIRAGANA+KATAKANA")
    found = RULES["script"](
        block(
            ("Привет", "こんにちは世界"),
            ("Hello", "こんにちは"),
            ("Привет", "Hello 世"),
            ("123 !", "..."),  # no letters
            ("абвab", "世界ab"),  # 3 of 5, and half
        ),
        rules,
    )
    assert found.tolist() == [-1, 0, 1, -1, -1]
    strict = dataclasses.replace(rules, min_script_share=0.6)
    assert RULES["script"](block(("абвab", "世界ab")), strict).tolist() == [1]
    anything = dataclasses.replace(rules, source_script="", target_script="")
    assert RULES["script"](block(("a", "б")), anything).tolist() == [-1]


class Rows(list):
    def read(self, indices):
        return [self[index] for index in indices]


def test_repeated_targets_are_those_of_kept_pairs():
    rows = [(b"", b"yes"), (b"ja", b"yes"), (b"jawohl", b"yes"), (b"nein", b"no"), (b"ja", b"yes")]
    split = RawSplit("set", "identity", Rows(rows), ("de", "en"), ("x.de", "x.en"), "line")
    kept, _, report, _ = clean(split, CleanConfig(repeated_targets="drop"), may_drop=True)
    assert kept.tolist() == [1, 3]  # the first pair, which has no source, was dropped before
    problems = {name: found["count"] for name, found in report["problems"].items()}
    assert problems == {"empty": 1, "duplicates": 1, "repeated_targets": 2}
    assert "repeated_targets" not in clean(split, CleanConfig(), may_drop=True).report["problems"]


def test_a_rule_sees_what_the_rules_before_it_have_kept():
    actions = {"invalid_utf8": "drop", "empty": "drop", "too_long": "keep", "length_ratio": "off"}
    actions |= {"numbers": "drop", "script": "off", "language": "off"}
    work = CheckBlocks(CleanConfig(max_characters=3), actions, ("de", "en"))
    verdict = work([(b"\xff 1", b""), (b" ", b"2"), (b"abcd 1", b"x"), (b"a" * 50, b"b")])
    assert verdict.kept.tolist() == [False, False, False, True]
    found = [(name, one.pairs, *one.examples[0][:2]) for name, one in verdict.problems.items()]
    assert found == [
        ("invalid_utf8", 1, 0, 0),
        ("empty", 1, 1, 0),
        ("too_long", 2, 2, 0),
        ("numbers", 1, 2, 0),
    ]


def test_rules_that_are_off_are_no_part_of_the_identity():
    """So that data of earlier versions keeps its identity."""
    assert sorted(CleanConfig().describe()) == [
        "duplicates",
        "empty",
        "invalid_utf8",
        "length_ratio",
        "max_characters",
        "max_length_ratio",
        "too_long",
        "unequal_lines",
    ]
    assert CleanConfig(script="drop").describe()["min_script_share"] == 0.5
    assert CleanConfig(numbers="keep").describe()["numbers"] == "keep"
