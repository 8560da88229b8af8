"""The server's interface as an OpenAPI document, which GET /spec answers and GET /docs shows.

A test compares it with what the server does.
"""

from typing import Any

import flaxformer_mt
from flaxformer_mt.commands.server.request_fields import FIELDS, OPTIONS

# Of OpenAPI.
_VERSION = "3.1.0"
_FORMS = ("application/json", "application/x-www-form-urlencoded", "multipart/form-data")

# Path -> what it does, the fields that must be given with POST and those that may (none: the method is GET),
# and an example of the answer, None for text.
_PATHS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], Any]] = {
    "/translate": (
        "Translate texts",
        ("q", "source", "target"),
        (*OPTIONS, "api_key"),
        {"translatedText": "A man reads a book."},
    ),
    "/translate_file": (
        "Translate a file",
        ("file", "source", "target"),
        ("api_key",),
        {"translatedFileUrl": "http://127.0.0.1:5000/download_file/0123456789abcdef.en.txt"},
    ),
    "/download_file/{name}": ("Fetch a translated file, as often as it is kept", (), (), None),
    "/detect": (
        "Guess the language of a text, among the languages of the server",
        ("q",),
        ("api_key",),
        [{"confidence": 100.0, "language": "de"}],
    ),
    "/languages": ("List the languages", (), (), [{"code": "de", "name": "German", "targets": ["en"]}]),
    "/frontend/settings": (
        "Tell the limits of requests, the models and the version",
        (),
        (),
        {"charLimit": 10000, "models": {"de-en": "runs/a, checkpoint best"}},
    ),
    "/health": ("Tell whether all models run", (), (), {"status": "ok"}),
    "/metrics": ("Counts and durations, for Prometheus", (), (), None),
    "/spec": ("This interface as an OpenAPI document", (), (), {"openapi": _VERSION}),
}


def make_specification(url: str) -> dict[str, Any]:
    """Return the OpenAPI document of a server at `url`."""
    return {
        "openapi": _VERSION,
        "info": {
            "title": "flaxformer_mt",
            "version": flaxformer_mt.__version__,
            "description": "Machine translation, with the interface of LibreTranslate.",
        },
        "servers": [{"url": url.rstrip("/")}],
        "paths": {
            path: {"post" if entry[1] else "get": _describe(path, *entry)} for path, entry in _PATHS.items()
        },
    }


def _describe(
    path: str, summary: str, required: tuple[str, ...], optional: tuple[str, ...], example: Any
) -> dict[str, Any]:
    """Return what OpenAPI calls an operation."""
    content = {"text/plain": {}} if example is None else {"application/json": {"example": example}}
    answer = {"description": "The answer", "content": content}
    error = {"description": "What is wrong", "content": {"application/json": {"example": {"error": "..."}}}}
    operation: dict[str, Any] = {"summary": summary, "responses": {"200": answer, "default": error}}
    if "{name}" in path:
        operation["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if required:
        fields = {name: FIELDS[name] for name in required + optional}
        schema = {"type": "object", "required": list(required), "properties": fields}
        forms = _FORMS[-1:] if "file" in required else _FORMS
        operation["requestBody"] = {"required": True, "content": {form: {"schema": schema} for form in forms}}
    return operation
