"""The quick answer for a line that is one sentence is that of the rules."""

import re

from flaxformer_mt.corpus import sentence_split

LINES = [
    "Ein Hund schläft.",
    "Ein Hund",
    " So ein Hund?! ",
    "Z.B. ein Hund.",
    "3.5 Meter",
    "Ab. Cd.",
    "«Ab»",
    "犬。猫。",
    ".",
]


def test_lines_of_one_sentence_are_found_as_by_the_rules(monkeypatch):
    found = {
        (line, code): sentence_split.split_sentences(line, language=code)
        for line in LINES
        for code in ("de", "en", "")
    }
    assert sum(bool(sentence_split._SINGLE.match(line)) for line in LINES) == 5
    monkeypatch.setattr(sentence_split, "_SINGLE", re.compile(r"(?!)"))
    for (line, code), sentences in found.items():
        assert sentence_split.split_sentences(line, language=code) == sentences
