"""The lines of a text or of an HTML document, and the document with translated lines in their places."""

import html
import html.parser
import re
from collections.abc import Sequence
from typing import NamedTuple

# Elements whose text is no language.
_VERBATIM = frozenset({"script", "style", "code", "kbd", "samp", "textarea"})

# Elements without an end tag.
_VOID = frozenset("area base br col embed hr img input link meta source track wbr".split())


class Template(NamedTuple):
    """The lines to translate, and the fixed text before each of them and after the last."""

    lines: tuple[str, ...]
    # One more than lines.
    between: tuple[str, ...]
    # Whether the translations are escaped as text of HTML.
    escape: bool = False

    def fill(self, translations: Sequence[str]) -> str:
        """Returns the document with a translation in the place of each line."""
        filled = [self.between[0]]
        for translation, after in zip(translations, self.between[1:], strict=True):
            filled += [html.escape(translation, quote=False) if self.escape else translation, after]
        return "".join(filled)


def read_text(text: str) -> Template:
    """Returns the lines of a text: "a\\nb" has the lines a and b."""
    lines = text.replace("\r\n", "\n").split("\n")
    return Template(tuple(lines), ("", *["\n"] * (len(lines) - 1), ""))


def read_html(text: str) -> Template:
    """Returns the texts between the tags of a document: "<b>a</b> b" has the lines a and b.

    Tags, comments, white space around texts, and the contents of script, style, code and of elements with
    translate="no" stay as they are.
    """
    parser = _Parser()
    parser.feed(text)
    parser.close()
    parser.end_text()
    return Template(tuple(parser.lines), (*parser.between, parser.fixed), escape=True)


class _Parser(html.parser.HTMLParser):
    """Collects the texts between tags and everything else."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.lines: list[str] = []
        self.between: list[str] = []
        self.fixed = ""
        self._text = ""
        # The open elements inside of the outermost one that is not translated.
        self._verbatim: list[str] = []

    def end_text(self) -> None:
        """Adds the text so far as a line."""
        text, self._text = self._text, ""
        core = text.strip()
        if not core or self._verbatim:
            raw = "".join(self._verbatim[-1:]) in ("script", "style")
            self.fixed += text if raw else html.escape(text, quote=False)
            return
        start = text.index(core)
        self.between.append(self.fixed + text[:start])
        self.lines.append(re.sub(r"\s+", " ", core))
        self.fixed = text[start + len(core) :]

    def _add(self, markup: str) -> None:
        self.end_text()
        self.fixed += markup

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._add(self.get_starttag_text() or "")
        if tag not in _VOID and (self._verbatim or tag in _VERBATIM or ("translate", "no") in attrs):
            self._verbatim.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._add(self.get_starttag_text() or "")

    def handle_endtag(self, tag: str) -> None:
        self._add(f"</{tag}>")
        if tag in self._verbatim:
            while self._verbatim.pop() != tag:
                pass

    def handle_comment(self, data: str) -> None:
        self._add(f"<!--{data}-->")

    def handle_decl(self, decl: str) -> None:
        self._add(f"<!{decl}>")

    def handle_pi(self, data: str) -> None:
        self._add(f"<?{data}>")

    def unknown_decl(self, data: str) -> None:
        self._add(f"<![{data}]>")
