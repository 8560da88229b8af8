"""Documents: what is translated are the texts, and everything else stays."""

from flaxformer_mt.commands.server.markup import read_html, read_text


def test_lines_of_a_text():
    template = read_text("a\r\n\nb\n")
    assert template.lines == ("a", "", "b", "")
    assert template.fill(["A", "", "B <&", ""]) == "A\n\nB <&\n"


def test_texts_of_a_document():
    document = (
        "<!DOCTYPE html><!-- c --><p class='x &amp; y'>Ein <b>Hund</b>,\n zwei &lt; drei<br/>"
        "<script>if (a < b) c();</script><code>x &lt; y</code><i translate=no>Name <b>N</b></i> Ende</p>"
    )
    template = read_html(document)
    assert template.lines == ("Ein", "Hund", ", zwei < drei", "Ende")
    assert template.fill(["One", "dog", ", two < three", "end"]) == document.replace("Ein", "One").replace(
        "Hund", "dog"
    ).replace(",\n zwei &lt; drei", ", two &lt; three").replace("Ende", "end")
    assert read_html("").fill([]) == "" and read_html("a < b").lines == ("a < b",)
