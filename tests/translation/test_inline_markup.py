"""Markup comes back: every tag once, balanced and nested as before, around the words that it was around."""

import dataclasses
import random
import re
from pathlib import Path

import pytest
from fake_engine import read_lines
from growth import growth

from flaxformer_mt.commands.main import main
from flaxformer_mt.errors import UserError
from flaxformer_mt.translation.inline_markup import InlineMarkup, put_back, take_out
from flaxformer_mt.translation.result import Annotations, Translation
from flaxformer_mt.translation.translator import Translator

TAG = re.compile(r"<(/?)(\w+)(/?)>|\{\d+\}")


def links(text):
    """The alignment `1-0 0-1`, or each word with the one at its place if `text` is a number of words."""
    return [tuple(map(int, point.split("-"))) for point in text.split()]


def carry(line, translation=None, alignment=None):
    marked = take_out(line)
    text = " ".join(marked.text.split()) if translation is None else translation
    same = [(i, i) for i in range(len(marked.text.split()))]
    return put_back(marked, text, same if alignment is None else links(alignment))


@pytest.mark.parametrize(
    ("line", "plain"),
    [
        ("Ein <b>Hund</b> schläft.", "Ein Hund schläft."),
        ("<b>Ein Hund schläft.</b>", "Ein Hund schläft."),
        ("Ein <b>Hund <i>schläft</i></b>.", "Ein Hund schläft."),
        ("Ein <b> Hund </b> schläft", "Ein  Hund  schläft"),
        ('Er sagt "<b>nein</b>".', 'Er sagt "nein".'),
        ("<b>¿</b>Hund<i>?</i> (da<u>)</u>", "¿Hund? (da)"),
        ("Hallo {0}, wie geht's?", "Hallo, wie geht's?"),
        ("{0} Dateien in %s gefunden.", "Dateien in gefunden."),
        ("Hallo {{name}}!", "Hallo!"),
        ("a {0}", "a"),
        ("{0}{1} a", "a"),
        ("Zeile<br/>zwei", "Zeile zwei"),
        ("Zeile <br> zwei", "Zeile zwei"),
        ("<br/>", ""),
        ("", ""),
        ("x <b>y z", "x y z"),  # what is not balanced in the line is kept as it is
        ("<b>w <i>x <u>y</b> z", "w x y z"),
        ("x </b> y", "x y"),
        ("<b></b>a", "a"),
        # Elements without words are points: the spaces beside them are neither lost nor doubled.
        ("a <b></b> b", "a b"),
        ("Je <span>%1$s</span> dabbas", "Je dabbas"),
        ("<b>{0}</b> Hund <i>{1}{2}</i>", "Hund"),
        ("a <i><b>{0}</b></i> b", "a b"),
        ("x <b>{0} y</b> z", "x y z"),
        ("x <b>y {0}</b> z", "x y z"),
        ("A <img src='a>b'> B <!-- c --> d", "A B d"),
        ("A <![CDATA[ x > y <b> ]]> B <?php a > b ?> C", "A B C"),
        ("Tom &amp; <b>Jerry</b> &lt;x&gt;", "Tom & Jerry <x>"),
        ("2 < 3 und 5% von {", "2 < 3 und 5% von {"),
        # Only what ends in a semicolon, and has a known name, is an entity.
        ("/?a=1&section=2&copy=3 &lt &copy2; &bogus;", "/?a=1&section=2&copy=3 &lt &copy2; &bogus;"),
        ("<a href='?a=1&amp;b=2'>Kopf & Fuß</a>", "Kopf & Fuß"),
        # Entities come back as they were, and what was bare beside them stays so.
        ("&copy; &quot;<b>Hund</b>&quot; &lt;&#8212;&gt; R&D", '© "Hund" <—> R&D'),
        ("Er&auml;hlt &gt; 3 < 4", "Erählt > 3 < 4"),
    ],
)
def test_markup_of_a_word_for_word_translation_is_unchanged(line, plain):
    assert take_out(line).text == plain
    assert carry(line) == line


@pytest.mark.parametrize(
    ("line", "translation", "alignment", "expected"),
    [
        # A no-break space is part of a word, as in the alignment of words.
        ("Der <b>Hund</b> schläft.", "10\u00a0000 the dogs.", "0-0 1-1 2-2", "10\u00a0000 <b>the</b> dogs."),
        # Words of the source that one is between are two: the tag is around one of them.
        ("<b>10\u202f000</b> Hunde\u00a0!", "10,000 dogs!", "0-0 1-0 2-1 3-1", "<b>10,000</b> dogs!"),
        ("Der <i>Hund</i>\u00a0schläft.", "The dog sleeps.", "0-0 1-1 2-2", "The <i>dog</i> sleeps."),
        ("Der <b>rote Hund</b> bellt.", "The dog red barks.", "0-0 1-2 2-1 3-3", "The <b>dog red</b> barks."),
        (
            "<i>Gestern</i> kam <b>er</b>.",
            "He came yesterday.",
            "2-0 1-1 0-2",
            "<b>He</b> came <i>yesterday</i>.",
        ),
        # The dog of a <b> that has one word and a stray link at the end.
        ("Der <b>Hund</b> bellt laut.", "The dog barks dogs", "0-0 1-1 2-2 1-3", "The <b>dog</b> barks dogs"),
        # The element inside goes elsewhere: the outer one reaches around it.
        ("<b>a <i>b</i></b> c", "A C B", "0-0 1-2 2-1", "<b>A C <i>B</i></b>"),
        # Both elements have the same word: the second gets the following one, or shares it.
        ("<b>a</b> <i>b</i>", "A B", "0-0 1-0", "<b>A</b> <i>B</i>"),
        ("<b>a</b> <i>b</i>", "AB", "0-0 1-0", "<b><i>AB</i></b>"),
        ("<b>a</b> <i>b</i> c <u>d</u>", "A D", "0-0 1-0 2-0 3-1", "<b>A</b> <i><u>D</u></i>"),
        # Nothing is aligned with the word: around the translation of the next one.
        ("a <b>b</b> c", "A C", "0-0 2-1", "A <b>C</b>"),
        ("a <b>b</b>", "A", "0-0", "<b>A</b>"),
        # Elements inside a word share it.
        ("<b>d</b><i>o</i><a>g</a> x", "dog now", "0-0 1-1", "<b><i><a>dog</a></i></b> now"),
        # The marks of a word alone, if the translation has any there.
        ("Der Hund<b>!</b>", "The dog.", "0-0 1-1", "The dog<b>.</b>"),
        ("Der Hund<b>!</b>", "The dog sleeps!", "0-0 1-1", "The dog<b></b> sleeps!"),
        ("Er <b>(</b>oder sie", "or he", "0-1 1-0", "<b></b>or he"),
        # Links that touch are two words; the mark of a footnote stays beside its word.
        ("<a>hier</a><a>da</a>", "here there", "0-0 1-1", "<a>here</a><a>there</a>"),
        ("<a>hier</a><a>da</a>", "there, here", "0-1 1-0", "<a>there</a>, <a>here</a>"),
        ("Der Hund<sup>1</sup> schläft.", "The dog sleeps.", "0-0 1-1 2-2", "The dog<sup>1</sup> sleeps."),
        ("Er las<sup>[2]</sup>.", "He read.", "0-0 1-1", "He read<sup>[2]</sup>."),
        # Inside a word that stays as it is, a placeholder keeps its place.
        ("Lies https://{host}/x jetzt.", "Now read https:///x", "0-1 1-2 2-0", "Now read https://{host}/x"),
        ("a <br/> {0} b", "", "", "<br/>{0}"),
        ("Lies {0} heute.", "Today read.", "1-0 0-1", "Today read {0}."),
        ("A &lt; <b>b</b>", "A < B & c", "0-0 1-1 2-2", "A &lt; <b>B</b> &amp; c"),
        # What the line has bare must not become an entity or a tag in the translation.
        ("a&b < c &gt;", "&copy; & <b 1 <3 >", "", "&amp;copy; & &lt;b 1 <3 &gt;"),
        ("a & b &amp; c", "A & B", "", "A &amp; B"),
        ("&#65;b&#32;&#228;", "A ä A", "", "A &#228; A"),  # an escaped letter is not escaped everywhere
        ("a & b", "&copy; <b", "", "&copy; <b"),
    ],
)
def test_tags_follow_their_words(line, translation, alignment, expected):
    assert carry(line, translation, alignment) == expected


@pytest.mark.parametrize(
    ("line", "translation", "alignment", "starts", "expected"),
    [
        # The word before is linked into the middle of its sentence.
        ("Je ne sais. {name} est ici.", "I know not. This is here.", "0-0 1-2 2-1 3-4 4-5", (0, 12), 12),
        ("Je ne sais. <b></b> est ici.", "I know not. This is here.", "0-0 1-2 2-1 3-4 4-5", (0, 12), 12),
        ("Je ne sais.<br> est ici.", "I know not. This is here.", "0-0 1-2 2-1 3-5 4-4", (0, 12), 11),
        ("Je ne sais.<sup>1</sup> Il est.", "I know not. He is.", "0-0 1-2 2-1 3-3 4-4", (0, 12), 11),
        ("Je sais {0}. Il est.", "I know. He is.", "0-0 1-0 2-2 3-3", (0, 8), 1),
        ("Je sais. Il est {0}.", "I know. He is.", "0-0 1-1 2-2 3-3", (0, 8), 13),
    ],
)
def test_points_stay_in_their_sentence(line, translation, alignment, starts, expected):
    point = re.search(r"\{\w+\}|<br>|<b></b>|<sup>1</sup>", line)[0]
    result = put_back(take_out(line), translation, links(alignment), starts)
    assert result.replace(" ", "") == f"{translation[:expected]}{point}{translation[expected:]}".replace(
        " ", ""
    )


def test_a_point_may_begin_a_sentence():
    marked = take_out("Er schläft. {name} liest ca. {0} Euro <b>{1} weiter</b>. Ich sehe {x}.")
    assert marked.text == "Er schläft. liest ca. Euro weiter. Ich sehe."
    assert marked.find_sentences("de") == (0, 12, 35)
    assert take_out("er schläft. {name} liest.").find_sentences("de") is None  # all in lower case
    assert take_out("Er <b>schläft</b>. Sie liest.").find_sentences("de") is None


# Interface texts, with the places of their placeholders.
INTERFACE = [
    "{} wurde gespeichert.",
    "Hallo {}, willkommen zurück!",
    "Willst du {} wirklich löschen?",
    "Die Datei {} ist zu groß ({}).",
    "Fehler {}: {}",
    "{}: {}",
    "Seite {} von {}",
    "Noch {} Zeichen",
    "„{}“ ist vergeben.",
    "Angemeldet als {}.",
    "({})",
    "Zuletzt gesehen: {}",
    "Version {} (Build {})",
    "Von {} bis {}, {} Treffer",
    "{}",
    "Hilfe zu <b>{}</b> und <a href='/x'>mehr über {}</a>.",
    "Preis: {} € je Stück",
    "<b>Achtung!</b> {} fehlt noch.",
]
FAMILIES = (
    "{0}|{}|{name}|{{name}}|{{{raw}}}|${name}|#{name}|%{name}|%<name>s|%s|%d|%1$s|%@|%.2f|%5d|%-10s|%+d|%ld"
    "|%zu|%%s|%1$.2f|%(name)s|%(price).2f|{0,number}|{when, date, short}"
    "|{n, plural, =0 {nichts} one {# Ding} other {# {x}}}"
    "|{g, select, male {{n, plural, one {er} other {{m, number} sie}}} other {{{x}}}}"
).split("|")


def test_four_hundred_interface_texts_come_back_byte_for_byte():
    lines = [template.replace("{}", family) for template in INTERFACE for family in FAMILIES]
    assert len(set(lines)) > 400
    for line in lines:
        assert carry(line) == line
    for family in FAMILIES:  # and none of them is text
        assert take_out(f"a {family} b").text == "a b"
        assert carry(f"Von {family} %% {family}%%.", "From.", "0-0") == f"From {family} %% {family}%%."


def test_percent_signs_and_braces_of_text_are_text():
    for text in (
        "5 % der 100 %, 50%-a und 100%ig",
        "20%des https://x.de/a%20d.html?u=%2f%c3 M%c3%bcnchen",
        "{a, b} und {wir, die Zeit}",
        "%50'si %10 indirim 5%e",
    ):
        assert take_out(text).text == text


def test_the_page_names_what_placeholders_are():
    page = Path("docs/translating.md").read_text(encoding="utf-8")
    table = page.split("| placeholders |")[1].split("\n\n")[0]
    named = re.findall("`([^`]+)`", table)
    assert len(named) > 25
    for placeholder in named:
        assert take_out(f"a {placeholder} b").text == "a b", placeholder
        assert carry(f"Der Hund {placeholder} bellt.") == f"Der Hund {placeholder} bellt."


def make_line(dice: random.Random, words: int) -> tuple[str, list[tuple[int, int, str]]]:
    """A line of numbered words with elements, tags without content and placeholders; the elements' words."""
    opens: list[str] = [""] * words
    closes: list[str] = [""] * words
    spans = []
    low = 0
    for number in range(dice.randrange(1, 4)):
        if low >= words:
            break
        start = dice.randrange(low, words)
        end = min(words - 1, start + dice.randrange(3))
        name = f"t{number}"
        opens[start] += f"<{name}>"
        closes[end] = f"</{name}>" + closes[end]
        spans.append((start, end, name))
        if dice.random() < 0.4:
            opens[start] += f"<i{number}>"
            closes[start if start < end else end] = f"</i{number}>" + closes[start if start < end else end]
            spans.append((start, start, f"i{number}"))
        low = end + 1
    points = ["" if dice.random() < 0.8 else dice.choice(["{0} ", "<br/> "]) for _ in range(words)]
    texts = [f"{p}{o}w{n}{c}" for n, (p, o, c) in enumerate(zip(points, opens, closes, strict=True))]
    return " ".join(texts) + ".", spans


def check_balanced(text: str) -> None:
    stack: list[str] = []
    for match in TAG.finditer(text):
        if match[2] and match[1]:
            assert stack.pop() == match[2], text
        elif match[2] and not match[3]:
            stack.append(match[2])
    assert not stack, text


def test_a_thousand_lines_stay_balanced_and_their_tags_around_words():
    dice = random.Random(7)
    for number in range(1000):
        words = dice.randrange(1, 12)
        line, spans = make_line(dice, words)
        marked = take_out(line)
        if number % 2:  # any translation with any alignment: nothing is lost, and all is balanced
            text = " ".join(dice.choice(["x", "y,", "(z)"]) for _ in range(dice.randrange(8)))
            alignment = [(dice.randrange(words), dice.randrange(8)) for _ in range(dice.randrange(12))]
        else:  # elements move as a whole, and so do single words
            blocks, place = [], 0
            outer = sorted(span for span in spans if span[2].startswith("t"))
            while place < words:
                end = next((end for start, end, _ in outer if start == place), place)
                blocks.append(list(range(place, end + 1)))
                place = end + 1
            dice.shuffle(blocks)
            order = [word for block in blocks for word in block]
            text = " ".join(f"W{word}" for word in order)
            alignment = [(word, place) for place, word in enumerate(order)]
        result = put_back(marked, text, alignment)
        check_balanced(result)
        assert sorted(m[0] for m in TAG.finditer(result)) == sorted(m[0] for m in TAG.finditer(line))
        assert "".join(TAG.sub("", result).split()) == "".join(text.split())
        for start, end, name in spans:
            inside = re.search(f"<{name}>(.*)</{name}>", result)[1]
            assert not text or re.search("[a-z]", TAG.sub("", inside), re.I), (line, result)
            if number % 2 == 0:
                assert sorted(re.findall(r"W\d+", inside)) == sorted(f"W{n}" for n in range(start, end + 1))


SENTENCE = "Der Mann liest ein Buch und die Frau sieht den Hund. "
ALIGNMENTS = {
    "word for word": lambda n: [(i, i) for i in range(n)],
    "one word with all": lambda n: [(0, i) for i in range(n)] + [(i, 0) for i in range(n)],
    "none": lambda n: [],
}


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize(
    "make_text",
    [
        lambda n: "<b>" * 99 + SENTENCE * n + "</b>" * 99 + " Ja.",
        lambda n: "<b>x</b> {0} <i>y<u>z</u></i> " * n,
        lambda n: "x" + "{0}" * 9 * n,
        lambda n: "<b>x<i>y</b>z</i>. " * n,
        lambda n: "<b>d</b>" * 3 * n,
    ],
    ids=["nested", "siblings", "points", "crossed", "letters"],
)
def test_markup_takes_time_in_proportion_to_the_line(make_text, alignment):
    """40 sentences in 99 elements took minutes."""

    def put_all_back(line):
        marked = take_out(line)
        put_back(marked, marked.text, ALIGNMENTS[alignment](len(marked.text.split())))

    assert growth(put_all_back, make_text) < 1.6


@pytest.mark.parametrize("unit", ["</b>", "<a ", "<a '", '<a b=">" ', "{n,plural,", "{{", "%(", "&#"])
def test_markup_that_does_not_end_is_read_once_and_stays_whole(unit):
    assert growth(take_out, lambda n: unit * n) < 1.6
    assert carry(unit * 900).replace(" ", "") == unit.replace(" ", "") * 900


def test_the_step_asks_for_alignments_and_drops_them_unless_they_are_wanted():
    lines, step = ["<b>Hund</b> {0}", "Hund"], InlineMarkup()
    for wanted in (None, "words"):
        asked = Annotations(markup=True, alignments=wanted)
        marked, plain = read_lines(lines, step, annotations=asked)
        assert marked.line == marked.text == plain.text == "Hund" and marked.request.text == lines[0]
        assert marked.annotations == Annotations(for_markup=True, alignments="words")
        best, other = (Translation(one, 0.0, 0.0, (), alignment=((0, 0),)) for one in ("dog", "hound"))
        undone = marked.undo(dataclasses.replace(best, alternatives=(other,)))
        assert [one.text for one in undone.n_best] == ["<b>dog</b> {0}", "<b>hound</b> {0}"]
        assert {one.alignment for one in undone.n_best} == {((0, 0),) if wanted else None}
    (untouched,) = read_lines(lines[:1], step)
    assert untouched.text == lines[0] and not untouched.memory


def test_translator_and_command_put_tags_into_every_hypothesis(tiny_run, tiny_text, tmp_path, capsys):
    lines = (tiny_text / "test.xx").read_text().splitlines()[:2]
    first = f"<b>{lines[0]}</b> {{0}}"
    long_line = " ".join(["<i>" + lines[1] + "</i>"] * 6)
    translator = Translator.load(tiny_run, use_all_devices=False, warn=lambda message: None)
    plain = translator.translate([lines[0], " ".join([lines[1]] * 6)], n_best=2)
    found = translator.translate([first, long_line, "<br/>"], n_best=2, markup=True)
    for one, other in zip(found[0].n_best, plain[0].n_best, strict=True):
        # Before or after the text: as the end of the line is aligned.
        assert one.text in (f"<b>{other.text}</b> {{0}}", f"{{0}} <b>{other.text}</b>")
        assert one.alignment is None and one.score == other.score
    assert found[1].parts > 1 and found[1].text.count("<i>") == found[1].text.count("</i>") == 6
    check_balanced(found[1].text)
    assert found[2].text == "<br/>"
    with pytest.raises(UserError, match="pieces"):
        translator.translate(lines, markup=True, annotations=Annotations(alignments="pieces"))
    (tmp_path / "in").write_text(f"{first}\n")
    flags = [f"--run={tiny_run}", f"--input={tmp_path / 'in'}", "--markup"]
    assert main(["translate", *flags]) == 0
    assert capsys.readouterr().out == f"{found[0].text}\n"
    assert main(["translate", *flags, "--json"]) == 0
    assert f'"text": "{found[0].text}"' in capsys.readouterr().out
    assert main(["translate", *flags, "--alignments=pieces"]) == 2
