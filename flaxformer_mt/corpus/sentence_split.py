"""Sentences of a text: where each of them ends.

A function of the text alone: languages share the rules for marks, and the list of abbreviations.
"""

import re
from collections.abc import Callable

# Marks that end a sentence if white space follows; the wide marks of East Asian scripts need no white space.
_STOPS = ".!?\u2026\u203c\u2047\u2048\u2049\u037e\u061f\u06d4\u0964\u0965\u0589\u1362\u17d4\u104b"
_WIDE_STOPS = "\u3002\uff01\uff1f\uff0e\uff61"
# Closing quotes and brackets, which belong to the sentence before them.
CLOSING = "\"')\\]}\u2019\u201d\u201c\u00bb\u203a\u300d\u300f\u3011\u3015\u3009\u300b\uff09\uff3d\u00ab\u2039"


# Each pattern matches only from the first mark of a run and does not backtrack into it (++, *+): from every
# mark of a run, a search for the white space after it would take quadratic time.
SENTENCE_END = re.compile(
    rf"(?:(?<![{_STOPS}])[{_STOPS}]++[{CLOSING}]*+\s+"
    rf"|[{_WIDE_STOPS}][{_STOPS}{_WIDE_STOPS}]*+[{CLOSING}]*+\s*)"
)
_LAST_WORD = re.compile(r"[^\s(\[{\"'\u201e\u201c\u00ab\u00bf\u00a1-]*\Z")

# Abbreviations, in lower case, after whose full stop a sentence usually continues, even if the next word has
# a capital letter. "etc." and abbreviations that are also words are therefore absent.
_ABBREVIATIONS = frozenset(
    """
    mr mrs ms dr prof st sr jr gen col capt lt sgt rev hon gov sen rep pres vs nos fig figs vol pp eds cf al
    inc ltd corp dept approx e.g i.e u.s
    hr fr nr str bzw ca vgl evtl ggf inkl zzgl abb hrsg jh jhd mio mrd abs z.b d.h u.a o.ä s.o s.u i.d.r u.u
    dipl geb gest
    mme mlle av boul env chap p.ex c.-à-d n.b réf éd
    sra srta sres dña ud uds avda núm pág págs tel p.ej ee.uu
    dott sigg sig.ra pag pagg cfr
    dhr mevr bijv nl blz o.a d.w.z
    тыс млн млрд руб ул т.е т.н
    tzv např popř mj resp
    """.split()
)


def split_sentences(text: str) -> list[str]:
    """Splits a text after sentences and the white space that follows; the concatenation is the text.

    A sentence ends in a full stop, a question or exclamation mark or an ellipsis of any known script, and the
    closing quotes and brackets after it. East Asian marks always end a sentence. Other marks need white space
    after them, so that 3.14 and www.example.org stay whole, and no lower-case letter after the white space;
    and a full stop after a known abbreviation, an initial or a number of one or two digits ("Dr. Smith",
    "J. Smith", "am 3. Mai") is part of the sentence.
    """
    return split_after(text, SENTENCE_END, _ends_sentence)


def _ends_sentence(text: str, match: re.Match[str]) -> bool:
    if match.end() == len(text) or match[0][0] in _WIDE_STOPS:
        return True
    if text[match.end()].islower():
        return False
    mark = match[0].rstrip()
    if mark != ".":
        return True
    word = _LAST_WORD.search(text, max(0, match.start() - 30), match.start())
    word_text = word[0] if word else ""
    if word_text.isdigit():
        return len(word_text) > 2
    last = word_text.rpartition(".")[2]
    single_letter = len(last) == 1 and last.isalpha() and _is_alphabetic(last)
    return not (single_letter or word_text.casefold() in _ABBREVIATIONS)


def _is_alphabetic(letter: str) -> bool:
    """Returns whether a letter has a capital form; a single such letter is an initial or an abbreviation."""
    return letter.lower() != letter.upper()


def split_after(
    text: str, end: re.Pattern[str], accept: Callable[[str, re.Match[str]], bool] | None = None
) -> list[str]:
    """Splits a text after every match of `end` that `accept` accepts."""
    units, start = [], 0
    for match in end.finditer(text):
        if accept is None or accept(text, match):
            units.append(text[start : match.end()])
            start = match.end()
    return [*units, text[start:]] if start < len(text) else units
