"""The lines of a text or of an HTML document, and the document with translated lines in their places."""

import html.entities
import html.parser
import re
from collections.abc import Sequence
from typing import NamedTuple

from flaxformer_mt.translation.inline_markup import (
    TAG_START,
    VOID,
    MarkedLine,
    peel,
    put_back,
    take_out,
)
from flaxformer_mt.translation.result import Translation

# Elements whose text is no language.
_VERBATIM = frozenset({"script", "style", "code", "kbd", "samp", "textarea"})

# Elements inside a line of text; all others end it.
_INLINE = frozenset(
    "a abbr acronym b bdi bdo big cite code data del dfn em font i img ins kbd label mark q s samp small "
    "span strike strong sub sup time tt u var wbr".split()
)


# White space, also as entities such as &nbsp;, at the ends of a text and inside it.
_NAMED = "|".join(name for name, text in html.entities.html5.items() if text.isspace() and name[-1] == ";")
_SPACES = re.compile(rf"(?:\s|&(?:{_NAMED}|#0*(?:9|10|12|13|32|160);|#[xX]0*(?:9|[aAcCdD]|20|[aA]0);))+")


class Line(NamedTuple):
    """A line to translate."""

    text: str
    # Its tags, if it is a line of a document. In them, tags are named `x-0`, `x-1` ... of `kept`.
    marked: MarkedLine | None = None
    kept: tuple[tuple[str, str], ...] = ()

    @property
    def needs_alignment(self) -> bool:
        """Whether the translation must have an alignment of words, which its tags are placed by."""
        return self.marked is not None and bool(self.marked.items)

    def fill(self, translation: Translation) -> str:
        """Returns a translation of the line, as it stands in the document."""
        if self.marked is None:
            return translation.text
        text = put_back(self.marked, translation.text, translation.alignment or ())
        return _restore(text, self.kept)


class Template(NamedTuple):
    """The lines to translate, and the fixed text before each of them and after the last."""

    lines: tuple[Line, ...]
    # One more than lines.
    between: tuple[str, ...]

    def fill(self, translations: Sequence[Translation]) -> str:
        """Returns the document with a translation in the place of each line."""
        filled = [self.between[0]]
        for line, translation, after in zip(self.lines, translations, self.between[1:], strict=True):
            filled += [line.fill(translation), after]
        return "".join(filled)


def read_text(text: str) -> Template:
    """Returns the lines of a text: "a\\nb" has the lines a and b."""
    lines = text.replace("\r\n", "\n").split("\n")
    return Template(tuple(map(Line, lines)), ("", *["\n"] * (len(lines) - 1), ""))


def read_html(text: str) -> Template:
    """Returns the lines of a document: "<p>a <b>b</b></p>c" has the lines "a b", with its tags, and c.

    Elements such as p and br end a line; those such as b and a are part of it, and so are placeholders such
    as {0}. Comments, white space around lines, and the contents of script, style, code and of elements with
    translate="no" stay as they are, and text is escaped in translations as it is in the document.
    """
    # The parser takes "&copy=2" and "&section" for entities, in attributes too, and does not tell how they
    # were written: it gets a character in place of every &, and all that it finds has the & again.
    stand_in = next(chr(code) for code in range(0xF0000, 0x110000) if chr(code) not in text)
    parser = _Parser(stand_in)
    parser.feed(text.replace("&", stand_in))
    parser.close()
    parser.end_line()
    return Template(tuple(parser.lines), (*parser.between, parser.fixed))


class _Parser(html.parser.HTMLParser):
    """Collects the lines and everything else."""

    def __init__(self, stand_in: str) -> None:
        super().__init__(convert_charrefs=True)
        self._stand_in = stand_in
        self.lines: list[Line] = []
        self.between: list[str] = []
        self.fixed = ""
        # The line so far: its text, escaped, with tags named by their place in `_kept`; the same as it was.
        self._line = self._raw = ""
        self._has_text = False
        self._kept: list[tuple[str, str]] = []
        # The open elements of the line: names, and places in `_kept`.
        self._open: list[tuple[str, int]] = []
        # The open elements inside of the outermost one that is not translated, and its text so far.
        self._verbatim: list[str] = []
        self._verbatim_text = ""

    def end_line(self) -> None:
        """Adds what was read since the last line: as a line if it has text, else as fixed text."""
        if self._verbatim:  # the document ends inside
            self._verbatim.clear()
            self._keep(self._verbatim_text)
        line, raw, has_text, kept = self._line, self._raw, self._has_text, tuple(self._kept)
        self._line, self._raw, self._has_text, self._kept, self._open = "", "", False, [], []
        if not has_text:
            self.fixed += raw
            return
        text = _SPACES.sub(" ", _split_ends(line)[1])
        before, marked, after = peel(take_out(text, in_document=True))
        lead, _, trail = _split_ends(raw)
        self.between.append(self.fixed + lead + _restore(before, kept))
        self.lines.append(Line(marked.text, marked, kept))
        self.fixed = _restore(after, kept) + trail

    def _keep(self, raw: str) -> None:
        """Adds something to the line that stays as it is."""
        self._line += f"<x-{len(self._kept)}/>"
        self._raw += raw
        self._kept.append((raw, raw))

    def _end_line_with(self, raw: str) -> None:
        self.end_line()
        self.fixed += raw

    def _read(self, text: str) -> str:
        """Returns what the parser found as the document has it."""
        return text.replace(self._stand_in, "&")

    def handle_data(self, data: str) -> None:
        data = self._read(data)
        if self._verbatim:
            self._verbatim_text += data
            return
        # What the parser takes for text must be text for `take_out` too.
        self._line += TAG_START.sub("&lt;", data)
        self._raw += data
        self._has_text = self._has_text or bool(_SPACES.sub("", data))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        raw = self._read(self.get_starttag_text() or "")
        if self._verbatim:
            self._verbatim_text += raw
            if tag not in VOID:
                self._verbatim.append(tag)
        elif tag not in VOID and (tag in _VERBATIM or ("translate", "no") in attrs):
            if tag not in _INLINE:
                self.end_line()
            self._verbatim, self._verbatim_text = [tag], raw
        elif tag not in _INLINE:
            self._end_line_with(raw)
        elif tag in VOID:
            self._keep(raw)
        else:
            self._open.append((tag, len(self._kept)))
            self._line += f"<x-{len(self._kept)}>"
            self._raw += raw
            self._kept.append((raw, self._read(f"</{tag}>")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        raw = self._read(self.get_starttag_text() or "")
        if self._verbatim:
            self._verbatim_text += raw
        elif tag in _INLINE:
            self._keep(raw)
        else:
            self._end_line_with(raw)

    def handle_endtag(self, tag: str) -> None:
        raw = self._read(f"</{tag}>")
        if self._verbatim:
            self._end_verbatim(tag, raw)
        elif tag not in _INLINE:
            self._end_line_with(raw)
        elif tag not in dict(self._open):
            self._keep(raw)
        else:
            name, number = self._open.pop()
            while name != tag:
                name, number = self._open.pop()
            self._line += f"</x-{number}>"
            self._raw += raw

    def _end_verbatim(self, tag: str, raw: str) -> None:
        """Ends an element in one that is not translated; the end of the outermost is back in the text."""
        self._verbatim_text += raw
        if tag not in self._verbatim:
            return
        outermost = self._verbatim[0]
        while self._verbatim.pop() != tag:
            pass
        if self._verbatim:
            return
        if outermost in _INLINE:
            self._keep(self._verbatim_text)
        else:
            self.fixed += self._verbatim_text

    def _add_other(self, raw: str) -> None:
        raw = self._read(raw)
        if self._verbatim:
            self._verbatim_text += raw
        else:
            self._keep(raw)

    def handle_comment(self, data: str) -> None:
        self._add_other(f"<!--{data}-->")

    def handle_decl(self, decl: str) -> None:
        self._add_other(f"<!{decl}>")

    def handle_pi(self, data: str) -> None:
        self._add_other(f"<?{data}>")

    def unknown_decl(self, data: str) -> None:
        self._add_other(f"<![{data}]>")


def _split_ends(text: str) -> tuple[str, str, str]:
    """Returns the white space before a text, the text and the white space after it."""
    runs = [match.span() for match in _SPACES.finditer(text)]
    start = runs[0][1] if runs and runs[0][0] == 0 else 0
    end = runs[-1][0] if runs and runs[-1][1] == len(text) else len(text)
    return text[:start], text[start:end], text[end:]


def _restore(text: str, kept: Sequence[tuple[str, str]]) -> str:
    """Returns a text with the tags of the document in place of those named `x-0`, `x-1` ..."""
    return re.sub(r"<(/?)x-(\d+)/?>", lambda tag: kept[int(tag[2])][tag[1] == "/"], text)
