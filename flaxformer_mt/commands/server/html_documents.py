"""The lines of a text or of an HTML document, and the document with translated lines in their places."""

import html.entities
import html.parser
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

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

# Open elements are looked for among so many, so that hostile documents take no longer than others.
_DEEPEST = 100
_TRANSPARENT = frozenset({"address", "div", "p"})
_TABLE_PARTS = frozenset("table caption colgroup thead tbody tfoot tr td th".split())
# Start tags that end several elements inside each other.
_NESTED = _TABLE_PARTS | {"optgroup", "hr"}
# Elements that an end tag of something else inside them does not end.
_SCOPES = frozenset("table caption td th button object template".split())


def _is_inline(name: str) -> bool:
    return name in _INLINE or "-" in name


class _ImpliedEnd(NamedTuple):
    """Start tags that end open elements: https://html.spec.whatwg.org/multipage/syntax.html#optional-tags."""

    starts: frozenset[str]
    ended: frozenset[str]
    # Elements that are looked into no further; empty: those that end a line, but for address, div and p.
    within: frozenset[str]

    def stops_at(self, name: str) -> bool:
        """Return whether the elements around one of this name stay open."""
        return name in self.within if self.within else not _is_inline(name) and name not in _TRANSPARENT


_CELLS, _ROWS = "td th caption colgroup", "td th caption colgroup tr thead tbody tfoot"
_IMPLIED_ENDS = tuple(
    _ImpliedEnd(*(frozenset(names.split()) for names in rule))
    for rule in (
        ("li", "li", ""),
        ("dt dd", "dt dd", ""),
        (
            "address article aside blockquote center dd details dialog dir div dl dt fieldset figcaption "
            "figure footer form h1 h2 h3 h4 h5 h6 header hgroup hr li listing main menu nav ol p plaintext "
            "pre search section summary table ul xmp",
            "p",
            "table caption td th button object template",
        ),
        ("rb rt rtc rp", "rb rt rp", "ruby rtc"),
        ("option", "option", "select optgroup datalist"),
        ("optgroup hr", "option optgroup", "select"),
        ("td th", _CELLS, "table tr"),
        ("tr", f"{_CELLS} tr", "table thead tbody tfoot"),
        ("thead tbody tfoot caption colgroup", _ROWS, "table"),
        ("body", "head", "html"),
    )
)


# White space, also as entities such as &nbsp;, at the ends of a text and inside it.
_NAMED = "|".join(name for name, text in html.entities.html5.items() if text.isspace() and name[-1] == ";")
_SPACES = re.compile(rf"(?:\s|&(?:{_NAMED}|#0*(?:9|10|12|13|32|160);|#[xX]0*(?:9|[aAcCdD]|20|[aA]0);))+")


# Tags in a line, and what stands between the links of a menu.
_TAGS = re.compile(r"<(/?)x-(\d+)[^<>]*>")
_SEPARATORS = re.compile(r"[\s|/\\·•›»→>]*")


class Line(NamedTuple):
    """A line to translate."""

    text: str
    # Its tags, if it is a line of a document. In them, tags are named `x-0`, `x-1-a` ... of `kept`.
    marked: MarkedLine | None = None
    kept: tuple[tuple[str, str], ...] = ()
    # What is read apart inside it, such as a menu, by the place in `kept`; its lines follow this one.
    apart: tuple[tuple[int, "Template"], ...] = ()

    @property
    def needs_alignment(self) -> bool:
        """Whether the translation must have an alignment of words, which its tags are placed by."""
        return self.marked is not None and bool(self.marked.items)

    def fill(self, translation: Translation, apart: Mapping[int, str] = MappingProxyType({})) -> str:
        if self.marked is None:
            return translation.text
        alignment, starts = translation.alignment or (), translation.sentence_starts
        text = put_back(self.marked, translation.text, alignment, starts)
        kept: Any = [*self.kept] if apart else self.kept  # which all lines of a menu share
        for place, one in apart.items():
            kept[place] = (one, one)
        return _restore(text, kept)


class Template(NamedTuple):
    """The lines to translate, and the fixed text before each of them and after the last."""

    lines: tuple[Line, ...]
    # One more than lines that are not inside another one.
    between: tuple[str, ...]

    def fill(self, translations: Sequence[Translation]) -> str:
        filled, remaining = [self.between[0]], iter(zip(self.lines, translations, strict=True))
        for (line, translation), after in zip(remaining, self.between[1:], strict=False):
            inner = {place: [next(remaining)[1] for _ in part.lines] for place, part in line.apart}
            apart = {place: part.fill(inner[place]) for place, part in line.apart}
            filled += [line.fill(translation, apart), after]
        return "".join(filled)


def read_text(text: str) -> Template:
    """Return the lines of a text: "a\\nb" has the lines a and b."""
    lines = text.replace("\r\n", "\n").split("\n")
    return Template(tuple(map(Line, lines)), ("", *["\n"] * (len(lines) - 1), ""))


def read_html(text: str) -> Template:
    """Return the lines of a document: "<p>a <b>b</b></p>c" has the lines "a b", with its tags, and c.

    Elements such as p and br end a line; those such as b and a are part of it, and so are placeholders such
    as {0}. Text of a menu or a button in a sentence is a line after it; readings of ruby are left out. A line
    break in pre, or where the attribute style has a white-space that keeps it, ends a line.
    Comments, CDATA sections, white space around lines, and the contents of script, style, code and of
    elements with translate="no" stay as they are, and text is escaped in translations as in the document.
    An end tag that HTML lets one leave out may be absent.
    """
    return _read(text, _Reader())


def _read(text: str, reader: "_Reader") -> Template:
    tokens = _Tokenizer(text).tokens
    ends = [*(token.place for token in tokens[1:]), len(text)]
    for token, end in zip(tokens, ends, strict=False):
        reader.read(token, text[token.place : end])
    reader.end()
    return Template(tuple(reader.lines), (*reader.between, reader.fixed))


class _Token(NamedTuple):
    """A token of a document: the place where it begins, and what HTML's rules take it for."""

    place: int
    kind: Literal["text", "start", "empty", "end", "other"]
    tag: str = ""
    attributes: Mapping[str, str] = MappingProxyType({})


def _bounded(parse: Callable[..., int]) -> Callable[..., int]:
    """Parse what may have no end, as -1 says: after many without one, the others are text and not read on."""

    def parse_some(self: "_Tokenizer", place: int, *report: int) -> int:
        try:
            end = -1 if self.unfinished > _DEEPEST else parse(self, place, *report)
        except AssertionError:  # "<![x[", which is a comment to browsers
            end = self.parse_bogus_comment(place)
        self.unfinished += end < 0
        return end

    return parse_some


class _Tokenizer(html.parser.HTMLParser):
    """Collects the tokens; their text is read from the document, so that nothing of it can change."""

    def __init__(self, document: str) -> None:
        super().__init__(convert_charrefs=True)
        self._lines = [0, *(match.end() for match in re.finditer("\n", document))]
        self.tokens: list[_Token] = []
        self.unfinished = 0
        # No tag begins after the last ">": from each "<" there, the parser would look for one to the end.
        end = document.rfind(">") + 1
        self.feed(document[:end])
        self.close()
        self.handle_data(document[end:])

    def _add(self, kind: Any, tag: str = "", attrs: Sequence[tuple[str, str | None]] = ()) -> None:
        line, column = self.getpos()
        attributes = {name: (value or "").lower() for name, value in attrs}
        self.tokens.append(_Token(self._lines[line - 1] + column, kind, tag, attributes))

    def handle_data(self, data: str) -> None:
        if data and not (self.tokens and self.tokens[-1].kind == "text"):
            self._add("text")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._add("empty" if tag in VOID else "start", tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._add("empty", tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        self._add("end", tag)

    def handle_comment(self, data: str) -> None:
        self._add("other")

    parse_starttag = _bounded(html.parser.HTMLParser.parse_starttag)
    parse_comment = _bounded(html.parser.HTMLParser.parse_comment)
    parse_marked_section = _bounded(html.parser.HTMLParser.parse_marked_section)

    # Their parameters have other names.
    handle_decl = handle_pi = unknown_decl = handle_comment  # type: ignore[assignment]


class _Element(NamedTuple):
    """An open element; `keeps_breaks`: a line break in it is one on the screen."""

    name: str
    keeps_breaks: bool


class _Reader:
    def __init__(self, *, inside_line: bool = False) -> None:
        # What is read apart inside a line has nothing that is read apart.
        self._inside_line = inside_line
        self.lines: list[Line] = []
        self.between: list[str] = []
        self.fixed = ""
        # The line so far: its text, escaped, with tags named by their place in `_kept`; its links.
        self._line = ""
        self._has_text = False
        self._links: list[tuple[int, int]] = []
        self._kept: list[tuple[str, str]] = []
        # The open elements of the line: names, and places in `_kept` and in the line.
        self._open: list[tuple[str, int, int]] = []
        # What is read apart in the line, with its place in `_kept`.
        self._apart: list[tuple[int, Template]] = []
        self._elements: list[_Element] = []
        # The place in `_elements` of the outermost one that is not translated, and its text so far.
        self._verbatim: int | None = None
        self._verbatim_text = ""

    def read(self, token: _Token, raw: str) -> None:
        """Add a token, which the document spells as `raw`."""
        if token.kind in ("start", "empty") and (end := self._find_implied_end(token.tag)) is not None:
            self._leave(end)
        if token.kind == "end":
            self._read_end(token.tag, raw)
        elif self._verbatim is not None:
            self._verbatim_text += raw
            if token.kind == "start":
                self._enter(token)
        elif token.kind == "text":
            self._read_text(raw)
        elif token.kind == "start":
            self._read_start(token, raw)
        elif token.kind == "other" or _is_inline(token.tag):
            self._keep(raw)
        else:
            self._end_line_with(raw)

    def end_line(self) -> None:
        line, has_text, tags, links = self._line, self._has_text, tuple(self._kept), self._links
        self._line, self._has_text, self._kept, self._open, self._links = "", False, [], [], []
        apart, self._apart = tuple(self._apart), []
        if not has_text:
            self.fixed += _restore(line, tags)
            return
        links = [link for link in links if _has_words(line[slice(*link)])]
        ends = [0, *itertools.chain.from_iterable(links), len(line)]
        outside = "".join(line[start:end] for start, end in zip(ends[::2], ends[1::2], strict=True))
        if apart or len(links) < 2 or _has_words(outside):  # no menu
            links = [(0, len(line))]
        last = 0
        for start, end in links:
            lead, text, trail = _split_ends(line[start:end])
            before, marked, after = peel(take_out(_SPACES.sub(" ", text), in_document=True))
            self.between.append(self.fixed + _restore(line[last:start] + lead + before, tags))
            self.lines.append(Line(marked.text, marked, tags, apart))
            self.fixed, last = _restore(after + trail, tags), end
        self.fixed += _restore(line[last:], tags)
        self.lines += [line for _, part in apart for line in part.lines]

    def end(self) -> None:
        self._leave(0)
        self.end_line()

    def _read_text(self, raw: str) -> None:
        keeps_breaks = bool(self._elements) and self._elements[-1].keeps_breaks
        for number, part in enumerate(_BREAK.split(raw) if keeps_breaks else [raw]):
            if number % 2:
                self._end_line_with(part)
            else:
                # What the parser takes for text must be text for `take_out` too.
                self._line += TAG_START.sub("&lt;", part)
                self._has_text = self._has_text or bool(_SPACES.sub("", part))

    def _read_start(self, token: _Token, raw: str) -> None:
        inline = _is_inline(token.tag)
        apart = self._is_apart(token.tag)
        if not inline and not apart:
            self.end_line()
        if apart or token.tag in _VERBATIM or token.attributes.get("translate") == "no":
            self._verbatim, self._verbatim_text = len(self._elements), raw
        elif inline:
            self._open.append((token.tag, len(self._kept), len(self._line)))
            self._line += f"<{_name(token.tag, len(self._kept))}>"
            self._kept.append((raw, ""))
        else:
            self.fixed += raw
        self._enter(token)

    def _is_apart(self, name: str) -> bool:
        return name in _APART and self._has_text and not self._inside_line

    def _read_end(self, tag: str, raw: str) -> None:
        element = self._find_open(tag)
        if self._verbatim is not None and (element is None or element >= self._verbatim):
            self._verbatim_text += raw
            raw = ""
        if element is not None:
            self._leave(element)
        if not raw:
            return
        if not _is_inline(tag):
            self._end_line_with(raw)
        elif tag not in [name for name, *_ in self._open[-_DEEPEST:]]:
            self._keep(raw)
        else:
            name, number, start = self._open.pop()
            while name != tag:
                name, number, start = self._open.pop()
            self._line += f"</{_name(tag, number)}>"
            self._kept[number] = (self._kept[number][0], raw)
            while tag == "a" and self._links and self._links[-1][0] > start:  # a link inside
                self._links.pop()
            if tag == "a":
                self._links.append((start, len(self._line)))

    def _enter(self, token: _Token) -> None:
        style = _WHITE_SPACE.findall(token.attributes.get("style", ""))
        above = bool(self._elements) and self._elements[-1].keeps_breaks
        keeps = style[-1] in _KEEPS_BREAKS if style else above or token.tag in _PREFORMATTED
        self._elements.append(_Element(token.tag, keeps))

    def _leave(self, number: int) -> None:
        if self._verbatim is not None and number <= self._verbatim:
            name, text = self._elements[self._verbatim].name, self._verbatim_text
            if apart := self._is_apart(name):
                self._apart.append((len(self._kept), _read(text, _Reader(inside_line=True))))
            if apart or _is_inline(name):
                self._keep(text)
            else:
                self.fixed += text
            self._verbatim = None
        del self._elements[number:]

    def _inner_elements(self) -> Iterator[tuple[int, str]]:
        for number in reversed(range(max(0, len(self._elements) - _DEEPEST), len(self._elements))):
            yield number, self._elements[number].name

    def _find_implied_end(self, tag: str) -> int | None:
        """Return the outermost open element that a start tag ends, as <li> ends the item before."""
        found = len(self._elements)
        for rule in _IMPLIED_ENDS:
            if tag in rule.starts:
                for number, name in self._inner_elements():
                    if name in rule.ended:
                        found = min(number, found)
                    # Of a table, an outer part may end as well; other elements do not hold one of their kind.
                    if rule.stops_at(name) or (name in rule.ended and tag not in _NESTED):
                        break
        return found if found < len(self._elements) else None

    def _find_open(self, tag: str) -> int | None:
        for number, name in self._inner_elements():
            if name == tag:
                return number
            if not _is_inline(name) and (_is_inline(tag) or (name in _SCOPES and tag not in _TABLE_PARTS)):
                return None
        return None

    def _keep(self, raw: str) -> None:
        self._line += f"<x-{len(self._kept)}/>"
        self._kept.append((raw, raw))

    def _end_line_with(self, raw: str) -> None:
        self.end_line()
        self.fixed += raw


def _split_ends(text: str) -> tuple[str, str, str]:
    runs = [match.span() for match in _SPACES.finditer(text)]
    start = runs[0][1] if runs and runs[0][0] == 0 else 0
    end = runs[-1][0] if runs and runs[-1][1] == len(text) else len(text)
    return text[:start], text[start:end], text[end:]


def _name(tag: str, number: int) -> str:
    """Return the name of a tag in a line; that of a link or a footnote tells so."""
    return f"x-{number}-{tag}" if tag in ("a", "sup") else f"x-{number}"


def _has_words(part: str) -> bool:
    """Return whether a part of a line has more than tags, white space and what separates links."""
    return _SEPARATORS.fullmatch(html.unescape(_TAGS.sub("", part))) is None


def _restore(text: str, tags: Sequence[tuple[str, str]]) -> str:
    """Return a text with the tags of the document in place of those named `x-0`, `x-1` ..."""
    return _TAGS.sub(lambda tag: tags[int(tag[2])][tag[1] == "/"], text)
