"""Documents: lines are translated with their tags, and everything else stays."""

import pytest
from growth import growth

from flaxformer_mt.commands.server.html_documents import Template, read_html, read_text
from flaxformer_mt.translation.result import Translation


def fill(template: Template, *texts: str, links: list[tuple[int, int]] | None = None) -> str:
    """The document with these translations, whose words are aligned one by one, or as given."""
    alignments = [links or [(n, n) for n in range(len(text.split()))] for text in texts]
    return template.fill(
        [
            Translation(text, 0.0, 0.0, (1,), alignment=tuple(alignment))
            for text, alignment in zip(texts, alignments, strict=True)
        ]
    )


def test_lines_of_a_text():
    template = read_text("a\r\n\nb\n")
    assert [line.text for line in template.lines] == ["a", "", "b", ""]
    assert not any(line.needs_alignment for line in template.lines)
    assert fill(template, "A", "", "B <&", "") == "A\n\nB <&\n"


def test_lines_of_a_document():
    document = (
        "<!DOCTYPE html><!-- c --><p class='x &amp; y'>\n Ein <b>Hund</b>,\n zwei &lt; drei <br/>"
        "<script>if (a < b) c();</script>"
        "Lies <code>x &lt; y</code> <i translate=no>Name <b>N</b></i> {0} Ende</p>"
        "<h1><a href='?a=1&amp;b=2'><em>Kopf</em></a></h1>\n"
    )
    template = read_html(document)
    lines = ["Ein Hund, zwei < drei", "Lies Ende", "Kopf"]
    assert [line.text for line in template.lines] == lines
    assert [line.needs_alignment for line in template.lines] == [True, True, False]
    assert fill(template, *lines) == document.replace("\n zwei", " zwei")
    dog = fill(template, "two < three, a dog", "end read", "head & shoulders", links=[(0, 3), (1, 4)])
    assert "<p class='x &amp; y'>\n two &lt; three, a <b>dog</b> <br/>" in dog
    assert "<h1><a href='?a=1&amp;b=2'><em>head &amp; shoulders</em></a></h1>\n" in dog
    assert dog.count("<code>x &lt; y</code>") == dog.count("<i translate=no>Name <b>N</b></i>") == 1
    assert dog.count("{0}") == dog.count("<script>if (a < b) c();</script>") == 1


# https://html.spec.whatwg.org/multipage/dom.html#phrasing-content, without br, and what HTML had before.
# The last ones are tags of XLIFF.
VOID = "area embed img input link meta wbr source track x/ bx/ ec/"
UNSPOKEN = "code kbd samp script textarea math ph it bpt xliff:g"
SPOKEN = (
    "a abbr acronym b bdi bdo big cite data del dfn em font i ins label map mark meter nobr output picture "
    "progress q ruby s slot small span strike strong sub sup time tt u var my-element g mrk pc"
)
APART = "audio button canvas datalist iframe noscript object select svg template video"


@pytest.mark.parametrize(
    ("names", "start", "lines"),
    [
        (VOID, "Der Mann <{0}> liest", ["Der Mann liest ein Buch."]),
        (UNSPOKEN, "Der Mann <{0}>x</{0}> liest", ["Der Mann liest ein Buch."]),
        (SPOKEN, "Der Mann <{0}>liest</{0}>", ["Der Mann liest ein Buch."]),
        (APART, "Der Mann <{0}>rot</{0}> liest", ["Der Mann liest ein Buch.", "rot"]),
    ],
)
def test_inline_elements_of_html_stay_in_their_sentence(names, start, lines):
    for name in names.split():
        document = f"<p>{start.format(name)} ein Buch.</p>"
        template = read_html(document)
        assert [line.text for line in template.lines] == lines, name
        assert fill(template, *lines) == document


def test_readings_of_ruby_are_left_out_and_menus_are_read_apart():
    ruby = "<p><ruby>漢<rp>(</rp><rt>かん</rt><rp>)</rp>字<rt>じ</rt></ruby>を読む。</p>"
    assert [line.text for line in read_html(ruby).lines] == ["漢字を読む。"]
    filled = fill(read_html(ruby), "read the characters.")
    assert filled.count("<rt>かん</rt>") == filled.count("<rt>じ</rt>") == filled.count("</ruby>") == 1
    menu = "<p>Farbe <select><option>rot<option>blau</select> wählen <button translate=no>OK</button>."
    menu += "</p><p>Ja</p>"
    template = read_html(menu)
    assert [line.text for line in template.lines] == ["Farbe wählen.", "rot", "blau", "Ja"]
    filled = fill(template, "Choose color.", "red", "blue", "Yes", links=[(0, 0), (1, 1)])
    assert "<option>red<option>blue</select>" in filled and filled.endswith("<p>Yes</p>")
    assert filled.count("<button translate=no>OK</button>") == 1
    # Where nothing is before them, they end lines: these are no sentence.
    form = "<p><button>OK</button> <button>Nein</button></p>"
    assert [line.text for line in read_html(form).lines] == ["OK", "Nein"]


def test_placeholders_of_a_document_stay_in_their_sentence():
    (line,) = (template := read_html("<p>Il dort. <i translate=no>X</i> est {0}.</p>")).lines
    assert line.text == "Il dort. est." and line.marked.find_sentences("fr") == (0, 9)
    translated = Translation(
        "He is asleep. It is.", 0, 0, (1,), sentence_starts=(0, 14), alignment=((0, 0), (1, 1), (2, 4))
    )
    assert template.fill([translated]) == "<p>He is asleep. <i translate=no>X</i> It is {0}.</p>"


def test_entities_end_in_semicolons_and_text_is_escaped_as_it_was():
    document = (
        "<p>&nbsp; Siehe <a href='/?a=1&section=2&copy=3'>/?a=1&section=2&copy=3</a>&#160;\n</p>"
        "<code>&copy=2 &copy;</code><p>&copy; Müller &quot;Söhne&quot; & Co</p><td>&nbsp;</td><!-- &lt -->"
    )
    template = read_html(document)
    lines = ["Siehe /?a=1&section=2&copy=3", '© Müller "Söhne" & Co']
    assert [line.text for line in template.lines] == lines
    assert fill(template, *lines) == document
    # What would become markup is escaped wherever it comes from.
    changed = fill(template, "See /?a=1&copy;=3", "<b> & 3 > 2 \U000f0000 ©")
    assert ">/?a=1&amp;copy;=3</a>" in changed
    assert "<p>&lt;b&gt; & 3 &gt; 2 \U000f0000 &copy;</p>" in changed


@pytest.mark.parametrize(
    ("document", "lines"),
    [
        ("", []),
        ("<b> </b><!-- only -->\n<code>x</code>", []),
        ("a < b", ["a < b"]),
        ("&lt;x-0&gt; <b>c</b>", ["<x-0> c"]),
        ("<b><p>a <i>b</i></p></b>", ["a b"]),
        ("<p>a <b>b <i>c</b> d</i> e</p>", ["a b c d e"]),
        ("<p>a <b>b</p><p>c</b> d</p>", ["a b", "c d"]),
        ("a <code>b <i>c", ["a"]),
        ("<textarea>a</textarea>b<style>p > a {}</style>c", ["b", "c"]),
        ("</b>a <img src='i'><wbr/> b", ["a b"]),
        ("a <!-- c\nd --> <?pi?> b", ["a b"]),
        ("<ul><li>a</li><li><b>b</b> c</li></ul>", ["a", "b c"]),
        # End tags that may be left out end what is not translated. Where is the parser's to say; the places
        # that it tells are what is tested.
        ("<ul><li translate=no>a<li>b</ul>", ["b"]),
        ("<td translate=no>a<td>b", ["b"]),
        ("<!DOCTYPE html><html><body translate=no><p>a</body></html>", []),
        ("<template><p translate=no>a<p>b</template>c", ["b", "c"]),
        ("<ul><li translate=no><div><ul><li>x</ul>y</div>z<li>b</ul>", ["b"]),
        ("<dl><dt translate=no>a<dd>b<dt>c</dl>", ["b", "c"]),
        ("<p translate=no>a <b>x<p>b", ["b"]),
        ("<div><p translate=no>a</div>b", ["b"]),
        ("<p>a<span translate=no>x<p>b", ["a", "b"]),
        ("<table><tr translate=no><td>a<tr><td>b<tbody><tr><td>c</table>", ["b", "c"]),
        ("<table><tr><td translate=no><table><tr><td>a<td>b</table>c<td>d</table>", ["d"]),
        ("<select><optgroup translate=no><option>a<optgroup><option>b</select>", ["b"]),
        ("<ruby>x<rt>a<rtc>b</ruby> y<p>z", ["x y", "z"]),
        # The links of a menu are lines of their own.
        ("<nav><a href='/a'>Accueil</a> <a href='/b'>Contact</a></nav>", ["Accueil", "Contact"]),
        ("<nav>\n<a>Le <b>chien</b></a>\n<a>La gare</a>\n</nav>", ["Le chien", "La gare"]),
        ("<p><span><a><img src=i> Hier</a><b><a>Da</a></b></span></p>", ["Hier", "Da"]),
        ("<a>Start</a> &rsaquo; <a>Haus</a>&nbsp;&gt; <a>Tür</a>", ["Start", "Haus", "Tür"]),
        ("<p><a><img src=i></a> <a>Eins</a> <a>Zwei</a> <!-- c --></p>", ["Eins", "Zwei"]),
        ("<p><a>Eins</a> oder <a>zwei</a></p>", ["Eins oder zwei"]),
        ("<p><a>Eins</a> <a>zwei</a>.</p>", ["Eins zwei."]),
        ("<p><a>Nur einer</a></p>", ["Nur einer"]),
        ("<p><a>Eins</a> <a>zwei</p>", ["Eins zwei"]),
        # Links in a sentence that touch are words of their own, as marks of footnotes are.
        ("<p>Sieh <a>hier</a><a>da</a></p>", ["Sieh hier da"]),
        ("<p>Der Hund<sup><a href='#1'>[1]</a></sup> schläft</p>", ["Der Hund schläft"]),
        # Line breaks that are seen.
        ("<pre>\n  a <b>b\n c</b>\r\n\n d</pre>e", ["a b", "c", "d", "e"]),
        ("<p style='color: red; white-space:pre-wrap'>a\nb<p>c", ["a", "b", "c"]),
        ("<div style='WHITE-SPACE : pre-line'><p>a\nb</div>c", ["a", "b", "c"]),
        ("<pre>a\nb<code>c\nd</code></pre>", ["a", "b"]),
        ("<pre translate=no>a\nb</pre>c", ["c"]),
        # What is no text.
        ("<p>a <![CDATA[ x > y && <b> ]]> b</p>", ["a b"]),
        ("<svg><style><![CDATA[ a > b {} ]]></style></svg><p>a b</p>", ["a b"]),
        ("<?xml version='1.0'?><!DOCTYPE html SYSTEM 'about:legacy-compat'><P >a b</P\n>", ["a b"]),
        ("<p>a <!-- <b> --> b</p>", ["a b"]),
        ("<p>a <!-- <b> --!> b</p>", ["a b"]),
        ("<p title='a > b' CLASS=x>a b</p\t>", ["a b"]),
        # What ends nowhere, and marked sections, which are comments.
        ("a <![x[b]]> c <![ d", ["a c"]),
        ("<a b='x", []),
        ("</><b>a</b>", ["a"]),
        ("<a b='x><i>c</i>", []),
        # The character that stands in for ampersands is none of the document.
        (
            "<p>\U000f0000 & &copy=2 \U000f0001</p><a&b>c</a&b>",
            ["\U000f0000 & &copy=2 \U000f0001", "c"],
        ),
    ],
)
def test_documents_come_back_byte_for_byte(document, lines):
    template = read_html(document)
    assert [line.text for line in template.lines] == lines
    assert fill(template, *lines) == document


def test_line_breaks_that_are_not_seen_are_spaces_and_tags_that_do_not_end_are_text():
    for document, lines in (
        ("<p>a\nb<pre style='white-space: normal'>c\nd", ["a b", "c d"]),
        ("<p>a <b <i <!-- <?", ["a <b <i <!-- <?"]),
    ):
        assert [line.text for line in read_html(document).lines] == lines


UNITS = """<a |<a "|<a b=">" |<!-- >|<![CDATA[>|</|<b>|<a>x</a> |x<sup>1</sup>|<p>x {0}. |<li>|<script>|&#|\
x<button>y</button>|<b>x <i>y</i></b> |{n, plural, {|<p>a<object>a<my-x>"""


@pytest.mark.parametrize("unit", UNITS.split("|"))
def test_documents_take_time_in_proportion_to_their_length(unit):
    def read_and_fill(document):
        template = read_html(document)
        fill(template, *(line.text for line in template.lines))

    assert growth(read_and_fill, lambda n: unit * n) < 1.6
