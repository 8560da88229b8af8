"""Extracts the lines of a text or an HTML document, and puts translated lines in their places."""

import html.entities
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import turbohtml
from turbohtml import TokenType

from flaxformer_mt.translation.inline_markup import TAG_START, VOID, MarkedLine, peel, put_back, take_out
from flaxformer_mt.translation.result import Translation

# Elements whose text is no language, or the reading of another text; then native codes of XLIFF.
_VERBATIM = frozenset("script style code kbd samp textarea math rt rp rtc bpt ept it ph xliff:g".split())

# Elements inside a line of text, as are custom ones: HTML's phrasing content without br, those that it had
# before, parts of ruby, and tags that translation tools put into segments (XLIFF). All others end the line.
_INLINE = frozenset(
    "a abbr acronym area b basefont bdi bdo bgsound big blink cite code data del dfn em embed font i img "
    "input ins kbd label link map mark math meta meter nobr output picture progress q rb rp rt rtc ruby s "
    "samp script slot small source span strike strong sub sup textarea time track tt u var wbr "
    "bpt bx ec ept ex g it mrk pc ph sc x xliff:g".split()
)
# Those of the phrasing content whose text is no part of the sentence: in one, it is read apart.
_APART = frozenset("audio button canvas datalist iframe noscript object select svg template video".split())

# Elements whose line breaks are seen, and the values of the style white-space with which all elements do so.
_PREFORMATTED = frozenset({"pre", "listing", "xmp", "plaintext"})
_KEEPS_BREAKS = frozenset({"pre", "pre-wrap", "pre-line", "break-spaces", "preserve", "preserve-breaks"})
_WHITE_SPACE = re.compile(r"(?<![\w-])white-space(?:-collapse)?\s*:\s*([a-z-]+)")
_BREAK = re.compile(r"(\r\n|\r|\n)")

# An end tag ends one of so many open elements of its line, so that hostile documents take no longer.
_DEEPEST = 100


def _is_inline(name: str) -> bool:
    return name in _INLINE or "-" in name


# White space, also as entities such as &nbsp;, at the ends of a text and inside it.
_NAMED = "|".join(name for name, text in html.entities.html5.items() if text.isspace() and name[-1] == ";")
_SPACES = re.compile(rf"(?:\s|&(?:{_NAMED}|#0*(?:9|10|12|13|32|160);|#[xX]0*(?:9|[aAcCdD]|20|[aA]0);))+")


# Tags in a line, and what stands between the links of a menu.
_TAGS = re.compile(r"<(/?)x-(\d+)[^<>]*>")
_SEPARATORS = re.compile(r"[\s|/\\·•›»→>]*")


class Line(NamedTuple):
    """A line to translate, with its tags if it is from an HTML document."""

    text: str
    # Its tags, if it is a line of a document. In them, tags are named `x-0`, `x-1-a` ... of `tags`.
    marked: MarkedLine | None = None
    tags: Sequence[tuple[str, str]] = ()
    # What is read apart inside it, such as a menu, by the place in `tags`; its lines follow this one.
    apart: tuple[tuple[int, "Template"], ...] = ()

    @property
    def needs_alignment(self) -> bool:
        """Whether a word alignment is needed to place the tags in the translation."""
        return self.marked is not None and bool(self.marked.items)

    def find_sentences(self, language: str) -> tuple[int, ...] | None:
        return None if self.marked is None else self.marked.find_sentences(language)

    def fill(self, translations: Iterator[Translation]) -> str:
        translation = next(translations)
        if self.marked is None:
            return translation.text
        alignment, starts = translation.alignment or (), translation.sentence_starts
        text = put_back(self.marked, translation.text, alignment, starts)
        tags: Any = [*self.tags] if self.apart else self.tags  # which all lines of a menu share
        for place, template in self.apart:
            tags[place] = (template.fill(translations),) * 2
        return _restore(text, tags)


class Template(NamedTuple):
    parts: tuple[Line | str, ...]

    @property
    def lines(self) -> list[Line]:
        lines: list[Line] = []
        for line in self.parts:
            if isinstance(line, Line):
                lines += [line, *itertools.chain.from_iterable(part.lines for _, part in line.apart)]
        return lines

    def fill(self, translations: Iterable[Translation]) -> str:
        remaining = iter(translations)
        return "".join(part if isinstance(part, str) else part.fill(remaining) for part in self.parts)


def read_text(text: str) -> Template:
    """Split a text into lines: "a\\nb" has the lines a and b."""
    lines = text.replace("\r\n", "\n").split("\n")
    return Template(tuple(part for line in lines for part in ("\n", Line(line)))[1:])


def read_html(text: str) -> Template:
    """Split an HTML document into lines: "<p>a <b>b</b></p>c" has the lines "a b" (with tags) and "c".

    Elements such as p and br end a line. Elements such as b and a, and placeholders such as {0}, are part of
    a line. The text of a menu or a button inside a sentence is a separate line after the sentence; ruby
    annotations are left out. A line break ends a line in pre, and wherever the style attribute has a
    white-space value that preserves line breaks. Comments, CDATA sections, white space around lines, and the
    contents of script, style, code and of elements with translate="no" do not change. Translations are
    escaped like the text of the document. Elements end where they end in browsers, even if HTML allows their
    end tags to be omitted.
    """
    return _Reader(text).read()


def _find_lines(document: str) -> list[int]:
    """Return the offsets of the lines of a document; the parser reports positions as lines and columns."""
    return [0, *(match.end() for match in re.finditer(r"\r\n?|\n", document))]


def _tokenize(document: str) -> list[tuple[turbohtml.Token, int, int]]:
    """Return the tokens with start and end offsets; text between tokens belongs to the previous token."""
    lines = _find_lines(document)
    tokens = list(turbohtml.tokenize(document))
    starts = [lines[token.line - 1] + token.col for token in tokens]
    return list(zip(tokens, starts, [*starts[1:], len(document)], strict=False))


def _find_ends(document: str) -> dict[int, int]:
    """Return the end offset of each element by its start offset."""
    lines = _find_lines(document)
    ends: dict[int, int] = {}
    # In a template, a document may begin with any element, such as td.
    root = turbohtml.parse_fragment(document, "template", source_locations=True)
    remaining: list[tuple[Any, int]] = [(root, len(document))]
    while remaining:
        parent, limit = remaining.pop()
        for node in reversed(parent.children):
            if (location := node.source_location) is None:  # a text, or an element that the parser adds
                remaining.append((node, limit))
                continue
            tag, end_tag = location.start_tag, location.end_tag
            start = lines[tag.start_line - 1] + tag.start_col
            ends[start] = inner_end = limit
            if end_tag is not None:
                ends[start] = lines[end_tag.end_line - 1] + end_tag.end_col
                inner_end = lines[end_tag.start_line - 1] + end_tag.start_col
            remaining.append((node, inner_end))
            limit = min(limit, start)  # an element without an end tag ends where the next one starts
    return ends


class _Reader:
    def __init__(self, document: str, *, inside_line: bool = False) -> None:
        self._document, self._ends = document, _find_ends(document)
        # What is read apart inside a line has nothing that is read apart.
        self._inside_line = inside_line
        self._parts: list[Line | str] = []
        # Open elements: where they end, and whether a line break in them is one on the screen.
        self._elements: list[tuple[int, bool]] = []
        self._begin_line()

    def _begin_line(self) -> None:
        # The line so far: its text, escaped, with tags named by their place in `_tags`; its links.
        self._line = ""
        self._has_text = False
        self._links: list[tuple[int, int]] = []
        self._tags: list[tuple[str, str]] = []
        # The open elements of the line: names, and places in `_tags` and in the line.
        self._open: list[tuple[str, int, int]] = []
        # What is read apart in the line, with its place in `_tags`.
        self._apart: list[tuple[int, Template]] = []

    def read(self) -> Template:
        tokens = _tokenize(self._document)
        done = tokens[0][1] if tokens else 0
        self._parts.append(self._document[:done])
        last_section = self._document.rfind("]]>")
        for token, start, end in tokens:
            if end <= done:  # inside of what stays as it is
                continue
            start = max(start, done)
            while self._elements and self._elements[-1][0] <= start:
                self._elements.pop()
            raw, done = self._document[start:end], end
            if token.type == TokenType.TEXT:
                self._read_text(raw)
            elif token.type == TokenType.END_TAG:
                self._read_end(token.tag or "", raw)
            elif token.type == TokenType.START_TAG:
                done = self._read_start(token, start, end)
            else:
                # The parser takes such a section for a comment, up to the first ">".
                if raw.startswith("<![CDATA[") and start < last_section:
                    done = max(end, self._document.find("]]>", start) + 3)
                self._keep(self._document[start:done])
        self._end_line(self._document[done:])
        return Template(tuple(self._parts))

    def _end_line(self, fixed: str = "") -> None:
        """Finish the current line, followed by the fixed text `fixed`."""
        line, tags, links, apart = self._line, tuple(self._tags), self._links, tuple(self._apart)
        links = [link for link in links if _has_words(line[slice(*link)])]
        ends = [0, *itertools.chain.from_iterable(links), len(line)]
        outside = "".join(line[start:end] for start, end in zip(ends[::2], ends[1::2], strict=True))
        if not self._has_text:
            links = []
        elif apart or len(links) < 2 or _has_words(outside):  # no menu
            links = [(0, len(line))]
        last = 0
        for start, end in links:
            lead, text, trail = _split_ends(line[start:end])
            before, marked, after = peel(take_out(_SPACES.sub(" ", text), in_document=True))
            self._parts.append(_restore(line[last:start] + lead + before, tags))
            self._parts += [Line(marked.text, marked, tags, apart), _restore(after + trail, tags)]
            last = end
        self._parts += [_restore(line[last:], tags), fixed]
        self._begin_line()

    def _read_text(self, raw: str) -> None:
        keeps_breaks = bool(self._elements) and self._elements[-1][1]
        for number, part in enumerate(_BREAK.split(raw) if keeps_breaks else [raw]):
            if number % 2:
                self._end_line(part)
            else:
                # What the parser takes for text must be text for `take_out` too.
                self._line += TAG_START.sub("&lt;", part)
                self._has_text = self._has_text or bool(_SPACES.sub("", part))

    def _read_start(self, token: turbohtml.Token, start: int, end: int) -> int:
        """Read a start tag, or an element that is fixed or read separately; return the offset of the end."""
        tag, raw = token.tag or "", self._document[start:end]
        inline = _is_inline(tag)
        # A script ends at its end tag in any case.
        if tag in VOID or (token.self_closing and tag not in ("script", "style")):
            self._keep(raw) if inline else self._end_line(raw)
            return end
        element_end = self._ends.get(start, len(self._document) if tag in ("html", "body") else end)
        apart = tag in _APART and self._has_text and not self._inside_line
        if not inline and not apart:
            self._end_line()
        if apart or tag in _VERBATIM or (token.attr("translate") or "").lower() == "no":
            whole = self._document[start : max(end, element_end)]
            if apart:
                self._apart.append((len(self._tags), _Reader(whole, inside_line=True).read()))
            if apart or inline:
                self._keep(whole)
            else:
                self._parts.append(whole)
            return start + len(whole)
        if inline:
            self._open.append((tag, len(self._tags), len(self._line)))
            self._line += f"<{_name(tag, len(self._tags))}>"
            self._tags.append((raw, ""))
        else:
            self._parts.append(raw)
        above = bool(self._elements) and self._elements[-1][1]
        style = _WHITE_SPACE.findall((token.attr("style") or "").lower())
        keeps_breaks = style[-1] in _KEEPS_BREAKS if style else above or tag in _PREFORMATTED
        self._elements.append((element_end, keeps_breaks))
        return end

    def _read_end(self, tag: str, raw: str) -> None:
        if not _is_inline(tag):
            self._end_line(raw)
        elif tag not in [name for name, *_ in self._open[-_DEEPEST:]]:
            self._keep(raw)
        else:
            name, number, start = self._open.pop()
            while name != tag:
                name, number, start = self._open.pop()
            self._line += f"</{_name(tag, number)}>"
            self._tags[number] = (self._tags[number][0], raw)
            while tag == "a" and self._links and self._links[-1][0] > start:  # a link inside
                self._links.pop()
            if tag == "a":
                self._links.append((start, len(self._line)))

    def _keep(self, raw: str) -> None:
        self._line += f"<x-{len(self._tags)}/>"
        self._tags.append((raw, raw))


def _split_ends(text: str) -> tuple[str, str, str]:
    runs = [match.span() for match in _SPACES.finditer(text)]
    start = runs[0][1] if runs and runs[0][0] == 0 else 0
    end = runs[-1][0] if runs and runs[-1][1] == len(text) else len(text)
    return text[:start], text[start:end], text[end:]


def _name(tag: str, number: int) -> str:
    """Return the name that replaces a tag in a line; names of links and footnotes end in `-a` and `-sup`."""
    return f"x-{number}-{tag}" if tag in ("a", "sup") else f"x-{number}"


def _has_words(part: str) -> bool:
    """Return whether a part of a line has text other than tags, white space and separators of links."""
    return _SEPARATORS.fullmatch(html.unescape(_TAGS.sub("", part))) is None


def _restore(text: str, tags: Sequence[tuple[str, str]]) -> str:
    """Replace the tags `x-0`, `x-1`, ... in a text by the tags of the document."""
    return _TAGS.sub(lambda tag: tags[int(tag[2])][tag[1] == "/"], text)
