"""Parts of a long text: nothing is lost, none is too long, and cuts fall where a reader would make them."""

import random
import time

import pytest
from flaxformer_mt.translation.segmentation import (
    find_language_tags,
    is_unspaced,
    join_translations,
    read_sources,
    split_text,
    splits_sentences,
)

from flaxformer_mt.config import VocabConfig
from flaxformer_mt.vocab import make_vocabs


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


@pytest.mark.parametrize("seed", range(300))
def test_parts_put_together_are_the_text_and_none_is_too_long(seed):
    chance = random.Random(seed)
    text = "".join(chance.choices(ALPHABET, k=chance.randrange(200)))
    most = chance.randrange(1, 40)
    for fits, longest in ((sizes_at_most(most), most), (at_most(most), None)):
        parts = split_text(text, fits)
        assert "".join(parts) == text
        assert all(fits(part.strip()) for part in parts)
        assert longest is None or all(len(part.strip()) <= longest for part in parts)


def test_a_text_that_fits_is_left_alone():
    assert split_text(" A. B. C. ", at_most(3)) == [" A. B. C. "]
    assert split_text("", at_most(0)) == [""]


def test_sentences_then_clauses_then_words_then_characters():
    text = "Ein Satz. Zwei Wörter, drei lange Wörter mehr, vier, abcdefghijklmnop"
    cut = split_text("One two. " + text, at_most(3))
    assert cut == [
        "One two. ",
        "Ein Satz. ",
        "Zwei Wörter, ",
        "drei lange ",
        "Wörter mehr, ",
        "vier, abcdefghijklmnop",
    ]
    assert split_text("abcdefgh ij", sizes_at_most(3)) == ["ab", "cd", "ef", "gh ", "ij"]


def test_a_sentence_is_halved_after_the_clause_nearest_to_its_middle():
    text = "a b, c d, e f, g h, i j"
    assert split_text(text, at_most(4)) == ["a b, c d, ", "e f, ", "g h, i j"]
    assert split_text(text, at_most(6)) == ["a b, c d, ", "e f, g h, i j"]


def test_what_is_seen_as_one_character_stays_whole_while_it_fits():
    cluster = "👩\u200d🚀"
    assert split_text(cluster * 3, sizes_at_most(4)) == [cluster] * 3
    assert split_text("e\u0301" * 4, sizes_at_most(3)) == ["e\u0301"] * 4
    assert "".join(split_text(cluster, sizes_at_most(2))) == cluster


def test_five_thousand_words_take_few_measurements():
    calls = []

    def fits(text):
        calls.append(len(text))
        return len(text.split()) <= 100

    parts = split_text("wort " * 5000, fits)
    assert {len(part.split()) for part in parts} == {78, 79} and len(parts) == 64
    assert len(calls) < 2 * 64 + 2 and sum(calls) < 9 * len("wort " * 5000)


def test_translations_are_joined_as_their_script_is_written():
    def join(*texts):
        return join_translations(texts, ["", *[" "] * (len(texts) - 1)])[0]

    assert join("A b.", "", "  C d. ") == "A b. C d."
    assert join("你好。", "再见。") == "你好。再见。"
    assert join("はい。", "OK. So", "안녕.", "네.") == "はい。OK. So 안녕. 네."
    assert join_translations([], []) == ("", []) and join("", " ") == ""


def test_white_space_between_parts_is_that_of_the_line():
    spaces = ["  ", "\n", "\t\u00a0", " ", "", "  "]
    joined, starts = join_translations(["a.", "b.", "", "cd.", "e.", "。f"], spaces)
    assert joined == "a.\nb. cd. e.  。f"
    assert [joined[start] for start in starts] == ["a", "b", " ", "c", "e", "。"]


def test_scripts_without_spaces():
    assert all(map(is_unspaced, "你々はカ。、Ａ𠀀"))
    assert not any(map(is_unspaced, "aéЖ한ก।؟. "))


def test_runs_of_one_character_take_linear_time():
    """The longest of these took minutes when each mark of a run was searched for the end of the run."""
    for unit in (".", ",", "!?", "。", ". ", '."', "(", "'", "\u0301", "\u200d", " "):
        start = time.process_time()
        for text in (unit * 20_000, unit * 20_000 + "a"):
            parts = split_text(text, sizes_at_most(5000))
            assert "".join(parts) == text
        assert time.process_time() - start < 2, unit


# ---- sentences of lines ----


def test_sentences_are_apart_unless_a_tenth_of_the_training_lines_had_several():
    decided = [splits_sentences("auto", several=share) for share in (None, 0.0, 0.0999, 0.1, 1.0)]
    assert decided == [True, True, True, False, False]
    assert splits_sentences("always", several=1.0) and not splits_sentences("never", several=0.0)


def test_sentences_are_parts_and_long_ones_several(characters):
    lines = [
        "Ab cd.  Ef gh!\nIj",
        "  Ab cd. ",
        "",
        "Abcdefg hij klm. No. ",
        ">>fr<< Ab. Cd.",
        "Ab.\u00a0 ... ",
    ]

    def read(**options):
        return read_sources(lines, vocab=characters, longest=14, language="en", **options)

    found = read(long_lines="split", sentences=True)
    assert [(part.line, part.start, part.content, part.continues) for part in found] == [
        (0, 0, "Ab cd.  ", False),
        (0, 8, "Ef gh!\n", False),
        (0, 15, "Ij", False),
        (1, 0, "  Ab cd. ", False),
        (3, 0, "Abcdefg ", False),
        (3, 8, "hij klm. ", True),
        (3, 17, "No. ", False),
        (4, 0, ">>fr<< Ab. ", False),
        (4, 11, "Cd.", False),
        (5, 0, "Ab.\u00a0 ... ", False),
    ]
    assert [characters.detokenize(part.ids) for part in found[7:9]] == [">>fr<< Ab.", ">>fr<< Cd."]
    cut = read(long_lines="cut", sentences=True)
    assert [part.content for part in cut if part.line == 3] == ["Abcdefg hij klm. ", "No. "]
    assert [part.cut for part in cut if part.line == 3] == [True, False]
    whole = read(long_lines="cut")
    assert [part.content for part in whole] == [line for line in lines if line]


# ---- language tags ----


@pytest.mark.parametrize(
    ("line", "tag"),
    [
        (">>fr<< der Hund", ">>fr<< "),
        (" >>cmn_Hans<<der Hund", " >>cmn_Hans<<"),
        (">>fr<< <from:de> der Hund", ">>fr<< <from:de> "),
        ("<2de> >>sr_latn<<\tder Hund", "<2de> >>sr_latn<<\t"),
        (">>Hund<< sagt er", ""),
        ("der >>fr<< Hund", ""),
        ("<2> Hund", ""),
        (">>fr<<", ""),
        ("\u200e>>fr<<\u00a0der Hund", "\u200e>>fr<<\u00a0"),
        ("", ""),
    ],
)
def test_language_tags(line, tag):
    assert find_language_tags(line) == tag


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    """A vocabulary of characters: one token for each, and one for the space before the first."""

    class Pair:
        source = target = " ".join(map(chr, range(33, 127)))

    config = VocabConfig(kind="char", size=99, byte_fallback=False, normalization="identity")
    return make_vocabs(config, [Pair()] * 3, tmp_path_factory.mktemp("vocab")).source


def test_given_tags_are_put_before_all_parts_and_belong_to_none(tmp_path):
    class Tagged(list):
        tags = (">>fr<<", "<from:de>")

    class Pair:
        source = target = " ".join(map(chr, range(33, 127)))

    config = VocabConfig(kind="char", size=0, byte_fallback=False, normalization="identity")
    vocab = make_vocabs(config, Tagged([Pair()] * 3), tmp_path).source
    lines = ["x y", "Ab cd. Ef gh. Ij kl.", "<2de> Ab cd. Ef gh.", " ", ">>fr<< Ab cd."]
    added = ">>fr<< <from:de> "
    tags = [added, added, added, added, ""]
    found = read_sources(lines, vocab=vocab, longest=17, long_lines="split", tags=tags)
    assert [(part.line, part.content) for part in found[:4]] == [
        (0, "x y"),
        (1, "Ab cd. "),
        (1, "Ef gh. "),
        (1, "Ij kl."),
    ]
    for part in found:
        assert len(part.ids) <= 17  # the tags count
        start = 2 if part.line < 4 else 0
        assert part.added_pieces == start
        assert vocab.pieces(part.ids[:start]) == ["\u2581>>fr<<", "\u2581<from:de>"][:start]
        assert vocab.detokenize(part.ids[start:]) == part.text.strip()
    assert [(part.text, part.tag_pieces) for part in found if part.line == 2] == [
        ("<2de> Ab cd. ", 0),
        ("Ef gh.", 0),  # a tag that is not asked for is text, which is not repeated
    ]


def test_all_parts_of_a_line_have_its_language_tag(characters):
    lines = [
        "x",
        ">>fr<< Ab. Cd. Ef.",
        "<2de>abcdefghij klmno",
        "Ab cd. Ef gh. Ij kl.",
        ">>fr<<" * 9,
    ]
    found = read_sources(lines, vocab=characters, longest=14, long_lines="split")
    parts = {number: [part for part in found if part.line == number] for number in range(len(lines))}
    read = {
        number: [characters.detokenize(part.ids) for part in several] for number, several in parts.items()
    }
    assert read[0] == ["x"]
    assert read[1] == [">>fr<< Ab.", ">>fr<< Cd.", ">>fr<< Ef."]
    assert read[2] == ["<2de>abcde", "<2de>fghij", "<2de>klmno"]
    assert read[3] == ["Ab cd.", "Ef gh.", "Ij kl."]
    assert "".join(read[4]) == lines[4]  # no room for text
    for number, line in enumerate(lines):
        assert "".join(part.content for part in parts[number]) == line
        assert all(line[part.start :].startswith(part.content) for part in parts[number])
        assert all(len(part.ids) <= 14 and not part.cut for part in parts[number])
        for part, text in zip(parts[number], read[number], strict=True):
            assert part.text.strip() == text
            assert len(characters.tokenize(part.tag)) - 1 == part.tag_pieces
    assert [[part.tag_words for part in parts[number]] for number in range(4)] == [
        [0],
        [0, 1, 1],
        [0] * 3,
        [0] * 3,
    ]
