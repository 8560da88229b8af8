"""The server's interface as an OpenAPI document."""

from typing import Any, NamedTuple

import flaxformer_mt
from flaxformer_mt.commands.server.request_fields import (
    FORM,
    JSON,
    PARTS,
    DetectionRequest,
    Fields,
    FileRequest,
    TextRequest,
)


class _Operation(NamedTuple):
    summary: str
    # Of the answer; None: it is a text.
    example: Any = None
    # The fields of a POST; None: the method is GET.
    fields: type[Fields] | None = None


_OPERATIONS = {
    "/translate": _Operation("Translate texts", {"translatedText": "A man reads a book."}, TextRequest),
    "/translate_file": _Operation(
        "Translate a file",
        {"translatedFileUrl": "http://127.0.0.1:5000/download_file/0123456789abcdef.en.txt"},
        FileRequest,
    ),
    "/download_file/{name}": _Operation("Fetch a translated file, as often as it is kept"),
    "/detect": _Operation(
        "Guess the language of a text, among the languages of the server",
        [{"confidence": 83.1, "language": "de"}, {"confidence": 16.9, "language": "fr"}],
        DetectionRequest,
    ),
    "/languages": _Operation("List the languages", [{"code": "de", "name": "German", "targets": ["en"]}]),
    "/frontend/settings": _Operation(
        "Tell the limits of requests, the models and the version",
        {"charLimit": 10000, "models": {"de-en": "runs/a, checkpoint best"}},
    ),
    "/health": _Operation("Tell whether all models run", {"status": "ok", "ready": True}),
    "/ready": _Operation("As /health; status 503 while it compiles", {"status": "ok", "ready": True}),
    "/metrics": _Operation("Counts and durations, for Prometheus"),
    "/spec": _Operation("This interface as an OpenAPI document", {"openapi": "3.1.0"}),
}


def make_specification(url: str) -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "flaxformer_mt",
            "version": flaxformer_mt.__version__,
            "description": "Machine translation, with the interface of LibreTranslate.",
        },
        "servers": [{"url": url}],
        "paths": {
            path: {"get" if operation.fields is None else "post": _describe(path, operation)}
            for path, operation in _OPERATIONS.items()
        },
    }


def _describe(path: str, operation: _Operation) -> dict[str, Any]:
    content = {"text/plain": {}} if operation.example is None else {JSON: {"example": operation.example}}
    error = {"description": "What is wrong", "content": {JSON: {"example": {"error": "..."}}}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {"200": {"description": "The answer", "content": content}, "default": error},
    }
    if "{name}" in path:
        described["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if operation.fields is not None:
        schema = {"schema": operation.fields.model_json_schema()}
        forms = (PARTS,) if operation.fields is FileRequest else (JSON, FORM, PARTS)
        described["requestBody"] = {"required": True, "content": dict.fromkeys(forms, schema)}
    return described
