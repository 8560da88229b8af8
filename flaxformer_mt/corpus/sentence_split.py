"""Splits text into sentences by the rules of sentencex, which supports about 300 languages."""

import itertools
import re

import sentencex

# Marks that end a sentence if white space follows, and the quotes and brackets after them.
STOPS = ".!?\u2026\u203c\u2047\u2048\u2049\u037e\u061f\u06d4\u0964\u0965\u0589\u1362\u17d4\u104b"
CLOSING = "\"')\\]}\u2019\u201d\u201c\u00bb\u203a\u300d\u300f\u3011\u3015\u3009\u300b\uff09\uff3d\u00ab\u2039"

# Each pattern matches only from the first mark of a run and does not backtrack into it (++): a search for
# white space from every mark of a run would take quadratic time. A mark after white space closes a quotation,
# as in French, unless it opens one there. In Korean, a verb form may follow a quotation.
_STOP = re.compile(
    rf"(?<![{STOPS}])([{STOPS}]++)((?:\s{{,2}}[\xbb\u203a\u201d\u2019)\]](?=[{CLOSING}\s]|\Z)|[{CLOSING}])*+)"
    r"(?=\s|\Z)(?=\s{,9}+((?:[\u2013\u2014]\s{,9}+)?+)(이?라[고며는]|하[고며]|\S?))"
)
# Japanese particles after a quotation; in Chinese, the speaker (他說。).
_PARTICLE = (
    "と(?!ても|にかく|ころ|うとう|りあえず|もかく|たん|つぜん)|って|なん[てか]|など|の(?![ちで])|[をが、，]"
    "|[はにで](?=[一-鿿ァ-ヺ])"
)
_SPEAKER = r"[一-鿿]{,8}?[说說道问問喊叫答嚷吼][道着著了]?(?=[\s，。；！？…]|\Z)"
# A wide stop, the closing marks after it, and text that continues the sentence; also the digits of ３．１４.
_WIDE_STOP = re.compile(
    rf"(?<![。！？．｡])([。！？．｡]++)([」』）］】〕”’]*+)(?=(\s?(?:{_PARTICLE})|(?<=[」』”’]){_SPEAKER}|(?<=．)\d|))"
)
# No sentence ends inside a title, a parenthesis that follows a letter or has no final stop, or ASP.NET.
_INSIDE = re.compile(
    r"[《〈][^《〈》〉]{,99}[》〉]|(?<=\w)（[^（）]{,99}）|\([^()]{,99}[^()\s.!?…]\)|(?<=\w)\.(?=(?:[A-Z]{2,}|Com)\b)"
)
_OPENING = re.compile(r"[「『（【〔]|(?<![^\s。！？．｡])[\"'(\[{\u2018-\u201f\u00ab\u00bb\u2039\u203a]")
_QUOTES = re.compile(
    r"[\"()\[\]{}\u201c-\u201f\u00ab\u00bb\u2039\u203a\u3008-\u3011\u3014\u3015\uff08\uff09]"
)
_FIRST_LETTER = re.compile(r"(?<=[.!?\u2026]\s)[^\W\d_]")
_LIKE_ABBREVIATIONS = re.compile(r"\b(?:me|mich|mag|no|ill|art|may|miss|OK)\.(?=\s[^\W\d])")

# Languages whose ordinal numbers end in a full stop.
_ORDINAL_STOPS = frozenset("bs cs da de et fi fo hr hu is lb lv mk nb nn no pl sk sl sr tr".split())
_ORDINAL = re.compile(r"\b\d{1,2}\.\s*\Z")
_INITIAL = re.compile(r"\b([^\W\d_])\.\s*\Z")
_BEFORE_NUMBER = re.compile(r"((?:[!?\u2026]|(?<=[a-z\u00df-\u00ff]{5})\.)\s)\d")


def split_sentences(text: str, *, language: str = "") -> list[str]:
    """Split a text after each sentence and the white space that follows it.

    The concatenation of the sentences is the text. Quotations are split as well. A sentence contains a
    letter: "1. Er kam." is one sentence. An initial ends no sentence, nor does a number of one or two digits
    in languages whose ordinal numbers end in a full stop. `language` is a code such as de, de_AT or zh_Hant;
    an unknown code selects rules that most languages share.
    """
    code = re.split("[_-]", language.lower(), maxsplit=1)[0]
    ordinals = code in _ORDINAL_STOPS
    pieces = sentencex.segment(code, _simplify(text, numbers=ordinals))
    starts, end, ended = [0], 0, False
    for size in map(len, pieces):
        piece = text[end : end + size]
        if ended and any(map(str.isalnum, piece)):
            starts.append(end)
            ended = False
        end += size
        ended = ended or (any(map(str.isalpha, piece)) and _ends_sentence(piece, ordinals=ordinals))
    return [text[start:stop] for start, stop in itertools.pairwise([*starts, end]) if stop]


def _ends_sentence(text: str, *, ordinals: bool) -> bool:
    initial = _INITIAL.search(text)
    return not (initial and initial[1].isupper()) and not (ordinals and _ORDINAL.search(text))


def _simplify(text: str, *, numbers: bool) -> str:
    """Replace characters so that sentencex 1.0 finds more of the sentences; the length stays the same.

    sentencex panics at multi-byte white space, does not split quotations, takes some common words for
    abbreviations, and never starts a German sentence with a lower-case letter or (for `numbers`) a number.
    """

    def move_stops(match: re.Match[str]) -> str:
        stops, quotes, dash, following = match.groups()
        if (quotes or dash) and (following.islower() or len(following) > 1):  # "Stop!" he said.
            return "," * len(stops + quotes)
        return " " * len(quotes) + stops

    def move_wide_stops(match: re.Match[str]) -> str:
        stops, quotes, following = match.groups()
        return "，" * len(stops + quotes) if following else "，" * len(quotes) + stops

    def hide_stops(match: re.Match[str]) -> str:
        return re.sub("[.!?…。！？．｡]" if match[0][0] not in "《〈" else ".", "一", match[0])

    text = re.sub("[\ud800-\udfff]", "A", re.sub(r"\s", " ", text))  # lone surrogates are invalid
    if text.count('"') % 2 == 0:
        text = "".join(map("".join, zip(text.split('"'), itertools.cycle("“”"))))[:-1]
    text = _INSIDE.sub(hide_stops, text)
    text = _WIDE_STOP.sub(move_wide_stops, _STOP.sub(move_stops, text))
    text = _QUOTES.sub(",", _OPENING.sub("/", text))  # a slash separates words, and may begin a sentence
    if text.islower():  # otherwise, lower case after a stop continues the sentence
        text = _FIRST_LETTER.sub("A", text)
    text = _LIKE_ABBREVIATIONS.sub(lambda match: match[0][:-1] + "!", text)
    return _BEFORE_NUMBER.sub(lambda match: match[1].replace(".", "!") + "A", text) if numbers else text
