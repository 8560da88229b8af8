"""The page, in a browser as a reader uses it."""

import pytest
from browser import Browser, missing_programs
from test_app import SlowEngine

from flaxformer_mt.commands.server.model_thread import ModelThread
from flaxformer_mt.commands.server.translations import DirectedModel

pytestmark = pytest.mark.skipif(
    bool(missing_programs()), reason=f"without a browser: {missing_programs()} (Debian: chromium-driver)"
)


def open_page(browser, address: str) -> None:
    browser.open(address)
    browser.wait("document.querySelector('#pair').options.length")


@pytest.fixture
def browser():
    opened = Browser(width=390, height=844)
    yield opened
    opened.close()


def test_a_reader_types_sees_hovers_and_opens_the_picture(browser, serving, translator):
    line = "ba do fi"
    (expected,) = translator.translate([line], n_best=2)
    open_page(browser, serving.url)
    browser.type("#source", line)
    browser.wait(f"document.querySelector('#translation').textContent === {expected.text!r}")
    assert browser.run("document.querySelector('.word.lit')") is None
    browser.hover("#translation .word")
    lit = browser.wait(
        "[...document.querySelectorAll('.word.lit')].map(one => one.dataset.side).sort().join('')"
    )
    assert lit == "st"
    # By the keyboard: the buttons follow the words of the translation.
    browser.run("document.querySelector('#show-attention').focus()")
    browser.press("\ue007")
    cells = browser.wait("document.querySelectorAll('#picture .cell').length")
    labels = browser.run("[...document.querySelectorAll('#picture th')].map(one => one.textContent)")
    assert cells and "".join(labels).replace("\u00b7", "").startswith("badofi")
    browser.run("document.querySelector('#picture').focus()")
    browser.press("\ue014")
    assert "attends to" in browser.run("document.querySelector('#told').textContent")
    browser.click("#show-others")
    browser.click("#others li:last-child button")
    browser.wait(f"document.querySelector('#translation').textContent === {expected.alternatives[0].text!r}")
    assert browser.run("document.documentElement.scrollWidth") <= 390
    assert browser.messages() == [] and serving.take_log() == []


def test_a_page_that_waits_says_for_what(browser, serve):
    slow = SlowEngine()
    thread = ModelThread(slow, "xx-yy")
    try:
        serving = serve({("xx", "yy"): DirectedModel(thread)})
        open_page(browser, serving.url)
        browser.type("#source", "ba")
        browser.wait("document.querySelector('#state').textContent.startsWith('Translating')")
        browser.wait("document.querySelector('#state').textContent.includes('compiles its programs')")
        slow.go.set()
        browser.wait("document.querySelector('#state').textContent.endsWith(' ms')")
    finally:
        slow.go.set()
        thread.stop()


def test_a_link_may_give_the_languages_and_the_text(browser, serve):
    """As links to LibreTranslate do."""
    quick = SlowEngine()
    quick.go.set()
    thread, pairs = ModelThread(quick), [("xx", "yy"), ("yy", "xx"), ("yy", "zz")]
    serving = serve(dict.fromkeys(pairs, DirectedModel(thread)))
    for query, chosen in (("source=yy&target=zz&q=ba%20do", 2), ("source=auto&target=xx&q=ba%20do", 1)):
        browser.open(f"{serving.url}/?{query}")
        browser.wait("document.querySelector('#translation').textContent === 'BA DO'")
        assert browser.run("document.querySelector('#pair').selectedIndex") == chosen
    assert browser.messages() == []
    thread.stop()


def test_a_reader_gives_terms_in_the_box_or_as_a_file(browser, serving, translator, tmp_path):
    (expected,) = translator.translate(["ba do"], required=[["NU MI"]])
    shows = "document.querySelector('#translation').textContent === {!r}".format
    open_page(browser, serving.url)
    browser.type("#source", "ba do")
    browser.wait(shows(translator.translate(["ba do"])[0].text))
    browser.click("#show-glossary")
    browser.type("#glossary", "ba = NU MI")
    browser.wait(shows(expected.text))
    (tmp_path / "terms.tsv").write_text("# terms\nba\tNU MI\n")
    browser.type("#glossary-file", str(tmp_path / "terms.tsv"))
    browser.wait("document.querySelector('#glossary').value.startsWith('# terms')")
    browser.wait(shows(expected.text))
    assert browser.run("document.documentElement.scrollWidth") <= 390
