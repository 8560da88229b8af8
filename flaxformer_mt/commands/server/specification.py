"""The server's interface as an OpenAPI document, which GET /spec answers and GET /docs shows.

The only list of paths and fields; a test compares it with what the server does.
"""

from typing import Any

import flaxformer_mt

_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_SWITCH = {"type": "boolean", "default": False}
_TEXTS = {"oneOf": [_TEXT, {"type": "array", "items": _TEXT}]}

# Field of a request -> its schema and its meaning.
_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "q": (_TEXTS, "The text, or a list of texts. Each line is translated for itself."),
    "source": (_TEXT, "Code of the language of the text, or auto."),
    "target": (_TEXT, "Code of the language to translate into."),
    "format": ({"type": "string", "enum": ["text", "html"], "default": "text"}, "What the text is."),
    "alternatives": (_COUNT, "Number of further translations."),
    "n_best": ({"type": "integer", "minimum": 1}, "Number of hypotheses of each line to describe."),
    "scores": (_SWITCH, "Describe the score and the log-probability of each hypothesis."),
    "alignments": ({"type": "string", "enum": ["words", "pieces"]}, "Describe which words belong together."),
    "attention": (_SWITCH, "Describe the attention weights of each hypothesis."),
    "file": ({"type": "string", "format": "binary"}, "A text (.txt) or a document (.html, .htm) in UTF-8."),
    "api_key": (_TEXT, "The key, where the server needs one."),
}
_FORMS = ("application/json", "application/x-www-form-urlencoded", "multipart/form-data")

# Path -> method, what it does, the fields that must and may be given, and an example of the answer.
_PATHS: dict[str, tuple[str, str, tuple[str, ...], tuple[str, ...], Any]] = {
    "/translate": (
        "post",
        "Translate texts",
        ("q", "source", "target"),
        ("format", "alternatives", "n_best", "scores", "alignments", "attention", "api_key"),
        {"translatedText": "A man reads a book."},
    ),
    "/translate_file": (
        "post",
        "Translate a file",
        ("file", "source", "target"),
        ("api_key",),
        {"translatedFileUrl": "http://127.0.0.1:5000/download_file/0123456789abcdef.en.txt"},
    ),
    "/download_file/{name}": ("get", "Fetch a translated file, as often as it is kept", (), (), None),
    "/detect": (
        "post",
        "Guess the language of a text, among the languages of the server",
        ("q",),
        ("api_key",),
        [{"confidence": 100.0, "language": "de"}],
    ),
    "/languages": (
        "get",
        "List the languages",
        (),
        (),
        [{"code": "de", "name": "German", "targets": ["en"]}],
    ),
    "/frontend/settings": (
        "get",
        "Tell the limits of requests, the models and the version",
        (),
        (),
        {"charLimit": 10000, "models": {"de-en": "runs/a, checkpoint best"}},
    ),
    "/health": ("get", "Tell whether all models run", (), (), {"status": "ok"}),
    "/metrics": ("get", "Counts and durations, for Prometheus", (), (), None),
    "/spec": ("get", "This interface as an OpenAPI document", (), (), None),
}


def make_specification(url: str) -> dict[str, Any]:
    """Return the OpenAPI document of a server at `url`."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "flaxformer_mt",
            "version": flaxformer_mt.__version__,
            "description": "Machine translation, with the interface of LibreTranslate.",
        },
        "servers": [{"url": url.rstrip("/")}],
        "paths": {path: {entry[0]: _describe(path, *entry)} for path, entry in _PATHS.items()},
    }


def _describe(
    path: str, method: str, summary: str, required: tuple[str, ...], optional: tuple[str, ...], example: Any
) -> dict[str, Any]:
    """Return what OpenAPI calls an operation."""
    kind = "application/json" if example is not None or path == "/spec" else "text/plain"
    answer: dict[str, Any] = {"description": "The answer", "content": {kind: {}}}
    if example is not None:
        answer["content"][kind] = {"example": example}
    error = {"description": "What is wrong", "content": {"application/json": {"example": {"error": "..."}}}}
    operation: dict[str, Any] = {"summary": summary, "responses": {"200": answer, "default": error}}
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": _TEXT}]
    if required:
        fields = {name: _FIELDS[name][0] | {"description": _FIELDS[name][1]} for name in required + optional}
        schema = {"type": "object", "required": list(required), "properties": fields}
        forms = _FORMS[-1:] if "file" in required else _FORMS
        operation["requestBody"] = {"required": True, "content": {form: {"schema": schema} for form in forms}}
    return operation
