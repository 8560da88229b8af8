"""The fields of a request: from the body of a POST, as JSON or as a form, to typed values, or to a refusal.

The names are those of LibreTranslate's API, and a few more.
"""

import json
import re
import urllib.parse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from flaxformer_mt.errors import UserError, first_line
from flaxformer_mt.translation.glossary import Glossary

Model = TypeVar("Model")
# ISO 639-1 code -> English name.
_NAMES = dict(
    pair.split("=")
    for pair in """
    af=Afrikaans am=Amharic ar=Arabic az=Azerbaijani be=Belarusian bg=Bulgarian bn=Bengali bs=Bosnian
    ca=Catalan cs=Czech cy=Welsh da=Danish de=German el=Greek en=English eo=Esperanto es=Spanish
    et=Estonian eu=Basque fa=Persian fi=Finnish fr=French ga=Irish gl=Galician gu=Gujarati ha=Hausa
    he=Hebrew hi=Hindi hr=Croatian hu=Hungarian hy=Armenian id=Indonesian ig=Igbo is=Icelandic it=Italian
    ja=Japanese ka=Georgian kk=Kazakh km=Khmer kn=Kannada ko=Korean ky=Kyrgyz la=Latin lb=Luxembourgish
    lo=Lao lt=Lithuanian lv=Latvian mg=Malagasy mk=Macedonian ml=Malayalam mn=Mongolian mr=Marathi
    ms=Malay mt=Maltese my=Burmese nb=Norwegian ne=Nepali nl=Dutch nn=Nynorsk no=Norwegian oc=Occitan
    pa=Punjabi pl=Polish ps=Pashto pt=Portuguese ro=Romanian ru=Russian rw=Kinyarwanda si=Sinhala
    sk=Slovak sl=Slovenian so=Somali sq=Albanian sr=Serbian sv=Swedish sw=Swahili ta=Tamil te=Telugu
    tg=Tajik th=Thai tl=Tagalog tr=Turkish uk=Ukrainian ur=Urdu uz=Uzbek vi=Vietnamese xh=Xhosa
    yi=Yiddish yo=Yoruba zh=Chinese zu=Zulu
    """.split()
)
# A source language that the server is to find itself.
AUTO = "auto"
# Of the header of a part of a form, a parameter; quotation marks in names are sent as %22.
_PARAMETER = rb'\ncontent-disposition:[^\n]*?;[ \t]*%b="?([^";\r\n]*)'
# Source and target language of a model.
Pair = tuple[str, str]


class Refusal(Exception):
    """A request that is answered with an error: a status of HTTP, and a message for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class UploadedFile(NamedTuple):
    name: str
    text: str


_TEXT: dict[str, Any] = {"type": "string"}
_COUNT: dict[str, Any] = {"type": "integer"}
_SWITCH: dict[str, Any] = {"type": "boolean", "default": False}

# JSON schemas of the fields that say how texts are translated; all may be left out.
OPTIONS: dict[str, dict[str, Any]] = {
    "format": dict(_TEXT, enum=["text", "html"], default="text", description="What the text is."),
    "alternatives": dict(_COUNT, minimum=0, default=0, description="Number of further translations."),
    "n_best": dict(_COUNT, minimum=1, description="Number of hypotheses of each line to describe."),
    "scores": dict(_SWITCH, description="Describe the score and the log-probability of each hypothesis."),
    "alignments": dict(_TEXT, enum=["words", "pieces"], description="Describe which words belong together."),
    "attention": dict(_SWITCH, description="Describe the attention weights of each hypothesis."),
    "documents": {
        "type": "boolean",
        "description": "Whether lines are read with the lines before them in the text, up to a blank one. "
        "By default, models that were trained with data.context do so.",
    },
    "glossary": dict(
        _TEXT, description="Terms, one per line: source term, tab, target term. In a form, it may be a file."
    ),
}
_TEXTS = "The text, or a list of texts. Each line has a translation."
_FILE = "A text (.txt) or a document (.html, .htm) in UTF-8."
# JSON schemas of all fields.
FIELDS: dict[str, dict[str, Any]] = OPTIONS | {
    "q": {"oneOf": [_TEXT, {"type": "array", "items": _TEXT}], "description": _TEXTS},
    "source": dict(_TEXT, description="Code of the language of the text, or auto."),
    "target": dict(_TEXT, description="Code of the language to translate into."),
    "file": dict(_TEXT, format="binary", description=_FILE),
    "api_key": dict(_TEXT, description="The key, where the server needs one."),
}


@dataclass(frozen=True)
class TextRequest:
    texts: tuple[str, ...]
    # Whether `q` was a list, so that the answer is a list too.
    several: bool
    source: str
    target: str
    format: Literal["text", "html"]
    alternatives: int
    # None: no hypotheses are described, unless one of the following fields asks for them.
    n_best: int | None
    scores: bool
    alignments: Literal["words", "pieces"] | None
    attention: bool
    # None: by the models that can.
    documents: bool | None = None
    glossary: Glossary | None = None

    @property
    def describes(self) -> bool:
        """Whether the answer has the field `hypotheses`."""
        return self.n_best is not None or self.scores or self.attention or self.alignments is not None


def read_fields(body: bytes, content_type: str, query: str = "") -> dict[str, Any]:
    """Return the fields of JSON, or of a form and the query of the address, as LibreTranslate does."""
    kind, _, more = (part.strip().lower() for part in content_type.partition(";"))
    pairs: Sequence[tuple[str, object]] = ()
    try:
        if kind == "application/json":
            fields = json.loads(body.decode("utf-8-sig"))  # RFC 8259 allows to ignore a byte order mark
            if not isinstance(fields, dict):
                raise Refusal(400, 'the body is not a JSON object, such as {"q": "..."}')
            return fields
        if kind == "application/x-www-form-urlencoded":
            pairs = urllib.parse.parse_qsl(
                body.decode("utf-8"), keep_blank_values=True, errors="strict", max_num_fields=10_000
            )
        elif kind == "multipart/form-data":
            pairs = _read_parts(body, content_type)
        elif body or not query:
            known = "application/json, application/x-www-form-urlencoded or multipart/form-data"
            raise Refusal(400, f"the content type is {kind or 'missing'}; send {known}")
    except (ValueError, RecursionError) as error:
        told = f" in UTF-8, but with {more:.40}" if "charset=" in more else ""
        raise Refusal(400, f"the body is not {kind}{told}: {first_line(error)}") from error
    return _collect(pairs) | _collect(urllib.parse.parse_qsl(query, keep_blank_values=True))


def _collect(pairs: Sequence[tuple[str, object]]) -> dict[str, Any]:
    values: dict[str, list[object]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    return {name: items[0] if len(items) == 1 else items for name, items in values.items()}


def _read_parts(body: bytes, content_type: str) -> list[tuple[str, object]]:
    """Read a form as browsers send it (RFC 7578), in linear time; the library's reader of mails is cubic."""
    boundary = re.search(r';\s*boundary="?([^";]{1,70})', content_type, re.IGNORECASE)
    if boundary is None:
        raise ValueError("its content type has no boundary")
    pairs: list[tuple[str, object]] = []
    for part in re.split(rb"(?:\A|\r?\n)--" + re.escape(boundary[1].strip().encode("latin-1")), body)[1:]:
        if part.startswith(b"--"):
            return pairs
        head, *content = re.split(rb"\r?\n\r?\n", part, maxsplit=1)
        names = [re.search(_PARAMETER % kind, head, re.IGNORECASE) for kind in (b"name", b"filename[*]?")]
        if names[0] is None or not content:
            raise ValueError("a part has no name")
        name, file_name = (found and found[1].decode("utf-8", "replace") for found in names)
        try:
            text = content[0].decode("utf-8-sig")
        except UnicodeDecodeError as error:
            what = "the field" if file_name is None else f"the file {file_name!r} of the field"
            raise Refusal(400, f"{what} {name} is not UTF-8 text: {first_line(error)}") from error
        pairs.append((str(name), text if file_name is None else UploadedFile(file_name, text)))
    raise ValueError("it does not end in its boundary")


def read_request(fields: dict[str, Any], most_characters: int) -> TextRequest:
    glossary = _read_option(fields, "glossary")
    texts, several = read_texts(fields, most_characters, glossary or "")
    if (fields.get("format"), fields.get("alignments")) == ("html", "pieces"):
        raise Refusal(400, "the field alignments is pieces; with format html it must be words")
    source, target = _read_language(fields, "source"), _read_language(fields, "target")
    options: dict[str, Any] = {name: _read_option(fields, name) for name in OPTIONS}
    options["glossary"] = _read_glossary(glossary)
    return TextRequest(texts, several, source, target, **options)


def _read_glossary(text: str | None) -> Glossary | None:
    try:
        return None if text is None else Glossary.read(text.split("\n"), "the field glossary")
    except UserError as error:
        raise Refusal(400, str(error)) from error


def read_file(fields: dict[str, Any]) -> UploadedFile:
    file = fields.get("file")
    if not isinstance(file, UploadedFile):
        raise Refusal(400, "the field file is missing: a file, sent as multipart/form-data")
    return file


def read_texts(fields: dict[str, Any], most: int, glossary: str = "") -> tuple[tuple[str, ...], bool]:
    if "q" not in fields:
        raise Refusal(400, "the field q is missing: the text to translate")
    several = isinstance(fields["q"], list)
    texts = fields["q"] if several else [fields["q"]]
    for text in texts:
        if not isinstance(text, str):
            raise Refusal(400, f"the field q has {_name_type(text)} where it needs a string")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise Refusal(400, "the field q is not valid Unicode: it has half of a surrogate pair")
    total = sum(map(len, (*texts, glossary)))
    if max(total, len(texts)) > most:
        what = f"{len(texts)} texts{' and the glossary' if glossary else ''}"
        raise Refusal(413, f"q has {total} characters in {what}; this server takes {most}")
    return tuple(texts), several


def _name_type(value: object) -> str:
    names = {bool: "true or false", dict: "an object", list: "a list", type(None): "null"}
    names |= {UploadedFile: "a file"}
    return names.get(type(value), "a number")


def _read_language(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        what = "missing" if value is None or value == "" else _name_type(value)
        raise Refusal(
            400, f"the field {name} is {what}; give the code of a language, as GET /languages lists them"
        )
    return value


def _read_option(fields: dict[str, Any], name: str) -> Any:
    schema, value = OPTIONS[name], fields.get(name)
    if value is None or value == "" or (value is False and name != "documents"):
        return schema.get("default")
    match schema:
        case {"type": "string", **more} if "enum" not in more:
            if isinstance(value, str | UploadedFile):
                return value if isinstance(value, str) else value.text
            rule = "text"
        case {"enum": choices}:
            if value in choices:
                return value
            rule = " or ".join(choices)
        case {"type": "integer", "minimum": least}:
            if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 7:
                value = int(value)
            if isinstance(value, int) and not isinstance(value, bool) and value >= least:
                return value
            rule = f"a whole number from {least}"
        case _:
            switches = {"true": True, "1": True, "false": False, "0": False}
            if (text := str(value).lower()) in switches:
                return switches[text]
            rule = "true or false"
    raise Refusal(400, f"the field {name} is {value!r:.40}; it must be {rule}")


def name_language(code: str) -> str:
    """Return the English name of a language; of an unknown code, the code: de gives German, xx gives xx."""
    return _NAMES.get(code.replace("_", "-").partition("-")[0].lower(), code)


def list_languages(pairs: Collection[Pair]) -> list[dict[str, object]]:
    """Return all languages, those that are only targets last."""
    targets: dict[str, list[str]] = {code: [] for side in zip(*pairs, strict=True) for code in side}
    for source, target in pairs:
        targets[source].append(target)
    return [{"code": code, "name": name_language(code), "targets": codes} for code, codes in targets.items()]


def _fold_code(code: str) -> str:
    """Return one form of a code: clients also write EN, zh-hans or pt_BR."""
    return code.replace("_", "-").lower()


def find_models(models: Mapping[Pair, Model], source: str, target: str) -> dict[str, Model]:
    """Return the models that may translate a request, by their source language: one, unless it is AUTO."""
    offered = {code: model for (code, to), model in models.items() if _fold_code(to) == _fold_code(target)}
    matches = {code: one for code, one in offered.items() if _fold_code(source) in (_fold_code(code), AUTO)}
    if not matches:
        known = ", ".join(f"{first}-{second}" for first, second in models)
        raise Refusal(
            400, f"no model translates from {source!r:.20} to {target!r:.20}; this server has {known}"
        )
    return matches
