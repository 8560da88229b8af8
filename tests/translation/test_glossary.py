"""Glossaries: which words are terms, how translations have them, and what is wrong with a file."""

import io
import sys

import pytest

from flaxformer_mt.commands.main import main
from flaxformer_mt.config import Config
from flaxformer_mt.config.files import save_config
from flaxformer_mt.errors import UserError
from flaxformer_mt.translation.glossary import Glossary


def find(terms: dict[str, str], text: str) -> list[tuple[str, str]]:
    return [(text[term.start : term.end], term.target) for term in Glossary.make(terms).find(text)]


def test_terms_are_whole_words_as_they_are_written():
    terms = {
        "Hund": "dog",
        "haus": "house",
        "New York": "NYC",
        "York": "york",
        "C++": "cpp",
        "C": "c",
        "US": "us",
    }
    assert find(terms, "(Hund), Hunde Schäferhund hund HUND „Hund“.") == [("Hund", "dog")] * 2
    assert find(terms, "Haus HAUS haus Hausboot") == [(one, "house") for one in ("Haus", "HAUS", "haus")]
    assert find(terms, "us US, Us") == [("US", "us")]
    assert find(terms, "in New  York. York!") == [("New  York", "NYC"), ("York", "york")]
    assert find(terms, "C++, C und (C). C+") == [("C++", "cpp"), ("C", "c"), ("C", "c"), ("C", "c")]
    assert find({"—": "-", "&": "and"}, "a — b & c") == [("—", "-"), ("&", "and")]
    assert find(terms, "") == [] == find(terms, " \t ")
    # Text without spaces: a term is a part of it. Latin words stay whole.
    assert find({"猫": "cat", "熊猫": "panda", "iPad": "iPad"}, "我的熊猫和猫有iPad。") == [
        *(("熊猫", "panda"), ("猫", "cat"), ("iPad", "iPad"))
    ]
    assert find({"猫": "cat"}, "a 熊猫 b and much more text in Latin letters") == []


# Text in which the first term is found, and the second column is what is found of it.
SPELLINGS = {
    "NFD text": ("Bücher", "Er liest Bu\u0308cher.", ["Bu\u0308cher"]),
    "NFD term": ("Bu\u0308cher", "Er liest Bücher.", ["Bücher"]),
    "no-break spaces": ("Hund", "Der\u00a0Hund\u00a0schläft.", ["Hund"]),
    "spaces": (
        "letzte Woche",
        "letzte\u00a0Woche, letzte\u202fWoche letzte\u2009Woche",
        ["letzte\u00a0Woche", "letzte\u202fWoche", "letzte\u2009Woche"],
    ),
    "invisible": (
        "Hund",
        "Hu\u00adnd \u200eHund. \u200bHund (\ufeffHund)",
        ["Hu\u00adnd", "Hund", "Hund", "Hund"],
    ),
    "a mark between": ("alter Hund", "alter \u200e Hund", ["alter \u200e Hund"]),
    "Hangul": (
        "한국어",
        "\u1112\u1161\u11ab\u1100\u116e\u11a8\u110b\u1165 x",
        ["\u1112\u1161\u11ab\u1100\u116e\u11a8\u110b\u1165"],
    ),
    "Vietnamese": (
        "tiếng Việt",
        "tie\u0302\u0301ng Vie\u0323\u0302t",
        ["tie\u0302\u0301ng Vie\u0323\u0302t"],
    ),
    "a ligature": ("Effizient", "E\ufb03zient", ["E\ufb03zient"]),
    "kana": ("がく", "か\u3099くです", ["か\u3099く"]),
    "other words": ("Hund", "Schäferhu\u00adnd Hu\u0308nd", []),
    "many marks": ("Hund", "(((((Hund)))))!!!!!", ["Hund"]),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_words_that_look_alike_are_the_same(name):
    term, text, expected = SPELLINGS[name]
    assert find({term: "x"}, text) == [(one, "x") for one in expected]


def test_of_overlapping_terms_the_longest_counts():
    terms = {"New York": "A", "York City Hall": "B"}
    assert find(terms, "das ist New York City Hall.") == [("York City Hall", "B")]
    assert find(terms | {"New": "C"}, "New York City Hall") == [("New", "C"), ("York City Hall", "B")]
    # A term that is written as the text has it comes before one that only looks like it.
    assert find({"CO2": "x", "CO₂": "y"}, "CO₂ CO2") == [("CO₂", "y"), ("CO2", "x")]


def test_files_have_comments_and_more_columns(tmp_path):
    file = tmp_path / "terms.tsv"
    file.write_bytes("\ufeff# comment\r\n\r\nHund \tdog\tnoun\r\nNew  York\t NYC\nHund\tdog\n".encode())
    assert Glossary.load(file) == Glossary((("Hund", "dog"), ("New York", "NYC")))
    assert Glossary.make(str(file)) == Glossary.make({"Hund": "dog", "New York": "NYC"})
    glossary = Glossary.load(file)
    assert Glossary.make(glossary) is glossary
    with pytest.raises(UserError, match="the glossary, line 2, has a source term that is empty"):
        Glossary.make({"Hund": "dog", "": "cat"})


WRONG = {
    "no tab": (
        "Hund\tdog\nKatze cat\n",
        "terms.tsv, line 2, has no tab: 'Katze cat'; write source term, tab",
    ),
    "semicolons": ("Hund;dog\n", "line 1, has no tab: 'Hund;dog'"),
    "no source": ("# x\n\n\tdog\n", "line 3, has a source term that is empty"),
    "no target": ("Hund\t \n", "line 1, has a target term that is empty"),
    "two translations": (
        "Hund\tdog\nHund\thound\n",
        "line 2, translates 'Hund' as 'hound', but line 1 as 'dog'",
    ),
    "many words": (
        "a " * 31 + "\tb\n",
        "line 1, has a source term of 31 words and 61 characters; shorten it to 30 and 200",
    ),
    "many letters": ("a" * 201 + "\tb\n", "line 1, has a source term of 1 words and 201 characters"),
    "invisible": ("Hund\t\u200b\n", "line 1, has a target term that is empty"),
    "nothing": ("", "terms.tsv has no terms; write"),
    "Latin-1": (b"Hund\tdog\nH\xfcndin\tbitch\n", "terms.tsv, line 2, is not UTF-8"),
    "UTF-16": ("Hund\tdog\n".encode("utf-16"), "terms.tsv is in UTF-16LE, not in UTF-8"),
    "a zero byte": ("Hund\tdo\0g\n", "line 1, has a target term with the character '\\x00'"),
}


@pytest.fixture
def untrained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b""), encoding="ascii"))
    save_config(Config(), tmp_path / "config.json")
    return tmp_path


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_glossary_is_one_line_with_its_place(name, untrained, capfd):
    content, words = WRONG[name]
    (untrained / "terms.tsv").write_bytes(content if isinstance(content, bytes) else content.encode())
    for command in ("translate", "evaluate"):
        assert main([command, f"--run={untrained}", "--glossary=terms.tsv"]) == 2
        out, err = capfd.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and words in err


@pytest.fixture
def translator(shared_translator, monkeypatch):
    monkeypatch.setattr(shared_translator, "warn", lambda message: None)  # of the parts of lines
    return shared_translator


TERMS = {"Hund": "milk", "alte Katze": "red apples", "Milch": "good book"}
LINES = ["der Hund", "", "Hunde", "alte Katze", "Der Hund schläft . Die Milch ."]


def test_a_constraint_is_what_required_phrases_are(translator):
    """In the part of the line that has the term, which is in one sentence."""
    (*found, two) = translator.translate(LINES, glossary=TERMS)
    required = translator.translate(LINES[:4], required=[["milk"], [], [], ["red apples"]])
    assert [one.text for one in found] == [one.text for one in required]
    assert "milk" in found[0].text and "red apples" in found[3].text
    assert all(one.satisfied for one in found)
    assert two.parts > 1 and two.satisfied and two.text.index("milk") < two.text.index("good book")
    (both,) = translator.translate(LINES[:1], glossary=TERMS, required=[["red apples"]])
    assert "milk" in both.text and "red apples" in both.text
