"""Pages, help texts and public docstrings avoid phrases that must be read twice."""

import re

import pytest
from tools.pages import ROOT, find_pages

SPELLING = {
    r"(?:token|optim|initial|normal|quant|serial|synchron)is(?:e|ed|es|ing|ation|ers?)\b": "American: -ize",
    r"behaviour|\blicences?\b|neighbour|favour|\bmodelled\b|\bcentred\b|\bspelt\b|learnt\b": "American",
}

# Patterns -> what to write instead. Readers have stumbled over each of them.
PATTERNS = {
    r"\bthat of\b|\bthose of\b": "repeat the noun: the score equals the search score",
    r"\b(?:lines?|words?|sentences?|objects?|keys?|values?|tokens?|requests?|pairs?|one|steps?|updates?) an? "
    r"(?:line|second|epoch|device|core|step)\b": "per: one line per pair",
    r"\bapart\b(?! from)": "separately",
    r"\banew\b": "again",
    r"\bbeside\b": "next to, compared with, under load",
    r"\brefused by\b|\bby name and value\b": "not supported; the error names ...",
    r"\bbegun\b": "started",
    r"\bgoes on\b|\bgo on\b": "continue",
    r"\bso many\b": "say how many",
    r"\bsurest\b|\bmends?\b|\bspelt\b|\bsearch width\b|\bmade pairs\b": "the usual word",
    **SPELLING,
    r"\bnot so\b": "say what: no quantization",
}


def find_phrases(text: str) -> list[str]:
    """Return the phrases of a text, outside of `code` and of blocks, with the advice for each."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    text = re.sub(r"^#.*", "", text, flags=re.M)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|<[^>]*>|^    .*$", "", text, flags=re.M)
    text = " ".join(text.split())
    return [
        f"{text[max(0, match.start() - 30) : match.end() + 30]!r}: {advice}"
        for pattern, advice in PATTERNS.items()
        for match in re.finditer(pattern, text, re.I)
    ]


REFERENCE = [f"docs/reference/{path.name}" for path in (ROOT / "docs" / "reference").glob("*.md")]


@pytest.mark.parametrize("page", [*find_pages(), "CONTRIBUTING.md", *sorted(REFERENCE)])
def test_a_page_has_no_phrase_that_is_read_twice(page):
    found = find_phrases((ROOT / page).read_text(encoding="utf-8"))
    assert not found, "\n".join([page, *found])


def test_the_code_has_american_spelling():
    files = [*ROOT.glob("flaxformer_mt/**/*.py"), *ROOT.glob("configs/*.py")]
    texts = {file.relative_to(ROOT): file.read_text(encoding="utf-8") for file in files}
    assert not [
        (str(file), match[0])
        for file, text in texts.items()
        for match in re.finditer("|".join(SPELLING), text, re.I)
    ]


def test_phrases_are_found_in_text_and_not_in_code():
    assert len(find_phrases("The score is that of the search.\nOne sentence a line, translated apart.")) == 3
    assert not find_phrases("Apart from spaces. `that of`\n```\nthat of\n```\nThe licensed behavior.")
