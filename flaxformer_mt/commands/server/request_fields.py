"""Parses the body of a POST request (JSON or a form) into LibreTranslate's fields and a few others."""

import asyncio
import hmac
import io
import logging
import urllib.parse
from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

import python_multipart
from pydantic import (
    BaseModel,
    Field,
    InstanceOf,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from flaxformer_mt.commands.options import ServeOptions
from flaxformer_mt.errors import first_line

Answer = TypeVar("Answer")
JSON, FORM, PARTS = "application/json", "application/x-www-form-urlencoded", "multipart/form-data"
_MOST_FIELDS = 10_000
# What is wrong with a form is in the answer.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


class UploadedFile(NamedTuple):
    name: str
    text: str


_File = Annotated[InstanceOf[UploadedFile], WithJsonSchema({"type": "string", "format": "binary"})]


class Fields(BaseModel):
    """Fields that all requests have; unknown fields are ignored."""

    api_key: str | None = Field(None, description="The key, where the server needs one.")

    @model_validator(mode="before")
    @classmethod
    def _leave_out_empty(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Remove empty fields: forms send all fields, and clients send null or false for unused ones."""
        return {
            name: value
            for name, value in fields.items()
            if name == "q" or not (value is None or value == "" or (value is False and name != "documents"))
        }

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Self:
        """Return the request with these fields; raise HTTPException if they are invalid."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise HTTPException(400, _explain(error, cls)) from error


class DetectionRequest(Fields):
    q: str | list[str] = Field(description="The text, or a list of texts.")

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(self.q) if isinstance(self.q, list) else (self.q,)

    def check_size(self, most: int, glossary: str | None = None) -> None:
        total = sum(map(len, (*self.texts, glossary or "")))
        if max(total, len(self.texts)) > most:
            what = f"{len(self.texts)} texts{' and the glossary' if glossary else ''}"
            raise HTTPException(413, f"q has {total} characters in {what}; this server takes {most}")


class _TranslationRequest(Fields):
    source: str = Field(description="Code of the language of the text, as in GET /languages, or auto.")
    target: str = Field(description="Code of the language to translate into, as in GET /languages.")
    documents: bool | None = Field(
        None,
        description="Whether the preceding lines of the text, back to a blank line, are context of a line. "
        "By default, models that were trained with data.context do so.",
    )
    glossary: str | None = Field(
        None, description="Terms, one per line: source term, tab, target term. In a form, it may be a file."
    )


class FileRequest(_TranslationRequest):
    file: _File = Field(
        description="A text (.txt) or a document (.html, .htm) in UTF-8, in multipart/form-data."
    )


class TextRequest(_TranslationRequest, DetectionRequest):
    format: Literal["text", "html"] = Field("text", description="Format of the text.")
    alternatives: int = Field(0, ge=0, description="Number of further translations.")
    n_best: int | None = Field(None, ge=1, description="Number of hypotheses per line to describe.")
    scores: bool = Field(False, description="Describe the score and the log-probability of each hypothesis.")
    alignments: Literal["words", "pieces"] | None = Field(
        None, description="Describe the alignment of words, or of subwords (pieces)."
    )
    attention: bool = Field(False, description="Describe the attention weights of each hypothesis.")


def _explain(error: ValidationError, kind: type[Fields]) -> str:
    """Return a message about the first invalid field."""
    problems = error.errors(include_url=False)
    name, value = str(problems[0]["loc"][0]), problems[0]["input"]
    if problems[0]["type"] == "missing":
        return f"the field {name} is missing: {kind.model_fields[name].description}"
    # One that may be a text or a list has a problem with either.
    rules = dict.fromkeys(problem["msg"] for problem in problems if problem["loc"][0] == name)
    return f"the field {name} is {value!r:.40}: {' or '.join(rules)}"


async def read_body(request: Request, options: ServeOptions, keys: Collection[bytes]) -> dict[str, Any]:
    """Return the fields of a request, or refuse a request that is not allowed."""
    # A form of another site's page, which a browser sends without asking.
    if request.headers.get("sec-fetch-site") == "cross-site":
        if not {"*", request.headers.get("origin")} & set(options.cors):
            raise HTTPException(
                403, "a page of another site asks; its origin is none of --cors of this server"
            )
    if (coding := request.headers.get("content-encoding", "identity")) != "identity":
        raise HTTPException(400, f"the Content-Encoding is {coding:.20}; send the body as it is")
    # A character takes at most 12 bytes, as an escape, and the other fields take little.
    body = await _read_bytes(request, 12 * options.max_characters + 65_536, options.timeout)
    fields = read_fields(body, request.headers.get("content-type", ""), request.url.query)
    if keys:
        _check_key(fields.get("api_key"), keys)
    return fields


async def _read_bytes(request: Request, most: int, seconds: float) -> bytes:
    not_read = {"Connection": "close"}  # the rest of the body
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > most:
        raise HTTPException(413, f"the body has {length[:20]} bytes; this server reads {most}", not_read)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    message = f"the body has more than the {most} bytes that this server reads"
                    raise HTTPException(413, message, not_read)
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {seconds:g} seconds", not_read) from None
    return bytes(body)


def _check_key(api_key: object, keys: Collection[bytes]) -> None:
    if api_key is None or api_key == "":
        raise HTTPException(403, "the field api_key is missing: this server needs a key from its operator")
    content = api_key.encode("utf-8", "replace") if isinstance(api_key, str) else b""
    # All keys are compared, in constant time, so that no duration tells how much of a key is right.
    if not sum(hmac.compare_digest(key, content) for key in keys):
        raise HTTPException(403, "the api_key is unknown")


def read_fields(body: bytes, content_type: str, query: str = "") -> dict[str, Any]:
    """Return the fields of a request, from a JSON body or from a form and the URL's query."""
    kind = content_type.partition(";")[0].strip().lower()
    pairs: Sequence[tuple[str, object]] = ()
    try:
        if kind == JSON:
            fields = from_json(body.decode("utf-8-sig"))  # RFC 8259 allows to ignore a byte order mark
            if not isinstance(fields, dict):
                raise HTTPException(400, 'the body is not a JSON object, such as {"q": "..."}')
            return fields
        if kind == FORM:
            pairs = urllib.parse.parse_qsl(
                body.decode(), keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS
            )
        elif kind == PARTS:
            pairs = _read_parts(body, content_type)
        elif body or not query:
            message = f"the content type is {kind or 'missing'}; send {JSON}, {FORM} or {PARTS}"
            raise HTTPException(400, message)
    except ValueError as error:
        raise HTTPException(400, f"the body is not {kind}: {first_line(error)}") from error
    return _collect(pairs) | _collect(urllib.parse.parse_qsl(query, keep_blank_values=True))


def _collect(pairs: Sequence[tuple[str, object]]) -> dict[str, Any]:
    values: dict[str, list[object]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    return {name: items[0] if len(items) == 1 else items for name, items in values.items()}


def _read_parts(body: bytes, content_type: str) -> list[tuple[str, object]]:
    """Read a form as browsers send it (RFC 7578). Files in fields other than `file` are read as text."""
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
        raise HTTPException(400, f"the field {name} is not UTF-8 text: {first_line(error)}") from error


async def answer_in_time(request: Request, work: Awaitable[Answer], seconds: float) -> Answer:
    """Return the result of a coroutine; cancel it when the client disconnects or the time is over."""
    # All of the body has been read: a client can only leave.
    task, left = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, left}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if left.done():
            raise ClientDisconnect
        raise HTTPException(
            504,
            f"no answer within {seconds:g} seconds; a server that was started a moment ago still compiles: "
            "try again, or raise --timeout",
        )
    finally:
        task.cancel()
        left.cancel()
