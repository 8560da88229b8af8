"""Parts of a long text: nothing is lost, none is too long, and cuts fall where a reader would make them."""

import random

import pytest
from fake_engine import read_lines

from flaxformer_mt.errors import UserError
from flaxformer_mt.translation.sentences import Sentences
from flaxformer_mt.translation.tokenization import Tokenization, split_text


def at_most(words):
    return lambda text: len(text.split()) <= words


def sizes_at_most(characters):
    return lambda text: len(text) <= characters


# What a hostile file may contain: scripts, marks, joined emoji, accents, odd white space.
ALPHABET = [
    *"aB1.,;:!? \t\u3000\u00a0\"')(。！、क।؟。é-",
    "e\u0301",
    "👩\u200d🚀",
    "👍\U0001f3fd",
    "\x85",
    "ab ",
    ". ",
]


def test_parts_put_together_are_the_text_and_none_is_too_long():
    chance = random.Random(1)
    for _ in range(300):
        text = "".join(chance.choices(ALPHABET, k=chance.randrange(200)))
        most = chance.randrange(1, 40)
        for fits in (sizes_at_most(most), at_most(most)):
            parts = split_text(text, fits)
            assert "".join(parts) == text and all(fits(part.strip()) for part in parts)


CUTS = {
    "fits": (" A. B. C. ", at_most(3), [" A. B. C. "]),
    "empty": ("", at_most(0), [""]),
    "words": (
        "One two. Ein Satz. Zwei Wörter, drei lange Wörter mehr, vier, abcdefghijklmnop",
        at_most(3),
        [
            "One two. ",
            "Ein Satz. ",
            "Zwei Wörter, ",
            "drei lange ",
            "Wörter mehr, ",
            "vier, abcdefghijklmnop",
        ],
    ),
    "characters": ("abcdefgh ij", sizes_at_most(3), ["ab", "cd", "ef", "gh ", "ij"]),
    # After the clause that is nearest to the middle.
    "clauses": ("a b, c d, e f, g h, i j", at_most(4), ["a b, c d, ", "e f, ", "g h, i j"]),
    "long clauses": ("a b, c d, e f, g h, i j", at_most(6), ["a b, c d, ", "e f, g h, i j"]),
    # What is seen as one character stays whole while it fits.
    "emoji": ("👩\u200d🚀" * 3, sizes_at_most(4), ["👩\u200d🚀"] * 3),
    "accents": ("e\u0301" * 4, sizes_at_most(3), ["e\u0301"] * 4),
    "long emoji": ("👩\u200d🚀", sizes_at_most(2), ["👩", "\u200d🚀"]),
}


@pytest.mark.parametrize("name", CUTS)
def test_sentences_then_clauses_then_words_then_characters(name):
    text, fits, parts = CUTS[name]
    assert split_text(text, fits) == parts


def test_long_sentences_are_several_parts_or_cut(characters):
    lines = ["Abcdefg hij klm. No. ", "", " \u200b"]

    def read(*steps, **options):
        step = Tokenization(characters.source, longest=14, **options)
        found, *blank = read_lines(lines, *steps, step)
        assert not any(line.parts for line in blank)
        for part in found.parts:
            ids = characters.source.tokenize(part.text.strip())
            assert part.ids.tolist() == (ids[:13] + ids[-1:] if part.is_cut else ids) and len(part.ids) <= 14
        return [(part.start, part.text, part.continues, part.is_cut) for part in found.parts]

    assert read(Sentences(apart=True), long_lines="split") == [
        (0, "Abcdefg ", False, False),
        (8, "hij klm. ", True, False),
        (17, "No. ", False, False),
    ]
    cut = read(Sentences(apart=True), long_lines="cut")
    assert cut == [(0, "Abcdefg hij klm. ", False, True), (17, "No. ", False, False)]
    assert read(Sentences(apart=False), long_lines="cut") == [(0, lines[0], False, True)]


def test_a_line_with_required_phrases_is_whole_or_too_long(characters):
    steps = Sentences(apart=True), Tokenization(characters.source, longest=15, long_lines="split")
    (line,) = read_lines(["Ab cd. Ef gh."], *steps, required=("x", " "))
    assert [part.text for part in line.parts] == ["Ab cd. Ef gh."]
    assert len(read_lines(["Ab cd. Ef gh."], *steps, required=(" ",))[0].parts) == 2
    with pytest.raises(UserError, match=r"^line 1 has required phrases and 19 tokens; .* at most 15 \(data"):
        read_lines(["Ab cd. Ef gh. Ij."], *steps, required=("x",))
