"""The fields of a request: from the body of a POST, as JSON or as a form, to typed values, or to a refusal.

The names are those of LibreTranslate's API, and a few more.
"""

import io
import logging
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

import python_multipart
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    InstanceOf,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import from_json

from flaxformer_mt.errors import UserError, first_line
from flaxformer_mt.translation.glossary import Glossary

JSON, FORM, PARTS = "application/json", "application/x-www-form-urlencoded", "multipart/form-data"
_MOST_FIELDS = 10_000
# What is wrong with a form is in the answer.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


class Refusal(Exception):
    """A request that is answered with an error: a status of HTTP, and a message for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class UploadedFile(NamedTuple):
    name: str
    text: str


def _read_glossary(text: object) -> Glossary:
    if not isinstance(text, str):
        raise Refusal(400, f"the field glossary is {text!r:.40}; it must be text")
    try:
        return Glossary.read(text.split("\n"), "the field glossary")
    except UserError as error:
        raise Refusal(400, str(error)) from error


_Glossary = Annotated[
    InstanceOf[Glossary], BeforeValidator(_read_glossary), WithJsonSchema({"type": "string"})
]
_File = Annotated[InstanceOf[UploadedFile], WithJsonSchema({"type": "string", "format": "binary"})]


class Fields(BaseModel):
    """Fields that all requests have; those that are unknown have no effect."""

    api_key: str | None = Field(None, description="The key, where the server needs one.")

    @model_validator(mode="before")
    @classmethod
    def _leave_out_empty(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Forms have all their fields, and clients send null or false for what they do not ask for."""
        return {
            name: value
            for name, value in fields.items()
            if name == "q" or not (value is None or value == "" or (value is False and name != "documents"))
        }

    @classmethod
    def read(cls, fields: Mapping[str, Any], *, most_characters: int) -> Self:
        """Return the request that has these fields, or refuse it."""
        texts = fields["q"] if isinstance(fields.get("q"), list) else [fields.get("q")]
        glossary = fields.get("glossary")
        total = sum(len(text) for text in (*texts, glossary) if isinstance(text, str))
        if max(total, len(texts)) > most_characters:
            what = f"{len(texts)} texts{' and the glossary' if glossary else ''}"
            raise Refusal(413, f"q has {total} characters in {what}; this server takes {most_characters}")
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise Refusal(400, _explain(error, cls)) from error


class DetectionRequest(Fields):
    q: str | list[str] = Field(description="The text, or a list of texts.")

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(self.q) if isinstance(self.q, list) else (self.q,)

    @property
    def several(self) -> bool:
        """Whether `q` is a list, so that the answer is a list too."""
        return isinstance(self.q, list)


class _TranslationRequest(Fields):
    source: str = Field(description="Code of the language of the text, as in GET /languages, or auto.")
    target: str = Field(description="Code of the language to translate into, as in GET /languages.")
    documents: bool | None = Field(
        None,
        description="Whether lines are read with the lines before them in the text, up to a blank one. "
        "By default, models that were trained with data.context do so.",
    )
    glossary: _Glossary | None = Field(
        None, description="Terms, one per line: source term, tab, target term. In a form, it may be a file."
    )


class FileRequest(_TranslationRequest):
    file: _File = Field(
        description="A text (.txt) or a document (.html, .htm) in UTF-8, in multipart/form-data."
    )


class TextRequest(_TranslationRequest, DetectionRequest):
    format: Literal["text", "html"] = Field("text", description="What the text is.")
    alternatives: int = Field(0, ge=0, description="Number of further translations.")
    n_best: int | None = Field(None, ge=1, description="Number of hypotheses of each line to describe.")
    scores: bool = Field(False, description="Describe the score and the log-probability of each hypothesis.")
    alignments: Literal["words", "pieces"] | None = Field(
        None, description="Describe which words belong together."
    )
    attention: bool = Field(False, description="Describe the attention weights of each hypothesis.")

    @property
    def describes(self) -> bool:
        """Whether the answer has the field `hypotheses`."""
        return self.n_best is not None or self.scores or self.attention or self.alignments is not None

    @model_validator(mode="after")
    def _check_alignments(self) -> "TextRequest":
        if (self.format, self.alignments) == ("html", "pieces"):
            raise Refusal(400, "the field alignments is pieces; with format html it must be words")
        return self


def _explain(error: ValidationError, kind: type[Fields]) -> str:
    """Return what is wrong with the first wrong field."""
    problems = error.errors(include_url=False)
    name, value = str(problems[0]["loc"][0]), problems[0]["input"]
    if problems[0]["type"] == "missing":
        return f"the field {name} is missing: {kind.model_fields[name].description}"
    # One that may be a text or a list has a problem with either.
    rules = dict.fromkeys(problem["msg"] for problem in problems if problem["loc"][0] == name)
    return f"the field {name} is {value!r:.40}: {' or '.join(rules)}"


def read_fields(body: bytes, content_type: str, query: str = "") -> dict[str, Any]:
    """Return the fields of JSON, or of a form and the query of the address, as LibreTranslate does."""
    kind, _, parameters = (part.strip().lower() for part in content_type.partition(";"))
    pairs: Sequence[tuple[str, object]] = ()
    try:
        if kind == JSON:
            fields = from_json(body.decode("utf-8-sig"))  # RFC 8259 allows to ignore a byte order mark
            if not isinstance(fields, dict):
                raise Refusal(400, 'the body is not a JSON object, such as {"q": "..."}')
            return fields
        if kind == FORM:
            pairs = urllib.parse.parse_qsl(
                body.decode(), keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS
            )
        elif kind == PARTS:
            pairs = _read_parts(body, content_type)
        elif body or not query:
            raise Refusal(400, f"the content type is {kind or 'missing'}; send {JSON}, {FORM} or {PARTS}")
    except ValueError as error:
        charset = f" in UTF-8, but with {parameters:.40}" if "charset=" in parameters else ""
        raise Refusal(400, f"the body is not {kind}{charset}: {first_line(error)}") from error
    return _collect(pairs) | _collect(urllib.parse.parse_qsl(query, keep_blank_values=True))


def _collect(pairs: Sequence[tuple[str, object]]) -> dict[str, Any]:
    values: dict[str, list[object]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    return {name: items[0] if len(items) == 1 else items for name, items in values.items()}


def _read_parts(body: bytes, content_type: str) -> list[tuple[str, object]]:
    """Read a form as browsers send it (RFC 7578). Files of other fields than `file` are their text."""
    pairs: list[tuple[str, object]] = []

    def add_field(field: Any) -> None:
        name = field.field_name.decode()
        pairs.append((name, _decode(field.value or b"", name)))

    def add_file(file: Any) -> None:
        name = file.field_name.decode()
        file.file_object.seek(0)
        text = _decode(file.file_object.read(), name)
        file.close()
        pairs.append((name, UploadedFile(file.file_name.decode(), text) if name == "file" else text))

    headers = {"Content-Type": content_type.encode("latin-1")}
    python_multipart.parse_form(headers, io.BytesIO(body), add_field, add_file)
    return pairs


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refusal(400, f"the field {name} is not UTF-8 text: {first_line(error)}") from error
