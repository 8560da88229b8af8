"""The step for inline markup: removes tags and placeholders from a line, and puts them into its translation.

An element encloses the target words that its source words are aligned with. A placeholder, or a tag without
content, stays next to the translation of the word that it was next to. The result contains every tag of the
line once, with elements nested as in the line.
"""

import bisect
import html
import html.entities
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flaxformer_mt.corpus.sentence_split import split_sentences
from flaxformer_mt.translation.result import Alignment, Translation
from flaxformer_mt.translation.segments import Segment, Step
from flaxformer_mt.unicode_text import WORD

_TAG = re.compile(
    r"<!--.*?-->|<!\[CDATA\[.*?\]\]>|<\?.*?\?>|<(?P<close>/?)(?P<name>[A-Za-z][\w:.-]*)"
    r"""(?P<rest>(?:\s(?:[^<>"']|"[^"]*"|'[^']*')*?)?)(?P<empty>/?)>"""
)
# What an ICU message has between its braces, with others inside. Possessive (++), so that each is read once.
_NESTED = r"[^{}]*+"
for _ in range(6):
    _NESTED = rf"(?:[^{{}}]++|\{{{_NESTED}\}})*+"
_ICU = "plural|select|selectordinal|choice|number|date|time|spellout|ordinal|duration"
# The format of printf without its space flag ("5 % der"). A width alone after % may be a URL escape (%20).
_FORMAT = r"[-+#0]*+(?:\d++|\*)?(?:\.(?:\d++|\*)?)?(?:hh?|ll?|[qjztL])?"
_PLACEHOLDERS = (
    r"\{\{\{[^{}]*\}\}\}|\{\{[^{}]*\}\}|(?:[$#]|%%?)\{[^{}]+\}|\{[\w.:!-]*\}",
    rf"\{{\s*\w+\s*,\s*(?:{_ICU})\s*(?:,{_NESTED})?\}}",
    rf"%%?(?:\(\w+\)|<\w+>){_FORMAT}[a-zA-Z]",
    rf"%%?(?:\d+\$|(?![\deE])){_FORMAT}[sdifuxXogGeE@](?![A-Za-z])",
    rf"(?<![\w=/%])%%?{_FORMAT}[sdifuxXogGeE@](?![A-Za-z\d]|%[\dA-Fa-f])|%%",
)
_PLACEHOLDER = re.compile("|".join(_PLACEHOLDERS))
_ITEM = re.compile(f"{_TAG.pattern}|(?P<placeholder>{_PLACEHOLDER.pattern})")
# Elements of HTML that have no content, with or without a slash.
VOID = frozenset("area base br col embed hr img input link meta source track wbr".split())
# Elements that separate words even without white space.
_BLOCKS = frozenset(
    "address article aside blockquote br dd div dl dt figure footer form h1 h2 h3 h4 h5 h6 header hr li main "
    "nav ol option p pre section table tbody td tfoot th thead tr ul".split()
)
# Elements inside this many others are put back like points.
_DEEPEST = 100
# Maximum nesting of elements that share a word because they outnumber the words of the translation.
_SHARED = 20
_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,30});")
# Characters that text of a document must escape, because a browser may take them for markup.
_ESCAPED = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
TAG_START = re.compile(r"<(?=[A-Za-z/!?])")
# The closing tags of at most as many elements as can be open.
_CLOSING_TAGS = re.compile(rf"(?:</[^<>]*+>){{,{_DEEPEST}}}+")
# In the tags `x-0-a`, `x-1-sup` ... of html_documents.py, all but the element.
_NUMBER = re.compile(r"\Ax-\d+-")
_ODD_SPACE = re.compile(r"[^\S \t\r\n]")
_CORE = re.compile(r"\w(?:.*\w)?", re.DOTALL)


@dataclass
class _Item:
    """An element, or a point: a placeholder, a tag without content or a tag without its counterpart.

    start, end: character positions in the plain text; begin: character position in the line. opening,
    closing: the text to put back; a point has no closing text. children: the items inside, in order.
    space_before, space_after: for a point, whether the white space before or after it was removed with it.
    replaces_space: whether a space that is not in the line was inserted at `start` to separate two words.
    """

    opening: str
    start: int
    closing: str | None = None
    end: int = 0
    children: list["_Item"] = field(default_factory=list)
    name: str = ""
    begin: int = 0
    space_before: bool = False
    space_after: bool = False
    replaces_space: bool = False


@dataclass(frozen=True)
class MarkedLine:
    """A line without its markup, and the markup that was removed."""

    text: str
    items: tuple[_Item, ...]
    # The spellings of characters in the translation, and whether other text must not look like markup.
    spellings: Mapping[str, str]
    escaped: bool
    # The text with a capital after each point between spaces, which may begin a sentence: "A. {0} b."
    spoken: str

    def find_sentences(self, language: str) -> tuple[int, ...] | None:
        """Return the start of each sentence; None if the markup does not affect where sentences begin."""
        if self.spoken == self.text:
            return None
        sentences = split_sentences(self.spoken, language=language)
        return tuple(itertools.accumulate(map(len, sentences[:-1]), initial=0))


class _Word:
    """The character positions of a word of a text, with and without the punctuation marks around it."""

    def __init__(self, match: re.Match[str]) -> None:
        self.start, self.end = match.span()
        core = _CORE.search(match[0])
        self.core_start = self.start + (core.start() if core else 0)
        self.core_end = self.start + (core.end() if core else len(match[0]))


def unescape(text: str) -> str:
    """Replace the entities in a text by characters; names without ";", such as "&copy", stay unchanged."""
    return _ENTITY.sub(lambda match: _read_entity(match[0]), text)


def _read_entity(entity: str) -> str:
    """Return the character of an entity; if no entity has this name, return it unchanged."""
    known = entity[1] == "#" or entity[1:] in html.entities.html5
    return html.unescape(entity) if known else entity


def _find_spellings(texts: Sequence[str]) -> dict[str, str]:
    """Return the entity for each character that is to be written as one.

    A character qualifies if the texts write it only as an entity; &, < and > also qualify if they occur in
    both ways or not at all.
    "5 &gt; 3 & &quot;" gives &gt; for >, &quot; for a quotation mark, and &lt; for <, which does not occur.
    """
    bare: set[str] = set()
    found: dict[str, str] = {}
    for text in texts:
        last = 0
        for match in _ENTITY.finditer(text):
            character = _read_entity(match[0])
            if character != match[0]:
                bare.update(text[last : match.start()])
                last = match.end()
                # Letters, digits and spaces are written so for one place: the whole text would be unreadable.
                plain = character.isascii() and (character.isalnum() or character.isspace())
                if len(character) == 1 and not plain:
                    found.setdefault(character, match[0])
        bare.update(text[last:])
    as_entities = {name: entity for name, entity in found.items() if name not in bare}
    escaped = {name: entity for name, entity in _ESCAPED.items() if name not in bare or name in found}
    return escaped | as_entities


def take_out(line: str, *, in_document: bool = False) -> MarkedLine:
    """Remove a line's markup; the text is treated as escaped if it has entities or `in_document` is true."""
    escaped = in_document or unescape(line) != line
    root = _Item("", 0, "")
    open_items, text, last, every = [root], "", 0, list[_Item]()
    texts, link_end = [], -1
    for match in _ITEM.finditer(line):
        texts.append(line[last : match.start()])
        text += unescape(texts[-1])
        last = match.end()
        name, end = (match["name"] or "").lower(), len(text)
        element = _NUMBER.sub("", name)
        beside_link = element == "a" and not match["close"] and link_end == match.start()
        following = line[last : last + 1]
        if element in _BLOCKS or beside_link:
            text += " " if text[-1:].strip() and following.strip() else ""  # between two words
        if match["close"] and name in [item.name for item in open_items]:
            while open_items[-1].name != name:
                _make_point(open_items)
            closed = open_items.pop()
            closed.closing, closed.end = match[0], end
            link_end = last if element == "a" else -1
            if _holds_no_word(closed, text, is_note=element == "sup" and not following.isalnum()):
                closed.opening, closed.closing, closed.children = line[closed.begin : last], None, []
                text, last = _take_space(closed, text[: closed.start], line, last, open_items[-1])
            continue
        separated = beside_link and len(text) > end
        item = _Item(match[0], len(text), name=name, begin=match.start(), replaces_space=separated)
        open_items[-1].children.append(item)
        every.append(item)
        single = match["close"] or match["empty"] or name in VOID or len(open_items) > _DEEPEST
        if name and not single:
            open_items.append(item)
        else:
            text, last = _take_space(item, text, line, last, open_items[-1])
    while len(open_items) > 1:
        _make_point(open_items)
    texts.append(line[last:])
    text += unescape(texts[-1])
    # A tag may be around one of two words with a no-break space between them.
    text = _ODD_SPACE.sub(" ", text) if root.children else text
    spellings, spoken = _find_spellings(texts) if escaped else {}, _speak(text, every)
    return MarkedLine(text, tuple(root.children), spellings, escaped, spoken)


def _holds_no_word(element: _Item, text: str, *, is_note: bool) -> bool:
    """Return whether an element is put back as a point: without text, or a footnote mark after a word."""
    content = text[element.start :].strip()
    is_mark = is_note and not any(map(str.isalpha, content))
    return not content or (is_mark and text[max(0, element.start - 1) : element.start].strip() != "")


def _speak(text: str, items: Sequence[_Item]) -> str:
    """Return the text with a capital after each point between spaces; see `MarkedLine.spoken`."""
    if text.islower():
        return text
    spoken = [*text]
    for place in [one.start + one.space_before for one in items if one.space_before or one.space_after]:
        spoken[place : place + 1] = text[place : place + 1].upper()[:1]
    return "".join(spoken)


def peel(marked: MarkedLine) -> tuple[str, MarkedLine, str]:
    """Remove the elements that enclose a whole line and so need no alignment.

    Returns opening tags, line and closing tags: "<p><b>a</b></p>" gives `<p><b>`, a and `</b></p>`.
    """
    before = after = ""
    text = marked.text
    while len(marked.items) == 1 and text == text.strip():
        (item,) = marked.items
        if item.closing is None or (item.start, item.end) != (0, len(text)):
            break
        before, after = before + item.opening, item.closing + after
        marked = replace(marked, items=tuple(item.children))
    return before, marked, after


def _make_point(open_items: list[_Item]) -> None:
    """Turn the last open element, which has no closing tag, into a point; its children move to its parent."""
    item = open_items.pop()
    open_items[-1].children += item.children
    item.children = []


def _take_space(item: _Item, text: str, line: str, last: int, around: _Item) -> tuple[str, int]:
    """Remove one white space next to a point, so that a single space separates the words around it.

    around: the element that contains the point; white space before this element stays.
    """
    following = _CLOSING_TAGS.match(line, last).end()  # type: ignore[union-attr]
    before, after = text[max(around.start, len(text) - 1) :], line[following : following + 1]
    # In "{0}.txt", as in "{0} a", no mark ends a word.
    goes_on = after.isalnum() or after in "<{%$#" or line[following + 1 : following + 2].isalnum()
    start = last - len(item.opening)
    between = start > 0 and not line[start - 1].isspace() and after and not after.isspace()
    if item.name in _BLOCKS and before == " " and between:
        item.replaces_space = True  # of `take_out`
    elif before.isspace() and (not after or after.isspace() or not goes_on):
        first = item  # of points without a space between them: "a {0}{1} b"
        for one in reversed(around.children):
            if one.closing is not None or one.start != len(text) or one.replaces_space:
                break
            first, one.start = one, one.start - 1
        first.space_before, text = True, text[:-1]
    elif not before and after.isspace():
        item.space_after, last = True, last + 1
    return text, last


def put_back(marked: MarkedLine, text: str, alignment: Alignment, starts: Sequence[int] = ()) -> str:
    """Put the markup of a line into its translation, according to the word alignment.

    `starts`: where the translation of each separately translated sentence starts in `text`.
    """
    if not marked.items:
        return _spell(marked, text)
    return _Layout(marked, text, alignment, starts).write()


def _spell(marked: MarkedLine, text: str) -> str:
    """Escape text of a translation as the line does; an unescaped character must not turn into markup."""
    if not marked.escaped:
        return text
    entities = {match.start() for match in _ENTITY.finditer(text) if unescape(match[0]) != match[0]}
    markup = entities | {match.start() for match in TAG_START.finditer(text)}
    spellings = marked.spellings
    return "".join(
        spellings.get(character, _ESCAPED[character] if place in markup else character)
        for place, character in enumerate(text)
    )


class _Layout:
    """Places all items of a line in its translation."""

    def __init__(self, marked: MarkedLine, text: str, alignment: Alignment, starts: Sequence[int]) -> None:
        self.marked, self.text = marked, text
        self.source = [_Word(match) for match in WORD.finditer(marked.text)]
        self.target = [_Word(match) for match in WORD.finditer(text)]
        self.links: list[set[int]] = [set() for _ in self.source]
        for i, j in alignment:
            if i < len(self.source) and j < len(self.target):
                self.links[i].add(j)
        # The first and the last target word of each source word that has any.
        self.ends = {number: (min(own), max(own)) for number, own in enumerate(self.links) if own}
        self.linked = list(self.ends)
        places = [word.start for word in self.target]
        self.sentences = [bisect.bisect_left(places, start) for start in starts]
        # Cache of `_find`: the target words of an item, and how many of them its elements need.
        self.found: dict[int, tuple[int, int, int]] = {}
        self.depth = 0
        self.parts: list[str] = []
        self.cursor = 0

    def write(self) -> str:
        self._write_items(self.marked.items, 0, len(self.target))
        self._copy(len(self.text))
        return "".join(self.parts)

    def _copy(self, end: int) -> None:
        """Copy the text up to a position, unless it has already been copied."""
        if end > self.cursor:
            piece = self.text[self.cursor : end]
            self.parts.append(_spell(self.marked, piece))
            self.cursor = end

    def _write_items(self, items: Sequence[_Item], low: int, high: int) -> None:
        """Write items within words [low, high) in the order of their places, without overlap.

        Each element that had a word gets at least one; an element without a word goes inside the preceding
        one.
        """
        found = [self._find(item) for item in items]
        moved = _move_out(found)
        # At one place, points come before the element that begins there.
        ordered = sorted(
            (start, True, number, end) if end > start else (moved[start], False, number, moved[start])
            for number, (start, end, _) in enumerate(found)
        )
        needed = sum(least for *_, least in found)
        spans: list[tuple[_Item, int, int, list[_Item]]] = []
        first_free, inside = low, None
        for start, _, number, end in ordered:
            item, least = items[number], found[number][2]
            needed -= least  # by those that follow
            stop = min(high, max(high - needed, first_free + least))
            start = max(first_free, min(start, stop - least))
            first_free = end = min(max(end, start + least), stop)
            if start == end and inside is not None and self._words_inside(item) and self.depth < _SHARED:
                inside.append(item)
                continue
            spans.append((item, start, end, list(item.children)))
            inside = spans[-1][-1] if end > start else inside
        self.depth += 1
        for item, start, end, children in spans:
            if item.closing is None:
                self._write_point(item, start)
            else:
                self._write_element(item, start, end, children)
        self.depth -= 1

    def _write_element(self, item: _Item, start: int, end: int, children: Sequence[_Item]) -> None:
        words = self._words_inside(item)
        opens, closes = self._gap(start), self._gap(end)
        if end > start:
            first, last = self.target[start], self.target[end - 1]
            opens = first.start if self._has_marks(item, words, before=True) else first.core_start
            closes = last.end if self._has_marks(item, words, before=False) else last.core_end
        inner = self.marked.text[item.start : item.end]
        if start == end and not words and inner.strip():
            opens, closes = self._find_marks(item, start)
        before = self.marked.text[max(0, item.start - 1) : item.start]
        after = self.marked.text[item.end : item.end + 1]
        lead = inner[:1].isspace() and bool(inner.strip())
        trail = inner[-1:].isspace() and bool(inner.strip())
        if lead and before and not before.isspace():  # the space stays inside
            opens = self.target[start - 1].end if 0 < start else opens
        if item.replaces_space and self.text[self.cursor : opens].isspace():
            self.cursor = opens
        self._copy(opens)
        self.parts.append(item.opening + (" " if lead and (not before or before.isspace()) else ""))
        self._write_items(children, start, end)
        if trail and after and not after.isspace() and end < len(self.target):
            closes = self.target[end].start
        self._copy(closes)
        self.parts.append((" " if trail and (not after or after.isspace()) else "") + (item.closing or ""))

    def _write_point(self, item: _Item, gap: int) -> None:
        number = self._word_before(item)
        previous, links = (None, set()) if number is None else (self.source[number], self.links[number])
        place, opening = self._gap(gap), item.opening
        if item.replaces_space and 0 < gap < len(self.target):
            self._copy(self.target[gap - 1].end)
            self.parts.append(opening)
            self.cursor = max(self.cursor, place)
            return
        if item.space_before and gap > 0:
            opening = f" {opening}"
            place = self._find_inside(item, previous, self.target[gap - 1])
        elif item.space_before or item.space_after:
            opening = f"{opening} " if self.target else opening
        elif previous and previous.end >= item.start > 0 and gap > 0:
            if gap - 1 in links or gap == self._find_boundary(item):
                place = self._find_inside(item, previous, self.target[gap - 1])
        self._copy(place)
        self.parts.append(opening)

    def _find_inside(self, item: _Item, source: _Word | None, target: _Word) -> int:
        """Return the place in a target word of a point that is inside a source word, or directly after it."""
        if source is None:
            return target.core_end
        if self.marked.text[source.start : source.end] == self.text[target.start : target.end]:
            return target.start + min(item.start, source.end) - source.start
        if item.start <= source.core_start:
            return target.core_start
        # In "word {0}, more" the marks of the word come after the placeholder.
        before_marks = item.start <= source.core_end and (item.space_before or item.start < source.end)
        return target.core_end if before_marks else target.end

    def _find_marks(self, item: _Item, gap: int) -> tuple[int, int]:
        """Return the place of the punctuation at a gap, for an element that contains only punctuation."""
        number = self._word_before(item)
        if gap and number is not None and item.start < self.source[number].end:
            return self.target[gap - 1].core_end, self.target[gap - 1].end
        return self._gap(gap), self.target[gap].core_start if gap < len(self.target) else self._gap(gap)

    def _gap(self, gap: int) -> int:
        """Return the position of the gap before a target word; the last gap is after the last word."""
        if gap < len(self.target):
            return self.target[gap].start
        return self.target[-1].end if self.target else 0

    def _words_inside(self, item: _Item) -> range:
        """Return the source words of an element, including partial words but not lone punctuation marks."""
        if item.closing is None:
            return range(0)
        first = bisect.bisect_right(self.source, item.start, key=lambda word: word.core_end)
        return range(first, bisect.bisect_left(self.source, item.end, key=lambda word: word.core_start))

    def _has_marks(self, item: _Item, words: Sequence[int], *, before: bool) -> bool:
        """Return whether punctuation before the first or after the last word belongs inside an element.

        It does if the element contains such punctuation in the line, or contains all words of the line.
        """
        if not words:
            return False
        word = self.source[words[0] if before else words[-1]]
        inside = item.start <= word.start if before else item.end >= word.end
        marks = word.start < word.core_start if before else word.core_end < word.end
        return inside and (marks or len(words) == len(self.source))

    def _word_before(self, item: _Item) -> int | None:
        """Return the last source word that begins before a point."""
        count = bisect.bisect_left(self.source, item.start, key=lambda word: word.start)
        return count - 1 if count else None

    def _find(self, item: _Item) -> tuple[int, int, int]:
        """Return the target words [start, end) of an item, and the number of words that its elements need.

        For a point, start and end are both the word after the point.
        """
        if id(item) in self.found:
            return self.found[id(item)]
        words = self._words_inside(item)
        inside_word = item.start and self.marked.text[item.start - 1 : item.start + 1].isalnum()
        children = [self._find(child) for child in item.children]
        least = max(int(len(words) > 0 and not inside_word), sum(needed for _, _, needed in children))
        spans = [(start, end) for start, end, _ in children if end > start]
        linked = set[int]().union(*(self.links[number] for number in words))
        if linked and len(words) == len(self.source):
            spans.append((0, len(self.target)))
        elif linked:
            spans.append(_best_run(linked, words, len(self.source), len(self.target)))
        else:
            gap = self._find_gap(item)
            spans = spans or [(gap, gap)]
        start, end = min(start for start, _ in spans), max(end for _, end in spans)
        self.found[id(item)] = start, end, least
        return start, end, least

    def _find_gap(self, item: _Item) -> int:
        """Return the gap between target words that a point goes to.

        It is next to the word that the point touches; else before the next or after the last aligned word.
        """
        before = self._word_before(item)
        following = 0 if before is None else before + 1
        to_left = before is not None and (item.space_before or self.source[before].end >= item.start > 0)
        boundary = self._find_boundary(item)
        if boundary is not None and (to_left or item.replaces_space):
            return boundary
        if to_left and not item.replaces_space and before in self.ends:
            return self.ends[before][1] + 1
        place = bisect.bisect_left(self.linked, following)
        if place < len(self.linked):
            return self.ends[self.linked[place]][0]
        if place:
            return self.ends[self.linked[place - 1]][1] + 1
        return len(self.target) if following else 0

    def _find_boundary(self, item: _Item) -> int | None:
        """Return the first target word of the next sentence if a point is between two sentences.

        Sentences are translated separately, so words are aligned only within their sentence.
        """
        before = self._word_before(item)
        if before not in self.ends or before + 1 not in self.ends or item.start < self.source[before].end:
            return None
        place = bisect.bisect_right(self.sentences, self.ends[before][1])
        start = self.sentences[place] if place < len(self.sentences) else len(self.target)
        return start if start <= self.ends[before + 1][0] else None


def _move_out(found: Sequence[tuple[int, int, int]]) -> dict[int, int]:
    """Map the gap of each point to one outside all elements: a point inside one moves to the nearer edge."""
    gaps = sorted({start for start, end, _ in found if start == end})
    edges = gaps.copy()
    for first, stop in [(start, end) for start, end, _ in found if end > start] if gaps else ():
        low, high = bisect.bisect_right(edges, first), bisect.bisect_left(edges, stop)
        middle = bisect.bisect_right(edges, (first + stop) / 2, low, max(low, high))
        edges[low:high] = [first] * (middle - low) + [stop] * (high - middle)
    return dict(zip(gaps, edges, strict=True))


def _best_run(linked: set[int], words: range, sources: int, targets: int) -> tuple[int, int]:
    """Return the target words [start, end) that contain the most linked words minus unlinked words.

    Of equally good runs, several source words take the longest; a single source word takes the run nearest to
    its relative position in the sentence.
    """
    expected = (sum(words) / len(words) + 0.5) / sources * targets
    runs, least, starts = [], math.inf, list[int]()
    for number, last in enumerate(sorted(linked)):
        # Of all runs that end here, those are best before whose start linked words were the least ahead.
        ahead = 2 * number - last
        if ahead < least:
            least, starts = ahead, []
        if ahead == least:
            starts.append(last)
        place = bisect.bisect_left(starts, 2 * expected - last - 1) if len(words) == 1 else 0
        runs += [(least - ahead, start, last + 1) for start in starts[max(0, place - 1) : place + 1]]

    def rank(run: tuple[float, int, int]) -> tuple[float, ...]:
        worse, start, end = run
        size, distance = end - start, abs((start + end) / 2 - expected)
        return worse, distance if len(words) == 1 else distance / 1000 - size, start, end

    return min(runs, key=rank)[1:]


class InlineMarkup(Step):
    """Removes the markup of lines, and puts it into their translations by means of word alignments."""

    def before(self, segments: list[Segment]) -> list[Segment]:
        for line in segments:
            if line.request.annotations.markup:
                marked = line.memory[self] = take_out(line.text)
                line.line = line.text = marked.text
                line.spoken = marked.spoken
                line.annotations = line.annotations._replace(
                    markup=False, for_markup=True, alignments="words"
                )
        return segments

    def after(self, segment: Segment, translation: Translation) -> Translation:
        keep = segment.request.annotations.alignments is not None
        return put_back_all(segment.memory[self], translation, keep_alignment=keep)


def put_back_all(marked: MarkedLine, translation: Translation, *, keep_alignment: bool) -> Translation:
    """Put the markup of a line into its translation and into the alternatives."""
    return replace(
        translation,
        text=put_back(marked, translation.text, translation.alignment or (), translation.sentence_starts),
        alignment=translation.alignment if keep_alignment else None,
        alternatives=tuple(
            put_back_all(marked, other, keep_alignment=keep_alignment) for other in translation.alternatives
        ),
    )
