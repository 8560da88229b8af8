"""References that a vocabulary cannot produce are counted, named and shown."""

from typing import NamedTuple

import pytest

from flaxformer_mt.config import VocabConfig
from flaxformer_mt.data.corpus_diagnostics import describe_lost_text, find_lost_text
from flaxformer_mt.vocab import make_vocabs


class Pair(NamedTuple):
    source: str
    target: str


LINES = ["ทำงาน ที่  บ้าน ", "ไม่ มี", "น้ำ กำลัง", "ที่ นี่"] * 25


@pytest.fixture
def vocab_of(tmp_path):
    def make(**fields):
        pairs = [Pair("a b c d", line) for line in LINES]
        return make_vocabs(VocabConfig(**{"size": 290, **fields}), pairs, tmp_path / str(fields)).target

    return make


def test_nothing_is_lost_by_default(vocab_of):
    report = find_lost_text([Pair("", line) for line in (*LINES, "何\u00a0か")], vocab_of())
    assert report == {"lines": 101, "lost": 0, "characters": [], "examples": []}
    assert describe_lost_text(report) == describe_lost_text(None) == []


def test_what_a_normalization_replaces_is_named(vocab_of):
    """NFKC decomposes U+0E33, says Unicode, into U+0E4D U+0E32."""
    vocab = vocab_of(target_normalization="nmt_nfkc")
    report = find_lost_text([Pair("", line) for line in LINES], vocab)
    assert (report["lines"], report["lost"]) == (100, 50)
    assert report["characters"] == [{"character": "U+0E33 THAI CHARACTER SARA AM", "lines": 50}]
    assert report["examples"][1] == {"number": 3, "text": "น้ำ กำลัง", "back": "น้ํา กําลัง"}
    (warning,) = describe_lost_text(report)
    assert "50 of 100 targets of the validation set (50.0%)" in warning
    assert "U+0E33 THAI CHARACTER SARA AM (50)" in warning and "target_normalization=identity" in warning


def test_unknown_characters_are_lost(vocab_of):
    vocab = vocab_of(byte_fallback=False, size=40)
    report = find_lost_text([Pair("", "ที่ นี่"), Pair("", "ที่ Ω")], vocab)
    assert report["lost"] == 1
    assert report["characters"] == [{"character": "U+03A9 GREEK CAPITAL LETTER OMEGA", "lines": 1}]


def test_of_many_lines_some_are_looked_at(vocab_of):
    report = find_lost_text([Pair("", "ที่ นี่")] * 12_000, vocab_of())
    assert report["lines"] == 5000
