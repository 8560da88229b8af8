"""The fields of a request: from the body of a POST, as JSON or as a form, to typed values, or to a refusal.

Pure functions of bytes and dicts. The names are those of LibreTranslate's API, and a few more.
"""

import email.parser
import email.policy
import json
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class Refusal(Exception):
    """A request that is answered with an error: a status of HTTP, and a message for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class UploadedFile(NamedTuple):
    """A file among the fields of a form."""

    name: str
    text: str


@dataclass(frozen=True)
class Limits:
    """What a request may ask for, and what all requests together may; more is refused."""

    # Characters of all texts of a request.
    characters: int = 10_000
    # Lines that are not answered yet, of all requests together.
    waiting: int = 1000
    # Seconds from the arrival of a request to its answer.
    seconds: float = 60.0

    @property
    def body_bytes(self) -> int:
        """Bytes of the body: a character takes at most 12 as an escape, and the other fields take little."""
        return 12 * self.characters + 65_536


@dataclass(frozen=True)
class TextRequest:
    """The fields of a request for translations."""

    texts: tuple[str, ...]
    # Whether `q` was a list, so that the answer is a list too.
    several: bool
    source: str
    target: str
    format: Literal["text", "html"] = "text"
    # Number of further translations.
    alternatives: int = 0
    # Number of hypotheses to describe; None: none, unless one of the following fields asks for them.
    n_best: int | None = None
    scores: bool = False
    alignments: Literal["words", "pieces"] | None = None
    attention: bool = False

    @property
    def describes(self) -> bool:
        """Whether the answer has the field `hypotheses`."""
        return self.n_best is not None or self.scores or self.attention or self.alignments is not None


def read_fields(body: bytes, content_type: str) -> dict[str, Any]:
    """Return the fields of a body.

    Raises:
      Refusal: the body is not what the content type says, or the type is none of the three that are known.
    """
    kind = content_type.partition(";")[0].strip().lower()
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
            return _collect(pairs)
        if kind == "multipart/form-data":
            return _collect(_read_parts(body, content_type))
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not {kind}: {_first_line(error)}") from error
    raise Refusal(
        400,
        f"the content type is {kind or 'missing'}; send application/json, application/x-www-form-urlencoded "
        "or multipart/form-data",
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


def _collect(pairs: Sequence[tuple[str, object]]) -> dict[str, Any]:
    """Return the fields of a form; a field that occurs several times is a list."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            before = fields[name]
            fields[name] = [*before, value] if isinstance(before, list) else [before, value]
        else:
            fields[name] = value
    return fields


def _read_parts(body: bytes, content_type: str) -> list[tuple[str, object]]:
    header = f"Content-Type: {content_type}\r\n\r\n".encode("latin-1", errors="replace")
    message = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(header + body)
    if not message.is_multipart():
        raise ValueError("it has no parts between boundaries")
    pairs: list[tuple[str, object]] = []
    for part in message.iter_parts():
        name = part.get_param("name", header="content-disposition")
        content = part.get_payload(decode=True)
        if not isinstance(name, str) or not isinstance(content, bytes):
            raise ValueError("a part has no name")
        file_name = part.get_filename()
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            what = "the field" if file_name is None else f"the file {file_name!r} of the field"
            raise Refusal(400, f"{what} {name} is not UTF-8 text: {_first_line(error)}") from error
        pairs.append((name, text if file_name is None else UploadedFile(file_name, text)))
    return pairs


def read_request(fields: dict[str, Any], limits: Limits) -> TextRequest:
    """Return the typed fields of a request for translations.

    Raises:
      Refusal: a field is missing, has the wrong type or an unknown value, or the texts are too long.
    """
    texts, several = read_texts(fields, limits)
    n_best = fields.get("n_best")
    if (fields.get("format"), fields.get("alignments")) == ("html", "pieces"):
        raise Refusal(400, "the field alignments is pieces; with format html it must be words")
    return TextRequest(
        texts=texts,
        several=several,
        source=_read_language(fields, "source"),
        target=_read_language(fields, "target"),
        format=_read_choice(fields, "format", ("text", "html")) or "text",
        alternatives=_read_count(fields, "alternatives", 0),
        n_best=None if n_best is None else _read_count(fields, "n_best", 1),
        scores=_read_switch(fields, "scores"),
        alignments=_read_choice(fields, "alignments", ("words", "pieces")),
        attention=_read_switch(fields, "attention"),
    )


def read_file(fields: dict[str, Any]) -> UploadedFile:
    """Return the file of the field file.

    Raises:
      Refusal: there is none.
    """
    file = fields.get("file")
    if not isinstance(file, UploadedFile):
        raise Refusal(400, "the field file is missing: a file, sent as multipart/form-data")
    return file


def read_texts(fields: dict[str, Any], limits: Limits) -> tuple[tuple[str, ...], bool]:
    """Return the texts of the field q, and whether it is a list.

    Raises:
      Refusal: the field is missing or no text, or the texts are too long.
    """
    if "q" not in fields:
        raise Refusal(400, "the field q is missing: the text to translate")
    several = isinstance(fields["q"], list)
    texts = fields["q"] if several else [fields["q"]]
    for text in texts:
        if not isinstance(text, str):
            raise Refusal(400, f"the field q has {_name_type(text)} where it needs a string")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise Refusal(400, "the field q is not valid Unicode: it has half of a surrogate pair")
    total = sum(map(len, texts))
    if total > limits.characters or len(texts) > limits.characters:
        raise Refusal(
            413, f"q has {total} characters in {len(texts)} texts; this server takes {limits.characters}"
        )
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


def _read_choice(fields: dict[str, Any], name: str, choices: tuple[str, ...]) -> Any:
    value = fields.get(name)
    if value is None or value is False or value == "":
        return None
    if value not in choices:
        raise Refusal(400, f"the field {name} is {value!r:.40}; it must be {' or '.join(choices)}")
    return value


def _read_count(fields: dict[str, Any], name: str, least: int) -> int:
    value = fields.get(name, least)
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 7:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise Refusal(400, f"the field {name} is {value!r:.40}; it must be a whole number from {least}")
    return value


def _read_switch(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    switches = {"true": True, "1": True, "false": False, "0": False, "": False}
    if isinstance(value, str) and value.lower() in switches:
        return switches[value.lower()]
    if not isinstance(value, bool):
        raise Refusal(400, f"the field {name} is {value!r:.40}; it must be true or false")
    return value
